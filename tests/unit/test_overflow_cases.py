"""Cases K03 of shared/cases.md: loss scale, inf and NaN, and steps that are skipped.

O-015, about the kernels that look for inf and NaN, is in test_wire.py.
"""

import warnings

import numpy as np
import pytest
import toys

import zeromp as zm
from zeromp.wire import LossScale

N, CUT, RANKS = 13, {"w": (2, 3), "bias": 1, "u": 6}, 3

stages = pytest.mark.parametrize("stage", toys.STAGES)
wires = pytest.mark.parametrize("wire", toys.WIRES)


def attempt(zero, step, bad=None, name="u", at=2, rank=1):
    """Backward and step on the toy, with one element of one rank's gradient replaced by `bad`."""
    gradients = toys.cut(toys.gradient(N, zero.world.rank, step), CUT)
    if bad is not None and zero.world.rank == rank:
        gradients[name].reshape(-1)[at] = bad
    zero.backward(gradients)
    return zero.step()


def bits(zero):
    return {kind: values.tobytes() for kind, values in toys.state(zero).items()}


# ---- the scale -----------------------------------------------------------------------------------


@stages
def test_o011_each_overflow_halves_the_scale_and_skips_one_step(stage):
    def run(world):
        zero = toys.make(world, N, CUT, stage, "float16", loss_scale=None)
        before, seen = bits(zero), []
        for t in (1, 2, 3):
            report = attempt(zero, t, bad=1e4)  # finite, and above 65504 at each of these scales
            assert not report.applied and report.reason == "inf in the gradient of 'u'"
            seen.append((report.loss_scale, zero.loss_scale(), zero.skipped, zero.applied))
        assert bits(zero) == before
        report = attempt(zero, 4)
        ref = toys.Ref(toys.start(N))
        ref.step(toys.sent_gradient(N, RANKS, 4, "float16"))
        assert report.applied and (zero.applied, zero.skipped) == (1, 3)
        for kind, values in toys.state(zero).items():
            exact = ref.p if kind == "master" else getattr(ref, kind, None)
            assert exact is None or np.abs(values - exact).max() < 1e-6
        return seen

    for seen in zm.threads(RANKS, run, debug=True):
        assert seen == [(65536, 32768, 1, 0), (32768, 16384, 2, 0), (16384, 8192, 3, 0)]


@stages
def test_o011_at_the_floor_it_warns_and_after_patience_raises_on_all_ranks(stage):
    def run(world):
        options = {"loss_scale": 1024.0, "min_loss_scale": 512.0, "patience": 4}
        zero = toys.make(world, N, CUT, stage, "float16", **options)
        scales = []
        for t in (1, 2, 3):
            attempt(zero, t, bad=1e6)
            scales.append(zero.loss_scale())
        words = r"4 steps in a row were skipped.*inf in the gradient of 'u', at loss scale 512"
        with pytest.raises(FloatingPointError, match=words):
            attempt(zero, 4, bad=1e6)
        assert (zero.applied, zero.skipped, zero.loss_scale()) == (0, 4, 512)
        return scales

    with pytest.warns(RuntimeWarning, match="overflow at the lowest loss scale 512") as caught:
        assert zm.threads(RANKS, run, debug=True) == [[512, 512, 512]] * RANKS
    assert len(caught) == 2 * RANKS  # attempts 2 and 3


def test_o011_an_applied_step_ends_the_row():
    def run(world):
        zero = toys.make(world, N, CUT, 2, "float16", patience=2)
        for t, bad in enumerate((1e6, None, 1e6, None, 1e6), 1):
            attempt(zero, t, bad)
        return zero.state()

    (state, *_) = zm.threads(2, run)
    assert state == {"attempts": 5, "applied": 2, "skipped": 3, "loss_scale": 128}


@pytest.mark.parametrize("floor", [1.0, 1e-40])
def test_o012_2000_nan_gradients_leave_a_scale_that_can_be_divided_by(floor):
    scaling = LossScale(65536.0, floor=floor, patience=3000, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(2000):
            scaling.skipped("NaN in the gradient of 'w'")
            assert max(floor, 1e-30) <= scaling.value and np.isfinite(np.float32(1 / scaling.value))
    assert scaling.value == max(floor, 1e-30)


@pytest.mark.parametrize(("ranks", "attempts"), [(1, 2000), (2, 60)])
def test_o012_the_error_speaks_of_nan_not_of_the_scale(ranks, attempts):
    """From the 50th NaN on, each is answered by an error, on all ranks."""

    def run(world):
        zero = toys.make(world, N, CUT, 2, "float16", loss_scale=2.0)
        errors = []
        for t in range(1, attempts + 1):
            try:
                attempt(zero, t, bad=np.nan, rank=0)
            except FloatingPointError as error:
                errors.append(str(error))
            assert zero.loss_scale() == 1
        assert zero.state() == {
            "attempts": attempts, "applied": 0, "skipped": attempts, "loss_scale": 1,
        }  # fmt: skip
        return errors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for errors in zm.threads(ranks, run):
            assert len(errors) == attempts - 49
            for error in errors:
                assert "NaN in the gradient of 'u'" in error
                assert "scale of the loss cannot mend that" in error


# ---- a skipped step changes nothing --------------------------------------------------------------


@stages
@wires
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_o013_inf_and_nan_leave_masters_and_moments_as_they_were(wire, stage, ranks):
    """Attempts 1, 2, inf, -inf, NaN at any place, 4: the last equals ref without the bad ones."""

    def run(world):
        zero = toys.make(world, N, CUT, stage, wire, loss_scale=64.0 if wire == "float16" else None)
        for t in (1, 2):
            attempt(zero, t)
        before = bits(zero)
        places = [("w", 0), ("w", 5), ("bias", 0), ("u", 0), ("u", 5)]
        for i, (name, at) in enumerate(places):
            bad = (np.inf, np.nan, -np.inf)[i % 3]
            report = attempt(zero, 3, bad, name, at, rank=i % ranks)
            assert not report.applied and not np.isfinite(report.grad_norm)
            assert (
                report.reason == f"{'NaN' if np.isnan(bad) else 'inf'} in the gradient of {name!r}"
            )
            assert bits(zero) == before
        report = attempt(zero, 4)
        assert report.applied and zero.state()["skipped"] == len(places)
        return toys.state(zero), report.grad_norm

    ref = toys.Ref(toys.start(N))
    norms = [ref.step(toys.sent_gradient(N, ranks, t, wire)) for t in (1, 2, 4)]
    for state, norm in zm.threads(ranks, run, debug=True):
        np.testing.assert_allclose(state["master"], ref.p, rtol=0, atol=1e-6)
        np.testing.assert_allclose(state["m"], ref.m, rtol=0, atol=1e-6)
        np.testing.assert_allclose(state["v"], ref.v, rtol=0, atol=1e-6)
        assert norm == pytest.approx(norms[-1], rel=1e-6)
        assert all(np.isfinite(values).all() for values in state.values())


@stages
@wires
def test_o013_infs_that_cancel_and_overflow_of_the_sum_are_seen(wire, stage):
    """inf on one rank and -inf on another make NaN; finite gradients may have a sum that is not."""

    def run(world):
        zero = toys.make(world, N, CUT, stage, wire)
        large = {"float16": 65504.0 / 2**10, "bfloat16": 3.3e38, "float32": 3.3e38}[wire]
        sign = [1, -1, 0][world.rank]
        zero.backward({"w": np.zeros((2, 3)), "u": np.full(6, np.inf if sign > 0 else -np.inf)})
        cancelled = zero.step()
        zero.backward({"bias": np.full(1, large * abs(sign))})
        summed = zero.step()
        return cancelled.reason, summed.applied, summed.reason

    for reason, applied, why in zm.threads(RANKS, run, debug=True):
        assert reason == "NaN in the gradient of 'u'"
        # folded in float32, where two of float16's largest numbers have room
        assert (applied, why) == ((True, "") if wire == "float16" else (False, "inf in the gradient"
                                  " of 'bias'"))  # fmt: skip


@stages
def test_o013_a_float64_gradient_beyond_float32_is_an_overflow_like_any_other(stage):
    """Warnings are errors here: one on a single rank would leave the others waiting."""

    def run(world):
        zero = toys.make(world, N, CUT, stage)
        return attempt(zero, 1, bad=1e300).reason, attempt(zero, 2).applied

    assert zm.threads(2, run, timeout=20) == [("inf in the gradient of 'u'", True)] * 2


# ---- no scale without float16 --------------------------------------------------------------------


@stages
@wires
def test_o014_scale_and_norm_are_true(wire, stage):
    exact = np.sqrt((toys.mean_gradient(13, 4, 1) ** 2).sum())

    def run(world):
        zero = toys.make(world, 13, [13], stage, wire)
        scale = zero.loss_scale()
        toys.feed(zero, 13, [13], 1)
        report = zero.step()
        assert report.loss_scale == scale == (1.0 if wire != "float16" else toys.SCALE[wire])
        assert report.grad_norm == zero.grad_norm()
        return report.grad_norm

    for norm in zm.threads(4, run, debug=True):
        assert norm == pytest.approx(exact, rel=1e-6 if wire == "float32" else 1e-2)


# ---- what is said about it -----------------------------------------------------------------------


@stages
@wires
def test_o016_a_skipped_step_is_visible(wire, stage, capsys):
    """Flag, counter, one line of rank 0 with reason and first bad array; the schedule waits."""

    def run(world):
        zero = toys.make(world, N, CUT, stage, wire)
        used = []
        for t, bad in enumerate((None, np.nan, np.inf, None), 1):
            gradients = toys.cut(toys.gradient(N, world.rank, t), CUT)
            if bad is not None:  # several arrays on several ranks: the first in order is named
                gradients[["u", "w", "bias"][world.rank]][:] = bad
            zero.backward(gradients)
            report = zero.step(lr=zm.linear(zero.applied, 10, 0.01, warmup=4))
            used.append((report.applied, round(report.lr, 6), report.reason))
        return used, zero.state()

    for used, state in zm.threads(RANKS, run, debug=True):
        assert used == [
            (True, 0.0025, ""),
            (False, 0.005, "NaN in the gradient of 'w'"),
            (False, 0.005, "inf in the gradient of 'w'"),
            (True, 0.005, ""),
        ]
        assert (state["attempts"], state["applied"], state["skipped"]) == (4, 2, 2)
    assert capsys.readouterr().out.splitlines() == [
        "step 2 skipped: NaN in the gradient of 'w'",
        "step 3 skipped: inf in the gradient of 'w'",
    ]
