"""The streaming update against the disk that it streams from.

    python benchmarks/offload.py --dir DIR            the figures of docs/offload.md: about a minute
    python benchmarks/offload.py --dir DIR --variants tiles, slots, workers, cached and direct
    python benchmarks/offload.py --dir DIR --quick    a small one, to see that it runs

One rank holds float32 masters and moments in a file, 12 bytes per parameter, and bfloat16 weights
and gradients in memory. In turn, in one process and on the same bytes of the same file, are timed

- *plain*: a loop that reads the states front to back and one that writes them, in blocks of 4 MiB,
  with nothing computed: what the disk gives to a program without tricks;
- *update*: the optimizer's step, which reads, computes and writes them;
- *kernel*: the step's arithmetic alone, with the states in memory.

*warm*: the file is in the page cache and clean; what is written stays there. *cold*: the cache is
dropped before, and all is on the disk (fdatasync) at the end. *direct*: past the cache (O_DIRECT),
which is always cold. Medians; ranges beside them. `of plain` is plain / update: above 1 the update
is faster, since it reads and writes at a time. `hidden` is the part of the kernel's time that the
update does not add to plain. `returned` is the time after which the update's call came back, before
fdatasync, of which DeepSpeed does none: its figures are compared with that.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from tabulate import tabulate

import zeromp as zm
from zeromp.store import disk, files, placement

BLOCK = 2**22  # bytes of a plain read or write
STATE_BYTES = 12  # per parameter: master, m and v in float32
RATES = np.array([[1e-3, 0.01]], np.float32)  # learning rate and weight decay of the only group
PEERS_NS = {"plain": 24.2, "pipelined": 13.8}  # DeepSpeed 0.19.8, ZeRO-3 on NVMe: docs/offload.md


def resident(peak=False):
    """Bytes of this process's resident set, now or at most since `reset_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(name)).split()[1])


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


class Bench:
    """A model of `n` parameters whose optimizer states lie on a tier."""

    def __init__(self, n, tier, folder, way="cached", tile=placement.TILE):
        arrays = {f"a{i}": np.broadcast_to(np.float32(0.5), s) for i, s in enumerate(pieces(n))}
        self.zero = zm.Zero(
            arrays,
            stage=3,
            wire="bfloat16",
            bucket=2**20,
            offload={"optimizer": tier},
            offload_dir=folder,
            offload_io=way,
            offload_tile=tile,
        )
        for gradient in self.zero.gradients.arrays:
            gradient[:] = 0x3C23  # 0.01 in bfloat16
        self.steps, self.n = 0, n
        self.file = self.zero.store.disk.states if tier == "disk" else None
        self.before = resident()

    def update(self):
        self.steps += 1
        start = time.perf_counter()
        self.zero.optimizer.step(self.steps, 1.0, RATES)
        return time.perf_counter() - start

    def ranges(self):
        """Offset and bytes of each array in the file."""
        states = self.zero.optimizer.states[0]
        arrays = [states.master, *states.moments.values()]
        return [(self.zero.store.file_range(a)[1], a.nbytes) for a in arrays]

    def plain(self):
        """Seconds to read, and to write, all states, in blocks."""
        block = files.aligned(BLOCK)
        start = time.perf_counter()
        self._blocks(self.file.read, block)
        middle = time.perf_counter()
        block.view(np.float32)[:] = 0.01
        self._blocks(self.file.write, block)
        return middle - start, time.perf_counter() - middle

    def _blocks(self, move, block):
        for offset, num_bytes in self.ranges():
            for at in range(0, num_bytes, BLOCK):
                move(offset + at, block[: min(BLOCK, num_bytes - at)])

    def sync(self):
        os.fdatasync(self.file.descriptor)

    def prepare(self, temperature):
        """Make the file clean, and warm or cold."""
        self.sync()
        if temperature == "cold":
            os.posix_fadvise(self.file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        elif not self.file.direct:
            self._blocks(self.file.read, files.aligned(BLOCK))

    def timed(self, what, temperature):
        """Seconds of a call from a clean file, until it returns and, cold, all is on the disk."""
        self.prepare(temperature)
        start = time.perf_counter()
        what()
        returned = time.perf_counter() - start
        if temperature == "cold":
            self.sync()
        return returned, time.perf_counter() - start


def pieces(n):
    """Arrays of at most 2^20 elements."""
    return [min(2**20, n - at) for at in range(0, n, 2**20)]


def compare(bench, temperature, repeats):
    """Times of plain and of the update, one after the other, `repeats` times."""
    found = {"plain": [], "update": [], "returned": []}
    for _ in range(repeats):
        found["plain"].append(bench.timed(bench.plain, temperature)[1])
        returned, done = bench.timed(bench.update, temperature)
        found["update"].append(done)
        found["returned"].append(returned)
    return found


def row(name, found, kernel, n):
    plain, update, returned = (statistics.median(v) for v in found.values())
    ns = [f"{min(v) / n * 1e9:.1f} to {max(v) / n * 1e9:.1f}" for v in found.values()]
    hidden = min(1.0, 1 - (update - plain) / kernel)
    return {
        "case": name,
        "plain ns/param": f"{plain / n * 1e9:.1f} ({ns[0]})",
        "update ns/param": f"{update / n * 1e9:.1f} ({ns[1]})",
        "GB/s": f"{2 * STATE_BYTES * n / update / 1e9:.2f}",
        "of plain": f"{plain / update:.2f}",
        "hidden": f"{max(0.0, hidden):.0%}",
        "returned": f"{returned / n * 1e9:.1f}",
        "of DeepSpeed's pipelined": f"{returned / n * 1e9 / PEERS_NS['pipelined']:.2f}",
    }


def main_figures(args, folder):
    """The table of docs/offload.md."""
    host = Bench(args.parameters, "host", folder)
    host.update()
    kernel = statistics.median(host.update() for _ in range(args.repeats))
    del host
    rows, memory = [], {}
    for way in ("cached", "direct"):
        bench = Bench(args.parameters, "disk", folder, way)
        reset_peak()
        bench.update()
        memory[way] = resident(peak=True) - bench.before
        for temperature in ("warm", "cold") if way == "cached" else ("cold",):
            name = f"{way}, {temperature}"
            found = compare(bench, temperature, args.repeats)
            rows.append(row(name, found, kernel, args.parameters))
        bench.zero.close()
        del bench
    print(f"{args.parameters:,} parameters, {STATE_BYTES * args.parameters:,} bytes of states")
    print(tabulate(rows, "keys", disable_numparse=True))
    print(f"load of the machine, this process included: {os.getloadavg()[0]:.1f}")
    print(f"kernel alone, states in memory: {kernel / args.parameters * 1e9:.1f} ns/param")
    for way, num_bytes in memory.items():
        print(f"resident set that the update adds, {way}: {num_bytes / 1e6:,.0f} MB")
    print(f"DeepSpeed, on such a machine: {PEERS_NS} ns/param; its pipeline takes 1500 MB more")
    return {"rows": rows, "kernel_ns": kernel / args.parameters * 1e9, "memory_bytes": memory}


def variants(args, folder):
    """Updates with other tiles, slots, workers; the constants of the package are set for each."""
    rows = []
    for way in args.ways:
        for tile, slots, workers in args.settings:
            placement.TILE_SLOTS, disk.WORKERS = slots, workers
            bench = Bench(args.parameters, "disk", folder, way, tile)
            reset_peak()
            bench.update()
            memory = resident(peak=True) - bench.before
            times = {}
            for temperature in ("warm", "cold") if way == "cached" else ("cold",):
                times[temperature] = statistics.median(
                    bench.timed(bench.update, temperature)[1] for _ in range(args.repeats)
                )
            bench.zero.close()
            del bench
            rows.append(
                {"way": way, "tile": tile, "slots": slots, "workers": workers}
                | {f"{k} ns/param": f"{v / args.parameters * 1e9:.1f}" for k, v in times.items()}
                | {"MB": f"{memory / 1e6:.0f}"}
            )
    print(tabulate(rows, "keys"))
    return {"rows": rows}


def setting(text):
    tile, slots, workers = (int(word) for word in text.split(","))
    return tile, slots, workers


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dir", help="folder on the disk to be measured (default: the one for temporary files)")
    add("--parameters", type=int, default=91_400_000, help="(default 91.4 million)")
    add("--repeats", type=int, default=3)
    add("--quick", action="store_true", help="2 million parameters, once")
    add("--variants", action="store_true", help="tiles, slots and workers instead")
    add("--ways", nargs="+", default=["cached", "direct"], choices=disk.WAYS)
    add("--settings", nargs="+", type=setting, metavar="TILE,SLOTS,WORKERS",
        default=[(2**20, 4, 2), (2**19, 4, 2), (2**18, 4, 2), (2**20, 6, 3), (2**20, 3, 2)],
        help="of the variants")  # fmt: skip
    add("--json", help="file for the figures")
    args = parser.parse_args()
    if args.quick:
        args.parameters, args.repeats = 2_000_000, 1
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        result = (variants if args.variants else main_figures)(args, folder)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
