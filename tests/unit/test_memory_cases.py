"""K14 of cases.md: memory. Traced by tracemalloc, which sees every NumPy array of every rank.

Sizes are smaller than in the cases where nothing but time depends on them.
"""

import gc
import statistics
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from toys import STAGES

import zeromp as zm


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, timeout=50)


@contextmanager
def tracing():
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Load all kernels before anything is traced."""
    zm.Zero({"w": np.ones(3)})


def equal_arrays(n, count):
    return {f"a{i}": np.broadcast_to(np.float32(0.5), (n // count,)) for i in range(count)}


def hold(num_ranks, stage, n, **options):
    """Bytes that all ranks together have allocated for a Zero; held by rank; predicted by rank."""
    given = equal_arrays(n, 20)

    def build(world):
        zero = zm.Zero(given, world=world, stage=stage, bucket=n // 20, **options)
        predicted = zm.account.held(zero.case, stage)
        return zero, {k: v for k, v in zero.store.held.items() if v}, predicted

    with tracing():
        before = tracemalloc.get_traced_memory()[0]
        built = threads(num_ranks, build)
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    return allocated, [held for _, held, _ in built], [predicted for _, _, predicted in built]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("wire", "num_micro"), [("float32", 1), ("float32", 2), ("bfloat16", 1), ("float16", 2)]
)
def test_o076_the_estimate_is_what_is_held(num_ranks, stage, wire, num_micro):
    allocated, held, predicted = hold(num_ranks, stage, 200_000, wire=wire, micro_batches=num_micro)
    assert held == [{k: v for k, v in p.items() if v} for p in predicted]
    estimate = sum(sum(p.values()) for p in predicted)
    assert allocated == pytest.approx(estimate, rel=0.10)


def test_o077_higher_stages_and_more_ranks_hold_less():
    n = 1_000_000
    four = [hold(4, stage, n, wire="float32")[1][0] for stage in STAGES]
    sums = [sum(held.values()) for held in four]
    assert sums[0] > sums[1] > sums[2] > sums[3]
    states = [sum(v for k, v in held.items() if k != "buffers") for held in four]
    assert states == [16 * n, 8 * n + 8 * n // 4, 4 * n + 12 * n // 4, 16 * n // 4]
    two = hold(2, 3, n, wire="float32")[1][0]
    assert sums[3] <= 0.6 * sum(two.values())


@pytest.mark.parametrize("stage", STAGES)
def test_o077_buffers_are_listed_apart_and_shrink_with_the_model(stage):
    large, small = (hold(2, stage, n, wire="bfloat16")[1][0] for n in (200_000, 20_000))
    assert large["buffers"] == 10 * small["buffers"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_o078_memory_does_not_grow_with_the_steps(stage):
    n, num_ranks = 30_000, 2
    given = {name: np.zeros(n // 3) for name in "abc"}
    gradient = {name: np.full(n // 3, 0.125, np.float32) for name in given}
    overflow = gradient | {"b": np.full(n // 3, np.inf, np.float32)}
    size_after, peaks = {}, {True: [], False: []}

    def train(world):
        zero = zm.Zero(given, world=world, stage=stage, wire="float16", loss_scale_window=5)
        for step in range(1, 201):
            bad = step % 10 == 0
            if world.rank == 0:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
            world.barrier()
            zero.backward(overflow if bad and world.rank == 1 else gradient)
            assert zero.step().applied != bad
            world.barrier()
            if world.rank == 0:
                peaks[bad].append(tracemalloc.get_traced_memory()[1] - before)
                size_after[step] = tracemalloc.get_traced_memory()[0]
            world.barrier()
        return sum(zero.store.held.values())

    with tracing():
        held = threads(num_ranks, train)
    early, late = (  # medians: now and then Python itself allocates something
        statistics.median(size_after[step] for step in steps)
        for steps in (range(11, 31), range(181, 201))
    )
    assert late - early <= 0.02 * sum(held) + 2**16
    assert statistics.median(peaks[True]) <= max(peaks[False]) + 2**16


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_o079_full_weights_live_in_a_window_of_blocks(wire, recompute, prefetch):
    width, num_ranks = 64, 4
    model = zm.models.gpt(vocab=16, layers=8, width=width, heads=2, context=4)
    block = 12 * width * width + 13 * width  # elements
    x = np.arange(4).reshape(1, 4)

    def train(world):
        engine = zm.Engine(
            model, world=world, stage=3, wire=wire, recompute=recompute, prefetch=prefetch
        )
        window = engine.zero.store.held["buffers"]
        for step in range(2):
            world.barrier()
            if step == 1 and world.rank == 0:
                tracemalloc.reset_peak()
                train.before = tracemalloc.get_traced_memory()[0]
            world.barrier()
            engine.backward(x, x)
            world.barrier()
            if step == 1 and world.rank == 0:
                train.peak = tracemalloc.get_traced_memory()[1]
            world.barrier()
            engine.step()
        return window, sum(engine.zero.store.held.values()) - window

    with tracing():
        results = threads(num_ranks, train)
    itemsize = 4 if wire == "float32" else 2
    widened = 0 if wire == "float32" else 4 * block
    gradient_buffers = 3 * 4 * block  # two buckets, as embed is tied, and one unit to send
    for window, _ in results:  # the window itself is at most prefetch + 1 blocks
        assert window <= (prefetch + 1) * itemsize * block + widened + gradient_buffers
    # Beyond it only activations are allocated: no rank makes a copy of a block.
    assert train.peak - train.before < 4 * block * num_ranks


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_o080_no_temporary_is_larger_than_the_largest_array(stage, wire):
    table, limit, num_ranks = 800_000, 100_000, 2  # a tenth of the case
    sizes = {"wte": table, "b0": 300, "b1": 700, "head": table, "b2": 50}
    given = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    gradient = {name: np.ones(size, np.float32) for name, size in sizes.items()}

    def train(world):
        zero = zm.Zero(given, world=world, stage=stage, wire=wire, bucket=limit)
        assert max(flat.widest for flat in zero.layout.flats) == table  # a unit of its own
        world.barrier()
        if world.rank == 0:
            tracemalloc.reset_peak()
            train.before = tracemalloc.get_traced_memory()[0]
        world.barrier()
        zero.backward(gradient)
        zero.step(clip=1.0)
        for _ in zero.sweep():
            pass
        world.barrier()
        return tracemalloc.get_traced_memory()[1], zero.store.held["buffers"]

    with tracing():
        results = threads(num_ranks, train)
    for peak, buffers in results:
        assert peak - train.before < 4 * limit  # reduce, gather and step draw on buffers alone
        assert buffers <= 6 * 4 * table  # which hold one unit, that is one table, each
