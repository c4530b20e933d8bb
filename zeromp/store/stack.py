"""Where recomputation puts the inputs of units: on the device, on the host, or on disk."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.store.disk import Disk
from zeromp.store.placement import page_up


@dataclass
class Kept:
    """An array that has been put away."""

    num_bytes: int
    array: NDArray[Any] | None  # in memory; None while it is on disk
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0
    read: "Future[None] | None" = None


class Stack:
    """Takes arrays in, and gives them back in reverse order, each read from disk ahead of need.

    Parameters
    ----------
    tier : str
    sizes : sequence of int
        Bytes of the arrays to come, for which space is reserved on disk.
    disk : Disk or None
    cross : callable
        Enters bytes that cross between tiers: ``cross(kind, num_bytes, source, target)``.
    memory : callable or None
        ``memory(num_bytes)`` draws host memory that is bound to a NUMA node; None takes arrays as
        they come, since to the host all memory is alike.

    Attributes
    ----------
    num_bytes : int
        Held on the tier; 0 on the device, where the arrays themselves are counted.
    """

    def __init__(
        self,
        tier: str,
        sizes: Sequence[int],
        disk: Disk | None,
        cross: Callable[[str, int, str, str], None],
        memory: Callable[[int], NDArray[np.uint8]] | None = None,
    ) -> None:
        self._memory = memory if tier == "host" else None
        self.tier, self.num_bytes, self._cross = tier, 0, cross
        self._kept: list[Kept] = []
        self._disk, self._file, self._at = disk, None, 0
        if tier == "disk" and sizes:
            assert disk is not None
            self._file, self._at = disk.room_for_activations(sum(page_up(n) for n in sizes))

    def put(self, array: NDArray[Any]) -> Any:
        """Put an array away; returns what `take` wants back."""
        if self.tier == "device":
            return array
        self.num_bytes += array.nbytes
        self._cross("activations", array.nbytes, "device", self.tier)
        kept = Kept(array.nbytes, array, array.shape, array.dtype, self._at)
        if self._file is not None:
            self._file.write(self._at, np.ascontiguousarray(array))
            self._at += page_up(array.nbytes)
            kept.array = None
        elif self._memory is not None:
            kept.array = self._memory(array.nbytes).view(array.dtype).reshape(array.shape)
            kept.array[...] = array
        self._kept.append(kept)
        return kept

    def take(self, kept: Any) -> Any:
        """Give back the array that was put last; starts to read the one before."""
        if self.tier == "device":
            return kept
        last = self._kept.pop()
        assert kept is last, "activations come back in reverse order"
        self._cross("activations", kept.num_bytes, self.tier, "device")
        if self._file is not None:
            reading = self._start(kept)
            if self._kept:
                self._start(self._kept[-1])
            reading.result()
        array, kept.array = kept.array, None
        return array

    def _start(self, kept: Kept) -> "Future[None]":
        if kept.read is None:
            assert self._disk is not None and self._file is not None
            kept.array = np.empty(kept.shape, kept.dtype)
            kept.read = self._disk.start(self._file.read, kept.offset, kept.array)
        return kept.read
