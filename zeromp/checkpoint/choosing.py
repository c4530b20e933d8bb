"""Choosing what to load: one checkpoint on which all ranks agree, and which is sound."""

from pathlib import Path

import numpy as np

from zeromp.checkpoint.errors import Broken
from zeromp.checkpoint.folders import candidates
from zeromp.checkpoint.reading import Checkpoint, check_file
from zeromp.checkpoint.record import Record
from zeromp.world import World


def choose(world: World, directory: Path, verify: bool) -> tuple[Path, Record, int]:
    """Agree on the newest checkpoint that is sound, or on the one that `directory` is.

    Rank 0 alone looks into the folder; files are verified by all ranks, each reading its share.

    Returns
    -------
    Path, Record, int
        Folder, record, and the bytes that this rank has read to verify it.

    Raises
    ------
    FileNotFoundError
        If there is none.
    Broken
        If none is sound; says what is wrong with the newest.
    """
    world.barrier(f"load from {directory}")
    world.same("directory to load from", str(directory))
    found: list[Path] = []
    with world.together():
        if world.rank == 0:
            found = candidates(directory)
    first: Broken | None = None
    for i in range(int(world.agree([len(found)])[0, 0])):
        path = Path(_share(world, str(found[i]).encode() if found else b"").decode())
        try:
            return path, *_open_sound(world, path, verify)
        except Broken as error:
            first = first or error
            world.print(f"checkpoint {path} is not used: {error}")
    assert first is not None
    raise first


def _open_sound(world: World, path: Path, verify: bool) -> tuple[Record, int]:
    """Give all ranks the record that rank 0 reads, and compare all files with it."""
    text, table = b"", b""
    with world.together():
        if world.rank == 0:
            with Checkpoint(path) as checkpoint:
                text, segments = checkpoint.contents.pack()
                table = segments.tobytes()
                if problems := checkpoint.check_files():
                    raise Broken(problems[0])
    text, table = _share(world, text), _share(world, table)
    record = Record.unpack(text, np.frombuffer(table, np.int64).reshape(-1, 5))
    num_bytes = 0
    with world.together():
        for file in record.files[world.rank :: world.size] if verify else ():
            num_bytes += check_file(path, file)
    return record, num_bytes


def _share(world: World, data: bytes) -> bytes:
    """Rank 0's bytes, on all ranks."""
    length = int(world.agree([len(data)])[0, 0])
    array = np.zeros(length, np.uint8)
    if world.rank == 0:
        array[:] = np.frombuffer(data, np.uint8)
    world.broadcast(array)
    return array.tobytes()
