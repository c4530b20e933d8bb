"""The ledger of bytes that a rank holds on each tier, and of bytes that cross between tiers."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeromp.store.placement import KINDS, TIERS, crossings


class OverBudget(MemoryError):
    """An array does not fit into the device's budget; says who holds what."""


class Held:
    """Bytes on one tier.

    Attributes
    ----------
    held, peak : Counter of str to int
        Bytes held now, and at most so far, of each kind in `KINDS`.
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()


class Ledger:
    """Counts bytes by tier and kind.

    Parameters
    ----------
    budget : int or None
        Bytes that this rank may hold on the device; None sets no limit.
    section : callable
        Names the part of the run under which crossings are entered: "setup", "train", ...

    Attributes
    ----------
    tiers : dict of str to Held
    moved : Counter of (section, kind, source, target) to int
        Bytes that have crossed from one tier to the next.
    """

    def __init__(self, budget: int | None, section: Callable[[], str]) -> None:
        self.budget, self._section = budget, section
        self.tiers = {tier: Held() for tier in TIERS}
        self.moved: Counter[tuple[str, str, str, str]] = Counter()

    def enter(self, kind: str, num_bytes: int, tier: str = "device") -> None:
        """Enter bytes that someone is about to hold; OverBudget if they do not fit."""
        self.check(kind, num_bytes, tier)
        account = self.tiers[tier]
        account.held[kind] += num_bytes
        account.peak[kind] = max(account.peak[kind], account.held[kind])

    def check(self, kind: str, num_bytes: int, tier: str = "device") -> None:
        """Raise OverBudget, with who holds what, unless that many more bytes fit."""
        assert kind in KINDS, kind
        by_kind = self.tiers["device"].held
        held = by_kind.total()
        if tier == "device" and self.budget is not None and held + num_bytes > self.budget:
            parts = [f"{kind} {size:,}" for kind, size in by_kind.items() if size]
            raise OverBudget(
                f"{num_bytes:,} bytes of {kind} do not fit: held are "
                f"{', '.join(parts) or 'none'} ({held:,} bytes) of a budget of "
                f"{self.budget:,} bytes. Climb to a higher stage, offload, use more ranks, "
                "recompute activations, or take a smaller micro-batch or model."
            )

    def leave(self, kind: str, num_bytes: int, tier: str = "device") -> None:
        """Take out bytes that were entered."""
        held = self.tiers[tier].held
        assert held[kind] >= num_bytes, (kind, held[kind], num_bytes)
        held[kind] -= num_bytes

    @contextmanager
    def holding(self, kind: str, num_bytes: int, tier: str = "device") -> Iterator[None]:
        """Enter bytes for the duration of a block."""
        self.enter(kind, num_bytes, tier)
        try:
            yield
        finally:
            self.leave(kind, num_bytes, tier)

    def cross(self, kind: str, num_bytes: int, source: str, target: str) -> None:
        """Enter bytes that move from one tier to another, over each boundary on their way."""
        for low, high in crossings(source, target):
            self.moved[self._section(), kind, low, high] += num_bytes
