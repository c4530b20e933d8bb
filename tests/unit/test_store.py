"""The ledger of what is held, and its budget."""

import numpy as np
import pytest
import toys

import zeromp as zm
from zeromp.store import KINDS, OverBudget, Store


def test_arrays_are_zero_and_entered():
    store = Store()
    for kind in KINDS:
        array = store.empty(kind, 5, np.uint16)
        assert array.shape == (5,) and array.dtype == np.uint16 and not array.any()
    assert store.empty("m", 0, np.float32).size == 0
    assert store.held == store.peak == dict.fromkeys(KINDS, 10)
    with pytest.raises(AssertionError):
        store.empty("weights", 1, np.float32)


def test_peak_keeps_what_has_left():
    store = Store()
    with store.holding("activations", 100):
        assert store.held["activations"] == 100
    with pytest.raises(ZeroDivisionError), store.holding("activations", 30):
        1 / 0  # noqa: B018
    assert (store.held["activations"], store.peak["activations"]) == (0, 100)
    with pytest.raises(AssertionError):
        store.leave("activations", 1)


def test_budget_is_exact_and_the_error_says_who_holds_what():
    store = Store(budget=1040)
    store.empty("parameters", 250, np.float32)
    store.empty("m", 10, np.float32)
    with pytest.raises(OverBudget, match="1 bytes of buffers do not fit: held are parameters "
                       r"1,000, m 40 \(1,040 bytes\) of a budget of 1,040") as caught:  # fmt: skip
        store.empty("buffers", 1, np.uint8)
    assert isinstance(caught.value, MemoryError)
    assert store.held == store.peak == {"parameters": 1000, "m": 40}
    with pytest.raises(OverBudget), store.holding("activations", 1):
        pass
    store.leave("m", 40)
    store.enter("activations", 40)
    with pytest.raises(OverBudget, match="held are none"):
        Store(0).enter("v", 1)


def build(world, n, stage, budget=None):
    """In ten units, so that what is used by one at a time is small."""
    cut = [n // 10] * 9 + [n - n // 10 * 9]
    options = {"bucket": 1, "device_memory": budget}
    return toys.make(world, n, cut, stage, "bfloat16", **options), cut


def needs(ranks, n, stage):
    """Bytes that each rank holds."""
    return zm.threads(ranks, lambda world: sum(build(world, n, stage)[0].store.held.values()))


@pytest.mark.parametrize("stage", toys.STAGES)
def test_zero_fits_into_exactly_what_is_forecast(stage):
    need = max(needs(3, 13, stage))

    def run(world):
        with pytest.raises(MemoryError, match=f"stage {stage} on 3 ranks needs {need:,} bytes per "
                           r"rank before activations \(parameters .*the device has"):  # fmt: skip
            build(world, 13, stage, need - 1)
        zero, cut = build(world, 13, stage, need)
        assert all(report.applied for report in toys.steps(zero, 13, cut, 2))

    zm.threads(3, run, debug=True)


def test_the_error_names_the_stage_that_would_fit():
    by_stage = [max(needs(2, 130, stage)) for stage in toys.STAGES]
    assert by_stage == sorted(set(by_stage), reverse=True)

    def run(world):
        with pytest.raises(MemoryError, match="the lowest rung that fits is stage 2"):
            build(world, 130, 0, by_stage[2])
        with pytest.raises(MemoryError, match="no stage fits"):
            build(world, 130, 3, 64)

    zm.threads(2, run, debug=True)


def test_one_rank_over_budget_stops_all():
    """Units of odd size on 2 ranks: only rank 1, which has more of them, is over."""
    low, high = needs(2, 13, 3)
    assert low < high

    def run(world):
        with pytest.raises(MemoryError, match=r"the device has .*\(on rank 1\)"):
            build(world, 13, 3, low)

    zm.threads(2, run, debug=True, timeout=20)


def test_what_is_raised_is_over_budget():
    with pytest.raises(zm.OverBudget):
        build(None, 13, 1, 64)


def test_activations_count():
    model = zm.models.mlp((4, 3, 2))
    engine = zm.Engine(model, wire="float32")
    x, y = np.ones((5, 4), np.float32), np.zeros(5, np.int64)
    engine.backward(x, y)
    store = engine.zero.store
    assert store.held["activations"] == 0 < store.peak["activations"]
    tight = sum(store.held.values()) + store.peak["activations"]
    zm.Engine(model, wire="float32", device_memory=tight).backward(x, y)
    with pytest.raises(MemoryError, match="bytes of activations do not fit"):
        zm.Engine(model, wire="float32", device_memory=tight - 1).backward(x, y)
