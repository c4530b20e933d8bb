"""Saves that are killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(150)
def test_fifty_kills_lose_no_committed_checkpoint(tmp_path):
    """O-050: kill -9 at random moments while saving, half of the saves in the background."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    jobs = []
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        command = [sys.executable, TESTS / "jobs" / "killed_saves.py", tmp_path / str(seed), "25"]
        jobs.append(
            subprocess.Popen(
                [*command, str(seed)],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    hits = 0
    for job in jobs:
        out, err = job.communicate(timeout=140)
        assert job.returncode == 0, err[-3000:]
        found = re.fullmatch(r"(\d+) hits, step (\d+)", out.splitlines()[-1])
        hits += int(found[1])
        assert int(found[2]) > 10
    assert hits >= 10  # else the kills came when nothing was being saved
