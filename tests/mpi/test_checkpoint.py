"""Checkpoints over MPI: written by all ranks, and by other numbers of them."""

import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import saved
import toys
from saved import CUTS, N

import zeromp as zm
from zeromp.checkpoint import Broken, Checkpoint, find
from zeromp.checkpoint.loading import predicted_bytes


@pytest.fixture
def folder(world):
    """A folder that all ranks see, named by rank 0."""
    name = np.zeros(200, np.uint8)
    if world.rank == 0:
        text = tempfile.mkdtemp().encode()
        name[: len(text)] = np.frombuffer(text, np.uint8)
    world.broadcast(name)
    path = Path(name.tobytes().rstrip(b"\0").decode())
    yield path
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(path)
    world.barrier()


def fresh(world):
    return zm.World(world.transport, reduce="ordered")


@pytest.mark.parametrize(("stage", "to", "wire"), [(3, 1, "bfloat16"), (0, 3, "float16")])
def test_saved_and_resumed(world, folder, stage, to, wire):
    """O-039, O-040: three more steps, as if nothing had been."""
    zero = toys.make(fresh(world), N, CUTS, stage, wire)
    saved.train(zero, CUTS, 3)
    before = saved.state(zero)
    path = zero.save(folder, rank_extra={"rank": world.rank})
    saved.train(zero, CUTS, 3)

    again = toys.make(fresh(world), N, CUTS, to, wire)
    report = again.load(folder)
    saved.same(saved.state(again), before)
    assert report.path == path and report.rank_extra == {"rank": world.rank}
    with Checkpoint(path) as checkpoint:
        assert report.bytes_read == predicted_bytes(again.holders, checkpoint)
    saved.train(again, CUTS, 3)
    saved.same(saved.state(again), saved.state(zero))
    with h5py.File(folder / "model.h5", locking=False) as file:
        assert file["c/w"][:].tobytes() == before["master", "c.w"].tobytes()


def test_threads_and_one_process_load_it(world, folder):
    """O-045: other numbers of ranks; and what other numbers have saved."""
    zero = toys.make(fresh(world), N, CUTS, 2, "bfloat16")
    saved.train(zero, CUTS, 2)
    before = saved.state(zero)
    zero.save(folder)
    if world.rank == 0:
        for ranks in (1, 5):
            saved.same(saved.load(folder, ranks=ranks)[-1][0], before)
        saved.save(folder / "other", ranks=5, steps=1)
    world.barrier()
    zero.load(folder / "other")
    assert zero.applied == 1


def test_background_and_repeated_saves(world, folder):
    """O-052, O-053: the record comes when all have written, on all ranks."""
    zero = toys.make(fresh(world), N, CUTS, 1, "bfloat16")
    saved.train(zero, CUTS, 1)
    before = saved.state(zero)
    zero.save(folder, wait=False, keep=2)
    saved.train(zero, CUTS, 2)
    assert (zero.finish_save() or find(folder)) == find(folder)
    again = toys.make(fresh(world), N, CUTS, 3, "bfloat16")
    assert again.load(folder).record["applied"] == 1
    saved.same(saved.state(again), before)
    for _ in range(3):
        zero.save(folder, keep=2)
    world.barrier()
    assert len(list(folder.glob("step-*"))) == 2


def test_errors_are_alike_and_the_one_before_is_taken(world, folder):
    """O-044, O-054."""
    zero = toys.make(fresh(world), N, CUTS, 1, "bfloat16")
    with pytest.raises(FileNotFoundError, match=str(folder / "missing")):
        zero.load(folder / "missing")
    first = zero.save(folder)
    saved.train(zero, CUTS, 1)
    second = zero.save(folder)
    if world.rank == 0:
        last = f"rank{world.size - 1:05d}.h5"
        saved.flip(second / last, (second / last).stat().st_size - 1)
    world.barrier()
    with pytest.raises(Broken, match="checksum"):
        zero.load(second)
    assert zero.load(folder).path == first and zero.applied == 0
