"""The record: all that is known about a checkpoint, in its master file, which makes it complete.

A master file shows every array whole, by *virtual datasets*: maps of boxes of an array to ranges of
the ranks' files. Their data stay where they are, so the master file is small and made at once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from zeromp.checkpoint.errors import Broken
from zeromp.checkpoint.files import Dataset, new_checksum, open_hdf5
from zeromp.checkpoint.names import boxes, paths
from zeromp.flat import Array, Layout

VERSION = 1
MASTER = "model.h5"  # its presence makes a folder a complete checkpoint

Segments = NDArray[np.int64]  # rows: rank, array, first and last + 1 element, start in the dataset


@dataclass(frozen=True)
class File:
    """One rank's file.

    Parameters
    ----------
    name : str
    num_bytes : int
    gaps : str
        Checksum of all that is not data.
    datasets : tuple of Dataset
    """

    name: str
    num_bytes: int
    gaps: str
    datasets: tuple[Dataset, ...]


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds, and where.

    Parameters
    ----------
    run : dict
        Of the run, as JSON: counters, loss scale, optimizer, seed, ... See `Zero.save`.
    arrays : tuple of Array
    flats : tuple of int
        Flat of each array.
    kinds : tuple of tuple of str
        What is stored of each flat: ("master", "m", "v"), or ("parameters",) if it is frozen.
    num_ranks, stage : int
    wire : str
    serial : int
        Higher than that of any checkpoint that was in the same folder before.
    aliases : dict of str to str
        Second names of tied arrays.
    files : tuple of File
    segments : ndarray of int64 of shape (k, 5)
        Where elements lie: rank, number of array, low, high, start in the rank's dataset.
    """

    run: dict[str, Any]
    arrays: tuple[Array, ...]
    flats: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]
    num_ranks: int
    stage: int
    wire: str
    serial: int
    aliases: dict[str, str]
    files: tuple[File, ...]
    segments: Segments = field(compare=False)

    def pack(self) -> tuple[bytes, Segments]:
        """As JSON text, and the table."""
        fields = {k: v for k, v in vars(self).items() if k != "segments"}
        fields["arrays"] = [asdict(a) for a in self.arrays]
        fields["files"] = [asdict(f) for f in self.files]
        return json.dumps({"version": VERSION, **fields}).encode(), self.segments

    @classmethod
    def unpack(cls, text: bytes, segments: Segments) -> "Record":
        """From what `pack` gives; ValueError for a version that is not known."""
        fields = json.loads(text)
        version = fields.pop("version")
        if version != VERSION:
            raise ValueError(f"format {version} of checkpoints is not known; this is {VERSION}")
        fields["arrays"] = tuple(
            Array(**{**a, "shape": tuple(a["shape"])}) for a in fields["arrays"]
        )
        fields["files"] = tuple(
            File(**{**f, "datasets": tuple(Dataset(**d) for d in f["datasets"])})
            for f in fields["files"]
        )
        fields["flats"] = tuple(fields["flats"])
        fields["kinds"] = tuple(tuple(kinds) for kinds in fields["kinds"])
        return cls(**fields, segments=segments)

    def dataset(self, rank: int, name: str) -> Dataset:
        """Where a dataset lies in a rank's file."""
        return next(d for d in self.files[rank].datasets if d.name == name)


def segments_of(layout: Layout) -> Segments:
    """Where each rank's datasets hold which elements of which array."""
    number = {array.name: i for i, array in enumerate(layout.arrays)}
    rows = []
    for flat in layout.flats:
        starts = [0] * layout.num_ranks
        for unit, arrays in flat.arrays.items():
            low = 0
            for rank, count in enumerate(flat.counts[unit]):
                for array, start in arrays:
                    a, b = max(start, low), min(start + array.size, low + count)
                    if a < b:
                        place = starts[rank] + a - low
                        rows.append((rank, number[array.name], a - start, b - start, place))
                starts[rank] += count
                low += count
    return np.array(rows, np.int64).reshape(len(rows), 5)


# ---- the master file -----------------------------------------------------------------------------


def master_image(
    record: Record, scalars: Mapping[str, Mapping[str, Any]], folder: str = ""
) -> bytes:
    """Make a master file, as the bytes that are to be written.

    Parameters
    ----------
    record : Record
    scalars : dict of str to dict of str to float
        By kind and name: arrays without dimensions, which HDF5 can't map.
    folder : str
        "" writes the record. Else this is a master file beside the checkpoint's folder of that
        name: it shows the arrays, and is no record.
    """
    places = paths([a.name for a in record.arrays] + list(record.aliases))
    of_array: dict[int, list[Any]] = {}
    for row in record.segments.tolist():
        of_array.setdefault(row[1], []).append(row)
    memory = open_hdf5(Path(MASTER), "w", driver="core", backing_store=False)
    with memory as file:
        file.attrs["zeromp"] = f"checkpoint, format {VERSION}"
        file.attrs["applied"] = record.run.get("applied", 0)
        file.attrs["serial"] = record.serial
        if folder:
            file.attrs["folder"] = folder
        else:
            _write_record(file, record)
        for i, (array, flat) in enumerate(zip(record.arrays, record.flats, strict=True)):
            for j, kind in enumerate(record.kinds[flat]):
                place = places[array.name] if j == 0 else f"state/{kind}/{places[array.name]}"
                values = scalars.get(kind, {}).get(array.name)
                maps = _maps(array, f"flat{flat}/{kind}", of_array.get(i, []), record, folder)
                _write_array(file, place, array, values, list(maps))
                for alias in (a for a, owner in record.aliases.items() if owner == array.name):
                    second = places[alias] if j == 0 else f"state/{kind}/{places[alias]}"
                    file[second] = file[place]
        file.flush()
        return bytes(file.id.get_file_image())


def _write_record(file: Any, record: Record) -> None:
    text, segments = record.pack()
    checksum = new_checksum()
    checksum.update(text)
    checksum.update(segments.tobytes())
    group = file.create_group("zeromp")
    group.create_dataset("record", data=text.decode(), track_times=False)
    group.create_dataset("segments", data=segments, dtype="<i8", track_times=False)
    group.attrs["checksum"] = checksum.hexdigest()


Map = tuple[str, str, int, int, tuple[tuple[int, ...], tuple[int, ...]]]


def _maps(
    array: Array, dataset: str, rows: Sequence[Any], record: Record, folder: str
) -> Iterator[Map]:
    """File, dataset and its size, start, and box, for each box of an array."""
    if not array.shape:
        return
    for rank, _, low, high, start in rows:
        name = record.files[rank].name
        size = record.dataset(rank, dataset).size
        for corner, count in boxes(array.shape, low, high):
            yield f"{folder}/{name}" if folder else name, dataset, size, start, (corner, count)
            start += int(np.prod(count))


def _write_array(file: Any, place: str, array: Array, value: Any, maps: Sequence[Map]) -> None:
    """Make one dataset: virtual, but for arrays without elements or dimensions."""
    if not maps:
        data = np.zeros(array.shape, "<f4") if value is None else np.float32(value)
        file.create_dataset(place, data=data, dtype="<f4", track_times=False)
    else:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_obj_track_times(False)
        # HDF5 shows a missing file as this value, without an error: then at least not as zeros.
        plan.set_fill_value(np.array(np.nan, "<f4"))
        whole = h5py.h5s.create_simple(array.shape)
        for name, dataset, size, start, (corner, count) in maps:
            whole.select_hyperslab(corner, count)
            source = h5py.h5s.create_simple((size,))
            source.select_hyperslab((start,), (int(np.prod(count)),))
            plan.set_virtual(whole, name.encode(), f"/{dataset}".encode(), source)
        whole.select_all()
        links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        h5py.h5d.create(file.id, place.encode(), h5py.h5t.IEEE_F32LE, whole, plan, links)


def read_record(path: Path) -> Record:
    """Record in a master file.

    Raises
    ------
    Broken
        If it can't be read, or its checksum is wrong.
    """
    try:
        with open_hdf5(path) as file:
            group = file["zeromp"]
            text, segments = group["record"][()], group["segments"][:]
            wanted = group.attrs["checksum"]
    except FileNotFoundError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        if "HDF5_USE_FILE_LOCKING" in str(error) or isinstance(error, PermissionError):
            raise
        raise Broken(f"{path}, dataset zeromp/record: can't be read ({error})") from error
    checksum = new_checksum()
    checksum.update(text)
    checksum.update(segments.tobytes())
    if checksum.hexdigest() != wanted:
        raise Broken(f"{path}, dataset zeromp/record: its checksum is wrong")
    return Record.unpack(text, segments)
