"""The ladder: each stage shards one thing more than the one below it.

ZeRO keeps data parallelism, N ranks that each see other data and take the same steps, and removes
what it repeats N times. Two neighbouring rows differ by one class.
"""

from typing import NamedTuple

from zeromp.stage1_optimizer import FullOptimizer, ShardedOptimizer
from zeromp.stage2_gradients import FullGradients, ShardedGradients
from zeromp.stage3_parameters import FullParameters, ShardedParameters


class Stage(NamedTuple):
    """Who holds what."""

    optimizer: type[FullOptimizer] | type[ShardedOptimizer]
    gradients: type[FullGradients] | type[ShardedGradients]
    parameters: type[FullParameters] | type[ShardedParameters]


STAGES = (
    Stage(FullOptimizer, FullGradients, FullParameters),
    Stage(ShardedOptimizer, FullGradients, FullParameters),
    Stage(ShardedOptimizer, ShardedGradients, FullParameters),
    Stage(ShardedOptimizer, ShardedGradients, ShardedParameters),
)


def stage_of(number: int) -> Stage:
    """Row of the table; ValueError if there is none."""
    if number not in range(len(STAGES)):
        raise ValueError(f"stage {number} is unknown: use 0, 1, 2 or 3")
    return STAGES[number]
