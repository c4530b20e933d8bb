"""Reading ahead: pieces come from the disk some units before they are gathered."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.store.disk import Disk
from zeromp.store.files import MappedFile
from zeromp.store.placement import READ_AHEAD, page_up
from zeromp.store.places import Places

Slot = NDArray[np.uint8]
Pieces = dict[int, NDArray[Any]]
Start = Callable[[Pieces, Slot | None], tuple[Pieces, "Future[None] | None"]]


def read_ahead(
    items: Iterable[tuple[str, Pieces]], slots: Sequence[Slot], start: Start
) -> Iterator[tuple[str, Pieces]]:
    """Yield items with their pieces in memory, `READ_AHEAD` of them being read meanwhile.

    Parameters
    ----------
    items : iterable of (str, dict of int to ndarray)
    slots : sequence of ndarray
        Used in turn: `READ_AHEAD` more than there are items in use at a time; none if nothing
        is read.
    start : callable
        ``start(pieces, slot)`` starts to read pieces into a slot; returns what will hold them, and
        what to wait for.
    """
    waiting: deque[tuple[str, Pieces, Future[None] | None]] = deque()
    ring = cycle(slots or [None])
    try:
        for name, pieces in items:
            waiting.append((name, *start(pieces, next(ring))))
            if len(waiting) > (READ_AHEAD if slots else 0):
                yield _arrived(*waiting.popleft())
        while waiting:
            yield _arrived(*waiting.popleft())
    finally:  # a sweep left early leaves no read in flight: the next one uses the same slots
        for _, _, reading in waiting:
            if reading is not None:
                reading.exception()


def _arrived(name: str, here: Pieces, reading: "Future[None] | None") -> tuple[str, Pieces]:
    if reading is not None:
        reading.result()
    return name, here


class Reader:
    """Starts to read stored pieces, and enters what crosses to the device.

    Parameters
    ----------
    places : Places
    disk : Disk or None
        Whose threads read.
    cross : callable
        Enters bytes that cross between tiers: ``cross(kind, num_bytes, source, target)``.
    """

    def __init__(
        self, places: Places, disk: Disk | None, cross: Callable[[str, int, str, str], None]
    ) -> None:
        self.places, self.disk, self.cross = places, disk, cross

    def start(self, pieces: Pieces, slot: Slot | None) -> tuple[Pieces, "Future[None] | None"]:
        """Start to read pieces into a slot; those in memory are counted and handed on."""
        here, reads, at = {}, [], 0
        for index, view in pieces.items():
            here[index] = view
            place = self.places.find(view)
            if place is None:
                continue
            self.cross(place.kind, view.nbytes, place.tier, "device")
            if place.file is not None:
                assert slot is not None
                here[index] = slot[at : at + view.nbytes].view(view.dtype)
                reads.append((place.file, place.at(view), here[index]))
                at += page_up(view.nbytes)
        if not reads:
            return here, None
        assert self.disk is not None
        return here, self.disk.start(_read_all, reads)


def _read_all(reads: list[tuple[MappedFile, int, NDArray[Any]]]) -> None:
    for file, offset, into in reads:
        file.read(offset, into)
