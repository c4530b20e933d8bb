"""Errors that all ranks raise alike."""

import builtins

TEXT_BYTES = 4096


def alike(error: Exception) -> Exception:
    """Mark an error that every rank raises: the exception hook prints it once, without abort."""
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error


def pack(error: Exception | None) -> bytes:
    """Kind, as the nearest built-in exception, and message of an error; empty for none."""
    if error is None:
        return b""
    kinds = (c.__name__ for c in type(error).__mro__ if hasattr(builtins, c.__name__))
    return f"{next(kinds)}\n{error}".encode()[:TEXT_BYTES]


def unpack(texts: list[str]) -> Exception:
    """Error of the lowest rank that has one, marked as raised by all."""
    rank, first = next((r, t) for r, t in enumerate(texts) if t)
    kind, message = first.split("\n", 1)
    if any(t != first for t in texts):
        message = f"{message} (on rank {rank})"
    error: Exception = getattr(builtins, kind)(message)
    return alike(error)
