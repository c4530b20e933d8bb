"""One folder per job for files on disk: made, held while the job lives, and cleaned after it.

[Note: who is alive] Every rank holds a lock on ``rank0000.alive`` in its job's folder as long as it
lives; the system takes the lock away when the process ends, however it ends. So a file that can be
locked belongs to a dead rank: its left-overs are removed by whoever comes next. Names and times
prove nothing. Where the file system has no locks, nothing of others is touched.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

PREFIX = "zeromp-"
SUFFIX = ".alive"


class JobFolder:
    """Place of one rank in a folder that the user names.

    Parameters
    ----------
    base : Path
        Must exist and be writable.
    job : str
        The same on all ranks of a job, and of no other job.
    rank : int

    Attributes
    ----------
    path : Path
        Folder of the job.
    removed : list of Path
        Left-overs of dead jobs that have been removed.
    """

    def __init__(self, base: Path, job: str, rank: int) -> None:
        if not base.is_dir():
            raise FileNotFoundError(
                f"offload_dir {str(base)!r} is not a folder: make it, on every node of the job"
            )
        self.path = base / f"{PREFIX}{job}"
        self.stem = f"rank{rank:05d}"
        self.removed = remove_dead(base)
        try:
            self._lock = self._claim()
        except PermissionError as error:
            raise PermissionError(
                f"offload_dir {str(base)!r} can't be written: choose another folder"
            ) from error

    def _claim(self) -> int:
        """Create and lock the sign of life; again if a cleaner has been faster."""
        name = self.path / (self.stem + SUFFIX)
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                descriptor = os.open(name, os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:  # a cleaner has removed the empty folder
                continue
            if not _lock(descriptor):
                os.close(descriptor)
                raise FileExistsError(f"{name} is held by another process: two jobs of one name")
            with contextlib.suppress(FileNotFoundError):
                if name.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def file(self, suffix: str) -> Path:
        """Path of a file of this rank."""
        return self.path / f"{self.stem}{suffix}"

    def close(self, keep: bool) -> None:
        """Remove this rank's files, or keep the data, and give up the lock."""
        if self._lock < 0:
            return
        if not keep:
            _remove(self.path, self.stem)
        (self.path / (self.stem + SUFFIX)).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):
            self.path.rmdir()  # the last rank's


def remove_dead(base: Path) -> list[Path]:
    """Remove the files of ranks that have died, and folders that are empty then."""
    removed: list[Path] = []
    for sign in base.glob(f"{PREFIX}*/*{SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(sign, os.O_RDWR)
            try:
                if _lock(descriptor):
                    removed += _remove(sign.parent, sign.name.removesuffix(SUFFIX))
                    sign.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return removed


def _remove(folder: Path, stem: str) -> list[Path]:
    found = list(folder.glob(f"{stem}*.h5"))
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _lock(descriptor: int) -> bool:
    """Try to lock a file; False if someone holds it, or if locks are not known here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True
