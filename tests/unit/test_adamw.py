"""The optimizers' kernels: bit for bit NumPy's float32 formula, close to float64, for any cut."""

import math

import numpy as np
import pytest
import toys
from reference import adamw as adamw64

from zeromp import SGD, AdamW, constant, cosine, linear
from zeromp.adamw import Arrays
from zeromp.wire import FORMATS, convert

F = np.float32
SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025)
FACTOR, STEP, LR, DECAY = 0.37, 3, 0.5, 0.1  # lr large, so that a fused multiply-add would show
GUARD = 2  # elements around a view
CASES = [("float32", None), ("float32", "bfloat16"), ("float32", "float16"),
         ("bfloat16", "bfloat16"), ("float16", "float16")]  # fmt: skip

rules = pytest.mark.parametrize("rule", [AdamW(betas=(0.8, 0.95), eps=1e-3), SGD(momentum=0.7)])
cases = pytest.mark.parametrize(("gradient", "copy"), CASES)


def stored(values, name):
    out = np.empty(values.size, FORMATS[name].dtype)
    convert(np.ascontiguousarray(values, F), out)
    return out


def problem(n, gradient, seed=0):
    """Gradient as values and as stored, master, moments; ordinary float32 numbers."""
    rng = np.random.default_rng([n, seed])
    g, p, m = rng.standard_normal((3, n)).astype(F)
    g = toys.rounded(g, gradient)
    return g, p, m * F(0.1), rng.random(n, F) * F(0.01)


def formula(rule, g, p, m, v):
    """The kernels' formula, in NumPy float32: one rounding per operation."""
    lr, one = F(LR), F(1)
    g = g * F(FACTOR)
    decay = one - lr * F(DECAY)
    if isinstance(rule, SGD):
        m = F(rule.momentum) * m + g
        return p * decay - lr * m, m
    b1, b2 = rule.betas
    m = F(b1) * m + F(1 - b1) * g
    v = F(b2) * v + F(1 - b2) * (g * g)
    m_hat = m * F(1 / (1 - b1**STEP))
    root = np.sqrt(v) * F(1 / math.sqrt(1 - b2**STEP))
    return p * decay - lr * m_hat / (root + F(rule.eps)), m, v


def update(rule, arrays, runs):
    table = np.array(runs, np.int64).reshape(len(runs), 4)
    rates = np.tile(F([LR, DECAY]), (len(runs), 1))
    rule.update(STEP, FACTOR, arrays, table, rates)


def run(rule, n, gradient, copy, runs=None):
    """Update unaligned views inside guards; returns p, states and 16-bit copy, guards checked."""
    g, p, *moments = problem(n, gradient)
    moments = moments[: len(rule.states)]
    guarded = {}

    def view(name, values):
        whole = np.full(n + 2 * GUARD - 1, 77, values.dtype)
        guarded[name] = whole
        whole[1 : 1 + n] = values  # offset 1: not aligned for vectors
        return whole[1 : 1 + n]

    arrays = Arrays(
        gradient=view("g", stored(g, gradient)),
        master=view("p", p),
        states=[view(f"s{i}", m) for i, m in enumerate(moments)],
        copy=view("c", stored(np.zeros(n), copy)) if copy else None,
    )
    update(rule, arrays, [(n, 0, 0, 0)] if runs is None else runs)
    for name, whole in guarded.items():
        assert (whole[:1] == 77).all() and (whole[1 + n :] == 77).all(), name
    assert (guarded["g"][1 : 1 + n] == stored(g, gradient)).all()
    return arrays.master, *arrays.states, arrays.copy


def check(rule, gradient, copy, n, found):
    *numbers, copied = found
    expected = formula(rule, *problem(n, gradient))
    for ours, theirs in zip(numbers, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    if copy:
        assert (copied == stored(expected[0], copy)).all()


@rules
@cases
@pytest.mark.parametrize("n", SIZES)
def test_o033_any_size_has_the_bits_of_numpys_formula(rule, gradient, copy, n):
    check(rule, gradient, copy, n, run(rule, n, gradient, copy))


@rules
@cases
@pytest.mark.parametrize("width", [1, 2, 5, 16, 100])
def test_bits_do_not_depend_on_the_cut(rule, gradient, copy, width):
    n = 103
    runs = [(min(width, n - a), a, a, a) for a in range(0, n, width)]
    check(rule, gradient, copy, n, run(rule, n, gradient, copy, runs[::-1]))


@rules
@pytest.mark.parametrize("n", SIZES)
def test_o033_close_to_float64(rule, n):
    g, p, m, v = (a.astype(np.float64) for a in problem(n, "float32"))
    if isinstance(rule, AdamW):
        b1, b2 = rule.betas
        expected = adamw64(p, g * FACTOR, m, v, STEP, LR, b1, b2, rule.eps, DECAY)
    else:
        m = rule.momentum * m + g * FACTOR
        expected = p * (1 - LR * DECAY) - LR * m, m
    for ours, theirs in zip(run(rule, n, "float32", None), expected, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


@rules
@pytest.mark.parametrize("copy", [None, "bfloat16"])
def test_segments_have_their_own_places_and_rates(rule, copy):
    """Two runs that lie in other orders, with gaps, in states, gradient and parameters."""
    g, p, m, v = problem(10, "float32")
    runs = np.array([(3, 0, 6, 4), (2, 3, 1, 0)])
    rates = F([(0.5, 0.0), (0.25, 0.4)])
    states = [m[:5].copy(), v[:5].copy()][: len(rule.states)]
    master = p[:5].copy() if copy else p.copy()
    out = stored(np.zeros(10), copy) if copy else None
    rule.update(STEP, FACTOR, Arrays(g, master, states, out), runs, rates)
    touched = np.zeros(10, bool)
    for (n, at, g0, p0), (lr, decay) in zip(runs, rates, strict=True):
        old = p[at : at + n] if copy else p[p0 : p0 + n]
        start = [old.copy(), *(s[at : at + n].copy() for s in (m, v)[: len(rule.states)])]
        alone = Arrays(g[g0 : g0 + n].copy(), start[0], start[1:], None)
        rule.update(STEP, FACTOR, alone, np.array([(n, 0, 0, 0)]), F([(lr, decay)]))
        place = slice(at, at + n) if copy else slice(p0, p0 + n)
        assert (master[place] == start[0]).all()
        for ours, theirs in zip(states, start[1:], strict=True):
            assert (ours[at : at + n] == theirs).all()
        if copy:
            assert (out[p0 : p0 + n] == stored(start[0], copy)).all()
        touched[p0 : p0 + n] = True
    untouched = out[~touched] == 0 if copy else master[~touched] == p[~touched]
    assert untouched.all()


def test_rules_refuse_nonsense():
    for given in ({"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="AdamW: betas"):
            AdamW(**given).check()


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [linear, cosine])
def test_schedule_rises_to_the_peak_and_falls_to_the_floor(shape):
    steps, peak, warmup, floor = 50, 0.6, 10, 0.06
    lr = np.array([shape(k, steps, peak, warmup, floor) for k in range(steps + 20)])
    np.testing.assert_allclose(lr[:warmup], peak * np.arange(1, 11) / 10)
    assert (np.diff(lr[warmup - 1 : steps]) < 0).all()
    np.testing.assert_allclose(lr[steps - 1 :], floor)
    middle = lr[warmup - 1 + (steps - warmup) // 2]
    assert middle == pytest.approx((peak + floor) / 2)  # both are symmetric about it


def test_constant_and_no_warmup():
    assert [constant(k, 2.0, 4) for k in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert constant(0, 2.0) == 2.0
    assert linear(0, 4, 1.0) == 0.75 and cosine(0, 1, 1.0) == 0
    assert 0 <= linear(0, 0, 1.0) <= 1 and linear(3, 2, 1.0, warmup=5) == 0.8
