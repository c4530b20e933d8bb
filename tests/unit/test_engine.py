"""Engine: forward, backward and step over a model's units, on N ranks, at every stage."""

import dataclasses

import numpy as np
import pytest
import reference
from toys import STAGES, WIRES

import zeromp as zm

VOCAB, CONTEXT, HEADS = 13, 6, 2
PLAIN = zm.SGD(lr=0.5, momentum=0.0)  # keeps as "m" the gradient of the step


def threads(num_ranks, function, **options):
    return zm.threads(num_ranks, function, **{"debug": True, "timeout": 20} | options)


def tiny_gpt(layers=3, **options):
    return zm.models.gpt(VOCAB, layers=layers, width=8, heads=HEADS, context=CONTEXT, **options)


def make(world=None, stage=1, wire="float32", model=None, **options):
    options = {"optimizer": PLAIN, "poison": True} | options
    if wire == "float16":
        options.setdefault("loss_scale", 1024.0)
    return zm.Engine(model or tiny_gpt(), world=world, stage=stage, wire=wire, **options)


def rows(count, seed=0, holes=0.0):
    """Tokens and targets, some of which are -1."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, VOCAB, (2, count, CONTEXT))
    return x, np.where(rng.random(y.shape) < holes, -1, y)


def share(world, x, y, cuts=None):
    """This rank's rows of a global batch."""
    cuts = cuts or [len(x) * r // world.size for r in range(world.size + 1)]
    mine = slice(cuts[world.rank], cuts[world.rank + 1])
    return x[mine], y[mine]


def every(engine, get=None):
    return {name: (get or engine.full)(name) for name in engine.zero.names}


def bits(engine):
    found = {}
    for name in engine.zero.names:
        arrays = [engine.full(name), engine.master(name), *engine.moments(name).values()]
        found[name] = [a.tobytes() for a in arrays]
    return found


def gradients(engine):
    return every(engine, lambda name: engine.moments(name)["m"])


def close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance, err_msg=name)


def raised_alike(num_ranks, function, match, kind=ValueError):
    """Each rank's error: of one kind and message on all of them."""

    def call(world):
        with pytest.raises(kind, match=match) as caught:
            function(world)
        return str(caught.value)

    assert len(set(threads(num_ranks, call))) == 1


# ---- initial weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_the_model_s_whatever_the_number_of_ranks(num_ranks, stage, tied):
    model = tiny_gpt(tied=tied)
    expected = {}
    for unit in model.units:
        expected |= model.initial(unit, 7)
    for found in threads(num_ranks, lambda w: every(make(w, stage, model=model, seed=7))):
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["all at once", "unit by unit", "read-only"])
def test_users_bring_their_own_weights(stage, how):
    model = tiny_gpt()
    rng = np.random.default_rng(3)
    mine = {p.name: rng.normal(size=p.shape) for unit in model.units for p in unit.parameters}
    names = {unit.name: unit.names for unit in model.units}
    for array in mine.values():
        array.flags.writeable = how != "read-only"
    if how == "read-only":
        mine = {name: array.astype(np.float32) for name, array in mine.items()}
        for array in mine.values():
            array.flags.writeable = False
    weights = mine if how != "unit by unit" else lambda u: {n: mine[n] for n in names[u]}
    for found in threads(2, lambda w: every(make(w, stage, model=model, weights=weights))):
        close(found, mine, 1e-6)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.pop("ln_f.bias"), "'ln_f.bias' of unit 'embed' is missing"),
        (lambda w: w.update({"ln_f.bias": np.zeros(9)}), r"'ln_f.bias' has shape \(9,\)"),
        (lambda w: w["ln_f.bias"].fill(np.nan), "'ln_f.bias' holds nan"),
        (lambda w: w["ln_f.bias"].fill(0.5), "initial values must be the same on all ranks"),
    ],
)
def test_wrong_weights_on_one_rank_are_one_message_on_all(change, match):
    def build(world):
        model = tiny_gpt()
        weights = {}
        for unit in model.units:
            weights |= model.initial(unit, 0)
        if world.rank == 1:
            change(weights)
        make(world, model=model, weights=weights)

    raised_alike(2, build, match)


# ---- gradients -----------------------------------------------------------------------------------


def along(weights, direction, x, y, heads=HEADS):
    """Derivative of the float64 loss along a direction in the space of all weights."""

    def f(t):
        moved = {n: w + t[0] * direction[n] for n, w in weights.items()}
        return reference.gpt_loss(moved, x, y, heads)

    return reference.finite_difference(f, np.zeros(1), 0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_that_of_the_mean_over_the_targets_of_all_ranks(stage, recompute, tied):
    x, y = rows(7, seed=1, holes=0.4)

    def train(world):
        engine = make(world, stage, model=tiny_gpt(tied=tied), recompute=recompute)
        weights = every(engine)
        loss = engine.backward(*share(world, x, y, [0, 1, 5, 7]))
        return weights, loss, engine.step(), gradients(engine)

    for weights, loss, report, g in threads(3, train):
        w64 = {name: array.astype(np.float64) for name, array in weights.items()}
        assert loss == report.loss == pytest.approx(reference.gpt_loss(w64, x, y, HEADS), rel=1e-6)
        assert report.weight == (y >= 0).sum()
        norm = np.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in g.values()))
        assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    rng = np.random.default_rng(0)
    for direction in (g, *({n: rng.normal(size=a.shape) for n, a in g.items()} for _ in "123")):
        inner = sum(float((g[n] * d).sum()) for n, d in direction.items())
        assert inner == pytest.approx(along(w64, direction, x, y), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_does_not_depend_on_how_samples_are_spread(stage, recompute):
    x, y = rows(8, seed=2)
    model = tiny_gpt(dropout=0.2)

    def train(world, num_micro=1, cuts=None):
        engine = make(
            world, stage, model=model, recompute=recompute, micro_batches=num_micro, seed=4
        )
        for t in range(2):  # the masks of the second step are other ones
            for part in np.split(np.arange(8), num_micro):
                engine.backward(*share(world, x[part], y[part], cuts))
            engine.step(lr=0.0 if t == 0 else None)
        return gradients(engine)

    expected = threads(1, train)[0]
    for num_ranks, num_micro, cuts in (
        (2, 1, None), (4, 1, None), (1, 2, None), (2, 2, None), (3, 1, [0, 1, 6, 8])
    ):  # fmt: skip
        for found in threads(num_ranks, lambda w, a=num_micro, c=cuts: train(w, a, c)):
            close(found, expected, 1e-6)


def test_dropout_changes_from_step_to_step_and_with_the_seed():
    x, y = rows(4)

    def losses(seed):
        engine = make(model=tiny_gpt(dropout=0.2), seed=seed, weights=every(make(seed=0)))
        return [(engine.backward(x, y), engine.step(lr=0.0))[0] for _ in range(2)]

    assert len({*losses(1), *losses(2)}) == 4


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_samples_takes_part(stage):
    x, y = rows(4)

    def train(world, cuts):
        engine = make(world, stage)
        engine.backward(*share(world, x, y, cuts))
        return engine.step().loss, gradients(engine)

    expected_loss, expected = threads(1, lambda w: train(w, [0, 4]))[0]
    for loss, found in threads(3, lambda w: train(w, [0, 3, 3, 4])):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        close(found, expected, 1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("empty", [0, 1])
def test_a_micro_batch_without_targets_does_not_count(stage, empty):
    x, y = rows(2)

    def train(world):
        engine = make(world, stage, micro_batches=2)
        losses = [engine.backward(x, np.full_like(y, -1) if m == empty else y) for m in range(2)]
        return losses, engine.step().loss, gradients(engine)

    def plain(world):
        engine = make(world, stage)
        loss = engine.backward(x, y)
        engine.step()
        return loss, gradients(engine)

    expected_loss, expected = threads(2, plain)[0]
    for losses, loss, found in threads(2, train):
        assert np.isnan(losses[empty])
        assert loss == losses[1 - empty] == pytest.approx(expected_loss, rel=1e-6)
        close(found, expected, 1e-6)


# ---- the ladder ----------------------------------------------------------------------------------


def train_some(world, stage, wire="float32", num_micro=1, count=3, **options):
    rule = options.pop("optimizer", zm.AdamW(weight_decay=0.1))
    engine = make(world, stage, wire, optimizer=rule, micro_batches=num_micro, **options)
    reports = []
    for t in range(count):
        for m in range(num_micro):
            engine.backward(*rows(2, seed=100 * t + 10 * m + world.rank, holes=0.2))
        reports.append(repr(engine.step(lr=0.01, clip=0.5)))
    return bits(engine), reports


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("tied", [True, False])
def test_all_stages_have_the_same_bits_with_and_without_recompute(num_ranks, wire, tied):
    model = tiny_gpt(2, tied=tied, dropout=0.1)
    found = [
        threads(num_ranks, lambda w, s=s, r=r: train_some(w, s, wire, model=model, recompute=r))
        for s in STAGES
        for r in (False, True)
    ]
    first = found[0][0]
    assert all(rank == first for ranks in found for rank in ranks)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("rule", [zm.AdamW(), zm.SGD()])
def test_with_micro_batches_stages_0_and_1_are_equal_and_2_and_3(wire, rule):
    found = [
        threads(3, lambda w, s=s: train_some(w, s, wire, num_micro=3, optimizer=rule))
        for s in STAGES
    ]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all(rank == ranks[0] for ranks in found for rank in ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_held_and_sent_are_as_predicted(num_ranks, stage, wire, tied):
    model = tiny_gpt(tied=tied)

    def train(world):
        engine = make(world, stage, wire, model=model, micro_batches=2)
        for _ in range(2):
            for m in range(2):
                engine.backward(*rows(1, seed=m))
            assert engine.step().applied
        case, path = engine.zero.case, [visit.unit for visit in model.path]
        sent = {verb: world.ledger.sent(verb) for verb in ("reduce_scatter", "all_gather", "agree")}
        assert sent == zm.account.sent(case, stage, applied=2, path=path)
        held = {k: v for k, v in engine.zero.store.held.items() if v}
        assert held == {k: v for k, v in zm.account.held(case, stage).items() if v}
        engine.evaluate(*rows(1))
        assert all(world.ledger.sent(verb) == count for verb, count in sent.items())

    threads(num_ranks, train)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [1, 4])
def test_activations_are_as_predicted(recompute, layers):
    model = tiny_gpt(layers)
    engine = make(model=model, recompute=recompute)
    engine.backward(*rows(3))
    of_visits = model.activation_bytes(3, CONTEXT)
    if recompute:
        predicted = sum(given for _, given in of_visits[:-1]) + of_visits[-1][0]
    else:
        predicted = sum(saved for saved, _ in of_visits)
    assert engine.zero.store.peak["activations"] == predicted
    assert engine.zero.store.held["activations"] == 0


# ---- weights that are released -------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_stage_3_shows_full_weights_in_a_window_only(prefetch, wire):
    def walk(world):
        engine = make(world, 3, wire, prefetch=prefetch, model=tiny_gpt(6))
        zero = engine.zero
        captured, addresses = [], set()
        for _ in range(2):
            for unit, weights in zero.sweep():
                assert all(np.isfinite(a).all() for a in weights.values()), unit
                captured += weights.values()
                addresses.add(min(a.__array_interface__["data"][0] for a in weights.values()))
        assert all(np.isnan(a).all() for a in captured)
        assert len(addresses) <= (prefetch + 1 if wire == "float32" else 1)
        widest = max(flat.widest for flat in zero.layout.flats)
        window = sum(b.nbytes for buffers in zero.parameters.window for b in buffers)
        assert window == (prefetch + 1) * widest * (4 if wire == "float32" else 2)
        return zero.store.held["buffers"] - window

    def gradient_buffers(world):  # of stage 2, where there is no window
        return make(world, 2, wire, model=tiny_gpt(6)).zero.store.held["buffers"]

    assert threads(2, walk) == threads(2, gradient_buffers)


@pytest.mark.parametrize("stage", [2, 3])
def test_training_never_reads_a_weight_that_was_released(stage):
    plain, poisoned = (
        threads(2, lambda w, p=p: train_some(w, stage, "bfloat16", poison=p)) for p in (False, True)
    )
    assert plain == poisoned


# ---- other paths ---------------------------------------------------------------------------------


def blocks_in_order(model, order):
    first, *blocks, last = model.path
    return (first, *(blocks[i] for i in order), last)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 0), (0, 0, 1, 2), (2, 1, 0, 1, 2)])
def test_a_model_may_visit_a_block_more_than_once(order, recompute):
    base = tiny_gpt()
    model = dataclasses.replace(base, path=blocks_in_order(base, order))
    x, y = rows(4, seed=3)

    def train(world, stage):
        engine = make(world, stage, model=model, recompute=recompute)
        weights = every(engine)
        loss = engine.backward(*share(world, x, y))
        engine.step()
        return weights, loss, gradients(engine)

    results = [threads(2, lambda w, s=s: train(w, s))[0] for s in STAGES]
    weights, loss, g = results[0]
    for _, other_loss, other in results:
        assert other_loss == loss
        assert all(other[name].tobytes() == a.tobytes() for name, a in g.items())

    def unrolled(arrays):  # a block of its own for each visit
        found = {n: a for n, a in arrays.items() if not n.startswith("blocks.")}
        for place, block in enumerate(order):
            of = f"blocks.{block}."
            found |= {
                n.replace(of, f"blocks.{place}."): a for n, a in arrays.items() if n.startswith(of)
            }
        return found

    w64 = unrolled({name: array.astype(np.float64) for name, array in weights.items()})
    assert loss == pytest.approx(reference.gpt_loss(w64, x, y, HEADS), rel=1e-6)
    rng = np.random.default_rng(0)
    for direction in (g, *({n: rng.normal(size=a.shape) for n, a in g.items()} for _ in "12")):
        inner = sum(float((g[n] * d).sum()) for n, d in direction.items())
        assert inner == pytest.approx(along(w64, unrolled(direction), x, y), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_path_for_which_no_buckets_were_drawn_is_refused_or_right(stage):
    model = tiny_gpt()
    longer = dataclasses.replace(model, path=blocks_in_order(model, (0, 1, 2, 0)))
    x, y = rows(4)

    def train(world, own_path):
        engine = make(world, stage, model=longer if own_path else model)
        if own_path:
            engine.backward(*share(world, x, y))
        else:
            try:
                engine.backward(*share(world, x, y), path=longer.path)
            except ValueError as error:
                assert "build the Engine with a model that has this path" in str(error)
                return None
        engine.step()
        return gradients(engine)

    expected = threads(2, lambda w: train(w, True))
    refused = 0
    for found, right in zip(threads(2, lambda w: train(w, False)), expected, strict=True):
        if found is None:
            refused += 1
        else:
            close(found, right, 1e-7)
    assert refused in (0, 2)


# ---- use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
def test_evaluation_and_generation_between_steps_leave_all_bits_alone(stage, wire):
    model = tiny_gpt(dropout=0.1)

    def train(world, look):
        engine = make(world, stage, wire, model=model, optimizer=zm.AdamW())
        texts = []
        for t in range(3):
            if look:
                engine.evaluate(*rows(1 + world.rank, seed=50))
                texts.append(engine.generate([1, 2], 9, seed=t))
                engine.predict(rows(2)[0][:, :3])
            engine.backward(*rows(2, seed=10 * t + world.rank))
            engine.step()
        return bits(engine), texts

    plain, looked = (threads(3, lambda w, b=b: train(w, b)) for b in (False, True))
    assert [found for found, _ in plain] == [found for found, _ in looked]
    texts = [text for _, text in looked]
    assert texts[0] == texts[1] == texts[2]
    for text in texts[0]:
        assert text[:2] == [1, 2]
        assert len(text) == 11
        assert all(0 <= token < VOCAB for token in text)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tied", [True, False])
def test_evaluate_predict_and_generate_agree_with_the_reference(stage, tied):
    x, y = rows(5, holes=0.3)

    def look(world):
        engine = make(world, stage, model=tiny_gpt(tied=tied, dropout=0.5))
        loss = engine.evaluate(*share(world, x, y, [0, 4, 5]))
        nothing = engine.evaluate(x, np.full_like(y, -1))
        return every(engine), loss, nothing, engine.predict(x), engine.generate([3], 8, 0.0)

    for weights, loss, nothing, logits, text in threads(2, look):
        w64 = {name: array.astype(np.float64) for name, array in weights.items()}
        assert loss == pytest.approx(reference.gpt_loss(w64, x, y, HEADS), rel=1e-6)
        assert np.isnan(nothing)
        np.testing.assert_allclose(logits, reference.gpt_logits(w64, x, HEADS), atol=1e-5)
        tokens = [3]
        for _ in range(8):
            seen = np.array([tokens[-CONTEXT:]])
            tokens.append(int(reference.gpt_logits(w64, seen, HEADS)[0, -1].argmax()))
        assert text == tokens


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_perceptron_learns(loss, stage):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 5)).astype(np.float32)
    y = x[:, :3] * 2 if loss == "mse" else np.abs(x[:, :3]).argmax(axis=1)

    def train(world):
        model = zm.models.mlp((5, 16, 3), loss)
        engine = zm.Engine(
            model, world=world, stage=stage, wire="float32", optimizer=zm.AdamW(lr=0.02)
        )
        losses = []
        for _ in range(60):
            losses.append(engine.backward(*share(world, x, y)))
            engine.step()
        assert engine.applied == 60
        return losses

    results = threads(3, train)
    assert results[0] == results[1] == results[2]
    assert results[0][-1] < 0.5 * results[0][0]


@pytest.mark.parametrize("stage", STAGES)
def test_edits_reach_the_next_forward(stage):
    x, y = rows(3)

    def train(world):
        engine = make(world, stage, "bfloat16")
        with engine.gathered("embed", edit=True) as values:
            values["wte.weight"][:] = 0.0  # all logits are 0 then
        return engine.evaluate(x, y)

    assert threads(2, train) == [pytest.approx(np.log(VOCAB), rel=1e-6)] * 2


# ---- settings and data that do not fit -----------------------------------------------------------

WRONG = {
    "unknown stage": ({"stage": -1}, "stage -1 is unknown: use 0, 1, 2 or 3"),
    "unknown wire": ({"wire": "half"}, "'half' is unknown: use one of float32, bfloat16, float16"),
    "unknown option": ({"recomputed": True}, "option 'recomputed' is unknown"),
    "misspelt option": ({"keep_fp32": "ln_f.*"}, "did you mean 'keep_float32'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_one_message_on_all_ranks(what):
    options, match = WRONG[what]
    raised_alike(2, lambda w: make(w, **options), match)


DIFFERENT = {
    "seed": lambda rank: {"seed": rank},
    "recompute": lambda rank: {"recompute": bool(rank)},
    "model": lambda rank: {"model": tiny_gpt(layers=1 + rank)},
    "heads": lambda rank: {"model": zm.models.gpt(VOCAB, 1, 8, 1 + rank, CONTEXT)},
    "dropout": lambda rank: {"model": tiny_gpt(dropout=0.1 * rank)},
    "loss": lambda rank: {"model": zm.models.mlp((4, 4), ("mse", "cross_entropy")[rank])},
    "stage": lambda rank: {"stage": 2 + rank},
    "wire": lambda rank: {"wire": WIRES[rank]},
    "optimizer": lambda rank: {"optimizer": zm.SGD(lr=1.0 + rank)},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_settings_that_differ_between_ranks_are_one_message_on_all(what):
    raised_alike(2, lambda w: make(w, **DIFFERENT[what](w.rank)), "must be the same on all ranks")


def with_value(array, value):
    array = array.copy()
    array.reshape(-1)[0] = value
    return array


BAD_TOKENS = {
    "id too large": (lambda x, y: (with_value(x, VOCAB), y), f"token id {VOCAB} is out of range"),
    "negative id": (lambda x, y: (with_value(x, -1), y), "token id -1 is out of range"),
    "target": (lambda x, y: (x, with_value(y, VOCAB)), f"target id {VOCAB} is out of range"),
    "shape": (lambda x, y: (x[0], y[0]), r"tokens have shape \(6,\)"),
    "length": (lambda x, y: (np.tile(x, 2), np.tile(y, 2)), r"tokens have shape \(2, 12\)"),
    "targets": (lambda x, y: (x, y[:1]), r"targets have shape \(1, 6\); it must be \(2, 6\)"),
    "floats": (lambda x, y: (x * 1.0, y), "token ids are float64; they must be integers"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", BAD_TOKENS)
def test_bad_tokens_on_one_rank_are_one_message_on_all_and_no_harm(stage, what):
    spoil, match = BAD_TOKENS[what]

    def train(world, bad):
        engine = make(world, stage)
        x, y = rows(2)
        if bad:
            for method in (engine.backward, engine.evaluate):
                with pytest.raises(ValueError, match=match):
                    method(*(spoil(x, y) if world.rank == 1 else (x, y)))
        engine.backward(x, y)
        engine.step()
        return bits(engine)

    good, bad = (threads(2, lambda w, b=b: train(w, b)) for b in (False, True))
    assert good == bad


BAD_NUMBERS = {
    "NaN": (lambda x, y: (with_value(x, np.nan), y), "inputs hold inf or NaN"),
    "inf targets": (lambda x, y: (x, with_value(y, np.inf)), "targets hold inf or NaN"),
    "width": (lambda x, y: (x[:, :3], y), "inputs is float32 of shape"),
    "float64": (lambda x, y: (x.astype(np.float64), y), "inputs is float64"),
    "count": (lambda x, y: (x, y[:1]), "1 targets for 2 inputs"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", BAD_NUMBERS)
def test_bad_numbers_on_one_rank_are_one_message_on_all(stage, what):
    spoil, match = BAD_NUMBERS[what]

    def train(world):
        engine = make(world, stage, model=zm.models.mlp((4, 5, 2), "mse"))
        x, y = np.ones((2, 4), np.float32), np.ones((2, 2), np.float32)
        engine.backward(*(spoil(x, y) if world.rank == 1 else (x, y)))

    raised_alike(2, train, match)


def test_learning_rates_that_differ_between_ranks_are_one_message_on_all():
    def train(world):
        engine = make(world)
        engine.backward(*rows(2))
        engine.step(lr=0.1 * (world.rank + 1))

    raised_alike(2, train, "step must be called alike on all ranks")


def test_generation_that_makes_no_sense_is_refused_on_all_ranks():
    raised_alike(2, lambda w: make(w).generate([], 3), "a prompt of one token at least")
    raised_alike(2, lambda w: make(w).generate([VOCAB], 3), f"token id {VOCAB} is out of range")
    perceptron = zm.models.mlp()
    raised_alike(2, lambda w: make(w, model=perceptron).generate([1], 3), "has no tokens")


@pytest.mark.parametrize("on", ["all ranks", "rank 1"])
def test_activations_that_do_not_fit_are_one_message_on_all_and_no_harm(on):
    model = tiny_gpt()
    need = make(model=model).zero
    budget = sum(need.store.held.values()) + sum(s for s, _ in model.activation_bytes(2, CONTEXT))

    def train(world):
        engine = make(world, 3, model=model, device_memory=budget)
        count = 40 if on == "all ranks" or world.rank == 1 else 1
        with pytest.raises(MemoryError, match="bytes of activations do not fit: held are"):
            engine.backward(*rows(count))
        loss = engine.backward(*rows(2))
        assert engine.step().applied
        return loss

    first, second = threads(2, train)
    assert first == second


@pytest.mark.parametrize("stage", [1, 3])
def test_a_path_that_differs_between_ranks_is_refused(stage):
    model = zm.models.gpt(vocab=5, layers=2, width=4, heads=2, context=3)
    first, a, b, last = model.path
    tokens = np.zeros((1, 3), np.int64)

    def train(world):
        engine = zm.Engine(model, world=world, stage=stage)
        path = (first, a, b, last) if world.rank == 0 else (first, b, a, last)
        with pytest.raises(ValueError, match="same path on all ranks"):
            engine.backward(tokens, tokens, path=path)
        with pytest.raises(ValueError, match="units that the model lacks"):
            engine.backward(tokens, tokens, path=(zm.models.Visit("x", a.layer, ()),))
        engine.backward(tokens, tokens)
        return engine.step().applied

    assert zm.threads(2, train, debug=True, timeout=20) == [True, True]
