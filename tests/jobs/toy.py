"""A job for tests/unit/test_launch_cases.py: trains the toy for six steps, with one fault.

mpiexec -n 3 python toy.py FAULT
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import toys

import zeromp as zm

N, CUTS = 57, [20, 30, 7]
FAULTY = 1  # the rank at fault
FAULTY_STEP = 3


def raises(error):
    raise error


AT_FAULTY_STEP = {  # what the faulty rank does; the others go on and wait for it
    "runtime": lambda: raises(RuntimeError("disk on fire")),
    "memory": lambda: raises(MemoryError("no memory left")),
    "interrupt": lambda: raises(KeyboardInterrupt),
    "exit 3": lambda: sys.exit(3),
    "exit 0": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(60),
}


def train(world, zero, fault):
    for step in range(1, 7):
        if step == FAULTY_STEP and world.rank == FAULTY and fault in AT_FAULTY_STEP:
            AT_FAULTY_STEP[fault]()
        toys.feed(zero, N, CUTS, step)
        assert zero.step(clip=1.0).applied
        if fault == "all exit 3" and step == FAULTY_STEP:
            sys.exit(3)


def main(fault):
    world = zm.world()
    stage = 5 if fault == "all wrong" else 3
    stage = 2 if fault == "one differs" and world.rank == FAULTY else stage
    zero = zm.Zero(toys.arrays(N, CUTS), world=world, stage=stage, wire="float32", bucket=20)
    train(world, zero, fault)
    if fault == "full on rank 0" and world.rank == 0:
        zero.full("a0")
    if fault == "full, others train":
        if world.rank == 0:
            zero.full("a0")
        train(world, zero, "")
    if fault == "sweep twice":
        list(zero.sweep(["unit0", "unit1"] + ["unit1"] * (world.rank == FAULTY)))
        if world.rank != FAULTY:
            time.sleep(60)
    if fault == "late" and world.rank == FAULTY:
        time.sleep(3)
    if fault == "catches":
        try:
            world.same("numbers", str(world.rank))
        except ValueError:
            world.print("caught")
    world.print(f"trained {zero.applied} steps, {np.abs(zero.layout.num_ranks)} ranks")


if __name__ == "__main__":
    main(sys.argv[1])
