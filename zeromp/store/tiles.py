"""The streaming update: tiles of a shard that lies on disk, read ahead and written behind.

    slot 0   read 0 | update 0 | write 0 | read 4 ...
    slot 1     read 1    | update 1 | write 1 | ...
    slot 2         read 2     | update 2 | write 2
    slot 3             read 3      | update 3 ...

Two worker threads move bytes while the caller's kernel runs, so that the disk is never idle and an
update takes as long as the disk needs, in as much memory as the slots have.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.adamw import SIZE, STATE, Arrays
from zeromp.store.disk import Disk
from zeromp.store.files import MappedFile
from zeromp.store.placement import page_up

Tile = tuple[Arrays, NDArray[np.int64], NDArray[np.int64]]
Buffers = dict[int, NDArray[Any]]  # operand -> its tile in memory
Job = tuple[NDArray[np.uint8], Buffers, "Future[None]"]


class Walk:
    """One walk over what an update reads and writes, in tiles of at most `tile` elements."""

    def __init__(
        self,
        arrays: Arrays,
        segments: NDArray[np.int64],
        groups: NDArray[np.int64],
        start: int,
        stop: int,
        tile: int,
    ) -> None:
        self.arrays, self.operands = arrays, arrays.operands()
        self.segments, self.groups = segments, groups
        self.edges = [(low, min(low + tile, stop)) for low in range(start, stop, tile)]

    def tiles(
        self,
        ranges: Mapping[int, tuple[MappedFile, int]],
        slots: Sequence[NDArray[np.uint8]],
        disk: Disk | None,
        before_overwrite: Sequence[Callable[[NDArray[Any]], None]],
    ) -> Iterator[Tile]:
        """Yield tile after tile.

        Parameters
        ----------
        ranges : dict of int to (MappedFile, int)
            Operands that lie on disk: file, and offset of the first element.
        slots : sequence of ndarray
            Buffers, each for one tile of all these operands.
        disk : Disk or None
            Whose threads read and write.
        before_overwrite : sequence of callable
            Told of each array, or part of one, that is about to change.
        """
        self._check(ranges)
        start = time.perf_counter()
        free, reading, writing = deque(slots), deque[Job](), deque[Job]()
        started = 0
        try:
            for low, high in self.edges:
                while ranges and started < len(self.edges) and (free or not reading):
                    assert disk is not None
                    empty = free.popleft() if free else _finish(writing)
                    reading.append(self._read(empty, ranges, disk, *self.edges[started]))
                    started += 1
                slot, buffers = _arrived(reading) if ranges else (None, Buffers())
                table, groups = self._cut(low, high)
                for tell in tuple(before_overwrite):
                    for array in self._overwritten(table, low, high):
                        tell(array)
                yield self._tile(buffers, ranges, table, low), table, groups
                if slot is not None and disk is not None:
                    writing.append(self._write(slot, buffers, ranges, disk, low))
                    while writing and writing[0][2].done():
                        free.append(_finish(writing))
            while writing:
                _finish(writing)
        finally:
            for _, _, future in (*reading, *writing):
                future.exception()  # waits: nothing moves when the walk is over
        if disk is not None and ranges and self.edges:
            moved = sum(self._moved(i) for i in ranges)
            disk.note_update(moved, time.perf_counter() - start)

    def _check(self, ranges: Mapping[int, Any]) -> None:
        """What lies on disk has the layout of the states, so that a tile is one range of it."""
        for i in ranges:
            column = self.operands[i][1]
            assert np.array_equal(self.segments[:, column], self.segments[:, STATE])

    def _moved(self, operand: int) -> int:
        array, _, mode = self.operands[operand]
        return array.itemsize * (self.edges[-1][1] - self.edges[0][0]) * len(mode)

    def _overwritten(self, table: NDArray[np.int64], low: int, high: int) -> Iterator[NDArray[Any]]:
        """Yield the parts of stored arrays that the tile changes."""
        for array, column, mode in self.operands:
            if mode == "rw" and column == STATE:
                yield array[low:high]
            elif mode == "rw":
                for size, start in table[:, [SIZE, column]].tolist():
                    yield array[start : start + size]

    def _read(
        self,
        slot: NDArray[np.uint8],
        ranges: Mapping[int, tuple[MappedFile, int]],
        disk: Disk,
        low: int,
        high: int,
    ) -> Job:
        buffers: Buffers = {}
        moves = []
        at = 0
        for i, (file, offset) in ranges.items():
            array, _, mode = self.operands[i]
            num_bytes = (high - low) * array.itemsize
            buffers[i] = slot[at : at + num_bytes].view(array.dtype)
            at += page_up(num_bytes)
            if "r" in mode:
                moves.append((file.read, offset + low * array.itemsize, buffers[i]))
        return slot, buffers, disk.start(_all, moves)

    def _write(
        self,
        slot: NDArray[np.uint8],
        buffers: Buffers,
        ranges: Mapping[int, tuple[MappedFile, int]],
        disk: Disk,
        low: int,
    ) -> Job:
        moves = []
        for i, (file, offset) in ranges.items():
            array, _, mode = self.operands[i]
            if "w" in mode:
                moves.append((file.write, offset + low * array.itemsize, buffers[i]))
        return slot, buffers, disk.start(_all, moves)

    def _cut(self, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Segments, or the parts of them, between two elements of the states; their groups."""
        starts = self.segments[:, STATE]
        first = np.maximum(starts, low)
        sizes = np.minimum(starts + self.segments[:, SIZE], high) - first
        inside = sizes > 0
        table = self.segments[inside] + (first - starts)[inside, None]
        table[:, SIZE] = sizes[inside]
        return table, self.groups[inside]

    def _tile(
        self, buffers: Buffers, ranges: Mapping[int, Any], table: NDArray[np.int64], low: int
    ) -> Arrays:
        """Arrays of a tile; starts in `table` are made to count from the start of buffers."""
        for column in {self.operands[i][1] for i in ranges}:
            table[:, column] -= low
        found = [buffers.get(i, array) for i, (array, _, _) in enumerate(self.operands)]
        return Arrays.of(found, self.arrays.copy is not None)


def _all(moves: list[tuple[Any, int, NDArray[Any]]]) -> None:
    for move, offset, array in moves:
        move(offset, array)


def _finish(jobs: deque[Job]) -> NDArray[np.uint8]:
    slot, _, future = jobs.popleft()
    future.result()
    return slot


def _arrived(jobs: deque[Job]) -> tuple[NDArray[np.uint8] | None, Buffers]:
    slot, buffers, future = jobs.popleft()
    future.result()
    return slot, buffers
