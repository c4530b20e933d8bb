"""Nanoseconds per parameter of one AdamW update, against what memory allows.

    python benchmarks/adam.py

Two updates, on one thread: float32 (gradient 4 bytes read, parameter and two moments read and
written: 28 bytes), and a bfloat16 gradient in with a bfloat16 copy of the parameter out (2 + 24 +
2 = 28 bytes; 30 with the lines of the copy that a processor reads before it writes them). `bound`
is a kernel with the same reads and writes and next to no arithmetic, run in turns with the update;
copy and triad are STREAM's. PyTorch's fused AdamW and DeepSpeed's CPU Adam do the same where they
are installed: the gradient is cast to float32 in a pass before, the copy made in a pass after.
"""

import launcher
import numpy as np
import records
from gpt import ADAMW
from rank import alternate, claim_stdout, is_rank, settings

DTYPES = ("float32", "bfloat16")
LEAST_BYTES = 28


def work():
    """Time update, bound, copy and triad in turns."""
    report, told = claim_stdout(), settings()
    n = told["parameters"]
    calls = {**updates(n), **bounds(n)}
    seconds = alternate(calls, told["repeats"])
    report(
        {
            "ns": {name: s / n * 1e9 for name, s in seconds.items()},
            "parameters": n,
            "versions": {"numpy": np.__version__},
        }
    )


def updates(n):
    """Zeromp's two updates of n parameters, as calls."""
    from zeromp.adamw import AdamW, Arrays

    rule = AdamW(**ADAMW)
    segments = np.array([[n, 0, 0, 0]], np.int64)
    rates = np.array([[rule.lr, rule.weight_decay]], np.float32)

    def update(arrays):
        return lambda: rule.update(10, 1.0, arrays, segments, rates)

    rng = np.random.default_rng(0)
    noise = rng.standard_normal(n, np.float32)
    gradient16 = ((noise * np.float32(1e-3)).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    states = [np.zeros(n, np.float32) for _ in range(2)]
    copy = np.zeros(n, np.uint16)
    return {
        "float32": update(Arrays(noise * np.float32(1e-3), noise * np.float32(0.02), states, None)),
        "bfloat16": update(Arrays(gradient16, noise * np.float32(0.02), states, copy)),
    }


def bounds(n):
    """Kernels with the updates' reads and writes, and STREAM's copy and triad, as calls."""
    import numba

    half, one = np.float32(0.5), np.float32(1.0)

    @numba.njit
    def in_place(g, p, m, v):
        for i in range(p.size):
            m[i] = m[i] * half + g[i]
            v[i] = v[i] * half + g[i]
            p[i] = p[i] * half + m[i]

    @numba.njit
    def in_place_copy(g, p, m, v, copy):
        for i in range(p.size):
            x = np.float32(g[i])
            m[i] = m[i] * half + x
            v[i] = v[i] * half + x
            p[i] = p[i] * half + one
            copy[i] = g[i] + np.uint16(1)

    @numba.njit
    def triad(a, b, c):
        for i in range(a.size):
            a[i] = b[i] + half * c[i]

    p, m, v, g = (np.ones(n, np.float32) for _ in range(4))
    g16, copy = np.ones(n, np.uint16), np.ones(n, np.uint16)
    return {
        "float32 bound": lambda: in_place(g, p, m, v),
        "bfloat16 bound": lambda: in_place_copy(g16, p, m, v, copy),
        "copy": lambda: np.copyto(p, g),
        "triad": lambda: triad(p, m, v),
    }


def all_cases(options):
    """This process's kernels, and each peer's."""
    told = {"parameters": 10**5 if options.quick else 24 * 10**6, "repeats": 11}
    found = [launcher.Case("zeromp", "adam.py", told, 1)]
    for peer in ("torch", "deepspeed"):
        if launcher.has(options.peers, peer):
            case = launcher.Case(
                peer, "adam_torch.py", {**told, "peer": peer}, 1, options.peers, mpi=False
            )
            found.append(case)
    return found


def show(records_, options):
    """Print a table, and save the results."""
    runs = records.by_case(records_)
    found = {
        name: {key: records.spread([r["ns"][key] for r in some]) for key in some[0]["ns"]}
        for name, some in runs.items()
    }
    if "zeromp" not in found:
        return
    own, rows = found["zeromp"], []
    for dtype in DTYPES:
        bound = own[f"{dtype} bound"]["median"]
        rows.append(_row(f"{dtype}: bound", own[f"{dtype} bound"], bound, None))
        for name, item in found.items():
            rows.append(_row(f"{dtype}: {name}", item[dtype], bound, own[dtype]["median"]))
    header = ("update", "ns/parameter", "least to most", "GB/s of 28 bytes", "fraction of the bound", "zeromp takes, of its time", "runs")  # fmt: skip # noqa: E501
    records.show("AdamW, one thread", header, rows)
    speeds = {k: own[k]["median"] for k in ("copy", "triad")}
    print(f"\ncopy {8 / speeds['copy']:.1f} GB/s, triad {12 / speeds['triad']:.1f} GB/s, as STREAM counts")  # fmt: skip # noqa: E501
    records.save("adam", records_, found, options)


def _row(name, item, bound, own):
    ns = item["median"]
    return (
        name,
        f"{ns:.2f}",
        f"{item['min']:.2f} to {item['max']:.2f}",
        f"{LEAST_BYTES / ns:.1f}",
        f"{bound / ns:.2f}",
        f"{own / ns:.2f}" if own else "-",
        item["n"],
    )


def drive():
    options = records.arguments(__doc__)
    show(records.collect("adam", all_cases(options), options), options)


if __name__ == "__main__":
    work() if is_rank() else drive()
