"""K04 of cases.md: the gradient's norm, and clipping."""

import numpy as np
import pytest
from toys import PINNED, STAGES, Ref, arrays, cut, gradient, mean_gradient, start, state

import zeromp as zm


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=20)


def equal_on_all(results):
    assert len({repr(r) for r in results}) == 1, results
    return results[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_o017_the_norm_is_that_before_clipping(stage, wire):
    given = {"a": np.zeros(7), "b": np.zeros(5)}
    g = {"a": np.full(7, 3.0), "b": np.full(5, 4.0)}

    def train(world):
        zero = zm.Zero(given, world=world, stage=stage, wire=wire, optimizer=zm.AdamW(**PINNED))
        zero.backward(g)
        report = zero.step(clip=1.0)
        moments = {name: zero.moments(name)["m"] for name in given}
        return report, zero.grad_norm(), moments

    for report, norm, m in threads(2, train):
        assert norm == report.grad_norm == pytest.approx(11.958261, abs=1e-6)
        assert report.clip_factor == pytest.approx(1 / 11.958261, rel=1e-7)
        for name in given:
            np.testing.assert_allclose(m[name], 0.1 * g[name] / 11.958261, rtol=1e-6)
        used = np.concatenate([m["a"], m["b"]]) / 0.1
        assert np.linalg.norm(used) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_o017_a_norm_below_the_limit_is_left_alone(stage):
    zero = zm.Zero({"w": np.ones(3)}, stage=stage, wire="float32", optimizer=zm.SGD(momentum=0.0))
    assert zero.grad_norm() is None
    zero.backward({"w": np.array([0.6, 0.0, 0.8])})
    report = zero.step(clip=2.0)
    assert report.clip_factor == 1.0
    np.testing.assert_array_equal(zero.moments("w")["m"], np.float32([0.6, 0.0, 0.8]))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_o018_equal_data_on_all_ranks_have_the_norm_of_one_rank(stage, num_ranks):
    n, cuts = 101, [40, 1, 60]

    def train(world):
        zero = zm.Zero(arrays(n, cuts), world=world, stage=stage, wire="float32", bucket=41)
        zero.backward(cut(gradient(n, 0, 1), cuts))
        return zero.step().grad_norm

    norm = equal_on_all(threads(num_ranks, train))
    assert norm == pytest.approx(np.linalg.norm(gradient(n, 0, 1)), rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", range(4))
def test_o019_ranks_with_unequal_shards_clip_alike(stage, where):
    n, num_ranks = 40, 4
    g = np.where(np.arange(n) // 10 == where, gradient(n, 0, 1), 0.0)

    def train(world):
        rule = zm.SGD(lr=0.1, momentum=0.0)
        zero = zm.Zero(
            {"w": start(n)}, world=world, stage=stage, wire="float32", optimizer=rule, poison=True
        )
        zero.backward({"w": g})
        report = zero.step(clip=0.5)
        return report, zero.moments("w")["m"].tobytes()

    report, m = equal_on_all(threads(num_ranks, train))
    norm = np.linalg.norm(g)
    assert norm > 0.5
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    assert report.clip_factor == pytest.approx(0.5 / norm, rel=1e-6)
    np.testing.assert_allclose(np.frombuffer(m, np.float32), g * 0.5 / norm, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize(("value", "tolerance"), [(300.0, 1e-5), (1e-5, 1e-2)])
def test_o020_the_norm_is_not_computed_in_16_bits(stage, wire, value, tolerance):
    n = 1_000_000
    given = {"w": np.zeros(n, np.float32)}
    g = {"w": np.full(n, value, np.float32)}

    def train(world):
        zero = zm.Zero(given, world=world, stage=stage, wire=wire, loss_scale=1.0)
        zero.backward(g)
        return zero.step()

    report = equal_on_all(threads(2, train))
    assert report.applied
    assert report.grad_norm == pytest.approx(value * 1000, rel=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_o021_clipping_does_not_depend_on_the_number_of_micro_batches(stage, optimizer):
    n, cuts, num_ranks = 23, [9, 14], 2
    momentum = None if optimizer == "adamw" else 0.9

    def train(world, num_micro):
        rule = zm.AdamW(**PINNED) if momentum is None else zm.SGD(momentum=momentum, **PINNED)
        zero = zm.Zero(
            arrays(n, cuts),
            world=world,
            stage=stage,
            wire="float32",
            optimizer=rule,
            micro_batches=num_micro,
        )
        norms = []
        for t in (1, 2, 3):
            parts = np.array([gradient(n, world.rank, t, m) for m in range(4)])
            for g in parts.reshape(num_micro, -1, n).mean(axis=1):
                zero.backward(cut(g, cuts))
            norms.append(zero.step(clip=0.5).grad_norm)
        return norms, state(zero)

    ref = Ref(start(n), momentum=momentum, settings={"lr": 0.01, "wd": 0.1})
    expected = [ref.step(mean_gradient(n, num_ranks, t, 4), clip=0.5) for t in (1, 2, 3)]
    assert min(expected) > 0.5
    for num_micro in (1, 2, 4):
        for norms, found in threads(num_ranks, lambda w, a=num_micro: train(w, a)):
            np.testing.assert_allclose(norms, expected, rtol=1e-6)
            np.testing.assert_allclose(found["full"], ref.p, atol=1e-6)
            np.testing.assert_allclose(found["m"], ref.m, atol=1e-6)
