"""How every numba kernel of zeromp is compiled: same flags, one cache, one process at a time.

Three things go wrong when kernels are decorated one by one, and this module settles them once:

- *Flags are inherited.* A function without explicit ``fastmath`` or ``error_model`` takes those of
  whichever caller compiles it first, so its bits depend on the order of calls. All name both.
- *The cache does not see callees.* numba looks at the file that defines a kernel only. The cache
  folder here is named after a hash of all kernel sources, so that no stale kernel is ever loaded.
- *N ranks start together.* Compiling is done under a file lock, one per node: the first rank
  compiles, the others wait and load what it has stored.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])

KERNEL_SOURCES = (
    "_jit.py",
    "wire.py",
    "adamw.py",
    "vectors.py",
    "gated.py",
    "kernels.py",
    "tiles.py",
    "attention.py",
    "world/board.py",
)


@functools.cache
def cache_folder() -> Path:
    """Folder of compiled kernels: in ``NUMBA_CACHE_DIR``, the user's cache, or temporary."""
    here = Path(__file__).parent
    sources = b"".join((here / name).read_bytes() for name in KERNEL_SOURCES)
    name = f"zeromp-{hashlib.sha256(sources).hexdigest()[:12]}"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    bases = [Path(os.environ.get("NUMBA_CACHE_DIR") or home), Path(tempfile.gettempdir())]
    for base in bases:
        folder = base / (name if base == bases[0] else f"{name}-{os.getuid()}")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    warnings.warn(
        f"kernels are compiled anew in every process: neither {bases[0]} nor {bases[1]} can be "
        "written; set NUMBA_CACHE_DIR to a folder that can",
        RuntimeWarning,
        stacklevel=2,
    )
    return Path()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[bool]:
    """Hold this node's compile lock and use `cache_folder`; yields whether there is one."""
    folder = cache_folder()
    if folder == Path():
        yield False
        return
    before = config.CACHE_DIR
    lock = Path(tempfile.gettempdir()) / f"{folder.name}-{os.getuid()}.lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        config.CACHE_DIR = str(folder)
        try:
            yield True
        finally:
            config.CACHE_DIR = before


def kernel(*signatures: str) -> Callable[[F], F]:
    """Compile a function for the given signatures, at import, or load it from the cache."""

    def build(function: F) -> F:
        with _one_at_a_time() as cache:
            compiled: F = numba.njit(
                list(signatures), fastmath=False, error_model="numpy", nogil=True, cache=cache
            )(function)
        return compiled

    return build


def inlined(function: F) -> F:
    """Let kernels call a function; it is compiled into each of them."""
    compiled: F = numba.njit(fastmath=False, error_model="numpy", nogil=True)(function)
    return compiled
