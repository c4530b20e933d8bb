"""K05 of cases.md: accumulation over micro-batches, averaging over ranks."""

import math

import numpy as np
import pytest
from toys import (
    PINNED,
    SCALE,
    STAGES,
    WIRES,
    Ref,
    arrays,
    cut,
    feed,
    gradient,
    mean_gradient,
    rounded,
    start,
    state,
    whole,
)

import zeromp as zm

N, CUTS = 17, [6, 8, 3]


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=20)


def make(world=None, stage=1, wire="float32", optimizer=None, **options):
    """A Zero of the toy; plain SGD keeps as "m" the gradient that the step was made with."""
    options = {"loss_scale": SCALE.get(wire), "poison": True} | options
    rule = optimizer or zm.SGD(lr=0.1, momentum=0.0)
    return zm.Zero(arrays(N, CUTS), world=world, stage=stage, wire=wire, optimizer=rule, **options)


def used(zero):
    """The gradient that a plain SGD step has used."""
    return whole(lambda name: zero.moments(name)["m"], zero.names)


@pytest.mark.parametrize("stage", STAGES)
def test_o022_more_backwards_than_declared_are_refused_on_all_ranks(stage):
    def train(world):
        zero = make(world, stage)
        feed(zero, N, CUTS, 1)
        with pytest.raises(ValueError, match="pass micro_batches=2"):
            feed(zero, N, CUTS, 1)
        report = zero.step()  # the first backward still counts
        assert report.applied
        return used(zero)

    for found in threads(2, train):
        np.testing.assert_allclose(found, mean_gradient(N, 2, 1), atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_o022_all_declared_backwards_count(stage):
    def train(world):
        zero = make(world, stage, micro_batches=3)
        feed(zero, N, CUTS, 1, micros=3)
        zero.step()
        return used(zero)

    for found in threads(2, train):
        np.testing.assert_allclose(found, mean_gradient(N, 2, 1, 3), atol=1e-6)


def accumulated(stage, wire, num_ranks, num_micro):
    """Mean gradient when it is sent in a 16-bit format: rounded when sent, and when reduced."""
    g = np.array(
        [[gradient(N, r, 1, m) for m in range(num_micro)] for r in range(num_ranks)], np.float32
    )
    if stage < 2:  # one message per step: the sum over micro-batches
        sums = rounded(g.sum(axis=1), wire)
        return rounded(sums.mean(axis=0), wire) / num_micro
    each = [rounded(rounded(g[:, m], wire).mean(axis=0), wire) for m in range(num_micro)]
    return np.mean(each, axis=0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("reduce_wire", [None, "float32"])
def test_o023_every_micro_batch_of_every_rank_is_in_the_mean(stage, reduce_wire):
    def train(world):
        zero = make(world, stage, "bfloat16", micro_batches=4, reduce_wire=reduce_wire)
        assert all(a.dtype == np.float32 for a in zero.gradients.arrays)
        feed(zero, N, CUTS, 1, micros=4)
        zero.step()
        return used(zero)

    first, second = threads(2, train)
    assert first.tobytes() == second.tobytes()
    exact = mean_gradient(N, 2, 1, 4)
    expected = exact if reduce_wire else accumulated(stage, "bfloat16", 2, 4)
    np.testing.assert_allclose(first, expected, atol=1e-6)
    np.testing.assert_allclose(first, exact, atol=2**-7)


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
def test_o024_gradients_do_not_leak_into_the_next_step(wire, stage, num_micro):
    def train(world):
        zero = make(world, stage, wire, optimizer=zm.AdamW(), micro_batches=num_micro)
        norms = []
        for _ in range(4):
            feed(zero, N, CUTS, 1, micros=num_micro)
            norms.append(zero.step(lr=0.0).grad_norm)
        return norms

    for norms in threads(2, train):
        assert len(set(norms)) == 1
        expected = np.linalg.norm(mean_gradient(N, 2, 1, num_micro))
        assert norms[0] == pytest.approx(expected, rel=1e-6 if wire == "float32" else 0.01)


@pytest.mark.parametrize("num_micro", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_o025_micro_batches_equal_the_reference_without_a_no_sync_context(
    momentum, stage, num_micro
):
    def train(world):
        rule = zm.AdamW(**PINNED) if momentum is None else zm.SGD(momentum=momentum, **PINNED)
        zero = make(world, stage, optimizer=rule, micro_batches=num_micro)
        assert not hasattr(zero, "no_sync")
        for t in (1, 2, 3):
            feed(zero, N, CUTS, t, micros=num_micro)
            zero.step()
        return state(zero)

    ref = Ref(start(N), momentum=momentum, settings={"lr": 0.01, "wd": 0.1})
    for t in (1, 2, 3):
        ref.step(mean_gradient(N, 3, t, num_micro))
    for found in threads(3, train):
        np.testing.assert_allclose(found["full"], ref.p, atol=1e-6)
        np.testing.assert_allclose(found["m"], ref.m, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("samples", "mean"), [((1, 2, 3, 10), 3.375), (None, 2.5)])
def test_o026_ranks_count_by_their_number_of_samples(stage, samples, mean):
    def train(world):
        zero = make(world, stage)
        value = float(world.rank + 1)  # of each sample's gradient, and of its loss
        weight = {"weight": samples[world.rank]} if samples else {}
        g = {name: np.full(array.shape, value) for name, array in arrays(N, CUTS).items()}
        loss = zero.backward(g, loss=value, **weight)
        return loss, zero.step(), used(zero)

    for loss, report, found in threads(4, train):
        np.testing.assert_allclose(found, mean, rtol=1e-6)
        assert loss == report.loss == pytest.approx(mean, rel=1e-6)
        assert report.weight == (16 if samples else 4)


@pytest.mark.parametrize("stage", STAGES)
def test_o026_micro_batches_count_by_their_number_of_samples(stage):
    weights = np.array([[1, 5], [2, 0]])  # of each rank's micro-batches

    def train(world):
        zero = make(world, stage, micro_batches=2)
        for m, weight in enumerate(weights[world.rank]):
            zero.backward(cut(gradient(N, world.rank, 1, m), CUTS), weight=weight, loss=float(m))
        return zero.step(), used(zero)

    g = np.array([[gradient(N, r, 1, m) for m in range(2)] for r in range(2)])
    expected = (weights[:, :, None] * g).sum(axis=(0, 1)) / 8
    for report, found in threads(2, train):
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert report.loss == pytest.approx(5 / 8)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("empty", [0, 1])
def test_o026_a_micro_batch_without_samples_does_not_count(stage, empty):
    def train(world):
        zero = make(world, stage, micro_batches=2)
        for m in range(2):
            g = cut(gradient(N, world.rank, 1, m), CUTS)
            zero.backward(g, weight=0.0 if m == empty else 3.0, loss=7.0)
        return zero.step(), used(zero)

    expected = np.mean([gradient(N, r, 1, 1 - empty) for r in range(2)], axis=0)
    for report, found in threads(2, train):
        assert report.loss == 7.0
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_o027_step_applies_the_mean_of_an_incomplete_window(stage):
    def train(world):
        zero = make(world, stage, micro_batches=4)
        found = []
        for first in (0, 4, 8):
            for m in range(first, min(first + 4, 10)):
                zero.backward(cut(gradient(N, world.rank, 1, m), CUTS))
            zero.step()
            found.append(used(zero))
        return found

    for found in threads(2, train):
        for first, g in zip((0, 4, 8), found, strict=True):
            micros = range(first, min(first + 4, 10))
            expected = np.mean([gradient(N, r, 1, m) for r in range(2) for m in micros], axis=0)
            np.testing.assert_allclose(g, expected, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_o027_zero_grad_discards_an_incomplete_window(stage):
    def train(world):
        zero = make(world, stage, micro_batches=4)
        feed(zero, N, CUTS, 9, micros=2)
        zero.zero_grad()
        feed(zero, N, CUTS, 1, micros=4)
        zero.step()
        return used(zero)

    for found in threads(2, train):
        np.testing.assert_allclose(found, mean_gradient(N, 2, 1, 4), atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_o028_the_accumulator_is_float32(stage):
    def train(world):
        zero = make(world, stage, "bfloat16", micro_batches=256)
        g = {name: np.full(array.shape, 1 / 256) for name, array in arrays(N, CUTS).items()}
        for _ in range(256):
            zero.backward(g)
        zero.step()
        return used(zero)

    for found in threads(2, train):
        np.testing.assert_allclose(found * 256, 1.0, atol=1e-3)


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("stage", STAGES)
def test_o029_the_loss_is_the_mean_over_micro_batches_and_ranks(stage, loss_scale):
    def train(world):
        zero = make(world, stage, "float16", micro_batches=4, loss_scale=loss_scale)
        means = []
        for loss in (1.0, 2.0, 3.0, 6.0):
            shift = 0.5 if world.rank else -0.5
            g = cut(gradient(N, world.rank, 1), CUTS)
            means.append(zero.backward(g, loss=loss + shift))
        return means, zero.step().loss

    for means, loss in threads(2, train):
        assert means == [1.0, 2.0, 3.0, 6.0]
        assert loss == 3.0


def test_o029_the_loss_is_nan_if_none_was_given():
    zero = make()
    feed(zero, N, CUTS, 1)
    assert math.isnan(zero.step().loss)
