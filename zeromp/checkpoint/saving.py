"""Saving: every rank writes its file, and rank 0 commits by renaming one small one.

The steps, and what a kill after each leaves behind:

1. Rank 0 makes a folder ``step-...``. Every rank writes its file there and flushes it. The folder
   has no master file, so it is no checkpoint, and the next save removes it.
2. When all ranks are done, rank 0 writes the folder's master file beside its place, flushes it and
   renames it. From this moment the checkpoint exists.
3. The master file of the whole directory is replaced, likewise by a rename.
4. Older checkpoints, beyond those to be kept, are removed, each beginning with its master file.
"""

import contextlib
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from zeromp.checkpoint.files import Dataset, replace_file, sync_folder
from zeromp.checkpoint.folders import folder_name, new_folder, prune, rank_name, remove
from zeromp.checkpoint.held import Held, Part, own_parts
from zeromp.checkpoint.reading import Checkpoint
from zeromp.checkpoint.record import MASTER, File, Record, master_image, segments_of
from zeromp.checkpoint.snapshot import CopyOnWrite, Live, Snapshot
from zeromp.checkpoint.writing import write_rank_file


@dataclass(frozen=True)
class Request:
    """What a save is asked for, the same on all ranks but for `rank_extra`.

    Parameters
    ----------
    directory : Path
    run : dict
        JSON for the record; "applied" names the folder.
    stage : int
    wire : str
    aliases : dict of str to str
    keep : int or None
    rank_extra : bytes
        JSON of this rank's own.
    """

    directory: Path
    run: dict[str, Any]
    stage: int
    wire: str
    aliases: dict[str, str]
    keep: int | None
    rank_extra: bytes


@dataclass
class _Pending:
    """A save whose file is being written, by a thread or by the caller."""

    request: Request
    folder: Path
    serial: int
    snapshot: Snapshot
    thread: threading.Thread | None = None
    file: File | None = None
    error: Exception | None = field(default=None)

    def write(self, rank: int) -> None:
        """Write this rank's file; an error is kept for the next collective call."""
        try:
            path = self.folder / rank_name(rank)
            self.file = write_rank_file(path, self.snapshot, {"rank": rank})
        except Exception as error:
            self.error = error
        finally:
            self.snapshot.close()


class Saver:
    """Writes what a `Held` holds. Every method must be called on all ranks."""

    def __init__(self, held: Held) -> None:
        self.held, self.world = held, held.world
        self._pending: _Pending | None = None

    def save(self, request: Request, wait: bool) -> Path:
        """Write a checkpoint; returns its folder, which is complete only after `finish`."""
        with self.world.ledger.within("checkpoint"):
            self.finish()
            folder, serial = self._make_folder(request)
            try:
                with self.world.together():
                    extra = np.frombuffer(request.rank_extra, np.uint8)
                    parts = [*own_parts(self.held)]
                    parts.append(Part(Dataset("extra", "bytes", extra.size), [extra]))
                    kind = Live if wait else CopyOnWrite
                    snapshot: Snapshot = kind(parts, self.held.store)
            except Exception:
                self._undo(folder)
                raise
            self._pending = pending = _Pending(request, folder, serial, snapshot)
            if wait:
                pending.write(self.world.rank)
                self.finish()
            else:
                pending.thread = threading.Thread(target=pending.write, args=(self.world.rank,))
                pending.thread.start()
        return folder

    def poll(self) -> None:
        """Finish a save in the background if all ranks have written; raise its error if one has."""
        if self._pending is None:
            return
        with self.world.ledger.within("checkpoint"):
            thread = self._pending.thread
            writing = thread is not None and thread.is_alive()
            table = self.world.agree([writing, not writing and self._pending.error is not None])
            if not table[:, 0].any() or table[:, 1].any():
                self.finish()

    def finish(self) -> Path | None:
        """Wait for a save in the background and commit it; its folder, None if there is none."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        with self.world.ledger.within("checkpoint"):
            if pending.thread is not None:
                self.world.barrier(f"finish_save to {pending.request.directory}")
                pending.thread.join()
            try:
                with self.world.together():
                    if pending.error is not None:
                        raise pending.error
                assert pending.file is not None
                files = self._exchange(pending.file)
                with self.world.together():
                    if self.world.rank == 0:
                        self._commit(pending, files)
            except Exception:
                self._undo(pending.folder)
                raise
            with self.world.together():
                if self.world.rank == 0:
                    prune(pending.request.directory, pending.request.keep)
        return pending.folder

    def _make_folder(self, request: Request) -> tuple[Path, int]:
        """Make a folder on rank 0 alone, and tell all ranks its name."""
        name, serial = "", 0
        with self.world.together():
            if self.world.rank == 0:
                request.directory.mkdir(parents=True, exist_ok=True)
                name, serial = new_folder(request.directory, request.run["applied"])
                (request.directory / name).mkdir()
                sync_folder(request.directory)
        _, _, suffix = name.removeprefix("step-").partition("-")
        repeat, serial = self.world.agree([int(suffix or 0), serial])[0].astype(int).tolist()
        return request.directory / folder_name(request.run["applied"], repeat), serial

    def _undo(self, folder: Path) -> None:
        """Remove what a failed save has written, unless it is committed."""
        if self.world.rank == 0 and not (folder / MASTER).exists():
            remove(folder)

    def _exchange(self, file: File) -> list[File]:
        """Every rank's file, on all ranks: only numbers are sent, which differ."""
        row = [file.num_bytes, *_halves(file.gaps)]
        for d in file.datasets:
            row += [d.offset, d.size, *_halves(d.checksum)]
        files = []
        for rank, (num_bytes, high, low, *rest) in enumerate(
            self.world.agree(row).astype(np.int64).tolist()
        ):
            found = [rest[i : i + 4] for i in range(0, len(rest), 4)]
            datasets = tuple(
                replace(d, offset=offset, size=size, checksum=f"{a:08x}{b:08x}")
                for d, (offset, size, a, b) in zip(file.datasets, found, strict=True)
            )
            files.append(File(rank_name(rank), num_bytes, f"{high:08x}{low:08x}", datasets))
        return files

    def _commit(self, pending: _Pending, files: list[File]) -> None:
        record = self._record(pending, files)
        scalars = self._scalars(pending.folder, record)
        replace_file(pending.folder / MASTER, master_image(record, scalars))
        image = master_image(record, scalars, pending.folder.name)
        replace_file(pending.request.directory / MASTER, image)

    def _record(self, pending: _Pending, files: list[File]) -> Record:
        layout, request = self.held.layout, pending.request
        kinds: dict[int, list[str]] = {}
        for dataset in files[0].datasets:
            if dataset.name.startswith("flat"):
                flat, kind = dataset.name.removeprefix("flat").split("/")
                kinds.setdefault(int(flat), []).append(kind)
        return Record(
            run=request.run,
            arrays=layout.arrays,
            flats=tuple(layout.find(a.name)[0] for a in layout.arrays),
            kinds=tuple(tuple(kinds[i]) for i in range(len(layout.flats))),
            num_ranks=layout.num_ranks,
            stage=request.stage,
            wire=request.wire,
            serial=pending.serial,
            aliases=request.aliases,
            files=tuple(files),
            segments=segments_of(layout),
        )

    def _scalars(self, folder: Path, record: Record) -> dict[str, dict[str, Any]]:
        """Arrays without dimensions, by kind and name."""
        found: dict[str, dict[str, Any]] = {}
        with contextlib.closing(Checkpoint(folder, record)) as checkpoint:
            for name in (a.name for a in record.arrays if a.shape == ()):
                for kind in checkpoint.kinds(name):
                    found.setdefault(kind, {})[name] = checkpoint.read(kind, name)
        return found


def _halves(checksum: str) -> tuple[int, int]:
    """64 bits as two whole numbers that float64 holds exactly."""
    return int(checksum[:8], 16), int(checksum[8:], 16)
