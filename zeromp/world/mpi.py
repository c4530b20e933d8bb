"""Ranks that are MPI processes: the only importer of mpi4py."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from zeromp import wire
from zeromp.world.shared import SharedTransport
from zeromp.world.topology import Topology

MPI_TYPES = {
    "f4": MPI.FLOAT,
    "f8": MPI.DOUBLE,
    "u1": MPI.UINT8_T,
    "u2": MPI.UINT16_T,
    "i2": MPI.INT16_T,
}


@functools.cache
def _sum_of_bits(dtype: str) -> MPI.Op:
    """Sum of 16-bit numbers for MPI: adds in float32, rounds at each addition."""

    def function(source: Any, total: Any, _datatype: MPI.Datatype) -> None:
        wire.add(np.frombuffer(source, dtype), np.frombuffer(total, dtype))

    return MPI.Op.Create(function, commute=True)


def _buffer(array: NDArray[Any]) -> tuple[NDArray[Any], MPI.Datatype]:
    return array, MPI_TYPES[array.dtype.str[1:]]


def _same_place(piece: NDArray[Any], whole: NDArray[Any], start: int) -> bool:
    address = whole.__array_interface__["data"][0] + start * whole.itemsize
    return bool(piece.__array_interface__["data"][0] == address)


class MpiRequest:
    """A non-blocking MPI collective; keeps its buffers alive."""

    def __init__(self, request: MPI.Request, buffers: tuple[Any, ...]) -> None:
        self.request, self.buffers = request, buffers

    def wait(self) -> None:
        """Wait for completion."""
        self.request.Wait()

    def release(self) -> None:
        """Nothing: with MPI, what is complete is complete in both directions."""


class MpiTransport:
    """Collectives of an MPI library, on a communicator of our own.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Duplicated, so that messages of the program that embeds zeromp do not mix with ours.
    announce : callable or None
        Told which collective this rank enters, and "" when it has left it.
    node_of : sequence of int or None
        A number for each rank's node, for tests that play several nodes on one; None asks MPI.
    """

    reduce_ways: tuple[str, ...] = ("mpi", "ordered")
    sharers, sharer = 1, 0

    def __init__(
        self,
        comm: MPI.Intracomm,
        announce: Callable[[str], None] | None = None,
        node_of: Sequence[int] | None = None,
    ) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        if node_of is None:
            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
            lowest = np.full(1, self.rank, np.int32)
            node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
            names = np.empty(self.size, np.int32)
            self.comm.Allgather(lowest, names)
            node_of = names.tolist()
        else:
            node = self.comm.Split(node_of[self.rank], self.rank)
        self.node = cast(MPI.Intracomm, node)
        self.topology = Topology(node_of, self.rank)
        self.local_size = len(self.topology.ranks)
        self._sharing: SharedTransport | None = None
        self._refused = False
        vendor, version = MPI.get_vendor()
        self.name = f"{vendor} {'.'.join(map(str, version))}"
        self._announce = announce

    def announce(self, what: str) -> None:
        """Tell the guard, if there is one."""
        if self._announce is not None:
            self._announce(what)

    def sharing(self) -> SharedTransport | None:
        """Collectives over shared memory; None if a node gives none. Call on all ranks."""
        if self._sharing is None and not self._refused:
            made = None
            with contextlib.suppress(MPI.Exception):
                made = SharedTransport(self.comm, self.node, self.topology)
            refused = np.array([made is None], np.int8)
            self.comm.Allreduce(MPI.IN_PLACE, refused, MPI.MAX)
            self._refused = bool(refused[0])
            self._sharing = None if self._refused else made
        return self._sharing

    def usual(self) -> str:
        """Way to reduce where none is asked for: over shared memory if ranks share any."""
        ranks_meet = any(len(ranks) > 1 for ranks in self.topology.nodes)
        return "shared" if ranks_meet and self.sharing() else "mpi"

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Plain memory."""
        return np.zeros(size, dtype)

    node_empty = empty

    def exchange(self, mine: NDArray[Any], table: NDArray[Any]) -> None:
        """MPI_Iallgatherv."""
        self.start_all_gather(mine, table, [mine.size] * self.size).wait()

    def barrier(self) -> None:
        """MPI_Barrier."""
        self.comm.Barrier()

    def start_all_gather(
        self, piece: NDArray[Any], whole: NDArray[Any], counts: Sequence[int]
    ) -> MpiRequest:
        """MPI_Iallgatherv, in place where the piece lies at its own place in the whole."""
        target = [*_buffer(whole)[:1], (counts, None), _buffer(whole)[1]]
        in_place = _same_place(piece, whole, sum(counts[: self.rank]))
        source = MPI.IN_PLACE if in_place and piece.size else _buffer(piece)
        return MpiRequest(self.comm.Iallgatherv(source, target), (piece, whole))

    def all_to_all(
        self, parts: NDArray[Any], received: NDArray[Any], counts: Sequence[int]
    ) -> None:
        """MPI_Alltoall where all parts are of one size (faster on MPICH), else MPI_Alltoallv."""
        kind = MPI_TYPES[parts.dtype.str[1:]]
        if len(set(counts)) == 1:
            self.comm.Alltoall([parts, counts[0], kind], [received, counts[0], kind])
        else:
            mine = [counts[self.rank]] * self.size
            self.comm.Alltoallv([parts, (counts, None), kind], [received, (mine, None), kind])

    def reduce_scatter(
        self, bucket: NDArray[Any], piece: NDArray[Any], counts: Sequence[int]
    ) -> None:
        """MPI_Reduce_scatter: MPI_SUM for float32, an operation of ours for 16-bit numbers."""
        op = MPI.SUM if bucket.dtype == np.float32 else _sum_of_bits(bucket.dtype.str[1:])
        self.comm.Reduce_scatter(_buffer(bucket), _buffer(piece), list(counts), op)

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """MPI_Bcast."""
        self.comm.Bcast(_buffer(array), root)


def check_launcher(size: int, variables: Sequence[str]) -> None:
    """Warn when the launcher has started more processes than this MPI world has ranks.

    It happens when mpirun belongs to another MPI than the one mpi4py has loaded, or with ``srun``
    without its MPI plug-in: every process is then rank 0 of 1, and all write the same files.
    """
    for name in variables:
        started = os.environ.get(name, "")
        if size == 1 and started.isdigit() and int(started) > 1:
            warnings.warn(
                f"{name}={started}, but this process is alone in its MPI world: mpirun (or srun) "
                f"and the MPI library of mpi4py, {MPI.get_vendor()[0]}, do not belong together. "
                "Start with the mpiexec of that library, or unset the variable if one rank is "
                "what you want.",
                RuntimeWarning,
                stacklevel=3,
            )
            return
