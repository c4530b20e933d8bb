"""The benchmarks measure what they say: small sizes, for correctness only."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import adam
import collectives
import gpt
import gpt_zeromp
import launcher
import memory
import numpy as np
import pytest
import records
import scaling
import startup
import step

import zeromp as zm

ROOT = Path(__file__).resolve().parents[2]
TOLD = {"size": "XXS", "stage": 3, "wire": "float32", "warmup": 1, "steps": 2, "probe": True}


@pytest.fixture(scope="module")
def trained():
    """Reports of two ranks that trained as a benchmark does."""
    return zm.threads(2, lambda world: gpt_zeromp.train(TOLD, world))


def options(folder, **changes):
    told = {"runs": 2, "seconds": 60.0, "only": [], "show": False, "out": folder, "peers": None}
    return argparse.Namespace(**told | {"quick": False} | changes)


# ---- what is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["XXS", "XS"])
def test_the_shared_gpt_is_zeromps_gpt(size):
    """Names, shapes, number of parameters and operations agree with the model's own."""
    shape = gpt.SIZES[size]
    model = zm.models.gpt(shape.vocab, shape.layers, shape.width, shape.heads, shape.context)
    own = {p.name: p.shape for unit in model.units for p in unit.parameters}
    assert gpt.shapes(shape) == own
    assert {name: a.shape for name, a in gpt.weights(shape)} == own
    assert shape.num_parameters == model.num_parameters
    assert shape.flops_per_token == model.flops_per_token()


def test_ranks_take_their_rows_of_one_batch():
    shape = gpt.shape_of("XXS", batch=3)
    x, y = gpt.Tokens(gpt.shape_of("XXS", batch=6)).batch(4, 0, 1)
    parts = [gpt.Tokens(shape).batch(4, rank, 2) for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([p[0] for p in parts]), x)
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), y)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])


def test_a_rank_reports_what_it_measured(trained):
    record = trained[0]
    ids = gpt.SIZES["XXS"].vocab
    assert record["losses"] == trained[1]["losses"]
    assert len(record["losses"]) == 3
    assert abs(record["losses"][0] - np.log(ids)) < 0.05  # nearly uniform at the start
    assert record["losses"][-1] < record["losses"][0]
    assert record["tokens"] == 2 * 2 * 16
    assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["step_s"])
    flops = gpt.SIZES["XXS"].flops_per_token * record["tokens"]
    speed = record["share_of_gemm"] * record["gemm_flops_per_s"] * record["step_s"]
    assert 0.05 < speed / flops < 20  # medians of parts that are measured apart
    parts = record["parts_s"]
    assert 0 < parts["forward"] + parts["backward"] + parts["optimizer"] < 2 * record["step_s"]
    assert {"reduce_scatter", "all_gather", "agree"} <= parts.keys()
    assert record["formula_bytes"] == sum(record["formula_parts"].values())


def test_an_update_and_its_bound_change_the_same_arrays():
    """AdamW's first step moves a parameter by lr against the sign of its gradient."""
    calls = adam.updates(1000)
    arrays = [cell.cell_contents for cell in calls["bfloat16"].__closure__]
    arrays = next(a for a in arrays if hasattr(a, "copy") and hasattr(a, "master"))
    before = arrays.master.copy()
    calls["bfloat16"]()
    gradient = (arrays.gradient.astype(np.uint32) << 16).view(np.float32)
    moved = arrays.master - before
    large = np.abs(gradient) > 1e-4
    assert (np.sign(moved[large]) == -np.sign(gradient[large])).all()
    error = (arrays.copy.astype(np.uint32) << 16).view(np.float32) - arrays.master
    assert np.abs(error).max() < 2**-8 * np.abs(arrays.master).max()
    for call in adam.bounds(1000).values():
        call()


def test_collectives_that_are_timed_move_the_right_numbers():
    def rank(world):
        ways = {way: world.reducing(way) for way in collectives.zm_ways()}
        ways = {way: w for way, w in ways.items() if w.reduce == way}
        calls = collectives.calls_of(world, ways, 64, np.float32)
        names = {name.split()[0] for name in calls}
        medians = collectives.time_in_turns(calls, world, 1)
        assert medians.keys() == calls.keys()
        return names

    assert zm.threads(2, rank) == [{"memcpy", "reduce_scatter", "all_gather"}] * 2


# ---- records -----------------------------------------------------------------------------------


def test_cases_alternate_and_a_stopped_collection_goes_on(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(launcher, "run", lambda case: ran.append(case.name) or {"x": len(ran)})
    cases = [launcher.Case(name, "") for name in ("a", "b")]
    records.collect("some", cases, options(tmp_path, seconds=0.0))
    assert ran == []
    records.collect("some", cases, options(tmp_path, runs=1))
    assert ran == ["a", "b"]
    with (tmp_path / "some.jsonl").open("a") as file:
        file.write('{"case": "a", "cut sho')  # the job was ended in the middle of a line
    found = records.collect("some", cases, options(tmp_path, runs=3))
    assert ran == ["a", "b"] * 3
    assert [r["x"] for r in found if r["case"] == "b"] == [2, 4, 6]
    assert records.medians(found, "x")["a"]["x"] == {"median": 3, "min": 1, "max": 5, "n": 3}


def test_runs_of_other_sources_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "run", lambda case: {"x": 1})
    cases = [launcher.Case("a", "")]
    assert len(records.collect("some", cases, options(tmp_path))) == 2
    monkeypatch.setattr(records, "code", lambda: "changed")
    assert len(records.collect("some", cases, options(tmp_path, runs=1))) == 1


def test_a_case_that_fails_is_left_out(tmp_path, monkeypatch, capsys):
    def run(case):
        if case.name == "bad":
            raise launcher.Failed("no such library")
        return {"x": 1}

    monkeypatch.setattr(launcher, "run", run)
    cases = [launcher.Case(name, "") for name in ("bad", "good")]
    found = records.collect("some", cases, options(tmp_path))
    assert [r["case"] for r in found] == ["good", "good"]
    assert "bad: no such library" in capsys.readouterr().err


def test_exponents_are_those_of_the_power_law():
    found = {
        f"width/stage {stage}/{width}": {"step_s": {"median": 1e-6 * width**1.5}}
        for stage in scaling.STAGES
        for width in scaling.GROWTH["width"]
    }
    fitted = dict(value for _, value in scaling.exponents(found))
    assert fitted == {f"width/stage {s}": pytest.approx(1.5) for s in scaling.STAGES}


# ---- tables ------------------------------------------------------------------------------------


def test_tables_and_files_have_all_cases(tmp_path, trained, capsys):
    """Ratios and differences of losses are against the peer; here the peer is twice as fast."""
    one = {**trained[0], "at": "now", "first_step_s": 1.0, "node_pss_bytes": 10**8}
    peer = {**one, "tokens_per_s": 2 * one["tokens_per_s"], "node_pss_bytes": 2 * 10**8}
    peer["first_step_s"] = 4.0
    peer["losses"] = [x + 1e-3 for x in one["losses"]]
    told = options(tmp_path)
    step.show([{**one, "case": "XS/stage 3/float32"}, {**peer, "case": "XS/ddp"}], told)
    memory.show([{**one, "case": "M/stage 3/bfloat16"}, {**peer, "case": "M/fsdp2"}], told)
    startup.show([{**one, "case": "stage 1/2 ranks"}, {**peer, "case": "ddp/2 ranks"}], told)
    runs = [{**one, "case": f"strong/stage 3/{n}"} for n in (1, 2)]
    scaling.show(runs, told)
    text = capsys.readouterr().out
    assert "1e-03 (!)" in text
    found = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["results"]
        for name in ("step", "memory", "startup", "scaling")
    }
    ratios = found["step"]["XS/stage 3/float32"]["ratios"]["fastest of DDP and ZeRO-1"]
    assert ratios["tokens_per_s"] == 0.5
    assert found["memory"]["M/stage 3/bfloat16"]["node_ratio"]["fsdp2"] == 0.5
    assert found["startup"]["stage 1/2 ranks"]["to_ddp"] == 0.25
    assert found["scaling"]["strong/stage 3/2"]["efficiency"] in (0.5, 1.0)  # of 2 cores, or 1


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(), reason="there is no mpiexec"
)
def test_one_command_measures_and_writes(tmp_path):
    """A job under mpiexec, its memory watched, and the files that it leaves."""
    flags = ["--quick", "--only", "XXS/stage 1", "--out", tmp_path]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "memory.py", *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert "XXS/stage 1/bfloat16" in done.stdout
    found = json.loads((tmp_path / "quick" / "memory.json").read_text())
    result = found["results"]["XXS/stage 1/bfloat16"]
    assert result["node_pss_bytes"]["median"] > result["peak_rank_bytes"]["median"] > 10**7
    assert found["machine"] and found["versions"]["numpy"] == np.__version__
