"""Buckets, into which backward writes gradients, and the courier that converts and sends them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.flat import Flat, Layout, bucket_slots
from zeromp.store import Store
from zeromp.wire import F32, FORMATS, Format, accumulate, convert, narrow_in_place
from zeromp.world import Reduction, World


@dataclass(frozen=True)
class GradientPlan:
    """How gradients are handled, whoever holds them.

    Parameters
    ----------
    micro_batches : int
        Per step; with more than one, gradients are kept in float32.
    travel : Format or None
        Format in which 16-bit parameters' gradients are sent; None for the parameters' own.
    visits : tuple of str
        Units in the order in which backward visits them.
    fused : bool
        Whether each piece is used up as soon as it is reduced, so that none need be kept.
    late : int
        Units whose reduction may still be under way while the next unit's gradient is made.
    """

    micro_batches: int
    travel: Format | None
    visits: tuple[str, ...]
    fused: bool = False
    late: int = 0

    def sent(self, flat: Flat) -> Format:
        """Format in which the gradients of a flat are sent."""
        sixteen_bit = flat.format != FORMATS["float32"]
        return self.travel if self.travel and sixteen_bit else flat.format

    def kept(self, flat: Flat) -> Format:
        """Format in which they are kept: as sent, unless something is added to them."""
        return FORMATS["float32"] if self.micro_batches > 1 else self.sent(flat)

    def in_place(self, flat: Flat) -> bool:
        """Whether backward can write a full gradient where it is kept: no bucket, no addition."""
        return self.micro_batches == 1 and self.kept(flat) == FORMATS["float32"]


class Buckets:
    """Float32 buffers into which backward writes, one per unit that is open at a time.

    Where a full gradient is kept in float32 and nothing is added to it, its own place in `kept` is
    the bucket, and no buffer is drawn.
    """

    def __init__(
        self,
        layout: Layout,
        store: Store,
        plan: GradientPlan,
        kept: Sequence[NDArray[Any]] = (),
        late: int = 0,
    ) -> None:
        self.layout = layout
        self.buffers: list[dict[str, F32]] = []  # of each flat: unit -> its bucket
        for index, flat in enumerate(layout.trainable):
            if kept and plan.in_place(flat):
                spans = flat.full.spans
                self.buffers.append({unit: kept[index][spans[unit]] for unit in spans})
                continue
            sizes = {unit: flat.size(unit) for unit in flat.counts}
            slots, widths = bucket_slots([u for u in plan.visits if u in sizes], sizes, late)
            pool = [store.empty("buffers", width, np.float32) for width in widths]
            self.buffers.append({u: pool[slots[u]][: sizes[u]] for u in sizes})

    def flat(self, index: int, unit: str) -> F32:
        """Bucket of a unit in one flat."""
        return self.buffers[index][unit]

    def conflict(self, visits: Sequence[str]) -> tuple[str, str] | None:
        """Two units that are open together when backward visits units in this order, yet share."""
        last = {unit: i for i, unit in enumerate(visits)}
        for buffers in self.buffers:
            opened: dict[str, F32] = {}
            for i, unit in enumerate(visits):
                if unit in buffers and unit not in opened:
                    for other, buffer in opened.items():
                        if np.shares_memory(buffer, buffers[unit]):
                            return other, unit
                    opened[unit] = buffers[unit]
                if last[unit] == i:
                    opened.pop(unit, None)
        return None

    def views(self, unit: str) -> dict[str, F32]:
        """Named views of a unit's buckets."""
        named: dict[str, F32] = {}
        for index, flat in enumerate(self.layout.trainable):
            if unit in flat.counts:
                named |= flat.views(unit, self.buffers[index][unit])
        return named


class Courier:
    """Converts gradients between the formats in which they are kept and sent, and sends them."""

    def __init__(
        self, layout: Layout, store: Store, world: World, plan: GradientPlan, full: bool
    ) -> None:
        self.layout, self.world = layout, world
        self.sent = [plan.sent(flat) for flat in layout.trainable]
        self.outgoing: list[NDArray[Any] | None] = []  # a unit, in the format in which it is sent
        self.incoming: list[NDArray[Any] | None] = []  # a piece, likewise
        room = 0
        for flat in layout.trainable:
            sent, kept = plan.sent(flat), plan.kept(flat)
            receives_in_place = not full and sent == kept and plan.micro_batches == 1
            outgoing = flat.widest if full and sent != kept else None
            incoming = None if receives_in_place else flat.widest_piece
            self.outgoing.append(_drawn(store, outgoing, sent))
            self.incoming.append(_drawn(store, incoming, sent))
            room = max(room, world.size * flat.widest_piece * sent.itemsize)
        self.received = store.empty("buffers", room if world.reduce == "ordered" else 0, np.uint8)

    def reduce(
        self, index: int, unit: str, whole: NDArray[Any], own: NDArray[Any], add: bool
    ) -> None:
        """Write the mean over ranks of this rank's piece of `whole` to `own`, or add it."""
        request = self.start(index, unit, whole)
        self.complete(index, request, own, add)
        request.release()

    def start(self, index: int, unit: str, whole: NDArray[Any]) -> Reduction:
        """Start sending a unit's gradient."""
        counts = self.layout.trainable[index].counts[unit]
        outgoing, size = self._ready(index, whole), self.world.size
        room = self.received[: size * counts[self.world.rank] * outgoing.itemsize]
        return self.world.start_reduce_scatter(
            outgoing, counts, 1 / size, unit, room.view(outgoing.dtype)
        )

    def complete(self, index: int, request: Reduction, own: NDArray[Any], add: bool) -> None:
        """Write the mean over ranks of this rank's piece to `own`, or add it."""
        incoming = self.incoming[index]
        incoming = own if incoming is None else incoming[: own.size]
        request.wait(incoming)
        if add:
            accumulate(incoming, own)
        elif incoming is not own:
            convert(incoming, own)

    def _ready(self, index: int, whole: NDArray[Any]) -> NDArray[Any]:
        """Return a unit's gradient in the format in which it is sent.

        A bucket is free to be spoilt: it is narrowed in place.
        """
        sent, outgoing = self.sent[index], self.outgoing[index]
        if whole.dtype == sent.dtype:
            return whole
        if outgoing is not None:
            convert(whole, outgoing[: whole.size])
            return outgoing[: whole.size]
        narrowed = whole.view(sent.dtype)[: whole.size]
        narrow_in_place(whole, narrowed)
        return narrowed

    def gather(self, index: int, unit: str, own: NDArray[Any], whole: NDArray[Any]) -> None:
        """Write every rank's reduced piece to its place in `whole`."""
        counts = self.layout.trainable[index].counts[unit]
        outgoing, incoming = self.outgoing[index], self.incoming[index]
        if outgoing is None or incoming is None:  # kept as sent
            self.world.all_gather(own, whole, counts, unit)
            return
        convert(own, incoming[: own.size])
        self.world.all_gather(incoming[: own.size], outgoing[: whole.size], counts, unit)
        convert(outgoing[: whole.size], whole)


def _drawn(store: Store, size: int | None, kind: Format) -> NDArray[Any] | None:
    return None if size is None else store.empty("buffers", size, kind.dtype)
