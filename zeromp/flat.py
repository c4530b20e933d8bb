"""Layout: where each array lives, in the full buffer of its format and in each rank's shard.

Arrays of one number format lie back to back in one *flat*, unit after unit, without padding:

    full     |   unit 0    |       unit 1        | unit 2 |      n elements in all
    rank 0   | p0 |        | p0    |             | p0|           a shard: the rank's pieces,
    rank 1        | p1|            | p1   |          |p1|        back to back in their order
    rank 2            | p2|               | p2   |      |p2|

Rank r of N owns elements [n*r//N, n*(r+1)//N) of every unit of n elements, at every stage. Most
models have one flat; arrays kept in float32 beside 16-bit ones, and frozen arrays, make more.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.wire import Format, format_of


def cuts(n: int, num_ranks: int) -> tuple[int, ...]:
    """Where n elements are cut for N ranks: N + 1 offsets, the pieces differing by one at most."""
    return tuple(n * r // num_ranks for r in range(num_ranks + 1))


@dataclass(frozen=True)
class Array:
    """One named array of a model.

    Parameters
    ----------
    name, unit : str
        Its name, and the unit in which it is gathered and reduced.
    shape : tuple of int
    format : str
        Format in which it is stored and sent: "float32", "bfloat16" or "float16".
    trainable : bool
        Whether it has a gradient and an optimizer state; if not, it is frozen.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    format: str = "float32"
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Extent:
    """What one array of a holder covers of a flat: all of it, or this rank's shard.

    Parameters
    ----------
    sharded : bool
    size : int
        Elements in all.
    spans : dict of str to slice
        Where the covered part of each unit lies: the unit, or this rank's piece of it.
    own : dict of str to slice
        Where this rank's piece of each unit lies; the same as `spans` in a shard.
    """

    sharded: bool
    size: int
    spans: Mapping[str, slice]
    own: Mapping[str, slice]


@dataclass(frozen=True)
class Flat:
    """All arrays of one format, trainable or frozen, unit after unit.

    Parameters
    ----------
    format : Format
    trainable : bool
    arrays : dict of str to tuple of (Array, int)
        Arrays of each unit with their offset in it, in order.
    counts : dict of str to tuple of int
        Elements of each rank's piece of each unit.
    full, shard : Extent
        For arrays that hold everything, and for those that hold this rank's pieces.
    piece : dict of str to slice
        This rank's piece, as a slice of the unit.
    """

    format: Format
    trainable: bool
    arrays: Mapping[str, tuple[tuple[Array, int], ...]]
    counts: Mapping[str, tuple[int, ...]]
    full: Extent
    shard: Extent
    piece: Mapping[str, slice]

    def size(self, unit: str) -> int:
        """Elements of a unit in this flat."""
        return sum(self.counts[unit])

    @property
    def widest(self) -> int:
        """Elements of the largest unit."""
        return max(sum(counts) for counts in self.counts.values())

    @property
    def widest_piece(self) -> int:
        """Elements of this rank's largest piece."""
        return max(int(piece.stop - piece.start) for piece in self.piece.values())

    @property
    def passing(self) -> Extent:
        """Extent of an array that holds one piece at a time, of whichever unit."""
        spans = {unit: slice(0, p.stop - p.start) for unit, p in self.piece.items()}
        return Extent(True, self.widest_piece, spans, spans)

    def covered(self, extent: Extent, unit: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return the part of a whole unit's values that an array of `extent` holds."""
        return values[self.piece[unit]] if extent.sharded else values

    def views(self, unit: str, buffer: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Named, shaped views of a unit's arrays in a buffer that holds the unit at its start."""
        return {
            array.name: buffer[start : start + array.size].reshape(array.shape)
            for array, start in self.arrays[unit]
        }


@dataclass(frozen=True)
class Layout:
    """Every array of a model, cut for `num_ranks` ranks, as seen by `rank`.

    The one place that knows the cut: the step, saving, loading and export all ask here.

    Attributes
    ----------
    units : tuple of str
    flats : tuple of Flat
        Trainable flats first, so that a flat has the same index in every holder.
    trainable : tuple of Flat
        Flats that have gradients and optimizer states.
    """

    arrays: tuple[Array, ...]
    num_ranks: int
    rank: int
    units: tuple[str, ...] = field(init=False)
    flats: tuple[Flat, ...] = field(init=False)
    trainable: tuple[Flat, ...] = field(init=False)
    _places: Mapping[str, tuple[int, Array, slice]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = [a.name for a in self.arrays]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"array names must be unique; given twice: {', '.join(twice)}")
        kinds = dict.fromkeys((a.format, a.trainable) for a in self.arrays)
        order = sorted(kinds, key=lambda kind: not kind[1])  # trainable flats first
        object.__setattr__(self, "units", tuple(dict.fromkeys(a.unit for a in self.arrays)))
        flats = tuple(self._flat(*kind) for kind in order)
        places = {
            array.name: (index, array, slice(start, start + array.size))
            for index, flat in enumerate(flats)
            for group in flat.arrays.values()
            for array, start in group
        }
        object.__setattr__(self, "flats", flats)
        object.__setattr__(self, "trainable", tuple(f for f in flats if f.trainable))
        object.__setattr__(self, "_places", places)

    def _flat(self, format_name: str, trainable: bool) -> Flat:
        by_unit: dict[str, list[Array]] = {}
        for array in self.arrays:
            if (array.format, array.trainable) == (format_name, trainable):
                by_unit.setdefault(array.unit, []).append(array)
        arrays, counts, piece = {}, {}, {}
        full_spans, full_own, shard_spans = {}, {}, {}
        full_at = shard_at = 0
        for unit, group in by_unit.items():
            starts = np.cumsum([0, *(a.size for a in group)]).tolist()
            arrays[unit] = tuple(zip(group, starts[:-1], strict=True))
            edges = cuts(starts[-1], self.num_ranks)
            counts[unit] = tuple(b - a for a, b in pairwise(edges))
            low, high = edges[self.rank], edges[self.rank + 1]
            piece[unit] = slice(low, high)
            full_spans[unit] = slice(full_at, full_at + starts[-1])
            full_own[unit] = slice(full_at + low, full_at + high)
            shard_spans[unit] = slice(shard_at, shard_at + high - low)
            full_at += starts[-1]
            shard_at += high - low
        return Flat(
            format=format_of(format_name),
            trainable=trainable,
            arrays=arrays,
            counts=counts,
            full=Extent(False, full_at, full_spans, full_own),
            shard=Extent(True, shard_at, shard_spans, shard_spans),
            piece=piece,
        )

    def find(self, name: str) -> tuple[int, Array, slice]:
        """Index of its flat, the array, and its slice of the unit; ValueError for a wrong name."""
        if name not in self._places:
            raise ValueError(f"no array is named {name!r}; the names are {self.some_names()}")
        return self._places[name]

    def some_names(self) -> str:
        """Names for an error message, a long list shortened."""
        names = [a.name for a in self.arrays]
        return ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")

    def table(self) -> str:
        """All that ranks must agree on, as text: one line per array."""
        return "\n".join(
            f"{a.name} {a.shape} {a.format} {'trained' if a.trainable else 'frozen'} in {a.unit}"
            for a in self.arrays
        )


def group_by_size(sizes: Mapping[str, int], limit: int) -> dict[str, str]:
    """Give arrays to units in their order, each unit of `limit` elements at most if it can be.

    An array larger than the limit has a unit of its own.

    Returns
    -------
    dict of str to str
        Unit of each array: "unit0", "unit1", ...
    """
    units: dict[str, str] = {}
    index, used = 0, 0
    for name, size in sizes.items():
        if used and used + size > limit:
            index, used = index + 1, 0
        units[name] = f"unit{index}"
        used += size
    return units


def bucket_slots(
    visits: Iterable[str], sizes: Mapping[str, int], late: int = 0
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Give each unit's bucket a buffer, so that units whose buckets are open together have two.

    A bucket opens at the first visit of its unit in backward and closes at the last; it is free
    when `late` more have closed.

    Parameters
    ----------
    visits : iterable of str
        Units in the order in which backward visits them; a tied unit appears more than once.
    sizes : dict of str to int
        Elements of each unit.
    late : int

    Returns
    -------
    dict of str to int
        Buffer of each unit.
    tuple of int
        Elements of each buffer.
    """
    order = list(visits)
    last = {unit: i for i, unit in enumerate(order)}
    slots: dict[str, int] = {}
    widths: list[int] = []
    free: list[int] = []
    closed: list[int] = []
    for i, unit in enumerate(order):
        if unit not in slots:
            if not free:
                free.append(len(widths))
                widths.append(0)
            slots[unit] = max(free, key=lambda slot: widths[slot])
            free.remove(slots[unit])
            widths[slots[unit]] = max(widths[slots[unit]], sizes.get(unit, 0))
        if last[unit] == i:
            closed.append(slots[unit])
            if len(closed) > late:
                free.append(closed.pop(0))
    return slots, tuple(widths)


def segments(
    flat: Flat, extent: Extent, others: Sequence[Extent], group_of: Mapping[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut what an optimizer's states cover into runs of one parameter group.

    Parameters
    ----------
    flat : Flat
    extent : Extent
        Of the states: full, or a shard.
    others : sequence of Extent
        Of arrays that hold the same elements elsewhere: gradients, parameters.
    group_of : dict of str to int
        Number of each array's parameter group.

    Returns
    -------
    ndarray of int64 of shape (k, 2 + len(others))
        Size of each run, its start in the states, and in each of the others.
    ndarray of int64 of shape (k,)
        Its group.
    """
    runs: list[list[int]] = []
    groups: list[int] = []
    for unit, arrays in flat.arrays.items():
        piece = flat.piece[unit] if extent.sharded else slice(0, flat.size(unit))
        bases = [extent.spans[unit].start]
        bases += [(o.own if extent.sharded else o.spans)[unit].start for o in others]
        for array, start in arrays:
            low = max(start, piece.start)
            high = min(start + array.size, piece.stop)
            if low >= high:
                continue
            places = [base + low - piece.start for base in bases]
            group = group_of[array.name]
            if runs and groups[-1] == group and places == [runs[-1][0] + p for p in runs[-1][1:]]:
                runs[-1][0] += high - low
            else:
                runs.append([high - low, *places])
                groups.append(group)
    table = np.array(runs, np.int64).reshape(len(runs), 2 + len(others))
    return table, np.array(groups, np.int64)
