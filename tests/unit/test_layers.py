"""Layers against float64 NumPy: outputs, gradients by finite differences, what None and -1 mean."""

import time

import numpy as np
import pytest
import reference

from zeromp import layers


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def differences(f, x, weights):
    """Gradient of sum(weights * f(x)) with respect to each element of x."""
    values = [
        reference.finite_difference(lambda z: float(np.sum(weights * f(z))), x, index)
        for index in np.ndindex(x.shape)
    ]
    return np.reshape(values, x.shape)


def garbage(*shape):
    """A view into a larger buffer, holding what must be overwritten."""
    size = int(np.prod(shape))
    return np.full(size + 3, np.nan, np.float32)[1 : size + 1].reshape(shape)


# ---- linear ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(0,), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 33), (33, 7)])
def test_linear(lead, sizes):
    inputs, outputs = sizes
    x, w, b = normal(*lead, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    np.testing.assert_allclose(layers.linear(x, w, b), exact + b, atol=1e-5)
    np.testing.assert_allclose(layers.linear(x, w), exact, atol=1e-5)

    dy, dw, db = normal(*lead, outputs, seed=3), garbage(outputs, inputs), garbage(outputs)
    dx = layers.linear_backward(x, w, dy, dw, db)
    rows, d = x.reshape(-1, inputs).astype(np.float64), dy.reshape(-1, outputs).astype(np.float64)
    np.testing.assert_allclose(dx, (d @ w).reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(dw, d.T @ rows, atol=1e-5)
    np.testing.assert_allclose(db, d.sum(axis=0), atol=1e-5)


def test_linear_skips_what_is_not_wanted():
    x, w, dy, db = normal(4, 3), normal(2, 3), normal(4, 2), garbage(2)
    dx = layers.linear_backward(x, w, dy, None, db)
    np.testing.assert_array_equal(dx, layers.linear_backward(x, w, dy, None, None))
    np.testing.assert_allclose(db, dy.sum(axis=0), atol=1e-6)


# ---- layer norm, GELU, attention ---------------------------------------------------------------


def test_layernorm_gradients_are_written_or_skipped():
    x, w, b = normal(2, 3, 5), normal(5, seed=1), normal(5, seed=2)
    y, stats = layers.layernorm(x, w, b)
    np.testing.assert_allclose(y, reference.layernorm(x.astype(np.float64), w, b), atol=1e-5)
    dy, dw, db = normal(2, 3, 5, seed=3), garbage(5), garbage(5)
    d = dy.copy()
    assert layers.layernorm_backward(x, w, stats, d, dw, db) is d
    exact = differences(lambda z: reference.layernorm(z, w, b), x, dy)
    np.testing.assert_allclose(d, exact, atol=1e-4)
    np.testing.assert_array_equal(
        layers.layernorm_backward(x, w, stats, dy.copy(), None, None, x), d + x
    )
    again = layers.layernorm_again(x, w, b, stats)
    assert again.tobytes() == y.tobytes()
    frozen = layers.layernorm_backward(x, w, stats, dy.copy(), None, None)
    assert frozen.tobytes() == d.tobytes()
    assert np.isfinite(dw).all() and np.isfinite(db).all()


def test_gelu():
    x, b, dy = normal(2, 3, 5), normal(5, seed=2), normal(2, 3, 5, seed=1)
    np.testing.assert_allclose(layers.gelu(x, b), reference.gelu(np.float64(x + b)), atol=1e-6)
    db = garbage(5)
    dx = layers.gelu_backward(x, b, dy.copy(), db)
    np.testing.assert_allclose(dx, differences(reference.gelu, x + b, dy), atol=1e-5)
    np.testing.assert_allclose(db, dx.sum(axis=(0, 1)), atol=1e-5)
    assert layers.gelu_backward(x, b, dy.copy(), None).tobytes() == dx.tobytes()


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 2), (1, 7, 3, 1), (2, 5, 2, 3), (0, 4, 2, 2), (1, 37, 1, 33), (1, 64, 2, 8)]
)
def test_attention(shape):
    batch, length, heads, depth = shape
    qkv = normal(batch, length, 3 * heads * depth)
    y, stats = layers.attention(qkv, heads)
    exact = reference.attention(qkv.astype(np.float64), heads)
    np.testing.assert_allclose(y, exact, atol=1e-6)
    assert stats.shape == (batch, heads, length) and y.flags.c_contiguous
    assert np.isfinite(stats).all()

    dy, before = normal(*y.shape, seed=1), (qkv.tobytes(), y.tobytes(), stats.tobytes())
    d = layers.attention_backward(qkv, y, stats, dy)
    assert d.flags.c_contiguous and before == (qkv.tobytes(), y.tobytes(), stats.tobytes())
    if d.size < 1000:
        exact = differences(lambda z: reference.attention(z, heads), qkv, dy)
        np.testing.assert_allclose(d, exact, atol=1e-5)
    else:
        for index in [(0, 0, 0), (0, length - 1, 1), (0, 33, qkv.shape[2] - 1), (0, 5, 40)]:
            slope = reference.finite_difference(
                lambda z: float(np.sum(dy * reference.attention(z, heads))), qkv, index
            )
            assert d[index] == pytest.approx(slope, abs=2e-5)


def test_attention_of_one_sample_does_not_depend_on_others():
    qkv, dy = normal(3, 40, 36), normal(3, 40, 12, seed=1)
    y, stats = layers.attention(qkv, 2)
    d = layers.attention_backward(qkv, y, stats, dy)
    alone, sums = layers.attention(qkv[1:2], 2)
    assert alone.tobytes() == y[1].tobytes() and sums.tobytes() == stats[1].tobytes()
    assert layers.attention_backward(qkv[1:2], alone, sums, dy[1:2]).tobytes() == d[1].tobytes()


def test_attention_of_large_scores():
    qkv = normal(1, 40, 6) * 30  # exponentials of scores up to 2000, which are exact to 1e-4
    y, stats = layers.attention(qkv, 1)
    np.testing.assert_allclose(y, reference.attention(np.float64(qkv), 1), rtol=1e-3, atol=1e-2)
    assert np.isfinite(layers.attention_backward(qkv, y, stats, y)).all()


@pytest.mark.parametrize("part", [0, 2])  # of queries, keys
def test_nan_reaches_the_positions_that_see_it(part):
    qkv = normal(1, 40, 6)
    qkv[0, 17, part] = np.nan
    y, stats = layers.attention(qkv, 1)
    assert np.isfinite(y[0, :17]).all() and np.isnan(y[0, 17]).any()
    assert np.isnan(layers.attention_backward(qkv, y, stats, normal(1, 40, 2))).any()


def test_attention_sees_no_future():
    qkv = normal(1, 9, 12)
    later = qkv.copy()
    later[:, 6:] = normal(1, 3, 12, seed=1)
    before, after = (layers.attention(a, 2)[0] for a in (qkv, later))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])


# ---- embedding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16])
def test_embedding(dtype):
    wte, wpe = normal(7, 5), normal(4, 5, seed=1)
    ids = np.array([[0, 6, 6], [3, 0, 1]], dtype)
    ids.flags.writeable = False
    np.testing.assert_array_equal(layers.embedding(ids, wte, wpe), wte[ids] + wpe[:3])


def test_o068_repeated_tokens():
    ids = np.array([[3, 3, 3, 5]])
    dx = np.ones((1, 4, 2), np.float32)
    dwte, dwpe = np.full((8, 2), 10, np.float32), np.full((6, 2), 20, np.float32)
    layers.embedding_backward(ids, dx, dwte, dwpe)
    np.testing.assert_array_equal(dwte[:, 0], [10, 10, 10, 13, 10, 11, 10, 10])  # added
    np.testing.assert_array_equal(dwpe[:, 0], [21, 21, 21, 21, 20, 20])
    before = dwpe.copy()
    layers.embedding_backward(ids, dx, dwte, None)
    layers.embedding_backward(ids, dx, None, None)
    np.testing.assert_array_equal(dwpe, before)
    assert dwte[3, 1] == 16


def test_o068_backward_is_as_fast_as_forward():
    wte, wpe = np.zeros((50_000, 256), np.float32), np.zeros((1024, 256), np.float32)
    ids = np.random.default_rng(0).integers(0, 50_000, (8, 1024))
    dx = np.ones((8, 1024, 256), np.float32)

    def best(function, *arguments):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            function(*arguments)
            times.append(time.perf_counter() - start)
        return min(times)

    forward = best(layers.embedding, ids, wte, wpe)
    assert best(layers.embedding_backward, ids, dx, wte, wpe) <= 5 * forward


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_o068_ids_out_of_range(bad):
    ids = np.array([[0, bad, 1]])
    with pytest.raises(ValueError, match=f"token id {bad} .*0 to 6"):
        layers.embedding(ids, normal(7, 5), normal(4, 5))
    with pytest.raises(ValueError, match=f"id {bad} "):
        layers.embedding_backward(ids, normal(1, 3, 5), normal(7, 5), None)


def test_ids_of_wrong_dtype_or_shape():
    wte, wpe = normal(7, 5), normal(4, 5)
    with pytest.raises(ValueError, match="float64; they must be integers"):
        layers.embedding(np.zeros((1, 3)), wte, wpe)
    with pytest.raises(ValueError, match="T from 1 to 4"):
        layers.embedding(np.zeros((1, 5), np.int64), wte, wpe)
    with pytest.raises(ValueError, match=r"must be \(B, T\)"):
        layers.embedding(np.zeros(3, np.int64), wte, wpe)
    with pytest.raises(ValueError, match="contiguous float32 of shape"):
        layers.embedding_backward(np.zeros((1, 3), np.int64), normal(1, 3, 5), normal(7, 4), None)


# ---- losses ------------------------------------------------------------------------------------


def test_cross_entropy_leaves_ignored_targets_out():
    logits, targets = normal(2, 3, 5), np.array([[0, -1, 4], [-1, 2, 2]], np.int32)
    d = logits.copy()
    loss = layers.cross_entropy(d, targets, 0.5)
    wide = logits.astype(np.float64)
    assert layers.count_targets(targets) == 4
    assert loss / 4 == pytest.approx(reference.cross_entropy(wide, targets), rel=1e-6)
    exact = differences(lambda z: reference.cross_entropy(z, targets), logits, 4 * 0.5)
    np.testing.assert_allclose(d, exact, atol=1e-6)
    assert (d[targets < 0] == 0).all()


@pytest.mark.parametrize("bad", [-2, 5])
def test_targets_out_of_range(bad):
    logits = normal(1, 2, 5)
    with pytest.raises(ValueError, match=f"target id {bad} .*0 to 4, or -1"):
        layers.cross_entropy(logits, np.array([[0, bad]]), 1.0)


def test_targets_of_wrong_dtype_or_shape():
    with pytest.raises(ValueError, match="must be integers"):
        layers.cross_entropy(normal(2, 5), np.zeros(2), 1.0)
    with pytest.raises(ValueError, match=r"shape \(2, 1\); it must be \(2,\)"):
        layers.cross_entropy(normal(2, 5), np.zeros((2, 1), np.int64), 1.0)
    with pytest.raises(ValueError, match="float64"):
        layers.mse(normal(2, 5), np.zeros((2, 5)), 1.0)
    with pytest.raises(ValueError, match=r"shape \(2, 5\)"):
        layers.mse(normal(2, 5), normal(2, 4), 1.0)


def test_mse():
    y, target = normal(3, 5), normal(3, 5, seed=1)
    d = y.copy()
    error = y.astype(np.float64) - target
    assert layers.mse(d, target, 0.25) == pytest.approx((error**2).sum(), rel=1e-6)
    np.testing.assert_allclose(d, 0.5 * error, atol=1e-6)


def test_no_rows_no_loss():
    assert layers.cross_entropy(normal(0, 5), np.zeros(0, np.int64), 1.0) == 0
    assert layers.mse(normal(0, 5), normal(0, 5), 1.0) == 0


# ---- dropout -----------------------------------------------------------------------------------


def test_dropout_backward_is_dropout():
    x, dy = normal(3, 4, 5), normal(3, 4, 5, seed=1)
    y, dx = (layers.dropout(a, 0.4, 2**63 + 5, 7) for a in (x, dy))
    kept = y != 0
    np.testing.assert_array_equal(dx, np.where(kept, dy * np.float32(1 / 0.6), 0))
    assert x.tobytes() == normal(3, 4, 5).tobytes() and 0 < kept.sum() < kept.size


# ---- what arrays must be -----------------------------------------------------------------------


def test_wrong_arrays_are_refused():
    x, w = normal(4, 3), normal(2, 3)
    with pytest.raises(ValueError, match="bias"):
        layers.linear(x, w, normal(3))
    with pytest.raises(ValueError, match="residual"):
        layers.residual_add(normal(4, 2), normal(2), normal(4, 3))
    with pytest.raises(ValueError, match="weight gradient"):
        layers.linear_backward(x, w, normal(4, 2), np.empty((2, 3)), None)
    with pytest.raises(ValueError, match="layer norm weight"):
        layers.layernorm(x, normal(3).astype(np.float64), normal(3))
    with pytest.raises(ValueError, match="not a multiple of 3 times 2 heads"):
        layers.attention(normal(1, 2, 9), 2)
