"""Weights: whole arrays by name, out to .safetensors and .npz files and in again, one at a time.

[Note: the file of safetensors] Eight bytes give the length of a JSON header, which gives every
array's dtype, shape and place in the raw data that follow. The safetensors library writes a file
from all arrays at once, and NumPy has no bfloat16 for it to return; so the format is written and
read here, array by array, and the tests compare with what the library reads and writes.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from zeromp.engine import Engine
from zeromp.wire import F32, FORMATS, Bits, convert, format_of
from zeromp.zero import Zero

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of safetensors
NUMPY_NAMES = {"float32": "<f4", "float16": "<f2"}
READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
TILE = 2**18  # elements that are converted at a time
MAX_HEADER = 10**8  # bytes; the library's own limit

Put = Callable[[str, F32], None]
Rename = Mapping[str, str] | Callable[[str], str | None] | None


# ---- out -----------------------------------------------------------------------------------------


def export(source: Engine | Zero, path: str | Path, dtype: str = "float32") -> None:
    """Write all weights into one file. Call on all ranks; rank 0 writes.

    It may be called at any time between two steps: after construction, evaluation or loading, and
    inside `gathered`. Arrays are gathered and written one at a time.

    Parameters
    ----------
    source : Engine or Zero
    path : path
        Ends in ``.safetensors`` or ``.npz``. A file of that name is replaced when the new one is
        complete.
    dtype : {"float32", "bfloat16", "float16"}
        "float32" writes the masters. A 16-bit format writes them rounded once, which in the
        format of the wire gives the weights that training uses, those of `Zero.full`. NumPy has no
        bfloat16, so there is none in ``.npz``.

    Raises
    ------
    ValueError
        On all ranks, for another ending or dtype, or a weight that float16 can't hold.
    OSError
        On all ranks, if the file can't be written.

    Notes
    -----
    An array with several names (tied) is stored once, under the first; a ``.safetensors`` file
    lists its other names in the header's metadata, and `load` knows them.
    """
    zero = source.zero if isinstance(source, Engine) else source
    shapes = {array.name: array.shape for array in zero.layout.arrays}
    with zero.world.ledger.within("inspect"), ExitStack() as file:
        with zero.world.together():
            check_target(path, dtype)
            if zero.world.rank == 0:
                put = file.enter_context(writing(path, shapes, dtype, zero.aliases))
        for name in shapes:
            values = zero.master(name)
            with zero.world.together():
                if zero.world.rank == 0:
                    put(name, values)
        with zero.world.together():
            file.close()


def check_target(path: str | Path, dtype: str) -> None:
    """ValueError unless a file of that ending can hold that dtype."""
    ending = _ending(Path(path))
    format_of(dtype)
    if ending == ".npz" and dtype not in NUMPY_NAMES:
        raise ValueError(
            f"{path}: NumPy has no bfloat16: write .safetensors, or float32 or float16 into .npz"
        )


def _ending(path: Path) -> str:
    if path.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"{path}: weights are in files that end in .safetensors or .npz")
    return path.suffix


@contextmanager
def writing(
    path: str | Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: str = "float32",
    aliases: Mapping[str, str] | None = None,
) -> Iterator[Put]:
    """Write a file of arrays, beside its place; put it there when the block ends without error.

    Parameters
    ----------
    path : path
    shapes : dict of str to tuple of int
    dtype : str
    aliases : dict of str to str
        Other names of arrays; ``.npz`` has no place for them.

    Yields
    ------
    callable
        Takes name and float32 values of each array, in the order of `shapes`.
    """
    path = Path(path)
    check_target(path, dtype)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    write = _write_safetensors if path.suffix == ".safetensors" else _write_npz
    try:
        with unfinished.open("wb") as file:
            with write(file, shapes, dtype, aliases or {}) as put:
                yield put
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _write_safetensors(
    file: IO[bytes], shapes: Mapping[str, Any], dtype: str, aliases: Mapping[str, str]
) -> Iterator[Put]:
    header: dict[str, Any] = {"__metadata__": {"format": "np", **aliases}}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * format_of(dtype).itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)

    def put(name: str, values: F32) -> None:
        for tile in _tiles(name, values, dtype):
            file.write(tile)

    yield put


@contextmanager
def _write_npz(
    file: IO[bytes], shapes: Mapping[str, Any], dtype: str, _: Mapping[str, str]
) -> Iterator[Put]:
    with zipfile.ZipFile(file, "w") as archive:

        def put(name: str, values: F32) -> None:
            shape = tuple(shapes[name])
            about = {"descr": NUMPY_NAMES[dtype], "fortran_order": False, "shape": shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, about)
                for tile in _tiles(name, values, dtype):
                    member.write(tile)

        yield put


def _tiles(name: str, values: F32, dtype: str) -> Iterator[memoryview]:
    """Bytes of an array in a format, tile by tile."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    narrowed: Bits = np.empty(min(TILE, flat.size), FORMATS[dtype].dtype)
    for start in range(0, flat.size, TILE):
        tile = flat[start : start + TILE]
        out = narrowed[: tile.size]
        convert(tile, out)
        if dtype == "float16" and np.isinf(out.view(np.float16)).any() and np.isfinite(tile).all():
            raise ValueError(
                f"{name!r} holds {np.abs(tile).max():g}, more than float16 can: take bfloat16"
            )
        yield out.data.cast("B")


# ---- in ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One array in a file.

    Parameters
    ----------
    name : str
        In the file.
    dtype : str
        As the file calls it.
    shape : tuple of int
    offset : int
        Of its data in a ``.safetensors`` file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


class Weights(Mapping[str, F32]):
    """Arrays of a file by name, each read, as float32, when it is asked for; see `load`.

    Attributes
    ----------
    path : Path
    stored : dict of str to Stored
    """

    def __init__(self, path: Path, stored: Mapping[str, Stored]) -> None:
        self.path, self.stored = path, stored

    def __getitem__(self, name: str) -> F32:
        entry = self.stored[name]
        read = _read_raw if self.path.suffix == ".safetensors" else _read_member
        return read(self.path, entry)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __repr__(self) -> str:
        return f"<{len(self)} arrays of {self.path}>"


def load(path: str | Path, rename: Rename = None) -> Weights:
    """Open a file of weights for ``Engine(weights=...)``.

    Only the header is read now, and each array when it is asked for. Arrays may be float64, which
    are rounded, float32, float16 or bfloat16.

    Parameters
    ----------
    path : path
        Ends in ``.safetensors`` or ``.npz``.
    rename : dict of str to str, callable, or None
        From the file's names to the model's. Names that a dict lacks stay as they are; a callable
        may return None to leave an array out.

    Returns
    -------
    Weights
        A read-only mapping of names to float32 arrays.

    Raises
    ------
    ValueError
        If the file is not what its ending says, or two arrays come to one name.
    """
    path = Path(path)
    header = _safetensors_header if _ending(path) == ".safetensors" else _npz_header
    with _damage(path):
        stored = header(path)
    if isinstance(rename, Mapping) and (unknown := rename.keys() - stored.keys()):
        raise ValueError(f"rename: {path} has no array {', '.join(map(repr, sorted(unknown)))}")
    found: dict[str, Stored] = {}
    for name, entry in stored.items():
        new = rename(name) if callable(rename) else (rename or {}).get(name, name)
        if new is None:
            continue
        if new in found:
            raise ValueError(f"rename: {found[new].name!r} and {name!r} both come to {new!r}")
        found[new] = entry
    return Weights(path, found)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Give an error of the libraries below, while a file is read, the file's name."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged, or no {path.suffix} file: {error!r}") from error


def _safetensors_header(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, path.stat().st_size - 8):
            raise ValueError(f"its header would have {length:,} bytes")
        header = json.loads(file.read(length))
    aliases = header.pop("__metadata__", {})
    stored = {}
    for name, about in header.items():
        first, end = about["data_offsets"]
        stored[name] = Stored(name, about["dtype"], tuple(about["shape"]), 8 + length + first)
        if 8 + length + end > path.stat().st_size:
            raise ValueError(f"{name!r} goes beyond its end")
    return stored | {alias: stored[name] for alias, name in aliases.items() if name in stored}


def _read_raw(path: Path, entry: Stored) -> F32:
    if entry.dtype not in READABLE:
        raise ValueError(f"{path}: {entry.name!r} is {entry.dtype}, which is no weight's dtype")
    count = math.prod(entry.shape)
    raw = np.fromfile(path, READABLE[entry.dtype], count, offset=entry.offset)
    if raw.size < count:
        raise ValueError(f"{path} is truncated: {entry.name!r} goes beyond its end")
    if entry.dtype == "BF16":
        values = np.empty(count, np.float32)
        convert(raw, values)
        return values.reshape(entry.shape)
    return raw.astype(np.float32, copy=False).reshape(entry.shape)


def _npz_header(path: Path) -> dict[str, Stored]:
    stored = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                major, _ = np.lib.format.read_magic(file)
                read = {
                    1: np.lib.format.read_array_header_1_0,
                    2: np.lib.format.read_array_header_2_0,
                }[major]
                shape, _, dtype = read(file)
            name = member.removesuffix(".npy")
            stored[name] = Stored(name, str(dtype), shape)
    return stored


def _read_member(path: Path, entry: Stored) -> F32:
    if np.dtype(entry.dtype).kind != "f":
        raise ValueError(f"{path}: {entry.name!r} is {entry.dtype}, which is no weight's dtype")
    with (
        _damage(path),
        zipfile.ZipFile(path) as archive,
        archive.open(f"{entry.name}.npy") as file,
    ):
        values = np.lib.format.read_array(file, allow_pickle=False)
    return np.asarray(values, np.float32, order="C")
