"""Tokens per second of a training step, and where its time goes.

    python benchmarks/step.py                        # sizes XS and S, then M
    python benchmarks/step.py --only XS/ --seconds 300
    python benchmarks/step.py --profile --only "S/stage 1"

The same GPT, weights and tokens in zeromp, at stages 1 to 3 and with two wire formats, and in each
peer that is installed; 2 ranks of 1 thread. Before and after each step all ranks multiply
matrices with NumPy at once: the share of that rate which a step reaches leaves out how fast the
machine happens to be.
"""

from dataclasses import replace

import cases
import records

SIZES = {"XS": (3, 12), "S": (2, 5), "M": (1, 3)}  # warm-up steps, timed steps
WIRES = ("float32", "bfloat16")
PEERS = ("ddp", "zero1", "fsdp2", "deepspeed1", "deepspeed3")
PEERS_BF16 = ("fsdp2-bf16", "deepspeed3-bf16")
TOLERANCE = 1e-4
TORCH = ("ddp", "zero1")


def all_cases(options):
    """Every size, each with all stages and wires, and all peers; those with bfloat16 at XS."""
    found = []
    for size, (warmup, steps) in {"XXS": (1, 2)}.items() if options.quick else SIZES.items():
        told = {"warmup": warmup, "steps": steps, "probe": True}
        for wire in WIRES:
            for stage in (1, 2, 3):
                found.append(
                    cases.zeromp(f"{size}/stage {stage}/{wire}", size, stage, wire, **told)
                )
        modes = PEERS + (PEERS_BF16 if size == "XS" else ())
        found += cases.peers(modes, options.peers, size, size + "/{}", **told)
    return found


def profiles(options):
    """One step of each case in each function."""
    for case in all_cases(options):
        if case.mpi:
            yield replace(case, settings=case.settings | {"profile": True, "steps": 1})


def ratios(found):
    """Each case's tokens per second and share of the GEMM rate over those of its yardsticks."""
    rows = {}
    for name in found:
        size = name.split("/")[0]
        others = [f"{size}/{mode}" for mode in TORCH if f"{size}/{mode}" in found]
        yardsticks = {}
        if others:
            fastest = max(others, key=lambda o: found[o]["tokens_per_s"]["median"])
            yardsticks["fastest of DDP and ZeRO-1"] = fastest
        yardsticks |= {mode: f"{size}/{mode}" for mode in ("fsdp2", *PEERS_BF16)}
        rows[name] = {
            label: {
                key: found[name][key]["median"] / found[other][key]["median"]
                for key in ("tokens_per_s", "share_of_gemm")
            }
            for label, other in yardsticks.items()
            if other in found and other != name
        }
    return rows


def largest_difference(runs, others):
    """Largest difference of two loss curves, over the steps that both have made."""
    return max(abs(a - b) for a, b in zip(runs[0]["losses"], others[0]["losses"], strict=False))


def show(records_, options):
    """Print tables by size, and save the results."""
    found = records.medians(records_, "tokens_per_s", "step_s", "share_of_gemm", "cpu_s")
    runs = records.by_case(records_)
    compared = ratios(found)
    rows, phases = [], []
    sizes = ["XXS", *SIZES]
    for name in sorted(found, key=lambda n: (sizes.index(n.split("/")[0]), n)):
        size, item = name.split("/")[0], found[name]
        reference = f"{size}/ddp" if f"{size}/ddp" in runs else f"{size}/stage 1/float32"
        off = largest_difference(runs[name], runs[reference]) if reference in runs else None
        item["ratios"], item["loss_difference"] = compared[name], off
        item["parts_s"] = {
            key: records.spread([r["parts_s"].get(key, 0.0) for r in runs[name]])
            for key in runs[name][0]["parts_s"]
        }
        rows.append(_row(name, item))
        phases.append(_phases(name, item))
    header = ("case", "tokens/s", "of 2 ranks: step s", "least to most", "share of GEMM", "to DDP/ZeRO-1", "to FSDP2", "loss off by", "runs")  # fmt: skip # noqa: E501
    records.show("Tokens per second; ratios of medians (of shares of the GEMM rate)", header, rows)
    header = ("case", "forward", "backward", "optimizer", "of which communication", "by call")
    records.show("Share of a step's time, rank 0", header, phases)
    records.save("step", records_, found, options)


def _row(name, item):
    step, tokens = item["step_s"], item["tokens_per_s"]
    off = item["loss_difference"]
    told = "-" if off is None else f"{off:.0e}" + ("" if off < TOLERANCE else " (!)")
    return (
        name,
        f"{tokens['median']:.0f}",
        f"{step['median']:.3f}",
        f"{step['min']:.3f} to {step['max']:.3f}",
        f"{item['share_of_gemm']['median']:.1%}",
        *(_ratio(item["ratios"].get(k)) for k in ("fastest of DDP and ZeRO-1", "fsdp2")),
        told,
        step["n"],
    )


def _ratio(found):
    return f"{found['tokens_per_s']:.2f} ({found['share_of_gemm']:.2f})" if found else "-"


def _phases(name, item):
    parts = {key: value["median"] for key, value in item["parts_s"].items()}
    total = item["step_s"]["median"]
    sent = {k: v for k, v in parts.items() if k not in ("forward", "backward", "optimizer")}
    sent.pop("barrier", None)
    calls = ", ".join(f"{k} {v / total:.1%}" for k, v in sent.items() if v / total > 0.0005)
    shares = [f"{parts[k] / total:.1%}" for k in ("forward", "backward", "optimizer")]
    return (name, *shares, f"{sum(sent.values()) / total:.1%}" if sent else "-", calls)


def show_profiles(records_):
    """Print, per case, the functions in which the time of a step goes."""
    for name, runs in records.by_case(records_).items():
        total = sum(own for _, _, own in runs[-1]["profile"])
        rows = [
            (function, count, f"{own * 1e3:.1f}", f"{own / total:.1%}")
            for function, count, own in runs[-1]["profile"][:16]
        ]
        records.show(name, ("function", "calls", "own ms", "share"), rows)


def main():
    options = records.arguments(__doc__, profile="time in each function instead, one step a case")
    if options.profile:
        options.runs = 1
        show_profiles(records.collect("step-profile", list(profiles(options)), options))
    else:
        show(records.collect("step", all_cases(options), options), options)


if __name__ == "__main__":
    main()
