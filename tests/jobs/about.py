"""A job for tests/unit/test_launch_cases.py: prints ranks and threads, a line of JSON per rank."""

import json
import os
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

import zeromp as zm

world = zm.world()
x = np.ones((600, 600), np.float32)
for _ in range(3):
    x = x @ x / 600  # large enough for BLAS to start its threads
status = Path("/proc/self/status").read_text().splitlines()
found = {
    "rank": world.rank,
    "size": world.size,
    "cores": len(os.sched_getaffinity(0)),
    "blas": [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"],
    "threads": next(int(s.split()[1]) for s in status if s.startswith("Threads:")),
}
os.write(1, (json.dumps(found) + "\n").encode())  # in one piece: lines of ranks may mix
