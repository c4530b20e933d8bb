"""What a transport must do, and messages that are too large for it, cut into rounds."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Request(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the received data may be read."""

    def release(self) -> None:
        """After `wait`: return when the sent data may be overwritten."""


class Reduction(Protocol):
    """A reduce-scatter in flight."""

    def ready(self) -> bool:
        """Whether `wait` would return without waiting for another rank."""

    def wait(self, piece: NDArray[Any]) -> None:
        """Write this rank's piece of the result."""

    def release(self) -> None:
        """After `wait`: return when the bucket may be overwritten."""


class Mover(Protocol):
    """Where arrays come from, and the collectives that every way of moving bytes has.

    Arrays are 1-D and contiguous; `counts` are elements per rank. Every call is a collective.
    """

    sharers: int
    sharer: int

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return zeroed memory of this rank's own, from which it likes to send."""

    def node_empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return zeroed memory that `sharers` ranks hold together, of which this is a `sharer`."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def exchange(self, mine: NDArray[Any], table: NDArray[Any]) -> None:
        """Bring a few numbers of each rank, the same number from each, to all ranks."""

    def start_all_gather(
        self, piece: NDArray[Any], whole: NDArray[Any], counts: Sequence[int]
    ) -> Request:
        """Start bringing all pieces to all ranks; `piece` may be its own place in `whole`."""


class Sharing(Mover, Protocol):
    """Collectives over the shared memory of nodes: `SharedTransport`."""

    def start_reduce_scatter(
        self, bucket: NDArray[Any], counts: Sequence[int], factor: np.float32
    ) -> Reduction:
        """Start leaving `factor` times the sum over ranks of piece r on rank r."""


class Transport(Mover, Protocol):
    """What moves bytes between ranks: `MpiTransport` or `ThreadTransport`."""

    name: str
    rank: int
    size: int
    local_size: int
    reduce_ways: tuple[str, ...]

    def usual(self) -> str:
        """Way to reduce where none is asked for. A collective."""

    def sharing(self) -> Sharing | None:
        """Collectives over shared memory, if all ranks can have them. A collective."""

    def announce(self, what: str) -> None:
        """Say which collective this rank enters next; "" when it has returned from it."""

    def all_to_all(
        self, parts: NDArray[Any], received: NDArray[Any], counts: Sequence[int]
    ) -> None:
        """Send part r to rank r; receive N parts of `counts[rank]` elements."""

    def reduce_scatter(
        self, bucket: NDArray[Any], piece: NDArray[Any], counts: Sequence[int]
    ) -> None:
        """Leave the sum over ranks of piece r on rank r, added by the library."""

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Give root's array to all, in place."""


# ---- rounds --------------------------------------------------------------------------------------


def reduce_rounds(
    bucket: NDArray[Any], piece: NDArray[Any], counts: Sequence[int], rank: int, max_bytes: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], Sequence[int]]]:
    """Cut a reduce-scatter into rounds below `max_bytes`, each over a part of every piece."""
    if bucket.nbytes <= max_bytes:
        yield bucket, piece, counts
        return
    starts = np.cumsum([0, *counts]).tolist()
    for low, high in _edges(counts, bucket.itemsize, max_bytes):
        sizes = [max(min(high, c) - low, 0) for c in counts]
        parts = [bucket[s + low : s + low + n] for s, n in zip(starts, sizes, strict=False)]
        yield np.concatenate(parts), piece[low : low + sizes[rank]], sizes


def gather_in_rounds(
    transport: Transport,
    piece: NDArray[Any],
    whole: NDArray[Any],
    counts: Sequence[int],
    max_bytes: int,
) -> None:
    """All-gather in rounds below `max_bytes`, each over a part of every piece."""
    starts = np.cumsum([0, *counts]).tolist()
    for low, high in _edges(counts, whole.itemsize, max_bytes):
        sizes = [max(min(high, c) - low, 0) for c in counts]
        received = np.empty(sum(sizes), whole.dtype)
        mine = piece[low : low + sizes[transport.rank]].copy()
        transport.start_all_gather(mine, received, sizes).wait()
        at = 0
        for start, size in zip(starts, sizes, strict=False):
            whole[start + low : start + low + size] = received[at : at + size]
            at += size


def _edges(counts: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(max_bytes // (itemsize * len(counts)), 1)
    for low in range(0, max(counts), step):
        yield low, low + step
