"""Training with things on other tiers: the same bits, and bytes as predicted.

What is expected of bytes is written here as sums over pieces, apart from `zeromp.account`.
"""

import itertools
import platform
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import toys

import zeromp as zm
from zeromp.store import Placement, Store, numa
from zeromp.store.placement import TILE_SLOTS, crossings

TIERS = ("device", "host", "disk")
VOCAB, CONTEXT = 17, 8
MODEL = zm.models.gpt(VOCAB, 2, 8, 2, CONTEXT)
GROUPS = [zm.Group("flat", lambda name, shape: len(shape) == 1, weight_decay=0.0, lr_factor=0.5)]


def rows(rank, step):
    rng = np.random.default_rng([rank, step])
    x = rng.integers(0, VOCAB, (2, CONTEXT))
    return x, np.roll(x, -1, 1)


def engine_of(folder, world=None, *, stage=3, wire="bfloat16", rule=zm.AdamW, **options):
    given = {"recompute": True, "offload_tile": 4096, "poison": True, "groups": GROUPS}
    given |= {"loss_scale": 64.0} if wire == "float16" else {}
    return zm.Engine(
        MODEL, world=world, stage=stage, wire=wire, optimizer=rule(lr=0.05), seed=2,
        offload_dir=folder, **(given | options),
    )  # fmt: skip


def train(engine, steps=3, clip=1.0):
    losses = []
    for step in range(steps):
        for micro in range(engine.zero.options.micro_batches):
            losses.append(engine.backward(*rows(engine.world.rank, 10 * step + micro)))
        losses.append(engine.step(clip=clip))
    return losses


def finish(engine, losses, micro_batches):
    """Losses and state; both ledgers must be as predicted."""
    summary = toys.summary_of(engine, micro_batches)
    for key in ("held_bytes", "sent_bytes", "moved_bytes"):
        for rank in summary[key]:
            for name, pair in rank.items():
                assert pair["measured"] == pair["predicted"], (key, name, pair)
    engine.close()
    return repr(losses), summary["state_sha256"], summary["weights_sha256"]


def run(folder, world=None, steps=3, **options):
    engine = engine_of(folder, world, **options)
    losses = train(engine, steps)
    return finish(engine, losses, steps * engine.zero.options.micro_batches)


def placed(optimizer="device", gradients="device", parameters="device", activations="device"):
    return {
        "optimizer": optimizer,
        "gradients": gradients,
        "parameters": parameters,
        "activations": activations,
    }


# ---- the same bits -------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "float16, micro-batches": {"wire": "float16", "micro_batches": 2},
    "float32, SGD": {"wire": "float32", "rule": zm.SGD},
    "mixed": {
        "keep_float32": ["*ln*"],
        "frozen": ["blocks.0.*"],
        "reduce_wire": "float32",
        "prefetch": 3,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_all_placements_give_the_bits_of_memory(tmp_path, case):
    """All 81 of them on one rank, each in one of the cases; all on disk in every case."""
    expected = run(tmp_path, steps=2, **CASES[case])
    for number, tiers in enumerate(itertools.product(TIERS, repeat=4)):
        if number % 4 == list(CASES).index(case) or set(tiers) == {"disk"}:
            assert run(tmp_path, steps=2, offload=placed(*tiers), **CASES[case]) == expected, tiers
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ranks", "case", "tiers"),
    [
        (2, "plain", ("disk", "host", "disk", "host")),
        (2, "float32, SGD", ("disk",) * 4),
        (3, "mixed", ("disk",) * 4),
        (4, "float16, micro-batches", ("disk",) * 4),
        (3, "float16, micro-batches", ("host", "disk", "host", "disk")),
    ],
)
def test_ranks_give_the_bits_of_memory(tmp_path, ranks, case, tiers):
    options = CASES[case]
    expected = zm.threads(ranks, lambda w: run(tmp_path, w, 2, **options))
    assert zm.threads(ranks, lambda w: run(tmp_path, w, 2, offload=placed(*tiers), **options)) == (
        expected
    )


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stage", toys.STAGES)
def test_optimizer_may_leave_the_device_at_any_stage(tmp_path, stage, tier):
    """At stages 1 and 2, float32 parameters are their own masters, and stay on the device."""
    for case in ({"keep_float32": ["*ln*", "*.b*"]}, {"wire": "float32"}):
        expected = zm.threads(2, lambda w, c=case: run(tmp_path, w, 2, stage=stage, **c))
        offload = placed(tier)
        got = zm.threads(
            2, lambda w, c=case, o=offload: run(tmp_path, w, 2, stage=stage, offload=o, **c)
        )
        assert got == expected


@pytest.mark.parametrize("way", ["cached", "direct"])
@pytest.mark.parametrize("wire", toys.WIRES)
def test_o074_a_hundred_steps_on_disk_are_those_in_memory(tmp_path, wire, way):
    """A regression toy, 3 ranks; tiles of 4096 on shards of 10,000 cut by three groups."""
    n, cuts = 30_000, {"a": 9_999, "w": (100, 150), "b": 5_001}
    groups = [
        zm.Group("b", "b", weight_decay=0.0),
        zm.Group("w", "w", weight_decay=0.3, lr_factor=2.0),
    ]

    def train(world, **options):
        zero = toys.make(world, n, cuts, 3, wire, groups=groups, **options)
        first = None
        for step in range(100):
            zero.backward({name: zero.full(name) for name in cuts})  # of half the square
            assert zero.step(lr=0.01).applied
            if step == 0:
                first = zero.moments("w")
        state = {name: array.tobytes() for name, array in toys.state(zero).items()}
        zero.close()
        return state, first, float(np.abs(toys.whole(zero.store.read and first.get, "m")).min())

    memory = zm.threads(3, train)
    disk = zm.threads(
        3,
        lambda w: train(
            w, offload="optimizer=disk", offload_dir=tmp_path, offload_tile=4096, offload_io=way
        ),
    )
    for (state, _, _), (expected, _, _) in zip(disk, memory, strict=True):
        assert state == expected
    for moment in disk[0][1].values():
        assert (np.abs(moment) > 0).mean() > 0.99
    start = toys.start(n)
    end = np.frombuffer(disk[0][0]["master"], np.float32)
    assert np.abs(end).mean() < 0.6 * np.abs(start).mean()  # it has learnt


def test_skipped_steps_change_nothing_on_disk(tmp_path):
    def train(world, **options):
        zero = toys.make(world, 9000, [5000, 4000], 3, "float16", **options)
        before = toys.state(zero)
        bad = {"a0": np.full(5000, np.inf, np.float32), "a1": np.zeros(4000, np.float32)}
        zero.backward(bad if world.rank == 1 else {"a0": np.ones(5000)})
        report = zero.step()
        assert not report.applied
        assert "inf in the gradient of 'a0'" in report.reason
        after = toys.state(zero)
        assert all(after[k].tobytes() == before[k].tobytes() for k in before)
        toys.steps(zero, 9000, [5000, 4000], 2)
        found = {k: v.tobytes() for k, v in toys.state(zero).items()}
        measured = {k[1:]: n for k, n in zero.store.moved.items() if k[0] == "train"}
        predicted = zm.account.moved(zero.case, 3, applied=2, skipped=1)
        assert {k: n for k, n in measured.items() if n} == predicted
        zero.close()
        return found

    expected = zm.threads(2, train)
    offload = {"offload": "optimizer=disk,gradients=disk,parameters=disk", "offload_tile": 4096}
    assert zm.threads(2, lambda w: train(w, offload_dir=tmp_path, **offload)) == expected


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_use_of_weights_that_lie_elsewhere(tmp_path, tier):
    """Evaluation, whole arrays, moments, sweeps and edits, on 2 ranks, as from memory."""

    def use(world, **options):
        engine = engine_of(tmp_path, world, **options)
        train(engine, 1)
        x, y = rows(9, 9)
        found = [engine.evaluate(x, y), engine.generate([1, 2], 5)]
        for unit, weights in engine.zero.sweep():
            found.append((unit, [w.tobytes() for w in weights.values()]))
        for _ in engine.zero.sweep():
            break  # left early, with reads in flight
        name = engine.zero.names[0]
        with engine.gathered(name, edit=True) as unit:
            unit[name][0] = 0.5
        assert (engine.full(name)[0] == 0.5).all()
        train(engine, 1)
        found += [engine.master(n).tobytes() for n in engine.zero.names]
        found += [m.tobytes() for n in engine.zero.names for m in engine.moments(n).values()]
        engine.close()
        return found

    expected = zm.threads(2, use)
    offload = placed(tier, tier, tier, tier)
    assert zm.threads(2, lambda w: use(w, offload=offload)) == expected


def test_error_in_the_middle_of_a_sweep_leaves_no_read_in_flight(tmp_path):
    """The next sweep uses the same slots: late reads would spoil its weights."""
    model = zm.models.mlp((50,) * 12)
    engine = zm.Engine(model, stage=3, offload="parameters=disk", offload_dir=tmp_path)
    names = list(engine.zero.layout.units)
    expected = {u: {n: w.copy() for n, w in ws.items()} for u, ws in engine.zero.sweep()}
    for stop in range(12):
        with pytest.raises(ZeroDivisionError):
            for i, _ in enumerate(engine.zero.sweep(names[::-1])):
                if i == min(stop, len(names) - 1):
                    1 / 0  # noqa: B018
        for unit, weights in engine.zero.sweep():
            for name, w in weights.items():
                assert np.array_equal(w, expected[unit][name])
    engine.close()


def test_before_overwrite_is_told_of_every_tile_before_it_changes(tmp_path):
    """What a snapshot needs: each element of the states once, with its old value."""
    for tier in TIERS:
        zero = toys.make(None, 20_000, [12_345, 7_655], 3, "bfloat16",
                         offload={"optimizer": tier}, offload_dir=tmp_path,
                         offload_tile=4096)  # fmt: skip
        toys.steps(zero, 20_000, [12_345, 7_655], 1)
        states = zero.optimizer.states[0]
        arrays = {"master": states.master, **states.moments}
        old = {k: np.empty(20_000, np.float32) for k in arrays}
        for kind, array in arrays.items():
            zero.store.read(array, old[kind])
        seen = {k: np.full(20_000, np.nan, np.float32) for k in arrays}

        def tell(part, arrays=arrays, seen=seen, zero=zero):
            for kind, array in arrays.items():
                at = (part.ctypes.data - array.ctypes.data) // 4
                if 0 <= at < array.size:
                    assert np.isnan(seen[kind][at : at + part.size]).all()
                    zero.store.read(part, seen[kind][at : at + part.size])

        zero.store.before_overwrite.append(tell)
        toys.steps(zero, 20_000, [12_345, 7_655], 1)
        for kind in arrays:
            assert seen[kind].tobytes() == old[kind].tobytes(), (tier, kind)
        zero.store.before_overwrite.clear()
        assert zero.master("a0").tobytes() != old["master"][:12_345].tobytes()
        zero.close()


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offload", "bytes_per_parameter"),
    [("", 16), ("gradients=host", 14), ("optimizer=host", 4),
     ("optimizer=host,gradients=host", 2), ("optimizer=disk,gradients=disk", 2)],
)  # fmt: skip
def test_device_bytes_are_those_of_zero_offload(tmp_path, offload, bytes_per_parameter):
    """Ren et al. 2021, arXiv:2101.06840, table 1: 16 M, 14 M, 4 M, 2 M; its last row misprinted."""
    psi = 50_000
    zero = zm.Zero({"w": np.zeros(psi)}, stage=2, wire="bfloat16", offload=offload,
                   offload_dir=tmp_path)  # fmt: skip
    held = zero.store.held
    assert sum(n for kind, n in held.items() if kind != "buffers") == bytes_per_parameter * psi
    elsewhere = sum(
        n
        for tier in ("host", "disk")
        for kind, n in zero.store.tiers[tier].held.items()
        if kind != "buffers"
    )
    assert elsewhere == (16 - bytes_per_parameter) * psi
    zero.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traffic_is_that_of_zero_offload(stage, ranks):
    """The paper's section 3: 2 M down, 2 M up, 4 M in all, the least that any split can move."""
    psi, steps = 12_345, 3

    def run(world):
        zero = zm.Zero({"w": np.zeros(psi)}, world=world, stage=stage, wire="bfloat16",
                       offload="optimizer=host")  # fmt: skip
        for _ in range(steps):
            zero.backward({"w": np.ones(psi)})
            zero.step()
        return {k[1:]: n for k, n in zero.store.moved.items() if k[0] == "train"}

    moved = zm.threads(ranks, run)
    for rank in range(ranks):
        piece = psi * (rank + 1) // ranks - psi * rank // ranks
        assert moved[rank] == {
            ("gradients", "device", "host"): 2 * steps * piece,
            ("parameters", "host", "device"): 2 * steps * piece,
        }
    assert sum(sum(m.values()) for m in moved) == 4 * psi * steps


def test_traffic_of_each_kind_by_formula(tmp_path):
    """One step, one unit, two ranks, two micro-batches: pieces of p elements, bfloat16."""
    psi = 8192
    p = psi // 2
    expected = {
        "optimizer=disk": {
            **both("master", 4 * p, 4 * p),
            **both("m", 4 * p, 4 * p),
            **both("v", 4 * p, 4 * p),
            ("gradients", "device", "host"): 4 * p,  # kept in float32, as there are two of them
            ("parameters", "host", "device"): 2 * p,
        },
        "gradients=host": {
            ("gradients", "device", "host"): 2 * 4 * p,  # one per micro-batch
            ("gradients", "host", "device"): 4 * p,  # for the update
        },
        "gradients=disk": {
            ("gradients", "device", "host"): 2 * 4 * p,
            ("gradients", "host", "disk"): 2 * 4 * p,
            ("gradients", "disk", "host"): (1 + 1 + 1) * 4 * p,  # to add to, for norm, for update
            ("gradients", "host", "device"): 4 * p,
        },
        "parameters=host": {("parameters", "device", "host"): 2 * p},  # none swept: only written
        "optimizer=host,gradients=host,parameters=host": {
            ("gradients", "device", "host"): 2 * 4 * p
        },
    }
    for offload, moves in expected.items():

        def run(world, offload=offload):
            zero = zm.Zero({"w": np.zeros(psi)}, world=world, stage=3, wire="bfloat16",
                           micro_batches=2, offload=offload, offload_dir=tmp_path)  # fmt: skip
            for _ in range(2):
                zero.backward({"w": np.ones(psi)})
            zero.step()
            zero.close()
            return {k[1:]: n for k, n in zero.store.moved.items() if k[0] == "train" and n}

        for moved in zm.threads(2, run):
            assert moved == moves, offload


def both(kind, read, written):
    return {(kind, "disk", "host"): read, (kind, "host", "disk"): written}


def test_gradients_and_weights_never_touch_the_disk_unless_placed_there(tmp_path):
    engine = engine_of(tmp_path, offload="optimizer=disk")
    train(engine)
    edges = Counter()
    for (_, kind, *edge), n in engine.zero.store.moved.items():
        if "disk" in edge:
            edges[kind] += n
    assert set(edges) == {"master", "m", "v"}
    engine.close()


def test_setup_and_looking_are_not_training(tmp_path):
    """Loading the initial values, whole arrays and evaluation are entered in other sections."""
    engine = engine_of(tmp_path, offload=placed("disk", "disk", "disk", "disk"))
    assert not [k for k in engine.zero.store.moved if k[0] == "train"]
    engine.evaluate(*rows(0, 0))
    assert not [k for k in engine.zero.store.moved if k[0] == "train"]
    engine.close()


def test_crossings_pass_the_host():
    assert crossings("device", "disk") == [("device", "host"), ("host", "disk")]
    assert crossings("disk", "device") == [("disk", "host"), ("host", "device")]
    assert crossings("host", "host") == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("offload", [
    "optimizer=host", "optimizer=disk", "gradients=disk", "parameters=disk",
    "optimizer=disk,gradients=disk,parameters=disk",
])  # fmt: skip
def test_o076_the_estimate_is_what_is_held_on_every_tier(tmp_path, ranks, offload):
    sizes = [0, 20_001, 3, 4096, 1, 7_777]
    given = {f"a{i}": np.ones(n, np.float32) for i, n in enumerate(sizes) if n}

    def build(world, stage):
        zero = zm.Zero(given, world=world, stage=stage, bucket=1, keep_float32="a3", frozen="a5",
                       offload=offload, offload_dir=tmp_path, offload_tile=4096)  # fmt: skip
        predicted = zm.account.held_by_tier(zero.case, stage)
        for tier in TIERS:
            held = {k: n for k, n in zero.store.tiers[tier].held.items() if n}
            assert held == {k: n for k, n in predicted[tier].items() if n}, tier
        on_disk = sum(zero.store.tiers["disk"].held.values())
        path = zero.store.disk.states.path if zero.store.disk else None
        reserved = path.stat().st_blocks * 512 if path else 0
        assert on_disk <= reserved <= on_disk + 2**17  # whole pages and HDF5's own bytes
        zero.close()

    least = 3 if "parameters" in offload else 2 if "gradients" in offload else 0
    for stage in range(least, 4):
        zm.threads(ranks, lambda w, s=stage: build(w, s))


def test_o078_memory_and_files_do_not_grow_with_the_steps(tmp_path):
    import tracemalloc

    engine = engine_of(tmp_path, offload=placed("disk", "disk", "disk", "disk"))
    sizes = []
    tracemalloc.start()
    try:
        for step in range(20):
            train(engine, 1)
            if step in (4, 19):
                disk = sum(p.stat().st_blocks for p in tmp_path.rglob("*.h5"))
                opened = len(list(Path("/proc/self/fd").iterdir()))
                sizes.append((tracemalloc.get_traced_memory()[0], disk, opened))
    finally:
        tracemalloc.stop()
    assert sizes[1][0] - sizes[0][0] < 2**15
    assert sizes[1][1:] == sizes[0][1:]
    engine.close()


def test_buffers_are_bounded_by_the_tile_whatever_the_shard(tmp_path):
    found = []
    for n in (100_000, 1_000_000):
        zero = zm.Zero({"w": np.broadcast_to(np.float32(1), (n,))}, stage=3, bucket=1,
                       offload="optimizer=disk", offload_dir=tmp_path,
                       offload_tile=8192)  # fmt: skip
        store = zero.store
        found.append(store.tiers["host"].held["buffers"] - store._staging.nbytes)
        zero.close()
    assert found == [TILE_SLOTS * 3 * 4 * 8192] * 2


# ---- budgets -------------------------------------------------------------------------------------


def test_model_of_four_times_the_budget_trains_with_offload_and_the_refusals_say_so(tmp_path):
    """16 psi bytes of states, a budget of less than a quarter, ranks of one and two."""
    psi = 100_000
    given = {f"a{i}": np.zeros(psi // 20, np.float32) for i in range(20)}
    options = {"bucket": 1, "device_memory": 16 * psi // 4, "offload_dir": tmp_path}
    for stage in toys.STAGES:
        with pytest.raises(zm.OverBudget, match=f"stage {stage} on 1 ranks needs ") as caught:
            zm.Zero(given, stage=stage, **options)
        assert (
            "the device has 400,000: the lowest rung that fits is stage 3 with "
            "offload=optimizer=host,gradients=host (or disk for host)" in str(caught.value)
        )
    for offload in ("optimizer=host,gradients=host", "optimizer=disk,gradients=disk"):
        zero = zm.Zero(given, stage=3, offload=offload, **options)
        zero.backward({name: np.ones(psi // 20) for name in given})
        assert zero.step().applied
        assert sum(zero.store.peak.values()) <= 4 * psi
        zero.close()


@pytest.mark.parametrize(
    ("share", "named"),
    [
        (12.0, "stage 3 with offload=optimizer=host "),
        (4.5, "stage 3 with offload=optimizer=host "),
        (3.0, "stage 3 with offload=optimizer=host,gradients=host "),
        (0.5, "stage 3 with offload=optimizer=host,gradients=host,parameters=host "),
        (0.01, "no stage fits, not even with all that can be moved"),
    ],
)
def test_lowest_rung_is_named_and_fits(share, named):
    psi, unit = 200_000, 1000
    given = {f"a{i}": np.zeros(unit, np.float32) for i in range(psi // unit)}
    budget = int(share * psi)
    with pytest.raises(zm.OverBudget) as caught:
        zm.Zero(given, stage=0, bucket=1, device_memory=budget)
    assert named in str(caught.value)
    if "offload=" in named:
        offload = named.split("offload=")[1].strip()
        zm.Zero(given, stage=3, bucket=1, device_memory=budget, offload=offload)
    lower = {"optimizer=host,gradients=host": "optimizer=host"}.get(
        named.split("offload=")[-1][:-1]
    )
    if lower:
        with pytest.raises(zm.OverBudget):
            zm.Zero(given, stage=3, bucket=1, device_memory=budget, offload=lower)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ("optimizer", "'optimizer' must be THING=TIER, as in optimizer=disk,gradients=host"),
        ("optimizer=disk=host", "must be THING=TIER"),
        ("optimiser=disk", "'optimiser' is unknown: use optimizer, gradients, parameters"),
        ("optimizer=tape", "optimizer='tape' is no tier: use device, host, disk"),
        ("optimizer=", "optimizer='' is no tier"),
        ("optimizer=disk,optimizer=host", "names a thing twice"),
        ({"optimizer": None}, "optimizer=None is no tier"),
        ({"master": "disk"}, "'master' is unknown"),
    ],
)
def test_wrong_placement_is_refused_on_all_ranks(offload, words):
    def run(world):
        with pytest.raises(ValueError, match=words):
            zm.Zero({"w": np.ones(9)}, world=world, stage=3, offload=offload)

    zm.threads(2, run, timeout=20)


def test_placement_is_read_as_people_write_it():
    assert Placement.parse(" optimizer = disk , gradients=host,") == Placement("disk", "host")
    assert str(Placement("disk", "host")) == "optimizer=disk,gradients=host"
    assert Placement.parse("") == Placement.parse({}) == Placement()
    assert str(Placement()) == "none"
    for tile in (4095, 0, 1e6, "big"):
        with pytest.raises(ValueError, match=r"offload_tile=.* must be a whole number, at least"):
            Placement.parse("", tile)


@pytest.mark.parametrize(
    ("stage", "offload", "words"),
    [
        (2, "parameters=host", "parameters=host needs stage 3 or higher, not 2: below, every rank"),
        (0, "parameters=disk", "needs stage 3"),
        (1, "gradients=disk", "gradients=disk needs stage 2 or higher, not 1"),
        (3, "activations=host", "activations=host needs an Engine with recompute=True"),
        (3, "optimizer=disk", "needs offload_dir, a folder on the disk to be used"),
    ],
)
def test_placement_that_makes_no_sense_is_refused(stage, offload, words):
    with pytest.raises(ValueError, match=words):
        zm.Zero({"w": np.ones(9)}, stage=stage, offload=offload)


def test_ranks_must_place_alike(tmp_path):
    def run(world):
        with pytest.raises(ValueError, match=r"settings must be the same on all ranks: .*offload"):
            zm.Zero({"w": np.ones(9)}, world=world, stage=3, offload_dir=tmp_path,
                    offload="optimizer=disk" if world.rank else "optimizer=host")  # fmt: skip

    zm.threads(2, run, timeout=20)
    assert not list(tmp_path.iterdir())


def test_folder_that_one_rank_lacks_stops_all(tmp_path):
    def run(world):
        folder = tmp_path / "nowhere" if world.rank else tmp_path
        with pytest.raises(FileNotFoundError, match=r"is not a folder: make it, .*\(on rank 1\)"):
            zm.Zero({"w": np.ones(9)}, world=world, stage=3, offload_dir=folder,
                    offload="optimizer=disk")  # fmt: skip

    zm.threads(2, run, timeout=20)
    import gc

    gc.collect()
    assert not list(tmp_path.iterdir())


# ---- NUMA ----------------------------------------------------------------------------------------

with_numa = pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").exists() or platform.machine() not in numa.SYS_MBIND,
    reason="no NUMA nodes here",
)


@with_numa
def test_host_memory_is_bound_to_the_node(tmp_path):
    engine = engine_of(tmp_path, offload=placed("host", "host", "host", "host"), host_numa_node=0)
    plain = engine_of(tmp_path, offload=placed("host", "host", "host", "host"))
    master = engine.zero.optimizer.states[0].master
    assert policy_at(master) == "bind:0"
    assert policy_at(engine.zero.gradients.arrays[0]) == "bind:0"
    bound = Store(placement=Placement(activations="host"), numa_node=0)
    assert policy_at(bound.stack([100]).put(np.ones(25, np.float32)).array) == "bind:0"
    assert policy_at(plain.zero.optimizer.states[0].master) == "default"
    assert repr(train(engine)) == repr(train(plain))
    assert finish(engine, [], 3)[1:] == finish(plain, [], 3)[1:]


def policy_at(array):
    """Memory policy that the system has for the pages of an array."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        address, policy, *_ = line.split()
        begin = int(address, 16)
        if begin <= array.ctypes.data:
            found = policy
    return found


@with_numa
@pytest.mark.parametrize("node", [99, -1])
def test_node_that_is_not_there_is_refused(node):
    with pytest.raises(ValueError, match=rf"host_numa_node={node}: the NUMA nodes .* are \[0"):
        zm.Zero({"w": np.ones(9)}, stage=3, offload="optimizer=host", host_numa_node=node)


# ---- the store's own verbs -----------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_stack_gives_back_in_reverse_order(tmp_path, tier):
    from zeromp.store import Disk

    disk = Disk(tmp_path, "job", 0, 1, "cached", False) if tier == "disk" else None
    store = Store(placement=Placement(activations=tier), disk=disk)
    arrays = [np.random.default_rng(i).standard_normal((i + 1, 7)).T for i in range(6)]
    for _ in range(3):
        stack = store.stack([a.nbytes for a in arrays])
        tickets = [stack.put(a) for a in arrays]
        for array, ticket in zip(arrays[::-1], tickets[::-1], strict=True):
            assert np.array_equal(stack.take(ticket), array)
    with pytest.raises(AssertionError, match="reverse order") if tier != "device" else nothing():
        stack = store.stack([a.nbytes for a in arrays])
        tickets = [stack.put(a) for a in arrays]
        stack.take(tickets[0])
    store.close()


def nothing():
    from contextlib import nullcontext

    return nullcontext()
