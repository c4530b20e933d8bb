"""Errors that all ranks raise alike."""

import contextlib
import importlib
from collections.abc import Callable

TEXT_BYTES = 4096

before_abort: list[Callable[[], object]] = []  # what must be done before the job is aborted
when_all_have_ended: list[Callable[[], object]] = []  # done by the guard, if there is one


_guards: list[object] = []


def guarded() -> bool:
    """Whether a guard watches over the end of this process."""
    return bool(_guards)


def guard_by(guard: object) -> None:
    """Note that a guard does."""
    _guards.append(guard)


def alike(error: Exception) -> Exception:
    """Mark an error that every rank raises: the exception hook prints it once, without abort."""
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error


def pack(error: Exception | None) -> bytes:
    """Classes, most special first, and message of an error; empty for none."""
    if error is None:
        return b""
    classes = " ".join(f"{c.__module__}:{c.__qualname__}" for c in type(error).__mro__)
    return f"{classes}\n{error}".encode()[:TEXT_BYTES]


def unpack(texts: list[str]) -> Exception:
    """Error of the lowest rank that has one, as every rank raises it."""
    rank, first = next((r, t) for r, t in enumerate(texts) if t)
    classes, message = first.split("\n", 1)
    if any(t != first for t in texts):
        message = f"{message} (on rank {rank})"
    return alike(_rebuild(classes.split(), message))


def _rebuild(classes: list[str], message: str) -> Exception:
    """Make an error of the most special class that takes a message alone."""
    for name in classes:
        module, qualname = name.split(":")
        with contextlib.suppress(Exception):
            error = getattr(importlib.import_module(module), qualname)(message)
            if isinstance(error, Exception) and message in str(error):
                return error
    return RuntimeError(message)
