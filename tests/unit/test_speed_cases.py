"""Cases of speed that can be counted: messages, compilations."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import zeromp as zm

ROOT = Path(__file__).parents[2]


def test_small_arrays_are_gathered_and_reduced_together():
    """O-094: 200 arrays of 100 elements at stage 3 make two messages a step, not 400."""

    def run(world):
        arrays = {f"a{i}": np.full(100, i, np.float32) for i in range(200)}
        zero = zm.Zero(arrays, world=world, stage=3)
        before = world.ledger.messages.copy()
        for _ in zero.sweep():
            pass
        zero.backward(arrays)
        zero.step()
        sent = world.ledger.messages - before
        assert sent["train", "all_gather"] == sent["train", "reduce_scatter"] == 1
        assert sum(sent.values()) <= 20
        large = zm.Zero(arrays, world=world, stage=3, bucket=1000)  # 10 arrays each
        assert len(large.layout.units) == 20

    zm.threads(4, run)


SCRIPT = f"""
import importlib.util
from numba.core import event
spec = importlib.util.spec_from_file_location("jit", {str(ROOT / "zeromp" / "_jit.py")!r})
jit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jit)
with event.install_recorder("numba:compile") as compiled:
    @jit.kernel("int64(int64)", "float32(float32)")
    def add(x):
        return x + x
print(add(21), len(compiled.buffer))
"""


def test_ranks_compile_once_and_a_second_start_not_at_all(tmp_path):
    """O-095: with an empty cache, whoever comes first compiles, and the others wait."""
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    cache.mkdir()
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}

    def start():
        return subprocess.Popen(
            [sys.executable, script], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    found = sorted(rank.communicate()[0] for rank in [start() for _ in range(4)])
    assert found[:3] == ["42 0\n"] * 3
    answer, compilations = found[3].split()
    assert answer == "42" and int(compilations) > 0
    assert start().communicate()[0] == "42 0\n"
