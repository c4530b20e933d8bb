"""Signals: a request to stop, noted by one rank, on which all ranks agree between two steps.

Batch systems send a signal some time before they kill a job, some of them to one process only, and
at different times. A rank that left at once would leave the others waiting.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from zeromp.world import World

EXIT_CODE = 75  # EX_TEMPFAIL of BSD's sysexits.h: "a temporary failure, indicating ... retry"
STOPPING = (signal.SIGTERM, signal.SIGUSR1)  # what batch systems send before they kill
REPEAT_SECONDS = 1.0  # a launcher and a batch system may both deliver one request


class Interrupt:
    """Notes signals while it is entered; all ranks must ask whether one has come.

    The first signal, of any rank, is a request to stop at the next boundary between steps. The
    same signal once more, at least a second later, ends the rank at once, as if nobody had caught
    it. After all ranks have agreed to stop signals are ignored, so that the save goes on.

    Parameters
    ----------
    world : World
    signals : sequence of int
        SIGTERM and SIGUSR1, which batch systems send, by default. In a thread other than the
        main one, where Python allows no handlers, call `note` instead.

    Examples
    --------
    >>> import zeromp as zm
    >>> with zm.Interrupt(zm.alone()) as stop:
    ...     for step in range(100):
    ...         if stop.requested():
    ...             break  # on all ranks
    """

    def __init__(self, world: World, signals: Sequence[int] = STOPPING) -> None:
        self.world = world
        self.signals = tuple(signals)
        self.agreed: signal.Signals | None = None
        self._noted: dict[int, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self.note) for number in self.signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Note a signal: what the handler does."""
        if self.agreed is not None:
            return
        now = time.monotonic()
        if now - self._noted.setdefault(number, now) >= REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def requested(self) -> signal.Signals | None:
        """Agree on whether to stop: a signal that some rank has noted, or None. On all ranks."""
        if self.agreed is None:
            with self.world.ledger.within("setup"):
                number = int(self.world.agree([max(self._noted, default=0)]).max())
            self.agreed = signal.Signals(number) if number else None
        return self.agreed
