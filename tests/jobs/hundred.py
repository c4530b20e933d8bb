"""A job for tests/unit/test_launch_cases.py: 100 steps of toy(1000) (O-093)."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import toys

import zeromp as zm

world = zm.world()
zero = zm.Zero(toys.arrays(1000, [400, 600]), world=world, stage=int(sys.argv[1]), wire="float32")
toys.steps(zero, 1000, [400, 600], 1)
start = time.perf_counter()
toys.steps(zero, 1000, [400, 600], 100)
world.print(f"{zero.applied} steps, {time.perf_counter() - start:.2f} s")
