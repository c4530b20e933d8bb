"""Models: the peers' losses, gradients against a float64 reference, dropout, bytes, wrong input."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import reference
from by_hand import TRAIN, forward, gradients, initial, same, tokens

from zeromp import layers
from zeromp.models import Model, Scope, Visit, gpt, mlp

# ---- the GPT against the peers and against float64 ---------------------------------------------


def peers(size):
    shape = reference.SIZES[size]
    model = gpt(shape.vocab, shape.layers, shape.width, shape.heads, shape.context)
    data = reference.MarkovTokens(shape.vocab, shape.context, reference.SEED)
    return shape, model, reference.init_weights(shape, reference.SEED), data


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "batch"), [("XS", 16), ("XS", 32), ("S", 8), ("M", 4)])
def test_first_loss_of_the_peers(size, batch):
    _, model, w, data = peers(size)
    out, y = data.batch(0, batch)
    for visit in model.path:
        out, _ = visit.layer.forward(w, out, Scope())
    loss = model.loss(out, y, 1.0) / model.count(y)
    assert loss == pytest.approx(reference.LOSSES[size, batch][0], abs=2e-5)


@pytest.mark.timeout(300)
def test_loss_curve_of_the_peers():
    expected = reference.LOSSES["XS", 16][:6]
    _, model, w, data = peers("XS")
    state = {n: (a.astype(np.float64), 0.0, 0.0) for n, a in w.items()}
    losses = []
    for step in range(len(expected)):
        x, y = data.batch(step, 16)
        loss, g = gradients(model, w, x, y)
        losses.append(loss)
        for name, (p, m, v) in state.items():
            state[name] = reference.adamw(p, g[name], m, v, step + 1, **reference.PEERS_ADAMW)
        w = {name: p.astype(np.float32) for name, (p, _, _) in state.items()}
    np.testing.assert_allclose(losses, expected, atol=2e-5)


@pytest.mark.parametrize("size", reference.SIZES)
def test_sizes_of_the_peers(size):
    shape, model, w, _ = peers(size)
    assert model.num_parameters == shape.params == sum(a.size for a in w.values())
    assert model.flops_per_token() == shape.flops_per_token
    assert {p.name: p.shape for u in model.units for p in u.parameters} == {
        name: array.shape for name, array in w.items()
    }


def check_gradients(model, w, x, y, heads, masks=None):
    """Compare the loss, and six elements of each gradient, with the float64 reference."""
    loss, g = gradients(model, w, x, y)
    assert loss == pytest.approx(reference.gpt_loss(w, x, y, heads, masks), rel=1e-6)
    rng = np.random.default_rng(1)
    for name, array in w.items():
        for flat in rng.choice(array.size, min(6, array.size), replace=False):
            index = np.unravel_index(flat, array.shape)
            slope = reference.finite_difference(
                lambda z, name=name: reference.gpt_loss({**w, name: z}, x, y, heads, masks),
                array,
                index,
            )
            assert g[name][index] == pytest.approx(slope, abs=2e-6, rel=1e-4), (name, index)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [1, 5, 7])
def test_gpt_gradients(tied, length):
    model = gpt(vocab=11, layers=2, width=6, heads=2, context=7, tied=tied)
    w = initial(model, spread=0.3)
    x, y = tokens(11, 3, length)
    x[0], y[0, 0] = x[0, 0], -1  # repeated tokens; an ignored target
    check_gradients(model, w, x, y, heads=2)


def test_gpt_without_dropout_ignores_the_scope():
    model = gpt(vocab=11, layers=2, width=6, heads=2, context=7)
    w, (x, y) = initial(model), tokens(11, 2, 7)
    assert same(gradients(model, w, x, y, TRAIN)[1], gradients(model, w, x, y, Scope())[1])


def test_shorter_rows_are_the_start_of_longer_ones():
    model = gpt(vocab=11, layers=2, width=6, heads=2, context=7)
    w, (x, _) = initial(model, spread=0.3), tokens(11, 2, 7)
    long, _ = forward(model, w, x, Scope())
    for length in range(1, 7):
        short, _ = forward(model, w, x[:, :length], Scope())
        np.testing.assert_allclose(short, long[:, :length], atol=1e-5)


# ---- frozen parameters, repeated units ---------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_names_are_skipped(tied):
    model = gpt(vocab=11, layers=2, width=6, heads=2, context=7, dropout=0.1, tied=tied)
    w, (x, y) = initial(model, spread=0.3), tokens(11, 2, 7)
    _, whole = gradients(model, w, x, y)
    for frozen in [(name,) for name in w] + [tuple(w)[::2], tuple(w)]:
        _, part = gradients(model, w, x, y, frozen=frozen)
        assert same(part, {n: a for n, a in whole.items() if n not in frozen})


@pytest.mark.parametrize("frozen", [(), ("blocks.1.fc.weight", "blocks.1.ln1.bias")])
def test_a_block_may_be_visited_twice(frozen):
    once = gpt(vocab=11, layers=2, width=6, heads=2, context=7)
    bottom, first, second, top = once.path
    model = dataclasses.replace(once, path=(bottom, second, first, second, second, top))
    w, (x, y) = initial(once, spread=0.3), tokens(11, 2, 7)
    assert dataclasses.replace(model, name="again").path == model.path

    # Three copies of the block, each visited once: the gradients of the copies add up.
    deep = gpt(vocab=11, layers=4, width=6, heads=2, context=7)
    source = {0: 1, 1: 0, 2: 1, 3: 1}
    apart = {
        p.name: w[p.name.replace(f"blocks.{i}.", f"blocks.{source[i]}.")]
        for i, unit in enumerate(deep.units[1:])
        for p in unit.parameters
    } | {name: array for name, array in w.items() if not name.startswith("blocks")}
    (loss, g), (deep_loss, parts) = (
        gradients(model, w, x, y, frozen=frozen),
        gradients(deep, apart, x, y),
    )
    assert loss == deep_loss and not set(frozen) & g.keys()
    for name, array in g.items():
        copies = [
            parts[name.replace(f"blocks.{j}.", f"blocks.{i}.")]
            for i, j in source.items()
            if name.startswith(f"blocks.{j}.")
        ]
        total = np.sum(copies, axis=0) if copies else parts[name]
        np.testing.assert_allclose(array, total, atol=1e-6, rtol=1e-5)


# ---- dropout (O-102) ---------------------------------------------------------------------------


def dropped(**options):
    return gpt(**{"vocab": 11, "layers": 2, "width": 8, "heads": 2, "context": 7} | options)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_o102_recompute_draws_the_same_masks(rate):
    model = dropped(dropout=rate)
    w, (x, y) = initial(model, spread=0.3), tokens(11, 4, 7)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    whole = gradients(model, w, x, y)
    again = gradients(model, w, x, y, recompute=True)
    assert whole[0] == again[0] and same(whole[1], again[1])
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


def test_o102_masks_do_not_depend_on_the_cut():
    model = dropped(dropout=0.2)
    w, (x, _) = initial(model, spread=0.3), tokens(11, 6, 7)
    whole, _ = forward(model, w, x, TRAIN)
    for cut in ([2, 4], [1, 1, 1, 3]):
        at = np.cumsum([0, *cut])
        parts = [
            forward(model, w, x[a:b], dataclasses.replace(TRAIN, first_sample=40 + a))[0]
            for a, b in pairwise(at)
        ]
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)


def test_dropout_changes_with_seed_step_and_sample_and_only_in_training():
    model = dropped(dropout=0.2)
    w, (x, _) = initial(model, spread=0.3), tokens(11, 1, 7)
    scopes = [TRAIN]
    scopes += [dataclasses.replace(TRAIN, **{n: 99}) for n in ("seed", "step", "first_sample")]
    outputs = [forward(model, w, x, scope)[0].tobytes() for scope in scopes]
    assert len(set(outputs)) == len(outputs)
    evaluated, _ = forward(model, w, x, dataclasses.replace(TRAIN, train=False))
    plain, _ = forward(dropped(), w, x, TRAIN)
    assert evaluated.tobytes() == plain.tobytes()


SITES = ("embed", *(f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("proj", "out")))


def test_sites_have_masks_of_their_own():
    ones = np.ones((4, 64, 64), np.float32)
    masks = [layers.dropout(ones, 0.5, TRAIN.key(site), 0).ravel() for site in SITES]
    correlation = np.corrcoef(masks)
    assert np.abs(correlation - np.eye(len(SITES))).max() < 5 / np.sqrt(ones.size)


def test_dropout_gradients():
    """Forward and backward use the masks that SITES name, for the samples of the scope."""
    model = dropped(dropout=0.3)
    w, (x, y) = initial(model, spread=0.3), tokens(11, 3, 7)
    ones = np.ones((3, 7, 8), np.float32)
    masks = {site: layers.dropout(ones, 0.3, TRAIN.key(site), TRAIN.first_sample) for site in SITES}
    check_gradients(model, w, x, y, heads=2, masks=masks)


# ---- what is kept ------------------------------------------------------------------------------


def kept_bytes(saved):
    return sum(a.nbytes for a in {id(a): a for a in saved if a is not None}.values())


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (dropped(), tokens(11, 3, 5)[0]),
        (dropped(dropout=0.1, tied=False), tokens(11, 1, 7)[0]),
        (mlp((5, 9, 3)), np.ones((7, 5), np.float32)),
        (mlp((5, 3)), np.ones((2, 5), np.float32)),
    ],
)
def test_activation_bytes(model, x):
    _, kept = forward(model, initial(model), x, TRAIN)
    actual = [(kept_bytes(saved), given.nbytes) for given, saved in kept]
    assert model.activation_bytes(len(x), x.shape[1] if model.vocab else 1) == actual


@pytest.mark.parametrize("recompute", [True, False])
def test_saved_arrays_view_no_weights_and_stay_as_they_are(recompute):
    model = dropped(dropout=0.1)
    w, (x, y) = initial(model, spread=0.3), tokens(11, 2, 7)
    before = {n: a.copy() for n, a in w.items()}
    out, kept = forward(model, w, x, TRAIN)
    arrays = [a for given, saved in kept for a in (given, *saved) if a is not None]
    for array in arrays:
        assert not any(np.may_share_memory(array, weight) for weight in w.values())
    copies = [a.copy() for a in arrays]
    model.loss(out, y, 1.0)
    dy = out
    g = {n: np.zeros_like(a) for n, a in w.items()}
    for visit, (given, saved) in zip(reversed(model.path), reversed(kept), strict=True):
        if recompute:
            _, saved = visit.layer.forward(w, given, TRAIN)
        dy = visit.layer.backward(w, saved, dy, g, TRAIN)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(arrays, copies, strict=True))
    assert same(w, before)


def test_the_caller_may_reuse_its_tokens():
    model = dropped()
    x, _ = tokens(11, 2, 7)
    _, kept = forward(model, initial(model), x, Scope())
    (ids,) = kept[0][1]
    assert not np.may_share_memory(ids, x)


# ---- initial values ----------------------------------------------------------------------------


def test_initial_values_depend_on_seed_and_unit_alone():
    small, large = gpt(layers=2), gpt(layers=2, context=64, dropout=0.1, tied=False)
    block = small.units[1]
    a = small.initial(block, 7)
    assert same(a, large.initial(large.units[1], 7))
    assert not same(a, small.initial(block, 8))
    other = small.initial(small.units[2], 7)
    assert not np.array_equal(a["blocks.0.qkv.weight"], other["blocks.1.qkv.weight"])


def test_initial_values_of_gpt():
    w = initial(gpt(layers=2, vocab=512))
    for name, std in (
        ("wte.weight", 0.02),
        ("wpe.weight", 0.02),
        ("blocks.1.qkv.weight", 0.02),
        ("blocks.1.fc.weight", 0.02),
        ("blocks.1.proj.weight", 0.01),
        ("blocks.1.out.weight", 0.01),
    ):
        n = w[name].size
        assert w[name].std() == pytest.approx(std, rel=5 / np.sqrt(2 * n))
        assert abs(w[name].mean()) < 5 * std / np.sqrt(n)
    assert (w["blocks.0.ln1.weight"] == 1).all() and (w["ln_f.weight"] == 1).all()
    assert not any(a.any() for n, a in w.items() if n.endswith("bias"))
    assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in w.values())


# ---- the perceptron ----------------------------------------------------------------------------


def perceptron(w, x):
    last = len(w) // 2 - 1
    for i in range(last + 1):
        x = x @ np.float64(w[f"layers.{i}.weight"]).T + w[f"layers.{i}.bias"]
        x = x if i == last else reference.gelu(x)
    return x


@pytest.mark.parametrize("sizes", [(3, 2), (3, 5, 4), (1, 4, 4, 1)])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("recompute", [True, False])
def test_mlp_gradients(sizes, loss, recompute):
    model, rng = mlp(sizes, loss), np.random.default_rng(0)
    w = initial(model, spread=0.3)
    x = rng.standard_normal((7, sizes[0]), dtype=np.float32)
    if loss == "mse":
        y = rng.standard_normal((7, sizes[-1]), dtype=np.float32)
    else:
        y = rng.integers(-1, sizes[-1], 7)
        y[0] = 0

    def exact(w):
        out = perceptron(w, x.astype(np.float64))
        return reference.cross_entropy(out, y) if loss != "mse" else np.mean((out - y) ** 2)

    value, g = gradients(model, w, x, y, recompute=recompute)
    assert value == pytest.approx(exact(w), rel=1e-5, abs=1e-6)
    for name, array in w.items():
        for index in np.ndindex(array.shape):
            slope = reference.finite_difference(
                lambda z, name=name: exact({**w, name: z}), array, index
            )
            assert g[name][index] == pytest.approx(slope, abs=3e-6, rel=1e-4)
    assert model.num_parameters == sum(a.size for a in w.values())
    assert model.flops_per_token() == 6 * sum(a.size for a in w.values() if a.ndim == 2)


# ---- wrong input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 10, "heads": 4}, "width 10 must be a multiple of the number of heads, 4"),
        ({"vocab": 0}, "vocab 0 must be at least 1"),
        ({"layers": 0}, "layers 0"),
        ({"context": -1}, "context -1"),
        ({"heads": 0}, "heads 0"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"dropout": -0.1}, "dropout -0.1"),
        ({"dropout": float("nan")}, "dropout nan"),
    ],
)
def test_gpt_refuses_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        gpt(**options)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0, 256]], None, "token id 256 is out of range: it must be 0 to 255"),
        ([[-1, 0]], None, "token id -1"),
        ([[0.0]], None, "must be integers"),
        ([0, 1], None, r"must be \(B, T\)"),
        ([[0] * 9], None, "T from 1 to 8"),
        (np.zeros((2, 0), int), None, "T from 1 to 8"),
        ([[0, 1]], [[0, -2]], "target id -2"),
        ([[0, 1]], [[0, 256]], "target id 256 .*-1 for a target"),
        ([[0, 1]], [[0]], r"targets have shape \(1, 1\); it must be \(1, 2\)"),
        ([[0, 1]], [[0.5, 1]], "must be integers"),
    ],
)
def test_gpt_refuses_wrong_input(x, y, message):
    model = gpt(context=8)
    with pytest.raises(ValueError, match=message):
        model.check(np.array(x), None if y is None else np.array(y))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((2, 3)), None, "inputs is float64"),
        (np.ones((2, 4), np.float32), None, r"must be contiguous float32 of shape \(2, 3\)"),
        (np.full((2, 3), np.inf, np.float32), None, "must be finite"),
        (np.ones((2, 3), np.float32), np.full((2, 2), np.nan, np.float32), "targets hold"),
        (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), "3 targets for 2 inputs"),
        (np.float32(1), None, "shape"),
    ],
)
def test_mlp_refuses_wrong_input(x, y, message):
    with pytest.raises(ValueError, match=message):
        mlp((3, 2), "mse").check(x, y)


def test_mlp_refuses_wrong_sizes():
    for sizes, loss in (((3,), "mse"), ((3, 0), "mse"), ((3, 2), "l1")):
        with pytest.raises(ValueError, match="mlp: "):
            mlp(sizes, loss)
    with pytest.raises(ValueError, match="target id 2"):
        mlp((3, 2)).check(np.ones((1, 3), np.float32), np.array([2]))


def test_models_refuse_a_path_that_forgets_a_unit():
    model = gpt()
    with pytest.raises(ValueError, match=r"blocks\.3"):
        dataclasses.replace(model, path=model.path[:4] + model.path[5:])
    with pytest.raises(ValueError, match="must be unique"):
        Model(
            "twice",
            (*mlp().units, *mlp().units),
            (Visit("layers.0", mlp().path[0].layer, ()),),
            layers.mse,
            np.size,
            model.check,
        )
