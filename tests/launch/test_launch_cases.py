"""Real jobs under mpiexec: faults, time limits, start-up (O-062, O-081, O-082, O-085, O-088...).

Each job is a script of tests/jobs, killed with all its ranks at a hard time limit.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

JOBS = Path(__file__).resolve().parents[1] / "jobs"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
TIMEOUT = 50
SOON = 25  # seconds, start-up on a busy machine included

pytestmark = [
    pytest.mark.skipif(not MPIEXEC.exists(), reason=f"there is no {MPIEXEC}"),
    pytest.mark.timeout(TIMEOUT + 20),
]


@dataclass
class Ended:
    code: int
    out: str
    seconds: float


def environment(ranks, extra):
    """As the Makefile sets it, without thread counts and launchers' variables of our own."""
    launchers = ("OMPI_", "PMI", "PMIX", "SLURM", "MV2_", "ZEROMP", "HYDRA", "PRTE")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        env.pop(name, None)
    crowded = str(int(ranks > (os.cpu_count() or 1)))
    return {
        **env,
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": crowded,
        "OMPI_MCA_mpi_yield_when_idle": crowded,
        "OMPI_MCA_osc": "^ucx",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PYTHONPATH": os.pathsep.join([str(JOBS.parents[1]), env.get("PYTHONPATH", "")]),
        **extra,
    }


def start(command, ranks, **extra):
    """Run a command to its end; at the time limit kill it with its children."""
    begun = time.monotonic()
    job = subprocess.Popen(
        [str(word) for word in command],
        env=environment(ranks, extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)  # mpiexec ends its ranks
        time.sleep(1)
        os.killpg(job.pid, signal.SIGKILL)
        out, _ = job.communicate()
        pytest.fail(f"the job hangs; so far it has printed:\n{out}")
    return Ended(job.returncode, out, time.monotonic() - begun)


def run(script, *args, ranks=3, **extra):
    return start([MPIEXEC, "-n", ranks, sys.executable, JOBS / script, *args], ranks, **extra)


def fails(ended, *texts):
    assert ended.code != 0, ended.out
    assert ended.seconds < SOON, ended.out
    for text in texts:
        assert text in ended.out, ended.out


# ---- O-081: an error on one rank -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("runtime", "RuntimeError: disk on fire"),
        ("memory", "MemoryError: no memory left"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_o081_error_on_one_rank_ends_the_job_with_its_traceback(fault, error):
    ended = run("toy.py", fault)
    fails(ended, "zeromp: rank 1 of 3: uncaught", error, "Traceback", "toy.py", "in train")
    assert ended.out.count("Traceback") == 1
    assert "trained" not in ended.out


@pytest.mark.parametrize("fault", ["exit 3", "exit 0"])
def test_o081_rank_that_leaves_while_others_wait(fault):
    ended = run("toy.py", fault)
    fails(ended, "zeromp: rank 1 of 3: has left while rank", "must be called on all ranks")
    assert "trained" not in ended.out


@pytest.mark.parametrize("fault", ["none", "late", "catches"])
def test_o081_good_end_is_not_aborted(fault):
    """Also where one rank ends three seconds after the others."""
    ended = run("toy.py", fault)
    assert ended.code == 0, ended.out
    assert "trained 6 steps, 3 ranks" in ended.out
    assert "zeromp:" not in ended.out
    assert ("caught" in ended.out) == (fault == "catches")


def test_o081_all_ranks_exit_with_a_code():
    ended = run("toy.py", "all exit 3")
    fails(ended)
    assert ended.code == 3
    assert "zeromp:" not in ended.out


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("all wrong", ["ValueError: stage 5 is unknown: use 0, 1, 2 or 3"]),
        (
            "one differs",
            [
                "ValueError: settings must be the same on all ranks: rank 0 has 'stage 3",
                "rank 1 has 'stage 2",
            ],
        ),
    ],
)
def test_an_error_of_all_ranks_is_printed_once(fault, texts):
    ended = run("toy.py", fault)
    fails(ended, *texts)
    assert ended.out.count("ValueError") == 1, ended.out


# ---- calls that not all ranks make ---------------------------------------------------------------


def test_o082_full_on_rank_0_only():
    ended = run("toy.py", "full on rank 0", ranks=2)
    fails(
        ended, "has left while rank 0 waits in all_gather of unit0", "must be called on all ranks"
    )


def test_o082_full_on_rank_0_only_while_others_train():
    """MPI may pair the two calls: debug mode names both."""
    ended = run("toy.py", "full, others train", ranks=2, ZEROMP_DEBUG="1", ZEROMP_TIMEOUT="10")
    fails(ended, "rank 0 calls all_gather of unit0", "rank 1 calls agree of a few numbers")


def test_o082_full_on_rank_0_only_while_others_train_without_debug():
    """No useful message is promised, but an end."""
    fails(run("toy.py", "full, others train", ranks=2, ZEROMP_TIMEOUT="5"))


def test_o062_a_unit_swept_twice_on_one_rank():
    ended = run("toy.py", "sweep twice", ZEROMP_TIMEOUT="5")
    fails(ended, "zeromp: rank 1 of 3: has waited 5 s in all_gather of unit1", "ZEROMP_TIMEOUT")


def test_o084_without_help_the_time_limit_ends_the_wait():
    ended = run("toy.py", "sleep", ZEROMP_TIMEOUT="4")
    fails(ended, "has waited 4 s in agree", "must be called on all ranks")


def test_o085_sizes_that_differ_at_a_late_step():
    ended = run("late_size.py", ZEROMP_DEBUG="1")
    fails(
        ended,
        "RuntimeError: ranks call different collectives: rank 0 calls all_gather of block7, 15 "
        "float32, rank 1 calls all_gather of block7, 18 float32",
    )
    assert ended.out.count("RuntimeError") == 1
    assert "done" not in ended.out


# ---- start-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_o088_alone_although_the_launcher_started_more(name):
    ended = start([sys.executable, JOBS / "about.py"], 1, **{name: "4"})
    assert ended.code == 0, ended.out
    assert "RuntimeWarning" in ended.out
    assert f"{name}=4, but this process is alone in its MPI world" in ended.out
    silent = start([sys.executable, "-W", "ignore", JOBS / "about.py"], 1, **{name: "4"})
    assert "alone" not in silent.out
    assert json.loads(silent.out)["size"] == 1


def test_o088_no_warning_where_all_is_well():
    for ended in (start([sys.executable, JOBS / "about.py"], 1), run("about.py", ranks=1)):
        assert ended.code == 0, ended.out
        assert json.loads(ended.out)["size"] == 1, ended.out


@pytest.mark.parametrize("ranks", [1, 3])
def test_o092_threads_per_rank(ranks):
    ended = run("about.py", ranks=ranks)
    assert ended.code == 0, ended.out
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert sorted(f["rank"] for f in found) == list(range(ranks))
    for f in found:
        share = max(1, f["cores"] // ranks)
        assert f["blas"], f
        assert set(f["blas"]) == {share}
    chosen = run("about.py", ranks=ranks, OPENBLAS_NUM_THREADS="2")
    assert {n for line in chosen.out.splitlines() for n in json.loads(line)["blas"]} == {2}


@pytest.mark.parametrize("stage", [0, 3])
def test_o093_more_ranks_than_cores(stage):
    ended = run("hundred.py", stage, ranks=8)
    assert ended.code == 0, ended.out
    assert "101 steps" in ended.out
    assert ended.seconds < 60
