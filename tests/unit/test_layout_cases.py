"""Cases K01 of shared/cases.md: shard layout without padding, at any size."""

from itertools import accumulate

import numpy as np
import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

import zeromp as zm
from zeromp import account
from zeromp.flat import Array, Layout, cuts

stages = pytest.mark.parametrize("stage", toys.STAGES)
SGD = {"lr": 0.01, "wd": 0.1}


def check_equals_ref(state, ref, wire="float32", tolerance=1e-6):
    """Masters, moments and, where weights are 16-bit, stored weights that are rounded masters."""
    np.testing.assert_allclose(state["master"], ref.p, rtol=0, atol=tolerance)
    for kind in state.keys() - {"full", "master"}:
        np.testing.assert_allclose(state[kind], getattr(ref, kind), rtol=0, atol=tolerance)
    assert (state["full"] == toys.rounded(state["master"], wire)).all()


def train(ranks, n, cut, stage, wire="float32", **options):
    """State of all ranks after three steps, their reports, and elements of each rank's shards."""

    def run(world):
        zero = toys.make(world, n, cut, stage, wire, **options)
        reports = toys.steps(zero, n, cut, 3)
        sizes = [flat.shard.size for flat in zero.layout.flats]
        return toys.state(zero), reports, sum(sizes)

    return zm.threads(ranks, run, debug=True)


@stages
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_o001_every_size_from_1_to_40(ranks, stage):
    """toy(820) cut into 1, 2, ..., 40: each array a unit of its own, cut without padding."""
    n, cut = 820, {f"n{k}": k for k in range(1, 41)}
    ref = toys.trained(n, ranks, 3)
    results = train(ranks, n, cut, stage, bucket=1)
    for state, reports, _ in results:
        check_equals_ref(state, ref)
        assert state["full"].size == n and all(r.applied for r in reports)
    assert sum(size for *_, size in results) == n


@stages
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 7, 13, 40])
def test_o001_one_unit_with_sgd(n, ranks, stage):
    """A gradient that is wrong by a factor shows; also the report's norm."""
    ref = toys.Ref(toys.start(n), momentum=0.9, settings=SGD)
    norms = [ref.step(toys.mean_gradient(n, ranks, t)) for t in (1, 2, 3)]
    rule = zm.SGD(lr=0.01, momentum=0.9, weight_decay=0.1)
    for state, reports, _ in train(ranks, n, [n], stage, optimizer=rule):
        check_equals_ref(state, ref)
        np.testing.assert_allclose([r.grad_norm for r in reports], norms, rtol=1e-5, atol=1e-7)


@given(st.integers(1, 200), st.integers(1, 16), st.data())
def test_o002_one_function_gives_offset_and_length(n, ranks, data):
    """Contiguous, no padding, summing up to n; the forecast of bytes cuts at the same places."""
    edges = cuts(n, ranks)
    assert edges[0] == 0 and edges[-1] == n and list(edges) == sorted(edges)
    parts = data.draw(st.lists(st.integers(0, n), max_size=3))
    sizes = [b - a for a, b in zip([0, *sorted(parts)], [*sorted(parts), n], strict=True)]
    arrays = tuple(Array(f"a{i}", "u", (size,)) for i, size in enumerate(sizes))
    layouts = [Layout(arrays, ranks, rank) for rank in range(ranks)]
    counts = layouts[0].flats[0].counts["u"]
    assert (0, *accumulate(counts)) == edges
    for layout in layouts:
        (flat,) = layout.flats
        low, high = edges[layout.rank], edges[layout.rank + 1]
        assert flat.piece["u"] == slice(low, high) == flat.full.own["u"]
        assert flat.shard.size == high - low and flat.counts["u"] == counts
        case = account.FlatCase("float32", True, {"u": n})
        assert case.pieces(ranks, layout.rank) == [high - low]


@stages
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ranks", "cut"), [(8, {"w": 3}), (8, {"w": 2, "bias": 1}), (5, {"w": (2, 2), "bias": 1})]
)
def test_o003_more_ranks_than_elements(ranks, cut, wire, stage):
    """All ranks call the same collectives (debug mode), also those that own nothing."""
    n = sum(int(np.prod(shape)) for shape in cut.values())
    groups = [zm.Group("bias", "bias")] if "bias" in cut else []
    ref = toys.trained(n, ranks, 3, wire)
    results = train(ranks, n, cut, stage, wire, groups=groups, bucket=4)
    for state, reports, _ in results:
        check_equals_ref(state, ref, wire)
        assert all(r.applied for r in reports)
    assert sum(size for *_, size in results) == n


@stages
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 1000])
@pytest.mark.parametrize("cut", [{"w": (4, 4), "empty": (0, 4)}, {"empty": (0, 4), "w": (4, 4)}])
def test_o004_array_without_elements(cut, bucket, ranks, stage):
    """Last or first, in the other's unit or one of its own; in a group and a flat of its own."""

    def run(world):
        group = zm.Group("none", "empty", weight_decay=0.0)
        for wire, keep in (("float32", ()), ("bfloat16", "empty")):
            zero = toys.make(
                world, 16, cut, stage, wire, groups=[group], bucket=bucket, keep_float32=keep
            )
            toys.steps(zero, 16, cut, 3)
            check_equals_ref(toys.state(zero), toys.trained(16, ranks, 3, wire), wire)
            assert zero.full("empty").shape == zero.master("empty").shape == (0, 4)
            assert {k: a.shape for k, a in zero.moments("empty").items()} == {
                "m": (0, 4),
                "v": (0, 4),
            }
            assert {u: w.keys() for u, w in zero.sweep()}.keys() == set(zero.layout.units)

    zm.threads(ranks, run, debug=True)


CUT = {"w": (3, 2), "bias": 3, "norm": 4}


@stages
def test_o005_patterns_may_be_sets_in_any_order(stage):
    """What sets yield first is not the same on two machines; nothing depends on it."""

    def run(world):
        order = [["w", "norm"], ["norm", "w"]][world.rank % 2]
        groups = [zm.Group("slow", dict.fromkeys(order), 0.5), zm.Group("bias", {"bias", "b*"})]
        zero = toys.make(world, 13, CUT, stage, "bfloat16", groups=groups,
                         keep_float32=set(order) - {"w"}, bucket=4)  # fmt: skip
        reports = toys.steps(zero, 13, CUT, 2)
        return toys.state(zero), [r.grad_norm for r in reports], zero.layout.table()

    results = zm.threads(2, run, debug=True)
    lr = np.r_[[0.005] * 6, [0.01] * 3, [0.005] * 4]
    ref = toys.Ref(toys.start(13), settings={"lr": lr})
    for t in (1, 2):
        exact, sent = toys.mean_gradient(13, 2, t), toys.sent_gradient(13, 2, t, "bfloat16")
        ref.step(np.r_[sent[:9], exact[9:]])
    for state, *rest in results:
        np.testing.assert_allclose(state["master"], ref.p, rtol=0, atol=1e-6)
        np.testing.assert_allclose(state["m"], ref.m, rtol=0, atol=1e-6)
        assert tuple(rest) == results[0][1:]


def reordered_arrays(world):
    """Arrays in another order on one rank."""
    arrays = toys.arrays(13, CUT)
    return {"params": dict(sorted(arrays.items(), reverse=world.rank == 1))}


def reordered_groups(world):
    groups = [zm.Group("a", "w"), zm.Group("b", "norm")]
    return {"groups": groups[:: -1 if world.rank == 1 else 1]}


def other_members(world):
    return {"groups": [zm.Group("a", ["w", "bias"] if world.rank == 1 else ["w", "norm"])]}


def other_shape(world):
    return {"params": toys.arrays(13, CUT | {"w": (2, 3) if world.rank == 1 else (3, 2)})}


def other_format(world):
    return {"keep_float32": "norm" if world.rank == 1 else ()}


def other_frozen(world):
    return {"frozen": "norm" if world.rank == 1 else ()}


@stages
@pytest.mark.parametrize(
    "given",
    [reordered_arrays, reordered_groups, other_members, other_shape, other_format, other_frozen],
)
def test_o005_ranks_that_differ_stop_at_construction(given, stage):
    """One message on all ranks, which names both sides."""

    def run(world):
        options = {"params": toys.arrays(13, CUT), **given(world)}
        words = r"settings must be the same on all ranks: rank 0 has .*rank 1 has"
        with pytest.raises(ValueError, match=words) as caught:
            zm.Zero(options.pop("params"), world=world, stage=stage, **options)
        return str(caught.value).replace(" (on rank 1)", "")

    assert len(set(zm.threads(3, run, debug=True, timeout=20))) == 1
