"""K19 of cases.md: configuration, and what the user is told."""

import numpy as np
import pytest
from toys import STAGES, WIRES

import zeromp as zm


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=20)


@pytest.mark.parametrize(
    ("global_batch", "micro", "num_ranks", "num_micro"),
    [(24, 3, 8, 1), (24, 3, 2, 4), (5, 5, 1, 1), (12, 1, 3, 4)],
)
def test_o100_the_number_of_micro_batches_is_derived(global_batch, micro, num_ranks, num_micro):
    assert zm.data.check_batch(global_batch, micro, num_ranks) == num_micro


@pytest.mark.parametrize(
    ("global_batch", "micro", "num_ranks"), [(24, 5, 2), (2, 1, 3), (0, 1, 1), (8, 0, 1)]
)
def test_o100_batches_that_do_not_fit_raise_with_the_equation(global_batch, micro, num_ranks):
    equation = f"global batch {global_batch} must be micro-batch {micro} x {num_ranks} ranks"
    with pytest.raises(ValueError, match=equation):
        zm.data.check_batch(global_batch, micro, num_ranks)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", ["zero", "engine"])
def test_o100_a_misspelt_option_raises_on_all_ranks_with_the_nearest_name(stage, make):
    def build(world):
        with pytest.raises(ValueError, match="'micro_batch' is unknown: did you mean 'micro_batch"):
            if make == "zero":
                zm.Zero({"w": np.ones(3)}, world=world, stage=stage, micro_batch=2)
            else:
                zm.Engine(zm.models.mlp(), world=world, stage=stage, micro_batch=2)

    threads(2, build)


def test_o100_an_option_like_no_other_raises_with_all_names():
    with pytest.raises(ValueError, match=r"'zzz' is unknown: options are frozen, keep_float32,"):
        zm.Zero({"w": np.ones(3)}, zzz=1)


def test_o100_an_option_misspelt_on_one_rank_raises_on_all():
    def build(world):
        options = {"prefetsh": 1} if world.rank == 1 else {}
        with pytest.raises(ValueError, match="did you mean 'prefetch'"):
            zm.Zero({"w": np.ones(3)}, world=world, **options)

    threads(2, build)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stage", STAGES)
def test_o101_the_configuration_is_printed_once_and_says_what_is_used(wire, stage, capsys):
    def build(world):
        zero = zm.Zero(
            {"a.weight": np.ones((2, 2)), "a.bias": np.ones(2)},
            world=world,
            stage=stage,
            wire=wire,
            optimizer=zm.AdamW(lr=0.02, weight_decay=0.3),
            groups=[zm.Group("biases", "*.bias", lr_factor=2.0, weight_decay=0.0)],
        )
        world.print(zero.describe())
        zero.backward({"a.bias": np.ones(2)})
        return zero.lr(), zero.step().lr

    assert threads(2, build) == [(0.02, 0.02)] * 2
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count(f"stage {stage} on 2 ranks") == 1
    assert "lr=0.02" in out
    assert "group biases: weight decay 0, lr x 2: a.bias" in out
    assert "group default: weight decay 0.3, lr x 1: a.weight" in out
    assert ("loss scale" in out) == (wire == "float16")


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_o101_a_skipped_step_says_nothing_of_a_loss_scale_that_is_not_there(wire, capsys):
    zero = zm.Zero({"w": np.ones(3)}, wire=wire, patience=2)
    zero.backward({"w": np.full(3, np.inf)})
    assert not zero.step().applied
    assert capsys.readouterr().out == "step 1 skipped: inf in the gradient of 'w'\n"
    zero.backward({"w": np.full(3, np.inf)})
    with pytest.raises(FloatingPointError) as caught:
        zero.step()
    assert "loss scale" not in str(caught.value)


def test_o101_a_schedule_has_no_maximum_of_its_own():
    for schedule in (zm.cosine, zm.linear):
        with pytest.raises(TypeError, match="peak"):
            schedule(0, 10)
        assert max(schedule(t, 10, 0.02, 3) for t in range(10)) == 0.02


@pytest.mark.parametrize("stage", STAGES)
def test_o101_the_step_s_own_learning_rate_is_used_and_reported(stage):
    def train(world):
        rule = zm.SGD(lr=0.5, momentum=0.0)
        zero = zm.Zero({"w": np.ones(3)}, world=world, stage=stage, wire="float32", optimizer=rule)
        found = []
        for lr in (None, 0.25, 0.0):
            zero.backward({"w": np.ones(3)})
            found.append((zero.step(lr=lr).lr, float(zero.full("w")[0])))
        return found

    assert threads(2, train) == [[(0.5, 0.5), (0.25, 0.25), (0.0, 0.25)]] * 2
