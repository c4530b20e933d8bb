"""Jobs: N ranks of a script that are started, watched, and print one JSON line.

Ranks of zeromp are started by the `mpiexec` beside their interpreter, ranks of PyTorch and
DeepSpeed by this process, in an interpreter of their own: zeromp needs neither.
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIME_LIMIT_S = 600
SAMPLE_S = 0.25


class Failed(Exception):
    """A job has ended without a result."""


@dataclass(frozen=True)
class Case:
    """What to run, and under which name.

    Parameters
    ----------
    name : str
        Unique in its benchmark.
    script : str
        In this folder.
    settings : dict
        Handed to the script as JSON.
    ranks : int
    python : str
        Interpreter.
    mpi : bool
        Whether mpiexec starts the ranks, or this process does.
    watch : bool
        Whether to sample the memory of all ranks together.
    """

    name: str
    script: str
    settings: dict = field(default_factory=dict)
    ranks: int = 2
    python: str = sys.executable
    mpi: bool = True
    watch: bool = False


def run(case):
    """Run a job, and return what its rank 0 reports, with the time that all of it took."""
    job = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as told:
        start = time.time()
        processes = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=told, text=True)
            for command, env in _commands(case, job)
        ]
        peak = _Peak(job, case.script) if case.watch else None
        try:
            printed = [p.communicate(timeout=TIME_LIMIT_S)[0] for p in processes]
        except subprocess.TimeoutExpired:
            printed = [f"no result within {TIME_LIMIT_S} s"]
        finally:
            _end(processes)
            node_bytes = peak.stop() if peak else 0
        lines = [line for text in printed for line in text.splitlines() if line.startswith("{")]
        if not lines or any(p.returncode for p in processes):
            told.seek(0)
            raise Failed("\n".join([*printed, told.read()])[-2000:])
    record = json.loads(lines[-1])
    if peak:
        record["node_pss_bytes"] = node_bytes
    if "first_step_at" in record:
        record["first_step_s"] = record.pop("first_step_at") - start
    return record


def _commands(case, job):
    """The processes to start: commands and environments."""
    env = {
        **os.environ,
        "ZEROMP_BENCH_JOB": job,
        "PYTHONPATH": str(HERE.parent),
        **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
    }
    command = [case.python, str(HERE / case.script), json.dumps(case.settings)]
    if case.mpi:
        crowded = "1" if case.ranks > len(os.sched_getaffinity(0)) else "0"
        env |= {
            "MPIR_CVAR_ENABLE_HEAVY_YIELD": crowded,
            "OMPI_MCA_mpi_yield_when_idle": crowded,
            "OMPI_MCA_osc": "^ucx",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        return [([*mpiexec(case.python), "-n", str(case.ranks), *command], env)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(case.ranks),
        "LOCAL_WORLD_SIZE": str(case.ranks),
        "LOCAL_SIZE": str(case.ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(case.python).parent}:{os.environ.get('PATH', '')}",
    }
    return [
        (command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(case.ranks)
    ]


def mpiexec(python):
    """The launcher of an interpreter: the one beside it, $MPIEXEC, or that on PATH."""
    beside = Path(python).parent / "mpiexec"
    if beside.exists():
        return [str(beside)]
    found = os.environ.get("MPIEXEC") or shutil.which("mpiexec")
    if not found:
        raise SystemExit(f"no mpiexec beside {python} or on PATH: set MPIEXEC")
    return found.split()


def interpreters():
    """This interpreter, and those of the environments that `make` makes for the other MPIs.

    $ZEROMP_BENCH_PYTHONS, paths parted by colons, replaces the latter.
    """
    made = [HERE.parent / f".venv-{mpi}/bin/python" for mpi in ("mpich", "openmpi")]
    named = os.environ.get("ZEROMP_BENCH_PYTHONS")
    others = named.split(":") if named else [str(p) for p in made if p.exists()]
    return list(dict.fromkeys([sys.executable, *others]))


@functools.cache
def has(python, module):
    """Whether an interpreter (or None) can import a module."""
    if not python:
        return False
    question = f"import importlib.util as i, sys; sys.exit(i.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", question], capture_output=True).returncode == 0


class Turn:
    """Holds $ZEROMP_BENCH_LOCK during jobs, where others share the machine and hold it too.

    It is kept from job to job, since a lock that many want is long in coming, but not for long.
    """

    def __init__(self):
        path = os.environ.get("ZEROMP_BENCH_LOCK")
        self.file = Path(path).open("a") if path else None  # noqa: SIM115 - open between jobs
        self.since = None

    def take(self):
        """Wait for the lock, unless it is held already."""
        if self.file and self.since is None:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.since = time.monotonic()

    def pass_on(self, after=0.0):
        """Release the lock if it has been held for so many seconds."""
        if self.file and self.since is not None and time.monotonic() - self.since >= after:
            fcntl.flock(self.file, fcntl.LOCK_UN)
            self.since = None


def _end(processes):
    for process in processes:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Peak:
    """Most memory that a job's ranks have held together: samples of the sum of their PSS.

    The proportional set size counts a page that k processes share as 1/k of a page in each, so
    that a sum over ranks counts it once.
    """

    def __init__(self, job, script):
        self.mark, self.script = f"ZEROMP_BENCH_JOB={job}".encode(), script.encode()
        self.bytes, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def stop(self):
        self.done.set()
        self.thread.join()
        return self.bytes

    def _watch(self):
        while not self.done.wait(SAMPLE_S):
            found = (_pss(p) for p in Path("/proc").glob("[0-9]*") if self._is_rank(p))
            self.bytes = max(self.bytes, sum(found))

    def _is_rank(self, process):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            return (
                len(words) > 1
                and words[1].endswith(b"/" + self.script)
                and self.mark in (process / "environ").read_bytes()
            )
        return False


def _pss(process):
    with contextlib.suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
