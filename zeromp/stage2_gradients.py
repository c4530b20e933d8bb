"""Rung 2: who holds the gradients?

Backward makes the gradient of one unit after another. A rank updates its own pieces only, so it
needs, of each gradient, the sum over ranks of its own piece, and nothing else.

===================  ===============================  =========================================
..                   `FullGradients`, stages 0 and 1  `ShardedGradients`, stages 2 and 3
===================  ===============================  =========================================
held on each rank    all gradients, until the step    this rank's pieces: 1/N
sent                 reduce-scatter of every unit,    reduce-scatter of a unit as soon as its
                     once per step                    backward is done, once per micro-batch
bytes per parameter  2 + 2 + 12/N, at stage 1         2 + 2/N + 12/N, at stage 2
traffic per step     psi                              psi, per micro-batch
===================  ===============================  =========================================

Backward writes float32 into a *bucket*, a unit's flat gradient. `close` takes the bucket in: the
full way keeps it, the sharded way reduces it at once, and both leave it free for another unit. With
one micro-batch per step the two send the same messages, and get the same bits. With more, the full
way adds micro-batches before it adds ranks, the sharded way after. Rajbhandari et al. 2020,
arXiv:1910.02054, sections 5.2 and 7.2.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.flat import Flat, Layout, bucket_slots
from zeromp.store import Store
from zeromp.wire import F32, FORMATS, Format, accumulate, convert
from zeromp.world import World


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
    """

    micro_batches: int
    travel: Format | None
    visits: tuple[str, ...]

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


class FullGradients:
    """Stages 0 and 1: every rank keeps the whole gradient, which is reduced at the step."""

    def __init__(self, layout: Layout, store: Store, world: World, plan: GradientPlan) -> None:
        self.layout = layout
        self.extents = [flat.full for flat in layout.trainable]
        self.arrays = _arrays(layout, self.extents, store, plan)
        self.buckets = _Buckets(layout, store, plan, self.arrays)
        self.courier = _Courier(layout, store, world, plan, full=True)
        self.filled: set[str] = set()

    def bucket(self, unit: str) -> dict[str, F32]:
        """Views, by name, into which backward writes the gradient of a unit."""
        return self.buckets.views(unit)

    def close(self, unit: str) -> None:
        """Keep a finished bucket: nothing is sent yet."""
        for index, flat in _having(self.layout, unit):
            bucket = self.buckets.flat(index, unit)
            kept = self.arrays[index][flat.full.spans[unit]]
            if unit in self.filled:
                accumulate(bucket, kept)
            elif not np.shares_memory(bucket, kept):
                convert(bucket, kept)
        self.filled.add(unit)

    def finish(self) -> None:
        """Reduce every unit: a rank's own pieces become the mean over ranks, the rest is stale."""
        for unit in self.layout.units:
            for index, flat in _having(self.layout, unit):
                whole = self.arrays[index][flat.full.spans[unit]]
                own = self.arrays[index][flat.full.own[unit]]
                self.courier.reduce(index, unit, whole, own, add=False)

    def gather(self) -> None:
        """Bring the reduced pieces of all ranks to all ranks: stage 0 needs them everywhere."""
        for unit in self.layout.units:
            for index, flat in _having(self.layout, unit):
                whole = self.arrays[index][flat.full.spans[unit]]
                own = self.arrays[index][flat.full.own[unit]]
                self.courier.gather(index, unit, own, whole)

    def clear(self) -> None:
        """Forget all gradients."""
        self.filled.clear()


class ShardedGradients:
    """Stages 2 and 3: a unit is reduced as soon as it is done, and a rank keeps its piece."""

    def __init__(self, layout: Layout, store: Store, world: World, plan: GradientPlan) -> None:
        self.layout = layout
        self.extents = [flat.shard for flat in layout.trainable]
        self.arrays = _arrays(layout, self.extents, store, plan)
        self.buckets = _Buckets(layout, store, plan, [])
        self.courier = _Courier(layout, store, world, plan, full=False)
        self.filled: set[str] = set()

    def bucket(self, unit: str) -> dict[str, F32]:
        """Views, by name, into which backward writes the gradient of a unit."""
        return self.buckets.views(unit)

    def close(self, unit: str) -> None:
        """Reduce a finished bucket; this rank keeps its piece of the mean over ranks."""
        for index, flat in _having(self.layout, unit):
            bucket = self.buckets.flat(index, unit)
            own = self.arrays[index][flat.shard.own[unit]]
            self.courier.reduce(index, unit, bucket, own, add=unit in self.filled)
        self.filled.add(unit)

    def finish(self) -> None:
        """Everything is reduced already."""

    def gather(self) -> None:
        """Not for sharded gradients: the table of stages pairs them with sharded states."""
        raise AssertionError("sharded gradients are never gathered")

    def clear(self) -> None:
        """Forget all gradients."""
        self.filled.clear()


def _having(layout: Layout, unit: str) -> list[tuple[int, Flat]]:
    """Trainable flats, by index, that hold elements of a unit."""
    return [(i, f) for i, f in enumerate(layout.trainable) if unit in f.counts and f.size(unit)]


def _arrays(
    layout: Layout, extents: Sequence[Any], store: Store, plan: GradientPlan
) -> list[NDArray[Any]]:
    return [
        store.empty("gradients", extent.size, plan.kept(flat).dtype)
        for flat, extent in zip(layout.trainable, extents, strict=True)
    ]


class _Buckets:
    """Float32 buffers into which backward writes, one per unit that is open at a time.

    Where a full gradient is kept in float32 and nothing is added to it, its own place in `kept` is
    the bucket, and no buffer is drawn.
    """

    def __init__(
        self, layout: Layout, store: Store, plan: GradientPlan, kept: Sequence[NDArray[Any]]
    ) -> None:
        self.layout = layout
        self.buffers: list[dict[str, F32]] = []  # of each flat: unit -> its bucket
        for index, flat in enumerate(layout.trainable):
            if kept and plan.in_place(flat):
                spans = flat.full.spans
                self.buffers.append({unit: kept[index][spans[unit]] for unit in spans})
                continue
            sizes = {unit: flat.size(unit) for unit in flat.counts}
            slots, widths = bucket_slots([u for u in plan.visits if u in sizes], sizes)
            pool = [store.empty("buffers", width, np.float32) for width in widths]
            self.buffers.append({u: pool[slots[u]][: sizes[u]] for u in sizes})

    def flat(self, index: int, unit: str) -> F32:
        """Bucket of a unit in one flat."""
        return self.buffers[index][unit]

    def views(self, unit: str) -> dict[str, F32]:
        """Named views of a unit's buckets."""
        named: dict[str, F32] = {}
        for index, flat in enumerate(self.layout.trainable):
            if unit in flat.counts:
                named |= flat.views(unit, self.buffers[index][unit])
        return named


class _Courier:
    """Converts gradients between the formats in which they are kept and sent, and sends them."""

    def __init__(
        self, layout: Layout, store: Store, world: World, plan: GradientPlan, full: bool
    ) -> None:
        self.layout, self.world = layout, world
        self.outgoing: list[NDArray[Any] | None] = []  # a unit, in the format in which it is sent
        self.incoming: list[NDArray[Any] | None] = []  # a piece, likewise
        for flat in layout.trainable:
            sent, kept = plan.sent(flat), plan.kept(flat)
            source = kept if full else FORMATS["float32"]
            receives_in_place = not full and sent == kept and plan.micro_batches == 1
            self.outgoing.append(
                None if source == sent else store.empty("buffers", flat.widest, sent.dtype)
            )
            self.incoming.append(
                None if receives_in_place else store.empty("buffers", flat.widest_piece, sent.dtype)
            )
            world.reserve(store, world.size * flat.widest_piece * sent.itemsize)

    def reduce(
        self, index: int, unit: str, whole: NDArray[Any], own: NDArray[Any], add: bool
    ) -> None:
        """Write the mean over ranks of this rank's piece of `whole` to `own`, or add it."""
        counts = self.layout.trainable[index].counts[unit]
        outgoing, incoming = self.outgoing[index], self.incoming[index]
        if outgoing is None:
            outgoing = whole
        else:
            outgoing = outgoing[: whole.size]
            convert(whole, outgoing)
        incoming = own if incoming is None else incoming[: own.size]
        self.world.reduce_scatter(outgoing, incoming, counts, 1 / self.world.size, unit)
        if add:
            accumulate(incoming, own)
        elif incoming is not own:
            convert(incoming, own)

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
