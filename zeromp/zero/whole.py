"""Whole arrays by name, from holders that have all of them or a shard."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.flat import Extent, Layout
from zeromp.stage1_optimizer import FullOptimizer, ShardedOptimizer
from zeromp.stage3_parameters import FullParameters, ShardedParameters
from zeromp.wire import F32, convert
from zeromp.world import World


class Whole:
    """Brings one array of one kind together; a collective where the holder has a shard."""

    def __init__(
        self,
        layout: Layout,
        world: World,
        parameters: FullParameters | ShardedParameters,
        optimizer: FullOptimizer | ShardedOptimizer,
    ) -> None:
        self.layout, self.world = layout, world
        self.parameters, self.optimizer = parameters, optimizer

    def full(self, name: str) -> F32:
        """Parameter as stored, widened."""
        index, array, place = self.layout.find(name)
        stored = self._unit(index, array.unit, self.parameters.arrays, self.parameters.extents)
        values = np.empty(array.size, np.float32)
        convert(stored[place], values)
        return values.reshape(array.shape)

    def master(self, name: str) -> F32:
        """Float32 master; the parameter itself where there is none."""
        index, array, place = self.layout.find(name)
        if not array.trainable or self.optimizer.states[index].master is None:
            return self.full(name)
        masters = [states.master for states in self.optimizer.states]
        whole = self._unit(index, array.unit, masters, self.optimizer.extents)
        return whole[place].reshape(array.shape).copy()

    def moments(self, name: str) -> dict[str, F32]:
        """Optimizer states by kind; none of a frozen array."""
        index, array, place = self.layout.find(name)
        found: dict[str, F32] = {}
        if array.trainable:
            for kind in self.optimizer.states[index].moments:
                arrays = [states.moments[kind] for states in self.optimizer.states]
                whole = self._unit(index, array.unit, arrays, self.optimizer.extents)
                found[kind] = whole[place].reshape(array.shape).copy()
        return found

    def _unit(
        self, index: int, unit: str, arrays: Sequence[Any], extents: Sequence[Extent]
    ) -> NDArray[Any]:
        """Whole values of one unit in one flat."""
        flat, extent = self.layout.flats[index], extents[index]
        held: NDArray[Any] = arrays[index][extent.spans[unit]]
        if not extent.sharded or not flat.size(unit):
            return held
        whole = np.empty(flat.size(unit), held.dtype)
        with self.world.ledger.within("inspect"):
            self.world.all_gather(held, whole, flat.counts[unit], unit)
        return whole
