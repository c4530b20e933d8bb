"""A job for tests/launch/test_offload_jobs.py: more optimizer states than memory.

python limited.py FOLDER LIMIT PARAMETERS OFFLOAD

RLIMIT_DATA counts all private memory of the process, touched or not: NumPy's, Python's, threads'
stacks. It does not count the mapped file, which is why `ulimit -v`, which does, would be no honest
limit: mapped addresses are no memory. That the file does not come into the process's memory by the
back door is what the resident set shows, which is printed.
"""

import json
import resource
import sys
from pathlib import Path

folder, limit, size, offload = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

import numpy as np  # noqa: E402 - the limit holds for these, too

import zeromp as zm  # noqa: E402

UNIT = 2**19


def main():
    names = [f"a{i}" for i in range(-(-size // UNIT))]
    start = np.ones(UNIT, np.float32)
    zero = zm.Zero(
        {name: start[:] for name in names},
        stage=3, wire="bfloat16", bucket=1, optimizer=zm.AdamW(lr=0.1, weight_decay=0.0),
        offload=offload, offload_dir=folder, offload_tile=UNIT,
    )  # fmt: skip
    for _ in range(2):
        zero.backward(dict.fromkeys(names, start))
        assert zero.step().applied
    values = zero.master(names[-1])
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    held = {tier: sum(h.held.values()) for tier, h in zero.store.tiers.items()}
    states = 12 * UNIT * len(names)
    print(json.dumps({
        "states": states, "limit": limit, "peak_rss": peak, "held": held,
        "low": float(values.min()), "high": float(values.max()),
    }))  # fmt: skip
    zero.close()


main()
