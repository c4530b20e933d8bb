"""The toy of shared/cases.md, "How to read a check", its float64 reference, and ways to feed it.

toy(n; cuts) is one vector of n elements, cut in the declared order into named arrays. Start and
gradients are sines of their place: no random numbers. Nothing here imports zeromp, so that what a
test expects is never what the code computes; a `Zero` is handed in.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import adamw, clip_factor

import zeromp as zm
from zeromp.runlog import RunLog, summary

F64 = NDArray[np.float64]
Cuts = Mapping[str, Any] | Sequence[int]

PINNED = {"lr": 0.01, "weight_decay": 0.1}  # of AdamW in cases.md: zm.AdamW(**PINNED)
STAGES = (0, 1, 2, 3)
WIRES = ("float32", "bfloat16", "float16")
SCALE = {"float16": 2.0**10}  # loss scale: gradients reach 1, so at most 2**15


# ---- the toy -------------------------------------------------------------------------------------


def start(n: int) -> F64:
    """P(i) = cos(0.05 (i + 1))."""
    return np.cos(0.05 * np.arange(1, n + 1))


def gradient(n: int, rank: int, step: int, micro: int = 0) -> F64:
    """G(i; r, t, m) = sin(0.1 (i + 1) + 0.7 r + 1.3 t + 0.31 m), with t = 1, 2, ..."""
    return np.sin(0.1 * np.arange(1, n + 1) + 0.7 * rank + 1.3 * step + 0.31 * micro)


def mean_gradient(n: int, ranks: int, step: int, micros: int = 1) -> F64:
    """Mean over ranks and micro-batches, unrounded."""
    every = [gradient(n, r, step, m) for r in range(ranks) for m in range(micros)]
    return np.mean(every, axis=0)


def sent_gradient(n: int, ranks: int, step: int, wire: str) -> F64:
    """Mean over ranks as it arrives with one micro-batch: rounded when sent, and when reduced."""
    scale = np.float32(SCALE.get(wire, 1))
    total = np.zeros(n, np.float32)
    for r in range(ranks):  # in rank order, in float32
        total += rounded(gradient(n, r, step).astype(np.float32) * scale, wire)
    return (rounded(total * np.float32(1 / ranks), wire) / scale).astype(np.float64)


def cut(flat: NDArray[Any], cuts: Cuts) -> dict[str, NDArray[Any]]:
    """Cut a vector, in order, into arrays: ``{"w": (2, 3), "b": 3}``, or sizes alone, [6, 3]."""
    shapes = cuts if isinstance(cuts, Mapping) else {f"a{i}": n for i, n in enumerate(cuts)}
    arrays, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = flat[at : at + size].reshape(shape)
        at += size
    assert at == flat.size, (at, flat.size)
    return arrays


def rounded(x: NDArray[Any], wire: str) -> NDArray[np.float32]:
    """Round to the nearest number of a format, ties to even; finite input."""
    x = np.asarray(x, np.float32)
    if wire == "float32":
        return x
    if wire == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    low, kept = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (kept & 1 == 1))
    return ((kept + up).astype(np.uint32) << 16).view(np.float32)


# ---- ref -----------------------------------------------------------------------------------------


@dataclass
class Ref:
    """One process in float64: `step` makes one of AdamW or, with momentum, of SGD."""

    p: F64
    momentum: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of reference.adamw, or lr and wd
    t: int = 0

    def __post_init__(self) -> None:
        self.p = np.array(self.p, np.float64)
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)

    def step(self, g: F64, clip: float = math.inf, **settings: Any) -> float:
        """Apply a mean gradient; returns its norm before clipping."""
        norm = float(np.sqrt(np.sum(g * g)))
        g = g * clip_factor(norm, clip)
        settings = {**self.settings, **settings}
        self.t += 1
        if self.momentum is None:
            self.p, self.m, self.v = adamw(self.p, g, self.m, self.v, self.t, **settings)
        else:
            self.m = self.momentum * self.m + g
            self.p = self.p * (1 - settings["lr"] * settings.get("wd", 0)) - settings["lr"] * self.m
        return norm


def trained(n: int, ranks: int, steps: int, wire: str = "float32", **settings: Any) -> Ref:
    """Reference after some steps, fed with gradients rounded to the wire's format."""
    ref = Ref(start(n), **settings)
    for t in range(1, steps + 1):
        ref.step(sent_gradient(n, ranks, t, wire))
    return ref


# ---- a Zero --------------------------------------------------------------------------------------


def make(world: Any, n: int, cuts: Cuts, stage: int, wire: str = "float32", **given: Any) -> Any:
    """`Zero` for a toy: AdamW as pinned, released weights poisoned, a scale that fits float16."""
    options = {"optimizer": zm.AdamW(**PINNED), "poison": True, "loss_scale": SCALE.get(wire)}
    return zm.Zero(arrays(n, cuts), world=world, stage=stage, wire=wire, **{**options, **given})


def arrays(n: int, cuts: Cuts) -> dict[str, NDArray[Any]]:
    """Initial arrays for `Zero`."""
    return cut(start(n).astype(np.float32), cuts)


def feed(zero: Any, n: int, cuts: Cuts, step: int, micros: int = 1) -> None:
    """Give this rank's gradients of one step."""
    for m in range(micros):
        zero.backward(cut(gradient(n, zero.world.rank, step, m), cuts))


def steps(zero: Any, n: int, cuts: Cuts, count: int, clip: float | None = None) -> list[Any]:
    """Train `count` steps; returns their reports."""
    reports = []
    for _ in range(count):
        feed(zero, n, cuts, zero.applied + 1)
        reports.append(zero.step(clip=clip))
    return reports


def whole(get: Callable[[str], Any], names: Sequence[str]) -> NDArray[np.float32]:
    """All arrays end to end: ``whole(zero.master, zero.names)``."""
    return np.concatenate([np.asarray(get(name)).reshape(-1) for name in names])


def state(zero: Any) -> dict[str, NDArray[np.float32]]:
    """Full, master, m (and v) of all arrays, end to end. Call on all ranks."""
    found = {"full": whole(zero.full, zero.names), "master": whole(zero.master, zero.names)}
    for kind in zero.rule.states:
        found[kind] = whole(lambda name, kind=kind: zero.moments(name)[kind], zero.names)
    return found


def summary_of(engine: Any, micro_batches: int) -> dict[str, Any]:
    """Summary of all that an Engine has done since it was made. Call on all ranks."""
    log = RunLog(engine, 0)
    log.sent_before, log.moved_before, log.moves_before = Counter(), Counter(), 0
    log.losses = [0.0] * engine.zero.attempts
    log.applied, log.micro_batches = engine.applied, micro_batches
    return summary(log)
