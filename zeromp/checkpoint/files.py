"""Files: HDF5 files whose data are written and read past HDF5, checksums, and what is on disk.

[Note: past HDF5] A rank's file is laid out by HDF5 and filled by `pwrite`. Its datasets are
contiguous and allocated at once, so that each has one offset in the file. That makes writing as
fast as the disk, errors come where they happen, and a range is read without opening HDF5. Whoever
opens the file with HDF5 sees ordinary datasets.
"""

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from zeromp.checkpoint.errors import Broken

TILE_BYTES = 2**21
BLOCK_BYTES = 4096  # larger datasets begin at whole blocks, which disks and reflinks want


def bfloat16() -> Any:
    """Type of bfloat16 in HDF5, which every tool reads as the float it is."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # sign, exponent and its size, significand and its size
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def hdf5_type(name: str) -> Any:
    """HDF5's type of a number format, or of bytes."""
    if name == "bfloat16":
        return bfloat16()
    return {
        "float32": h5py.h5t.IEEE_F32LE,
        "float16": h5py.h5t.IEEE_F16LE,
        "bytes": h5py.h5t.STD_U8LE,
    }[name]


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "bytes": 1}


@dataclass(frozen=True)
class Dataset:
    """One dataset of a rank's file.

    Parameters
    ----------
    name : str
        Such as "flat0/master".
    format : str
        "float32", "bfloat16", "float16" or "bytes".
    size : int
        Elements.
    offset : int
        Where its data begin in the file.
    checksum : str
        Of its data.
    """

    name: str
    format: str
    size: int
    offset: int = 0
    checksum: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.size * ITEM_BYTES[self.format]


def open_hdf5(path: Path, mode: str = "r", **options: Any) -> Any:
    """Open an HDF5 file without locking it, which network disks often can't; a context manager."""
    try:
        return h5py.File(path, mode, locking=False, **options)
    except FileNotFoundError:
        raise
    except OSError as error:
        advice = ""
        if "lock file" in str(error):
            advice = ": set HDF5_USE_FILE_LOCKING=FALSE in the environment"
        raise OSError(f"{path} can't be opened: {error}{advice}") from error


def lay_out(path: Path, datasets: Sequence[Dataset], attributes: dict[str, Any]) -> list[int]:
    """Write an HDF5 file with empty room for each dataset; return the offsets of the data."""
    offsets = []
    options = {"alignment_threshold": BLOCK_BYTES, "alignment_interval": BLOCK_BYTES}
    with open_hdf5(path, "w", **options) as file:
        file.attrs.update(attributes)
        for dataset in datasets:
            *groups, name = dataset.name.split("/")
            group = file.require_group("/".join(groups) or "/")
            plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plan.set_layout(h5py.h5d.CONTIGUOUS)
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            plan.set_obj_track_times(False)
            made = h5py.h5d.create(
                group.id,
                name.encode(),
                hdf5_type(dataset.format),
                h5py.h5s.create_simple((dataset.size,)),
                plan,
            )
            offsets.append(made.get_offset() or 0)
    return offsets


def check_room(path: Path, num_bytes: int) -> None:
    """OSError if it is plain beforehand that a file will not fit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and num_bytes > limit:
        raise OSError(errno.EFBIG, f"the limit of a file's size here is {limit:,} bytes")
    disk = os.statvfs(path.parent)
    free = disk.f_bfree * disk.f_frsize
    if num_bytes > free:
        raise OSError(errno.ENOSPC, f"the disk has {free:,} bytes left")


def no_space(path: Path, num_bytes: int, error: OSError) -> OSError:
    """Say what did not fit; other errors are returned as they are, with the path."""
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OSError(
            f"no space for {path} of {num_bytes:,} bytes: {text}. The checkpoint before is "
            "untouched; free some space, or save elsewhere"
        )
    return OSError(f"{path} can't be written: {text}")


def write_all(descriptor: int, values: NDArray[Any], offset: int) -> None:
    """Write an array at an offset, however many calls that takes."""
    rest = values.view(np.uint8).data
    while rest.nbytes:
        count = os.pwrite(descriptor, rest, offset)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        rest, offset = rest[count:], offset + count


def read_all(descriptor: int, into: NDArray[Any], offset: int, what: str) -> None:
    """Fill an array from an offset; Broken if the file ends before."""
    rest = into.view(np.uint8).data
    while rest.nbytes:
        count = os.preadv(descriptor, [rest], offset)
        if count == 0:
            raise Broken(f"{what}: the file ends {rest.nbytes:,} bytes early")
        rest, offset = rest[count:], offset + count


def tiles(size: int, item_bytes: int) -> Iterator[slice]:
    """Cut `size` elements into slices of a tile at most."""
    step = TILE_BYTES // item_bytes
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, image: bytes) -> None:
    """Put a small file in place at once: at no time is there half of it, nor none if there was one.

    It is written beside, flushed, and renamed.
    """
    part = path.with_name(path.name + ".part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(descriptor, np.frombuffer(image, np.uint8), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise no_space(path, len(image), error) from error


# ---- checksums -----------------------------------------------------------------------------------


def new_checksum() -> Any:
    """XXH3 of 64 bits: it must keep up with a disk, not with an adversary."""
    return xxhash.xxh3_64()


def checksum_of(descriptor: int, low: int, high: int, tile: NDArray[np.uint8], what: str) -> str:
    """Checksum of bytes `low` to `high` of an open file."""
    found = new_checksum()
    _add(found, descriptor, low, high, tile, what)
    return str(found.hexdigest())


def gaps_checksum(
    descriptor: int, num_bytes: int, datasets: Sequence[Dataset], tile: NDArray[np.uint8], what: str
) -> str:
    """Checksum of all bytes of a file that are no data: HDF5's own."""
    found, low = new_checksum(), 0
    for dataset in sorted((d for d in datasets if d.size), key=lambda d: d.offset):
        _add(found, descriptor, low, dataset.offset, tile, what)
        low = dataset.offset + dataset.num_bytes
    _add(found, descriptor, low, num_bytes, tile, what)
    return str(found.hexdigest())


def _add(
    found: Any, descriptor: int, low: int, high: int, tile: NDArray[np.uint8], what: str
) -> None:
    for start in range(low, high, tile.size):
        part = tile[: min(tile.size, high - start)]
        read_all(descriptor, part, start, what)
        found.update(part)
