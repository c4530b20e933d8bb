"""Things on the host and on disk at any number of ranks: the bits of memory, bytes as predicted."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import toys

import zeromp as zm

STEPS = 20
VOCAB, LAYERS, WIDTH, HEADS, CONTEXT = 31, 2, 25, 5, 8
PLACEMENTS = {
    "optimizer=disk": "bfloat16",
    "optimizer=host,gradients=host": "float16",
    "optimizer=disk,gradients=disk,parameters=disk,activations=disk": "bfloat16",
    "optimizer=disk,gradients=host,parameters=disk,activations=host": "float32",
}


@pytest.fixture
def folder(world, tmp_path_factory):
    """One folder for all ranks."""
    path = np.zeros(4096, np.uint8)
    if world.rank == 0:
        text = str(tmp_path_factory.mktemp("offload")).encode()
        path[: len(text)] = np.frombuffer(text, np.uint8)
    world.broadcast(path)
    return Path(path.tobytes().rstrip(b"\0").decode())


def train(world, reduce, wire, steps=STEPS, **options):
    model = zm.models.gpt(VOCAB, LAYERS, WIDTH, HEADS, CONTEXT)
    options |= {"loss_scale": 1024.0} if wire == "float16" else {}
    engine = zm.Engine(
        model, world=zm.World(world.transport, reduce=reduce), stage=3, wire=wire, seed=5,
        optimizer=zm.AdamW(lr=1e-2, weight_decay=0.1), recompute=True, poison=True,
        keep_float32=["*ln*"], **options,
    )  # fmt: skip
    rng = np.random.default_rng(world.rank)
    losses = []
    for _ in range(steps):
        x = rng.integers(0, VOCAB, (2 + world.rank % 2, CONTEXT))
        losses += [engine.backward(x, (x + 1) % VOCAB), engine.step(clip=0.5)]
    return engine, losses


def digest(engine, losses):
    h = hashlib.sha256(repr(losses).encode())
    for name in engine.zero.names:
        h.update(engine.full(name).tobytes() + engine.master(name).tobytes())
        for moment in engine.moments(name).values():
            h.update(moment.tobytes())
    return h.hexdigest()


@pytest.mark.parametrize("offload", PLACEMENTS)
def test_twenty_steps_give_the_bits_of_memory_and_both_ledgers_agree(world, folder, offload):
    wire = PLACEMENTS[offload]
    reduce = "ordered" if wire == "float16" else "mpi"
    memory = digest(*train(world, reduce, wire))
    engine, losses = train(
        world, reduce, wire, offload=offload, offload_dir=folder, offload_tile=4096
    )
    summary = toys.summary_of(engine, STEPS)
    for key in ("held_bytes", "sent_bytes", "moved_bytes"):
        for rank in summary[key]:
            for name, pair in rank.items():
                assert pair["measured"] == pair["predicted"], (key, name, pair)
    assert digest(engine, losses) == memory
    engine.close()
    world.barrier()
    assert not list(folder.iterdir())


def test_o075_no_rank_has_a_file_of_another_open(world, folder):
    engine, _ = train(world, "mpi", "bfloat16", 1, offload="optimizer=disk", offload_dir=folder)
    world.barrier()
    opened = {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    files = {path for path in opened if path.endswith(".h5") and str(folder) in path}
    assert {Path(path).name for path in files} == {f"rank{world.rank:05d}.h5"}
    world.barrier()
    engine.close()


def test_o073_disk_that_is_full_on_one_rank_stops_all_alike(world, folder, monkeypatch):
    """As if the last rank's disk were full: all raise its error, and nobody's file stays."""
    if world.rank == world.size - 1:

        def full(_descriptor, _offset, _num_bytes):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"\[Errno 28\] no space: [\d,]+ bytes do not fit"):
        train(world, "mpi", "bfloat16", 1, offload="optimizer=disk", offload_dir=folder)
    world.barrier()
    assert not list(folder.iterdir())
    world.barrier()
