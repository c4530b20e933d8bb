"""The guard: a job whose ranks can no longer all arrive ends within seconds, with the reason.

MPI has no such thing. When one rank leaves Python by an exception, the others wait for it in a
collective for ever, and it waits for them in MPI_Finalize. Three ends are covered:

- *An exception that nobody catches*, KeyboardInterrupt among them, prints rank and traceback and
  aborts the job. An error that all ranks raise alike is printed once, by rank 0, without abort.
- *A rank that leaves early*, by ``sys.exit`` or by the end of its script, while another waits for
  it in a collective. Every rank keeps the number of collectives it has entered in a window that
  the others can read; a rank at its exit looks whether one has entered a collective that it will
  never enter, which can't complete, and only then aborts.
- *A rank that waits too long* in one collective, by a time limit.
"""

import atexit
import contextlib
import sys
import threading
import time
import traceback
from types import TracebackType

import numpy as np
from mpi4py import MPI

from zeromp.world.errors import before_abort, guard_by, when_all_have_ended

RECORD_BYTES = 256  # int64 number of collectives entered, then the name of the present one
POLL_SECONDS = 0.2


class Guard:
    """Watches one communicator from the inside; see the module.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Its ranks are guarded; duplicated.
    timeout : float
        Seconds that a rank may wait in one collective.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.timeout = timeout
        self.entered = 0
        self.since = 0.0  # when the present collective was entered; 0 outside
        self.window = MPI.Win.Allocate(RECORD_BYTES, 1, comm=self.comm)
        self.record = np.asarray(self.window.tomemory())
        self.record[:] = 0

    def announce(self, what: str) -> None:
        """Note that this rank enters a collective, or with "" that it has left it."""
        if not what:
            self.since = 0.0
            self.record[8] = 0
            return
        self.entered += 1
        text = what.encode()[: RECORD_BYTES - 9] + b"\0"
        self.record[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        self.record[:8].view(np.int64)[0] = self.entered
        self.since = time.monotonic()

    def install(self) -> None:
        """Take over the exception hook and the exit of this process, and start the watch."""
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)
        guard_by(self)
        if self.size > 1:
            threading.Thread(target=self._watch, name="zeromp-guard", daemon=True).start()

    def abort(self, message: str, code: int = 1) -> None:
        """Print a message with this rank's number and end all ranks."""
        sys.stdout.flush()
        print(f"zeromp: rank {self.rank} of {self.size}: {message}", file=sys.stderr, flush=True)
        for clean in list(before_abort):
            with contextlib.suppress(Exception):
                clean()
        self.comm.Abort(code)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if getattr(error, "on_all_ranks", False):
            if self.rank == 0:
                print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        if self.size == 1:
            print(text, file=sys.stderr, end="", flush=True)
            return
        self.abort(f"uncaught {kind.__name__}, ending the job\n{text}")

    def _on_exit(self) -> None:
        """Wait for the other ranks' exit; abort if one waits for what this rank never does."""
        self.since = 0.0
        arrived = self.comm.Ibarrier()
        while not arrived.Test():
            for peer, entered, what in self._peers():
                if entered > self.entered and what:
                    self.abort(
                        f"has left while rank {peer} waits in {what}; this, and all that "
                        "communicates (backward, step, full, evaluate, save, ...), must be called "
                        "on all ranks"
                    )
            time.sleep(POLL_SECONDS)
        for finish in when_all_have_ended:
            finish()
        self.window.Free()  # waits for all, and answers those that still look into this window

    def _peers(self) -> list[tuple[int, int, str]]:
        """Rank, collectives entered, and name of the present one, of every other rank."""
        found = []
        record = np.empty(RECORD_BYTES, np.uint8)
        for peer in range(self.size):
            if peer != self.rank:
                self.window.Lock(peer, MPI.LOCK_SHARED)
                self.window.Get(record, peer)
                self.window.Unlock(peer)
                what = record[8:].tobytes().split(b"\0")[0].decode(errors="replace")
                found.append((peer, int(record[:8].view(np.int64)[0]), what))
        return found

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 4))
            since = self.since
            if since and time.monotonic() - since > self.timeout:
                what = self.record[8:].tobytes().split(b"\0")[0].decode(errors="replace")
                self.abort(
                    f"has waited {self.timeout:g} s in {what} (its collective number "
                    f"{self.entered}), which must be called on all ranks. If a step may take that "
                    "long, raise ZEROMP_TIMEOUT (seconds)."
                )
