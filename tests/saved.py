"""Helpers of the tests of checkpoints: toys that are trained, saved, loaded, and compared whole."""

import json
from pathlib import Path

import numpy as np
import toys

import zeromp as zm
from zeromp.checkpoint import Checkpoint
from zeromp.checkpoint.loading import predicted_bytes

CUTS = {"a.w": (5, 4), "b": 7, "s": (), "e": (0, 4), "c.w": (3, 2, 5), "a.b": 1}
N = 59


def size_of(cuts):
    return sum(int(np.prod(shape)) for shape in cuts.values())


def train(zero, cuts, steps, frozen=()):
    n = size_of(cuts)
    for _ in range(steps):
        gradients = toys.cut(toys.gradient(n, zero.world.rank, zero.attempts + 1), cuts)
        zero.backward({k: v for k, v in gradients.items() if k not in frozen})
        zero.step()


def state(zero):
    """Every number by (kind, name). Call on all ranks."""
    found = {}
    for name in zero.names:
        found["full", name], found["master", name] = zero.full(name), zero.master(name)
        for kind, values in zero.moments(name).items():
            found[kind, name] = values
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].shape == b[key].shape, key
        assert a[key].tobytes() == b[key].tobytes(), key


def save(folder, ranks=3, stage=3, wire="bfloat16", steps=3, cuts=None, how=None, **options):
    """Train a toy and save it; its state, and the checkpoint's folder."""
    cuts = CUTS if cuts is None else cuts

    def run(world):
        zero = toys.make(world, size_of(cuts), cuts, stage, wire, **options)
        train(zero, cuts, steps, options.get("frozen", ()))
        return state(zero), zero.save(folder, **(how or {}))

    return zm.threads(ranks, run)[0]


def load(folder, ranks=3, stage=3, wire="bfloat16", cuts=None, more=0, how=None, **options):
    """Load into a toy that starts from other numbers; state and report of each rank."""
    cuts = CUTS if cuts is None else cuts

    def run(world):
        options.setdefault("optimizer", zm.AdamW(**toys.PINNED))
        arrays = {k: np.full(v.shape, 77, np.float32) for k, v in other(cuts).items()}
        zero = zm.Zero(
            arrays, world=world, stage=stage, wire=wire, loss_scale=toys.SCALE.get(wire),
            poison=True, **options,
        )  # fmt: skip
        report = zero.load(folder, **(how or {}))
        with Checkpoint(report.path) as checkpoint:
            only = bool(how and how.get("weights_only"))
            assert report.bytes_read == predicted_bytes(zero.holders, checkpoint, only)
        assert zero.store.held == zero.store.peak
        train(zero, cuts, more, options.get("frozen", ()))
        return state(zero), report, zero

    return zm.threads(ranks, run)


def other(cuts):
    return toys.arrays(size_of(cuts), cuts)


def flip(path: Path, at: int):
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def as_json(value):
    return json.loads(json.dumps(value))
