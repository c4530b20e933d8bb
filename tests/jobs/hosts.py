"""A job for tests/launch/test_hosts.py: trains at stages 1 and 3, prints where and to what end.

    python hosts.py [NODE_OF_RANK_0,NODE_OF_RANK_1,...]

Without the argument MPI says which ranks share a node.
"""

import hashlib
import json
import socket
import sys

import numpy as np
from mpi4py import MPI

import zeromp as zm
from zeromp.world.mpi import MpiTransport


def weights(world, stage):
    """SHA-256 of the weights after three steps."""
    model = zm.models.gpt(vocab=31, layers=2, width=36, heads=3, context=8)
    engine = zm.Engine(model, world=world, stage=stage, wire="bfloat16", seed=5, poison=True)
    x = np.random.default_rng(world.rank).integers(0, 31, (2, 8))
    for _ in range(3):
        engine.backward(x, x)
        engine.step(lr=0.01, clip=1.0)
    digest = hashlib.sha256()
    for unit in model.units:
        for name in unit.names:
            digest.update(engine.full(name).tobytes())
    return digest.hexdigest()


def main():
    zm.world()  # installs the guard
    nodes = [int(word) for word in sys.argv[1].split(",")] if len(sys.argv) > 1 else None
    transport = MpiTransport(MPI.COMM_WORLD, None, nodes)
    found = {way: [] for way in ("shared", "ordered")}
    for way, ends in found.items():
        for stage in (1, 3):
            world = zm.World(transport, way)
            ends.append(weights(world, stage))
    world = zm.World(transport, "auto")
    places = MPI.COMM_WORLD.allgather((socket.gethostname(), transport.topology.num_nodes))
    crossed = MPI.COMM_WORLD.allgather(transport.sharing().crossed_bytes)
    world.print(json.dumps({"places": places, "auto": world.reduce, "crossed": crossed, **found}))


main()
