"""Cases K06 of shared/cases.md: the optimizer's arithmetic, its settings, and schedules.

O-033, about the sizes of a kernel's arrays, is in test_adamw.py.
"""

import numpy as np
import pytest
import toys

import zeromp as zm

N, CUT = 13, {"w": (2, 3), "bias": 1, "u": 6}

stages = pytest.mark.parametrize("stage", toys.STAGES)


def close(state, ref, tolerance=1e-6):
    np.testing.assert_allclose(state["master"], ref.p, rtol=0, atol=tolerance)
    for kind in state.keys() - {"full", "master"}:
        np.testing.assert_allclose(state[kind], getattr(ref, kind), rtol=0, atol=tolerance)


def l2_adam(p, gradients, lr=0.01, b1=0.9, b2=0.999, eps=1e-8, wd=0.1):
    """Adam with decay inside the gradient: what AdamW must not be."""
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        g = g + wd * p
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        p = p - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p


@stages
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("wire", toys.WIRES)
def test_o030_decay_is_decoupled(ranks, stage, wire):
    n, cut = 61, [6, 55]  # the two forms differ where a gradient is small: not among the first 41

    def run(world):
        zero = toys.make(world, n, cut, stage, wire)
        toys.steps(zero, n, cut, 5)
        return toys.state(zero)

    ref = toys.trained(n, ranks, 5, wire)
    coupled = l2_adam(toys.start(n), [toys.mean_gradient(n, ranks, t) for t in range(1, 6)])
    for state in zm.threads(ranks, run, debug=True):
        close(state, ref)
        assert np.abs(state["master"] - coupled).max() > 1e-3


@stages
def test_o030_sgd_decays_likewise(stage):
    def run(world):
        rule = zm.SGD(lr=0.05, momentum=0.8, weight_decay=0.3)
        zero = toys.make(world, N, CUT, stage, "bfloat16", optimizer=rule)
        toys.steps(zero, N, CUT, 5)
        return toys.state(zero)

    ref = toys.trained(N, 3, 5, "bfloat16", momentum=0.8, settings={"lr": 0.05, "wd": 0.3})
    for state in zm.threads(3, run, debug=True):
        close(state, ref)


@stages
@pytest.mark.parametrize("wire", toys.WIRES)
def test_o031_size_of_units_does_not_change_a_bit(stage, wire):
    n, cut = 130, [1, 6, 3, 20, 31, 2, 40, 27]

    def run(world):
        zero = toys.make(world, n, cut, stage, wire, bucket=bucket)
        toys.steps(zero, n, cut, 5)
        return {k: a.tobytes() for k, a in toys.state(zero).items()}, len(zero.layout.units)

    results = {}
    for bucket in (1, 7, 64, n):
        (results[bucket], units), *others = zm.threads(3, run)
        assert all(o == (results[bucket], units) for o in others)
        assert units == {1: 8, 7: 7, 64: 3, n: 1}[bucket]
    assert all(r == results[n] for r in results.values())


@stages
@pytest.mark.parametrize("count", [1, 3])
def test_o032_eps_is_added_after_the_bias_correction(stage, count):
    """Weights that start at 0, so that float32 resolves 1e-7; gradients 1e-3 against eps 1e-2."""
    lr, b1, b2, eps = 0.01, 0.9, 0.999, 1e-2
    gradients = [1e-3 * (1.5 + toys.gradient(N, 0, t)) for t in range(1, count + 1)]

    def run(world):
        zero = toys.make(world, N, [N], stage, optimizer=zm.AdamW(lr, (b1, b2), eps, 0.1),
                         **{"bucket": 5})  # fmt: skip
        with zero.gathered("a0", edit=True) as arrays:
            arrays["a0"][:] = 0
        for g in gradients:
            zero.backward({"a0": g})
            zero.step()
        return zero.full("a0")

    found, *_ = zm.threads(2, run, debug=True)
    ref = toys.Ref(np.zeros(N), settings={"eps": eps})
    before, inside = np.zeros(N), np.zeros(N)
    for t, g in enumerate(gradients, 1):
        ref.step(g)
        m_hat, c = ref.m / (1 - b1**t), 1 - b2**t
        before -= lr * 0.1 * before + lr * m_hat / ((np.sqrt(ref.v) + eps) / np.sqrt(c))
        inside -= lr * 0.1 * inside + lr * m_hat / np.sqrt(ref.v / c + eps)
    np.testing.assert_allclose(found, ref.p, rtol=0, atol=1e-7)
    for wrong in (before, inside):
        assert np.abs(found - wrong).min() > 1e-4


@stages
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("bucket", [1, 100])
def test_o034_every_stored_weight_is_its_rounded_master(stage, wire, bucket):
    n, cut = 41, [5, 1, 17, 7, 11]

    def run(world):
        zero = toys.make(world, n, cut, stage, wire, bucket=bucket)
        for _ in range(4):
            for name in zero.names:
                master, full = zero.master(name), zero.full(name)
                assert (full == toys.rounded(master, wire)).all()
                with zero.gathered(name) as arrays:
                    assert (arrays[name] == full).all()
            swept = {n: a.copy() for _, w in zero.sweep() for n, a in w.items()}
            assert all((swept[n] == zero.full(n)).all() for n in zero.names)
            toys.steps(zero, n, cut, 1)
        close(toys.state(zero), toys.trained(n, 3, 4, wire))

    zm.threads(3, run, debug=True)


# ---- groups --------------------------------------------------------------------------------------

LAYERS = {"ln_1": 3, "fc.weight": (2, 2), "fc.bias": 2, "ln_f": 4}
NO_DECAY = ("ln_1", "fc.bias", "ln_f")


def no_decay(name, shape):
    return len(shape) < 2


@stages
@pytest.mark.parametrize("match", [no_decay, NO_DECAY, {"ln_*", "*bias"}])
def test_o035_groups_by_predicate_list_and_pattern(stage, match):
    """The arrays that are meant, and no others, do not decay; `describe` tells which."""

    def run(world):
        group = zm.Group("none", match, weight_decay=0.0)
        zero = toys.make(world, N, LAYERS, stage, groups=[group], bucket=5)
        toys.steps(zero, N, LAYERS, 3)
        return toys.state(zero), zero.describe()

    decay = np.r_[[0.0] * 3, [0.1] * 4, [0.0] * 6]
    ref = toys.trained(N, 2, 3, settings={"wd": decay})
    for state, text in zm.threads(2, run, debug=True):
        close(state, ref)
        assert "group none: weight decay 0, lr x 1: ln_1, fc.bias, ln_f\n" in text + "\n"
        assert "group default: weight decay 0.1, lr x 1: fc.weight\n" in text + "\n"


def test_o035_a_pattern_without_a_match_warns():
    arrays = toys.arrays(N, LAYERS)
    for options in ({"groups": [zm.Group("none", ["*bias", "LayerNorm*"])]},
                    {"frozen": "LayerNorm*"}, {"keep_float32": ["LayerNorm*"]}):  # fmt: skip
        with pytest.warns(RuntimeWarning, match=r"pattern 'LayerNorm\*' matches none of the 4"):
            zm.Zero(arrays, **options)


def expand(listed):
    """Names of a description, in which "a.{0,1}.b" stands for two."""
    for item in listed.split(", "):
        before, _, rest = item.partition("{")
        numbers, _, after = rest.partition("}")
        yield from (before + number + after for number in (numbers.split(",") if rest else [""]))


@pytest.mark.parametrize("grouped", [False, True])
def test_o035_gpt_names_what_decays_and_what_does_not(grouped):
    """By default everything decays, as documented; every name can be read off the description."""
    model = zm.models.gpt(vocab=5, layers=2, width=4, heads=2, context=3)
    names = [p.name for unit in model.units for p in unit.parameters]
    spared = [n for n in names if n.endswith("bias") or ".ln" in n or n.startswith("ln_")]
    groups = [zm.Group("none", ["*bias", "*.ln*", "ln_*"], weight_decay=0.0)] if grouped else []
    rule = zm.SGD(lr=1.0, momentum=0.0, weight_decay=0.5)
    engine = zm.Engine(model, wire="float32", optimizer=rule, groups=groups,
                       weights={p.name: np.ones(p.shape) for u in model.units
                                for p in u.parameters})  # fmt: skip
    text = engine.zero.describe()
    engine.zero.backward({})
    engine.step()
    for name in names:
        assert (engine.full(name) == (1.0 if grouped and name in spared else 0.5)).all()
    lines = [line for line in text.splitlines() if line.startswith("group ")]
    for line in lines:
        expected = [n for n in names if not grouped or (n in spared) == ("group none" in line)]
        assert sorted(expand(line.split(": ")[-1])) == sorted(expected)


# ---- learning rate -------------------------------------------------------------------------------


@stages
def test_o036_warmup_from_the_first_step(stage):
    """The rate that acts at applied step k = 1, ..., 10 is peak k / 10; skipped steps count not."""

    def run(world):
        rule = zm.SGD(momentum=0.0)
        zero = zm.Zero({"w": np.zeros(5)}, world=world, stage=stage, wire="float32", optimizer=rule)
        rates = []
        while zero.applied < 12:
            spoiled = zero.applied == 3 and not zero.skipped
            zero.backward({"w": np.full(5, np.nan if spoiled else -1.0)})
            before = zero.full("w")
            zero.step(lr=zm.linear(zero.applied, 100, 0.5, warmup=10))
            if not spoiled:
                rates.append(float((zero.full("w") - before)[0]))
        return rates

    for rates in zm.threads(2, run, debug=True):
        np.testing.assert_allclose(rates[:10], 0.5 * np.arange(1, 11) / 10, rtol=1e-5)
        assert rates[11] < rates[10] < 0.5


@pytest.mark.parametrize("k", range(1, 11))
@pytest.mark.parametrize("schedule", [zm.linear, zm.cosine])
def test_o036_adamws_first_step_has_the_size_of_the_rate(k, schedule):
    """With zero moments the change is the rate itself, whatever the gradient."""
    zero = zm.Zero({"w": np.zeros(3)}, wire="float32", optimizer=zm.AdamW(weight_decay=0.0))
    zero.backward({"w": np.array([-1.0, -2.0, -3.0])})
    zero.step(lr=schedule(k - 1, 100, 0.5, 10))
    np.testing.assert_allclose(zero.full("w"), 0.05 * k, rtol=1e-5)


@stages
@pytest.mark.parametrize("place", ["rule", "group"])
def test_o037_changed_settings_act_at_the_next_step(stage, place):
    """lr, betas, eps and decay are read at each step, from the rule or from the group."""

    def run(world):
        zero = toys.make(world, N, CUT, stage, bucket=6)
        toys.steps(zero, N, CUT, 2)
        zero.rule.betas, zero.rule.eps = (0.6, 0.9), 1e-2
        if place == "rule":
            zero.rule.lr, zero.rule.weight_decay = 0.03, 0.7
        else:
            group = zero.groups["default"]
            group.lr_factor, group.weight_decay = 3.0, 0.7
        toys.steps(zero, N, CUT, 1)
        return toys.state(zero)

    ref = toys.trained(N, 3, 2)
    ref.step(toys.mean_gradient(N, 3, 3), lr=0.03, b1=0.6, b2=0.9, eps=1e-2, wd=0.7)
    for state in zm.threads(3, run, debug=True):
        close(state, ref)


@stages
def test_o037_sgd_and_the_users_own_group(stage):
    def run(world):
        group = zm.Group("u", "u")
        rule = zm.SGD(lr=0.01, momentum=0.9)
        zero = toys.make(world, N, CUT, stage, optimizer=rule, groups=[group])
        toys.steps(zero, N, CUT, 2)
        rule.momentum = zero.rule.momentum = 0.5
        group.lr_factor, group.weight_decay = 2.0, 0.3
        toys.steps(zero, N, CUT, 1)
        return toys.state(zero)

    ref = toys.trained(N, 2, 2, momentum=0.9, settings={"lr": 0.01})
    ref.momentum = 0.5
    ref.step(toys.mean_gradient(N, 2, 3), lr=np.r_[[0.01] * 7, [0.02] * 6],
             wd=np.r_[[0.0] * 7, [0.3] * 6])  # fmt: skip
    for state in zm.threads(2, run, debug=True):
        close(state, ref)


@stages
@pytest.mark.parametrize("wire", toys.WIRES)
def test_o038_lr_and_norm_can_be_asked_for_at_any_time(stage, wire):
    def run(world):
        zero = toys.make(world, N, CUT, stage, wire)
        asked = [(zero.lr(), zero.grad_norm(), zero.loss_scale())]
        for _ in range(2):
            zero.backward({"w": np.full((2, 3), np.inf)})
            assert not zero.step().applied
            asked.append((zero.lr(), zero.grad_norm(), zero.loss_scale()))
        zero.rule.lr = 0.25
        report = toys.steps(zero, N, CUT, 1)[0]
        assert report.applied and report.lr == zero.lr() == 0.25
        assert zero.grad_norm() == report.grad_norm
        return asked

    for asked in zm.threads(2, run, debug=True):
        assert [lr for lr, *_ in asked] == [0.01] * 3
        assert asked[0][1] is None and not np.isfinite([norm for _, norm, _ in asked[1:]]).any()
        scale = toys.SCALE.get(wire, 1.0)
        fall = 2 if wire == "float16" else 1
        assert [s for *_, s in asked] == [scale, scale / fall, scale / fall**2]
