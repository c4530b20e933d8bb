"""Rung 3: who holds the parameters?

A unit's weights are needed while that unit computes, and at no other time.

===================  ================================  =======================================
..                   `FullParameters`, stages 0 to 2   `ShardedParameters`, stage 3
===================  ================================  =======================================
held on each rank    all parameters                    this rank's pieces: 1/N, and a window
sent                 all-gather after the update       all-gather of each unit when a sweep
                     ("publish"): psi                  comes to it, forward and backward: 2 psi
bytes per parameter  2 + 14/N, at stage 2              16/N
===================  ================================  =======================================

A *sweep* walks units in the order it is given and yields each with its weights in float32, for as
long as the loop's body runs. The sharded sweep owns a window of ``prefetch`` + 1 buffers: it starts
gathers while a buffer is free, waits for the oldest, and takes the buffer back when the loop comes
round, so that full weights live in the window and nowhere else. The order is an argument: backward,
evaluation and changed paths need nothing new, and a unit visited twice is gathered twice.
Rajbhandari et al. 2020, arXiv:1910.02054, sections 5.3 and 7.2.2.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.flat import Flat, Layout
from zeromp.store import Store, page_up
from zeromp.wire import F32, FORMATS, convert, nan_fill
from zeromp.world import Request, World

Weights = dict[str, F32]


@dataclass(frozen=True)
class SweepPlan:
    """How weights are brought to the layers, whoever holds them.

    Parameters
    ----------
    prefetch : int
        Units gathered ahead of the one in use.
    poison : bool
        Fill a buffer with NaN when it is taken back, so that a use after release shows.
    per_node : bool
        Hold full weights (the window, in a sharded sweep) once per node, and let its ranks share
        them: they only read them while they compute.
    """

    prefetch: int = 1
    poison: bool = False
    per_node: bool = False

    def full(self, store: Store, kind: str, size: int, dtype: Any) -> NDArray[Any]:
        """Draw an array for full weights."""
        return (store.node_empty if self.per_node else store.empty)(kind, size, dtype)


class FullParameters:
    """Stages 0 to 2: every rank holds all parameters."""

    def __init__(self, layout: Layout, store: Store, world: World, plan: SweepPlan) -> None:
        self.layout, self.world = layout, world
        self.extents = [flat.full for flat in layout.flats]
        self.arrays = [
            plan.full(store, "parameters", f.full.size, f.format.dtype) for f in layout.flats
        ]
        self.desk = _Desk(layout, store, plan)

    def load(self, index: int, unit: str, values: F32) -> None:
        """Set a unit's parameters from its whole values, which all ranks have."""
        convert(values, self.arrays[index][self.extents[index].spans[unit]])

    def publish(self) -> None:
        """Bring every rank's updated pieces to all ranks."""
        for unit in self.layout.units:
            for index, flat in enumerate(self.layout.trainable):
                if unit in flat.counts and flat.size(unit):
                    whole = self.arrays[index][flat.full.spans[unit]]
                    own = self.arrays[index][flat.full.own[unit]]
                    self.world.all_gather(own, whole, flat.counts[unit], unit)

    def sweep(self, order: Iterable[str]) -> Iterator[Weights]:
        """Yield the weights of each unit in order, float32, valid until the next is asked for."""
        for unit in order:
            here = {i: self.arrays[i][f.full.spans[unit]] for i, f in _having(self.layout, unit)}
            yield self.desk.lay_out(unit, here)
            self.desk.clear(unit)


class ShardedParameters:
    """Stage 3: a rank holds its pieces; full weights live in the window of a sweep."""

    def __init__(self, layout: Layout, store: Store, world: World, plan: SweepPlan) -> None:
        self.layout, self.store, self.world, self.plan = layout, store, world, plan
        self.extents = [flat.shard for flat in layout.flats]
        self.arrays = [
            store.empty("parameters", f.shard.size, f.format.dtype, f.shard.spans)
            for f in layout.flats
        ]
        widest = [f.widest_piece * f.format.itemsize for f in layout.flats]
        store.reserve("parameters", max(widest))
        self.slots = store.slots("parameters", sum(map(page_up, widest)), plan.prefetch + 1)
        self.window = [
            [plan.full(store, "buffers", flat.widest, flat.format.dtype) for flat in layout.flats]
            for _ in range(plan.prefetch + 1)
        ]
        self.desk = _Desk(layout, store, plan)

    def load(self, index: int, unit: str, values: F32) -> None:
        """Set this rank's piece of a unit from its whole values."""
        flat = self.layout.flats[index]
        with self.store.writing(self.arrays[index][flat.shard.own[unit]]) as piece:
            convert(values[flat.piece[unit]], piece)

    def publish(self) -> None:
        """Nothing to send: the next sweep gathers what it needs."""

    def sweep(self, order: Iterable[str]) -> Iterator[Weights]:
        """Yield the weights of each unit in order, float32, valid until the next is asked for."""
        ahead = self.store.ahead(((unit, self._pieces(unit)) for unit in order), self.slots)
        free = deque(self.window)
        gathering: deque[tuple[str, list[NDArray[Any]], dict[int, NDArray[Any]], list[Request]]]
        gathering = deque()
        sent: list[Request] = []
        try:
            while True:
                while free and (item := next(ahead, None)) is not None:
                    buffers = free.popleft()
                    gathering.append((item[0], buffers, *self._start(*item, buffers)))
                    sent += gathering[-1][-1]
                if not gathering:
                    return
                unit, buffers, here, requests = gathering[0]
                for request in requests:
                    request.wait()
                gathering.popleft()
                yield self.desk.lay_out(unit, here)
                self.desk.clear(unit)
                if self.plan.poison and not self.plan.per_node:
                    for buffer in buffers:
                        nan_fill(buffer)
                free.append(buffers)
        finally:  # a loop left early leaves no gather in flight
            for _, _, _, requests in gathering:
                for request in requests:
                    request.wait()
            for request in sent:  # and no rank that still reads the pieces of this one
                request.release()

    def _pieces(self, unit: str) -> dict[int, NDArray[Any]]:
        """Piece of a unit that this rank stores, in each flat."""
        return {
            index: self.arrays[index][flat.shard.own[unit]]
            for index, flat in _having(self.layout, unit)
        }

    def _start(
        self, unit: str, pieces: dict[int, NDArray[Any]], buffers: list[NDArray[Any]]
    ) -> tuple[dict[int, NDArray[Any]], list[Request]]:
        """Start gathering a unit into a window's buffers, one per flat."""
        here, requests = {}, []
        for index, own in pieces.items():
            counts = self.layout.flats[index].counts[unit]
            here[index] = buffers[index][: sum(counts)]
            requests.append(self.world.start_all_gather(own, here[index], counts, unit))
        return here, requests


def _having(layout: Layout, unit: str) -> list[tuple[int, Flat]]:
    """Flats, by index, that hold elements of a unit."""
    return [(i, f) for i, f in enumerate(layout.flats) if unit in f.counts and f.size(unit)]


class _Desk:
    """Where layers find a unit's weights: float32 as stored, 16-bit widened into one buffer."""

    def __init__(self, layout: Layout, store: Store, plan: SweepPlan) -> None:
        self.layout, self.plan = layout, plan
        self.widened = [
            store.empty("buffers", 0 if f.format == FORMATS["float32"] else f.widest, np.float32)
            for f in layout.flats
        ]

    def lay_out(self, unit: str, stored: dict[int, NDArray[Any]]) -> Weights:
        """Named float32 views of a unit, given its whole stored values in each flat."""
        weights: Weights = {}
        for index, flat in enumerate(self.layout.flats):
            if unit not in flat.counts:
                continue
            values = stored.get(index, self.widened[index][:0])
            if values.dtype != np.float32:
                wide = self.widened[index][: values.size]
                convert(values, wide)
                values = wide
            weights |= flat.views(unit, values)
        return weights

    def clear(self, unit: str) -> None:
        """Spoil what was laid out, if asked to, so that a later use shows."""
        if self.plan.poison:
            for index, flat in enumerate(self.layout.flats):
                if unit in flat.counts:
                    nan_fill(self.widened[index])
