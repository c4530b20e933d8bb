"""The optimizer fused into backward: a piece is updated right after its reduction.

The gradient of a unit is used up before the next unit's is reduced, so that a rank holds one piece
of gradients instead of all of its pieces. What is given up: a step can't be skipped, and clipping
knows the norm of the step before only. Lv et al. 2023, arXiv:2306.09782 ("LOMO"), section 3.1.
"""

import math

from zeromp.flat import Layout
from zeromp.stage1_optimizer import ShardedOptimizer
from zeromp.stage2_gradients import ShardedGradients
from zeromp.wire import F32, square_sum
from zeromp.world import World, alike
from zeromp.zero.asked import Asked
from zeromp.zero.micro import MicroBatches
from zeromp.zero.report import Report


class Fused:
    """The step that is being made while backward runs.

    Parameters
    ----------
    layout : Layout
    gradients, optimizer
        Of stage 2 or 3.
    world : World
    """

    def __init__(
        self,
        layout: Layout,
        gradients: ShardedGradients,
        optimizer: ShardedOptimizer,
        world: World,
    ) -> None:
        self.layout, self.gradients, self.optimizer = layout, gradients, optimizer
        self.world = world
        self.squares: dict[tuple[int, str], float] = {}
        self._asked: Asked | None = None
        self._clip_factor = 1.0
        self._update: tuple[int, float, F32] | None = None

    def prepare(self, step: int, asked: Asked, norm: float | None, unscale: float) -> None:
        """Say how the next step updates; `norm` is that of the step before."""
        limit = asked.clip
        self._asked = asked
        self._clip_factor = min(1.0, limit / norm) if limit is not None and norm else 1.0
        self._update = (step, self._clip_factor * unscale, asked.rates)

    def check_prepared(self) -> None:
        """ValueError unless `prepare` has been called since the last step."""
        if self._update is None:
            raise ValueError(
                "with fused=True the update is made while backward runs: call "
                "prepare(lr=..., clip=...) before backward"
            )

    def update(self, unit: str) -> None:
        """Use up the reduced pieces of a unit."""
        assert self._update is not None
        for index, flat in enumerate(self.layout.trainable):
            if unit in flat.counts:
                piece = self.gradients.arrays[index][self.gradients.extents[index].own[unit]]
                self.squares[index, unit] = square_sum(piece)
        self.optimizer.update_unit(unit, *self._update)

    def finish(self, micro: MicroBatches, loss_scale: float) -> Report:
        """End the step: publish what has been updated.

        Raises
        ------
        FloatingPointError
            On all ranks, if a gradient held inf or NaN: it has been applied.
        """
        with self.world.together():
            micro.check_finished()
            self.check_prepared()
            if not micro.weight:
                raise ValueError("step without gradients: nothing has come since the last")
        norm = math.sqrt(self._square_norm()) / loss_scale
        self.squares.clear()
        self._update = None
        if not math.isfinite(norm):
            raise alike(
                FloatingPointError(
                    "inf or NaN in a gradient, and with fused=True it has been applied: resume "
                    "from the last checkpoint, with a smaller lr or without fused"
                )
            )
        self.optimizer.publish()
        assert self._asked is not None
        lr, factor = self._asked.lr, self._clip_factor
        return Report(True, micro.loss, norm, factor, lr, loss_scale, micro.weight)

    def _square_norm(self) -> float:
        """Squared norm of the gradient, added up in the same order as by `zeromp.zero.norm`."""
        mine = 0.0
        for index, flat in enumerate(self.layout.trainable):
            for unit in flat.counts:
                mine += self.squares[index, unit]
        total = 0.0
        for row in self.world.agree([mine]):
            total += float(row[0])
        return total
