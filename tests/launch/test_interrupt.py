"""The main job, stopped and gone on with: signals, kills, other ranks (O-042, O-044, O-083).

A job that was stopped and resumed at the same number of ranks is compared with one that was not:
losses of all steps, which fix the data of all steps, and the weights at the end, bit for bit.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from zeromp.checkpoint import Checkpoint, complete

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
STEPS = 150
SIZES = {"layers": 1, "width": 16, "heads": 2, "context": 16, "global-batch": 6, "sample": 0}
STOPPED = 75

pytestmark = [
    pytest.mark.skipif(not MPIEXEC.exists(), reason=f"there is no {MPIEXEC}"),
    pytest.mark.timeout(170),
]


@dataclass
class Job:
    """One job in a folder of its own: `ck` for checkpoints, `m.jsonl` for metrics."""

    folder: Path
    process: subprocess.Popen = field(init=False)

    def start(self, *flags, ranks=2, steps=STEPS):
        sizes = [word for name, size in SIZES.items() for word in (f"--{name}", size)]
        launcher = [MPIEXEC, "-n", ranks] if ranks else []
        command = [
            *launcher, sys.executable, ROOT / "examples" / "train.py", *sizes, "--dropout", 0.1,
            "--data", ROOT / "LICENSE", "--metrics", self.folder / "m.jsonl", "--steps", steps,
            *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_osc": "^ucx",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            },
        )
        return self

    def end(self):
        """Exit code, and what was printed."""
        try:
            text, _ = self.process.communicate(timeout=80)
        except subprocess.TimeoutExpired:
            for pid in self.ranks():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            text, _ = self.process.communicate()
            pytest.fail(f"the job hangs; so far it has printed:\n{text}")
        return self.process.returncode, text

    def run(self, *flags, **options):
        return self.start(*flags, **options).end()

    def wait_for_steps(self, number):
        """Wait until so many steps are in the metrics."""
        limit = time.monotonic() + 60
        path = self.folder / "m.jsonl"
        while not path.exists() or path.read_text().count("\n") < number:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.01)

    def ranks(self):
        """Process ids by rank: what has the folder on its command line, and a rank's variable."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for name in (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK="):
                of = [int(v[len(name) :]) for v in variables if v.startswith(name)]
                if of and str(self.folder / "m.jsonl").encode() in words:
                    found[of[0]] = int(path.name)
        return [found[rank] for rank in sorted(found)]

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.folder / "m.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    code, text = job.run("--stage", 3)
    assert code == 0, text
    return job.metrics


def same_run(metrics, undisturbed):
    """Each step once, with the same loss, and the same weights and moments at the end."""
    *steps, last = metrics
    *expected, end = undisturbed
    assert [s["step"] for s in steps] == list(range(STEPS))
    for name in ("loss", "grad_norm", "lr"):
        assert [s[name] for s in steps] == [s[name] for s in expected], name
    assert last["weights_sha256"] == end["weights_sha256"]
    assert last["state_sha256"] == end["state_sha256"]
    assert last["held_out_loss"] == end["held_out_loss"]


def weights_sha256(path):
    digest = hashlib.sha256()
    with Checkpoint(path) as checkpoint:
        for name in sorted(a.name for a in checkpoint.arrays):
            digest.update(name.encode() + checkpoint.read("master", name).tobytes())
    return digest.hexdigest()


# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "whom"), [(signal.SIGTERM, "rank 1"), (signal.SIGUSR1, "mpiexec")]
)
def test_o083_a_signal_saves_and_stops_all_ranks(tmp_path, undisturbed, number, whom):
    """O-042, O-083: to one rank, twice, or to the launcher; then resumed on as many ranks."""
    save = ("--save", tmp_path / "ck", "--stage", 3)
    job = Job(tmp_path).start(*save)
    job.wait_for_steps(5)
    target = job.process.pid if whom == "mpiexec" else job.ranks()[1]
    os.kill(target, number)
    if whom != "mpiexec":
        os.kill(target, number)
    code, text = job.end()
    assert code == STOPPED, text
    stopped = len(job.metrics)
    words = f"stopped by {number.name} after step {stopped} of {STEPS}: saved {tmp_path}"
    assert text.count(words) == 1, text
    assert 5 <= stopped < STEPS
    (path,) = complete(tmp_path / "ck")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.verify() == []
        extra = checkpoint.record["extra"]
    assert (extra["step"], extra["samples"]) == (stopped, stopped * SIZES["global-batch"])

    code, text = job.run(*save, "--resume", "auto")
    assert code == 0, text
    assert f"resumed {path} after step {stopped} of {STEPS}" in text
    assert "DIFFERS" not in text
    same_run(job.metrics, undisturbed)


# ---- kills, and other numbers of ranks -----------------------------------------------------------


def test_killed_between_saves_and_gone_on_with(tmp_path, undisturbed):
    """O-042: kill -9 of all ranks; the steps after the last save are made again, not twice."""
    save = ("--save", tmp_path / "ck", "--save-every", 7, "--keep", 2, "--resume", "auto")
    job = Job(tmp_path).start(*save, "--stage", 1)
    job.wait_for_steps(24)
    for pid in job.ranks():
        os.kill(pid, signal.SIGKILL)
    code, text = job.end()
    assert code != 0
    assert "starting afresh" in text
    assert 21 <= len(job.metrics) < STEPS
    code, text = job.run(*save, "--stage", 2)
    assert code == 0, text
    assert "DIFFERS" not in text
    assert len(complete(tmp_path / "ck")) == 2
    same_run(job.metrics, undisturbed)


def test_stopped_and_gone_on_with_by_other_ranks(tmp_path, undisturbed):
    """The schedule is that of --steps; the weights at the point of resume are the same bits."""
    job = Job(tmp_path)
    code, text = job.run("--save", tmp_path / "ck", "--stage", 2, "--stop-after", 9)
    assert code == STOPPED, text
    assert f"stopped by --stop-after 9 after step 9 of {STEPS}" in text
    for made, expected in zip(job.metrics, undisturbed[:9], strict=True):
        assert (made["loss"], made["lr"]) == (expected["loss"], expected["lr"])
    code, text = job.run("--resume", tmp_path / "ck", "--stage", 3, ranks=0, steps=9)
    assert code == 0, text
    assert f"note: --steps was {STEPS}, and is 9 now" in text
    assert job.metrics[-1]["weights_sha256"] == weights_sha256(complete(tmp_path / "ck")[-1])
    code, text = job.run("--resume", tmp_path / "ck", "--stage", 1, ranks=3, steps=20)
    assert code == 0, text
    assert "DIFFERS" not in text
    *steps, last = job.metrics
    assert [s["step"] for s in steps] == list(range(20))
    assert (last["first_step"], last["steps"], last["applied"]) == (9, 11, 20)


# ---- what is refused -----------------------------------------------------------------------------


def test_what_the_flags_refuse(tmp_path):
    """O-044: a checkpoint that is not there is an error, not a fresh start."""
    job = Job(tmp_path)
    code, text = job.run("--resume", tmp_path / "ck", steps=2)
    assert code == 1
    assert text.count("no checkpoint at") == 1
    assert "Traceback" not in text
    code, text = job.run("--save", tmp_path / "ck", ranks=0, steps=2)
    assert code == 0, text
    code, text = job.run("--save", tmp_path / "ck", ranks=0, steps=2)
    assert code == 1
    assert "holds step-00000002 of another run: go on from it with --resume auto" in text
    code, text = job.run("--resume", "auto", ranks=0)
    assert code == 1
    assert "--resume auto takes the newest checkpoint of --save DIR: name one" in text
