"""K11 of cases.md: stage 3 in use. Gather, edit, evaluation, changing order."""

import numpy as np
import pytest
import reference
from toys import PINNED, STAGES, arrays, cut, feed, gradient, mean_gradient, start, state

import zeromp as zm

N, CUTS = 11, {"w": (2, 3), "b": 5}
VOCAB, CONTEXT, HEADS = 13, 6, 2


def threads(num_ranks, function, **options):
    return zm.threads(num_ranks, function, **{"debug": True, "timeout": 20} | options)


def make(world=None, stage=3, wire="float32", **options):
    options = {"optimizer": zm.SGD(lr=0.1, momentum=0.0), "poison": True, "bucket": 6} | options
    return zm.Zero(arrays(N, CUTS), world=world, stage=stage, wire=wire, **options)


def tiny_gpt(dropout=0.0):
    return zm.models.gpt(VOCAB, layers=4, width=8, heads=HEADS, context=CONTEXT, dropout=dropout)


def rows(count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (2, count, CONTEXT))


# ---- edit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize("unit", ["w", "unit0"])
def test_o058_an_edit_reaches_parameters_and_masters(stage, wire, unit):
    def train(world):
        zero = make(world, stage, wire, optimizer=zm.AdamW(**PINNED))
        feed(zero, N, CUTS, 1)
        zero.step()
        moments = zero.moments("w")
        with zero.gathered(unit, edit=True) as values:
            assert values["w"].dtype == np.float32
            values["w"][:] = 0.5
        found = [zero.full("w"), zero.master("w")]
        assert all(np.array_equal(zero.moments("w")[k], m) for k, m in moments.items())  # kept
        for lr in (0.0, 0.01):
            feed(zero, N, CUTS, zero.applied + 1)
            zero.step(lr=lr)
            found.append(zero.master("w"))
        return found, zero.moments("w"), zero.full("b")

    for (full, master, still, moved), moments, b in threads(2, train):
        for array in (full, master, still):
            np.testing.assert_array_equal(array, np.full((2, 3), 0.5, np.float32))
        m, v = (moments[k].astype(np.float64) for k in "mv")
        step = (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + 1e-8)
        np.testing.assert_allclose(moved, 0.5 * (1 - 0.001) - 0.01 * step, atol=1e-6)
        assert np.isfinite(b).all()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_o059_the_edit_of_rank_0_wins(stage, wire):
    def train(world):
        zero = make(world, stage, wire)
        with zero.gathered("w", edit=True) as values:
            values["w"][:] = 0.25 if world.rank == 0 else world.rank
        with zero.gathered("b", edit=True) as values:
            if world.rank == 1:
                values["b"][:] = 9.0
        return [zero.full("w"), zero.master("w"), zero.master("b")]

    for full, master, b in threads(3, train):
        np.testing.assert_array_equal(full, np.full((2, 3), 0.25))
        np.testing.assert_array_equal(master, full)
        np.testing.assert_array_equal(b, cut(start(N).astype(np.float32), CUTS)["b"])


@pytest.mark.parametrize("stage", STAGES)
def test_o059_an_edit_of_another_rank_is_dropped_whatever_it_is(stage):
    def train(world):
        zero = make(world, stage)
        with zero.gathered("w", edit=True) as values:
            values["w"][:] = 0.25 if world.rank == 0 else np.nan
        return zero.full("w")

    for w in threads(2, train):
        np.testing.assert_array_equal(w, np.full((2, 3), 0.25))


@pytest.mark.parametrize("stage", STAGES)
def test_o059_a_new_array_put_in_place_of_the_old_is_taken_or_refused(stage):
    zero = make(None, stage)
    new = np.full((2, 3), 0.25, np.float32)
    try:
        with zero.gathered("w", edit=True) as values:
            values["w"] = new
    except TypeError:
        return
    np.testing.assert_array_equal(zero.full("w"), new)


@pytest.mark.parametrize("stage", STAGES)
def test_o059_a_context_to_read_refuses_edits(stage):
    def train(world):
        zero = make(world, stage)
        with zero.gathered("w") as values:
            with pytest.raises(ValueError, match="read-only"):
                values["w"][0, 0] = 3.0
            return values["w"].copy()

    for w in threads(2, train):
        np.testing.assert_array_equal(w, cut(start(N).astype(np.float32), CUTS)["w"])


@pytest.mark.parametrize("stage", STAGES)
def test_o059_an_edit_that_is_not_finite_is_refused_on_all_ranks_and_changes_nothing(stage):
    def train(world):
        zero = make(world, stage)
        before = zero.full("w")
        with (
            pytest.raises(ValueError, match=r"'w' holds inf"),
            zero.gathered("w", edit=True) as values,
        ):
            values["w"][1, 1] = np.inf
        assert np.array_equal(zero.full("w"), before)
        with pytest.raises(ValueError, match="no array is named 'x'"), zero.gathered("x"):
            pass

    threads(2, train)


# ---- order ---------------------------------------------------------------------------------------


def path_of(model, blocks):
    first, *middle, last = model.path
    return (first, *(middle[i] for i in blocks), last)


def loss64(weights, x, y, blocks):
    """Float64 loss of a GPT that runs its blocks in another order: the blocks renamed."""
    renamed = {n: w for n, w in weights.items() if not n.startswith("blocks.")}
    for place, block in enumerate(blocks):
        for name, w in weights.items():
            if name.startswith(f"blocks.{block}."):
                renamed[name.replace(f"blocks.{block}.", f"blocks.{place}.")] = w
    return reference.gpt_loss(renamed, x, y, HEADS)


def along(weights, direction, x, y, blocks):
    """Derivative of the float64 loss along a direction in the space of all weights."""

    def f(t):
        moved = {n: w + t[0] * direction[n] for n, w in weights.items()}
        return loss64(moved, x, y, blocks)

    return reference.finite_difference(f, np.zeros(1), 0, h=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_o060_the_order_of_blocks_may_change_from_step_to_step(stage, capsys):
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3), (0, 1, 2, 3)]
    model = tiny_gpt()
    x, y = rows(4, seed=1)

    def train(world):
        engine = zm.Engine(
            model,
            world=world,
            stage=stage,
            wire="float32",
            optimizer=zm.SGD(lr=0.1, momentum=0.0),
            poison=True,
        )
        zero, mine = engine.zero, slice(2 * world.rank, 2 * world.rank + 2)
        baseline, steps = dict(zero.store.held), []
        for order in orders:
            weights = {name: engine.master(name) for name in zero.names}
            loss = engine.backward(x[mine], y[mine], path=path_of(model, order))
            norm = engine.step().grad_norm
            g = {name: engine.moments(name)["m"] for name in zero.names}
            steps.append((weights, loss, norm, g))
            assert {k: v for k, v in zero.store.held.items() if v} == baseline
        return steps, world.transport.shared

    (steps, shared), _ = threads(2, train)
    assert not shared.posted  # no collective is left in flight
    assert capsys.readouterr() == ("", "")
    rng = np.random.default_rng(0)
    for order, (weights, loss, norm, g) in zip(orders, steps, strict=True):
        w64 = {name: w.astype(np.float64) for name, w in weights.items()}
        assert loss == pytest.approx(loss64(w64, x, y, order), rel=1e-6)
        assert norm == pytest.approx(np.sqrt(sum((a * a).sum() for a in g.values())), rel=1e-5)
        for direction in (g, *({n: rng.normal(size=a.shape) for n, a in g.items()} for _ in "12")):
            inner = sum(float((g[n] * d).sum()) for n, d in direction.items())
            assert inner == pytest.approx(along(w64, direction, x, y, order), rel=1e-4, abs=1e-5)
    skipped = [a for n, a in steps[2][3].items() if n.startswith("blocks.2.")]
    assert skipped
    assert not any(a.any() for a in skipped)


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_o061_evaluation_between_steps_changes_nothing(stage, wire, num_micro):
    model = tiny_gpt(dropout=0.1)

    def train(world, with_evaluation):
        engine = zm.Engine(
            model, world=world, stage=stage, wire=wire, micro_batches=num_micro, poison=True
        )

        def evaluate():
            if not with_evaluation:
                return
            losses = [engine.evaluate(*rows(count, seed=7)) for count in (3, 1, 3)]
            assert losses[0] == losses[2]
            bad = rows(2, seed=7)
            bad[0, 0, 0] = VOCAB if world.rank == 1 else 0
            with pytest.raises(ValueError, match=f"token id {VOCAB} is out of range"):
                engine.evaluate(*bad)

        for t in range(3):
            for m in range(num_micro):
                engine.backward(*rows(2, seed=100 * t + 10 * m + world.rank))
                evaluate()
            engine.step(clip=1.0)
            evaluate()
        return {k: v.tobytes() for k, v in state(engine.zero).items()}

    plain = threads(2, lambda world: train(world, False))
    assert plain == threads(2, lambda world: train(world, True))


# ---- gathers that do not match, arrays that are not gathered -------------------------------------


def sweep_unevenly(world, **options):
    zero = make(world, **options)
    order = ["unit0", "unit1"] if world.rank == 0 else ["unit0", "unit1", "unit1"]
    for _ in zero.sweep(order):
        pass


def test_o062_a_block_that_one_rank_calls_more_often_ends_in_a_time_out_with_its_name():
    with pytest.raises(TimeoutError, match=r"rank 1 has waited .* all_gather of unit1") as caught:
        threads(2, sweep_unevenly, debug=False, timeout=2)
    assert "must be called on all ranks: rank 0" in str(caught.value)


def test_o062_debug_mode_names_both_calls():
    def step_too(world):
        sweep_unevenly(world, prefetch=0)
        make(world)

    with pytest.raises(RuntimeError, match="ranks call different collectives") as caught:
        threads(2, step_too, timeout=5)
    assert "rank 1 calls all_gather of unit1" in str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_o063_shape_and_values_are_always_the_true_ones(stage, wire):
    def look(world):
        zero = make(world, stage, wire, loss_scale=1.0)
        for _, weights in zero.sweep():
            assert all(np.isfinite(a).all() for a in weights.values())
        found = [zero.full("w")]
        feed(zero, N, CUTS, 1)
        found.append(zero.full("w"))
        zero.step()
        found.append(zero.full("w"))
        assert zero.dtype("w") == wire
        return found

    g = cut(mean_gradient(N, 3, 1), CUTS)["w"]
    p = cut(start(N), CUTS)["w"]
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[wire]
    for first, second, third in threads(3, look):
        assert first.shape == third.shape == (2, 3)
        assert first.tobytes() == second.tobytes()
        np.testing.assert_allclose(first, p, atol=tolerance)
        np.testing.assert_allclose(third, p - 0.1 * g, atol=tolerance)


def test_o063_what_full_returns_is_a_copy():
    zero = make(None, stage=0)
    zero.full("w")[:] = 7.0
    zero.master("w")[:] = 7.0
    np.testing.assert_allclose(zero.full("w"), cut(start(N), CUTS)["w"], atol=1e-6)
    zero.backward(cut(gradient(N, 0, 1), CUTS))
    zero.step()
    zero.moments("w")["m"][:] = 7.0
    assert not (zero.moments("w")["m"] == 7.0).any()
