"""A job for tests/launch/test_offload_jobs.py: trains with its states on disk, and ends somehow.

mpiexec -n 3 python offloaded.py FOLDER END
"""

import os
import signal
import sys
import time

import numpy as np

import zeromp as zm

N = 30_000


def main(folder, end):
    world = zm.world()
    zero = zm.Zero(
        {"w": np.ones(N)}, world=world, stage=3, offload="optimizer=disk", offload_dir=folder
    )
    for step in range(1000 if end == "waits" else 4):
        if step == 2 and world.rank == world.size - 1:
            if end == "raises":
                raise RuntimeError("disk on fire")
            if end == "truncates":
                os.truncate(zero.store.disk.states.path, 4096)
            if end == "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        if end == "waits":
            time.sleep(0.1)
            world.print(f"step {step}")
        zero.backward({"w": zero.full("w")})
        assert zero.step().applied
    world.print("trained", [path.name for path in zero.store.disk.folder.removed])


if __name__ == "__main__":
    main(*sys.argv[1:])
