"""`python -m zeromp`: inspect, verify, export and diff, as a user sees them."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import toys

import zeromp as zm
from zeromp.__main__ import main

N, CUTS = 57, {"w": (4, 5), "b": 3, "last": (2, 17)}
FROZEN = {"frozen": ("b",)}


def saved(world, path, stage=3, wire="bfloat16", steps=(1, 2), **options):
    """Save the toy after some steps; returns its masters and moments."""
    zero = toys.make(world, N, CUTS, stage, wire, **options)
    for step in range(1, max(steps, default=0) + 1):
        arrays = toys.cut(toys.gradient(N, world.rank, step), CUTS)
        if options.get("frozen"):
            arrays.pop("b")
        zero.backward(arrays)
        zero.step()
        if step in steps:
            zero.save(path, extra={"step": step, "data": {"seed": 7, "context": 16}})
    return {name: zero.master(name) for name in CUTS}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    zm.threads(3, functools.partial(saved, path=path, **FROZEN))
    return path


def run(capsys, *words):
    """Exit code, and what was printed; nothing goes to stderr but errors."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code == 2) == bool(err), err
    return code, out + err


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_tells_what_is_there(capsys, folder):
    code, text = run(capsys, "inspect", folder)
    assert code == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == str(folder / "step-00000002")
    assert "2 steps applied; 3 ranks, stage 3, wire bfloat16" in lines
    assert "AdamW: lr 0.01, betas [0.9, 0.999], eps 1e-08, weight_decay 0.1" in lines
    assert "w 4 x 5 20 bfloat16 master, m, v" in lines
    assert "b 3 3 bfloat16, frozen parameters" in lines
    assert any(line.startswith("3 arrays, 57 parameters, in 3 files of") for line in lines)
    assert "extra: data seed 7, context 16" in lines
    assert "older checkpoints here: step-00000001" in lines


def test_inspect_as_json(capsys, folder):
    code, text = run(capsys, "inspect", folder / "step-00000001", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["record"]["applied"] == 1
    assert (found["record"]["num_ranks"], found["record"]["stage"]) == (3, 3)
    assert found["num_parameters"] == N
    assert [(a["name"], tuple(a["shape"])) for a in found["arrays"]] == [
        ("w", (4, 5)), ("b", (3,)), ("last", (2, 17)),
    ]  # fmt: skip
    sizes = [p.stat().st_size for p in sorted((folder / "step-00000001").glob("rank*"))]
    assert [f["bytes"] for f in found["files"]] == sizes
    assert found["problems"] == []


# ---- verify --------------------------------------------------------------------------------------


def test_verify_a_good_one(capsys, folder):
    code, text = run(capsys, "verify", folder)
    assert code == 0
    assert "step-00000002: good. 3 arrays in 3 files of" in text
    code, text = run(capsys, "verify", folder, "--all")
    assert (code, text.count(": good.")) == (0, 2)


def flip_a_byte(step):
    path = step / "rank00001.h5"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut_short(step):
    path = step / "rank00001.h5"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_byte, ["rank00001.h5", "checksum"]),
        (cut_short, ["rank00001.h5 is truncated"]),
        (lambda step: (step / "rank00002.h5").unlink(), ["rank00002.h5 is missing"]),
        (lambda step: (step / "model.h5").write_bytes(b"no"), ["model.h5"]),
    ],
)
def test_verify_a_broken_one(capsys, folder, damage, words):
    damage(folder / "step-00000002")
    code, text = run(capsys, "verify", folder)
    assert code == 1
    assert text.count("BROKEN") == 1
    for word in words:
        assert word in text
    code, text = run(capsys, "verify", folder / "step-00000001")
    assert code == 0


def test_verify_incomplete_ones_only(capsys, folder):
    for master in folder.glob("*/model.h5"):
        master.unlink()
    code, text = run(capsys, "verify", folder)
    assert code == 1
    assert "incomplete" in text


def test_verify_numbers_that_are_not_finite(capsys, tmp_path):
    zero = zm.Zero({"a": np.ones(5, np.float32)}, wire="float32")
    zero.optimizer.states[0].moments["v"][3] = np.nan
    zero.save(tmp_path)
    code, text = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "v of 'a' holds nan at flat index 3" in text


# ---- export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_is_that_of_the_live_engine(capsys, tmp_path, dtype):
    """Byte by byte the file that `zeromp.weights.export` writes, at another N and stage."""
    folder = tmp_path / "run"
    masters = zm.threads(3, lambda w: saved(w, folder, steps=(3,), **FROZEN))[0]
    code, text = run(capsys, "export", folder, tmp_path / "a.safetensors", "--dtype", dtype)
    assert code == 0
    assert f"3 arrays, 57 parameters in {dtype}" in text

    def live(world):
        zero = toys.make(world, N, CUTS, 1, "bfloat16", **FROZEN)
        zero.load(folder)
        zm.weights.export(zero, tmp_path / "b.safetensors", dtype)

    zm.threads(2, live)
    capsys.readouterr()
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    if dtype == "float32":
        found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
        for name, values in masters.items():
            assert found[name].tobytes() == values.tobytes()
        run(capsys, "export", folder, tmp_path / "a.npz")
        with np.load(tmp_path / "a.npz") as file:
            assert all(file[name].tobytes() == values.tobytes() for name, values in masters.items())


def test_export_refuses_a_broken_checkpoint(capsys, folder, tmp_path):
    cut_short(folder / "step-00000002")
    code, text = run(capsys, "export", folder, tmp_path / "w.npz")
    assert code == 2
    assert "truncated" in text
    assert not (tmp_path / "w.npz").exists()


# ---- diff ----------------------------------------------------------------------------------------


def test_o049_what_other_ranks_have_loaded_and_saved_is_equal(capsys, tmp_path):
    """O-049: 3 ranks at stage 3 to 2 ranks at stage 1: weights, m and v, every bit."""
    zm.threads(3, functools.partial(saved, path=tmp_path / "a", wire="float32"))

    def convert(world):
        zero = toys.make(world, N, CUTS, 1, "float32")
        zero.load(tmp_path / "a")
        zero.save(tmp_path / "b")

    zm.threads(2, convert)
    code, text = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 0, text
    assert "equal: 9 arrays (weights, m, v), every bit" in text


def test_diff_says_where_and_how_much(capsys, tmp_path):
    a = {"same": np.ones(3), "off": np.array([1.0, -4.0, 2.0]), "lost": np.ones(1), "s": np.ones(2)}
    b = {"same": np.ones(3), "off": np.array([1.0, -4.5, 2.25]), "new": np.ones(1), "s": np.ones(3)}
    for name, arrays in (("a.npz", a), ("b.npz", b)):
        np.savez(tmp_path / name, **arrays)
    code, text = run(capsys, "diff", tmp_path / "a.npz", tmp_path / "b.npz")
    assert code == 1
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "off weights 2 of 3 elements 0.5 0.111" in lines
    assert "lost weights only in A" in lines
    assert "new weights only in B" in lines
    assert "s weights shape (2,) in A, (3,) in B" in lines
    assert "4 of 5 arrays (weights) differ" in lines
    assert not any(line.startswith("same") for line in lines)


def test_diff_of_a_checkpoint_and_its_export(capsys, folder, tmp_path):
    run(capsys, "export", folder, tmp_path / "w.safetensors")
    code, text = run(capsys, "diff", folder, tmp_path / "w.safetensors")
    assert (code, "equal: 3 arrays (weights), every bit" in text) == (0, True)
    code, _ = run(capsys, "diff", folder / "step-00000001", tmp_path / "w.safetensors")
    assert code == 1


# ---- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "{}/nowhere"], "no checkpoint at {}/nowhere: there is no such folder"),
        (["inspect", "{}"], "no checkpoint in {}: it holds no folder step-... with a model.h5"),
        (["verify", "{}/nowhere"], "there is no folder {}/nowhere"),
        (["export", "{}", "{}/w.npz"], "no checkpoint in {}"),
        (["export", "{}", "{}/w.pt"], "{}/w.pt: weights are in files that end in .safetensors"),
        (["export", "{}", "{}/w.npz", "--dtype", "bfloat16"], "NumPy has no bfloat16"),
        (["diff", "{}/a.npz", "{}"], "no checkpoint in {}"),
        (["diff", "{}/text.npz", "{}/text.npz"], "{}/text.npz is damaged, or no .npz file"),
    ],
)
def test_a_wrong_path_is_one_line(capsys, tmp_path, words, message):
    np.savez(tmp_path / "a.npz", a=np.ones(2))
    (tmp_path / "text.npz").write_text("text")
    code, text = run(capsys, *(word.format(tmp_path) for word in words))
    assert code == 2
    assert text.startswith(f"zeromp {words[0]}: ")
    assert text.count("\n") == 1
    assert message.format(tmp_path) in text


def test_the_module_runs():
    words = [sys.executable, "-m", "zeromp"]
    done = subprocess.run([*words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("inspect", "verify", "export", "diff"):
        assert command in done.stdout
    with pytest.raises(SystemExit) as ended:
        main(["inspect"])
    assert ended.value.code == 2
