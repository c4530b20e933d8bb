"""One copy of the full weights per node: the same bits, a share of it on each rank's account."""

import numpy as np
import pytest
import toys

import zeromp as zm

MODEL = zm.models.gpt(17, 2, 8, 2, 8)


def train(world, stage, share, wire="bfloat16", **options):
    engine = zm.Engine(
        MODEL, world=world, stage=stage, wire=wire, share_weights=share, keep_float32=["*ln*"],
        optimizer=zm.AdamW(lr=0.05), **options,
    )  # fmt: skip
    rng = np.random.default_rng(world.rank)
    losses = []
    for _ in range(4):
        x = rng.integers(0, 17, (2, 8))
        losses += [engine.backward(x, np.roll(x, -1, 1)), engine.evaluate(x, x)]
        engine.step(clip=1.0)
    with engine.gathered("wte.weight", edit=True) as values:
        values["wte.weight"] *= 2
    losses.append(engine.evaluate(x, x))
    return losses, toys.summary_of(engine, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bits_and_bytes(ranks, stage):
    plain = zm.threads(ranks, lambda w: train(w, stage, False))
    shared = zm.threads(ranks, lambda w: train(w, stage, True))
    for (losses, summary), (want, before) in zip(shared, plain, strict=True):
        assert losses == want
        assert summary["state_sha256"] == before["state_sha256"]
        for rank in summary["held_bytes"]:
            for name, pair in rank.items():
                assert pair["measured"] == pair["predicted"], (name, pair)
        kind = "buffers" if stage == 3 else "parameters"
        held, alone = (
            sum(rank[kind]["measured"] for rank in s["held_bytes"]) for s in (summary, before)
        )
        if stage < 3:
            assert held * ranks == alone  # one copy on the node, instead of one per rank
        else:
            assert held < alone or ranks == 1


def test_stage_0_updates_all_weights_on_every_rank():
    with pytest.raises(ValueError, match="share_weights=True needs stage 1"):
        zm.Engine(MODEL, stage=0, share_weights=True)
