"""How the cost of a step grows: with ranks, and with layers, width and context.

    python benchmarks/scaling.py

Strong: 1 to 8 ranks share a global batch of 16 rows, size XS. Weak: 4 rows per rank. With more
ranks than cores a step takes longer by as much, so the cost is given per token and core too:
processor seconds of all ranks together. Growth: one number of a small GPT grows at a time, on
2 ranks, and the exponent k of `seconds ~ number^k` is fitted (least squares of logarithms).
"""

import os

import cases
import numpy as np
import records

RANKS = (1, 2, 4, 8)
STAGES = (1, 3)
BASE = {"layers": 2, "width": 128, "heads": 4, "context": 128, "batch": 4}
GROWTH = {
    "layers": (2, 4, 8, 16),
    "width": (128, 256, 512),
    "context": (64, 128, 256, 512),
}


def all_cases(options):
    """Strong, weak, and each growth, at stages 1 and 3."""
    size, steps = ("XXS", 2) if options.quick else ("XS", 8)
    told = {"warmup": 2, "steps": steps}
    found = []
    for stage in STAGES:
        for kind, rows in (("strong", lambda n: 16 // n), ("weak", lambda n: 4)):
            for ranks in RANKS[:2] if options.quick else RANKS:
                name = f"{kind}/stage {stage}/{ranks}"
                shape = {"batch": rows(ranks)}
                found.append(
                    cases.zeromp(name, size, stage, "bfloat16", ranks, shape=shape, **told)
                )
        for number, values in {} if options.quick else GROWTH.items():
            for value in values:
                name = f"{number}/stage {stage}/{value}"
                shape = BASE | {number: value}
                found.append(cases.zeromp(name, size, stage, "bfloat16", shape=shape, **told))
    return found


def show(records_, options):
    """Print both tables, and save the results."""
    found = records.medians(records_, "step_s", "tokens_per_s", "cpu_s", "tokens")
    cores = len(os.sched_getaffinity(0))
    rows = []
    for name, item in found.items():
        kind, stage, ranks = name.split("/")
        if kind not in ("strong", "weak"):
            continue
        first = found.get(f"{kind}/{stage}/1")
        used = min(int(ranks), cores)
        if first:
            speed = item["tokens_per_s"]["median"] / first["tokens_per_s"]["median"]
            item["efficiency"] = speed / used
        rows.append(
            (
                kind,
                stage,
                ranks,
                f"{item['step_s']['median'] * 1e3:.0f}",
                f"{item['tokens_per_s']['median']:.0f}",
                f"{item['cpu_s']['median'] / item['tokens']['median'] * 1e6:.0f}",
                f"{item['efficiency']:.2f}" if first else "-",
                item["step_s"]["n"],
            )
        )
    header = ("scaling", "stage", "ranks", "step ms", "tokens/s", "core µs/token", f"tokens/s to 1 rank, per core in use (of {cores})", "runs")  # fmt: skip # noqa: E501
    records.show("Ranks", header, rows)
    fitted = exponents(found)
    header = ("number", "stage", "from", "to", "exponent of a step's time", "step ms")
    records.show("Growth of a step's time on 2 ranks", header, [row for row, _ in fitted])
    results = {**found, "exponents": dict(value for _, value in fitted)}
    records.save("scaling", records_, results, options)


def exponents(found):
    """A row, and a name with its exponent, for each number that grew."""
    fitted = []
    for number, values in GROWTH.items():
        for stage in STAGES:
            names = [f"{number}/stage {stage}/{value}" for value in values]
            seconds = [found[n]["step_s"]["median"] for n in names if n in found]
            if len(seconds) < len(values):
                continue
            slope = float(np.polyfit(np.log(values), np.log(seconds), 1)[0])
            told = ", ".join(f"{s * 1e3:.0f}" for s in seconds)
            row = (number, stage, values[0], values[-1], f"{slope:.2f}", told)
            fitted.append((row, (f"{number}/stage {stage}", slope)))
    return fitted


def main():
    options = records.arguments(__doc__, runs=3)
    show(records.collect("scaling", all_cases(options), options), options)


if __name__ == "__main__":
    main()
