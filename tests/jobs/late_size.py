"""A job for tests/unit/test_launch_cases.py: sizes of a collective differ at step 7 (O-085)."""

import numpy as np

import zeromp as zm

world = zm.world()
for step in range(1, 10):
    size = 6 if step == 7 and world.rank == 1 else 5
    whole = np.zeros(size * world.size, np.float32)
    world.all_gather(np.zeros(size, np.float32), whole, [size] * world.size, f"block{step}")
world.print("done")
