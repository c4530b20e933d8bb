"""Memory of a node: arrays that the ranks of one node can read, or hold together.

An MPI window is made by all ranks of the node together, and none of them can free it alone. An
array may die on one rank long before its neighbour's twin does. So windows are freed, or drawn
upon again, when the next array is drawn: ranks then tell one another whose arrays are gone.
"""

import atexit
import bisect
import shutil
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from zeromp.world.errors import alike, guarded, when_all_have_ended

CHUNK_BYTES = 2**20  # arrays up to a quarter of it share windows
ALIGN = 64
SHM = Path("/dev/shm")
MOST_TOLD = 62  # windows whose end ranks tell one another at a time, one bit each


_made: list[MPI.Win] = []  # all windows that are not freed, in the order in which they were made


def _free(win: MPI.Win) -> None:
    win.Unlock_all()
    win.Free()


def free_all() -> None:
    """Free all windows, when all ranks have come to their end.

    MPI_Finalize would free them, but Open MPI in an order of its own on each rank, and each window
    waits for all of its ranks: with windows of several communicators, for ever.
    """
    while _made:
        _free(_made.pop(0))


when_all_have_ended.append(free_all)


@atexit.register
def _free_without_guard() -> None:
    if not MPI.Is_finalized() and not guarded():
        free_all()


@dataclass
class Window:
    """Memory of all ranks of a node, each of which sees it at addresses of its own.

    Attributes
    ----------
    number : int
        The same on all ranks of the node.
    bases : ndarray of int64, shape (L,)
        Address, in this process, of each rank's segment.
    segment : ndarray of uint8
        What this rank draws arrays from.
    common : bool
        Whether all ranks have one segment, and the same arrays in it.
    used, live : int
        Bytes drawn, and arrays of this rank that are still there.
    """

    number: int
    win: MPI.Win
    bases: NDArray[np.int64]
    segment: NDArray[np.uint8]
    common: bool
    used: int = 0
    live: int = field(default=0)

    def draw(self, size: int, reach: int) -> NDArray[np.uint8]:
        """Return the next bytes, zeroed; `reach` is the most that any rank draws here."""
        array = np.frombuffer(self.segment.data, np.uint8, size, self.used)
        self.used += -(-reach // ALIGN) * ALIGN
        self.live += 1
        weakref.finalize(array, self._left).atexit = False
        return array

    def _left(self) -> None:
        self.live -= 1


class NodeMemory:
    """Draws arrays from windows of a node, and finds the window of an array.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks of the node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.windows: dict[int, Window] = {}
        self.made = 0
        self._starts: list[int] = []  # addresses at which windows begin here, sorted,
        self._sorted: list[Window] = []  # and those windows

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Zeroed array of this rank's own that its neighbours can read. Call on all ranks.

        Plain memory where the node has no room for shared memory: all works there too.
        """
        return self._draw(size, np.dtype(dtype), common=False)

    def common(self, size: int, dtype: Any) -> NDArray[Any]:
        """Zeroed array that is the same memory on all ranks. Call on all, with the same size."""
        return self._draw(size, np.dtype(dtype), common=True)

    def find(self, array: NDArray[Any]) -> tuple[Window | None, int]:
        """Window in which an array lies, and its offset in this rank's segment."""
        address = array.__array_interface__["data"][0]
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and array.size:
            window = self._sorted[at]
            offset = address - self._starts[at]
            if offset + array.nbytes <= window.segment.size:
                return window, offset
        return None, 0

    def make(self, num_bytes: int, common: bool) -> Window:
        """Make a window in which each rank has so many bytes of its own, or all have them once."""
        info = MPI.Info.Create()
        info["alloc_shared_noncontig"] = "true"
        own = num_bytes if not common or self.rank == 0 else 0
        win = MPI.Win.Allocate_shared(own, 1, info, self.comm)
        info.Free()
        win.Lock_all(MPI.MODE_NOCHECK)
        segments = [win.Shared_query(0 if common else rank)[0] for rank in range(self.size)]
        bases = np.array([segment.address for segment in segments], np.int64)
        segment = np.asarray(segments[self.rank])[:num_bytes]
        window = Window(self.made, win, bases, segment, common)
        self.windows[self.made] = window
        _made.append(win)
        self.made += 1
        self._sort()
        return window

    # ---- inside ----------------------------------------------------------------------------------

    def _draw(self, size: int, dtype: np.dtype[Any], common: bool) -> NDArray[Any]:
        num_bytes = size * dtype.itemsize
        sizes = self._tell(num_bytes)
        reach = max(sizes)
        if reach == 0:
            return np.zeros(0, dtype)
        small = 4 * reach <= CHUNK_BYTES
        fitting = (
            w
            for w in self._drawn_upon()
            if small and w.common == common and w.used + reach <= w.segment.size
        )
        window = next(fitting, None)
        if window is None:
            need = max(reach, CHUNK_BYTES) if small else reach
            if not self._has_room(need * (1 if common else self.size)):
                return self._without_room(num_bytes, dtype, common)
            window = self.make(need, common)
        array = window.draw(num_bytes, reach)
        mine = slice(0, num_bytes)
        if common:  # each rank touches its share first, so that it lies in this rank's memory
            mine = slice(
                num_bytes * self.rank // self.size, num_bytes * (self.rank + 1) // self.size
            )
        array[mine] = 0
        if common:
            self.comm.Barrier()
        return array.view(dtype)

    def _tell(self, num_bytes: int) -> list[int]:
        """Exchange sizes with the neighbours; free windows, or start anew, that none uses."""
        told = self._drawn_upon()[:MOST_TOLD]
        dead = sum(1 << i for i, window in enumerate(told) if window.live == 0)
        table = np.empty((self.size, 2), np.int64)
        self.comm.Allgather(np.array([num_bytes, dead], np.int64), table)
        gone = int(np.bitwise_and.reduce(table[:, 1]))
        for i, window in enumerate(told):
            if gone >> i & 1:
                _made.remove(window.win)
                _free(window.win)
                del self.windows[window.number]
        if gone:
            self._sort()
        return [int(n) for n in table[:, 0]]

    def _drawn_upon(self) -> list[Window]:
        return list(self.windows.values())[1:]  # the first is the transport's own

    def _sort(self) -> None:
        own = sorted((int(w.bases[self.rank]), w.number) for w in self.windows.values())
        self._starts = [start for start, _ in own]
        self._sorted = [self.windows[number] for _, number in own]

    def _has_room(self, num_bytes: int) -> bool:
        """Whether the node's shared memory has room; all ranks get rank 0's answer.

        Linux gives out more than there is, and kills who touches it.
        """
        answer = np.ones(1, np.int8)
        if self.rank == 0 and SHM.is_dir():
            answer[0] = shutil.disk_usage(SHM).free > num_bytes + num_bytes // 8
        self.comm.Bcast(answer, 0)
        return bool(answer[0])

    def _without_room(self, num_bytes: int, dtype: np.dtype[Any], common: bool) -> NDArray[Any]:
        text = (
            f"shared memory of this node has no room for {num_bytes:,} bytes"
            f"{'' if common else f' on each of {self.size} ranks'}: enlarge {SHM} (docker run "
            "--shm-size=..., or mount -o remount,size=...)"
        )
        if common:
            raise alike(MemoryError(f"{text}, or let each rank hold its own"))
        if self.rank == 0:
            text += "; arrays are private meanwhile, and copied once more on their way"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        return np.zeros(num_bytes // dtype.itemsize, dtype)
