"""World: the collectives that ZeRO needs, over any transport, each entered in a ledger.

[Note: three ways to reduce] A reduce-scatter leaves on each rank its piece of the sum over ranks.

- ``ordered``: each rank sends every other its piece (`Alltoallv`) and folds what it receives in
  rank order, in float32, rounding once. The same bits on MPICH, Open MPI and threads, and sums that
  leave the range of float16 on the way do no harm if their mean is in it.
- ``shared``: ranks of one node fold straight out of one another's buckets, and gather by copying
  out of one another's pieces. On one node it has the bits of ``ordered``; on several it adds within
  nodes first, then over nodes ([Note: between nodes] in `zeromp.world.shared`).
- ``mpi``: the library's own `Reduce_scatter`. 16-bit numbers are added by an operation of ours, in
  float32 and rounded at each addition. The order of additions is the library's choice: it may
  differ between libraries, numbers of ranks and message sizes, not between two runs.

``auto`` is ``shared`` wherever two ranks share a node's memory, else ``mpi``. All multiply the sum
by the same factor, 1/N for a mean. All stages reduce unit by unit with the same pieces, so with any
way stages 0 to 3 agree to the bit.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zeromp import wire
from zeromp.world.errors import TEXT_BYTES, alike, pack, unpack
from zeromp.world.ledger import Ledger
from zeromp.world.transport import (
    Mover,
    Reduction,
    Request,
    Sharing,
    Transport,
    gather_in_rounds,
    reduce_rounds,
)

T = TypeVar("T")
REDUCE_WAYS = ("auto", "shared", "ordered", "mpi")
HEADER_BYTES = 160


class _Entered:
    """A request that is timed, and guarded, while it is waited for; None is complete already."""

    def __init__(self, world: "World", verb: str, unit: str, request: Request | None) -> None:
        self.world, self.verb, self.unit, self.request = world, verb, unit, request

    def wait(self) -> None:
        if self.request is not None:
            with self.world.inside(self.verb, self.unit):
                self.request.wait()

    def release(self) -> None:
        if self.request is not None:
            with self.world.inside(self.verb, self.unit):
                self.request.release()


class _Reducing:
    """A reduce-scatter that is timed, and guarded; done as a whole in `wait` without a request."""

    def __init__(
        self, world: "World", unit: str, request: Reduction | None, whole: Callable[..., None]
    ) -> None:
        self.world, self.unit, self.request, self.whole = world, unit, request, whole

    def ready(self) -> bool:
        return self.request is not None and self.request.ready()

    def wait(self, piece: NDArray[Any]) -> None:
        with self.world.inside("reduce_scatter", self.unit):
            (self.whole if self.request is None else self.request.wait)(piece)

    def release(self) -> None:
        if self.request is not None:
            with self.world.inside("reduce_scatter", self.unit):
                self.request.release()


class World:
    """N ranks that call the same collectives in the same order.

    Parameters
    ----------
    transport : Transport
    reduce : str
        "auto", "shared", "ordered" or "mpi", see [Note: three ways to reduce]. Threads, and a
        single rank, always fold as "ordered".
    debug : bool
        Compare verb, unit, dtype and size over all ranks before each collective, and raise on all
        ranks when they differ. Costs one small message per collective.
    max_bytes : int
        Larger messages are split; MPI counts elements, and many libraries bytes, in 32 bits.

    Attributes
    ----------
    rank, size, local_size : int
        This rank, how many there are, and how many of them share this node.
    reduce : str
        The way that was chosen.
    sharers, sharer : int
        How many ranks hold an array from `node_empty` together, and which of them this one is.
    one_sided : bool
        Whether a rank completes its part of a collective by itself once all others have started
        theirs: then it gains by not waiting for it at once.
    ledger : Ledger
    """

    def __init__(
        self,
        transport: Transport,
        reduce: str = "mpi",
        debug: bool = False,
        max_bytes: int = 2**30,
    ) -> None:
        if reduce not in REDUCE_WAYS:
            raise ValueError(f"reduce={reduce!r} is unknown: use one of {', '.join(REDUCE_WAYS)}")
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.local_size = transport.local_size
        if reduce == "auto":
            reduce = transport.usual()
        self._sharing: Sharing | None = transport.sharing() if reduce == "shared" else None
        if reduce == "shared" and self._sharing is None and "mpi" in transport.reduce_ways:
            raise alike(
                RuntimeError(
                    "reduce='shared' is not possible: MPI gives the ranks of a node no memory to "
                    "share; use 'ordered', which has the same bits, or 'mpi'"
                )
            )
        if self._sharing is None and reduce not in transport.reduce_ways:
            reduce = "ordered"
        self.reduce = reduce
        self._mover: Mover = self._sharing or transport
        self.one_sided = self._sharing is not None
        self.sharers, self.sharer = self._mover.sharers, self._mover.sharer
        self.debug = debug
        self.max_bytes = max_bytes
        self.ledger = Ledger()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}, {self.transport.name}, reduce={self.reduce}>"

    def reducing(self, way: str) -> "World":
        """Return a world of the same ranks, with a ledger of its own, that reduces another way."""
        return World(self.transport, way, self.debug, self.max_bytes)

    # ---- memory ----------------------------------------------------------------------------------

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return a zeroed array of this rank's own, which its neighbours read where it lies.

        A collective, whatever the sizes. Collectives take arrays from anywhere; those that come
        from here are spared a copy if ranks share memory.
        """
        with self._drawing("empty"):
            return self._mover.empty(size, dtype)

    def node_empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return a zeroed array that all ranks of this node hold together, if they share memory.

        A collective. What one of the `sharers` writes, all see, after the next collective. As the
        `whole` of an all-gather, each writes its piece once for all; starting that gather says
        that this rank reads the array no more until `wait` returns.
        """
        with self._drawing("node_empty"):
            return self._mover.node_empty(size, dtype)

    @contextmanager
    def _drawing(self, what: str) -> Iterator[None]:
        if self.debug:
            self._check_header(what)
        with self.inside(what, ""):
            yield

    # ---- the collectives of ZeRO -----------------------------------------------------------------

    def reduce_scatter(
        self,
        bucket: NDArray[Any],
        piece: NDArray[Any],
        counts: Sequence[int],
        factor: float,
        unit: str = "",
        received: NDArray[Any] | None = None,
    ) -> None:
        """Leave `factor` times the sum over ranks of their buckets' piece r on rank r.

        `piece`, of shape (counts[rank],) and the bucket's dtype, is written; it must not overlap
        `bucket`. The rest as for `start_reduce_scatter`.
        """
        request = self.start_reduce_scatter(bucket, counts, factor, unit, received)
        assert piece.size == counts[self.rank] and bucket.dtype == piece.dtype
        request.wait(piece)
        request.release()

    def start_reduce_scatter(
        self,
        bucket: NDArray[Any],
        counts: Sequence[int],
        factor: float,
        unit: str = "",
        received: NDArray[Any] | None = None,
    ) -> Reduction:
        """Start leaving `factor` times the sum over ranks of their buckets' piece r on rank r.

        Parameters
        ----------
        bucket : ndarray of shape (sum(counts),)
            float32, or 16-bit numbers as in `wire`. Not to be written before `release`.
        counts : sequence of int
            Elements of each rank's piece.
        factor : float
            Applied in float32: by ``mpi`` after the sum, by the others before their one rounding.
        unit : str
            For the ledger.
        received : ndarray of shape (at least N * counts[rank],), same dtype, or None
            Where ``ordered`` receives the other ranks' pieces; None draws memory anew.

        Returns
        -------
        Reduction
            ``wait(piece)`` writes the result. Reductions must be waited for in the order in which
            they were started. They are ``one_sided``, or all is done in `wait`.
        """
        assert bucket.size == sum(counts)
        with self._collective(
            "reduce_scatter", unit, bucket.nbytes - counts[self.rank] * bucket.itemsize, bucket
        ):
            request = None
            if self._sharing is not None:
                request = self._sharing.start_reduce_scatter(bucket, counts, np.float32(factor))

        def whole(piece: NDArray[Any]) -> None:
            self._reduce_scatter(bucket, piece, counts, factor, received)

        return _Reducing(self, unit, request, whole)

    def _reduce_scatter(
        self,
        bucket: NDArray[Any],
        piece: NDArray[Any],
        counts: Sequence[int],
        factor: float,
        received: NDArray[Any] | None,
    ) -> None:
        for part, target, sizes in reduce_rounds(bucket, piece, counts, self.rank, self.max_bytes):
            if self.reduce == "ordered":
                room = self.size * target.size
                pieces = np.empty(room, part.dtype) if received is None else received[:room]
                self.transport.all_to_all(part, pieces, sizes)
                wire.fold(pieces, np.float32(factor), target)
            else:
                self.transport.reduce_scatter(part, target, sizes)
                if factor != 1.0:
                    wire.scale(target, np.float32(factor))

    def all_gather(
        self, piece: NDArray[Any], whole: NDArray[Any], counts: Sequence[int], unit: str = ""
    ) -> None:
        """Bring the pieces of all ranks to all ranks; see `start_all_gather`."""
        request = self.start_all_gather(piece, whole, counts, unit)
        request.wait()
        request.release()

    def start_all_gather(
        self, piece: NDArray[Any], whole: NDArray[Any], counts: Sequence[int], unit: str = ""
    ) -> Request:
        """Start bringing the pieces of all ranks to all ranks.

        Parameters
        ----------
        piece : ndarray of shape (counts[rank],)
            May be this rank's own place in `whole`.
        whole : ndarray of shape (sum(counts),), same dtype
            Written; not to be read before `wait`.
        counts : sequence of int
        unit : str
            For the ledger.

        Returns
        -------
        Request
            Requests must be waited for in the order in which they were started. `piece` is not to
            be written before `release`.
        """
        assert piece.size == counts[self.rank] and whole.size == sum(counts)
        assert piece.dtype == whole.dtype
        with self._collective("all_gather", unit, piece.nbytes * (self.size - 1), whole):
            if whole.nbytes > self.max_bytes and self._sharing is None:
                gather_in_rounds(self.transport, piece, whole, counts, self.max_bytes)
                return _Entered(self, "all_gather", unit, None)
            request = self._mover.start_all_gather(piece, whole, counts)
            return _Entered(self, "all_gather", unit, request)

    def broadcast(self, array: NDArray[Any], root: int = 0, unit: str = "") -> None:
        """Give `root`'s array to all ranks, in place."""
        sent = array.nbytes * (self.size - 1) if self.rank == root else 0
        with self._collective("broadcast", unit, sent, array):
            step = max(self.max_bytes // array.itemsize, 1)
            for start in range(0, array.size, step):
                self.transport.broadcast(array[start : start + step], root)

    def agree(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Give all ranks everyone's few numbers: an array of shape (N, len(values)), float64.

        Facts on which ranks branch (totals, overflow, stop) come from here, so that all branch
        alike: every rank computes them from the same numbers in the same order.
        """
        mine = np.asarray(values, np.float64)
        table = np.empty(self.size * mine.size, np.float64)
        self._exchange(mine, table)
        return table.reshape(self.size, mine.size)

    def barrier(self, what: str = "barrier") -> None:
        """Wait for all ranks; `what` says in what, should one not come."""
        if self.debug:
            self._check_header(what)
        with self.inside(what, ""):
            self._mover.barrier()

    # ---- rules and errors on which all ranks agree -----------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block of local checks; if it fails on one rank, raise its error on every rank."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.agree([error is not None]).any():
            self._raise_alike(error)

    def _raise_alike(self, error: Exception | None) -> None:
        text = np.frombuffer(pack(error), np.uint8)
        mine = np.zeros(TEXT_BYTES, np.uint8)
        mine[: text.size] = text
        table = np.empty((self.size, TEXT_BYTES), np.uint8)
        self._exchange(mine, table.reshape(-1))
        texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]
        raise unpack(texts) from error

    def same(self, what: str, text: str) -> None:
        """Raise ValueError on all ranks unless they all give the same text.

        The error names the first rank that differs from rank 0 and the first line that does.
        """
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8).copy()
        table = np.empty((self.size, digest.size), np.uint8)
        self._exchange(digest, table.reshape(-1))
        if (table == table[0]).all():
            return
        length = int(self.agree([len(text.encode())])[0, 0])
        root = np.zeros(length, np.uint8)
        if self.rank == 0:
            root[:] = np.frombuffer(text.encode(), np.uint8)
        self.broadcast(root, 0)
        with self.together():
            theirs, mine = root.tobytes().decode().split("\n"), text.split("\n")
            for a, b in zip_longest(theirs, mine, fillvalue="nothing"):
                if a != b:
                    raise ValueError(
                        f"{what} must be the same on all ranks: rank 0 has {a!r}, rank "
                        f"{self.rank} has {b!r}"
                    )

    def in_step(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate on all ranks as long as every rank has an item, then stop on all.

        For data of which ranks have different amounts: what is left on the others is not used.
        """
        iterator = iter(batches)
        while True:
            item = next(iterator, None)
            if not self.agree([item is not None]).all():
                return
            assert item is not None
            yield item

    def print(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(*values, flush=True)

    # ---- inside ----------------------------------------------------------------------------------

    def _exchange(self, mine: NDArray[Any], table: NDArray[Any]) -> None:
        with self._collective("agree", "", mine.nbytes * (self.size - 1), mine):
            self._mover.exchange(mine, table)

    @contextmanager
    def _collective(
        self, verb: str, unit: str, sent_bytes: int, array: NDArray[Any]
    ) -> Iterator[None]:
        """Enter a collective in the ledger, and check in debug mode that all ranks enter it."""
        if self.debug:
            self._check_header(f"{verb} of {unit or 'a few numbers'}, {array.size} {array.dtype}")
        self.ledger.enter(verb, unit, sent_bytes)
        with self.inside(verb, unit):
            yield

    @contextmanager
    def inside(self, verb: str, unit: str) -> Iterator[None]:
        """Time a wait, and say where this rank waits for the others."""
        self.transport.announce(f"{verb} of {unit}" if unit else verb)
        start = time.perf_counter()
        yield
        self.ledger.seconds[verb] += time.perf_counter() - start
        self.transport.announce("")

    def _check_header(self, header: str) -> None:
        mine = np.zeros(HEADER_BYTES, np.uint8)
        text = header.encode()[:HEADER_BYTES]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        table = np.empty((self.size, HEADER_BYTES), np.uint8)
        with self.inside("header", header):
            self._mover.exchange(mine, table.reshape(-1))
        for rank, row in enumerate(table):
            if not np.array_equal(row, table[0]):
                first, other = (bytes(r).rstrip(b"\0").decode() for r in (table[0], row))
                raise alike(
                    RuntimeError(
                        f"ranks call different collectives: rank 0 calls {first}, rank {rank} "
                        f"calls {other}"
                    )
                )
