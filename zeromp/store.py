"""Where arrays live, and the ledger of what is held: memory, within an optional budget."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("parameters", "gradients", "master", "m", "v", "buffers", "activations")
SENDABLE = ("parameters", "gradients", "buffers")


class OverBudget(MemoryError):
    """An array does not fit into the device's budget; says who holds what."""


class Store:
    """Hands out arrays and counts their bytes by kind.

    Parameters
    ----------
    budget : int or None
        Bytes that this rank may hold; None sets no limit.
    sendable : callable
        Returns zeroed memory, ``sendable(size, dtype)``, for what is sent to other ranks or made of
        what they send; a collective, perhaps.

    Attributes
    ----------
    held, peak : Counter of str to int
        Bytes held now, and at most so far, of each kind in `KINDS`.
    """

    def __init__(
        self, budget: int | None = None, sendable: Callable[[int, Any], NDArray[Any]] = np.zeros
    ) -> None:
        self.budget = budget
        self.sendable = sendable
        self.held: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def empty(self, kind: str, size: int, dtype: Any) -> NDArray[Any]:
        """Return a new zeroed array of `size` elements, entered in the ledger.

        Raises
        ------
        OverBudget
            If it does not fit; nothing is allocated then.
        """
        self.enter(kind, size * np.dtype(dtype).itemsize)
        return self.sendable(size, dtype) if kind in SENDABLE else np.zeros(size, dtype)

    def enter(self, kind: str, num_bytes: int) -> None:
        """Enter bytes that someone is about to hold; OverBudget if they do not fit."""
        self.check(kind, num_bytes)
        self.held[kind] += num_bytes
        self.peak[kind] = max(self.peak[kind], self.held[kind])

    def check(self, kind: str, num_bytes: int) -> None:
        """Raise OverBudget, with who holds what, unless that many more bytes fit."""
        assert kind in KINDS, kind
        if self.budget is not None and sum(self.held.values()) + num_bytes > self.budget:
            raise OverBudget(
                f"{num_bytes:,} bytes of {kind} do not fit: {self._account()} of a budget of "
                f"{self.budget:,} bytes. Climb to a higher stage, use more ranks, recompute "
                "activations, or take a smaller micro-batch or model."
            )

    def read(self, view: NDArray[Any], into: NDArray[Any]) -> None:
        """Copy stored numbers to memory; `view` is an array from `empty`, or a slice of one."""
        np.copyto(into, view, casting="no")

    def write(self, values: NDArray[Any], view: NDArray[Any]) -> None:
        """Copy numbers from memory to where they are stored."""
        np.copyto(view, values, casting="no")

    def leave(self, kind: str, num_bytes: int) -> None:
        """Take out bytes that were entered."""
        assert self.held[kind] >= num_bytes, (kind, self.held[kind], num_bytes)
        self.held[kind] -= num_bytes

    @contextmanager
    def holding(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Enter bytes for the duration of a block."""
        self.enter(kind, num_bytes)
        try:
            yield
        finally:
            self.leave(kind, num_bytes)

    def _account(self) -> str:
        parts = [f"{kind} {size:,}" for kind, size in self.held.items() if size]
        return f"held are {', '.join(parts) or 'none'} ({sum(self.held.values()):,} bytes)"
