"""Compare: which arrays of two checkpoints, or files of weights, differ, and by how much."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zeromp import weights
from zeromp.checkpoint import Broken, Checkpoint, find
from zeromp.wire import F32

TILE = 2**18  # elements compared at a time

Key = tuple[str, str]  # "weights" or a kind of moment, and the array's name


@dataclass(frozen=True)
class Side:
    """One of the two.

    Parameters
    ----------
    path : Path
    shapes : dict of Key to tuple of int
        What it has.
    read : callable
        Gives the float32 values of a key.
    record : dict
        Of a checkpoint; empty for a file.
    """

    path: Path
    shapes: Mapping[Key, tuple[int, ...]]
    read: Callable[[Key], F32]
    record: Mapping[str, Any]

    def size(self, key: Key) -> int:
        """Elements of an array; 0 if it is not there."""
        return math.prod(self.shapes[key]) if key in self.shapes else 0


@contextmanager
def side(path: Path) -> Iterator[Side]:
    """Open a checkpoint, the newest of a folder of them, or a file of weights."""
    if path.is_file():
        found = weights.load(path)
        shapes = {("weights", name): stored.shape for name, stored in found.stored.items()}
        yield Side(path, shapes, lambda key: found[key[1]], {})
        return
    with Checkpoint(find(path)) as checkpoint:
        if problems := checkpoint.check_files():
            raise Broken(problems[0])
        shapes = {}
        for array in checkpoint.arrays:
            names = [a for a, owner in checkpoint.aliases.items() if owner == array.name]
            for name in (array.name, *names):
                shapes["weights", name] = array.shape
            for kind in checkpoint.kinds(array.name)[1:]:
                shapes[kind, array.name] = array.shape

        def read(key: Key) -> F32:
            kind, name = key
            return checkpoint.read(checkpoint.kinds(name)[0] if kind == "weights" else kind, name)

        yield Side(checkpoint.path, shapes, read, checkpoint.record)


def common(a: Side, b: Side) -> list[Key]:
    """All arrays of either, of the kinds that both have."""
    kinds = {kind for kind, _ in a.shapes} & {kind for kind, _ in b.shapes}
    return [key for key in {**a.shapes, **b.shapes} if key[0] in kinds]


def rows(a: Side, b: Side, key: Key) -> Iterator[list[str]]:
    """Yield one row of a table if an array differs in any bit: what, how much, how much by size."""
    kind, name = key
    if key not in a.shapes or key not in b.shapes:
        yield [name, kind, f"only in {'A' if key in a.shapes else 'B'}", "", ""]
        return
    if a.shapes[key] != b.shapes[key]:
        yield [name, kind, f"shape {a.shapes[key]} in A, {b.shapes[key]} in B", "", ""]
        return
    x, y = (one.read(key).reshape(-1) for one in (a, b))
    differing, gap, largest = 0, 0.0, 0.0
    for start in range(0, x.size, TILE):
        xs, ys = x[start : start + TILE], y[start : start + TILE]
        differing += int(np.count_nonzero(xs.view(np.int32) != ys.view(np.int32)))
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, and shown as such
            gap = np.maximum(gap, np.abs(xs.astype(np.float64) - ys).max())
        largest = np.maximum(largest, max(np.abs(xs).max(), np.abs(ys).max()))
    if differing:
        by_size = gap / largest if largest else 0.0
        count = f"{differing:,} of {x.size:,} elements"
        yield [name, kind, count, f"{gap:.3g}", f"{by_size:.3g}"]
