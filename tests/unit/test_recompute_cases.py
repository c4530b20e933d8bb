"""K20 of cases.md: recomputation of activations."""

import numpy as np
import pytest
from toys import STAGES

import zeromp as zm

VOCAB, CONTEXT = 13, 6


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=20)


def rows(count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (2, count, CONTEXT))


def train(world, recompute, stage, steps=3, wire="float32", dropout=0.1, tied=True, **options):
    """Bytes of all weights and moments after some steps, with losses and norms."""
    model = zm.models.gpt(VOCAB, 3, 8, 2, CONTEXT, dropout, tied)
    options = {"optimizer": zm.AdamW(eps=1e-2), "poison": True, "seed": 5} | options
    engine = zm.Engine(model, world=world, stage=stage, wire=wire, recompute=recompute, **options)
    baseline = {k: v for k, v in engine.zero.store.held.items() if v}
    reports = []
    for t in range(steps):
        engine.backward(*rows(2, seed=10 * t + world.rank))
        reports.append(repr(engine.step(lr=0.01)))
        assert {k: v for k, v in engine.zero.store.held.items() if v} == baseline
    saved = engine.zero.store.peak["activations"]
    found = {
        name: (engine.master(name).tobytes(), [m.tobytes() for m in engine.moments(name).values()])
        for name in engine.zero.names
    }
    return found | {"reports": reports}, saved


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_o102_recompute_draws_the_same_dropout_masks(stage, wire, tied):
    before = repr(np.random.get_state())  # noqa: NPY002 - nobody may touch it
    kept, again = (
        threads(2, lambda world, r=r: train(world, r, stage, wire=wire, tied=tied))
        for r in (False, True)
    )
    assert repr(np.random.get_state()) == before  # noqa: NPY002
    for (one, more), (other, less) in zip(kept, again, strict=True):
        assert one == other
        assert less < more


def test_o102_dropout_is_on_at_all():
    with_dropout = threads(1, lambda world: train(world, True, 1))[0][0]
    assert with_dropout != threads(1, lambda world: train(world, True, 1, dropout=0.0))[0][0]


@pytest.mark.parametrize("rule", [zm.AdamW(eps=1e-2), zm.SGD()])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_o103_recompute_with_released_and_frozen_parameters(stage, rule, prefetch):
    frozen = ["blocks.*.qkv.*", "blocks.*.out.*", "blocks.*.ln2.*"]
    kept, again = (
        threads(
            2,
            lambda world, r=r: train(
                world, r, stage, frozen=frozen, optimizer=rule, prefetch=prefetch
            ),
        )
        for r in (False, True)
    )
    assert [one for one, _ in kept] == [one for one, _ in again]
