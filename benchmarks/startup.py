"""Seconds from `python` (or `mpiexec`) to the end of the first step, size XS, everything cached.

    python benchmarks/startup.py

From the start of the launcher to the moment when the last rank has finished its first step.
torch's ranks are started directly, without torchrun, which would cost them a few seconds more.
"""

import cases
import records

MODES = ("ddp", "zero1", "fsdp2", "deepspeed3")


def all_cases(options):
    """Zeromp at stages 1 and 3 on 2 ranks and on 1, and the peers."""
    size = "XXS" if options.quick else "XS"
    told = {"warmup": 0, "steps": 1}
    found = [
        cases.zeromp(f"stage {stage}/{ranks} ranks", size, stage, "bfloat16", ranks, **told)
        for stage, ranks in ((1, 2), (3, 2), (1, 1))
    ]
    return found + cases.peers(MODES, options.peers, size, "{}/2 ranks", **told)


def show(records_, options):
    """Print a table, and save the results."""
    found = records.medians(records_, "first_step_s", "step_s")
    ddp = found.get("ddp/2 ranks")
    rows = []
    for name, item in found.items():
        seconds = item["first_step_s"]
        ratio = seconds["median"] / ddp["first_step_s"]["median"] if ddp else None
        item["to_ddp"] = ratio
        rows.append(
            (
                name,
                f"{seconds['median']:.2f}",
                f"{seconds['min']:.2f} to {seconds['max']:.2f}",
                f"{item['step_s']['median']:.2f}",
                f"{ratio:.2f}" if ratio else "-",
                seconds["n"],
            )
        )
    header = ("case", "s to the first step's end", "least to most", "that step s", "to DDP", "runs")
    records.show("Start-up", header, rows)
    records.save("startup", records_, found, options)


def main():
    options = records.arguments(__doc__)
    show(records.collect("startup", all_cases(options), options), options)


if __name__ == "__main__":
    main()
