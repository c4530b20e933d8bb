"""What a step is asked to do, on which all ranks must agree."""

import math
import zlib
from dataclasses import dataclass

import numpy as np

from zeromp.adamw import Rule
from zeromp.wire import F32
from zeromp.world import World
from zeromp.zero.micro import MicroBatches


@dataclass(frozen=True)
class Asked:
    """Learning rate, limit of the norm, and the rows (lr, decay) of all groups."""

    lr: float
    clip: float | None
    rates: F32
    rule: Rule

    def check(
        self, world: World, micro: MicroBatches, started: bool = True, fused: bool = True
    ) -> None:
        """Refuse a step on all ranks unless they ask for the same, sensible, one.

        Parameters
        ----------
        world : World
        micro : MicroBatches
        started : bool
            Whether there must be gradients already.
        fused : bool
            Whether the call is one that the settings allow.
        """
        rules = zlib.crc32(repr(self.rule).encode() + self.rates.tobytes())
        limit = math.nan if self.clip is None else self.clip
        table = world.agree([self.lr, limit, len(micro.weights), rules])
        with world.together():
            if not fused:
                raise ValueError("prepare is for fused=True; give lr and clip to step")
            micro.check_finished()
            if started and not micro.weight:
                raise ValueError(
                    "step without gradients: no sample or token has come since the last"
                )
            if not (math.isfinite(self.lr) and self.lr >= 0):
                raise ValueError(f"lr {self.lr} must be finite and not negative")
            if self.clip is not None and not self.clip > 0:
                raise ValueError(f"clip {self.clip} must be above 0; None does not clip")
            for rank, row in enumerate(table):
                if not np.array_equal(row, table[0], equal_nan=True):
                    raise ValueError(
                        "step must be called alike on all ranks: lr, clip, micro-batches and a "
                        f"checksum of optimizer and groups are {table[0].tolist()} on rank 0, "
                        f"{row.tolist()} on rank {rank}"
                    )
