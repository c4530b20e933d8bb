"""Reduce-scatter and all-gather on one node, against memcpy, MPI's own calls, and gloo.

    python benchmarks/collectives.py

Vectors of 1, 16 and 64 MB, float32 and bfloat16, 2 ranks; a reduce-scatter leaves half the summed
vector on each, an all-gather makes the vector of two halves. Each way in which zeromp can reduce,
on every MPI for which there is an interpreter (see `launcher.interpreters`). `memcpy`: every rank
copies the same number of bytes, all at once. Times are those of the slower rank.
"""

import launcher
import numpy as np
import records
from rank import claim_stdout, is_rank, settings, time_together

MB = 2**20
SIZES = (1, 16, 64)
BFLOAT16_ONE = 0x3F80  # not the bits 1: to add numbers as small as that takes ten times longer
DTYPES = {"float32": np.float32, "bfloat16": np.uint16}
TURNS = 5


def work():
    """Time all calls; they take turns, each several times in a row."""
    import zeromp as zm

    report, told = claim_stdout(), settings()
    world = zm.world()
    ways = {way: world.reducing(way) for way in zm_ways()}
    ways = {way: w for way, w in ways.items() if w.reduce == way}
    results = {}
    for dtype, kind in DTYPES.items():
        for mb in told["sizes"]:
            calls = calls_of(world, ways, mb * MB // np.dtype(kind).itemsize, kind)
            for name, median in time_in_turns(calls, world, told["repeats"]).items():
                results[f"{name}/{dtype}/{mb}"] = median
    if world.rank == 0:
        report(
            {
                "ms": results,
                "ranks": world.size,
                "mpi": world.transport.name,
                "versions": {"mpi": world.transport.name, "numpy": np.__version__},
            }
        )


def zm_ways():
    """Names of the ways to reduce; one that stands for another leaves `World.reduce` different."""
    from zeromp.world import REDUCE_WAYS

    return REDUCE_WAYS


def calls_of(world, ways, size, kind):
    """What is timed for one vector of `size` elements, by name."""
    counts = [size // world.size] * world.size
    size = sum(counts)
    calls = {}
    whole, piece = np.ones(size, kind), np.ones(counts[0], kind)
    room = np.empty(size, kind)
    calls["memcpy"] = lambda: np.copyto(room, whole)
    for way, w in ways.items():
        draw = getattr(w, "empty", np.empty)
        bucket, own, full = draw(size, kind), draw(counts[0], kind), draw(size, kind)
        bucket[:] = own[:] = full[:] = 1 if kind == np.float32 else BFLOAT16_ONE

        def reduce(w=w, bucket=bucket, own=own):
            w.reduce_scatter(bucket, own, counts, 1 / w.size, received=room)

        def gather(w=w, own=own, full=full):
            w.all_gather(own, full, counts)

        calls[f"reduce_scatter zeromp, {way}"] = reduce
        calls[f"all_gather zeromp, {way}"] = gather
    comm = getattr(world.transport, "comm", None)
    if comm is not None:
        if kind == np.float32:
            calls["reduce_scatter MPI's own"] = lambda: comm.Reduce_scatter_block(whole, piece)
        calls["all_gather MPI's own"] = lambda: comm.Allgather(piece, whole)
    return calls


def time_in_turns(calls, world, repeats):
    """Median milliseconds of each call on the slower rank."""
    seconds = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            seconds[name] += time_together(call, world.barrier, repeats)
    return {
        name: float(np.median(world.agree(values).max(axis=0))) * 1e3
        for name, values in seconds.items()
    }


def all_cases(options):
    """One job per MPI, and one for gloo."""
    told = {"sizes": (1,) if options.quick else SIZES, "repeats": 1 if options.quick else 3}
    found = []
    for python in launcher.interpreters():
        name = "zeromp" if len(found) == 0 else f"zeromp ({python})"
        found.append(launcher.Case(name, "collectives.py", told, 2, python))
    if launcher.has(options.peers, "torch"):
        found.append(
            launcher.Case("gloo", "collectives_torch.py", told, 2, options.peers, mpi=False)
        )
    return found


def show(records_, options):
    """Print a table per operation, and save the results."""
    found = {}
    for record in records_:
        library = record.get("mpi", "gloo")
        for key, ms in record["ms"].items():
            found.setdefault(f"{library}/{key}", []).append(ms)
    found = {key: records.spread(values) for key, values in found.items()}
    rows = []
    for key in sorted(found, key=lambda k: (k.split("/")[1:3], k)):
        library, call, dtype, mb = key.split("/")
        if mb == str(SIZES[0]):
            rows.append(_row(found, library, call, dtype))
    header = ("call", "dtype", "library", "by", *(f"{mb} MB: ms (to memcpy, to gloo)" for mb in SIZES), "runs")  # fmt: skip # noqa: E501
    records.show("Collectives, 2 ranks on one node", header, rows)
    records.save("collectives", records_, found, options)


def _row(found, library, call, dtype):
    cells = []
    for mb in SIZES:
        item = found.get(f"{library}/{call}/{dtype}/{mb}")
        copy = found.get(f"{library}/memcpy/{dtype}/{mb}")
        gloo = found.get(f"gloo/{call.split()[0]}/{dtype}/{mb}")
        if item is None:
            cells.append("-")
            continue
        ratios = [
            f"{item['median'] / other['median']:.2f}" if other and other is not item else "-"
            for other in (copy, gloo)
        ]
        cells.append(f"{item['median']:.2f} ({', '.join(ratios)})")
    least = found[f"{library}/{call}/{dtype}/{SIZES[0]}"]
    operation, _, by = call.partition(" ")
    return (operation, dtype, library, by, *cells, least["n"])


def drive():
    options = records.arguments(__doc__)
    show(records.collect("collectives", all_cases(options), options), options)


if __name__ == "__main__":
    work() if is_rank() else drive()
