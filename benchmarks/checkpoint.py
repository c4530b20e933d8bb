"""Measure checkpoints: saving against a plain sequential write of the same bytes, loading, memory.

    python benchmarks/checkpoint.py --quick

Prints a table and, with --json, writes the numbers. Both ways of writing end with fsync, and are
measured in turn in one run, since a disk's speed changes from minute to minute. One rank, because
ranks on one machine share its disk.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from tabulate import tabulate

import zeromp as zm
from zeromp.checkpoint import find
from zeromp.checkpoint.files import TILE_BYTES


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=40.0, help="million parameters (default 40)")
    parser.add_argument("--repeat", type=int, default=7, help="of each measurement (default 7)")
    parser.add_argument("--quick", action="store_true", help="20 million parameters, 3 repetitions")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    return parser.parse_args()


def build(size):
    """A model of 12 units of a matrix and a bias, in bfloat16, trained for one step."""
    width = int((size / 12) ** 0.5)
    rng = np.random.default_rng(0)
    arrays = {}
    for i in range(12):
        arrays[f"blocks.{i}.w"] = rng.standard_normal((width, width), np.float32)
        arrays[f"blocks.{i}.b"] = rng.standard_normal(width, np.float32)
    zero = zm.Zero(arrays, stage=1, wire="bfloat16", bucket=width * width)
    zero.backward(arrays)
    zero.step()
    return zero


def step(zero):
    """A step of given gradients: half of it is their intake, half the update."""
    zero.backward({a.name: np.zeros(a.shape, np.float32) for a in zero.layout.arrays})
    zero.step()


def plain_write(path, num_bytes, buffer):
    """Write that many bytes in order, in pieces of a buffer, and flush them."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for at in range(0, num_bytes, len(buffer)):
        os.pwrite(descriptor, buffer[: min(len(buffer), num_bytes - at)], at)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - start


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def extra_memory(function):
    """Bytes by which the resident set rises at most during a call."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) * 1024


def main():
    args = arguments()
    size, repeat = (20.0, 3) if args.quick else (args.size, args.repeat)
    zero = build(size * 1e6)
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        numbers = measure(zero, folder, repeat)
    finally:
        shutil.rmtree(folder)
    rows = [(name.replace("_", " "), f"{value:,.4g}") for name, value in numbers.items()]
    print(tabulate(rows, headers=("", "median"), disable_numparse=True, colalign=("left", "right")))
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")


def measure(zero, folder, repeat):
    zero.save(folder, keep=1)  # compiled and warm
    zero.load(folder)
    num_bytes = sum(f.stat().st_size for f in find(folder).iterdir())
    buffer = np.random.default_rng(0).bytes(TILE_BYTES)
    names = ("plain", "save", "keep", "call", "step", "stalled", "background", "load", "trusting")
    times = {name: [] for name in names}
    for _ in range(repeat):
        times["plain"].append(plain_write(folder / "plain", num_bytes, buffer))
        times["save"].append(timed(lambda: zero.save(folder)))
        times["keep"].append(timed(lambda: zero.save(folder, keep=2)))
        times["load"].append(timed(lambda: zero.load(folder)))
        times["trusting"].append(timed(lambda: zero.load(folder, verify=False)))
        times["step"].append(timed(lambda: step(zero)))
        start = time.perf_counter()
        times["call"].append(timed(lambda: zero.save(folder, keep=1, wait=False)))
        times["stalled"].append(timed(lambda: step(zero)))
        zero.finish_save()
        times["background"].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["plain"], times["save"], strict=True)]
    return {
        "MB": num_bytes / 1e6,
        "plain_write_s": median["plain"],
        "save_s": median["save"],
        "save_and_remove_an_older_one_s": median["keep"],
        "save_speed_over_plain_write": statistics.median(ratios),
        "load_and_verify_s": median["load"],
        "load_s": median["trusting"],
        "save_in_background_call_s": median["call"],
        "step_s": median["step"],
        "step_right_after_that_call_s": median["stalled"],
        "save_in_background_total_s": median["background"],
        "save_extra_memory_MB": extra_memory(lambda: zero.save(folder, keep=1)) / 1e6,
        "load_extra_memory_MB": extra_memory(lambda: zero.load(folder)) / 1e6,
        "tile_MB": TILE_BYTES / 1e6,
    }


if __name__ == "__main__":
    main()
