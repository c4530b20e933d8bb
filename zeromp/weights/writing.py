"""Writing: whole arrays by name into one file, one at a time.

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
from pathlib import Path
from typing import IO, Any

import numpy as np

from zeromp.engine import Engine
from zeromp.wire import F32, FORMATS, Bits, convert, format_of
from zeromp.zero import Zero

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of safetensors
NUMPY_NAMES = {"float32": "<f4", "float16": "<f2"}
TILE = 2**18  # elements that are converted at a time

Put = Callable[[str, F32], None]


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
    format_of(dtype)
    if ending(Path(path)) == ".npz" and dtype not in NUMPY_NAMES:
        raise ValueError(
            f"{path}: NumPy has no bfloat16: write .safetensors, or float32 or float16 into .npz"
        )


def ending(path: Path) -> str:
    """Ending of a file's name; ValueError if weights can't be in such a file."""
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
