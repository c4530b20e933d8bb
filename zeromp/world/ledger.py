"""The ledger of what a rank has sent: bytes and messages by section, verb and unit."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

VERBS = ("reduce_scatter", "all_gather", "broadcast", "agree")


class Ledger:
    """Counts the bytes that this rank hands to other ranks; nothing is estimated.

    A collective over N ranks enters what the algorithm must send, once per receiver: for a
    reduce-scatter all pieces but the rank's own, for an all-gather its own piece N - 1 times.
    What an MPI library does on top (trees, pipelining, headers) is its own affair.

    Attributes
    ----------
    sent_bytes, messages : Counter of (section, verb) to int
    unit_bytes : Counter of (section, verb, unit) to int
    seconds : dict of verb to float
        Time spent inside collectives.
    section : str
        Where entries go now: "setup", "train", "evaluate", "inspect" or "checkpoint".
    """

    def __init__(self) -> None:
        self.section = "setup"
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()
        self.unit_bytes: Counter[tuple[str, str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, verb: str, unit: str, num_bytes: int) -> None:
        """Enter one collective."""
        assert verb in VERBS, verb
        self.sent_bytes[self.section, verb] += num_bytes
        self.messages[self.section, verb] += 1
        self.unit_bytes[self.section, verb, unit] += num_bytes

    def sent(self, verb: str, section: str = "train") -> int:
        """Bytes sent so far by a verb."""
        return self.sent_bytes[section, verb]

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Enter what a block sends under another section."""
        before, self.section = self.section, section
        try:
            yield
        finally:
            self.section = before
