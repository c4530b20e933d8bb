"""The disk tier of one rank: its files, two threads that move bytes, and the choice of how."""

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from zeromp.store.files import MappedFile, reserve
from zeromp.store.folder import JobFolder
from zeromp.world.errors import before_abort

WAYS = ("auto", "cached", "direct")
WORKERS = 2
WORTH_A_TRIAL = 2**28  # bytes moved by an update below which direct transfers are not tried


class Disk:
    """Arrays of one rank in an HDF5 file, in a folder of the job.

    Parameters
    ----------
    base : path
        Folder on the disk to be used; the job makes one in it.
    job : str
        Name of the job, the same on all its ranks and on no other job's.
    rank, num_ranks : int
    way : {"auto", "cached", "direct"}
        Through the page cache, past it, or whichever has been faster: see `Trial`.
    keep : bool
        Leave the files at the end.
    """

    def __init__(
        self, base: str | Path, job: str, rank: int, num_ranks: int, way: str, keep: bool
    ) -> None:
        if way not in WAYS:
            raise ValueError(f"offload_io={way!r} is unknown: use {', '.join(WAYS)}")
        self.folder = JobFolder(Path(base), job, rank, keep)
        self._closer = weakref.finalize(self, self.folder.close)
        before_abort.append(self.folder.abandon)
        self._files: list[MappedFile] = []
        self._about = {"num_ranks": num_ranks, "rank": rank, "job": job}
        self.states = self._open(".h5")
        self.activations: MappedFile | None = None
        self._room = (0, 0)  # offset and bytes for activations
        self.workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="zeromp-disk")
        self.trial = Trial(way == "auto" and self.states.can_be_direct)
        self.way = way
        if way == "direct":
            if not self.states.can_be_direct:
                raise OSError(f"{base}: this file system has no O_DIRECT: use offload_io=cached")
            self.states.direct = True
        _clean_on_terminate()

    def _open(self, suffix: str) -> MappedFile:
        self._files.append(MappedFile(self.folder.file(suffix), self._about))
        return self._files[-1]

    def room_for_activations(self, num_bytes: int) -> tuple[MappedFile, int]:
        """File and offset with space for what is kept between forward and backward."""
        if self.activations is not None:
            if self._room[1] >= num_bytes:
                return self.activations, self._room[0]
            self._files.remove(self.activations)
            self.activations.close()
            self.activations.path.unlink(missing_ok=True)
            self.activations, self._room = None, (0, 0)
        file = self._open("-activations.h5")
        try:
            _, offset = file.add("activations", num_bytes, np.uint8, {"kind": "activations"})
        except OSError:
            self._files.remove(file)
            file.close()
            file.path.unlink(missing_ok=True)
            raise
        self.activations, self._room = file, (offset, num_bytes)
        return file, offset

    @contextmanager
    def holding_room(self, num_bytes: int) -> Iterator[None]:
        """Hold so much of the disk for the length of a block, to see whether there is room."""
        path = self.folder.file("-room.h5")
        try:
            with path.open("wb") as file:
                reserve(file.fileno(), self.states.path, 0, max(num_bytes, 1))
            yield
        finally:
            path.unlink(missing_ok=True)

    def start(self, call: Any, *arguments: Any) -> "Future[None]":
        """Let a worker thread do something."""
        return self.workers.submit(call, *arguments)

    def note_update(self, num_bytes: int, seconds: float) -> None:
        """Take in how long an update has taken, and decide how the next one moves its bytes."""
        if self.way == "auto":
            self.states.direct = self.trial.next(self.states.direct, num_bytes, seconds)

    def close(self) -> None:
        """Remove the files, or leave them where `keep` says so; may be called again."""
        self.workers.shutdown()
        for file in self._files:
            file.close()
        self._closer()
        with contextlib.suppress(ValueError):
            before_abort.remove(self.folder.abandon)


class Trial:
    """Times updates each way, and keeps to the better one.

    Attributes
    ----------
    rates : dict of bool to float
        Bytes per second, direct or not, as far as tried.
    """

    def __init__(self, open: bool) -> None:
        self.open = open
        self.rates: dict[bool, float] = {}
        self._warm = False
        self._moved, self._seconds = 0, 0.0

    def next(self, direct: bool, num_bytes: int, seconds: float) -> bool:
        """Whether the next update should be direct, given how this one was, and its figures."""
        if not self.open:
            return direct
        self._moved += num_bytes
        self._seconds += seconds
        if self._moved < WORTH_A_TRIAL:
            return direct
        rate, self._moved, self._seconds = self._moved / self._seconds, 0, 0.0
        if not self._warm:  # the first update draws memory and fills the cache
            self._warm = True
            return direct
        self.rates[direct] = rate
        if len(self.rates) < 2:
            return not direct
        self.open = False
        return self.rates[True] > self.rates[False]


def _clean_on_terminate() -> None:
    """Let SIGTERM end this process like `sys.exit`, so that files are removed.

    Only where nobody else has a say about the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:

        def leave(number: int, _frame: FrameType | None) -> None:
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, leave)
