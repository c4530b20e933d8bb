"""Kernels against float64 NumPy, over odd sizes; NaN; the same bits wherever an array starts."""

import math

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromp import kernels
from zeromp._jit import kernel

SIZES = [1, 7, 31, 32, 33, 64, 1025]
ROWS = [0, 1, 7]


@kernel("void(float32[::1], float32[::1])")
def _exp(x, y):
    for i in range(x.size):
        y[i] = kernels.exp(x[i])


@kernel("void(float32[::1], float32[::1], float32[::1])")
def _reduce(x, y, out):
    out[0], out[1], out[2] = kernels.total(x), kernels.dot(x, y), kernels.largest(x)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def shifted(array):
    """Return a copy that starts one element, 4 bytes, after its buffer does."""
    buffer = np.zeros(array.size + 2, array.dtype)
    view = buffer[1:-1].reshape(array.shape)
    view[...] = array
    return view


def same_bits(function, *arrays):
    """Return what `function` makes of arrays, which must not depend on where they start."""
    here = [np.array(a) if isinstance(a, np.ndarray) else a for a in arrays]
    there = [shifted(a) if isinstance(a, np.ndarray) else a for a in arrays]
    results = function(*here), function(*there)
    assert results[0] == results[1] or np.isnan(results[0])
    for a, b in zip(here, there, strict=True):
        if isinstance(a, np.ndarray):
            assert a.tobytes() == b.tobytes()
            assert b.base[0] == b.base[-1] == 0  # nothing is written beside an array
    return results[0], here


def numeric(f, x, weights):
    """Gradient of sum(weights * f(x)) with respect to each element of x."""
    return np.array(
        [
            reference.finite_difference(lambda z: float((weights * f(z)).sum()), x, index)
            for index in np.ndindex(x.shape)
        ]
    ).reshape(x.shape)


# ---- exp and reductions ------------------------------------------------------------------------


def test_exp_is_right_to_one_ulp():
    x = np.linspace(-87, 87, 200_001, dtype=np.float32)
    y = np.empty_like(x)
    _exp(x, y)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) <= 1.01 * np.spacing(exact.astype(np.float32))).all()


def test_exp_at_the_ends():
    x = np.array([0, -np.inf, -88, np.inf, 1000, np.nan, -0.0], np.float32)
    y = np.empty_like(x)
    _exp(x, y)
    top = np.float32(np.exp(87.0))
    np.testing.assert_allclose(y[[3, 4]], top, rtol=2e-7)
    assert y[0] == y[6] == 1 and y[1] == y[2] == 0 and np.isnan(y[5])


@given(st.integers(0, 200), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_reductions(size, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, size), dtype=np.float32)
    _, (_, _, out) = same_bits(_reduce, x, y, np.zeros(3, np.float32))
    wide = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(out[0], wide[0].sum(), atol=1e-6 * (1 + size))
    np.testing.assert_allclose(out[1], wide[0] @ wide[1], atol=1e-6 * (1 + size))
    assert out[2] == max(x, default=-np.inf)


def test_sums_are_made_in_32_lanes():
    x = normal(1025)
    lanes = np.zeros(32, np.float32)
    for i, value in enumerate(x):
        lanes[i % 32] += value
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    out = np.empty(3, np.float32)
    _reduce(x, x, out)
    assert out[0] == lanes[0]


# ---- layer norm and GELU -----------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_layernorm(rows, size):
    x, w, b = normal(rows, size) + 3, normal(size, seed=1), normal(size, seed=2)
    stats, y = np.empty((2, rows), np.float32), np.empty_like(x)
    _, (_, _, _, stats, y) = same_bits(kernels.layernorm, x, w, b, stats, y)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y, reference.layernorm(wide, w, b), atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(stats[0], wide.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(stats[1], 1 / np.sqrt(wide.var(axis=1) + 1e-5), rtol=1e-5)
    _, (*_, again) = same_bits(kernels.layernorm_again, x, w, b, stats, np.empty_like(x))
    assert again.tobytes() == y.tobytes()


@pytest.mark.parametrize("size", [1, 7, 33])
@pytest.mark.parametrize("rows", ROWS)
def test_layernorm_backward(rows, size):
    x, w, dy = normal(rows, size), normal(size, seed=1), normal(rows, size, seed=2)
    stats, y = np.empty((2, rows), np.float32), np.empty_like(x)
    kernels.layernorm(x, w, w, stats, y)
    garbage = np.full(size, np.nan, np.float32)
    more = normal(rows, size, seed=3)
    arguments = x, w, stats, dy
    _, (*_, dx, _, dw, db) = same_bits(
        kernels.layernorm_backward, *arguments, more[:0], garbage, garbage.copy()
    )
    kernels.layernorm_backward(x, w, stats, dy, more, garbage, garbage.copy())
    np.testing.assert_array_equal(dy, dx + more)  # one addition, rounded once
    dy = normal(rows, size, seed=2)
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(
        dx, numeric(lambda z: reference.layernorm(z, w, w), x, dy), **tolerance
    )
    np.testing.assert_allclose(
        dw, numeric(lambda z: reference.layernorm(x.astype(np.float64), z, w), w, dy), **tolerance
    )
    np.testing.assert_allclose(db, dy.sum(axis=0, dtype=np.float64), **tolerance)


@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("rows", ROWS)
def test_gelu(rows, size):
    x, b = normal(rows, size) * 3, normal(size, seed=1)
    _, (_, _, y) = same_bits(kernels.gelu, x, b, np.empty_like(x))
    np.testing.assert_allclose(y, reference.gelu(np.float64(x + b)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 7, 33])
@pytest.mark.parametrize("rows", ROWS)
def test_gelu_backward(rows, size):
    x, b, dy = normal(rows, size) * 3, normal(size, seed=1), normal(rows, size, seed=2)
    garbage = np.full(size, np.nan, np.float32)
    _, (_, _, dx, db) = same_bits(kernels.gelu_backward, x, b, dy, garbage)
    exact = numeric(reference.gelu, x + b, dy)
    np.testing.assert_allclose(dx, exact, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(db, exact.sum(axis=0), atol=1e-5)


def test_gelu_far_out():
    x = np.array([[-1e4, -100, -20, 20, 100, 1e4]], np.float32)
    y, dx, b = np.empty_like(x), np.ones_like(x), np.zeros(6, np.float32)
    kernels.gelu(x, b, y)
    kernels.gelu_backward(x, b, dx, b.copy())
    np.testing.assert_allclose(y, np.maximum(x, 0), atol=1e-30)
    np.testing.assert_allclose(dx, x > 0, atol=1e-20)


# ---- cross-entropy -----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_cross_entropy(rows, vocab):
    rng = np.random.default_rng(rows)
    logits, targets = normal(rows, vocab) * 5, rng.integers(0, vocab, rows)
    targets[1::3] = -1
    factor = np.float32(0.25)
    loss, (gradient, _, _) = same_bits(kernels.cross_entropy, logits, targets, factor)
    p, kept = reference.softmax(logits.astype(np.float64)) if rows else logits, targets >= 0
    exact = p.copy()
    exact[np.arange(rows), targets] -= 1
    np.testing.assert_allclose(gradient, 0.25 * exact * kept[:, None], atol=2e-7)
    chosen = p[kept, targets[kept]].astype(np.float64)
    np.testing.assert_allclose(loss, -np.log(chosen).sum(), rtol=2e-6, atol=1e-6)


def test_cross_entropy_of_large_logits():
    logits = np.array([[1e4, -1e4, 0], [-3e38, 0, 3e38]], np.float32)
    loss = kernels.cross_entropy(logits, np.array([1, 2]), np.float32(1))
    assert loss == pytest.approx(2e4)
    np.testing.assert_array_equal(logits, [[1, -1, 0], [0, 0, 0]])


# ---- biases, embedding, dropout ----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_bias(rows, size):
    y, b = normal(rows, size), normal(size, seed=1)
    _, (sums, _) = same_bits(kernels.bias_add, y, b)
    np.testing.assert_array_equal(sums, y + b)
    more = normal(rows, size, seed=2)
    _, (both, *_) = same_bits(kernels.residual_add, y, b, more)
    np.testing.assert_array_equal(both, (y + b) + more)
    _, (_, db) = same_bits(kernels.bias_gradient, y, np.full(size, np.nan, np.float32))
    in_order = np.zeros(size, np.float32)
    for row in y:
        in_order += row
    np.testing.assert_array_equal(db, in_order)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_embedding(batch, size):
    tokens, positions, time = normal(11, size), normal(8, size, seed=1), 5
    ids = np.random.default_rng(0).integers(0, 11, batch * time)
    x = np.empty((batch * time, size), np.float32)
    _, (*_, x) = same_bits(kernels.embedding, ids, tokens, positions, time, x)
    exact = tokens[ids].reshape(batch, time, size) + positions[:time]
    np.testing.assert_array_equal(x.reshape(exact.shape), exact)


def test_o068_repeated_tokens():
    table = np.zeros((8, 33), np.float32)
    ids = np.array([3, 3, 3, 5])
    kernels.scatter_add(ids, np.ones((4, 33), np.float32), table)
    expected = np.zeros_like(table)
    expected[3], expected[5] = 3, 1
    np.testing.assert_array_equal(table, expected)


def masks(batch, size, key=1, first=0, rate=0.1):
    y = np.empty((batch, size), np.float32)
    kernels.dropout(np.ones_like(y), np.uint64(key), np.uint64(first), rate, y)
    return y


@pytest.mark.parametrize("size", [*SIZES, 5000])
def test_dropout_values(size):
    x = normal(3, size)
    y = np.empty_like(x)
    arguments = np.uint64(7), np.uint64(2), 0.3
    _, (*_, y) = same_bits(kernels.dropout, x, *arguments, y)
    kept = masks(3, size, 7, 2, 0.3) != 0
    np.testing.assert_array_equal(y, np.where(kept, x * np.float32(1 / 0.7), 0))


def test_o102_masks_belong_to_samples():
    whole = masks(9, 1500, key=5, first=100)
    for cut in ([9], [4, 5], [1] * 9):
        at = np.cumsum([0, *cut])
        parts = [masks(n, 1500, 5, 100 + s) for n, s in zip(cut, at[:-1], strict=True)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert (masks(9, 700, key=5, first=100) == whole[:, :700]).all()


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_rate(rate):
    y = masks(64, 5000, key=11, rate=rate)
    n, spread = y.size, math.sqrt(max(rate * (1 - rate), 1e-12))
    assert abs((y == 0).mean() - rate) <= 4 * spread / math.sqrt(n)
    assert np.isin(y, [0, np.float32(1 / (1 - rate))]).all()


def test_dropout_masks_are_not_correlated():
    def bits(**where):
        return (masks(16, 8192, rate=0.5, **where) != 0) - 0.5

    base = bits()
    bound = 5 * 0.25 / math.sqrt(base.size)
    others = [bits(key=2), bits(first=16), np.roll(base, 1, 0), np.roll(base, 4096, 1)]
    others += [np.roll(base, lag, 1) for lag in (1, 2, 3, 32, 1024)]
    for other in others:
        assert abs((base * other).mean()) < bound
    # Counts of columns and of rows spread as those of coins do (chi-square, 5 sigma).
    for axis in (0, 1):
        counts = base.sum(axis=axis)
        n = base.shape[axis]
        chi = (counts**2 / (n / 4)).sum()
        assert abs(chi - counts.size) < 5 * math.sqrt(2 * counts.size)


# ---- NaN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 33, 1025])
def test_nan_stays_nan(size):
    for at in {0, size // 2, size - 1}:
        bad, good = normal(2, size), normal(2, size, seed=1)
        bad[1, at] = np.nan
        w, out, stats = normal(size), np.empty_like(bad), np.empty((2, 2), np.float32)

        kernels.layernorm(bad, w, w, stats, out)
        assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()

        kernels.layernorm(good, w, w, stats, out)
        d, dw, db = bad.copy(), np.empty_like(w), np.empty_like(w)
        kernels.layernorm_backward(good, w, stats, d, d[:0], dw, db)
        assert np.isnan(d[1]).all() and np.isnan(dw[at]) and np.isnan(db[at])

        kernels.gelu(bad, w, out)
        assert np.isnan(out[1, at]) and np.isnan(out).sum() == 1
        for x, dy in ((bad, good), (good, bad)):
            d, db = dy.copy(), np.empty_like(w)
            kernels.gelu_backward(x, w, d, db)
            assert np.isnan(d[1, at]) and np.isnan(d).sum() == 1
            assert np.isnan(db[at]) and np.isnan(db).sum() == 1

        logits = bad.copy()
        assert np.isnan(kernels.cross_entropy(logits, np.array([0, 0]), np.float32(1)))
        assert np.isnan(logits[1]).all()
        logits = bad.copy()
        assert np.isfinite(kernels.cross_entropy(logits, np.array([0, -1]), np.float32(1)))
        assert (logits[1] == 0).all()
