"""Tiles: the same function and initial values as untiled, in units that are narrower by the factor.

Gradients are looked at through SGD without momentum, which keeps them as "m".
"""

import dataclasses
import zlib

import numpy as np
import pytest
import reference
from toys import STAGES

import zeromp as zm
from zeromp import layers

VOCAB, CONTEXT = 11, 5
PLAIN = zm.SGD(lr=0.5, momentum=0.0)


def gpt(tiles=1, **options):
    sizes = {"layers": 2, "width": 6, "heads": 2, "context": CONTEXT} | options
    return zm.models.gpt(VOCAB, **sizes, tiles=tiles)


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=30)


def tokens(rows, seed=0):
    x, y = np.random.default_rng(seed).integers(0, VOCAB, (2, rows, CONTEXT))
    y[0, 0] = -1
    return x, y


def initial(model, seed=0):
    return {k: v for unit in model.units for k, v in model.initial(unit, seed).items()}


def noisy(model, spread=0.3):
    """Initial weights with noise, so that none is a special value."""
    rng = np.random.default_rng(1)
    return {
        name: a + spread * rng.standard_normal(a.shape, dtype=np.float32)
        for name, a in initial(model).items()
    }


def make(model, world=None, **options):
    options = {"optimizer": PLAIN, "wire": "float32", "poison": True, "seed": 3} | options
    return zm.Engine(model, world=world, **options)


def step(model, weights, x, y, **options):
    """Loss, and gradients by the names of the untiled model."""
    engine = make(model, weights=zm.models.cut_tiles(model, weights), **options)
    loss = engine.backward(x, y)
    engine.step()
    moments = {name: engine.moments(name)["m"] for name in engine.zero.names}
    return loss, zm.models.join_tiles(model, moments)


# ---- the same values -----------------------------------------------------------------------------


def test_initial_values_are_those_of_the_untiled_model():
    """Matrices are larger than what is drawn at a time; the reference draws them in one go."""
    options = {"layers": 1, "width": 320, "heads": 5}
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, zlib.crc32(b"blocks.0")])))
    expected = {}
    for p in gpt(**options).units[1].parameters:
        if p.std:
            expected[p.name] = rng.standard_normal(p.shape, np.float32) * np.float32(p.std)
    assert max(a.size for a in expected.values()) > 2**18 and len(expected) == 4
    for tiles in (1, 3):
        model = gpt(tiles, **options)
        found = zm.models.join_tiles(model, initial(model, 7))
        assert found.keys() == initial(gpt(**options)).keys()
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("tiles", [2, 3, 5, 40])
@pytest.mark.parametrize("kind", ["gpt", "mlp"])
def test_cut_and_joined(kind, tiles):
    build = {"gpt": gpt, "mlp": lambda tiles=1: zm.models.mlp((5, 9, 7, 3), tiles=tiles)}[kind]
    whole, model = build(), build(tiles)
    assert model.num_parameters == whole.num_parameters
    assert model.flops_per_token() == whole.flops_per_token()
    given = noisy(whole)
    cut = zm.models.cut_tiles(model, given)
    shapes = {p.name: p.shape for unit in model.units for p in unit.parameters}
    assert {name: a.shape for name, a in cut.items()} == shapes
    assert {a.ndim for n, a in cut.items() if n.endswith(".bias") or ".ln" in n} == {1}
    back = zm.models.join_tiles(model, cut)
    assert back.keys() == given.keys()
    assert all(back[n].tobytes() == given[n].tobytes() for n in given)
    drawn = zm.models.join_tiles(model, initial(model))
    assert all(drawn[n].tobytes() == a.tobytes() for n, a in initial(whole).items())


def test_a_tile_holds_what_its_name_says():
    """Two heads of three channels: tile 1 has rows 3 to 5 of q, k and v, and those columns."""
    model, given = gpt(2), noisy(gpt())
    cut = zm.models.cut_tiles(model, given)
    rows = [3, 4, 5, 9, 10, 11, 15, 16, 17]
    for name, expected in {
        "qkv.tile1.weight": given["blocks.0.qkv.weight"][rows],
        "qkv.tile1.bias": given["blocks.0.qkv.bias"][rows],
        "proj.tile1.weight": given["blocks.0.proj.weight"][:, 3:],
        "fc.tile0.bias": given["blocks.0.fc.bias"][:12],
        "out.tile1.weight": given["blocks.0.out.weight"][:, 12:],
    }.items():
        np.testing.assert_array_equal(cut[f"blocks.0.{name}"], expected)


# ---- the same function ---------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [2, 5])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gpt_gradients(tiles, recompute, dropout):
    """Loss and gradients are those of the whole model in float64: 5 tiles of 24, and of 2 heads."""
    whole = gpt(layers=1)
    model = gpt(tiles, layers=1, dropout=dropout)
    w, (x, y) = noisy(whole), tokens(3)
    loss, g = step(model, w, x, y, recompute=recompute)
    ones, scope = np.ones((3, CONTEXT, 6), np.float32), zm.models.Scope(seed=3)
    sites = ("embed", "blocks.0.proj", "blocks.0.out")
    masks = {site: layers.dropout(ones, dropout, scope.key(site), 0) for site in sites}
    assert loss == pytest.approx(reference.gpt_loss(w, x, y, 2, masks), rel=1e-6)
    assert g.keys() == w.keys()
    rng = np.random.default_rng(2)
    for name, array in w.items():
        for flat in rng.choice(array.size, min(5, array.size), replace=False):
            index = np.unravel_index(flat, array.shape)
            slope = reference.finite_difference(
                lambda z, name=name: reference.gpt_loss({**w, name: z}, x, y, 2, masks),
                array,
                index,
            )
            assert g[name][index] == pytest.approx(slope, abs=2e-6, rel=1e-4), (name, index)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [(5, 9, 3), (3, 4, 7, 1)])
def test_mlp_gradients(sizes, tiles, recompute):
    rng = np.random.default_rng(0)
    whole, model = zm.models.mlp(sizes, "mse"), zm.models.mlp(sizes, "mse", tiles)
    w = noisy(whole)
    x, y = (rng.standard_normal((7, n), dtype=np.float32) for n in (sizes[0], sizes[-1]))
    loss, g = step(model, w, x, y, recompute=recompute)

    def exact(w):
        z = x.astype(np.float64)
        for i in range(len(sizes) - 1):
            z = z @ np.float64(w[f"layers.{i}.weight"]).T + w[f"layers.{i}.bias"]
            z = reference.gelu(z) if i < len(sizes) - 2 else z
        return np.mean((z - y) ** 2)

    assert loss == pytest.approx(exact(w), rel=1e-5)
    for name, array in w.items():
        for index in np.ndindex(array.shape):
            slope = reference.finite_difference(
                lambda z, name=name: exact({**w, name: z}), array, index
            )
            assert g[name][index] == pytest.approx(slope, abs=3e-6, rel=1e-4)


def test_exact_sums_give_equal_bits():
    """Small integers, and a mean over a power of two: nothing is rounded, so nothing may differ."""
    rng = np.random.default_rng(0)
    whole = zm.models.mlp((5, 8), "mse")
    w = {n: rng.integers(-8, 9, a.shape).astype(np.float32) for n, a in initial(whole).items()}
    x = rng.integers(-8, 9, (4, 5)).astype(np.float32)
    y = rng.integers(-8, 9, (4, 8)).astype(np.float32)
    loss, g = step(whole, w, x, y)
    for tiles in (2, 3, 8):
        model = zm.models.mlp((5, 8), "mse", tiles)
        found, gradients = step(model, w, x, y)
        assert found == loss
        assert all(gradients[n].tobytes() == a.tobytes() for n, a in g.items())
        outputs = [
            make(m, weights=zm.models.cut_tiles(m, w)).predict(x).tobytes() for m in (whole, model)
        ]
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rule", [zm.AdamW(lr=0.02, eps=1e-4), zm.SGD(lr=0.3)])
@pytest.mark.parametrize("tied", [True, False])
def test_ten_steps_stay_within_the_tolerance(rule, tied):
    """docs/exactness.md: losses to 1e-5. What decays is told by names and shapes, as untiled."""
    losses, weights = [], []
    for tiles in (1, 2, 3):
        model = gpt(tiles, width=16, dropout=0.1, tied=tied)
        groups = [
            zm.Group("norms", "*.ln*", lr_factor=0.5),
            zm.Group("no decay", lambda _, shape: len(shape) < 2, weight_decay=0.0),
        ]
        engine = make(model, optimizer=dataclasses.replace(rule, weight_decay=1.0), groups=groups)
        run = []
        for _ in range(10):
            run.append(engine.backward(*tokens(4)))
            engine.step(clip=1.0)
        losses.append([*run, engine.evaluate(*tokens(4, seed=99))])
        full = {name: engine.full(name) for name in engine.zero.names}
        weights.append(zm.models.join_tiles(model, full))
    assert losses[0][0] - losses[0][9] > 0.05
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
    for name, array in weights[0].items():
        for other in weights[1:]:
            np.testing.assert_allclose(other[name], array, atol=2e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_tiled_block_may_be_visited_twice(recompute):
    w, (x, y) = noisy(gpt()), tokens(3)

    def again(tiles):
        model = gpt(tiles, dropout=0.1)
        path = model.path
        first = [v for v in path if v.unit.startswith("blocks.0")]
        return dataclasses.replace(model, path=(*path[:-1], *first, path[-1]))

    inner = [
        visit.carried for visit in again(3).path if visit.unit.startswith("blocks.0.perceptron")
    ]
    assert inner == [False, True, False] * 2
    one, other = (step(again(tiles), w, x, y, recompute=recompute) for tiles in (1, 2))
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for name, array in one[1].items():
        np.testing.assert_allclose(other[1][name], array, atol=2e-6, rtol=1e-4)


# ---- stages, recomputation, frozen parameters ----------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_stages_and_recomputation_give_equal_bits(num_ranks, wire):
    model = gpt(3, layers=1, dropout=0.1)

    def train(world, stage, **options):
        engine = make(model, world, stage=stage, wire=wire, optimizer=zm.AdamW(eps=1e-2), **options)
        losses = []
        for t in range(2):
            losses.append(engine.backward(*tokens(2, seed=10 * t + world.rank)))
            engine.step(lr=0.01)
        return losses, {n: engine.master(n).tobytes() for n in engine.zero.names}

    found = [threads(num_ranks, lambda world, s=s: train(world, s)) for s in STAGES]
    found += [threads(num_ranks, lambda world: train(world, 3, recompute=True, prefetch=2))]
    moved = {"recompute": True, "offload": "activations=host"}
    found += [threads(num_ranks, lambda world: train(world, 3, **moved))]
    assert all(run == found[0] for run in found)


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_tiles_are_skipped(recompute):
    model, (x, y) = gpt(2, layers=1), tokens(3)
    w = noisy(gpt(layers=1))
    frozen = ["*.qkv.tile1.*", "*.out.bias", "*.ln2.*", "*.fc.tile0.weight"]
    engines = [
        make(model, weights=zm.models.cut_tiles(model, w), recompute=recompute, frozen=names)
        for names in ([], frozen)
    ]
    for engine in engines:
        engine.backward(x, y)
        engine.step()
    whole, part = engines
    still = 0
    for p in (p for unit in model.units for p in unit.parameters):
        if part.moments(p.name):
            assert part.full(p.name).tobytes() == whole.full(p.name).tobytes()
        else:
            still += 1
    assert still == 6


# ---- narrower units, and what is kept ------------------------------------------------------------


@pytest.mark.parametrize("tiles", [2, 4, 8])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_widest_unit_falls_by_the_factor(tiles, wire):
    width = 64

    def widest(model):
        return max(sum(p.size for p in unit.parameters) for unit in model.units)

    sizes = {"layers": 1, "width": width, "heads": 8}
    whole, model = gpt(**sizes), gpt(tiles, **sizes)
    assert widest(whole) == 12 * width**2 + 13 * width
    assert widest(model) == 4 * width // tiles * (2 * width + 1) + 3 * width
    assert tiles * widest(model) < widest(whole)

    def buffers(world, model):
        zero = make(model, world, stage=3, wire=wire).zero
        held = {k: n for k, n in zero.store.held.items() if n}
        assert held == {k: n for k, n in zm.account.held(zero.case, 3).items() if n}
        return held["buffers"]

    before, after = (threads(2, lambda w, m=m: buffers(w, m))[0] for m in (whole, model))
    assert tiles * after < 1.1 * before  # the embedding opens a bucket of its own


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "model",
    [gpt(3, dropout=0.1), gpt(4, heads=1, tied=False), zm.models.mlp((5, 9, 4), tiles=4)],
    ids=lambda model: model.name,
)
def test_what_is_held_and_sent_is_as_predicted(model, stage, recompute):
    if model.context:
        x, y = tokens(3)
    else:
        x, y = np.ones((3, 5), np.float32), np.zeros(3, np.int64)

    def train(world):
        engine = make(model, world, stage=stage, recompute=recompute, wire="bfloat16")
        engine.backward(x, y)
        engine.step()
        zero = engine.zero
        held = zm.account.held(zero.case, stage)
        held["activations"] = engine.predicted_activations["device"]
        assert {k: n for k, n in zero.store.peak.items() if n} == {
            k: n for k, n in held.items() if n
        }
        path = [visit.unit for visit in model.path]
        sent = zm.account.sent(zero.case, stage, path=path)
        assert {verb: world.ledger.sent(verb) for verb in sent} == sent

    threads(2, train)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (gpt(3, dropout=0.1), tokens(3)[0]),
        (gpt(4, heads=1), tokens(2)[0]),
        (zm.models.mlp((5, 9, 1), tiles=4), np.ones((7, 5), np.float32)),
    ],
)
def test_activation_bytes_are_those_of_the_arrays(model, x):
    """None is a view that would keep a wider array alive."""
    w, actual = initial(model), []
    predicted = model.activation_bytes(len(x), x.shape[1] if model.vocab else 1)
    for visit in model.path:
        y, saved = visit.layer.forward(w, x, zm.models.Scope(train=True))
        arrays = [a for a in saved if a is not None]
        for a in arrays:
            base = a
            while isinstance(base.base, np.ndarray):
                base = base.base
            assert base.nbytes == a.nbytes
        actual.append((sum(a.nbytes for a in arrays), x.nbytes))
        x = y
    assert predicted == actual


def test_what_is_kept_does_not_grow_with_the_tiles():
    """2 C numbers per token and block above untiled; with recompute 6 C in all."""
    saved, kept = [], []
    x, y = tokens(4)
    for tiles in (1, 2, 4):
        for recompute, found in ((False, saved), (True, kept)):
            engine = make(gpt(tiles, heads=4, width=8), recompute=recompute)
            engine.backward(x, y)
            found.append(engine.zero.store.peak["activations"])
    tokens_bytes = 4 * x.size
    assert [n - saved[0] for n in saved] == [0] + [2 * 2 * 8 * tokens_bytes] * 2
    assert [n - kept[0] for n in kept] == [0] + [2 * 5 * 8 * tokens_bytes] * 2


def test_recompute_keeps_the_input_of_the_last_tile_of_a_layer():
    """Outputs 0 to 5 and x before the last tile of layer 0; layer 1 is not computed again."""
    engine = make(zm.models.mlp((5, 9, 4), tiles=3), recompute=True)
    engine.backward(np.ones((7, 5), np.float32), np.zeros(7, np.int64))
    assert engine.zero.store.peak["activations"] == 4 * 7 * (5 + 6 + 9)


# ---- mistakes ------------------------------------------------------------------------------------


def test_mistakes_name_the_value():
    with pytest.raises(ValueError, match="gpt: tiles 0 must be at least 1"):
        gpt(0)
    with pytest.raises(ValueError, match="mlp: tiles -1 must be at least 1"):
        zm.models.mlp((3, 2), tiles=-1)
    model, w = gpt(2), noisy(gpt())
    with pytest.raises(ValueError, match=r"blocks.1.fc.weight' has shape \(2, 2\); it must be"):
        zm.models.cut_tiles(model, {**w, "blocks.1.fc.weight": np.ones((2, 2), np.float32)})
    cut = zm.models.cut_tiles(model, w)
    del cut["blocks.0.out.tile1.weight"]
    with pytest.raises(ValueError, match=r"'blocks.0.out.tile1.weight' is missing"):
        zm.models.join_tiles(model, cut)
