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
full way keeps it, the sharded way starts to reduce it, and both leave it free for another unit.
With one micro-batch per step the two send the same messages, and get the same bits. With more, the
full way adds micro-batches before it adds ranks, the sharded way after. Rajbhandari et al. 2020,
arXiv:1910.02054, sections 5.2 and 7.2.1.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.buckets import Buckets, Courier, GradientPlan
from zeromp.flat import Flat, Layout
from zeromp.store import Store
from zeromp.wire import F32, accumulate, convert
from zeromp.world import Reduction, World


class FullGradients:
    """Stages 0 and 1: every rank keeps the whole gradient, which is reduced at the step."""

    def __init__(self, layout: Layout, store: Store, world: World, plan: GradientPlan) -> None:
        self.layout, self.store = layout, store
        self.extents = [flat.full for flat in layout.trainable]
        self.arrays = _arrays(layout, self.extents, store, plan)
        self.buckets = Buckets(layout, store, plan, self.arrays)
        self.courier = Courier(layout, store, world, plan, full=True)
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
    """Stages 2 and 3: a unit is reduced as soon as it is done, and a rank keeps its piece.

    With a fused update it keeps the piece only until the next unit's: the optimizer has used it.
    """

    def __init__(self, layout: Layout, store: Store, world: World, plan: GradientPlan) -> None:
        self.layout, self.store = layout, store
        self.extents = [f.passing if plan.fused else f.shard for f in layout.trainable]
        self.arrays = _arrays(layout, self.extents, store, plan)
        self.late = plan.late
        self.buckets = Buckets(layout, store, plan, late=plan.late)
        self.courier = Courier(layout, store, world, plan, full=False)
        self.filled: set[str] = set()
        self.flying: deque[_Flying] = deque()  # reductions that are not complete yet,
        self.landed: list[_Flying] = []  # and those whose buckets other ranks may still read

    def bucket(self, unit: str) -> dict[str, F32]:
        """Views, by name, into which backward writes the gradient of a unit."""
        for index, _ in _having(self.layout, unit):
            self._free(self.buckets.flat(index, unit))
        return self.buckets.views(unit)

    def close(self, unit: str) -> None:
        """Start reducing a finished bucket; this rank keeps its piece of the mean over ranks.

        With `late` 1 it is completed at the close of the next unit, or now if all ranks have come
        so far: none waits for one that is a little behind.
        """
        found = _having(self.layout, unit)
        for index, _ in found:
            bucket = self.buckets.flat(index, unit)
            own = self.arrays[index][self.extents[index].own[unit]]
            request = self.courier.start(index, unit, bucket)
            self.flying.append(_Flying(index, bucket, own, unit in self.filled, request))
        self.filled.add(unit)
        waiting = len(found) if self.late else 0
        while len(self.flying) > waiting or (self.flying and self.flying[0].request.ready()):
            self._complete()

    def _complete(self) -> None:
        """Complete the oldest reduction."""
        oldest = self.flying.popleft()
        with self.store.writing(oldest.own, keep=oldest.add) as piece:
            self.courier.complete(oldest.index, oldest.request, piece, oldest.add)
        self.landed.append(oldest)

    def _free(self, bucket: F32) -> None:
        """Wait until no rank reads what was in a bucket's buffer."""
        while any(np.shares_memory(bucket, f.bucket) for f in self.flying):
            self._complete()
        for landed in [f for f in self.landed if np.shares_memory(bucket, f.bucket)]:
            landed.request.release()
            self.landed.remove(landed)

    def finish(self) -> None:
        """Complete what is under way: all is reduced then."""
        while self.flying:
            self._complete()

    def gather(self) -> None:
        """Not for sharded gradients: the table of stages pairs them with sharded states."""
        raise AssertionError("sharded gradients are never gathered")

    def clear(self) -> None:
        """Forget all gradients."""
        self.finish()
        self.filled.clear()


@dataclass(frozen=True, eq=False)
class _Flying:
    """The reduction of a unit's bucket, and where this rank's piece of it goes."""

    index: int
    bucket: F32
    own: NDArray[Any]
    add: bool
    request: Reduction


def _having(layout: Layout, unit: str) -> list[tuple[int, Flat]]:
    """Trainable flats, by index, that hold elements of a unit."""
    return [(i, f) for i, f in enumerate(layout.trainable) if unit in f.counts and f.size(unit)]


def _arrays(
    layout: Layout, extents: Sequence[Any], store: Store, plan: GradientPlan
) -> list[NDArray[Any]]:
    arrays = []
    for flat, extent in zip(layout.trainable, extents, strict=True):
        kept = plan.kept(flat)
        arrays.append(store.empty("gradients", extent.size, kept.dtype, extent.spans))
        store.reserve("gradients", flat.widest_piece * kept.itemsize)
    return arrays
