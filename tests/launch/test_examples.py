"""The examples as a user runs them: alone, and under mpiexec."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
SIZES = {"layers": 1, "width": 16, "heads": 2, "context": 16, "global-batch": 4, "steps": 4}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]

pytestmark = pytest.mark.timeout(170)
with_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason=f"there is no {MPIEXEC}")


def run(script, *flags, ranks=0):
    """Run an example on so many ranks of MPI, or alone; returns exit code and what it printed."""
    launcher = [MPIEXEC, "-n", ranks] if ranks else []
    command = [str(w) for w in (*launcher, sys.executable, ROOT / "examples" / script, *flags)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=80,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_osc": "^ucx",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
    )
    return done.returncode, done.stdout.decode(errors="replace")


@with_mpi
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_train_ends_with_the_same_weights_at_two_stages(tmp_path, wire):
    hashes = set()
    for stage in (1, 3):
        path = tmp_path / f"{stage}.jsonl"
        code, text = run(
            "train.py", *SMALL, "--stage", stage, "--wire", wire, "--loss-scale", 2**12,
            "--metrics", path, "--sample", 20, "--eval-every", 2, ranks=2,
        )  # fmt: skip
        assert code == 0, text
        assert "DIFFERS" not in text
        assert text.count("held-out loss") == 3
        assert "\ndef " in text
        *steps, last = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(steps) == 4
        assert not any(step["skipped"] for step in steps)
        hashes.add(last["weights_sha256"])
    assert len(hashes) == 1


@with_mpi
@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--global-batch", "5"], "global batch 5 must be micro-batch 2 x 2 ranks", 1),
        (["--width", "15"], "width 15 must be a multiple of the number of heads", 1),
        (["--data", "nowhere.txt"], "no such file: nowhere.txt", 1),
        (["--device-memory", "10k"], "the device has 10,000: no stage fits", 1),
        (["--stage", "7"], "argument --stage: invalid choice", 2),
    ],
)
def test_a_wrong_setting_is_one_message(flags, words, code):
    ended, text = run("train.py", *SMALL, *flags, ranks=2)
    assert ended == code, text
    assert text.count(words) == 1
    assert "Traceback" not in text


def test_train_on_the_users_text_alone_without_mpi(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    (tmp_path / "b.txt").write_text("the dog sat on the log. " * 60)
    code, text = run(
        "train.py", *SMALL, "--stage", 2, "--data", tmp_path / "a.txt", tmp_path / "b.txt",
        "--micro-batch", 2, "--recompute", "--dropout", 0.1, "--optimizer", "sgd", "--sample", 0,
        "--schedule", "linear", "--clip", 0, "--wire", "float32",
    )  # fmt: skip
    assert code == 0, text
    assert "1 ranks, stage 2, float32, threads" in text
    assert "DIFFERS" not in text


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=with_mpi)])
def test_own_gradients(ranks):
    code, text = run("own_gradients.py", ranks=ranks)
    assert code == 0, text
    assert float(text.split()[-1]) < 0.5
