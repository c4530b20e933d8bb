"""Zero: named arrays in, gradients in, step. What is promised beyond the cases of cases.md."""

import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from toys import (
    PINNED,
    SCALE,
    STAGES,
    WIRES,
    arrays,
    cut,
    feed,
    gradient,
    start,
    state,
    steps,
    trained,
)

import zeromp as zm

N, CUTS = 37, {"a.weight": (3, 5), "a.bias": 1, "b.weight": (4, 4), "b.bias": 5}


def threads(num_ranks, function, **options):
    return zm.threads(num_ranks, function, **{"debug": True, "timeout": 20} | options)


def make(world=None, stage=1, wire="float32", **options):
    options = {"optimizer": zm.AdamW(**PINNED), "bucket": 17, "poison": True} | options
    options.setdefault("loss_scale", SCALE.get(wire))
    return zm.Zero(arrays(N, CUTS), world=world, stage=stage, wire=wire, **options)


def raised_alike(num_ranks, function, match, kind=ValueError):
    """Each rank's error: of one kind and message on all of them."""

    def call(world):
        with pytest.raises(kind, match=match) as caught:
            function(world)
        return str(caught.value)

    assert len(set(threads(num_ranks, call))) == 1


# ---- the ladder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_all_stages_have_the_same_bits_and_those_of_the_reference(num_ranks, wire, momentum):
    def train(world, stage):
        rule = zm.AdamW(**PINNED) if momentum is None else zm.SGD(momentum=momentum, **PINNED)
        zero = make(world, stage, wire, optimizer=rule)
        reports = steps(zero, N, CUTS, 5)
        found = state(zero)
        return found, [r.grad_norm.hex() for r in reports]

    by_stage = [threads(num_ranks, lambda w, s=s: train(w, s)) for s in STAGES]
    found, norms = by_stage[0][0]
    for ranks in by_stage:
        for other, other_norms in ranks:
            assert other_norms == norms
            assert all(other[k].tobytes() == found[k].tobytes() for k in found)
    ref = trained(N, num_ranks, 5, wire, momentum=momentum, settings={"lr": 0.01, "wd": 0.1})
    np.testing.assert_allclose(found["master"], ref.p, atol=1e-6)
    np.testing.assert_allclose(found["m"], ref.m, atol=1e-6)
    if momentum is None:
        np.testing.assert_allclose(found["v"], ref.v, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
def test_bytes_held_and_sent_are_as_predicted(num_ranks, stage, wire):
    def train(world):
        zero = make(world, stage, wire, optimizer=zm.AdamW(**PINNED))
        steps(zero, N, CUTS, 3)
        held = {k: v for k, v in zero.store.held.items() if v}
        sent = {verb: world.ledger.sent(verb) for verb in ("reduce_scatter", "all_gather", "agree")}
        predicted = {k: v for k, v in zm.account.held(zero.case, stage).items() if v}
        return held, predicted, sent, zm.account.sent(zero.case, stage, applied=3)

    for held, predicted_held, sent, predicted_sent in threads(num_ranks, train):
        assert held == predicted_held
        assert sent == predicted_sent


# ---- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_groups_have_their_own_decay_and_rate(stage, wire):
    def train(world):
        groups = [
            zm.Group("biases", "*.bias", weight_decay=0.0),
            zm.Group("b", lambda name, shape: name.startswith("b."), lr_factor=0.5),
        ]
        zero = make(world, stage, wire, groups=groups, optimizer=zm.SGD(momentum=0.0, **PINNED))
        feed(zero, N, CUTS, 1)
        zero.step(lr=0.5)
        groups[1].lr_factor = 0.0  # from the next step on
        first = {name: zero.master(name) for name in zero.names}
        feed(zero, N, CUTS, 2)
        zero.step(lr=0.5)
        moments = {name: zero.moments(name)["m"] for name in zero.names}
        return first, {name: zero.master(name) for name in zero.names}, moments

    p = cut(start(N), CUTS)
    g = cut((gradient(N, 0, 1) + gradient(N, 1, 1)) / 2, CUTS)
    rates = {  # learning rate and decay: the first group that matches counts
        "a.weight": (0.5, 0.1), "a.bias": (0.5, 0.0), "b.weight": (0.25, 0.1), "b.bias": (0.5, 0.0)
    }  # fmt: skip
    for first, second, m in threads(2, train):
        for name, (lr, decay) in rates.items():
            expected = p[name] * (1 - lr * decay) - lr * g[name]
            tolerance = 1e-6 if wire == "float32" else 0.5 * 2**-7
            np.testing.assert_allclose(first[name], expected, atol=tolerance)
        assert np.array_equal(first["b.weight"], second["b.weight"])
        assert not np.array_equal(first["a.weight"], second["a.weight"])
        assert m["b.weight"].any()


def test_wrong_groups_are_refused():
    twice = [zm.Group("a", "a.*"), zm.Group("a", "b.*")]
    raised_alike(2, lambda w: make(w, groups=twice), "group names must differ")
    taken = [zm.Group("default", "a.*")]
    raised_alike(2, lambda w: make(w, groups=taken), "'default' is taken")


@pytest.mark.parametrize(
    "options",
    [{"groups": [zm.Group("g", "c.*")]}, {"frozen": ["c.*"]}, {"keep_float32": "c.*"}],
)
def test_a_pattern_without_an_array_warns(options):
    with pytest.warns(RuntimeWarning, match=r"pattern 'c\.\*' matches none of the 4 names"):
        make(**options)


def test_a_tie_of_names_that_are_not_there_does_not_pass_in_silence():
    with pytest.raises((ValueError, RuntimeWarning), match="head"):
        make(tied={"head": "wte"})


# ---- settings and gradients that do not fit ------------------------------------------------------

WRONG = {
    "unknown stage": ({"stage": 4}, "stage 4 is unknown: use 0, 1, 2 or 3"),
    "unknown wire": ({"wire": "fp8"}, "'fp8' is unknown: use one of float32, bfloat16, float16"),
    "unknown reduce wire": ({"reduce_wire": "fp8"}, "'fp8' is unknown"),
    "unknown option": ({"poisson": True}, "'poisson' is unknown: did you mean 'poison'"),
    "no micro-batch": ({"micro_batches": 0}, "micro_batches=0 must be a whole number, at least 1"),
    "half a prefetch": ({"prefetch": 0.5}, "prefetch=0.5 must be a whole number"),
    "loss scale": ({"loss_scale": 3.0}, "loss scale 3.0 must be a power of two"),
    "all frozen": ({"frozen": "*"}, "all arrays are frozen"),
    "tie of shapes": ({"tied": {"a.bias": "b.bias"}}, r"'a.bias' \(1,\) can't be tied"),
    "negative rate": ({"optimizer": zm.SGD(lr=-1.0)}, "lr -1.0 must be finite and not negative"),
    "rate NaN": ({"optimizer": zm.AdamW(lr=float("nan"))}, "lr nan must be finite"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("on", ["all ranks", "rank 1"])
def test_a_wrong_setting_is_one_message_on_all_ranks(what, on):
    options, match = WRONG[what]

    def build(world):
        make(world, **(options if on == "all ranks" or world.rank == 1 else {}))

    if on == "rank 1":  # either rule is broken then
        match += "|settings must be the same on all ranks"
    raised_alike(2, build, match)


DIFFERENT = {
    "stage": lambda rank: {"stage": rank},
    "wire": lambda rank: {"wire": ("float32", "bfloat16")[rank]},
    "optimizer": lambda rank: {"optimizer": zm.AdamW(lr=0.1 * (rank + 1))},
    "kind of optimizer": lambda rank: {"optimizer": (zm.AdamW(), zm.SGD())[rank]},
    "groups": lambda rank: {"groups": [zm.Group("g", "a.*", lr_factor=1.0 + rank)]},
    "frozen": lambda rank: {"frozen": ["a.*", "b.*"][rank]},
    "micro_batches": lambda rank: {"micro_batches": 1 + rank},
    "prefetch": lambda rank: {"prefetch": 1 + rank},
    "bucket": lambda rank: {"bucket": (17, 40)[rank]},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_settings_that_differ_between_ranks_are_one_message_on_all(what):
    raised_alike(
        2, lambda w: make(w, **DIFFERENT[what](w.rank)), "settings must be the same on all ranks"
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a | {"b.bias": np.full(5, np.nan)}, "'b.bias' holds nan at flat index 0"),
        (lambda a: a | {"b.bias": np.arange(5)}, "'b.bias' is int64: it must be a real floating"),
        (lambda a: a | {"b.bias": np.zeros(6)}, r"rank 1 has 'b.bias \(6,\) float32"),
        (lambda a: a | {"b.bias": a["b.bias"] + 1}, "initial values must be the same on all ranks"),
        (lambda a: {}, "no arrays were given"),
        (lambda a: {k: a[k] for k in reversed(a)}, "settings must be the same on all ranks"),
    ],
)
def test_arrays_that_are_wrong_or_different_on_one_rank_are_one_message_on_all(change, match):
    def build(world):
        given = arrays(N, CUTS)
        zm.Zero(change(given) if world.rank == 1 else given, world=world, wire="float32")

    raised_alike(2, build, match)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"b.bias": np.zeros(4)}, r"gradient of 'b.bias' has shape \(4,\), not \(5,\)"),
        ({"b.bias": np.zeros(5, int)}, "gradient of 'b.bias' is int64"),
        ({"b.biass": np.zeros(5)}, "no array is named 'b.biass'; the names are a.weight"),
    ],
)
def test_a_wrong_gradient_on_one_rank_is_one_message_and_no_harm(stage, wrong, match):
    def train(world, bad):
        zero = make(world, stage)
        if bad:
            with pytest.raises(ValueError, match=match):
                zero.backward(wrong if world.rank == 1 else {})
        return steps(zero, N, CUTS, 1), {k: v.tobytes() for k, v in state(zero).items()}

    good, bad = (threads(2, lambda w, b=b: train(w, b)) for b in (False, True))
    assert repr(good) == repr(bad)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_wrong_weight_is_refused_on_all_ranks(weight):
    def train(world):
        make(world).backward({}, weight=weight if world.rank else 1.0)

    raised_alike(2, train, "must be finite and not negative")


STEPS = {
    "lr": (lambda z, rank: z.step(lr=0.1 * rank), "step must be called alike"),
    "no lr on one": (lambda z, rank: z.step(lr=0.1 if rank else None), "step must be called alike"),
    "clip": (lambda z, rank: z.step(clip=1.0 + rank), "step must be called alike"),
    "negative lr": (lambda z, rank: z.step(lr=-0.1), "lr -0.1 must be finite and not negative"),
    "no clip": (lambda z, rank: z.step(clip=0.0), "clip 0.0 must be above 0"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_differs_or_is_wrong_is_one_message_on_all_ranks(stage, what):
    call, match = STEPS[what]

    def train(world):
        zero = make(world, stage)
        feed(zero, N, CUTS, 1)
        call(zero, world.rank)

    raised_alike(2, train, match)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["lr of the rule", "lr of a group", "decay of a group"])
def test_rates_changed_on_one_rank_only_are_refused(stage, what):
    def train(world):
        groups = [zm.Group("all", "*")]
        zero = make(world, stage, groups=groups)
        feed(zero, N, CUTS, 1)
        if world.rank == 1:
            if what == "lr of the rule":
                zero.rule.lr = 0.5
            elif what == "lr of a group":
                groups[0].lr_factor = 0.5
            else:
                groups[0].weight_decay = 0.5
        zero.step()

    raised_alike(2, train, "must be called alike|must be the same")


def test_a_step_without_gradients_is_refused():
    raised_alike(2, lambda w: make(w).step(), "step without gradients")


def test_a_collective_that_only_one_rank_calls_is_named():
    def call(world):
        zero = make(world, stage=3)
        if world.rank == 0:
            zero.full("a.weight")
        else:
            feed(zero, N, CUTS, 1)

    with pytest.raises(RuntimeError, match=r"rank 0 calls all_gather of unit0.* rank 1 calls"):
        threads(2, call)
    with pytest.raises(TimeoutError, match="rank 0 has waited 2 s in all_gather of unit0"):
        threads(2, lambda w: make(w, 3).full("a.weight") if w.rank == 0 else make(w, 3) and None,
                debug=False, timeout=2)  # fmt: skip


# ---- overflow ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("value", "word"), [(np.inf, "inf"), (np.nan, "NaN")])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(stage, wire, value, word):
    def train(world):
        zero = make(world, stage, wire)
        steps(zero, N, CUTS, 1)
        before = state(zero)
        g = cut(gradient(N, world.rank, 2), CUTS)
        if world.rank == 1:
            g["b.weight"][1, 1] = g["b.bias"][0] = value
        zero.backward(g)
        report = zero.step(clip=1.0)
        after = state(zero)
        assert all(before[k].tobytes() == after[k].tobytes() for k in before)
        assert zero.state()["attempts"] == 2
        assert (zero.state()["applied"], zero.state()["skipped"]) == (1, 1)
        return report.applied, report.reason, zero.loss_scale()

    scale = 512.0 if wire == "float16" else 1.0
    expected = (False, f"{word} in the gradient of 'b.weight'", scale)
    assert threads(3, train) == [expected] * 3


def test_a_budget_that_is_too_small_names_the_stage_that_fits():
    given = {f"a{i}": np.zeros(1000) for i in range(50)}

    def build(world, stage, budget):
        return zm.Zero(given, world=world, stage=stage, bucket=1000, device_memory=budget)

    need = [
        threads(4, lambda w, s=s: sum(build(w, s, None).store.held.values()))[0] for s in STAGES
    ]
    match = rf"stage 0 on 4 ranks needs {need[0]:,} bytes .* the lowest rung that fits is stage 2"
    raised_alike(4, lambda w: build(w, 0, need[2]), match, MemoryError)
    assert threads(4, lambda w: sum(build(w, 2, need[2]).store.held.values())) == [need[2]] * 4
    raised_alike(4, lambda w: build(w, 0, 1000), "no stage fits", MemoryError)


# ---- use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_sweep_yields_all_units_in_any_order(stage):
    def walk(world):
        zero = make(world, stage)
        order = [*zero.layout.units, zero.layout.units[0]]
        found = {n: a.copy() for _, arrays in zero.sweep(order[::-1]) for n, a in arrays.items()}
        return [unit for unit, _ in zero.sweep(order)] == order, found

    expected = arrays(N, CUTS)
    for in_order, found in threads(3, walk):
        assert in_order
        assert {n: a.tobytes() for n, a in found.items()} == {
            n: a.tobytes() for n, a in expected.items()
        }


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_sweep_that_is_left_early_leaves_nothing_in_flight(prefetch):
    def walk(world):
        zero = make(world, 3, prefetch=prefetch)
        for _ in zero.sweep():
            break
        return zero.full("b.bias").tobytes(), world.transport.shared

    results = threads(3, walk)
    assert {full for full, _ in results} == {arrays(N, CUTS)["b.bias"].tobytes()}
    assert not results[0][1].posted


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", WIRES)
def test_gathered_units_hold_what_full_returns(stage, wire):
    def look(world):
        zero = make(world, stage, wire)
        for unit in zero.layout.units:
            with zero.gathered(unit) as values:
                held = {name: array.copy() for name, array in values.items()}
            assert all(np.array_equal(zero.full(name), array) for name, array in held.items())

    threads(2, look)


@pytest.mark.parametrize("stage", STAGES)
def test_users_may_change_their_arrays_after_handing_them_over(stage):
    def train(world):
        given = arrays(N, CUTS)
        zero = zm.Zero(given, world=world, stage=stage, wire="float32", optimizer=zm.SGD())
        g = cut(gradient(N, world.rank, 1), CUTS)
        zero.backward(g)
        for array in (*given.values(), *g.values()):
            array.fill(np.nan)
        return zero.step().applied and bool(np.isfinite(state(zero)["full"]).all())

    assert threads(2, train) == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_arrays_without_elements_and_more_ranks_than_elements(stage):
    def train(world):
        given = {"empty": np.zeros((0, 3)), "one": np.ones(1), "scalar": np.array(2.0)}
        rule = zm.SGD(lr=0.5, momentum=0.0)
        zero = zm.Zero(given, world=world, stage=stage, wire="float32", optimizer=rule, bucket=1)
        zero.backward({name: np.ones_like(array) for name, array in given.items()})
        zero.step()
        return [zero.full(name) for name in given]

    for empty, one, scalar in threads(5, train):
        assert empty.shape == (0, 3)
        assert one.tolist() == [0.5]
        assert scalar.shape == ()
        assert scalar == 1.5


@pytest.mark.parametrize("stage", STAGES)
def test_no_more_than_one_gradient_of_a_lazy_mapping_is_alive(stage):
    alive, most = weakref.WeakValueDictionary(), []

    class Lazy(Mapping):
        values = cut(gradient(N, 0, 1), CUTS)

        def __getitem__(self, name):
            value = self.values[name].copy()
            alive[len(most)] = value
            most.append(len(alive))
            return value

        def __iter__(self):
            return iter(self.values)

        def __len__(self):
            return len(self.values)

    zero = make(stage=stage)
    zero.backward(Lazy())
    zero.step()
    np.testing.assert_allclose(state(zero)["m"], trained(N, 1, 1).m, atol=1e-6)
    assert max(most) <= 2  # the one that is being replaced


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_weight_zero_is_refused_and_can_be_cleared(stage):
    def train(world):
        zero = make(world, stage)
        zero.backward(cut(gradient(N, world.rank, 9), CUTS), weight=0.0)
        with pytest.raises(ValueError, match="step without gradients"):
            zero.step()
        zero.zero_grad()
        steps(zero, N, CUTS, 2)
        return state(zero)["m"]

    for m in threads(2, train):
        np.testing.assert_allclose(m, trained(N, 2, 2).m, atol=1e-6)


def test_a_rank_of_weight_zero_need_not_know_a_loss():
    def train(world):
        zero = make(world)
        mine = {"weight": 1.0, "loss": 2.0} if world.rank == 0 else {"weight": 0.0}
        return zero.backward(cut(gradient(N, 0, 1), CUTS), **mine), zero.step().loss

    assert threads(2, train) == [(2.0, 2.0)] * 2


def test_a_backward_that_failed_midway_must_be_cleared():
    class Broken(dict):
        """Passes the check, and fails when the second array is written."""

        asked = 0

        def __getitem__(self, name):
            self.asked += name == "b.weight"
            if self.asked > 2:
                raise OSError("gone")
            return super().__getitem__(name)

    zero = make()
    good = {name: np.ones(zero.full(name).shape) for name in zero.names}
    with pytest.raises(OSError, match="gone"):
        zero.backward(Broken(good))
    for call in (lambda: zero.backward(good), zero.step):
        with pytest.raises(ValueError, match=r"did not finish.*call zero_grad"):
            call()
    zero.zero_grad()
    zero.backward(good)
    assert zero.step().applied
