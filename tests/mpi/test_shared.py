"""Shared memory: bits, wherever arrays lie and however ranks are spread over nodes; and its ends.

Several nodes are played on one: `MpiTransport` is told which ranks share a node.
"""

import gc
import importlib
import time
from itertools import pairwise

import numpy as np
import pytest
import toys
from toys import rounded

import zeromp as zm
from zeromp.wire import FORMATS, convert

NODES = {  # the number of each rank's node
    "one": lambda ranks: [0] * ranks,
    "blocks of two": lambda ranks: [r // 2 for r in range(ranks)],
    "round robin": lambda ranks: [r % 2 for r in range(ranks)],
    "unequal": lambda ranks: [5] * (ranks - 1) + [3],
    "one rank each": lambda ranks: list(range(ranks)),
}
SIZES = (0, 1, 2, 5, 1003, 300_001)  # the last is larger than a lobby
PLACES = ("window", "private", "mixed")


@pytest.fixture(scope="module")
def spread(world):
    """Transports of these ranks over the nodes of each kind."""
    mpi = pytest.importorskip("zeromp.world.mpi")
    if not isinstance(world.transport, mpi.MpiTransport):
        pytest.skip("no MPI")
    return {
        kind: mpi.MpiTransport(world.transport.comm, None, numbers(world.size))
        for kind, numbers in NODES.items()
    }


def stored(x, name):
    out = np.empty(x.size, FORMATS[name].dtype)
    convert(np.ascontiguousarray(x, np.float32), out)
    return out


def normal(n, rank, name):
    return rounded(np.random.default_rng([3, rank, n]).standard_normal(n, np.float32), name)


def cut(n, ranks):
    edges = [n * r // ranks for r in range(ranks + 1)]
    return [b - a for a, b in pairwise(edges)]


def lopsided(n, ranks):
    return [0] * (ranks - 1) + [n]


def part(counts, rank):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def placed(world, values, place):
    """A copy in shared memory or not, or on the last rank only not; at an odd offset."""
    window = place == "window" or (place == "mixed" and world.rank < world.size - 1)
    room = world.empty(values.size + 3, values.dtype)
    array = room[3:] if window else np.empty_like(values)
    array[:] = values
    return array


def node_sums(nodes, n, name, factor):
    """Ranks of a node added in rank order, then nodes in the order of their lowest ranks."""
    total = None
    for node in dict.fromkeys(nodes):
        ranks = [r for r, number in enumerate(nodes) if number == node]
        inside = normal(n, ranks[0], name).copy()
        for r in ranks[1:]:
            inside += normal(n, r, name)
        total = inside if total is None else total + inside
    return stored(total * np.float32(factor), name)


@pytest.mark.spread
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cutter", [cut, lopsided])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("nodes", NODES)
def test_reduce_scatter(world, spread, nodes, name, cutter, place):
    w = zm.World(spread[nodes], "shared")
    for n in SIZES if (place, name) == ("mixed", "float32") else SIZES[:-1]:
        counts = cutter(n, w.size)
        bucket = placed(w, stored(normal(n, w.rank, name), name), place)
        given, piece = bucket.copy(), np.full(counts[w.rank], 77, bucket.dtype)
        w.reduce_scatter(bucket, piece, counts, 1 / 3)
        expected = node_sums(NODES[nodes](w.size), n, name, 1 / 3)[part(counts, w.rank)]
        assert piece.tobytes() == expected.tobytes(), n
        assert bucket.tobytes() == given.tobytes()


def test_a_sum_that_travels_between_nodes_in_parts(world, spread, monkeypatch):
    module = importlib.import_module("zeromp.world.shared")
    n = 10_007
    for nodes in NODES:
        w, counts = zm.World(spread[nodes], "shared"), cut(n, world.size)
        piece, whole = np.empty(counts[w.rank], np.uint16), w.node_empty(n, np.uint16)
        monkeypatch.setattr(module, "CROSS_BYTES", 1)  # then it is 1024 elements
        w.reduce_scatter(stored(normal(n, w.rank, "bfloat16"), "bfloat16"), piece, counts, 0.5)
        monkeypatch.setattr(module, "CROSS_BYTES", 1000)
        w.all_gather(piece, whole, counts)
        expected = node_sums(NODES[nodes](w.size), n, "bfloat16", 0.5)
        assert whole.tobytes() == expected.tobytes(), nodes
        w.barrier()


@pytest.mark.spread
@pytest.mark.parametrize("place", [*PLACES, "in place"])
@pytest.mark.parametrize("into", ["private", "window", "common"])
@pytest.mark.parametrize("nodes", NODES)
def test_all_gather(world, spread, nodes, into, place):
    w = zm.World(spread[nodes], "shared")
    for n in SIZES if place in ("private", "in place") else SIZES[:-1]:
        for cutter in (cut, lopsided):
            counts = cutter(n, w.size)
            expected = stored(normal(n, 0, "bfloat16"), "bfloat16")
            whole = {"private": np.zeros, "window": w.empty, "common": w.node_empty}[into](
                n, np.uint16
            )
            here = part(counts, w.rank)
            if place == "in place":
                piece = whole[here]
                piece[:] = expected[here]
            else:
                piece = placed(w, expected[here], place)
            w.all_gather(piece, whole, counts)
            assert whole.tobytes() == expected.tobytes(), n
            w.barrier()  # before anyone writes to it again, or gives it back


@pytest.mark.parametrize("nodes", NODES)
def test_more_gathers_in_flight_than_there_are_slots(world, spread, nodes):
    """With many other messages between the start of each and its end."""
    w = zm.World(spread[nodes], "shared")
    wholes = [np.empty(3 * w.size, np.float32) for _ in range(70)]
    piece = [np.full(3, 100 * i + w.rank, np.float32) for i in range(70)]
    requests = [
        w.start_all_gather(p, whole, [3] * w.size) for p, whole in zip(piece, wholes, strict=True)
    ]
    for _ in range(50):
        assert w.agree([w.rank])[:, 0].tolist() == list(range(w.size))
    for i, (request, whole) in enumerate(zip(requests, wholes, strict=True)):
        request.wait()
        request.wait()  # twice does no harm
        assert whole.tolist() == np.repeat(100 * i + np.arange(w.size), 3).tolist()


def test_a_common_array_is_read_until_all_start_the_next_gather(world, spread):
    """The slowest reader sees the old numbers, however early the others come back."""
    w = zm.World(spread["one"], "shared")
    whole, counts = w.node_empty(2 * w.size, np.float32), [2] * w.size
    for turn in range(200):
        request = w.start_all_gather(np.full(2, turn, np.float32), whole, counts)
        request.wait()
        for _ in range(5 * ((turn + w.rank) % 3)):
            assert (whole == turn).all()


def test_common_memory(world, spread):
    w = zm.World(spread["blocks of two"], "shared")
    assert w.sharers == min(2, w.size - w.rank // 2 * 2)
    assert w.sharer == w.rank % 2
    array = w.node_empty(5, np.int16)
    if w.sharer == 0:
        array[:] = w.rank
    w.barrier()
    assert array.tolist() == [w.rank // 2 * 2] * 5
    w.barrier()


@pytest.mark.parametrize("nodes", NODES)
def test_each_byte_enters_a_node_once(world, spread, nodes):
    """And the ledger counts what the algorithm sends, however it travels."""
    w = zm.World(spread[nodes], "shared")
    n, counts = 1003, cut(1003, w.size)
    sharing = spread[nodes].sharing()
    before = sharing.crossed_bytes
    piece = np.zeros(counts[w.rank], np.uint16)
    w.all_gather(piece, np.empty(n, np.uint16), counts)
    gathered = sharing.crossed_bytes - before
    w.reduce_scatter(np.zeros(n, np.uint16), piece, counts, 1.0)
    crossed = w.agree([gathered, sharing.crossed_bytes - before - gathered]).sum(axis=0)
    others = len(set(NODES[nodes](w.size))) - 1
    assert crossed.tolist() == [2 * n * others, 4 * n * others]
    assert w.ledger.sent("all_gather", "setup") == 2 * counts[w.rank] * (w.size - 1)
    assert w.ledger.sent("reduce_scatter", "setup") == 2 * (n - counts[w.rank])


def test_windows_are_given_back(world, spread):
    """Small arrays share one, large ones have their own, and none outlives its arrays for long."""
    w = zm.World(spread["one"], "shared")
    memory = spread["one"].sharing().memory
    gc.collect()
    for _ in range(20):
        arrays = [w.empty(10 + w.rank, np.float32) for _ in range(100)]
        arrays += [w.empty(2**20, np.uint8), w.node_empty(2**20, np.uint8)]
        addresses = {a.__array_interface__["data"][0] for a in arrays}
        assert len(addresses) == len(arrays)
        assert all(not a.any() for a in arrays)
        arrays[w.rank][:] = 1
        kept, arrays = arrays[5][2:4].view(np.int32), None  # a view keeps the window
        assert len(memory.windows) <= 8
        assert memory.find(kept)[0] is not None
        del kept
    assert w.empty(0, np.float32).size == 0


def test_no_room_for_shared_memory(world, spread, monkeypatch):
    """Arrays are private then, and all works; only what must be common is refused."""

    class Usage:
        free = 0

    w = zm.World(spread["one"], "shared")
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    gc.collect()
    if w.rank == 0:
        with pytest.warns(RuntimeWarning, match="no room for 2,000,000 bytes on each of"):
            array = w.empty(500_000, np.float32)
    else:
        array = w.empty(500_000, np.float32)
    assert spread["one"].sharing().memory.find(array)[0] is None
    with pytest.raises(MemoryError, match="no room for 2,000,000 bytes: enlarge") as caught:
        w.node_empty(500_000, np.float32)
    assert caught.value.on_all_ranks
    counts = cut(array.size, w.size)
    array[:] = normal(array.size, w.rank, "float32")
    piece = np.empty(counts[w.rank], np.float32)
    w.reduce_scatter(array, piece, counts, 0.5)
    expected = node_sums([0] * w.size, array.size, "float32", 0.5)
    assert piece.tobytes() == expected[part(counts, w.rank)].tobytes()


def test_different_collectives_are_named_without_debug_mode(world, spread):
    if world.size == 1:
        return
    w = zm.World(spread["one"], "shared")
    counts = [2] * w.size
    with pytest.raises(RuntimeError, match="ranks call different collectives") as caught:
        if w.rank == w.size - 1:
            w.barrier()
        else:
            bucket = np.zeros(sum(counts), np.float32)
            w.reduce_scatter(bucket, bucket[:2].copy(), counts, 1.0)
    assert f"rank 0 calls a reduce-scatter of {8 * w.size} bytes" in str(caught.value)
    assert f"rank {w.size - 1} calls a barrier" in str(caught.value)
    assert caught.value.on_all_ranks
    w.barrier()


def test_a_rank_that_has_read_goes_on(world, spread):
    """It waits for the others to start a collective, not to complete it: that would hang here."""
    if world.size == 1:
        return
    w = zm.World(spread["one"], "shared")
    counts = [3] * w.size
    bucket, whole = (w.empty(3 * w.size, np.float32) for _ in range(2))
    own, piece = w.empty(3, np.float32), np.empty(3, np.float32)
    own[:], bucket[:] = w.rank, w.rank
    gather = w.start_all_gather(own, whole, counts)
    reduction = w.start_reduce_scatter(bucket, counts, 1.0)
    if w.rank == 0:
        gather.wait()
        reduction.wait(piece)
    w.barrier()
    if w.rank != 0:
        assert reduction.ready()
        gather.wait()
        reduction.wait(piece)
    assert whole.tolist() == [r for r in range(w.size) for _ in range(3)]
    assert piece.tolist() == [sum(range(w.size))] * 3
    gather.release()
    reduction.release()


def test_what_was_sent_is_kept_until_all_have_read_it(world, spread):
    if world.size == 1:
        return
    w = zm.World(spread["one"], "shared")
    counts = [5] * w.size
    bucket, own = w.empty(5 * w.size, np.float32), w.empty(5, np.float32)
    for turn in range(5):
        own[:], bucket[:] = turn, turn + w.rank
        whole, piece = np.empty(5 * w.size, np.float32), np.empty(5, np.float32)
        gather = w.start_all_gather(own, whole, counts)
        reduction = w.start_reduce_scatter(bucket, counts, 1.0)
        if w.rank == turn % w.size:
            time.sleep(0.02)
        gather.wait()
        reduction.wait(piece)
        gather.release()
        own[:] = np.nan
        reduction.release()
        bucket[:] = np.nan
        assert set(whole) == {turn}
        assert set(piece) == {w.size * turn + sum(range(w.size))}


def test_the_way_follows_from_where_ranks_are(world, spread):
    for nodes, transport in spread.items():
        meet = len(set(NODES[nodes](world.size))) < world.size
        assert zm.World(transport, "auto").reduce == ("shared" if meet else "mpi"), nodes
    assert world.reduce == ("shared" if world.size > 1 else "mpi")
    assert world.reducing("auto").reduce == world.reduce
    assert world.reducing("ordered").reduce == "ordered"


def test_memory_that_is_refused(world, spread, monkeypatch):
    """By one node: then "auto" is what the library does, and "shared" an error on all ranks."""
    module = importlib.import_module("zeromp.world.mpi")

    def refuse(*_):
        raise module.MPI.Exception(module.MPI.ERR_OTHER)

    if world.rank == world.size - 1:
        monkeypatch.setattr(module, "SharedTransport", refuse)
    transport = module.MpiTransport(world.transport.comm, None, NODES["unequal"](world.size))
    assert zm.World(transport, "auto").reduce == "mpi"
    with pytest.raises(RuntimeError, match="'shared' is not possible") as caught:
        zm.World(transport, "shared")
    assert caught.value.on_all_ranks


@pytest.mark.spread
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("wire", toys.WIRES)
def test_stages_agree_over_nodes(world, spread, wire, nodes):
    """All stages to the bit; and with "ordered" too where there is one node."""
    n, cuts, found = 101, {"a": (7, 9), "b": 38}, {}
    kinds = [("shared", stage) for stage in range(4)]
    for way, stage in [*kinds, ("ordered", 2)] if nodes == "one" else kinds:
        options = {"loss_scale": toys.SCALE[wire]} if wire in toys.SCALE else {}
        zero = zm.Zero(
            toys.arrays(n, cuts),
            world=zm.World(spread[nodes], way),
            stage=stage,
            wire=wire,
            optimizer=zm.AdamW(**toys.PINNED),
            poison=True,
            **options,
        )
        toys.steps(zero, n, cuts, 10, clip=0.5)
        found[way, stage] = {k: v.tobytes() for k, v in toys.state(zero).items()}
    first = next(iter(found.values()))
    assert all(state == first for state in found.values())
    world.same("states", str(sorted(first.items())))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_share_weights_get_the_bits_of_those_that_do_not(world, stage):
    """Also with the update fused into backward, and the float32 master in the shared copy."""

    def train(share, wire, fused):
        rows = np.random.default_rng(world.rank)
        engine = zm.Engine(
            zm.models.gpt(17, 2, 8, 2, 8), world=world.reducing("shared"), stage=stage, wire=wire,
            share_weights=share, fused=fused, optimizer=zm.AdamW(lr=0.05),
        )  # fmt: skip
        losses = []
        for _ in range(6):
            x = rows.integers(0, 17, (2, 8))
            if fused:
                engine.prepare(lr=0.05)
            losses.append(engine.backward(x, np.roll(x, -1, 1)))
            losses += [engine.step().grad_norm, engine.evaluate(x, x)]
        summary = toys.summary_of(engine, 6)
        for rank in summary["held_bytes"]:
            for name, pair in rank.items():
                assert pair["measured"] == pair["predicted"], (name, pair)
        return losses, summary["state_sha256"]

    for wire in ("bfloat16", "float32"):
        assert train(True, wire, False) == train(False, wire, False)
        if stage > 1:
            assert train(True, wire, True) == train(False, wire, False)
