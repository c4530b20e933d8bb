"""The forecast of bytes: the papers' tables, and the ledgers of real runs, to the byte."""

import itertools
import math

import numpy as np
import pytest
import toys

import zeromp as zm
from zeromp import account

GB = 1e9
RANKS = (1, 2, 3, 4, 8)
ranks = pytest.mark.parametrize("size", RANKS)
stages = pytest.mark.parametrize("stage", toys.STAGES)

# ---- what the paper prints: arXiv:1910.02054, figure 1 and tables 1 and 2 ------------------------

TABLE_1 = {  # N: GB of stages 1, 2, 3 for 7.5e9, 128e9 and 1e12 parameters
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


def half_up(x):
    """The column of 7.5e9: one decimal, two below 2."""
    digits = 1 if x >= 2 else 2
    return f"{math.floor(x * 10**digits + 0.5) / 10**digits:g}"


def truncated(x):
    """The other columns: whole numbers, one decimal below 100."""
    return f"{math.floor(x) if x >= 100 else math.floor(10 * x) / 10:g}"


@pytest.mark.parametrize("size", TABLE_1)
def test_table_1(size):
    for psi, row in zip((7.5e9, 128e9, 1e12), TABLE_1[size], strict=True):
        printed = half_up if psi == 7.5e9 else truncated
        cells = [account.model_state_bytes(psi, size, stage) / GB for stage in (1, 2, 3)]
        assert [printed(cell) for cell in cells] == row.split()


def test_figure_1():
    cells = [account.model_state_bytes(7.5e9, 64, stage) / GB for stage in toys.STAGES]
    assert cells == [120, 31.40625, 16.640625, 1.875]
    assert [round(cell, 1) for cell in cells] == [120, 31.4, 16.6, 1.9]


def test_table_2():
    """Largest model on 32 GB at 64 ranks; model parallelism multiplies the truncated first row."""
    exact = [account.largest_model(32 * GB, 64, stage) / 1e9 for stage in toys.STAGES]
    np.testing.assert_allclose(exact, [2, 7.6418, 14.4225, 128], rtol=1e-5)
    first = [math.floor(10 * x) / 10 for x in exact]
    printed = {1: (2, 7.6, 14.4, 128), 2: (4, 15.2, 28.8, 256), 4: (8, 30.4, 57.6, 500),
               8: (16, 60.8, 115.2, 1000), 16: (32, 121.6, 230.4, 2000)}  # fmt: skip
    for degree, row in printed.items():
        rounded = [degree * x for x in first]
        rounded[3] = (
            rounded[3] if rounded[3] < 300 else {512: 500, 1024: 1000, 2048: 2000}[rounded[3]]
        )
        assert rounded == pytest.approx(row)


@ranks
@stages
def test_traffic(size, stage):
    """2 psi (N - 1) / N at stages 0 to 2, 3 psi (N - 1) / N at stage 3: 1.5 times as much."""
    per_psi = account.traffic_elements(1.0, size, stage)
    assert per_psi == pytest.approx((2, 2, 2, 3)[stage] * (size - 1) / size)


# ---- what runs hold and send ---------------------------------------------------------------------

SHAPES = {"w": (5, 7), "bias": 3, "table": 29, "norm": 1, "tail": 11, "empty": 0}
N = 79
MIXES = [{}, {"frozen": ["table", "norm"]}, {"keep_float32": ["norm", "tail"]},
         {"frozen": "table", "keep_float32": ["norm", "table"]}]  # fmt: skip
VARIANTS = [
    {"wire": wire, "micro_batches": micro, "reduce_wire": travel, **mix}
    for wire, micro, travel, mix in itertools.product(toys.WIRES, (1, 3), (None, "float32"), MIXES)
    if not (wire == "float32" and (travel or "keep_float32" in mix))
]


def pieces(sizes, size, rank):
    """Elements of a rank's pieces: n (r+1) // N - n r // N of each unit."""
    return [n * (rank + 1) // size - n * rank // size for n in sizes]


def unit_sizes(zero):
    """Bytes per element, and elements of each unit, of trainable flats and of frozen ones."""
    return {
        trainable: [
            (flat.format.itemsize, [flat.size(u) for u in flat.counts])
            for flat in zero.layout.flats
            if flat.trainable == trainable
        ]
        for trainable in (True, False)
    }


def model_states(zero, stage):
    """Bytes of parameters, gradients and optimizer states, from sizes alone."""
    size, rank, o = zero.world.size, zero.world.rank, zero.options
    held = dict.fromkeys(("parameters", "gradients", "master", *zero.rule.states), 0)
    for trainable, flats in unit_sizes(zero).items():
        for itemsize, sizes in flats:
            full, shard = sum(sizes), sum(pieces(sizes, size, rank))
            held["parameters"] += itemsize * (shard if stage == 3 else full)
            if trainable:
                kept = 4 if o.micro_batches > 1 or o.reduce_wire == "float32" else itemsize
                held["gradients"] += kept * (shard if stage >= 2 else full)
                states = 4 * (shard if stage >= 1 else full)
                held["master"] += states if itemsize == 2 else 0
                for kind in zero.rule.states:
                    held[kind] += states
    return held


def sent_by_backward_and_step(zero, stage, applied, steps, micros):
    """Bytes of gradients and of published parameters, from sizes alone."""
    size, rank, travel = zero.world.size, zero.world.rank, zero.options.reduce_wire
    reduced = gathered = 0
    for itemsize, sizes in unit_sizes(zero)[True]:
        on_wire = 4 if travel == "float32" else itemsize
        full, shard = sum(sizes), sum(pieces(sizes, size, rank))
        reduced += on_wire * (full - shard) * (micros if stage >= 2 else steps)
        if stage < 3:
            gathered += (on_wire if stage == 0 else itemsize) * shard * (size - 1) * applied
    return reduced, gathered


def nonzero(counts):
    return {k: v for k, v in counts.items() if v}


def measured(ledger):
    assert {verb for section, verb in ledger.sent_bytes if section == "train"} <= {
        "reduce_scatter",
        "all_gather",
        "agree",
    }
    return {verb: ledger.sent(verb) for verb in ("reduce_scatter", "all_gather", "agree")}


def check_arrays(zero):
    """The store's figures are those of the arrays themselves."""

    def total(arrays):
        return sum(a.nbytes for a in arrays if a is not None)

    states = zero.optimizer.states
    assert zero.store.held["parameters"] == total(zero.parameters.arrays)
    assert zero.store.held["gradients"] == total(zero.gradients.arrays)
    assert zero.store.held["master"] == total(s.master for s in states)
    for kind in zero.rule.states:
        assert zero.store.held[kind] == total(s.moments[kind] for s in states)


@ranks
@stages
@pytest.mark.parametrize("wire", toys.WIRES)
def test_zero_holds_and_sends_what_is_forecast(size, stage, wire):
    """One applied step of `micro_batches`, and a skipped one of a single micro-batch."""

    def run(world, options):
        micros = options["micro_batches"]
        rule = zm.SGD() if "frozen" in options else zm.AdamW()
        zero = toys.make(world, N, SHAPES, stage, bucket=40, optimizer=rule, **options)
        predicted = account.held(zero.case, stage)
        assert nonzero(zero.store.held) == nonzero(predicted)
        trained = [a.name for a in zero.layout.arrays if a.trainable]
        for m in range(micros):
            gradients = toys.cut(toys.gradient(N, world.rank, 1, m), SHAPES)
            zero.backward({name: gradients[name] for name in trained})
        assert zero.step().applied
        zero.backward({"w": np.full((5, 7), np.nan)})
        assert not zero.step().applied
        assert nonzero(zero.store.held) == nonzero(predicted)
        assert zero.store.held == zero.store.peak  # construction needs no more either
        check_arrays(zero)
        states = model_states(zero, stage)
        assert {kind: predicted.get(kind, 0) for kind in states} == states
        sent = account.sent(zero.case, stage, applied=1, skipped=1, micro_batches=micros + 1)
        assert measured(world.ledger) == sent
        by_hand = sent_by_backward_and_step(zero, stage, 1, 2, micros + 1)
        assert (sent["reduce_scatter"], sent["all_gather"]) == by_hand

    for options in (v for v in VARIANTS if v["wire"] == wire):
        zm.threads(size, lambda world, options=options: run(world, options))


@ranks
@stages
def test_totals_over_ranks_are_the_papers(size, stage):
    """Whatever the pieces' rounding: it cancels in the sum over ranks."""
    n, cut = 131, [64, 67]

    def run(world):
        zero = toys.make(world, n, cut, stage, "bfloat16", bucket=70)
        toys.steps(zero, n, cut, 1)
        held = sum(v for k, v in zero.store.held.items() if k != "buffers")
        return held, world.ledger.sent("reduce_scatter") + world.ledger.sent("all_gather")

    held, sent = np.sum(zm.threads(size, run), axis=0)
    assert held == pytest.approx(size * account.model_state_bytes(n, size, stage), rel=1e-12)
    # stage 3 has published nothing: it gathers when a model comes by, see the engine below
    gathered = 0 if stage == 3 else n * (size - 1)
    assert sent == 2 * (n * (size - 1) + gathered)


def test_two_zeros_on_one_world_hold_what_is_forecast():
    """Each has its own store, whichever of them is larger."""

    def run(world):
        for n in (20, 22, 400, 30):
            zero = toys.make(world, n, [n], 1)
            assert nonzero(zero.store.held) == nonzero(account.held(zero.case, 1))

    zm.threads(2, run)


@ranks
@stages
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("wire", "micros"), [("float32", 1), ("bfloat16", 3)])
def test_engine_holds_and_sends_what_is_forecast(size, stage, tied, wire, micros):
    """What the tied unit adds at stage 3: it is visited twice in each direction, so its n elements
    are gathered 4 times per micro-batch in place of 2, 2 n (N - 1) more over all ranks. Elsewhere
    it adds nothing: its gradient is reduced once.
    """
    model = zm.models.gpt(vocab=11, layers=2, width=6, heads=2, context=5, tied=tied)
    ids = np.random.default_rng(0).integers(0, 11, (2, 5))

    def run(world):
        engine = zm.Engine(model, world=world, stage=stage, wire=wire, micro_batches=micros,
                           poison=True)  # fmt: skip
        zero = engine.zero
        for _ in range(2):
            for _ in range(micros):
                engine.backward(ids, ids)
            assert engine.step().applied
        assert nonzero(zero.store.held) == nonzero(account.held(zero.case, stage))
        path = [visit.unit for visit in model.path]
        assert measured(world.ledger) == account.sent(zero.case, stage, applied=2, path=path)
        (flat,) = zero.layout.flats
        return flat, {
            unit: world.ledger.unit_bytes["train", "all_gather", unit] for unit in flat.counts
        }

    results = zm.threads(size, run)
    flat = results[0][0]
    for unit in flat.counts:
        total = sum(sent[unit] for _, sent in results)
        visits = 2 if tied and unit == "embed" else 1
        times = 2 * micros * 2 * visits if stage == 3 else 2  # two steps
        on_wire = flat.format.itemsize
        assert total == times * on_wire * flat.size(unit) * (size - 1)


def test_engine_at_stage_3_sends_half_as_much_again():
    """Without a tied unit and with pieces that divide: 2, 2, 2 and 3 psi (N - 1) / N elements."""
    model = zm.models.mlp((8, 16, 4))
    psi = sum(p.size for unit in model.units for p in unit.parameters)

    def run(world, stage):
        engine = zm.Engine(model, world=world, stage=stage)
        engine.backward(np.ones((1, 8), np.float32), np.zeros(1, np.int64))
        engine.step()
        return (world.ledger.sent("reduce_scatter") + world.ledger.sent("all_gather")) / 2

    for stage in toys.STAGES:
        elements = zm.threads(4, lambda world, stage=stage: run(world, stage))
        assert elements == [account.traffic_elements(psi, 4, stage)] * 4


def test_lowest_stage():
    case = account.Case(
        (account.FlatCase("bfloat16", True, {f"u{i}": 100 for i in range(20)}),), 8, 0
    )
    needs = [sum(account.held(case, stage).values()) for stage in toys.STAGES]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 4
    for stage, need in enumerate(needs):
        assert account.lowest_stage(case, need) == stage
        assert account.lowest_stage(case, need + 10, activations=10) == stage
        assert account.lowest_stage(case, need - 1) == (stage + 1 if stage < 3 else None)
