"""Micro-batches since the last step: their weights, losses and samples, over all ranks.

[Note: mean over tokens] The step's gradient is the sum of all losses' gradients, over every
micro-batch and rank, divided by the sum of all weights W. That sum is known only at the step, but
16-bit gradients must be near their mean before that, lest they leave the format's range. So each is
divided, as it is made, by a *reference* known at the first micro-batch, its mean weight per rank,
and `unscale` sets that right at the step. With one micro-batch per step it is 1 / loss scale.
"""

import math
from dataclasses import dataclass, field

from zeromp.world import World, alike


@dataclass
class MicroBatches:
    """Bookkeeping of one step.

    Parameters
    ----------
    world : World
    limit : int
        Micro-batches per step.
    """

    world: World
    limit: int
    weights: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: int = 0
    reference: float = 1.0

    def check_finished(self) -> None:
        """Refuse to go on from a backward that an error has ended midway."""
        if len(self.losses) < len(self.weights):
            raise ValueError(
                "the last backward did not finish, and its gradients are incomplete: call "
                "zero_grad, and make this step's micro-batches anew"
            )

    def begin(
        self, weight: float, rows: int, error: Exception | None, rules: int
    ) -> tuple[float, int]:
        """Agree on a micro-batch's weight; see `Zero.begin`, without the loss scale."""
        try:
            self.check_finished()
        except ValueError as unfinished:
            error = error or unfinished
        if len(self.weights) == self.limit and error is None:
            more = self.limit + 1
            error = ValueError(
                f"backward was called {more} times before step, but micro_batches is {self.limit}: "
                f"call step, or pass micro_batches={more}"
            )
        table = self.world.agree([weight, rows, error is not None, rules]).tolist()
        if any(bad for _, _, bad, _ in table):
            with self.world.together():
                if error is not None:
                    raise error
        if len({rules for *_, rules in table}) > 1:
            raise alike(ValueError("backward must walk the same path on all ranks"))
        total = math.fsum(w for w, *_ in table)
        if not self.weights:
            self.reference = total or float(self.world.size)
        first_sample = self.samples + int(sum(n for _, n, *_ in table[: self.world.rank]))
        self.samples += int(sum(n for _, n, *_ in table))
        self.weights.append(total)
        return self.world.size / self.reference, first_sample

    def end(self, loss_sum: float) -> float:
        """Take in this rank's sum of losses; the mean of the micro-batch over all ranks."""
        loss = math.fsum(self.world.agree([loss_sum])[:, 0].tolist())
        self.losses.append(loss)
        return loss / self.weights[-1] if self.weights[-1] else math.nan

    @property
    def weight(self) -> float:
        """Sum of all weights."""
        return math.fsum(self.weights)

    @property
    def loss(self) -> float:
        """Mean loss over everything since the last step."""
        return math.fsum(self.losses) / self.weight if self.weight else math.nan

    @property
    def unscale(self) -> float:
        """What turns the mean over ranks of what was added up into the gradient of the mean."""
        return self.reference / self.weight

    def clear(self) -> None:
        """Start the next step."""
        self.weights.clear()
        self.losses.clear()
        self.samples = 0
