"""One model, one budget of memory, five rungs: which of them can train it?

    mpirun -n 4 python examples/ladder.py

Weights, gradients and Adam's states take 16 bytes per parameter. Here the device of each rank has a
fifth of that. Stage 0 keeps all on every rank; stages 1, 2 and 3 share more and more among the
ranks; the fifth rung moves what is left to the host and the disk, and brings it when it is needed.
What does not fit is refused before anything is computed. In the end the budget is lifted, to show
that the weights are the same: where a number lies does not change it.
"""

import argparse
import tempfile
import time

from tabulate import tabulate

import zeromp as zm
from zeromp.runlog import hashes

ALL = "optimizer=disk,gradients=host,parameters=host"
RUNGS = {
    "stage 0: nothing is shared": {"stage": 0},
    "stage 1: optimizer states": {"stage": 1},
    "stage 2: + gradients": {"stage": 2},
    "stage 3: + parameters": {"stage": 3},
    f"stage 3, {ALL}": {"stage": 3, "offload": ALL},
}
COLUMNS = dict.fromkeys(("rung", "device", "host", "disk", "outcome"), "")
CONTEXT = 32


def climb(world, model, tokens, steps, budget, **rung):
    """Train on a rung; returns a row of the table."""
    start = time.perf_counter()
    try:
        engine = zm.Engine(
            model, world=world.reducing("ordered"), recompute=True, device_memory=budget, **rung
        )
    except zm.OverBudget as error:
        need = str(error).split(" needs ")[1].split(" bytes")[0]
        return {"device": f"needs {need}", "outcome": "refused"}, str(error)
    for step in range(steps):
        for x, y in tokens.batches(step, 2 * world.size, 2, engine.world):
            engine.backward(x, y)
        report = engine.step(lr=3e-3, clip=1.0)
    weights, _ = hashes(engine)
    tiers = engine.zero.store.tiers
    row = {name: f"{sum(held.peak.values()):,}" for name, held in tiers.items()}
    engine.close()
    seconds = time.perf_counter() - start
    outcome = f"loss {report.loss:.4f}, weights {weights[:12]}, {seconds:.1f} s"
    return row | {"outcome": outcome}, ""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="blocks (default 12)")
    parser.add_argument("--width", type=int, default=64, help="channels (default 64)")
    parser.add_argument("--steps", type=int, default=10, help="(default 10)")
    parser.add_argument("--offload-dir", help="folder on a disk (default: one for temporary files)")
    world = zm.world()
    args = zm.parse(parser, world)
    model = zm.models.gpt(zm.data.BYTES, args.layers, args.width, 4, CONTEXT)
    tokens = zm.data.Tokens(None, context=CONTEXT, seed=0)
    states = 16 * model.num_parameters
    budget = states // 5
    world.print(
        f"{model.num_parameters:,} parameters with {states:,} bytes of states; {world.size} ranks, "
        f"each with a device of {budget:,} bytes\n"
    )
    rows, refusal = [], ""
    with tempfile.TemporaryDirectory(dir=args.offload_dir) as folder:
        for name, rung in RUNGS.items():
            row, error = climb(world, model, tokens, args.steps, budget, offload_dir=folder, **rung)
            refusal = refusal or error
            rows.append(COLUMNS | {"rung": name} | row)
        row, _ = climb(world, model, tokens, args.steps, None, stage=3)
        rows.append(COLUMNS | {"rung": "stage 3, without a budget"} | row)
    world.print(tabulate(rows, "keys", disable_numparse=True))
    if refusal:
        world.print(f"\nThe first refusal in full: {refusal}.")


if __name__ == "__main__":
    main()
