"""A rank's HDF5 file of mapped arrays, and plain reads and writes of the same bytes.

Each array is a contiguous dataset whose space is reserved on disk before it is used, so that a full
disk is an error and never a SIGBUS. It is mapped at its place in the file: the mapped array is what
holders have in hand, and what h5py and h5dump show. Bytes are moved with `preadv` and `pwritev` on
the same place, which does not enter them in the process's resident set, and finds out about
truncated files where a mapped read would die: nothing in zeromp touches the mapped memory itself.
"""

import errno
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from zeromp.store.placement import PAGE

HUGE_PAGE = 2**21
MOST_BYTES = 2**30  # of one system call


class MappedFile:
    """One HDF5 file of arrays that lie on disk.

    Parameters
    ----------
    path : Path
        Must not exist.
    about : dict of str to value
        Attributes of the file, for whoever finds it.

    Attributes
    ----------
    direct : bool
        Move whole pages past the page cache (O_DIRECT).
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.direct = False
        self._places: dict[str, tuple[int, int]] = {}  # dataset -> offset and bytes
        self._end = 0  # the file must reach that far
        with self._h5("x") as file:
            for name, value in about.items():
                file.attrs[name] = value
        self.descriptor = os.open(path, os.O_RDWR)
        try:
            self._past_cache = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:  # tmpfs and some network disks
            self._past_cache = -1
        # A thread that moves bytes holds the file, so that no descriptor is closed, and its number
        # given to another file, under its hands.
        self._closer = weakref.finalize(self, _close, self.descriptor, self._past_cache)
        self._closer.atexit = False

    @property
    def can_be_direct(self) -> bool:
        """Whether the file system has O_DIRECT."""
        return self._past_cache >= 0

    @contextmanager
    def _h5(self, mode: str) -> Iterator[Any]:
        """Open with h5py; errors name the file and the space that is left."""
        try:
            # No HDF5 locks: network disks lack them, and each rank has files of its own.
            with h5py.File(
                self.path,
                mode,
                locking=False,
                alignment_threshold=PAGE,
                alignment_interval=PAGE,
            ) as file:
                yield file
        except (OSError, RuntimeError) as error:
            found = re.search(r"errno = (\d+)", str(error))  # h5py has it in its text alone
            raise OSError(
                int(found[1]) if found else getattr(error, "errno", None) or errno.EIO,
                f"{self.path} can't be written, with {_free(self.path.parent):,} bytes free on its "
                f"disk: {error}",
            ) from error

    def add(
        self, name: str, size: int, dtype: Any, attributes: Mapping[str, Any]
    ) -> tuple[NDArray[Any], int]:
        """Make a dataset of zeros, with its space reserved, and map it.

        Returns
        -------
        ndarray
            The mapped array.
        int
            Its offset in the file.

        Raises
        ------
        OSError
            ENOSPC with path and sizes, if the disk is full.
        """
        dtype = np.dtype(dtype)
        num_bytes = size * dtype.itemsize
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.CONTIGUOUS)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with self._h5("r+") as file:
            space = h5py.h5s.create_simple((size,))
            kind = h5py.h5t.py_create(dtype, logical=True)
            dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, plist))
            for key, value in attributes.items():
                dataset.attrs[key] = value
            offset = dataset.id.get_offset()
        if not size:
            return np.empty(0, dtype), 0
        reserve(self.descriptor, self.path, offset, num_bytes)
        self._places[name] = (offset, num_bytes)
        self._end = max(self._end, offset + num_bytes)
        mapped = np.memmap(self.path, dtype, "r+", offset, (size,))
        return mapped.view(np.ndarray), offset

    def read(self, offset: int, into: NDArray[Any]) -> None:
        """Fill an array from the file; OSError that names file and dataset if that is too short."""
        self._move(os.preadv, offset, into)

    def write(self, offset: int, values: NDArray[Any]) -> None:
        """Write an array to the file, all of it."""
        self._move(os.pwritev, offset, values)

    def _move(self, call: Any, offset: int, array: NDArray[Any]) -> None:
        if not self._closer.alive:
            raise ValueError(f"{self.path} is closed: what is offloaded can't be used after close")
        if os.fstat(self.descriptor).st_size < self._end:
            self._fail(offset)  # before a write makes it long again, with a hole of zeros
        view = array.reshape(-1).view(np.uint8).data
        whole = 0
        if self.direct and offset % PAGE == 0 and array.ctypes.data % PAGE == 0:
            whole = len(view) // PAGE * PAGE
        for descriptor, start, stop in (
            (self._past_cache, 0, whole),
            (self.descriptor, whole, len(view)),
        ):
            while start < stop:
                part = view[start : min(stop, start + MOST_BYTES)]
                moved = call(descriptor, [part], offset + start)
                if moved <= 0:
                    self._fail(offset)
                start += moved

    def _fail(self, offset: int) -> None:
        inside = [n for n, (at, size) in self._places.items() if at <= offset < at + size]
        raise OSError(
            errno.EIO,
            f"{self.path} has been truncated by something, and dataset {inside[0]!r} can't be "
            "trusted: resume from a checkpoint",
        )

    def close(self) -> None:
        """Close the descriptors; mapped arrays live on while someone holds them."""
        self._closer()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _free(folder: Path) -> int:
    """Bytes that are free on the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def reserve(descriptor: int, path: Path, offset: int, num_bytes: int) -> None:
    """Reserve space in a file; OSError with path and sizes if the disk is full."""
    try:
        os.posix_fallocate(descriptor, offset, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"no space: {num_bytes:,} bytes do not fit on the disk of {path}, which has "
            f"{_free(path.parent):,} free: free some, choose another offload_dir, or use more "
            "ranks",
        ) from None


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory for direct transfers: page-aligned, and on 2 MiB pages where it is large.

    A disk takes few pieces of memory per request: on 4 kB pages direct reads are four times slower.
    """
    if num_bytes < HUGE_PAGE:
        memory = mmap.mmap(-1, max(num_bytes, 1))
        return np.frombuffer(memory, np.uint8)[:num_bytes]
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    whole = np.frombuffer(memory, np.uint8)
    with suppress(OSError):  # kernels without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + num_bytes]
