"""The disk tier of one rank: its files, two threads that move bytes, and the choice of how."""

import signal
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from zeromp.store.files import MappedFile
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
        Through the page cache, past it, or whichever has been faster: "auto" times one update each
        way (the second and the third), and keeps to the better.
    keep : bool
        Leave the files at the end.
    """

    def __init__(
        self, base: str | Path, job: str, rank: int, num_ranks: int, way: str, keep: bool
    ) -> None:
        if way not in WAYS:
            raise ValueError(f"offload_io={way!r} is unknown: use {', '.join(WAYS)}")
        self.keep = keep
        self.folder = JobFolder(Path(base), job, rank)
        self._files: list[MappedFile] = []
        self._closer = weakref.finalize(self, _close, self.folder, self._files, keep)
        self._about = {"num_ranks": num_ranks, "rank": rank, "job": job}
        self.states = self._open(".h5")
        self.activations: MappedFile | None = None
        self._room = (0, 0)  # offset and bytes for activations
        self.workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="zeromp-disk")
        self.way = way
        self.seconds: dict[str, float] = {}  # of one update, by way
        self._updates = 0
        if way == "direct":
            if not self.states.can_be_direct:
                raise OSError(f"{base}: this file system has no O_DIRECT: use offload_io=cached")
            self.states.direct = True
        before_abort.append(self._closer)
        _clean_on_terminate()

    def _open(self, suffix: str) -> MappedFile:
        self._files.append(MappedFile(self.folder.file(suffix), self._about))
        return self._files[-1]

    def room_for_activations(self, num_bytes: int) -> tuple[MappedFile, int]:
        """File and offset with space for what is kept between forward and backward."""
        if self.activations is not None:
            if self._room[1] >= num_bytes:
                return self.activations, self._room[0]
            self.activations.close()
            self.activations.path.unlink(missing_ok=True)
        self.activations = self._open("-activations.h5")
        _, offset = self.activations.add(
            "activations", num_bytes, np.uint8, {"kind": "activations"}
        )
        self._room = (offset, num_bytes)
        return self.activations, offset

    def start(self, call: Any, *arguments: Any) -> "Future[None]":
        """Let a worker thread do something."""
        return self.workers.submit(call, *arguments)

    # ---- cached or direct ------------------------------------------------------------------------

    def note_update(self, num_bytes: int, seconds: float) -> None:
        """Take in how long an update has taken, and decide how the next one moves its bytes."""
        self._updates += 1
        if self.way != "auto" or not self.states.can_be_direct or num_bytes < WORTH_A_TRIAL:
            return
        if self._updates == 2:
            self.seconds["cached"] = seconds
            self.states.direct = True
        elif self._updates == 3:
            self.seconds["direct"] = seconds
            self.states.direct = self.seconds["direct"] < self.seconds["cached"]

    def close(self) -> None:
        """Remove the files, or leave them where `keep` says so."""
        self.workers.shutdown()
        self._closer()
        if self._closer in before_abort:
            before_abort.remove(self._closer)


def _close(folder: JobFolder, files: list[MappedFile], keep: bool) -> None:
    for file in files:
        file.close()
    folder.close(keep)


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
