"""zeromp: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) in NumPy and MPI.

Start at `zeromp.stages`: the ladder is a table of eight small classes.
"""

from zeromp import account, checkpoint, data, models, signals, weights
from zeromp.adamw import SGD, AdamW, constant, cosine, linear
from zeromp.engine import Engine
from zeromp.runlog import RunLog, num_bytes, parse
from zeromp.signals import Interrupt
from zeromp.store import OverBudget
from zeromp.world import World, alone, threads, world
from zeromp.zero import Group, Options, Report, Source, Zero

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Engine",
    "Group",
    "Interrupt",
    "Options",
    "OverBudget",
    "Report",
    "RunLog",
    "Source",
    "World",
    "Zero",
    "account",
    "alone",
    "checkpoint",
    "constant",
    "cosine",
    "data",
    "linear",
    "models",
    "num_bytes",
    "parse",
    "signals",
    "threads",
    "weights",
    "world",
]
