"""The peers' loss curves: PyTorch's DDP and FSDP2, and DeepSpeed, all print these losses.

The peers' weights and tokens, 16 (XS), 8 (S) or 4 (M) rows per rank, AdamW with decay on everything
and no clipping; see shared/peers/peers.md. Every stage must hit all losses in float32.
"""

import os

import numpy as np
import pytest
import reference

import zeromp as zm

ROWS = {"XS": 16, "S": 8, "M": 4}  # per rank
SLOW = os.environ.get("ZEROMP_SLOW", "0") not in ("", "0")


def losses(world, size, stage, steps, wire="float32", **options):
    """Losses that zeromp has at each step, from the peers' weights and tokens."""
    shape = reference.SIZES[size]
    model = zm.models.gpt(shape.vocab, shape.layers, shape.width, shape.heads, shape.context)
    peers = reference.PEERS_ADAMW
    engine = zm.Engine(
        model,
        world=zm.World(world.transport, reduce="mpi"),
        stage=stage,
        wire=wire,
        optimizer=zm.AdamW(
            lr=peers["lr"],
            betas=(peers["b1"], peers["b2"]),
            eps=peers["eps"],
            weight_decay=peers["wd"],
        ),
        weights=reference.init_weights(shape, reference.SEED),
        **options,
    )
    data = reference.MarkovTokens(shape.vocab, shape.context, reference.SEED)
    rows, found = ROWS[size], []
    mine = slice(world.rank * rows, (world.rank + 1) * rows)
    for step in range(steps):
        x, y = data.batch(step, rows * world.size)
        found.append(engine.backward(x[mine], y[mine]))
        engine.step()
    return found


def printed(world, size, steps):
    return reference.LOSSES[size, ROWS[size] * world.size][:steps]


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_xs_in_float32(world, stage):
    found = losses(world, "XS", stage, 20, recompute=stage % 2 == 1)
    np.testing.assert_allclose(found, printed(world, "XS", 20), rtol=0, atol=2e-5)


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stage", [1, 3])
def test_s_in_float32(world, stage):
    steps = 12 if SLOW else 3
    found = losses(world, "S", stage, steps)
    np.testing.assert_allclose(found, printed(world, "S", steps), rtol=0, atol=2e-5)


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SLOW, reason="takes minutes: ZEROMP_SLOW=1 runs it")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_m_in_float32(world, stage):
    found = losses(world, "M", stage, 5)
    np.testing.assert_allclose(found, printed(world, "M", 5), rtol=0, atol=2e-5)


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_xs_in_16_bits_is_near(world, wire):
    options = {"loss_scale": 1024.0} if wire == "float16" else {}  # no step is skipped
    found = losses(world, "XS", 3, 5, wire, **options)
    np.testing.assert_allclose(found, printed(world, "XS", 5), rtol=0, atol=2e-3)
