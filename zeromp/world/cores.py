"""A rank's share of its node's cores, for BLAS; zeromp's kernels use one thread each."""

import contextlib
import functools
import os
from collections.abc import Iterator

from threadpoolctl import ThreadpoolController

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def threads_per_rank(ranks_on_node: int) -> int | None:
    """Cores of this process divided by its node's ranks; None where the user has set it."""
    if any(name in os.environ for name in THREAD_VARIABLES):
        return None
    return max(1, len(os.sched_getaffinity(0)) // ranks_on_node)


def blas_threads() -> int:
    """Threads that BLAS libraries use now, at most."""
    libraries = _libraries().select(user_api="blas").info()
    return max((int(library["num_threads"]) for library in libraries), default=1)


def limit_threads(ranks_on_node: int) -> None:
    """Let BLAS use this rank's share of the cores from now on."""
    _libraries().limit(limits=threads_per_rank(ranks_on_node))


@contextlib.contextmanager
def limited_threads(ranks_on_node: int) -> Iterator[None]:
    """Let BLAS use a rank's share of the cores within a block."""
    with _libraries().limit(limits=threads_per_rank(ranks_on_node)):
        yield
