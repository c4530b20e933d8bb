"""A rank that trains a GPT with zeromp, and reports times, memory and losses."""

import cProfile
import pstats
import statistics
import time

import numpy as np
from gpt import ADAMW, Tokens, measured, shape_of, weights
from rank import Gemm, claim_stdout, forget_peak, settings, status_bytes

import zeromp as zm

TOP = 25


def build(told, shape, world):
    """The engine that the settings ask for, with the weights that all frameworks start from."""
    model = zm.models.gpt(shape.vocab, shape.layers, shape.width, shape.heads, shape.context)
    return zm.Engine(
        model,
        world=world,
        stage=told["stage"],
        wire=told["wire"],
        optimizer=zm.AdamW(**ADAMW),
        weights=dict(weights(shape)),
        **told.get("options", {}),
    )


def train(told, world):
    """Train as told: `warmup` steps that are not timed, then `steps` that are."""
    shape = shape_of(told["size"], **told.get("shape", {}))
    tokens = Tokens(shape)
    start_rss = status_bytes("VmRSS")
    engine = build(told, shape, world)
    run = Run(engine, tokens, Gemm() if told.get("probe") else None)
    for step in range(told["warmup"]):
        run.step(step)
    forget_peak()
    for step in range(told["warmup"], told["warmup"] + told["steps"]):
        run.step(step, timed=True)
    peaks = world.agree([status_bytes("VmHWM"), start_rss])
    zero = engine.zero
    tiers = [zm.account.held_by_tier(zero.case, zero.stage), _activations(engine)]
    predicted = {f"{t} {k}": n for part in tiers for t in part for k, n in part[t].items() if n}
    record = {
        **run.report(shape),
        "peak_rss_bytes": [int(row[0]) for row in peaks],
        "start_rss_bytes": int(peaks[:, 1].max()),
        "formula_bytes": sum(predicted.values()),
        "formula_parts": predicted,
        "versions": {"mpi": world.transport.name, "numpy": np.__version__},
        "reduce": world.reduce,
    }
    if told.get("profile"):
        record["profile"] = profile(lambda: run.step(told["warmup"] + told["steps"]))
    return record


class Run:
    """Steps of an engine: when, how long, which part, and how fast NumPy multiplied meanwhile."""

    def __init__(self, engine, tokens, gemm):
        self.engine, self.tokens, self.gemm = engine, tokens, gemm
        self.losses, self.seconds, self.parts = [], [], []
        self.rates = [self._rate()]
        self.first_step_at = None
        self.cpu = 0.0

    def step(self, step, timed=False):
        """Make one step; all ranks start it together."""
        engine, world = self.engine, self.engine.world
        x, y = self.tokens.batch(step, world.rank, world.size)
        world.barrier()
        before, cpu, start = self._clocks(), time.process_time(), time.perf_counter()
        engine.backward(x, y)
        report = engine.step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.first_step_at = self.first_step_at or time.time()
        self.losses.append(report.loss)
        rate = self._rate()
        if timed:
            after = self._clocks()
            self.parts.append({key: after[key] - before.get(key, 0.0) for key in after})
            self.seconds.append(seconds)
            self.cpu += cpu
            self.rates.append(rate)
        else:
            self.rates = [rate]

    def _clocks(self):
        return {**self.engine.seconds, **self.engine.world.ledger.seconds}

    def _rate(self):
        return self.gemm.rate() if self.gemm else 0.0

    def report(self, shape):
        """What all ranks have measured: of each step, the time of the slowest."""
        world = self.engine.world
        slowest = world.agree(self.seconds).max(axis=0)
        rates = world.agree(self.rates).sum(axis=0)
        cpu = world.agree([self.cpu]).sum() / len(slowest)
        tokens = world.size * shape.batch * shape.context
        parts = {key: statistics.median(p[key] for p in self.parts) for key in self.parts[-1]}
        return measured(shape, tokens, slowest, rates) | {
            "cpu_s": float(cpu),
            "parts_s": parts,
            "losses": self.losses,
            "first_step_at": float(world.agree([self.first_step_at]).max()),
            "parameters": self.engine.model.num_parameters,
        }


def _activations(engine):
    """Predicted bytes kept between forward and backward, by tier and kind."""
    return {t: {"activations": n} for t, n in engine.predicted_activations.items()}


def profile(call):
    """Seconds that one call spends in each function itself, the largest first."""
    recorder = cProfile.Profile()
    recorder.runcall(call)
    rows = []
    for (path, _, name), (_, count, own, _, _) in pstats.Stats(recorder).stats.items():
        rows.append([f"{path.rpartition('/')[2]}:{name}", count, own])
    return sorted(rows, key=lambda row: -row[2])[:TOP]


def main():
    report = claim_stdout()
    told = settings()
    world = zm.world(**({"reduce": told["reduce"]} if "reduce" in told else {}))
    record = train(told, world)
    if world.rank == 0:
        report(record)


if __name__ == "__main__":
    main()
