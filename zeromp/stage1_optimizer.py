"""Rung 1: who holds the optimizer states?

Mixed-precision Adam keeps 12 bytes per parameter beside the weight and its gradient: a float32
master and two moments. An element's update needs nothing of any other element, so N ranks need not
all make the same update: let each make 1/N of it.

===================  ============================  ============================================
..                   `FullOptimizer`, stage 0      `ShardedOptimizer`, stages 1 to 3
===================  ============================  ============================================
held on each rank    states of all parameters      states of this rank's pieces: 1/N
sent at the step     all-gather of gradients       all-gather of updated parameters ("publish")
bytes per parameter  2 + 2 + 12                    2 + 2 + 12/N, at stage 1
traffic per step     2 psi                         2 psi
===================  ============================  ============================================

Both find each piece of the gradient reduced on the rank that owns it. The first sends gradients to
every rank and updates everything everywhere; the second updates first and sends parameters instead.
Stage 1 is free of charge. Rajbhandari et al. 2020, arXiv:1910.02054, sections 5.1 and 7.2.1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeromp.adamw import Arrays, Rule
from zeromp.flat import Extent, Flat, Layout, segments
from zeromp.store import Store
from zeromp.wire import F32, convert


class Gradients(Protocol):
    """What rung 1 needs of rung 2."""

    arrays: list[NDArray[Any]]
    extents: list[Extent]

    def gather(self) -> None:
        """Make reduced gradients known to all ranks."""


class Parameters(Protocol):
    """What rung 1 needs of rung 3."""

    arrays: list[NDArray[Any]]
    extents: list[Extent]

    def publish(self) -> None:
        """Make updated pieces known to all ranks."""


class FullOptimizer:
    """Stage 0: every rank holds all states, and makes the same update of all parameters."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        rule: Rule,
        group_of: Mapping[str, int],
        gradients: Gradients,
        parameters: Parameters,
    ) -> None:
        self.gradients = gradients
        self.extents = [flat.full for flat in layout.trainable]
        self.states = _states(layout, self.extents, store, rule, group_of, gradients, parameters)

    def step(self, step: int, factor: float, rates: F32) -> None:
        """Gather all gradients, then update all parameters."""
        self.gradients.gather()
        for states in self.states:
            states.update(step, factor, rates)


class ShardedOptimizer:
    """Stages 1 to 3: a rank holds the states of its pieces, updates those, and publishes them."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        rule: Rule,
        group_of: Mapping[str, int],
        gradients: Gradients,
        parameters: Parameters,
    ) -> None:
        self.parameters = parameters
        self.extents = [flat.shard for flat in layout.trainable]
        self.states = _states(layout, self.extents, store, rule, group_of, gradients, parameters)

    def step(self, step: int, factor: float, rates: F32) -> None:
        """Update this rank's pieces, then publish them."""
        for states in self.states:
            states.update(step, factor, rates)
        self.publish()

    def update_unit(self, unit: str, step: int, factor: float, rates: F32) -> None:
        """Update this rank's piece of one unit alone; `publish` when all units are done."""
        for states in self.states:
            if unit in states.extent.spans:
                states.update(step, factor, rates, states.extent.spans[unit])

    def publish(self) -> None:
        """Make the updated pieces known."""
        self.parameters.publish()


class States:
    """Optimizer states of one flat, in the extent that its holder covers.

    Attributes
    ----------
    master : ndarray of float32 or None
        None where parameters are stored in float32: they are their own master.
    moments : dict of str to ndarray of float32
        By kind: "m", "v".
    """

    def __init__(
        self, flat: Flat, extent: Extent, store: Store, rule: Rule, group_of: Mapping[str, int]
    ) -> None:
        self.flat, self.extent, self.rule, self.group_of = flat, extent, rule, group_of
        self.store = store
        self.master: F32 | None = None
        if flat.format.name != "float32":
            self.master = store.empty("master", extent.size, np.float32, extent.spans)
            store.reserve("master", 4 * max(s.stop - s.start for s in extent.spans.values()))
        self.moments = {
            k: store.empty(k, extent.size, np.float32, extent.spans) for k in rule.states
        }

    def connect(self, gradients: Gradients, parameters: Parameters, index: int) -> None:
        """Find this flat's elements in the arrays of the two other rungs."""
        others = [gradients.extents[index], parameters.extents[index]]
        self.segments, self.groups = segments(self.flat, self.extent, others, self.group_of)
        stored = parameters.arrays[index]
        self.arrays = Arrays(
            gradient=gradients.arrays[index],
            master=stored if self.master is None else self.master,
            states=list(self.moments.values()),
            copy=None if self.master is None else stored,
        )
        self.store.reserve_tiles(self.arrays, self.extent.size)

    def load(self, unit: str, values: F32) -> None:
        """Set the masters of a unit from its whole values."""
        if self.master is not None:
            part = self.flat.covered(self.extent, unit, values)
            with self.store.writing(self.master[self.extent.spans[unit]]) as masters:
                convert(part, masters)

    def update(self, step: int, factor: float, rates: F32, span: slice | None = None) -> None:
        """Apply the rule to all that is covered, or to a span of it.

        `rates` has a row (lr, decay) per group.
        """
        span = span or slice(0, self.extent.size)
        tiles = self.store.tiles(self.arrays, self.segments, self.groups, span.start, span.stop)
        for arrays, runs, groups in tiles:
            self.rule.update(step, factor, arrays, runs, rates[groups])


def _states(
    layout: Layout,
    extents: Sequence[Extent],
    store: Store,
    rule: Rule,
    group_of: Mapping[str, int],
    gradients: Gradients,
    parameters: Parameters,
) -> list[States]:
    found = []
    for index, (flat, extent) in enumerate(zip(layout.trainable, extents, strict=True)):
        states = States(flat, extent, store, rule, group_of)
        states.connect(gradients, parameters, index)
        found.append(states)
    return found
