"""N ranks as threads of one process: the same collectives and bits, and no MPI needed."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zeromp.world.cores import limited_threads
from zeromp.world.world import World

T = TypeVar("T")


class RankFailed(RuntimeError):
    """Another rank has raised; this one leaves the collective in which it waits."""


class _Shared:
    """What the ranks of one thread world share: a board of posted arrays, by collective."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.posted: dict[int, dict[int, Any]] = {}  # collective -> rank -> what it offers
        self.finished: dict[int, int] = {}  # collective -> ranks that have read all they need
        self.waits_in = dict.fromkeys(range(size), "")
        self.failed = False

    def wait_for(self, rank: int, ready: Callable[[], bool]) -> None:
        """Wait under the lock; RankFailed if a rank has raised, TimeoutError if none comes."""
        if not self.changed.wait_for(lambda: self.failed or ready(), self.timeout):
            where = self.waits_in.get(rank) or "a collective"
            others = "; ".join(
                f"rank {r} {'waits in ' + w if w else 'is outside of any collective'}"
                for r, w in sorted(self.waits_in.items())
                if r != rank
            )
            raise TimeoutError(
                f"rank {rank} has waited {self.timeout:g} s in {where}, which must be called on "
                f"all ranks: {others}"
            )
        if self.failed and not ready():
            raise RankFailed("another rank has raised an error")


class ThreadTransport:
    """Collectives by reading what the other threads have posted."""

    name = "threads"
    reduce_ways: tuple[str, ...] = ("ordered",)

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.shared = shared
        self.rank, self.size, self.local_size = rank, shared.size, shared.size
        self.sharers, self.sharer = shared.size, rank
        self._next = 0

    def usual(self) -> str:
        """Return the only way there is."""
        return "ordered"

    def sharing(self) -> None:
        """Not apart: threads share all memory anyway."""

    def announce(self, what: str) -> None:
        """Note where this rank waits."""
        self.shared.waits_in[self.rank] = what

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Plain memory."""
        return np.zeros(size, dtype)

    def node_empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Rank 0's array, for all: a gather into it writes the same pieces N times."""
        found: list[NDArray[Any]] = []
        mine = np.zeros(size if self.rank == 0 else 0, dtype)
        self._post(mine, lambda offers: found.append(offers[0])).wait()
        return found[0]

    def exchange(self, mine: NDArray[Any], table: NDArray[Any]) -> None:
        """Copy what all have posted."""
        self.start_all_gather(mine, table, [mine.size] * self.size).wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._post(None, lambda _offers: None).wait()

    def start_all_gather(
        self, piece: NDArray[Any], whole: NDArray[Any], counts: Sequence[int]
    ) -> "_Posted":
        """Post the piece; the request copies everyone's."""
        edges = np.cumsum([0, *counts]).tolist()

        def read(offers: dict[int, NDArray[Any]]) -> None:
            for rank, offer in offers.items():
                if rank != self.rank or not np.shares_memory(offer, whole):
                    whole[edges[rank] : edges[rank + 1]] = offer

        return self._post(piece, read)

    def all_to_all(
        self, parts: NDArray[Any], received: NDArray[Any], counts: Sequence[int]
    ) -> None:
        """Copy this rank's part out of everyone's parts."""
        edges = np.cumsum([0, *counts]).tolist()
        mine = slice(edges[self.rank], edges[self.rank + 1])

        def read(offers: dict[int, NDArray[Any]]) -> None:
            np.concatenate([offers[r][mine] for r in range(self.size)], out=received)

        self._post(parts, read).wait()

    def reduce_scatter(self, *_: Any) -> None:
        """Not there: threads have no library, `World` folds as "ordered"."""
        raise AssertionError("threads reduce as 'ordered'")

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Copy root's array."""

        def read(offers: dict[int, NDArray[Any]]) -> None:
            if self.rank != root:
                array[:] = offers[root]

        self._post(array, read).wait()

    def _post(self, offer: Any, read: Callable[[dict[int, Any]], None]) -> "_Posted":
        shared, index = self.shared, self._next
        self._next += 1
        with shared.changed:
            shared.posted.setdefault(index, {})[self.rank] = offer
            shared.changed.notify_all()
        return _Posted(shared, self.rank, index, read)


class _Posted:
    """A posted collective: complete when all have posted, and all have read."""

    def __init__(
        self, shared: _Shared, rank: int, index: int, read: Callable[[dict[int, Any]], None]
    ) -> None:
        self.shared, self.rank, self.index, self.read = shared, rank, index, read

    def wait(self) -> None:
        shared, index = self.shared, self.index
        with shared.changed:
            offers = shared.posted[index]
            shared.wait_for(self.rank, lambda: len(offers) == shared.size)
        self.read({rank: offers[rank] for rank in range(shared.size)})
        with shared.changed:
            shared.finished[index] = shared.finished.get(index, 0) + 1
            shared.changed.notify_all()
            shared.wait_for(self.rank, lambda: shared.finished[index] >= shared.size)
            shared.finished[index] += 1  # the last to leave clears the board
            if shared.finished[index] == 2 * shared.size:
                del shared.finished[index], shared.posted[index]

    def release(self) -> None:
        """Nothing: `wait` has waited until all have read."""


def threads(
    num_ranks: int,
    function: Callable[[World], T],
    *,
    debug: bool = False,
    timeout: float = 300.0,
    max_bytes: int = 2**30,
) -> list[T]:
    """Run ``function(world)`` on N ranks that are threads of this process.

    Learning and tests need no MPI: weights, losses and ledgers have the same bits as N processes
    with ``reduce="ordered"``.

    Parameters
    ----------
    num_ranks : int
    function : callable
        Called once per rank, with that rank's `World`.
    debug : bool
        See `World`.
    timeout : float
        Seconds after which a rank that waits alone in a collective raises TimeoutError.
    max_bytes : int
        See `World`.

    Returns
    -------
    list
        What each rank's call returned.

    Raises
    ------
    Exception
        The first error of any rank; the other ranks are released.
    """
    shared = _Shared(num_ranks, timeout)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = ThreadTransport(shared, rank)
        try:
            results[rank] = function(World(transport, "ordered", debug, max_bytes))
        except BaseException as error:  # handed to the caller below
            with shared.changed:
                errors.append(error)
                shared.failed = True
                shared.changed.notify_all()

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    with limited_threads(num_ranks):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, RankFailed)), errors[0])
    return results
