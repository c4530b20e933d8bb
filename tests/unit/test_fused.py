"""The optimizer fused into backward: the same bits, one piece of gradients held."""

import numpy as np
import pytest

import zeromp as zm
from zeromp.runlog import RunLog, summary

MODEL = zm.models.gpt(17, 2, 8, 2, 8)


def batch(rank, step):
    rng = np.random.default_rng(100 * step + rank)
    x = rng.integers(0, 17, (2, 8))
    return x, np.roll(x, -1, 1)


def train(world, fused, stage=2, wire="bfloat16", rule=zm.AdamW, steps=4, clip=None, **options):
    engine = zm.Engine(
        MODEL, world=world, stage=stage, wire=wire, optimizer=rule(lr=0.05), fused=fused, **options
    )
    log = RunLog(engine, steps)
    losses, norms = [], []
    for step in range(steps):
        lr = 0.05 / (1 + step)
        if fused:
            engine.prepare(lr=lr, clip=clip)
        losses.append(engine.backward(*batch(world.rank, step)))
        report = engine.step() if fused else engine.step(lr=lr)
        norms.append(report.grad_norm)
        log.step(report)
        assert report.lr == lr
    result = summary(log)
    held = engine.zero.store.held["gradients"]
    engine.close()
    return losses, norms, result, held


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("stage", "wire", "rule"),
    [(2, "bfloat16", zm.AdamW), (3, "bfloat16", zm.SGD), (3, "float32", zm.AdamW)],
)
def test_bits_and_bytes(ranks, stage, wire, rule):
    plain = zm.threads(ranks, lambda w: train(w, False, stage, wire, rule))
    fused = zm.threads(ranks, lambda w: train(w, True, stage, wire, rule))
    for (losses, norms, result, held), (want, want_norms, full, all_held) in zip(
        fused, plain, strict=True
    ):
        assert (losses, norms) == (want, want_norms)
        assert result["state_sha256"] == full["state_sha256"]
        widest = max(sum(p.size for p in unit.parameters) for unit in MODEL.units)
        itemsize = 2 if wire == "bfloat16" else 4
        assert held in [n * itemsize for n in (widest // ranks, -(-widest // ranks))]
        assert held < all_held
        for key in ("held_bytes", "sent_bytes", "moved_bytes"):
            for rank in result[key]:
                for name, pair in rank.items():
                    assert pair["measured"] == pair["predicted"], (key, name, pair)


def test_states_on_disk_are_streamed_while_backward_runs(tmp_path):
    def run(world):
        disk = {"offload": "optimizer=disk", "offload_dir": tmp_path, "offload_tile": 4096}
        return train(world, True, 3, **disk)[2]["state_sha256"]

    plain = zm.threads(2, lambda w: train(w, False, 3))[0][2]["state_sha256"]
    assert zm.threads(2, run) == [plain, plain]


def test_clipping_uses_the_norm_of_the_step_before():
    def run(world):
        engine = zm.Engine(MODEL, world=world, stage=2, optimizer=zm.SGD(momentum=0.0), fused=True)
        found = []
        for step in range(2):
            engine.prepare(lr=0.1, clip=1e-3)
            engine.backward(*batch(world.rank, step))
            found.append(engine.step())
        return found

    first, second = zm.threads(2, run)[0]
    assert first.clip_factor == 1.0
    assert second.clip_factor == pytest.approx(1e-3 / first.grad_norm, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 1}, "stage 1, not 2 or 3"),
        ({"wire": "float16"}, "wire float16"),
        ({"micro_batches": 2}, "micro_batches 2, not 1"),
        ({"offload": "gradients=host"}, "gradients on host"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        zm.Engine(MODEL, fused=True, **{"stage": 2, **options})


def test_backward_must_be_prepared_and_a_bad_gradient_is_told():
    engine = zm.Engine(MODEL, stage=2, fused=True)
    with pytest.raises(ValueError, match="call prepare"):
        engine.backward(*batch(0, 0))
    with pytest.raises(ValueError, match="prepare is for fused=True"):
        zm.Engine(MODEL, stage=2).prepare()
    zero = zm.Zero({"w": np.ones(5)}, stage=2, wire="float32", fused=True)
    zero.prepare(lr=0.1)
    zero.backward({"w": np.array([1, np.inf, 1, 1, 1])})
    with pytest.raises(FloatingPointError, match="resume from the last checkpoint"):
        zero.step()
