"""Folders of checkpoints: their names, which is newest, which may go."""

import contextlib
import math
import re
import shutil
from pathlib import Path

from zeromp.checkpoint.files import open_hdf5, sync_folder
from zeromp.checkpoint.record import MASTER

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def folder_name(applied: int, repeat: int) -> str:
    """Name of a checkpoint's folder; the same step may be saved again."""
    return f"step-{applied:08d}" + (f"-{repeat}" if repeat else "")


def rank_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank{rank:05d}.h5"


def complete(directory: Path | str) -> list[Path]:
    """Complete checkpoints in a folder, oldest first.

    The order is that in which they were written, which the files themselves tell: a run that went
    back to an earlier step writes lower numbers later. One that can't be read counts as newest, so
    that it is not passed over in silence.
    """
    return [path for _, path in _in_order(Path(directory))]


def find(directory: Path | str) -> Path:
    """Newest complete checkpoint of a folder; or the folder, if it is one itself.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    directory = Path(directory)
    if found := complete(directory):
        return found[-1]
    if is_checkpoint(directory):
        return directory
    raise FileNotFoundError(_nothing(directory))


def candidates(directory: Path) -> list[Path]:
    """What may be loaded from a folder, best first; FileNotFoundError if nothing."""
    return complete(directory)[::-1] or [find(directory)]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint, by its contents."""
    if not (folder / MASTER).is_file():
        return False
    if _NAME.fullmatch(folder.name):
        return True
    try:
        with open_hdf5(folder / MASTER) as file:
            return "folder" not in file.attrs
    except OSError:
        return True  # a broken one; reading it will tell


def new_folder(directory: Path, applied: int) -> tuple[str, int]:
    """Name for a new checkpoint, and its serial number; what an ended save left there goes."""
    serials = [serial for serial, _ in _in_order(directory) if serial < math.inf]
    repeat = 0
    while (directory / folder_name(applied, repeat) / MASTER).exists():
        repeat += 1
    name = folder_name(applied, repeat)
    if (directory / name).exists():
        shutil.rmtree(directory / name)
    return name, 1 + int(max(serials, default=0))


def prune(directory: Path, keep: int | None) -> None:
    """Remove what ended saves left behind, and all complete checkpoints but the last `keep`.

    Checkpoints whose master file can't be read are neither counted nor removed.
    """
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) and not (path / MASTER).exists():
            shutil.rmtree(path, ignore_errors=True)
    readable = [path for serial, path in _in_order(directory) if serial < math.inf]
    for path in readable[: max(len(readable) - keep, 0)] if keep else []:
        (path / MASTER).unlink()  # first, so that what is removed by half is not complete
        sync_folder(path)
        shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove an incomplete checkpoint, as far as it goes."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


def _in_order(directory: Path) -> list[tuple[float, Path]]:
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MASTER).is_file():
            key = (_serial(path / MASTER), int(match[1]), int(match[2] or 0))
            found.append((key, path))
    return [(key[0], path) for key, path in sorted(found)]


def _serial(master: Path) -> float:
    try:
        with open_hdf5(master) as file:
            return int(file.attrs["serial"])
    except (OSError, KeyError, RuntimeError, ValueError):
        return math.inf


def _nothing(directory: Path) -> str:
    if not directory.is_dir():
        return f"no checkpoint at {directory}: there is no such folder"
    if any(_NAME.fullmatch(path.name) for path in directory.iterdir()):
        return f"no checkpoint in {directory}: there are incomplete ones only, without {MASTER}"
    if _NAME.fullmatch(directory.name) and any(directory.iterdir()):
        return f"checkpoint {directory} is incomplete: it has no {MASTER}"
    return f"no checkpoint in {directory}: it holds no folder step-... with a {MASTER}"
