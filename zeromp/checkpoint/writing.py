"""One rank's file: written tile by tile, with no copy of the shard in memory."""

import contextlib
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.checkpoint.files import (
    TILE_BYTES,
    Dataset,
    check_room,
    gaps_checksum,
    lay_out,
    new_checksum,
    no_space,
    read_all,
    sync_folder,
    tiles,
    write_all,
)
from zeromp.checkpoint.held import Part
from zeromp.checkpoint.record import File
from zeromp.checkpoint.snapshot import FileRange, Snapshot

FLUSH_BYTES = 2**24  # the disk is told to start on every 16 MiB, while the next are prepared


def write_rank_file(path: Path, snapshot: Snapshot, attributes: dict[str, Any]) -> File:
    """Write a rank's file and flush it.

    Raises
    ------
    OSError
        With "no space" and the sizes, if the disk is full; the file is removed then.
    """
    wanted = [part.dataset for part in snapshot.parts]
    num_bytes = sum(d.num_bytes for d in wanted)
    try:
        check_room(path, num_bytes)
        offsets = lay_out(path, wanted, attributes)
        num_bytes = path.stat().st_size
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            tile = np.empty(TILE_BYTES, np.uint8)
            written = [
                _write(descriptor, part, offset, snapshot, tile)
                for part, offset in zip(snapshot.parts, offsets, strict=True)
            ]
            gaps = gaps_checksum(descriptor, num_bytes, written, tile, str(path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink()
        if isinstance(error, OSError):
            raise no_space(path, num_bytes, error) from error
        raise
    return File(path.name, num_bytes, gaps, tuple(written))


def _write(
    descriptor: int, part: Part, offset: int, snapshot: Snapshot, tile: NDArray[np.uint8]
) -> Dataset:
    """Write one dataset; returns it with offset and checksum."""
    found, at, told = new_checksum(), offset, offset
    for view in part.views:
        place = snapshot.file_range(view)
        if place is not None:
            _copy_file(place, descriptor, at, found, tile)
            at += view.nbytes
            continue
        for piece in tiles(view.size, view.itemsize):
            values = view[piece]
            values = snapshot.tile(values, tile[: values.nbytes].view(values.dtype))
            found.update(values)
            write_all(descriptor, values, at)
            at += values.nbytes
            if at - told >= FLUSH_BYTES:
                told = _flush(descriptor, told, at)
    _flush(descriptor, told, at)
    return replace(part.dataset, offset=offset, checksum=str(found.hexdigest()))


def _flush(descriptor: int, low: int, high: int) -> int:
    """Let the disk begin with what is written, instead of at the end; returns `high`."""
    if high > low:
        os.posix_fadvise(descriptor, low, high - low, os.POSIX_FADV_DONTNEED)
    return high


def _copy_file(
    place: FileRange, descriptor: int, offset: int, found: Any, tile: NDArray[np.uint8]
) -> None:
    """Copy a range of a file to a file, sharing blocks where the file system can.

    `copy_file_range` does that by itself (reflink). The checksum is taken from tiles of the source,
    which must be quiet.
    """
    path, start, num_bytes = place
    source = os.open(path, os.O_RDONLY)
    try:
        done = _copy_in_kernel(source, start, descriptor, offset, num_bytes)
        for low in range(0, num_bytes, tile.size):
            piece = tile[: min(tile.size, num_bytes - low)]
            read_all(source, piece, start + low, str(path))
            found.update(piece)
            if low + piece.size > done:
                write_all(descriptor, piece, offset + low)
    finally:
        os.close(source)


def _copy_in_kernel(source: int, start: int, descriptor: int, offset: int, num_bytes: int) -> int:
    """Copy as much as the file systems can without us; returns the bytes copied."""
    done = 0
    while done < num_bytes:
        try:
            count = os.copy_file_range(
                source, descriptor, num_bytes - done, start + done, offset + done
            )
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                return done
            raise
        if count == 0:
            return done
        done += count
    return done
