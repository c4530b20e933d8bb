"""The three holders of a stage, side by side: built, filled with values, and read whole by name."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import account
from zeromp.adamw import Rule
from zeromp.buckets import GradientPlan
from zeromp.flat import Extent, Layout
from zeromp.stage3_parameters import SweepPlan
from zeromp.stages import stage_of
from zeromp.store import Store
from zeromp.wire import F32, convert, format_of
from zeromp.world import World
from zeromp.zero import construct
from zeromp.zero.settings import Options, Source


class Holders:
    """Parameters, gradients and optimizer of a stage, over one layout and one store.

    Attributes
    ----------
    store : Store
    case : account.Case
        What the prediction of bytes depends on.
    parameters, gradients, optimizer
        The classes that `zeromp.stages` names for the stage.
    """

    def __init__(
        self,
        layout: Layout,
        world: World,
        stage: int,
        rule: Rule,
        options: Options,
        group_of: Mapping[str, int],
        visits: tuple[str, ...],
    ) -> None:
        self.layout, self.world = layout, world
        self.store = Store(options.device_memory, world.empty)
        travel = format_of(options.reduce_wire) if options.reduce_wire else None
        gradient_plan = GradientPlan(options.micro_batches, travel, visits)
        sweep_plan = SweepPlan(options.prefetch, options.poison)
        self.case = account.Case.of(
            layout, gradient_plan, rule.states, options.prefetch, world.reduce
        )
        row = stage_of(stage)
        with world.together():
            construct.check_budget(self.case, stage, options.device_memory)
        with world.together():  # drawing memory is a collective
            self.parameters = row.parameters(layout, self.store, world, sweep_plan)
            self.gradients = row.gradients(layout, self.store, world, gradient_plan)
            self.optimizer = row.optimizer(
                layout, self.store, rule, group_of, self.gradients, self.parameters
            )

    # ---- values in -------------------------------------------------------------------------------

    def load_initial(self, source: Source) -> None:
        """Take this rank's part of each unit's values, which must be the same on all ranks."""
        digests = []
        with self.world.together():
            for unit in self.layout.units:
                values = source.values(unit)
                digest = hashlib.sha256()
                for name, array in values.items():
                    construct.check_finite(name, array)
                    digest.update(np.ascontiguousarray(array).tobytes())
                digests.append(f"unit {unit} with {', '.join(values)}: {digest.hexdigest()[:16]}")
                self.load(unit, values)
        self.world.same("initial values", "\n".join(digests))

    def load(self, unit: str, values: Mapping[str, F32]) -> None:
        """Set masters and stored parameters of a unit from its whole values."""
        for index, flat in enumerate(self.layout.flats):
            if unit not in flat.arrays:
                continue
            whole = np.concatenate([values[a.name].reshape(-1) for a, _ in flat.arrays[unit]])
            whole = whole.astype(np.float32, copy=False)
            self.parameters.load(index, unit, whole)
            if flat.trainable:
                self.optimizer.states[index].load(unit, whole)

    def edit(self, unit: str, values: Mapping[str, F32]) -> None:
        """Make rank 0's values of a unit everyone's; ValueError on all ranks if not finite."""
        with self.world.ledger.within("inspect"):
            for array in values.values():
                self.world.broadcast(array.reshape(-1), 0, unit)
            with self.world.together():
                for name, array in values.items():
                    construct.check_finite(name, array)
        self.load(unit, values)

    # ---- whole arrays out ------------------------------------------------------------------------

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
        """Whole values of one unit in one flat; a collective where the holder has a shard."""
        flat, extent = self.layout.flats[index], extents[index]
        held: NDArray[Any] = arrays[index][extent.spans[unit]]
        if not extent.sharded or not flat.size(unit):
            return held
        whole = np.empty(flat.size(unit), held.dtype)
        with self.world.ledger.within("inspect"):
            self.world.all_gather(held, whole, flat.counts[unit], unit)
        return whole
