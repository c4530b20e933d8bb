"""Llama: kernels and gradients against a float64 reference, the ladder's bits, wrong input."""

import math

import numpy as np
import pytest
import reference
from by_hand import gradients, initial, same, tokens

import zeromp as zm
from zeromp import account, gated
from zeromp.models import Scope, llama

HEADS = 2


def model_of(**options):
    return llama(vocab=11, layers=2, width=8, heads=HEADS, context=7, hidden=5, **options)


# ---- float64 -------------------------------------------------------------------------------------


def rmsnorm(x, w):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * w


def swiglu(x):
    gate, up = np.split(x, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def rotated(qkv, heads):
    """As products of complex numbers: one per pair of channels i and i + D / 2."""
    batch, time, width = qkv.shape
    parts = qkv.reshape(batch, time, 3, heads, 2, width // (6 * heads)).astype(np.float64)
    half = parts.shape[-1]
    angles = np.arange(time)[:, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (parts[..., 0, :] + 1j * parts[..., 1, :]) * np.exp(1j * angles)[:, None, None]
    out = np.stack([turned.real, turned.imag], axis=-2)
    out[:, :, 2] = parts[:, :, 2]
    return out.reshape(qkv.shape)


def loss_of(w, ids, targets):
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    x = w["wte.weight"][ids]
    for i in range(2):
        layer = {n.split(".")[2]: a for n, a in w.items() if n.startswith(f"blocks.{i}.")}
        qkv = rotated(rmsnorm(x, layer["norm1"]) @ layer["qkv"].T, HEADS)
        x = x + reference.attention(qkv, HEADS) @ layer["proj"].T
        x = x + swiglu(rmsnorm(x, layer["norm2"]) @ layer["gate_up"].T) @ layer["down"].T
    logits = rmsnorm(x, w["norm.weight"]) @ w.get("head.weight", w["wte.weight"]).T
    return reference.cross_entropy(logits, targets)


# ---- layers --------------------------------------------------------------------------------------


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def slopes(f, x, dy):
    """Gradient of sum(f(x) * dy), by central differences in float64."""
    x = x.astype(np.float64)
    found = np.empty_like(x)
    for index in np.ndindex(x.shape):
        found[index] = reference.finite_difference(lambda z: float((f(z) * dy).sum()), x, index)
    return found


@pytest.mark.parametrize("size", [1, 7, 33, 130])
def test_rmsnorm(size):
    x, w, dy, more = (normal(3, size, seed=s) for s in range(4))
    w = w[0]
    y, stats = gated.rmsnorm(x, w)
    np.testing.assert_allclose(y, rmsnorm(x.astype(np.float64), w), atol=2e-6, rtol=2e-6)
    assert gated.rmsnorm_again(x, w, stats).tobytes() == y.tobytes()
    for row in range(3):  # the same bits wherever a row is
        alone, _ = gated.rmsnorm(x[row : row + 1].copy(), w)
        assert alone.tobytes() == y[row : row + 1].tobytes()
    dw = np.full(size, np.nan, np.float32)
    dx = gated.rmsnorm_backward(x, w, stats, dy.copy(), dw)
    np.testing.assert_allclose(dx, slopes(lambda z: rmsnorm(z, w), x, dy), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(dw, slopes(lambda z: rmsnorm(x, z), w, dy), atol=1e-4, rtol=1e-4)
    with_more = gated.rmsnorm_backward(x, w, stats, dy.copy(), None, more)
    np.testing.assert_array_equal(with_more, dx + more)


@pytest.mark.parametrize("size", [1, 7, 33, 600])
def test_swiglu(size):
    x, dy = normal(2, 2 * size) * 3, normal(2, size, seed=1)
    kept = x.copy()
    np.testing.assert_allclose(gated.swiglu(x), swiglu(x.astype(np.float64)), atol=3e-6, rtol=3e-6)
    dx = gated.swiglu_backward(x, dy)
    assert x.tobytes() == kept.tobytes()
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    exact = [dy * up * (sigmoid * (1 + gate * (1 - sigmoid))), dy * gate * sigmoid]
    np.testing.assert_allclose(dx, np.concatenate(exact, axis=-1), atol=1e-5, rtol=1e-5)


def test_swiglu_of_extreme_and_missing_numbers():
    x = np.float32([[-200, 200, np.nan, 1, 1, 1]])
    np.testing.assert_allclose(gated.swiglu(x)[0, :2], [0, 200], atol=1e-30)
    assert np.isnan(gated.swiglu(x)[0, 2])
    dx = gated.swiglu_backward(x, np.ones((1, 3), np.float32))
    np.testing.assert_allclose(dx[0, [0, 1, 3, 4]], [0, 1, 0, 200], atol=1e-30)
    assert np.isnan(dx[0, [2, 5]]).all()


@pytest.mark.parametrize(("heads", "depth"), [(1, 2), (3, 10), (2, 34)])
def test_rotate(heads, depth):
    qkv = normal(2, 9, 3 * heads * depth)
    turned = gated.rotate(qkv.copy(), heads)
    np.testing.assert_allclose(turned, rotated(qkv, heads), atol=1e-6, rtol=1e-5)
    assert turned[:, 0].tobytes() == qkv[:, 0].tobytes()  # position 0 is not turned
    np.testing.assert_allclose(gated.rotate(turned.copy(), heads, back=True), qkv, atol=1e-5)
    # The gradient is turned back: <dy, rotate(x)> = <rotate_back(dy), x>.
    dy = normal(*qkv.shape, seed=1)
    inner = (dy.astype(np.float64) * turned).sum()
    assert (gated.rotate(dy, heads, back=True) * np.float64(qkv)).sum() == pytest.approx(inner)


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [1, 7])
def test_gradients_against_finite_differences(tied, length):
    model = model_of(tied=tied)
    w = initial(model, spread=0.3)
    x, y = tokens(11, 3, length)
    x[0], y[0, 0] = x[0, 0], -1  # repeated tokens; an ignored target
    loss, g = gradients(model, w, x, y)
    assert loss == pytest.approx(loss_of(w, x, y), rel=1e-6)
    _, again = gradients(model, w, x, y, recompute=True)
    assert same(g, again)
    rng = np.random.default_rng(1)
    for name, array in w.items():
        for flat in rng.choice(array.size, min(6, array.size), replace=False):
            index = np.unravel_index(flat, array.shape)
            slope = reference.finite_difference(
                lambda z, name=name: loss_of({**w, name: z}, x, y), array, index
            )
            assert g[name][index] == pytest.approx(slope, abs=3e-6, rel=1e-4), (name, index)


def test_frozen_names_are_skipped():
    model = model_of()
    w, (x, y) = initial(model, spread=0.3), tokens(11, 2, 7)
    _, whole = gradients(model, w, x, y)
    for frozen in [(name,) for name in w]:
        _, part = gradients(model, w, x, y, frozen=frozen)
        assert same(part, {n: a for n, a in whole.items() if n not in frozen})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_stages_have_equal_bits_and_hold_what_is_forecast(size):
    model = model_of()
    x = np.random.default_rng(0).integers(0, 11, (2 * size, 7))

    def train(world):
        found = []
        for stage, recompute in ((0, False), (1, False), (2, True), (3, False), (3, True)):
            engine = zm.Engine(
                model, world=world, stage=stage, wire="bfloat16", recompute=recompute, poison=True
            )
            own = x[2 * world.rank : 2 * world.rank + 2]
            losses = []
            for _ in range(3):
                losses.append(engine.backward(own, own))
                assert engine.step(lr=0.01, clip=0.5).applied
            held = {k: n for k, n in engine.zero.store.held.items() if n and k != "activations"}
            assert held == {k: n for k, n in account.held(engine.zero.case, stage).items() if n}
            kept = engine.zero.store.peak["activations"]
            assert kept == engine.predicted_activations["device"]
            names = [p.name for unit in model.units for p in unit.parameters]
            found.append((losses, [engine.full(name).tobytes() for name in names]))
        return found

    for found in zm.threads(size, train):
        assert all(one == found[0] for one in found)
        assert found[0][0][2] < found[0][0][0]


def test_sizes():
    model = llama(vocab=100, layers=3, width=96, heads=4, context=16)
    hidden = 256  # 8/3 of 96
    block = 4 * 96 * 96 + 3 * 96 * hidden
    assert model.num_parameters == 3 * (block + 2 * 96) + 96 + 2 * 100 * 96
    products = 3 * block + 100 * 96
    assert model.flops_per_token() == 6 * products + 12 * 3 * 96 * 16
    assert llama(width=100, heads=5).path[1].layer.hidden == 320  # 266.7, rounded up
    head = model.initial(model.units[-1], 0)["head.weight"]
    assert head.std() == pytest.approx(0.02, rel=0.02)
    out = model.initial(model.units[1], 0)["blocks.0.down.weight"]
    assert out.std() == pytest.approx(0.02 / math.sqrt(6), rel=0.02)


def test_rows_do_not_depend_on_what_follows():
    model = model_of()
    w, (x, _) = initial(model, spread=0.3), tokens(11, 2, 7)

    def logits(ids):
        for visit in model.path:
            ids, _ = visit.layer.forward(w, ids, Scope())
        return ids

    for length in range(1, 7):
        np.testing.assert_allclose(logits(x[:, :length]), logits(x)[:, :length], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 12, "heads": 4}, "width 12 must be an even multiple of the number of heads, 4"),
        ({"layers": 0}, "layers 0 must be at least 1"),
        ({"hidden": 0}, "hidden 0 must be at least 1"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        llama(**options)


def test_wrong_arrays():
    with pytest.raises(ValueError, match="SwiGLU is given 3 channels"):
        gated.swiglu(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="9 channels make no even number for each of 3 heads"):
        gated.rotate(np.zeros((1, 2, 27), np.float32), 3)
