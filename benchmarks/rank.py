"""What ranks of any framework do alike: settings in, one JSON line out, memory, GEMM rate, times.

NumPy and the standard library only: it is imported in the peers' interpreter too.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

GEMM_N = 1024


def settings():
    """What this rank was told."""
    return json.loads(sys.argv[1])


def is_rank():
    """Whether this script was started as a rank, by `launcher.run`."""
    return len(sys.argv) > 1 and sys.argv[1].startswith("{")


def claim_stdout():
    """Keep standard output for the result: libraries that print there write to stderr instead."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda record: print(json.dumps(record), file=out, flush=True)


def status_bytes(field):
    """A memory field of this process (VmRSS, VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def forget_peak():
    """Start VmHWM anew, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class Gemm:
    """NumPy's float32 matrix product of 1024 x 1024, the yardstick of this machine's mood."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.a = rng.standard_normal((GEMM_N, GEMM_N), np.float32)
        self.out = np.empty_like(self.a)
        self.rate()

    def rate(self):
        """Operations per second, the better of two products."""
        return 2 * GEMM_N**3 / min(time_calls(self._multiply, 2, 0))

    def _multiply(self):
        np.matmul(self.a, self.a, out=self.out)


def time_calls(call, repeats, warmup=1):
    """Seconds of each call, after some that are not timed."""
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def time_together(call, barrier, repeats, warmup=2):
    """Seconds of each call, which all ranks start together."""
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeats):
        barrier()
        seconds += time_calls(call, 1, 0)
    return seconds


def alternate(calls, repeats, warmup=1):
    """Median seconds of several calls that take turns, so that all meet the same minutes."""
    for call in list(calls.values()) * warmup:
        call()
    seconds = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name] += time_calls(call, 1, 0)
    return {name: statistics.median(values) for name, values in seconds.items()}
