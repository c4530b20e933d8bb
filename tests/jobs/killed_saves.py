"""Kill a process with SIGKILL at random moments while it saves, again and again.

    python tests/jobs/killed_saves.py FOLDER KILLS SEED

Each victim resumes from the newest checkpoint, trains and saves in a loop, on two ranks. After each
kill the newest complete checkpoint must verify, load, and hold the numbers that were in memory when
it was saved. Victims are forks of this process, so that a kill costs no start of Python. A victim
is killed in its second save, at a fraction of the time that its first has taken, so that a slow
machine makes no difference. Prints how many kills left half a save, and the last step.
"""

import hashlib
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import saved
import toys

import zeromp as zm
from zeromp.checkpoint import Checkpoint, find

CUTS = {"a.w": (150, 1000), "b": 77, "c.w": (7, 11)}
N = saved.size_of(CUTS)


def build(world):
    return toys.make(world, N, CUTS, 1 + world.size % 3, "bfloat16")


def digest(zero):
    found = hashlib.sha256()
    for values in saved.state(zero).values():
        found.update(np.ascontiguousarray(values))
    return found.hexdigest()


def victim(world, folder, background, tell):
    zero = build(world)
    zero.load(folder, if_exists=True)
    for turn in range(10**6):
        saved.train(zero, CUTS, 1)
        extra = {"applied": zero.applied, "digest": digest(zero)}
        os.write(tell, b".")
        zero.save(folder, keep=2, extra=extra, wait=turn % 2 == background)
        os.write(tell, b".")


def kill_one(folder, ranks, background, fraction):
    """Whether the kill has left a half-written checkpoint behind."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            zm.threads(ranks, lambda world: victim(world, folder, background, tell))
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(tell)
    times = []
    for _ in range(3 * ranks):  # the start and end of a save, and the next start, on each rank
        assert os.read(ready, 1), "the victim has ended"
        times.append(time.monotonic())
    time.sleep(fraction * (times[2 * ranks - 1] - times[0]))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the victim died of something else"
    os.close(ready)
    steps = [path for path in folder.glob("step-*") if not (path / "model.h5").exists()]
    return bool(steps or list(folder.rglob("*.part")))


def check(folder):
    """Newest checkpoint: verified, loaded, compared."""
    with Checkpoint(find(folder)) as checkpoint:
        assert checkpoint.verify() == [], checkpoint.path

    def run(world):
        zero = build(world)
        report = zero.load(folder)
        assert report.extra == {"applied": zero.applied, "digest": digest(zero)}
        assert report.path == find(folder)
        return zero.applied

    return zm.threads(3, run)[0]


def main():
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(sys.argv[3])
    build(zm.alone())  # compiled before the first fork
    hits, last = 0, 0
    for _ in range(kills):
        hits += kill_one(folder, random.choice((1, 2)), random.randrange(2), random.uniform(0, 1.2))
        if any(folder.glob("step-*/model.h5")):
            applied = check(folder)
            assert applied >= last, "a committed checkpoint is gone"
            last = applied
    print(f"{hits} hits, step {last}")


if __name__ == "__main__":
    main()
