"""One folder per job for files on disk: made, held while the job lives, and cleaned after it.

[Note: who is alive] Every rank holds a lock on ``rank00000.alive`` in its job's folder as long as
it lives; the system takes the lock away when the process ends, however it ends. So a file that can
be locked belongs to a dead rank: its left-overs are removed by whoever comes next. Names and times
prove nothing. Where the file system has no locks, nothing of others is touched.
"""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

PREFIX = "zeromp-"
SUFFIX = ".alive"
CLEANER_S = 10.0  # for which a cleaner may hold a lock
HELD_BY_OTHERS = (errno.EWOULDBLOCK, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class JobFolder:
    """Place of one rank in a folder that the user names.

    Parameters
    ----------
    base : Path
        Must exist and be writable.
    job : str
        The same on all ranks of a job, and of no other job.
    rank : int
    keep : bool
        Leave the data at the end.

    Attributes
    ----------
    path : Path
        Folder of the job.
    removed : list of Path
        Left-overs of dead jobs that have been removed.
    """

    def __init__(self, base: Path, job: str, rank: int, keep: bool = False) -> None:
        if not base.is_dir():
            raise FileNotFoundError(
                f"offload_dir {str(base)!r} is not a folder: make it, on every node of the job"
            )
        self.path = base / f"{PREFIX}{job}"
        self.stem, self.keep = f"rank{rank:05d}", keep
        self.removed = remove_dead(base, self.path)
        try:
            self._lock = self._claim()
        except PermissionError as error:
            raise PermissionError(
                f"offload_dir {str(base)!r} can't be written: choose another folder"
            ) from error

    def _claim(self) -> int:
        """Create and lock the sign of life; again if a cleaner of another job has been faster."""
        name = self.path / (self.stem + SUFFIX)
        give_up = time.monotonic() + CLEANER_S
        while time.monotonic() < give_up:
            self.path.mkdir(exist_ok=True)
            try:
                descriptor = os.open(name, os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:  # the empty folder has been removed
                continue
            try:
                locked = _lock(descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno in NO_LOCKS:
                    return os.open(name, os.O_RDWR)  # alive, and nobody can tell that it is not
                raise
            with contextlib.suppress(FileNotFoundError):
                if locked and name.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)
            time.sleep(0.01)
        raise FileExistsError(f"{name} is held by another process: two jobs of one name")

    def file(self, suffix: str) -> Path:
        """Path of a file of this rank."""
        return self.path / f"{self.stem}{suffix}"

    def close(self) -> None:
        """Remove this rank's files, or keep the data, and give up the lock."""
        if self._lock < 0:
            return
        if not self.keep:
            _remove(self.path, self.stem)
        (self.path / (self.stem + SUFFIX)).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):
            self.path.rmdir()  # the last rank's

    def abandon(self) -> None:
        """Remove the files of all ranks on this node, which the launcher is about to kill.

        Also where this rank's have gone already, at its exit.
        """
        if not self.keep:
            _remove(self.path, "")
            self.close()
            with contextlib.suppress(OSError):
                self.path.rmdir()


def remove_dead(base: Path, own: Path) -> list[Path]:
    """Remove the files of ranks that have died, and folders that are empty then; not in `own`.

    Other jobs come and go meanwhile, and clean too: what has gone already is no error.
    """
    removed: list[Path] = []
    for folder in _listed(base):
        if not folder.name.startswith(PREFIX) or folder == own:
            continue
        for sign in _listed(folder):
            if sign.name.endswith(SUFFIX):
                removed += _remove_if_dead(sign)
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return removed


def _remove_if_dead(sign: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        descriptor = os.open(sign, os.O_RDWR)
        try:
            if _lock(descriptor):
                found = _remove(sign.parent, sign.name.removesuffix(SUFFIX))
                sign.unlink(missing_ok=True)
                return found
        finally:
            os.close(descriptor)
    return []


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it is none, or has gone."""
    try:
        return [folder / name for name in os.listdir(folder)]  # noqa: PTH208 - all at once
    except OSError:
        return []


def _remove(folder: Path, stem: str) -> list[Path]:
    """Remove the data of a rank, or with an empty stem all that ranks have."""
    found = [
        path
        for path in _listed(folder)
        if path.name.startswith(stem or "rank") and (path.name.endswith(".h5") or not stem)
    ]
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _lock(descriptor: int) -> bool:
    """Try to lock a file; False if someone holds it, OSError if there are no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD_BY_OTHERS:
            return False
        raise
    return True
