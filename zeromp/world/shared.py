"""Collectives over shared memory: ranks of a node read one another's arrays, and copy nothing.

A reduce-scatter: every rank posts where its bucket lies; when all have, each folds its own piece
straight out of all buckets, in rank order, in float32, rounding once: the bits of "ordered". An
all-gather: every rank posts where its piece lies, and copies the others' pieces from there. Where
the whole is one array that the node's ranks hold together (`NodeMemory.common`), each writes its
own piece into it instead, and nothing is read.

Posting waits for nobody, and a rank that has read says so and goes on: only who writes to what he
posted must wait until all have read it (`release`). So ranks drift apart by as much as there are
buffers for, instead of waiting at each unit for whoever is late there.

An array that lies in no window (see `NodeMemory`) is brought to its readers through a small window
of this rank's, the *lobby*, as much at a time as fits. Nothing depends on where an array lives, and
ranks need not agree on it: each tells the others with every message.

[Note: between nodes] Rank i of a node deals with rank i of every other node (i modulo their number,
where nodes are unequal). It folds, out of its own node's buckets, the other's piece, and sends it
that one float32 sum; it receives as many sums of its own piece as there are other nodes. So a
bucket is added first within nodes, in rank order, and then over nodes, in the order of their lowest
ranks, all in float32, and rounded once. That is the order of "ordered" where there is one node, and
another one where there are several. A gathered piece enters a node once, not once per rank.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from zeromp import wire
from zeromp.world.board import (
    BOARD_BYTES,
    NOTE_BYTES,
    SLOTS,
    TALLY_BYTES,
    Board,
    Tally,
    copy_bytes,
    copy_pieces,
)
from zeromp.world.errors import alike
from zeromp.world.memory import NodeMemory
from zeromp.world.topology import Topology

LOBBY_BYTES = 2**20  # within a second-level cache: read while still there
LOBBY_BYTES_PER_RANK = 2**12
CROSS_BYTES = 2**22  # of sums that travel between nodes at a time
BARRIER, FOLD, GATHER, GATHER_COMMON, NOTE = range(5)
KINDS = ("a barrier", "a reduce-scatter", "an all-gather", "an all-gather", "an exchange")
PRIVATE = -1  # in place of a window's number
CONTROL_BYTES = 2 * BOARD_BYTES + 2 * TALLY_BYTES

At = Callable[[int], NDArray[np.int64]]  # index of a part -> its addresses, one per rank of a node


class SharedTransport:
    """Collectives over the memory of nodes, and MPI between them.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        All ranks; used as it is.
    node : mpi4py.MPI.Intracomm
        Those of this node; used as it is.
    topology : Topology

    Attributes
    ----------
    crossed_bytes : int
        What this rank has sent to other nodes.
    sharers, sharer : int
        How many ranks hold a `node_empty` array together, and which of them this one is.
    """

    def __init__(self, comm: MPI.Comm, node: MPI.Intracomm, topology: Topology) -> None:
        self.comm, self.topology = comm, topology
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.memory = NodeMemory(node)
        self.sharers, self.sharer = node.Get_size(), node.Get_rank()
        self.lobby_bytes = max(LOBBY_BYTES, LOBBY_BYTES_PER_RANK * self.size)
        window = self.memory.make(CONTROL_BYTES + self.lobby_bytes, common=False)
        window.segment[:CONTROL_BYTES] = 0
        node.Barrier()
        boards = (
            Board(window, i * BOARD_BYTES, self.sharer, self._differ, self._poke) for i in range(2)
        )
        self.calls, self.meetings = boards  # what is called, and what takes place inside of that
        tallies = (2 * BOARD_BYTES + i * TALLY_BYTES for i in range(2))
        self.read, self.folded = (Tally(window, t, self.sharer, self._poke) for t in tallies)
        self.lobby = window.segment[CONTROL_BYTES:]
        self.lobbies = window.bases + CONTROL_BYTES
        self.crossed_bytes = 0
        self._open: deque[_Posted] = deque()  # requests whose heads are not read yet
        self._cuts: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {}
        self._nears: dict[Any, tuple[NDArray[np.int64], NDArray[np.int64], int]] = {}

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """See `NodeMemory.empty`."""
        return self.memory.empty(size, dtype)

    def node_empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """See `NodeMemory.common`."""
        return self.memory.common(size, dtype)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.calls.wait(self._call(BARRIER))
        if self.topology.num_nodes > 1:
            self.comm.Barrier()

    def exchange(self, mine: NDArray[Any], table: NDArray[Any]) -> None:
        """All-gather of a few numbers, the same number of them from each rank."""
        if self.topology.num_nodes > 1 or mine.nbytes > NOTE_BYTES:
            request = self.start_all_gather(mine, table, [mine.size] * self.size)
            request.wait()
            request.release()
            return
        number = self._call(NOTE, mine.nbytes, note=mine)
        self.calls.wait(number)
        self.calls.notes(number, table)

    def start_reduce_scatter(
        self, bucket: NDArray[Any], counts: Sequence[int], factor: np.float32
    ) -> "_Reduction":
        """Post a bucket; the request, when it is waited for, folds this rank's piece out of all."""
        number = self._call(FOLD, bucket.nbytes, bucket)
        request = _Reduction(self, number, bucket, counts, factor)
        self._open.append(request)
        return request

    def start_all_gather(
        self, piece: NDArray[Any], whole: NDArray[Any], counts: Sequence[int]
    ) -> "_Gather":
        """Post a piece; the request, when it is waited for, reads those of the others.

        A `whole` from `node_empty` is written when no rank of the node reads it any more, which a
        rank says by starting this gather.
        """
        window, _ = self.memory.find(whole)
        kind = GATHER_COMMON if window is not None and window.common else GATHER
        number = self._call(kind, whole.nbytes, piece)
        request = _Gather(self, number, kind, piece, whole, counts)
        self._open.append(request)
        return request

    # ---- inside a node ---------------------------------------------------------------------------

    def _call(
        self,
        kind: int,
        num_bytes: int = 0,
        array: NDArray[Any] | None = None,
        note: NDArray[Any] | None = None,
    ) -> int:
        """Post what this rank calls, and where its array lies."""
        while self._open and self._open[0].number <= self.calls.posted + 1 - SLOTS // 2:
            self._heads(self._open[0])
        window, offset = None, 0
        if array is not None and array.size:
            window, offset = self.memory.find(array)
            if window is None:
                return self.calls.post(kind + 8 * num_bytes, PRIVATE)
        number = 0 if window is None else window.number
        return self.calls.post(kind + 8 * num_bytes, number, offset, note)

    def _heads(self, request: "_Posted") -> NDArray[np.int64]:
        """Heads of a request's messages, once all have posted theirs."""
        if request.heads is None:
            self._open.remove(request)
            request.heads = self.calls.wait(request.number).copy()
        return request.heads

    def _differ(self, rows: NDArray[np.int64]) -> None:
        """Raise, on all ranks, the error that they have called different collectives."""
        other = int((rows[:, 0] != rows[0, 0]).argmax())
        first, second = (
            f"rank {self.topology.ranks[index]} calls {KINDS[what % 8]} of {what // 8} bytes"
            for index, what in ((0, int(rows[0, 0])), (other, int(rows[other, 0])))
        )
        raise alike(
            RuntimeError(
                f"ranks call different collectives: {first}, {second}; ZEROMP_DEBUG=1 names the "
                "arrays"
            )
        )

    def _meet(self) -> None:
        self.meetings.wait(self.meetings.post(BARRIER))

    def _rounds(
        self,
        array: NDArray[Any],
        rows: NDArray[np.int64],
        parts: Sequence[tuple[int, int]],
        low: int,
        high: int,
    ) -> Iterator[tuple[int, int, At]]:
        """Let the node's ranks read elements low to high of each part of all their arrays.

        Yields (low, high, at): once with all, if all arrays lie in windows, else as much at a time
        as lobbies hold, and then ranks meet after each round.
        """
        lobby = rows[:, 1] == PRIVATE
        places = rows[:, 2] + self._bases(rows[:, 1])
        if not lobby.any():
            yield low, high, lambda part: places + (parts[part][0] + low) * array.itemsize
            return
        step = self.lobby_bytes // (len(parts) * array.itemsize)
        mine = self.lobby.view(array.dtype)
        for begin in range(low, high, step):
            end = min(begin + step, high)
            if lobby[self.sharer]:
                for i, (start, count) in enumerate(parts):
                    size = max(min(end, count) - begin, 0)
                    mine[i * step : i * step + size] = array[start + begin : start + begin + size]
            self._meet()

            def at(part: int, begin: int = begin) -> NDArray[np.int64]:
                there = places + (parts[part][0] + begin) * array.itemsize
                return np.where(lobby, self.lobbies + part * step * array.itemsize, there)

            yield begin, end, at
            self._meet()

    def _bases(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each rank's segment begins, of the window with its number."""
        windows, first = self.memory.windows, int(numbers[0])
        if first != PRIVATE and (numbers == first).all():
            return windows[first].bases
        pairs = enumerate(numbers.tolist())
        return np.array([0 if n == PRIVATE else windows[n].bases[i] for i, n in pairs], np.int64)

    def reduce(self, posted: "_Reduction", piece: NDArray[Any]) -> None:
        """Complete a reduce-scatter: `factor` times the sum over ranks of this rank's piece."""
        bucket, factor = posted.bucket, posted.factor
        rows = self._heads(posted)
        parts = self._parts(posted.counts)
        if self.topology.num_nodes > 1:
            self._reduce_over_nodes(bucket, piece, parts, rows, factor)
        else:
            for low, high, at in self._rounds(bucket, rows, parts, 0, max(posted.counts)):
                target = piece[low:high]
                if target.size:
                    wire.fold_at(at(self.rank), bucket, factor, target)
        self.folded.reach(posted.number)

    def foldable(self, posted: "_Reduction") -> bool:
        """Whether a reduction needs nothing more of the other ranks: all have posted.

        Never where ranks meet to complete it: they all must do that at the same place.
        """
        if self.topology.num_nodes > 1:
            return False
        if posted.heads is None and not self.calls.here(posted.number):
            return False
        return not (self._heads(posted)[:, 1] == PRIVATE).any()

    def gather(self, flying: "_Gather") -> None:
        """Complete a gather."""
        self._gather(flying.piece, flying.whole, self._parts(flying.counts), flying)
        self.read.reach(flying.number)

    def _gather(
        self,
        piece: NDArray[Any],
        whole: NDArray[Any],
        parts: tuple[tuple[int, int], ...],
        flying: "_Gather",
    ) -> None:
        rows = self._heads(flying)
        begin, _ = parts[self.rank]
        own = whole[begin : begin + piece.size]
        if piece.size and not _same_place(piece, own):
            own[:] = piece
        if flying.kind == GATHER_COMMON:
            if self.topology.num_nodes > 1:
                self._gather_over_nodes(piece, whole, parts, common=True)
            self._meet()
            return
        starts, sizes, longest = self._near(parts)
        target = whole.__array_interface__["data"][0]
        for low, high, at in self._rounds(piece, rows, [(0, piece.size)], 0, longest):
            copy_pieces(at(0), starts, sizes, low, high, whole.itemsize, target, self.sharer)
        if self.topology.num_nodes > 1:
            self._gather_over_nodes(piece, whole, parts, common=False)

    def _parts(self, counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Start and size of each rank's piece."""
        key = tuple(counts)
        if key not in self._cuts:
            self._cuts[key] = tuple(zip(accumulate(key, initial=0), key, strict=False))
        return self._cuts[key]

    def _near(
        self, parts: tuple[tuple[int, int], ...]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Starts and sizes of the pieces of this node's ranks, and the largest size."""
        if parts not in self._nears:
            starts, sizes = np.array([parts[r] for r in self.topology.ranks], np.int64).T.copy()
            self._nears[parts] = starts, sizes, int(sizes.max())
        return self._nears[parts]

    # ---- between nodes ---------------------------------------------------------------------------

    def _reduce_over_nodes(
        self,
        bucket: NDArray[Any],
        piece: NDArray[Any],
        parts: Sequence[tuple[int, int]],
        rows: NDArray[np.int64],
        factor: np.float32,
    ) -> None:
        topology = self.topology
        step = max(CROSS_BYTES // (4 * topology.num_nodes), 1024)
        step = min(step, max(count for _, count in parts))
        out = np.empty((len(topology.cared_for), step), np.float32)
        sums = np.empty((topology.num_nodes, step), np.float32)  # of this rank's piece, by node
        addresses = sums.__array_interface__["data"][0] + sums.strides[0] * np.arange(len(sums))
        own = sums[topology.node]
        one = np.float32(1)
        for low in range(0, max(count for _, count in parts), max(step, 1)):
            target = piece[low : low + step]
            requests = [
                self.comm.Irecv([sums[node][: target.size], MPI.FLOAT], source)
                for node, source in topology.partners
                if target.size
            ]
            for begin, end, at in self._rounds(bucket, rows, parts, low, low + step):
                for k, rank in enumerate([*topology.cared_for, self.rank]):
                    sum_ = out[k] if rank != self.rank else own
                    size = max(min(end, parts[rank][1]) - begin, 0)
                    if size:
                        wire.fold_at(at(rank), bucket, one, sum_[begin - low : begin - low + size])
            for k, rank in enumerate(topology.cared_for):
                size = max(min(low + step, parts[rank][1]) - low, 0)
                if size:
                    requests.append(self._send(out[k][:size], rank))
            MPI.Request.Waitall(requests)
            if target.size:
                wire.fold_at(addresses, sums[0], factor, target)

    def _gather_over_nodes(
        self,
        piece: NDArray[Any],
        whole: NDArray[Any],
        parts: Sequence[tuple[int, int]],
        common: bool,
    ) -> None:
        """Bring other nodes' pieces into the common whole, or through lobbies to all wholes."""
        topology, size = self.topology, whole.itemsize
        longest = max(count for _, count in parts)
        step = CROSS_BYTES // size if common else self.lobby_bytes // (topology.most_cared * size)
        lobby = self.lobby.view(whole.dtype)
        first = whole.__array_interface__["data"][0]
        for low in range(0, longest, step):
            requests = []
            for k, rank in enumerate(topology.cared_for):
                start, count = parts[rank]
                length = max(min(low + step, count) - low, 0)
                into = whole[start + low :] if common else lobby[k * step :]
                if length:
                    requests.append(self.comm.Irecv([into[:length].view(np.uint8), MPI.BYTE], rank))
            mine = piece[low : low + step]
            if mine.size:
                requests += [self._send(mine, rank) for _, rank in topology.partners]
            MPI.Request.Waitall(requests)
            if common:
                continue
            self._meet()
            for rank, (index, k) in topology.entries.items():
                start, count = parts[rank]
                length = max(min(low + step, count) - low, 0)
                copy_bytes(
                    int(self.lobbies[index]) + k * step * size,
                    first + (start + low) * size,
                    length * size,
                )
            self._meet()

    def _send(self, array: NDArray[Any], rank: int) -> MPI.Request:
        self.crossed_bytes += array.nbytes
        return self.comm.Isend([array.view(np.uint8), MPI.BYTE], rank)

    def _poke(self) -> None:
        """Let MPI go on: the guard of a rank that leaves looks into this rank's window."""
        self.comm.Iprobe(tag=1)


class _Posted:
    """A request on the board.

    Attributes
    ----------
    number : int
        Of its message.
    heads : ndarray or None
        What all ranks have posted, when that has been read.
    """

    def __init__(self, transport: SharedTransport, number: int) -> None:
        self.transport, self.number = transport, number
        self.heads: NDArray[np.int64] | None = None


class _Reduction(_Posted):
    """A posted reduce-scatter: nothing is read before it is waited for."""

    def __init__(
        self,
        transport: SharedTransport,
        number: int,
        bucket: NDArray[Any],
        counts: Sequence[int],
        factor: np.float32,
    ) -> None:
        super().__init__(transport, number)
        self.bucket, self.counts, self.factor = bucket, counts, factor

    def ready(self) -> bool:
        """Whether `wait` would not wait."""
        return self.transport.foldable(self)

    def wait(self, piece: NDArray[Any]) -> None:
        """Fold this rank's piece."""
        self.transport.reduce(self, piece)

    def release(self) -> None:
        """Wait until all ranks have folded theirs."""
        self.transport.folded.wait(self.number)


class _Gather(_Posted):
    """A posted all-gather: nothing moves before it is waited for."""

    def __init__(
        self,
        transport: SharedTransport,
        number: int,
        kind: int,
        piece: NDArray[Any],
        whole: NDArray[Any],
        counts: Sequence[int],
    ) -> None:
        super().__init__(transport, number)
        self.kind = kind
        self.piece, self.whole, self.counts = piece, whole, counts
        self.done = False

    def wait(self) -> None:
        """Read all pieces, unless that is done."""
        if not self.done:
            self.done = True
            self.transport.gather(self)

    def release(self) -> None:
        """Wait until all ranks have read this one's piece."""
        self.transport.read.wait(self.number)


def _same_place(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
