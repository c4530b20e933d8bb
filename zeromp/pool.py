"""Buffers that are used again: a step allocates nothing large after the first.

Fresh memory is slow: the operating system zeroes each page when it is first touched, which costs as
much as several passes over it. So a `Pool` keeps what has been returned to it and hands it out
again. Nothing has to be returned by hand: an array goes back when nobody refers to it any more,
views included, so that a buffer in use can't be given away.
"""

import math
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
_LINE = 64  # bytes: an array starts where a cache line and the widest vector do


class Pool:
    """Hands out float32 arrays, and takes them back by itself.

    Parameters
    ----------
    poison : bool
        Fill with NaN what comes back, to find out who reads it.
    """

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison
        self.free: defaultdict[int, list[F32]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...]) -> F32:
        """Return an array with arbitrary values."""
        size = math.prod(shape)
        free = self.free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = aligned(size)
        return np.asarray(_Lease(memory, free, self.poison)).reshape(shape)


class _Lease:
    """What an array from a pool, and every view of it, keeps alive."""

    def __init__(self, memory: F32, free: list[F32], poison: bool) -> None:
        self.memory, self.free, self.poison = memory, free, poison
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        if self.poison:
            self.memory.fill(np.nan)
        self.free.append(self.memory)


def aligned(size: int) -> F32:
    """Return a new array that starts at a multiple of 64 bytes."""
    step = _LINE // 4
    memory = np.empty(size + step - 1, np.float32)
    start = -memory.ctypes.data // 4 % step
    return memory[start : start + size]


def fresh(shape: tuple[int, ...]) -> F32:
    """Return a new array: what layers use where nobody owns a pool."""
    return np.empty(shape, np.float32)
