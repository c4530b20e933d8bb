"""Parts of arrays: what a tile holds of a whole array, how it is drawn, cut and put back."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zeromp.wire import F32

_SLAB = 2**18  # elements drawn at a time

Index = tuple[slice, ...]


def ranges(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """Cut 0 to size - 1 into ranges [start, stop) as even as can be, none of them empty."""
    count = min(count, size)
    return tuple((size * i // count, size * (i + 1) // count) for i in range(count))


@dataclass(frozen=True)
class Part:
    """What a tile holds of an array: runs of indices along one axis, side by side.

    Parameters
    ----------
    name : str
        Of the whole array.
    whole : tuple of int
        Its shape.
    axis : {0, 1}
    runs : tuple of (int, int)
        Start and stop of each run, in rising order.
    """

    name: str
    whole: tuple[int, ...]
    axis: int
    runs: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        size = sum(stop - start for start, stop in self.runs)
        return (*self.whole[: self.axis], size, *self.whole[self.axis + 1 :])

    def cut(self, whole: F32) -> F32:
        """Copy the part out of the whole array."""
        part = np.empty(self.shape, np.float32)
        for there, here in self._places(0, self.whole[0]):
            part[here] = whole[there]
        return part

    def put(self, part: F32, whole: F32) -> None:
        """Write the part to its places in the whole array."""
        for there, here in self._places(0, self.whole[0]):
            whole[there] = part[here]

    def _places(self, first: int, stop: int) -> Iterator[tuple[Index, Index]]:
        """Where runs lie in rows `first` to `stop` of the whole, counted from `first`, and here."""
        at = 0
        for start, end in self.runs:
            if self.axis:
                yield np.s_[: stop - first, start:end], np.s_[first:stop, at : at + end - start]
            elif (low := max(start, first)) < (high := min(end, stop)):
                here = at + low - start
                yield np.s_[low - first : high - first,], np.s_[here : here + high - low,]
            at += end - start

    def draw(self, rng: np.random.Generator, std: float) -> F32:
        """Draw the whole array, normal with a standard deviation, and keep the part.

        A few rows at a time, so that the whole never lies in memory.
        """
        part = np.empty(self.shape, np.float32)
        rows = max(1, _SLAB // math.prod(self.whole[1:]))
        for first in range(0, self.whole[0], rows):
            stop = min(first + rows, self.whole[0])
            slab = rng.standard_normal((stop - first, *self.whole[1:]), np.float32)
            for there, here in self._places(first, stop):
                part[here] = slab[there] * np.float32(std)
        return part
