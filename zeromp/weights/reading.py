"""Reading: arrays of a file by name, each when it is asked for.

The form of .safetensors files is in [Note: the file of safetensors].
"""

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeromp.weights.writing import ending
from zeromp.wire import F32, convert

READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_HEADER = 10**8  # bytes; the library's own limit

Rename = Mapping[str, str] | Callable[[str], str | None] | None


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
    header = _safetensors_header if ending(path) == ".safetensors" else _npz_header
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
