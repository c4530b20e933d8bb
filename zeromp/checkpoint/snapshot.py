"""What a save writes: the numbers as they were when it was called."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeromp.checkpoint.files import tiles
from zeromp.checkpoint.held import Part
from zeromp.store import Store

FileRange = tuple[Path, int, int]  # of an array on disk: path, offset, bytes


class Snapshot(Protocol):
    """The numbers to be written, as they were at the call of save."""

    parts: list[Part]

    def tile(self, view: NDArray[Any], buffer: NDArray[Any]) -> NDArray[Any]:
        """Numbers of a tile of a view; in `buffer`, if they need room."""

    def file_range(self, view: NDArray[Any]) -> FileRange | None:
        """Where a view lies on disk, if it does and may be copied from there."""

    def close(self) -> None:
        """All is written."""


class Live:
    """The stored numbers themselves: nothing may change them until all is written."""

    def __init__(self, parts: Sequence[Part], store: Store) -> None:
        self.parts, self.store = list(parts), store

    def tile(self, view: NDArray[Any], buffer: NDArray[Any]) -> NDArray[Any]:
        """Read a tile into the buffer."""
        self.store.read(view, buffer)
        return buffer

    def file_range(self, view: NDArray[Any]) -> FileRange | None:
        """Where the store keeps a view."""
        place = self.store.file_range(view)
        return None if place is None else (place[0].path, place[1], view.nbytes)

    def close(self) -> None:
        """Nothing to give back."""


class CopyOnWrite:
    """The stored numbers, while training goes on: a tile that is about to change is copied first.

    A thread writes tile after tile. The optimizer tells the store what it is about to change, and
    the store tells this snapshot, which copies those tiles that are not written yet. So a save
    takes memory for what the disk has not kept up with, and no more; on the host, in the ledger.
    """

    def __init__(self, parts: Sequence[Part], store: Store) -> None:
        self.parts, self.store = list(parts), store
        found = [
            view[part]
            for _, views in self.parts
            for view in views
            for part in tiles(view.size, view.itemsize)
        ]
        self._tiles = sorted((v for v in found if v.size), key=_address)
        self._starts = [_address(view) for view in self._tiles]
        self._copies: dict[int, NDArray[Any]] = {}
        self._read: set[int] = set()
        self._lock = threading.Lock()
        store.before_overwrite.append(self._keep)

    def _keep(self, changing: NDArray[Any]) -> None:
        """Copy the tiles of what is about to change, unless they are written or copied."""
        low = _address(changing)
        first = max(bisect_right(self._starts, low) - 1, 0)
        last = bisect_left(self._starts, low + changing.nbytes)
        for start, view in zip(self._starts[first:last], self._tiles[first:last], strict=True):
            if start + view.nbytes <= low:
                continue
            with self._lock:
                if start in self._read or start in self._copies:
                    continue
                self.store.enter("buffers", view.nbytes, "host")
                self._copies[start] = copy = np.empty(view.shape, view.dtype)
                self.store.read(view, copy)

    def tile(self, view: NDArray[Any], buffer: NDArray[Any]) -> NDArray[Any]:
        """Give the tile's copy, if it had to be made, or read it now."""
        start = _address(view)
        with self._lock:
            self._read.add(start)
            copy = self._copies.pop(start, None)
            if copy is None:
                self.store.read(view, buffer)
                return buffer
            self.store.leave("buffers", copy.nbytes, "host")
            return copy

    def file_range(self, view: NDArray[Any]) -> FileRange | None:  # noqa: ARG002
        """Files change too: their tiles are read."""
        return None

    def close(self) -> None:
        """Forget what is not written, after an error, and be told no more."""
        self.store.before_overwrite.remove(self._keep)
        with self._lock:
            for copy in self._copies.values():
                self.store.leave("buffers", copy.nbytes, "host")
            self._copies.clear()


def _address(view: NDArray[Any]) -> int:
    return int(view.__array_interface__["data"][0])
