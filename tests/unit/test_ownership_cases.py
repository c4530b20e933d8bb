"""K02 of cases.md: who owns a parameter. Tied, frozen, unused arrays, missing gradients."""

import numpy as np
import pytest
from toys import PINNED, STAGES, WIRES, arrays, cut, feed, gradient, start, state, trained

import zeromp as zm

CUTS = {"a": (1, 5), "b": 3, "c": (2, 3)}
N = 14


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=20)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("giver", [0, 1])
def test_o006_a_gradient_missing_on_one_rank_counts_as_zeros(stage, giver):
    def train(world):
        rule = zm.SGD(lr=0.1, momentum=0.0)
        zero = zm.Zero(
            arrays(N, CUTS), world=world, stage=stage, wire="float32", optimizer=rule, poison=True
        )
        mine = cut(gradient(N, world.rank, 1), CUTS)
        if world.rank != giver:
            del mine["b"]
        zero.backward(mine)
        zero.step()
        return zero.moments("b")["m"], zero.full("b"), zero.full("c")

    g = [cut(gradient(N, rank, 1), CUTS) for rank in range(2)]
    p = cut(start(N), CUTS)
    for m, b, c in threads(2, train):
        np.testing.assert_allclose(m, g[giver]["b"] / 2, atol=1e-6)
        np.testing.assert_allclose(b, p["b"] - 0.1 * g[giver]["b"] / 2, atol=1e-6)
        np.testing.assert_allclose(c, p["c"] - 0.1 * (g[0]["c"] + g[1]["c"]) / 2, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_o006_no_gradient_at_all_is_a_step_of_zeros(stage, wire):
    def train(world):
        rule = zm.AdamW(**PINNED)
        zero = zm.Zero(arrays(N, CUTS), world=world, stage=stage, wire=wire, optimizer=rule)
        feed(zero, N, CUTS, 1)
        zero.step()
        before = zero.moments("a")["m"]
        zero.backward({})
        assert zero.step().grad_norm == 0
        return before, zero.moments("a")["m"]

    for before, after in threads(2, train):
        np.testing.assert_allclose(after, 0.9 * before, rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_o007_gradients_in_another_order_on_each_rank(stage, momentum):
    settings = {"lr": 0.01, "wd": 0.1}

    def train(world):
        rule = zm.AdamW(**PINNED) if momentum is None else zm.SGD(momentum=momentum, **PINNED)
        zero = zm.Zero(
            arrays(N, CUTS), world=world, stage=stage, wire="float32", optimizer=rule, bucket=4
        )
        for t in (1, 2, 3):
            g = cut(gradient(N, world.rank, t), CUTS)
            zero.backward(g if world.rank == 0 else {name: g[name] for name in reversed(g)})
            zero.step()
        return state(zero)

    ref = trained(N, 2, 3, momentum=momentum, settings=settings)
    for found in threads(2, train):
        np.testing.assert_allclose(found["full"], ref.p, atol=1e-6)
        np.testing.assert_allclose(found["m"], ref.m, atol=1e-6)
        if momentum is None:
            np.testing.assert_allclose(found["v"], ref.v, atol=1e-6)


def five(pattern=lambda n: np.arange(n) / 8):
    """Five arrays, two of them of a pattern that every format can hold."""
    sizes = {"a": 7, "frozen.0": 5, "b": 4, "frozen.1": 6, "c": 3}
    return {
        name: pattern(size) if name.startswith("frozen") else np.cos(np.arange(size))
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
def test_o008_frozen_arrays_keep_their_bytes_and_their_names(stage, wire):
    given = five()

    def train(world):
        zero = zm.Zero(
            given,
            world=world,
            stage=stage,
            wire=wire,
            frozen="frozen.*",
            bucket=8,
            loss_scale=1.0,
            poison=True,
        )
        for _ in range(3):
            zero.backward({name: np.full(given[name].shape, 0.5) for name in ("a", "b", "c")})
            assert zero.step().applied
        assert zero.names == list(given)
        assert zero.moments("frozen.1") == {}
        with zero.gathered("frozen.1") as unit:
            gathered = dict(unit)
        return {name: zero.full(name) for name in zero.names}, gathered

    for full, gathered in threads(3, train):
        assert list(full) == list(given)
        for name in ("frozen.0", "frozen.1"):
            assert full[name].tobytes() == given[name].astype(np.float32).tobytes()
        assert gathered["frozen.1"].tobytes() == full["frozen.1"].tobytes()
        assert not np.array_equal(full["a"], given["a"])


@pytest.mark.parametrize("stage", STAGES)
def test_o008_a_gradient_for_a_frozen_array_is_refused_on_all_ranks(stage):
    def train(world):
        zero = zm.Zero(five(), world=world, stage=stage, frozen="frozen.*")
        with pytest.raises(ValueError, match=r"'frozen\.1' is frozen"):
            zero.backward({"frozen.1": np.ones(6)} if world.rank == 1 else {})

    threads(2, train)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("how", ["by name", "by object"])
def test_o009_tied_arrays_are_one_parameter_with_two_names(stage, wire, how):
    table, other = np.cos(np.arange(12.0)).reshape(4, 3), np.ones(5)
    given = {"wte": table, "b": other, "head": table if how == "by object" else table.copy()}
    tied = {"head": "wte"} if how == "by name" else {}

    def train(world):
        zero = zm.Zero(
            given,
            world=world,
            stage=stage,
            wire=wire,
            tied=tied,
            optimizer=zm.SGD(lr=0.5, momentum=0.0),
            loss_scale=1.0,
            poison=True,
        )
        assert set(zero.names) == {"wte", "head", "b"}
        found = []
        for _ in range(8):
            zero.backward({"head": np.full((4, 3), 0.25), "wte": np.full((4, 3), 0.5)})
            zero.step()
            found.append((zero.full("wte"), zero.full("head"), zero.moments("head")["m"]))
        with zero.gathered("head", edit=True) as unit:
            assert unit["head"] is unit["wte"]
        return found, zero.store.held["parameters"]

    results = threads(2, train)
    for found, _ in results:
        for wte, head, m in found:
            assert wte.tobytes() == head.tobytes()
            np.testing.assert_array_equal(m, np.full((4, 3), 0.75))  # both gradients count
        np.testing.assert_allclose(found[-1][0], table - 8 * 0.5 * 0.75, rtol=2**-7)
    itemsize = 4 if wire == "float32" else 2
    bytes_held = sum(held for _, held in results) / (1 if stage == 3 else 2)
    assert bytes_held == 17 * itemsize  # stored once


def test_o010_frozen_parameters_cost_no_optimizer_memory():
    n, num_ranks = 10_000_000, 2
    sizes = {"a": 4 * n // 10, "b": 5 * n // 10, "trained": n // 10}
    given = {name: np.zeros(size, np.float32) for name, size in sizes.items()}

    def hold(world):
        zero = zm.Zero(given, world=world, stage=1, wire="float32", frozen=["a", "b"])
        measured = [a for s in zero.optimizer.states for a in s.moments.values()]
        return zero.store.held["m"] + zero.store.held["v"], sum(a.nbytes for a in measured)

    for reported, measured in threads(num_ranks, hold):
        assert reported == measured == pytest.approx(8 * 0.1 * n / num_ranks, rel=0.01)
