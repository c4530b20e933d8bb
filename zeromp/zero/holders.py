"""The three holders of a stage, side by side: built, filled with values, and read whole by name."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import account
from zeromp.adamw import Rule
from zeromp.buckets import GradientPlan
from zeromp.flat import Array, Extent, Layout
from zeromp.stage3_parameters import SweepPlan
from zeromp.stages import stage_of
from zeromp.store import Placement
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
        self.placement = Placement.parse(options.offload, options.offload_tile)
        travel = format_of(options.reduce_wire) if options.reduce_wire else None
        late = min(options.prefetch, 1) if world.one_sided and not options.fused else 0
        gradient_plan = GradientPlan(options.micro_batches, travel, visits, options.fused, late)
        sweep_plan = SweepPlan(options.prefetch, options.poison, options.share_weights)
        self.case = account.Case.of(
            layout,
            gradient_plan,
            rule.states,
            options.prefetch,
            world,
            self.placement,
            options.share_weights,
        )
        row = stage_of(stage)
        with world.together():
            construct.check_budget(self.case, stage, options.device_memory)
        self.store = construct.make_store(world, self.placement, options)
        try:
            self._check_disk(stage)
            with world.together():  # drawing memory that is sent is a collective
                self.parameters = row.parameters(layout, self.store, world, sweep_plan)
                self.gradients = row.gradients(layout, self.store, world, gradient_plan)
                self.optimizer = row.optimizer(
                    layout, self.store, rule, group_of, self.gradients, self.parameters
                )
        except Exception:
            self.store.close()  # leave no files of what was not built
            raise

    def _check_disk(self, stage: int) -> None:
        """OSError on all ranks, before anything is drawn, if a rank's disk has no room."""
        if self.store.disk is None:
            return
        need = account.held_by_tier(self.case, stage)["disk"]
        with ExitStack() as stack, self.world.together():
            stack.enter_context(self.store.disk.holding_room(sum(need.values())))

    # ---- values in -------------------------------------------------------------------------------

    def load_initial(self, source: Source) -> None:
        """Take this rank's part of each unit's values, which must be the same on all ranks."""
        try:
            digests: list[str] = []
            with self.world.together():
                for unit in self.layout.units:
                    digests.append(self._load_initial(unit, source.values(unit)))
            self.world.same("initial values", "\n".join(digests))
        except Exception:
            self.store.close()
            raise

    def _load_initial(self, unit: str, values: Mapping[str, F32]) -> str:
        """Load a unit; returns a line on which ranks must agree."""
        digest = hashlib.sha256()
        for name, array in values.items():
            construct.check_finite(name, array)
            digest.update(np.ascontiguousarray(array).tobytes())
        self.load(unit, values)
        return f"unit {unit} with {', '.join(values)}: {digest.hexdigest()[:16]}"

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
        stored = self._whole(
            index, array, place, self.parameters.arrays[index], self.parameters.extents
        )
        values = np.empty(array.size, np.float32)
        convert(stored, values)
        return values.reshape(array.shape)

    def master(self, name: str) -> F32:
        """Float32 master; the parameter itself where there is none."""
        index, array, place = self.layout.find(name)
        if not array.trainable or self.optimizer.states[index].master is None:
            return self.full(name)
        held = self.optimizer.states[index].master
        return self._whole(index, array, place, held, self.optimizer.extents).reshape(array.shape)

    def moments(self, name: str) -> dict[str, F32]:
        """Optimizer states by kind; none of a frozen array."""
        index, array, place = self.layout.find(name)
        found: dict[str, F32] = {}
        if array.trainable:
            for kind, held in self.optimizer.states[index].moments.items():
                whole = self._whole(index, array, place, held, self.optimizer.extents)
                found[kind] = whole.reshape(array.shape)
        return found

    def _whole(
        self, index: int, array: Array, place: slice, held: Any, extents: Sequence[Extent]
    ) -> NDArray[Any]:
        """Copy of one array, in the format held; a collective where ranks hold shards."""
        flat, extent = self.layout.flats[index], extents[index]
        unit = held[extent.spans[array.unit]]
        if not extent.sharded or not array.size:
            return self._copy(unit[place] if array.size else unit[:0])
        edges = np.cumsum([0, *flat.counts[array.unit]]).clip(place.start, place.stop)
        counts = np.diff(edges).tolist()
        first = edges[self.world.rank] - flat.piece[array.unit].start
        count = counts[self.world.rank]
        mine = self._copy(unit[first : first + count] if count else unit[:0])
        whole = np.empty(array.size, unit.dtype)
        with self.world.ledger.within("inspect"):
            self.world.all_gather(mine, whole, counts, array.unit)
        return whole

    def _copy(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Copy of stored numbers; what can't be read is an error on all ranks."""
        copy = np.empty(stored.size, stored.dtype)
        together = self.world.together() if self.placement.on_disk else nullcontext()
        with self.world.ledger.within("inspect"), together:
            self.store.read(stored, copy)
        return copy
