"""Checkpoints: what comes back, at the same number of ranks and at any other."""

import random
import re
import shutil
import subprocess
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import h5py
import numpy as np
import pytest
import saved
import toys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved import CUTS, N

import zeromp as zm
from zeromp.checkpoint import Checkpoint, Mismatch, complete, find
from zeromp.checkpoint.files import TILE_BYTES
from zeromp.checkpoint.names import boxes, paths

# ---- resume --------------------------------------------------------------------------------------


def gpt(world, stage, wire, **options):
    model = zm.models.gpt(31, 1, 10, 2, 6, 0.2)
    scale = {"loss_scale": 2.0**14, "loss_scale_window": 2} if wire == "float16" else {}
    return zm.Engine(
        model, world=world, stage=stage, wire=wire, seed=3,
        **{"optimizer": zm.AdamW(lr=1e-2), **scale, **options},
    )  # fmt: skip


def losses(engine, steps):
    found = []
    for _ in range(steps):
        rng = np.random.default_rng([engine.zero.attempts, engine.world.rank])
        x = rng.integers(0, 31, (2, 6))
        found.append(engine.backward(x, (x + 1) % 31))
        found.append(engine.step(clip=1.0).loss_scale)
    return found


@pytest.mark.parametrize(
    ("stage", "wire", "options"),
    [
        (0, "bfloat16", {}),
        (1, "float16", {}),
        (2, "float32", {}),
        (3, "bfloat16", {"keep_float32": ["*ln*"], "optimizer": zm.SGD(lr=0.1)}),
        (3, "float16", {"frozen": ["blocks.0.*"]}),
    ],
)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, stage, wire, options):
    """O-039: five more losses, loss scales, and all numbers after them; dropout and seed too."""

    def straight(world):
        engine = gpt(world, stage, wire, **options)
        losses(engine, 3)
        engine.save(tmp_path)
        return losses(engine, 5), saved.state(engine.zero), engine.zero.state()

    def resumed(world):
        engine = gpt(world, stage, wire, **options)
        engine.seed = 99  # the checkpoint's is used
        losses(engine, 1)
        engine.load(tmp_path)
        assert engine.seed == 3
        return losses(engine, 5), saved.state(engine.zero), engine.zero.state()

    for a, b in zip(zm.threads(3, straight), zm.threads(3, resumed), strict=True):
        assert a[0] == b[0] and a[2] == b[2]
        saved.same(a[1], b[1])
        assert a[2]["attempts"] == 8 and a[2]["applied"] > 5
        assert wire != "float16" or len(set(a[0][1::2])) > 1  # the scale has moved


def test_loss_scale_comes_back_with_its_counters(tmp_path):
    def run(world):
        zero = toys.make(world, N, CUTS, 1, "float16", hysteresis=3, loss_scale_window=50)
        saved.train(zero, CUTS, 2)
        zero.backward({"b": np.full(7, np.inf)})
        zero.step()
        saved.train(zero, CUTS, 1)
        zero.save(tmp_path)
        again = toys.make(world, N, CUTS, 2, "float16", hysteresis=3, loss_scale_window=50)
        again.load(tmp_path)
        return zero.state(), asdict(zero.loss_scaling), again.state(), asdict(again.loss_scaling)

    state, scale, other_state, other_scale = zm.threads(2, run)[0]
    assert (state, scale) == (other_state, other_scale)
    assert state["skipped"] == 1 and scale["tolerance"] == 2 and scale["good_steps"] == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_refreshed_from_masters(tmp_path, stage):
    """O-040, O-008: `load` helpers start from 77s; every rank sees the rounded masters."""
    before, _ = saved.save(tmp_path, stage=0, frozen=["b", "c.w"])
    for state, _, zero in saved.load(tmp_path, ranks=4, stage=stage, frozen=["b", "c.w"]):
        saved.same(state, before)
        for name in zero.names:
            rounded = toys.rounded(state["master", name].reshape(-1), "bfloat16")
            assert state["full", name].tobytes() == rounded.tobytes()


def test_random_states_of_each_rank(tmp_path):
    """O-041: NumPy's generators, old and new, and Python's."""

    def draw(generators, count):
        new, old, python = generators
        return [new.random(count).tolist(), old.rand(count).tolist(), python.random()]

    def make(seed):
        return np.random.default_rng(seed), np.random.RandomState(seed), random.Random(seed)

    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        new, old, python = generators = make(world.rank)
        draw(generators, 5)
        name, keys, *rest = old.get_state()
        own = [new.bit_generator.state, [name, keys.tolist(), *rest], python.getstate()]
        zero.save(tmp_path, rank_extra=own)
        return draw(generators, 5)

    def again(world):
        zero = toys.make(world, N, CUTS, 3)
        new, old, python = generators = make(77)
        of_new, of_old, (version, keys, gauss) = zero.load(tmp_path).rank_extra
        new.bit_generator.state = of_new
        old.set_state(tuple(of_old))
        python.setstate((version, tuple(keys), gauss))
        return draw(generators, 5)

    a = zm.threads(4, run)
    assert a == zm.threads(4, again)
    assert len({repr(x) for x in a}) == 4
    assert saved.load(tmp_path, ranks=2, wire="float32")[1][1].rank_extra is None


def test_place_in_the_data(tmp_path):
    """O-042: 64 samples in an order of their own, 20 used before the save."""
    order = np.random.default_rng(5).permutation(64)

    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        zero.save(tmp_path, extra={"samples": 20, "seed": 5})
        report = toys.make(world, N, CUTS, 1).load(tmp_path)
        rest = np.random.default_rng(report.extra["seed"]).permutation(64)[
            report.extra["samples"] :
        ]
        return rest[world.rank :: 2]

    a, b = zm.threads(2, run)
    assert sorted([*a, *b]) == sorted(order[20:]) and len(a) == len(b) == 22


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_weights_only(tmp_path, wire):
    """O-043: masters are the weights; moments and counters start at zero."""
    before, _ = saved.save(tmp_path, wire=wire)

    def run(world):
        zero = toys.make(world, N, CUTS, 2, wire)
        saved.train(zero, CUTS, 2)
        zero.load(tmp_path, weights_only=True)
        assert zero.state()["attempts"] == zero.applied == 0
        loaded = saved.state(zero)
        toys.feed(zero, N, CUTS, 1)
        zero.step(lr=0.0)
        still = toys.whole(zero.full, zero.names)
        zero.load(tmp_path, weights_only=True)
        toys.steps(zero, N, CUTS, 2)
        return loaded, still, toys.whole(zero.master, zero.names)

    loaded, still, trained = zm.threads(3, run)[0]
    for (kind, name), values in loaded.items():
        if kind in ("full", "master"):
            assert values.tobytes() == before[kind, name].tobytes()
        else:
            assert not values.any()
    weights = {
        k: np.concatenate([before[k, n].reshape(-1) for n in CUTS]) for k in ("full", "master")
    }
    assert still.tobytes() == weights["full"].tobytes()
    ref = toys.Ref(weights["master"])
    for t in (1, 2):
        ref.step(toys.sent_gradient(N, 3, t, wire))
    assert np.abs(trained - ref.p).max() < 1e-6


# ---- from any to any -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_another_number_of_ranks(tmp_path, ranks):
    """O-045, O-003: also with ranks that own nothing of some arrays; three more steps equal ref."""
    before, _ = saved.save(tmp_path, ranks=4, wire="float32")
    for state, report, zero in saved.load(tmp_path, ranks=ranks, wire="float32"):
        saved.same(state, before)
        assert zero.applied == 3 and report.record["num_ranks"] == 4
    state = saved.load(tmp_path, ranks=ranks, wire="float32", more=3)[0][0]
    ref = toys.Ref(toys.start(N))
    for t in range(1, 7):
        ref.step(toys.mean_gradient(N, 4 if t <= 3 else ranks, t))
    whole = np.concatenate([state["master", name].reshape(-1) for name in CUTS])
    assert np.abs(whole - ref.p).max() < 2e-6


def test_moments_by_name_and_index(tmp_path):
    """O-046, O-048: groups of 30 and 27; one large array and many small ones."""
    for i, cuts in enumerate(({"a": 30, "b": 27}, {"big": 1000} | {f"x{i}": 3 for i in range(50)})):
        before, _ = saved.save(tmp_path / str(i), ranks=2, cuts=cuts)
        for ranks in (3, 4):
            for state, _, _ in saved.load(tmp_path / str(i), ranks=ranks, cuts=cuts):
                saved.same(state, before)


SHAPES = st.lists(
    st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6
).filter(lambda shapes: any(np.prod(s) > 0 for s in shapes))
STAGE = st.integers(0, 3)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=SHAPES,
    ranks=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    stages=st.tuples(STAGE, STAGE),
    wires=st.tuples(st.sampled_from(toys.WIRES), st.sampled_from(toys.WIRES)),
    odd=st.tuples(st.booleans(), st.booleans()),
    sgd=st.booleans(),
)
def test_any_to_any(tmp_path_factory, shapes, ranks, stages, wires, odd, sgd):
    """Every tensor has the same bytes, at any N, stage and format; it reads the predicted bytes."""
    folder = tmp_path_factory.mktemp("any")
    cuts = {f"u.{i}": shape for i, shape in enumerate(shapes)}
    rule = zm.SGD(lr=0.1) if sgd else zm.AdamW(**toys.PINNED)
    options = {"optimizer": rule, "bucket": 11}
    keeps = [{"keep_float32": ["u.0"]} if x else {} for x in odd]
    before, path = saved.save(folder, ranks[0], stages[0], wires[0], 2, cuts, **options, **keeps[0])
    found = saved.load(folder, ranks[1], stages[1], wires[1], cuts, **options, **keeps[1])
    for state, _, zero in found:
        for key, values in before.items():
            if key[0] != "full":
                assert state[key].tobytes() == values.tobytes(), key
        for name in cuts:
            rounded = toys.rounded(before["master", name].reshape(-1), zero.dtype(name))
            assert state["full", name].tobytes() == rounded.tobytes()
    with Checkpoint(path) as checkpoint, h5py.File(folder / "model.h5") as file:
        assert checkpoint.verify() == []
        for name in cuts:
            whole = file[name.replace(".", "/")][...]
            assert whole.tobytes() == before["master", name].tobytes()
            for kind in rule.states:
                assert checkpoint.read(kind, name).tobytes() == before[kind, name].tobytes()


def test_files_do_not_depend_on_stage_or_wire(tmp_path):
    """The same numbers give the same bytes."""
    files = {}
    for stage in range(4):
        for wire in ("float32", "bfloat16"):
            folder = tmp_path / f"{stage}{wire}"
            path = saved.save(folder, stage=stage, wire=wire, steps=0)[1]
            files[stage, wire] = [(path / f"rank0000{r}.h5").read_bytes() for r in range(3)]
    assert all(f == files[0, "float32"] for f in files.values())


def test_each_rank_reads_its_share(tmp_path):
    """O-047, O-057: bytes read, by the kernel's count too, and memory beyond what is held."""
    cuts = {"a": (700, 1000), "b": (600, 1000), "c": 12345}
    _, path = saved.save(tmp_path, ranks=8, wire="float32", steps=0, cuts=cuts)
    total = 12 * saved.size_of(cuts)
    for ranks in (8, 6):
        reports = [report for _, report, _ in saved.load(tmp_path, ranks=ranks, cuts=cuts)]
        assert sum(r.bytes_read for r in reports) == total
        assert max(r.bytes_read for r in reports) < total / ranks + 100
    files = [shard.num_bytes for shard in Checkpoint(path).files]
    assert [r.bytes_verified for r in reports] == [files[0] + files[6], files[1] + files[7],
                                                  *files[2:6]]  # fmt: skip

    def io():
        return int(Path("/proc/self/io").read_text().split()[1])

    zero = toys.make(zm.alone(), saved.size_of(cuts), cuts, 1, "bfloat16")
    before = io()
    zero.load(tmp_path)
    assert total <= io() - before < 2 * total + 2**19
    tracemalloc.start()
    try:
        for work in (lambda: zero.load(tmp_path), lambda: zero.save(tmp_path / "new")):
            tracemalloc.reset_peak()
            base = tracemalloc.get_traced_memory()[0]
            work()
            assert tracemalloc.get_traced_memory()[1] - base < TILE_BYTES + 2**19
    finally:
        tracemalloc.stop()


# ---- names ---------------------------------------------------------------------------------------


def test_tied_arrays_are_stored_once_and_seen_twice(tmp_path):
    """O-009: both names in the file; after more steps still one array."""

    def run(world):
        w = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
        zero = zm.Zero({"wte": w, "head": w, "b": w[0].copy()}, world=world, stage=3)
        zero.backward({"wte": w, "b": w[0]})
        zero.step()
        zero.save(tmp_path)
        again = zm.Zero({"wte": w, "head": w, "b": w[0].copy()}, world=world, stage=1)
        again.load(tmp_path)
        for _ in range(5):
            again.backward({"head": w})
            again.step()
        assert again.full("wte").tobytes() == again.full("head").tobytes()
        return zero.master("head")

    head = zm.threads(2, run)[0]
    with h5py.File(tmp_path / "model.h5") as file:
        assert file["head"] == file["wte"] and file["head"][:].tobytes() == head.tobytes()
    with Checkpoint(find(tmp_path)) as checkpoint:
        assert [a.name for a in checkpoint.arrays] == ["wte", "b"]
        assert checkpoint.read("m", "head").shape == (3, 4)
        assert sum(d.size for f in checkpoint.contents.files for d in f.datasets
                   if d.name == "flat0/master") == 16  # fmt: skip
    with Checkpoint(find(tmp_path)) as checkpoint, pytest.raises(ValueError, match="no array 'x'"):
        checkpoint.read("m", "x")


def test_paths_never_meet():
    names = ["a", "a.b", "a/b", "state.m", "zeromp", "x.y", "x", "", "p..q", "a_"]
    found = paths(names)
    assert found["a"] == "a" and found["x.y"] == "x/y" and found["a.b"] == "a_/b"
    assert len(set(found.values())) == len(names)
    for path in found.values():
        assert path.split("/")[0] not in ("state", "zeromp")
        assert not any(other.startswith(path + "/") for other in found.values())


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), data=st.data())
def test_boxes_cover_a_range_in_order(shape, data):
    size = int(np.prod(shape))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    found = boxes(shape, low, high)
    index = np.arange(size).reshape(shape)
    cut = [index[tuple(slice(s, s + c) for s, c in zip(*box, strict=True))] for box in found]
    assert np.array_equal(np.concatenate([[], *(c.reshape(-1) for c in cut)]), np.arange(low, high))
    assert len(found) <= 2 * len(shape) - 1


def test_the_folder_can_be_moved_and_read_from_elsewhere(tmp_path, monkeypatch):
    before, _ = saved.save(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    for master in ("new/model.h5", "new/step-00000003/model.h5"):
        with h5py.File(master) as file:
            assert file["c/w"].shape == (3, 2, 5)
            assert (
                file["c/w"][1:, :, 2:4].tobytes() == before["master", "c.w"][1:, :, 2:4].tobytes()
            )
            assert file["state/v/a/w"][:].tobytes() == before["v", "a.w"].tobytes()
            assert file["s"][()] == before["master", "s"]
    saved.same(saved.load("new")[0][0], before)
    saved.same(saved.load("new/step-00000003")[0][0], before)
    saved.same(saved.load(tmp_path / "new/step-00000003", ranks=1)[0][0], before)


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="needs h5dump")
def test_h5dump_reads_it(tmp_path):
    before, _ = saved.save(tmp_path)
    command = ["h5dump", "-y", "-w", "0", "-m", "%.9g", "-d", "/c/w", tmp_path / "model.h5"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"DATA \{(.*?)\}", text, re.DOTALL)[1].replace(",", " ").split()
    found = np.array(numbers, np.float32).reshape(3, 2, 5)
    assert found.tobytes() == before["master", "c.w"].tobytes()


def test_frozen_bfloat16_is_a_number_to_every_tool(tmp_path):
    """In a rank's own file too, where it takes two bytes."""
    before, path = saved.save(tmp_path, ranks=1, frozen=["c.w"])
    with h5py.File(path / "rank00000.h5") as file:
        stored = file["flat1/parameters"]
        assert stored.id.get_storage_size() == 2 * 30
        assert stored[:].tobytes() == before["full", "c.w"].tobytes()
    saved.same(saved.load(tmp_path, ranks=2, frozen=["c.w"])[0][0], before)


# ---- what does not fit ---------------------------------------------------------------------------


def test_mismatches_are_listed(tmp_path):
    saved.save(tmp_path)
    cuts = {"a.w": (4, 5), "new": 3, "b": 7, "s": (), "e": (0, 4), "c.w": (3, 2, 5)}
    with pytest.raises(Mismatch) as caught:
        saved.load(tmp_path, cuts=cuts)
    for line in (
        r"shape of a.w: (5, 4) there, (4, 5) here",
        "missing in the checkpoint: new (3,)",
        "missing here: a.b (1,)",
    ):
        assert line in str(caught.value)


def test_another_optimizer(tmp_path, capsys):
    saved.save(tmp_path)
    with pytest.raises(Mismatch, match="AdamW with m, v there, SGD with m here"):
        saved.load(tmp_path, optimizer=zm.SGD())
    saved.load(tmp_path, optimizer=zm.SGD(), how={"weights_only": True})
    saved.load(tmp_path, optimizer=zm.AdamW(lr=0.5, weight_decay=0.1))
    assert "note: lr was 0.01 in the checkpoint; 0.5 is used now" in capsys.readouterr().out


def test_frozen_there_and_trained_here(tmp_path, capsys):
    saved.save(tmp_path / "frozen", frozen=["b"])
    with pytest.raises(Mismatch, match="moments of b are missing: it was frozen"):
        saved.load(tmp_path / "frozen")
    saved.load(tmp_path / "frozen", how={"weights_only": True})
    saved.save(tmp_path / "trained")
    saved.load(tmp_path / "trained", frozen=["b"])
    assert "moments of b are not used: it is frozen here" in capsys.readouterr().out


def test_save_refuses_what_it_can_not_keep(tmp_path):
    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        toys.feed(zero, N, CUTS, 1)
        with pytest.raises(ValueError, match="save between steps: 1 micro-batches"):
            zero.save(tmp_path)
        zero.zero_grad()
        with pytest.raises(ValueError, match="extra must be made of what JSON has"):
            zero.save(tmp_path, extra={"x": object()})
        with pytest.raises(ValueError, match="keep=0 must be at least 1"):
            zero.save(tmp_path, keep=0)
        with pytest.raises(ValueError, match="extra must be the same on all ranks"):
            zero.save(tmp_path, extra={"rank": world.rank})

    zm.threads(2, run)
    assert list(tmp_path.iterdir()) == [] and complete(tmp_path) == []
