"""What a run prints and writes: metrics, summary, table, hashes."""

import functools
import hashlib
import json

import numpy as np
import pytest

import zeromp as zm
from zeromp.runlog import num_bytes

MODEL = zm.models.gpt(vocab=13, layers=2, width=6, heads=2, context=5)


def train(world, path=None, stage=1, wire="bfloat16", steps=3, **options):
    engine = zm.Engine(MODEL, world=world, stage=stage, wire=wire, **options)
    log = zm.RunLog(engine, steps, path)
    rng = np.random.default_rng(world.rank)
    for step in range(steps):
        x, y = rng.integers(0, 13, (2, 2, 5))
        for _ in range(options.get("micro_batches", 1)):
            engine.backward(x, y)
        log.step(engine.step(lr=0.01 * (step + 1), clip=1.0))
    return log.finish(note="kept"), engine


def test_metrics_are_one_object_per_step_and_a_summary(tmp_path, capsys):
    path = tmp_path / "new" / "m.jsonl"
    result, _ = zm.threads(3, lambda w: train(w, path))[0]
    *steps, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert [s["step"] for s in steps] == [0, 1, 2]
    assert [s["lr"] for s in steps] == pytest.approx([0.01, 0.02, 0.03])
    for s in steps:
        assert {"loss", "grad_norm", "loss_scale", "skipped", "tokens_per_s", "seconds"} < set(s)
        assert {"forward", "backward", "optimizer", "step"} <= set(s["seconds"])
        assert s["skipped"] is False
    assert last["summary"] is True
    assert last["note"] == "kept"
    assert (last["ranks"], last["stage"], last["mpi"]) == (3, 1, "threads")
    assert last["first_loss"] == steps[0]["loss"] == result["first_loss"]
    assert len(last["held_bytes"]) == len(last["sent_bytes"]) == len(last["peak_rss_bytes"]) == 3
    text = capsys.readouterr().out
    assert "DIFFERS" not in text
    assert text.count("equal") == 10
    assert "model states: 8.0" in text  # 4 + 12/3, up to the rounding of pieces
    assert "4 + 12/N = 8.0000" in text


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_measured_equals_predicted_on_every_rank(stage, micro_batches):
    for recompute in (False, True):
        options = {"micro_batches": micro_batches, "recompute": recompute}
        result, _ = zm.threads(3, functools.partial(train, stage=stage, **options))[0]
        for rank in result["held_bytes"] + result["sent_bytes"]:
            for name, pair in rank.items():
                assert pair["measured"] == pair["predicted"], (name, recompute)


def test_hashes_are_of_whole_masters_in_order_of_names_whatever_stage():
    found = set()
    for stage in range(4):
        result, engine = zm.threads(2, functools.partial(train, stage=stage))[0]
        found.add((result["weights_sha256"], result["state_sha256"]))
    assert len(found) == 1
    result, engine = train(zm.alone(), stage=0, wire="float32")
    digest = hashlib.sha256()
    for name in sorted(engine.zero.names):
        digest.update(name.encode() + engine.full(name).tobytes())
    assert result["weights_sha256"] == digest.hexdigest()


def test_a_skipped_step_is_null_in_json_and_counted(tmp_path):
    path = tmp_path / "m.jsonl"
    engine = zm.Engine(MODEL, wire="float16", loss_scale=2.0**40, recompute=True)
    log = zm.RunLog(engine, 1, path)
    engine.backward(np.zeros((1, 5), np.int64), np.ones((1, 5), np.int64))
    log.step(engine.step())
    log.finish()
    step, last = (json.loads(line) for line in path.read_text().splitlines())
    assert step["skipped"] is True
    assert step["grad_norm"] is None
    assert (last["steps"], last["applied"]) == (1, 0)
    assert all(pair["measured"] == pair["predicted"] for pair in last["sent_bytes"][0].values())


def test_num_bytes():
    assert [num_bytes(t) for t in ("600", "64k", "1.5G", "2M")] == [600, 64000, 1500000000, 2000000]


def test_a_run_that_goes_on_continues_its_metrics(tmp_path):
    """Steps 0 to 4, of which the last two and half a line are lost: the file is that of one run."""

    def job(world):
        path = tmp_path / "m.jsonl"
        engine = zm.Engine(MODEL, world=world, stage=2, seed=3)
        rng = np.random.default_rng(world.rank)

        def steps(log, numbers):
            for _ in numbers:
                engine.backward(*rng.integers(0, 13, (2, 2, 5)))
                log.step(engine.step())

        first = zm.RunLog(engine, 8, path)
        steps(first, range(5))
        first.close()
        if world.rank == 0:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines) + lines[-1][:20])
        world.barrier()
        second = zm.RunLog(engine, 8, path, first=3)
        steps(second, range(3, 8))
        return second.finish()

    result = zm.threads(2, job)[0]
    *steps, last = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(8))
    assert (last["first_step"], last["steps"], last["first_loss"]) == (3, 5, steps[3]["loss"])
    for rank in result["sent_bytes"]:  # of the five steps of the second log alone
        assert all(pair["measured"] == pair["predicted"] for pair in rank.values())
