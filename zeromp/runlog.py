"""What a run prints and writes: progress, one JSON object per step, and the table at the end."""

import argparse
import contextlib
import hashlib
import io
import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from zeromp import account
from zeromp.engine import Engine
from zeromp.store import KINDS, TIERS
from zeromp.world import World
from zeromp.world.ledger import VERBS
from zeromp.zero import Report

PER = "per parameter (sent, moved: and step)"
EDGES = [edge for pair in pairwise(TIERS) for edge in (pair, pair[::-1])]
LINE_SECONDS = 5.0  # between two progress lines where there is no terminal


def parse(parser: argparse.ArgumentParser, world: World) -> argparse.Namespace:
    """Parse the command line, with help and complaints printed by rank 0 alone."""
    silence = io.StringIO()
    with contextlib.ExitStack() as stack:
        if world.rank > 0:
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        return parser.parse_args()


def num_bytes(text: str) -> int:
    """Read a number of bytes as people write it: "600000", "64k", "1.5G" (powers of 1000)."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:], 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


class RunLog:
    """Follows a training run on all ranks; rank 0 prints and writes.

    What it counts and predicts is of the steps that it is told of, by this process.

    Parameters
    ----------
    engine : Engine
    steps : int
        Steps that the run is going to make, those before `first` included.
    metrics : path or None
        File that receives one JSON object per step, and a last one with ``"summary": true``.
    first : int
        Number of the first step: where a run goes on, those that it has made before. The metrics of
        these are kept then, and what a lost part of that run wrote after them is not.
    """

    def __init__(
        self, engine: Engine, steps: int, metrics: str | Path | None = None, first: int = 0
    ) -> None:
        self.engine, self.steps, self.first = engine, steps, first
        self.world = engine.world
        self.losses: list[float] = []
        self.micro_batches = self.applied = 0
        self.sent_before = {verb: self.world.ledger.sent(verb) for verb in VERBS}
        self.moved_before = engine.zero.store.moved.copy()
        self.moves_before = engine.predicted_moves
        self.file: TextIO | None = None
        with self.world.ledger.within("setup"), self.world.together():
            if metrics is not None and self.world.rank == 0:
                self.file = _open_metrics(Path(metrics), first)
        self.bar: tqdm[Any] | None = None
        if self.world.rank == 0 and sys.stderr.isatty():
            self.bar = tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True)
        self.begun = self.since = self.last_line = time.perf_counter()
        self.seconds = dict(engine.seconds)

    def step(self, report: Report) -> None:
        """Note a step. The first call of all ranks after `Engine.step`."""
        now = time.perf_counter()
        elapsed, self.since = now - self.since, now
        self.losses.append(report.loss)
        self.applied += report.applied
        self.micro_batches += self.engine.zero.options.micro_batches
        phases = {k: v - self.seconds.get(k, 0.0) for k, v in self.engine.seconds.items()}
        self.seconds = dict(self.engine.seconds)
        rate = report.weight / elapsed
        self._write(
            {
                "step": self.first + len(self.losses) - 1,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "loss_scale": report.loss_scale,
                "skipped": not report.applied,
                "tokens_per_s": rate,
                "seconds": {**phases, "step": elapsed},
            }
        )
        self._show(report, rate, now)

    def _show(self, report: Report, rate: float, now: float) -> None:
        text = f"loss {report.loss:.4f}  |g| {report.grad_norm:.3f}  {rate:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
            return
        made = len(self.losses)
        done = self.first + made
        if self.world.rank == 0 and (
            now - self.last_line >= LINE_SECONDS or made == 1 or done == self.steps
        ):
            self.last_line = now
            left = (now - self.begun) / made * (self.steps - done)
            print(f"step {done:>5}/{self.steps}  {text}  {_clock(left)} left", flush=True)

    def finish(self, **extra: Any) -> dict[str, Any]:
        """End the run: print the table, write the summary, and return it. Call on all ranks.

        Parameters
        ----------
        **extra
            Entered in the summary as given.

        Returns
        -------
        dict
            The summary: see the fields in `summary`; equal on all ranks.
        """
        if self.bar is not None:
            self.bar.close()
        result = summary(self) | extra
        self._write({"summary": True, **result})
        self.close()
        self.world.print(table(result))
        return result

    def close(self) -> None:
        """Leave the run before its end, without a summary: to be gone on with."""
        if self.bar is not None:
            self.bar.close()
        if self.file is not None:
            self.file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        if self.file is not None:
            print(json.dumps(_plain(entry)), file=self.file, flush=True)


def _open_metrics(path: Path, first: int) -> TextIO:
    """Open a file for metrics; those of steps before `first` stay in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+" if first else "w")
    if first:
        file.seek(at := 0)
        while (line := file.readline()) and _step_of(line) < first:
            at = file.tell()
        file.truncate(at)
    return file


def _step_of(line: str) -> float:
    """Step of a line of metrics; infinity for a summary, and for what a kill has cut off."""
    try:
        return float(json.loads(line).get("step", math.inf))
    except ValueError:
        return math.inf


def summary(log: RunLog) -> dict[str, Any]:
    """Collect what a run held and sent on every rank, measured and predicted, and its hashes.

    Returns
    -------
    dict
        ``ranks``, ``stage``, ``wire``, ``mpi``, ``offload``; ``first_step``, ``steps``,
        ``first_loss`` and ``last_loss`` of the steps in the log; ``applied``, of all steps ever;
        ``held_bytes``, ``sent_bytes`` and ``moved_bytes``: by rank, then by kind (and tier, if not
        the device), verb, or kind and tiers that it crosses,
        ``{"measured": ..., "predicted": ...}``; ``peak_rss_bytes`` by rank; ``weights_sha256``,
        of the float32 masters as whole arrays in the order of their names, and ``state_sha256``,
        of masters and moments: they depend on neither the number of ranks, nor stage, nor tier.
    """
    engine, losses = log.engine, log.losses
    zero, world = engine.zero, engine.world
    held, predicted_held = _held(engine)
    verbs = [v for v in VERBS if v != "broadcast"]
    run: dict[str, Any] = {
        "applied": log.applied,
        "skipped": len(losses) - log.applied,
        "micro_batches": log.micro_batches,
        "path": [visit.unit for visit in engine.model.path],
    }
    activations = engine.predicted_moves - log.moves_before
    want_sent = account.sent(zero.case, zero.stage, **run)
    want_moved = account.moved(zero.case, zero.stage, **run, activations=activations)
    sent = [world.ledger.sent(v) - log.sent_before[v] for v in verbs]
    movements = [("train", kind, *edge) for kind in KINDS for edge in EDGES]
    moved = [zero.store.moved[key] - log.moved_before[key] for key in movements]
    predicted_moved = [want_moved.get(key[1:], 0) for key in movements]
    predicted_sent = [want_sent[v] for v in verbs]
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with world.ledger.within("inspect"):
        rows = [
            world.agree([*measured, *predicted])
            for measured, predicted in (
                (held, predicted_held),
                (sent, predicted_sent),
                (moved, predicted_moved),
                ([peak_rss], []),
            )
        ]
        weights, state = hashes(engine)
    names = [k if tier == "device" else f"{k} on {tier}" for tier in TIERS for k in KINDS]
    edges = [f"{kind} {source} to {target}" for kind in KINDS for source, target in EDGES]
    return {
        "ranks": world.size,
        "stage": zero.stage,
        "wire": zero.wire,
        "reduce": world.reduce,
        "mpi": world.transport.name,
        "num_parameters": engine.model.num_parameters,
        "first_step": log.first,
        "steps": len(losses),
        "applied": zero.applied,
        "first_loss": losses[0] if losses else math.nan,
        "last_loss": losses[-1] if losses else math.nan,
        "offload": str(zero.holders.placement),
        "held_bytes": [_pairs(names, *np.split(row, 2)) for row in rows[0]],
        "sent_bytes": [_pairs(verbs, *np.split(row, 2)) for row in rows[1]],
        "moved_bytes": [_pairs(edges, *np.split(row, 2)) for row in rows[2]],
        "peak_rss_bytes": [int(row[0]) for row in rows[3]],
        "weights_sha256": weights,
        "state_sha256": state,
    }


def _held(engine: Engine) -> tuple[list[int], list[int]]:
    """Bytes held and predicted, by tier and kind; of activations, the most at a time."""
    zero = engine.zero
    predicted = account.held_by_tier(zero.case, zero.stage)
    held, want = [], []
    for tier in TIERS:
        account_of = zero.store.tiers[tier]
        for kind in KINDS:
            passing = kind == "activations"
            held.append((account_of.peak if passing else account_of.held).get(kind, 0))
            want.append(
                engine.predicted_activations[tier] if passing else predicted[tier].get(kind, 0)
            )
    return held, want


def _pairs(names: Sequence[str], measured: Any, predicted: Any) -> dict[str, dict[str, int]]:
    return {
        name: {"measured": int(a), "predicted": int(b)}
        for name, a, b in zip(names, measured, predicted, strict=True)
    }


def hashes(engine: Engine) -> tuple[str, str]:
    """SHA-256 of all float32 masters, and of masters and moments, by name. Call on all ranks."""
    weights, state = hashlib.sha256(), hashlib.sha256()
    for name in sorted(engine.zero.names):
        master = engine.master(name)
        weights.update(name.encode() + master.tobytes())
        state.update(name.encode() + master.tobytes())
        for values in engine.moments(name).values():
            state.update(values.tobytes())
    return weights.hexdigest(), state.hexdigest()


def table(result: dict[str, Any]) -> str:
    """Lay out a summary: what each rank held and sent, beside what the paper predicts."""
    rows = []
    psi = result["num_parameters"]
    sections = (
        ("held", "held_bytes", psi),
        ("sent", "sent_bytes", psi * max(result["steps"], 1)),
        ("moved", "moved_bytes", psi * max(result["steps"], 1)),
    )
    for title, key, per in sections:
        for name in result[key][0]:
            pairs = [rank[name] for rank in result[key]]
            measured = [pair["measured"] for pair in pairs]
            predicted = [pair["predicted"] for pair in pairs]
            if not any(measured + predicted):
                continue
            rows.append(
                [
                    f"{title} {name}",
                    _span(measured),
                    _span(predicted),
                    f"{sum(measured) / len(measured) / per:.3f}",
                    "equal" if measured == predicted else "DIFFERS",
                ]
            )
    head = ["bytes per rank", "measured", "predicted", PER, "verdict"]
    rss = max(result["peak_rss_bytes"])
    kinds = ("parameters", "gradients", "master", "m", "v")
    states = [sum(rank[kind]["measured"] for kind in kinds) for rank in result["held_bytes"]]
    paper = account.model_state_bytes(1, result["ranks"], result["stage"])
    by_rank = sum(states) / len(states) / psi
    rows_as_text = tabulate(rows, head, stralign="right", disable_numparse=True)
    return (
        f"\n{result['ranks']} ranks, stage {result['stage']}, {result['wire']}, {result['mpi']}, "
        f"{psi:,} parameters, {result['steps']} steps\n"
        f"{rows_as_text}\n"
        f"model states{' on the device' if result['offload'] != 'none' else ''}: {by_rank:.4f} "
        "bytes per parameter and rank; the paper's formula, for Adam "
        f"on a 16-bit wire: {account.FORMULAS[result['stage']]} = {paper:.4f}\n"
        f"largest resident set of a rank {rss / 1e6:,.0f} MB; loss {result['first_loss']:.4f} "
        f"at the start, {result['last_loss']:.4f} at the end\n"
        f"weights {result['weights_sha256'][:16]}  state {result['state_sha256'][:16]} "
        "(SHA-256, the same at every stage)"
    )


def _span(values: Sequence[int]) -> str:
    """Bytes of all ranks: one number, or the least and the most."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _plain(value: Any) -> Any:
    """JSON has no inf and NaN: null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
