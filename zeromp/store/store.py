"""Where arrays live, and the ledgers of what is held and of what crosses between tiers.

A store hands out arrays on three tiers: *device*, the rank's fast memory, with an optional budget;
*host*, memory outside that budget; and *disk*, a mapped HDF5 file. All are NumPy arrays. Holders do
not ask on which tier an array lies; they say what they are about to do with it:

==================  =======================================================================
`read`, `write`     copy numbers out or in
`reading`           have numbers in memory, to compute with
`writing`           have memory to compute into, whose content is then stored
`ahead`             have one piece after another, read ahead of need
`tiles`             have tile after tile of several arrays, updated and written back
`stack`             put arrays away, and take them back in reverse order
==================  =======================================================================

On device and host these hand out the arrays themselves; on disk they move bytes, in time.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeromp.adamw import Arrays
from zeromp.store import numa
from zeromp.store.ahead import Pieces, Reader, Slot, read_ahead
from zeromp.store.disk import Disk
from zeromp.store.files import aligned
from zeromp.store.ledger import Ledger
from zeromp.store.placement import READ_AHEAD, Placement, share, slot_count, tile_bytes
from zeromp.store.places import Place, Places
from zeromp.store.stack import Stack
from zeromp.store.tiles import Tile, Walk
from zeromp.wire import FORMATS

FORMAT_OF = {f.dtype.name: f.name for f in FORMATS.values()}  # 16-bit floats are bits to NumPy


SENT = ("parameters", "gradients", "buffers")


class Memory(Protocol):
    """Memory that other ranks may read where it lies: a `World` has it."""

    sharers: int
    sharer: int

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return a zeroed array of this rank's own. A collective, perhaps."""

    def node_empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return a zeroed array that `sharers` ranks hold together, of which this is a `sharer`."""


class PrivateMemory:
    """Memory of one rank alone."""

    sharers, sharer = 1, 0

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Return zeros."""
        return np.zeros(size, dtype)

    node_empty = empty


class Store:
    """Hands out arrays and counts their bytes by tier and kind.

    Parameters
    ----------
    budget : int or None
        Bytes that this rank may hold on the device; None sets no limit.
    placement : Placement
    disk : Disk or None
        Needed where something is placed there.
    numa_node : int or None
        Node to which host memory is bound; None leaves it to the system.
    section : callable
        Names the part of the run under which crossings are entered: "setup", "train", ...
    memory : Memory
        Where memory comes from that is sent to other ranks, or made of what they send.

    Attributes
    ----------
    ledger : Ledger
        Its verbs are the store's, too: `enter`, `leave`, `holding`, `check` and `cross`.
    tiers, moved
        The ledger's.
    before_overwrite : list of callable
        Called with each stored array of the optimizer, or tile of it, just before it is changed.
    """

    def __init__(
        self,
        budget: int | None = None,
        placement: Placement | None = None,
        disk: Disk | None = None,
        numa_node: int | None = None,
        section: Callable[[], str] = lambda: "train",
        memory: "Memory | None" = None,
    ) -> None:
        self.placement, self.disk = placement or Placement(), disk
        self.ledger = ledger = Ledger(budget, section)
        self.tiers, self.moved, self.cross = ledger.tiers, ledger.moved, ledger.cross
        self.enter, self.leave = ledger.enter, ledger.leave
        self.check, self.holding = ledger.check, ledger.holding
        self.before_overwrite: list[Callable[[NDArray[Any]], None]] = []
        self._numa_node = numa_node
        self._sent: Memory = memory or PrivateMemory()
        self._places = Places()
        self.file_range = self._places.on_disk
        self._named: Counter[str] = Counter()  # datasets of each kind
        self._staging = np.empty(0, np.uint8)
        self._slots: list[Slot] = []

    @property
    def held(self) -> Counter[str]:
        """Bytes held on the device now, by kind."""
        return self.tiers["device"].held

    @property
    def peak(self) -> Counter[str]:
        """Bytes held on the device at most, by kind."""
        return self.tiers["device"].peak

    # ---- arrays ----------------------------------------------------------------------------------

    def empty(
        self, kind: str, size: int, dtype: Any, spans: Mapping[str, slice] | None = None
    ) -> NDArray[Any]:
        """Return a new zeroed array of `size` elements, entered in the ledger.

        Parameters
        ----------
        kind : str
            Its place follows from it.
        size : int
        dtype : dtype
        spans : dict of str to slice, optional
            Which units it holds, and where: written beside an array on disk.

        Raises
        ------
        OverBudget
            If it does not fit on the device; nothing is allocated then.
        OSError
            If it does not fit on the disk.
        """
        tier = self.placement.tier(kind)
        num_bytes = size * np.dtype(dtype).itemsize
        self.enter(kind, num_bytes, tier)
        if tier == "device":
            return self._sent.empty(size, dtype) if kind in SENT else np.zeros(size, dtype)
        file, offset = None, 0
        if tier == "disk":
            assert self.disk is not None
            file = self.disk.states
            array, offset = file.add(
                self._name(kind), size, dtype, _about(kind, dtype, spans or {})
            )
        else:
            array = self.memory(num_bytes).view(dtype)
        if size:
            self._places.add(Place(array, kind, tier, file, offset))
        return array

    def node_empty(self, kind: str, size: int, dtype: Any) -> NDArray[Any]:
        """Return a new zeroed array that the ranks of a node hold together; each enters its share.

        A collective.
        """
        count = share(size, self._sent.sharers, self._sent.sharer)
        self.enter(kind, count * np.dtype(dtype).itemsize)
        return self._sent.node_empty(size, dtype)

    def memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory, on the NUMA node that was asked for; not entered in the ledger."""
        if self._numa_node is not None:
            return numa.bound(num_bytes, self._numa_node)
        return aligned(num_bytes)

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory through which bytes pass on their way to or from the disk."""
        self.enter("buffers", num_bytes, "host")
        return self.memory(num_bytes)

    def _name(self, kind: str) -> str:
        number = self._named[kind]
        self._named[kind] += 1
        return f"{kind}.{number}" if number else kind

    # ---- copies ----------------------------------------------------------------------------------

    def read(self, view: NDArray[Any], into: NDArray[Any]) -> None:
        """Copy stored numbers to memory; `view` is an array from `empty`, or a slice of one."""
        place = self._places.find(view)
        if place is not None and place.file is not None:
            place.file.read(place.at(view), into)
        else:
            np.copyto(into, view, casting="no")

    def write(self, values: NDArray[Any], view: NDArray[Any]) -> None:
        """Copy numbers from memory to where they are stored."""
        place = self._places.find(view)
        if place is not None and place.file is not None:
            place.file.write(place.at(view), values)
        else:
            np.copyto(view, values, casting="no")

    def reserve(self, kind: str, num_bytes: int) -> None:
        """Make sure that `reading` and `writing` can take that many bytes of a kind at once."""
        if self.placement.tier(kind) == "disk" and num_bytes > self._staging.size:
            self.leave("buffers", self._staging.size, "host")
            self._staging = self.buffer(num_bytes)

    def reading(self, view: NDArray[Any], target: str = "host") -> NDArray[Any]:
        """Stored numbers in memory: valid until the next call, and not to be changed.

        `target` is the tier on which they are used.
        """
        place = self._places.find(view)
        if place is None:
            return view
        self.cross(place.kind, view.nbytes, place.tier, target)
        if place.file is None:
            return view
        staged = self._staging[: view.nbytes].view(view.dtype)
        self.read(view, staged)
        return staged

    @contextmanager
    def writing(self, view: NDArray[Any], keep: bool = False) -> Iterator[NDArray[Any]]:
        """Memory, filled on the device, whose content is stored in `view` when the block ends.

        Parameters
        ----------
        view : ndarray
        keep : bool
            Hand out what is stored, to be added to; else the content is undefined.
        """
        place = self._places.find(view)
        if place is None:
            yield view
            return
        self.cross(place.kind, view.nbytes, "device", place.tier)
        if place.file is None:
            yield view
            return
        staged = self._staging[: view.nbytes].view(view.dtype)
        if keep:
            self.cross(place.kind, view.nbytes, "disk", "host")
            self.read(view, staged)
        yield staged
        self.write(staged, view)

    # ---- streams ---------------------------------------------------------------------------------

    def slots(self, kind: str, num_bytes: int, number: int) -> list[Slot]:
        """Buffers for `ahead`; none where a kind is in memory."""
        if self.placement.tier(kind) != "disk":
            return []
        return [self.buffer(num_bytes) for _ in range(number + READ_AHEAD)]

    def ahead(
        self, items: Iterable[tuple[str, Pieces]], slots: list[Slot]
    ) -> Iterator[tuple[str, Pieces]]:
        """Bring stored pieces to the device, one item after another.

        Parameters
        ----------
        items : iterable of (str, dict of int to ndarray)
            A name, and stored arrays.
        slots : list
            From `slots`: as many items may be in use at a time as that was told.

        Returns
        -------
        iterator of (str, dict of int to ndarray)
            The names, and the same numbers in memory.
        """
        return read_ahead(items, slots, Reader(self._places, self.disk, self.cross).start)

    def reserve_tiles(self, arrays: Arrays, size: int) -> None:
        """Draw the buffers that `tiles` needs for these arrays, of `size` elements."""
        staged = [a.itemsize for a, _, _ in arrays.operands() if self.file_range(a)]
        need = tile_bytes(min(self.placement.tile, size), staged)
        number = slot_count(size, self.placement.tile) if need else 0
        have = self._slots[0].size if self._slots else 0
        if need > have or number > len(self._slots):
            number = max(number, len(self._slots))
            self.leave("buffers", have * len(self._slots), "host")
            self._slots = [self.buffer(max(need, have)) for _ in range(number)]

    def tiles(
        self,
        arrays: Arrays,
        segments: NDArray[np.int64],
        groups: NDArray[np.int64],
        low: int,
        high: int,
    ) -> Iterator[Tile]:
        """Walk what an update reads and writes, in memory, tile by tile: see `zeromp.store.tiles`.

        All of it is one tile where it lies in memory. Where some lies on disk, worker threads read
        the next tiles and write the last ones while the caller updates one.

        Parameters
        ----------
        arrays : Arrays
        segments, groups : ndarray
            See `zeromp.flat.segments`.
        low, high : int
            Elements of the states that are to be updated.

        Yields
        ------
        Arrays, ndarray, ndarray
            A tile's arrays, its segments with starts in those arrays, and their groups.
        """
        operands, size = arrays.operands(), high - low
        for array, _, mode in operands:
            place = self._places.find(array)
            tier = place.tier if place else "device"
            kind = place.kind if place else ("gradients" if mode == "r" else "parameters")
            if "r" in mode:
                self.cross(kind, size * array.itemsize, tier, self.placement.update)
            if "w" in mode:
                self.cross(kind, size * array.itemsize, self.placement.update, tier)
        ranges = {i: r for i, (a, _, _) in enumerate(operands) if (r := self.file_range(a))}
        in_memory = not ranges and not self.before_overwrite
        tile = max(size, 1) if in_memory else self.placement.tile
        walk = Walk(arrays, segments, groups, low, high, tile)
        yield from walk.tiles(ranges, self._slots, self.disk, self.before_overwrite)

    def stack(self, sizes: Sequence[int]) -> Stack:
        """Return a place for activations of these many bytes each, put there in this order."""
        memory = None if self._numa_node is None else self.memory
        return Stack(self.placement.activations, sizes, self.disk, self.cross, memory)

    def close(self) -> None:
        """Remove this rank's files from the disk, unless they are to be kept."""
        if self.disk is not None:
            self.disk.close()


def _about(kind: str, dtype: Any, spans: Mapping[str, slice]) -> dict[str, Any]:
    """Attributes of an array on disk: what it is, and where in it each unit's part lies."""
    return {
        "kind": kind,
        "format": FORMAT_OF.get(np.dtype(dtype).name, np.dtype(dtype).name),
        "units": json.dumps({unit: [span.start, span.stop] for unit, span in spans.items()}),
    }
