"""Jobs with things on disk: how they end, what they leave, and less memory than states."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "jobs"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
TIMEOUT = 50

pytestmark = pytest.mark.timeout(TIMEOUT + 40)
with_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason=f"there is no {MPIEXEC}")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def start(*command, ranks=0):
    launcher = [MPIEXEC, "-n", ranks] if ranks else []
    return subprocess.Popen(
        [str(word) for word in (*launcher, sys.executable, *command)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def end(job):
    """Exit code and all that was printed."""
    try:
        out, _ = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, _ = job.communicate()
        pytest.fail(f"the job hangs; so far it has printed:\n{out}")
    return job.returncode, out


def run(folder, how, ranks=3):
    return end(start(JOBS / "offloaded.py", folder, how, ranks=ranks))


def folders(folder):
    return {path for path in folder.iterdir() if path.name.startswith("zeromp-")}


@pytest.fixture
def living(tmp_path):
    """A job that trains all the time, and the folder of its files."""
    job = start(JOBS / "offloaded.py", tmp_path, "waits", ranks=2)
    while "step 1" not in (line := job.stdout.readline()):
        assert line, "the job has ended"
    (folder,) = folders(tmp_path)
    yield folder
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    end(job)


@with_mpi
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nothing", "trained"),
        ("raises", "RuntimeError: disk on fire"),
        ("terminated", "has left while rank"),
    ],
)
def test_o072_jobs_leave_nothing(tmp_path, how, words):
    code, out = run(tmp_path, how)
    assert words in out
    assert (code == 0) == (how == "nothing")
    assert not folders(tmp_path)


@with_mpi
def test_o072_left_overs_of_the_dead_are_removed_and_nothing_of_the_living(tmp_path, living):
    run(tmp_path, "killed")
    (dead,) = folders(tmp_path) - {living}  # nobody was left to clean
    code, out = run(tmp_path, "nothing")
    assert code == 0, out
    assert "rank00002.h5" in out  # named among those removed
    assert not dead.exists()
    assert {p.name for p in living.iterdir()} == {
        f"rank0000{r}{suffix}" for r in range(2) for suffix in (".h5", ".alive")
    }


@with_mpi
def test_o071_truncated_file_of_one_rank_stops_all_with_its_name(tmp_path):
    code, out = run(tmp_path, "truncates")
    assert code != 0
    assert "rank00002.h5 has been truncated by something" in out
    assert "trained" not in out
    assert not folders(tmp_path)


def test_states_of_400_mb_train_in_a_process_of_250_mb(tmp_path):
    """And in the same process without offload they do not fit."""
    job = (JOBS / "limited.py", tmp_path, 250_000_000, 34_000_000)
    code, out = end(start(*job, "optimizer=disk,gradients=disk,parameters=disk"))
    assert code == 0, out
    found = json.loads(out.splitlines()[-1])
    assert found["states"] > 400e6
    assert found["limit"] == 250e6
    assert found["held"]["disk"] == found["states"] // 12 * 16
    assert found["peak_rss"] < found["limit"]
    # Two steps of Adam with a constant gradient: 1 - 2 lr, but for eps and float32.
    assert found["low"] == found["high"] == pytest.approx(0.8, abs=1e-6)
    code, out = end(start(*job, "gradients=disk,parameters=disk"))
    assert code != 0
    assert "MemoryError" in out or "Cannot allocate" in out


@with_mpi
def test_ladder_refuses_four_rungs_and_trains_the_fifth_with_the_weights_of_stage_3():
    flags = ("--layers", 12, "--width", 32, "--steps", 2)
    code, out = end(start(ROOT / "examples" / "ladder.py", *flags, ranks=4))
    assert code == 0, out
    lines = out.splitlines()
    refused = [line.split(":")[0] for line in lines if line.endswith("refused")]
    assert refused == ["stage 0", "stage 1", "stage 2", "stage 3"]
    trained = [line for line in lines if ", weights " in line]
    assert len(trained) == 2
    assert len({line.split("weights ")[1].split(",")[0] for line in trained}) == 1
    assert len({line.split("loss ")[1].split(",")[0] for line in trained}) == 1


@with_mpi
def test_train_takes_the_flags_and_its_table_shows_the_tiers(tmp_path):
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 16, "global-batch": 4, "steps": 4}
    small = [word for name, size in sizes.items() for word in (f"--{name}", size)]
    offload = "optimizer=disk,gradients=host,parameters=host,activations=disk"
    code, out = end(start(
        ROOT / "examples" / "train.py", *small, "--stage", 3, "--recompute", "--offload", offload,
        "--offload-dir", tmp_path, "--offload-io", "cached", "--keep-offload", "--sample", 0,
        ranks=2,
    ))  # fmt: skip
    assert code == 0, out
    assert "DIFFERS" not in out
    for words in ("held master on disk", "held gradients on host", "moved m disk to host",
                  "moved activations host to disk", f"offload {offload} in"):  # fmt: skip
        assert words in out
    (folder,) = folders(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank00000-activations.h5", "rank00000.h5", "rank00001-activations.h5", "rank00001.h5",
    ]  # fmt: skip


def test_benchmark_runs():
    code, out = end(start(ROOT / "benchmarks" / "offload.py", "--quick"))
    assert code == 0, out
    assert "of plain" in out
