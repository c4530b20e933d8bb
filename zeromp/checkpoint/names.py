"""Names in a master file: a path for each array, and an array's flat range as boxes."""

import math
from collections.abc import Iterable

RESERVED = ("state", "zeromp")  # groups of ours at the root

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and count in each dimension


def paths(names: Iterable[str]) -> dict[str, str]:
    """Give each array a path in an HDF5 file: dots part groups.

    ``blocks.0.w`` lies at ``blocks/0/w``. A name that would meet another one, or a group of ours,
    has underscores after its first part: beside ``a``, an array ``a.b`` lies at ``a_/b``.
    """
    found: dict[str, str] = {}
    taken: set[str] = set(RESERVED)
    groups: set[str] = set()
    for name in names:
        parts = [part or "_" for part in name.replace("\0", "_").replace(".", "/").split("/")]
        while True:
            path = "/".join(parts)
            above = {"/".join(parts[:i]) for i in range(1, len(parts))}
            if path not in taken | groups and not above & taken:
                break
            parts[0] += "_"
        found[name] = path
        taken.add(path)
        groups |= above
    return found


def boxes(shape: tuple[int, ...], low: int, high: int) -> list[Box]:
    """Cut elements `low` to `high` of an array, in C order, into boxes: at most 2 ndim - 1.

    A range begins within a row, goes on through whole rows, and ends within one; what is within a
    row is such a range of the row.
    """
    if low >= high:
        return []
    if len(shape) == 1:
        return [((low,), (high - low,))]
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # all within one row
        return [_in_row(last, box) for box in boxes(shape[1:], low - last * row, high - last * row)]
    found: list[Box] = []
    if low % row:
        found += [_in_row(first - 1, box) for box in boxes(shape[1:], low % row, row)]
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        found.append(((first, *zeros), (last - first, *shape[1:])))
    found += [_in_row(last, box) for box in boxes(shape[1:], 0, high - last * row)]
    return found


def _in_row(index: int, box: Box) -> Box:
    start, count = box
    return (index, *start), (1, *count)
