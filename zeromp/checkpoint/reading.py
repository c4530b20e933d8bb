"""Reading a checkpoint, in one process or in many: by name and range, and whether it is sound."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from zeromp.checkpoint.errors import Broken
from zeromp.checkpoint.files import (
    ITEM_BYTES,
    TILE_BYTES,
    checksum_of,
    gaps_checksum,
    read_all,
    tiles,
)
from zeromp.checkpoint.folders import complete, find
from zeromp.checkpoint.record import MASTER, File, Record, read_record
from zeromp.flat import Array
from zeromp.wire import F32, FORMATS, convert, first_nonfinite

__all__ = ["Checkpoint", "Shard", "Source", "complete", "find"]

Progress = Callable[[int], Any]


class Shard(NamedTuple):
    """One rank's file: its path, size, and checksums by dataset ("" is HDF5's own bytes)."""

    path: Path
    num_bytes: int
    checksums: dict[str, str]


class Source(NamedTuple):
    """Where a run of elements is stored: rank, first element in its dataset, number of them."""

    rank: int
    start: int
    size: int


class Checkpoint:
    """A complete checkpoint, opened to be read. A context manager.

    Parameters
    ----------
    path : path
        Its folder, ``step-...``; `find` gives the newest of many.
    record : Record or None
        None reads it from the master file.

    Attributes
    ----------
    path : Path
    contents : Record
        What it holds, and where.
    arrays : tuple of Array
        Name, unit, shape, format, and whether it is trained, of each array.
    aliases : dict of str to str
        Second names of tied arrays.
    bytes_read : int
        Read so far by `read` and `read_range`.

    Raises
    ------
    FileNotFoundError, Broken
        If it has no master file, or a damaged one.
    """

    def __init__(self, path: Path | str, record: Record | None = None) -> None:
        self.path = Path(path)
        if record is None:
            try:
                record = read_record(self.path / MASTER)
            except FileNotFoundError:
                text = f"no checkpoint at {self.path}: it has no {MASTER}"
                raise FileNotFoundError(text) from None
        self.contents = record
        self.arrays: tuple[Array, ...] = record.arrays
        self.aliases = record.aliases
        self.bytes_read = 0
        self._number = {array.name: i for i, array in enumerate(record.arrays)}
        self._rows: dict[int, list[list[int]]] = defaultdict(list)
        for row in sorted(record.segments.tolist()):
            self._rows[row[1]].append(row)
        self._open: tuple[int, int] | None = None  # rank and descriptor of the file in use

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file in use."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    # ---- what is in it ---------------------------------------------------------------------------

    @property
    def record(self) -> dict[str, Any]:
        """All metadata as a plain dict: counters, optimizer, num_ranks, stage, wire, ..."""
        of_cut = ("num_ranks", "stage", "wire", "serial", "aliases")
        return {**self.contents.run, **{name: getattr(self.contents, name) for name in of_cut}}

    @property
    def files(self) -> list[Shard]:
        """Every rank's file."""
        return [
            Shard(
                self.path / file.name,
                file.num_bytes,
                {"": file.gaps, **{d.name: d.checksum for d in file.datasets}},
            )
            for file in self.contents.files
        ]

    def find_array(self, name: str) -> Array | None:
        """Array of a name, also if that is a second one; None if there is none."""
        number = self._number.get(self.aliases.get(name, name))
        return None if number is None else self.arrays[number]

    def kinds(self, name: str) -> tuple[str, ...]:
        """What is stored of an array: ("master", "m", "v"), or ("parameters",) if frozen."""
        return self.contents.kinds[self.flat_of(name)]

    def _find(self, name: str) -> int:
        number = self._number.get(self.aliases.get(name, name))
        if number is None:
            some = ", ".join([*self._number][:12])
            raise ValueError(f"{self.path} has no array {name!r}; there are {some}, ...")
        return number

    # ---- numbers out -----------------------------------------------------------------------------

    def read(self, kind: str, name: str) -> F32:
        """Whole array, or moment, as float32 in its shape."""
        array = self.arrays[self._find(name)]
        values = np.empty(array.size, np.float32)
        self.read_range(kind, name, 0, array.size, values)
        return values.reshape(array.shape)

    def read_range(self, kind: str, name: str, low: int, high: int, into: F32) -> None:
        """Fill `into` with elements `low` to `high`, in C order, of an array, as float32."""
        if kind not in self.kinds(name):
            raise ValueError(f"{self.path} has no {kind!r} of {name!r}, only {self.kinds(name)}")
        at = 0
        for source in self.sources(name, low, high):
            self.read_source(self.dataset_name(kind, name), source, into[at : at + source.size])
            at += source.size
        assert at == high - low == into.size, (name, low, high, at, into.size)

    def dataset_name(self, kind: str, name: str) -> str:
        """Name of the dataset of the ranks' files that holds an array's kind."""
        return f"flat{self.flat_of(name)}/{kind}"

    def flat_of(self, name: str) -> int:
        """Number of the flat in which an array is stored."""
        return self.contents.flats[self._find(name)]

    def sources(self, name: str, low: int, high: int) -> Iterator[Source]:
        """Where elements `low` to `high` of an array lie, in order."""
        for rank, _, first, end, start in self._rows[self._find(name)]:
            a, b = max(low, first), min(high, end)
            if a < b:
                yield Source(rank, start + a - first, b - a)

    def read_source(self, dataset: str, source: Source, into: F32) -> None:
        """Fill `into` from one run of a rank's dataset."""
        found = self.contents.dataset(source.rank, dataset)
        item = ITEM_BYTES[found.format]
        what = f"{self.path / self.contents.files[source.rank].name}, dataset {dataset}"
        descriptor = self._descriptor(source.rank)
        for part in tiles(source.size, 4):
            values = into[part]
            raw = values if item == 4 else np.empty(values.size, FORMATS[found.format].dtype)
            read_all(descriptor, raw, found.offset + (source.start + part.start) * item, what)
            if raw is not values:
                convert(raw, values)
        self.bytes_read += source.size * item

    def read_bytes(self, rank: int, dataset: str) -> bytes:
        """All bytes of a small dataset of a rank's file."""
        found = self.contents.dataset(rank, dataset)
        raw = np.empty(found.num_bytes, np.uint8)
        read_all(self._descriptor(rank), raw, found.offset, dataset)
        return raw.tobytes()

    def _descriptor(self, rank: int) -> int:
        if self._open is None or self._open[0] != rank:
            self.close()
            self._open = (rank, _open(self.path / self.contents.files[rank].name))
        return self._open[1]

    # ---- is it sound? ----------------------------------------------------------------------------

    def check_files(self) -> list[str]:
        """Files that are missing or have the wrong size, in words; none if all is well."""
        found = []
        for shard in self.files:
            try:
                _check_size(shard.path, shard.num_bytes)
            except Broken as error:
                found.append(str(error))
        return found

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Read everything; what is wrong with it in words, none if all is well.

        Looks for missing and truncated files, wrong checksums, and numbers that are not finite.

        Parameters
        ----------
        progress : callable
            Called with the number of bytes after each dataset.
        """
        found = []
        for file in self.contents.files:
            try:
                check_file(self.path, file, progress)
            except Broken as error:
                found.append(str(error))
        return found or self._not_finite()

    def _not_finite(self) -> list[str]:
        found = []
        values = np.empty(TILE_BYTES // 4, np.float32)
        for array in self.arrays:
            for kind in self.kinds(array.name):
                for part in tiles(array.size, 4):
                    tile = values[: part.stop - part.start]
                    self.read_range(kind, array.name, part.start, part.stop, tile)
                    if (bad := first_nonfinite(tile)) >= 0:
                        found.append(
                            f"{self.path}: {kind} of {array.name!r} holds {tile[bad]} at flat "
                            f"index {part.start + bad}"
                        )
                        break
        return found


def check_file(folder: Path, file: File, progress: Progress | None = None) -> int:
    """Compare a rank's file with its record; returns the bytes read.

    Raises
    ------
    Broken
        Names the file, and the dataset whose checksum is wrong.
    """
    path = folder / file.name
    _check_size(path, file.num_bytes)
    tile = np.empty(TILE_BYTES, np.uint8)
    descriptor = _open(path)
    try:
        for dataset in file.datasets:
            end = dataset.offset + dataset.num_bytes
            what = f"{path}, dataset {dataset.name}"
            found = checksum_of(descriptor, dataset.offset, end, tile, what)
            if found != dataset.checksum:
                raise Broken(f"{what}: its checksum is {found}, it must be {dataset.checksum}")
            if progress is not None:
                progress(dataset.num_bytes)
        if gaps_checksum(descriptor, file.num_bytes, file.datasets, tile, str(path)) != file.gaps:
            raise Broken(f"{path}: the checksum of what HDF5 keeps around the datasets is wrong")
    finally:
        os.close(descriptor)
    return file.num_bytes


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise Broken(f"{path} is missing") from None
    if size != num_bytes:
        how = "truncated" if size < num_bytes else "too long"
        raise Broken(f"{path} is {how}: it has {size:,} bytes, it must have {num_bytes:,}")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise Broken(f"{path} is missing") from None
    except PermissionError:
        raise Broken(f"{path} can't be read: permission denied") from None
