"""Arrays that are not on the device: found again by the address of any slice of them."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from zeromp.store.files import MappedFile


@dataclass(frozen=True)
class Place:
    """A stored array, its kind and tier, and where it is on disk.

    It keeps the array, so that its addresses are nobody else's.
    """

    array: NDArray[Any]
    kind: str
    tier: str
    file: MappedFile | None
    offset: int

    @property
    def start(self) -> int:
        """Address of the first byte."""
        return self.array.ctypes.data

    def at(self, view: NDArray[Any]) -> int:
        """Offset in the file of a slice of the array."""
        return self.offset + view.ctypes.data - self.start


class Places:
    """All stored arrays of a rank."""

    def __init__(self) -> None:
        self._sorted: list[Place] = []

    def add(self, place: Place) -> None:
        """Enter an array."""
        self._sorted.append(place)
        self._sorted.sort(key=lambda p: p.start)

    def find(self, view: NDArray[Any]) -> Place | None:
        """Place of a stored array, or of a slice of it; None on the device."""
        if not self._sorted or not view.size:
            return None
        address = view.ctypes.data
        index = bisect_right(self._sorted, address, key=lambda p: p.start) - 1
        if index >= 0 and address < self._sorted[index].start + self._sorted[index].array.nbytes:
            return self._sorted[index]
        return None

    def on_disk(self, view: NDArray[Any]) -> tuple[MappedFile, int] | None:
        """File and offset of stored numbers that lie on disk; None for others."""
        place = self.find(view)
        if place is None or place.file is None:
            return None
        return place.file, place.at(view)
