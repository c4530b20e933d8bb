"""Collectives on threads: sums against NumPy, any cut into messages, errors, timeouts, ledger."""

import threading
import time

import numpy as np
import pytest
import toys

import zeromp as zm
from zeromp.store import OverBudget
from zeromp.wire import FORMATS, convert
from zeromp.world import World, alone
from zeromp.world.threads import RankFailed, ThreadTransport, _Shared

RANKS = (1, 2, 3, 4, 8)
ranks = pytest.mark.parametrize("size", RANKS)
formats = pytest.mark.parametrize("name", FORMATS)
limits = pytest.mark.parametrize("max_bytes", [1, 10, 100, 2**30])


def stored(values, name):
    out = np.empty(values.size, FORMATS[name].dtype)
    convert(np.ascontiguousarray(values, np.float32), out)
    return out


def counts_of(size):
    """Uneven pieces, some of them empty."""
    return [(5 * r * r + 3) % 14 * (r % 3 != 1) for r in range(size)]


def edges_of(counts):
    return np.cumsum([0, *counts]).tolist()


# ---- arithmetic ----------------------------------------------------------------------------------


@ranks
@formats
@limits
def test_reduce_scatter(size, name, max_bytes):
    """Each rank's piece of the sum in rank order, rounded once; the bucket stays as it was."""
    counts = counts_of(size)
    values = np.random.default_rng(size).standard_normal((size, sum(counts))).astype(np.float32)
    values = toys.rounded(values, name)
    total = np.zeros(sum(counts), np.float32)
    for row in values:
        total += row
    factor = np.float32(1 / size)
    expected, edges = stored(total * factor, name), edges_of(counts)

    def run(world):
        bucket = stored(values[world.rank], name)
        given, piece = bucket.copy(), np.full(counts[world.rank], 77, bucket.dtype)
        world.reduce_scatter(bucket, piece, counts, factor, "u")
        assert (bucket == given).all()
        return piece

    pieces = zm.threads(size, run, debug=True, max_bytes=max_bytes)
    for r, piece in enumerate(pieces):
        assert (piece == expected[edges[r] : edges[r + 1]]).all()


@ranks
@formats
@limits
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(size, name, max_bytes, in_place):
    counts = counts_of(size)
    edges = edges_of(counts)
    expected = stored(np.arange(edges[-1]) + 1, name)

    def run(world):
        whole = np.zeros_like(expected)
        own = slice(edges[world.rank], edges[world.rank + 1])
        piece = whole[own] if in_place else np.empty_like(whole[own])
        piece[:] = expected[own]
        world.all_gather(piece, whole, counts)
        return whole

    for whole in zm.threads(size, run, debug=True, max_bytes=max_bytes):
        assert (whole == expected).all()


@ranks
@pytest.mark.parametrize("max_bytes", [8, 2**30])
def test_requests_in_flight(size, max_bytes):
    """Several gathers started before the first is waited for, with other collectives between."""

    def run(world):
        wholes = [np.zeros(size * k, np.float32) for k in (1, 2, 3)]
        requests = [
            world.start_all_gather(np.full(k, world.rank, np.float32), whole, [k] * size, f"u{k}")
            for k, whole in enumerate(wholes, 1)
        ]
        assert world.agree([world.rank])[:, 0].tolist() == list(range(size))
        for request in requests:
            request.wait()
        return wholes

    for wholes in zm.threads(size, run, debug=True, max_bytes=max_bytes):
        for k, whole in enumerate(wholes, 1):
            assert (whole == np.repeat(np.arange(size), k)).all()


@ranks
@pytest.mark.parametrize("max_bytes", [1, 9, 2**30])
@pytest.mark.parametrize("n", [0, 1, 23])
def test_broadcast_from_any_root(size, max_bytes, n):
    def run(world):
        for root in range(size):
            array = np.arange(n) * (world.rank + 1.0)
            world.broadcast(array, root)
            assert (array == np.arange(n) * (root + 1.0)).all()

    zm.threads(size, run, debug=True, max_bytes=max_bytes)


@ranks
def test_agree_and_barrier(size):
    def run(world):
        table = world.agree([world.rank, 0.1, np.nan, np.inf])
        world.barrier()
        assert table.shape == (size, 4) and table.dtype == np.float64
        assert table[:, 0].tolist() == list(range(size)) and (table[:, 1] == 0.1).all()
        assert np.isnan(table[:, 2]).all() and (table[:, 3] == np.inf).all()
        assert world.agree([]).shape == (size, 0)
        return table.tobytes()

    assert len(set(zm.threads(size, run, debug=True))) == 1


@pytest.mark.parametrize("lengths", [(3, 3), (5, 6), (0, 4), (2, 7, 4)])
def test_o084_ranks_with_different_numbers_of_batches_stop_together(lengths):
    def run(world):
        return [b for b in world.in_step(range(lengths[world.rank])) if world.agree([b]).size]

    for seen in zm.threads(len(lengths), run, debug=True, timeout=20):
        assert seen == list(range(min(lengths)))


def test_a_world_of_one():
    world = alone(debug=True)
    assert (world.rank, world.size, world.local_size, world.reduce) == (0, 1, 1, "ordered")
    piece = np.empty(3, np.float32)
    world.reduce_scatter(np.float32([1, 2, 3]), piece, [3], 2.0)
    assert piece.tolist() == [2, 4, 6]
    assert sum(world.ledger.sent_bytes.values()) == 0
    with pytest.raises(
        ValueError, match="reduce='sum' is unknown: use one of auto, shared, ordered, mpi"
    ):
        World(ThreadTransport(_Shared(1, 1.0), 0), "sum")


@ranks
def test_memory_of_threads(size):
    def run(world):
        own = world.empty(3 + world.rank, np.uint16)
        assert own.dtype == np.uint16 and own.tolist() == [0] * (3 + world.rank)
        assert (world.sharers, world.sharer) == (size, world.rank)
        whole = world.node_empty(2 * size, np.float32)
        world.all_gather(np.full(2, world.rank, np.float32), whole, [2] * size)
        assert whole.tolist() == np.repeat(np.arange(size), 2).tolist()
        world.barrier()  # all have read it
        mine = whole[2 * world.rank : 2 * world.rank + 2]
        mine += 1
        world.all_gather(mine, whole, [2] * size)
        assert whole.tolist() == (np.repeat(np.arange(size), 2) + 1).tolist()
        return whole.__array_interface__["data"][0]

    assert len(set(zm.threads(size, run, debug=True))) == 1


# ---- the ledger ----------------------------------------------------------------------------------


@ranks
@limits
def test_ledger_counts_what_the_algorithm_sends(size, max_bytes):
    """Exactly, whatever the messages are cut into; debug headers are not counted."""
    counts = counts_of(size)
    n = sum(counts)

    def run(world):
        others, mine = size - 1, counts[world.rank]
        bucket = np.zeros(n, np.uint16)
        world.reduce_scatter(bucket, np.empty(mine, np.uint16), counts, 1.0, "a")
        with world.ledger.within("train"):
            world.all_gather(np.zeros(mine, np.float32), np.empty(n, np.float32), counts, "b")
            world.all_gather(np.zeros(mine, np.int16), np.empty(n, np.int16), counts, "c")
        world.broadcast(np.zeros(5), size - 1, "a")
        world.agree([1, 2, 3])
        root = world.rank == size - 1
        expected = {
            ("setup", "reduce_scatter", "a"): 2 * (n - mine),
            ("train", "all_gather", "b"): 4 * mine * others,
            ("train", "all_gather", "c"): 2 * mine * others,
            ("setup", "broadcast", "a"): 8 * 5 * others * root,
            ("setup", "agree", ""): 8 * 3 * others,
        }
        assert world.ledger.unit_bytes == expected
        assert world.ledger.sent("all_gather") == 6 * mine * others
        assert world.ledger.sent("reduce_scatter", "setup") == 2 * (n - mine)
        assert world.ledger.messages["train", "all_gather"] == 2
        return world.ledger.sent("all_gather")

    sent = zm.threads(size, run, debug=True, max_bytes=max_bytes)
    assert sum(sent) == 6 * n * (size - 1)


# ---- rules and errors ----------------------------------------------------------------------------


def test_same_names_both_sides():
    def run(world):
        world.same("settings", "stage 1\nwire x")
        with pytest.raises(ValueError) as caught:
            world.same("settings", f"stage 1\nwire {'xy'[world.rank == 2]}\nbucket 3")
        return str(caught.value), caught.value.on_all_ranks

    expected = (
        "settings must be the same on all ranks: rank 0 has 'wire x', rank 2 has 'wire y' "
        "(on rank 2)",
        True,
    )
    assert zm.threads(4, run, debug=True) == [expected] * 4


@pytest.mark.parametrize(
    ("a", "b"), [("x", "x\ny"), ("x\ny", "x"), ("", "x"), ("x", ""), ("x", "x\n"), ("x\n\n", "x")]
)
def test_same_raises_whenever_texts_differ(a, b):
    """Also where one is the beginning of the other, or has another end of line."""

    def run(world):
        with pytest.raises(ValueError, match="text must be the same on all ranks"):
            world.same("text", b if world.rank else a)

    zm.threads(2, run, timeout=20)


def decode():
    b"\xff".decode()


def over_budget():
    raise OverBudget("too much")


def fail():
    raise ValueError("wrong")


def lookup():
    return {}["key"]


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        (fail, ValueError, "wrong"),
        (over_budget, OverBudget, "too much"),
        (lookup, KeyError, "key"),
        (decode, ValueError, "can't decode byte 0xff"),
        (lambda: open("/nowhere/at/all"), OSError, "/nowhere/at/all"),  # noqa: PTH123, SIM115
    ],
)
@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 1, 2}])
def test_together_raises_one_ranks_error_on_all(action, kind, words, bad):
    def run(world):
        with world.together():
            pass
        with pytest.raises(kind, match=words) as caught, world.together():
            if world.rank in bad:
                action()
        assert caught.value.on_all_ranks
        assert ("on rank" in str(caught.value)) == (len(bad) == 1)
        return world.agree([1]).sum()  # and they are in step afterwards

    assert zm.threads(3, run, debug=True, timeout=20) == [3, 3, 3]


def test_an_error_of_one_rank_releases_the_others():
    """Wherever they wait; the caller gets the error, not its echo."""
    released = []

    def run(world):
        if world.rank == 1:
            raise KeyError("mine")
        try:
            [world.barrier, lambda: world.agree([1]), lambda: world.broadcast(np.zeros(3))][
                world.rank // 2
            ]()
        except RankFailed:
            released.append(world.rank)
            raise

    before = threading.active_count()
    start = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        zm.threads(4, run)
    assert sorted(released) == [0, 2, 3] and time.monotonic() - start < 10
    assert threading.active_count() == before


@pytest.mark.parametrize("left_at", ["never in one", "after one"])
def test_timeout_names_the_missing_ranks(left_at):
    def run(world):
        if left_at == "after one":
            world.agree([1])
        if world.rank in (0, 3):
            world.reduce_scatter(np.zeros(4, np.float32), np.empty(1, np.float32), [1] * 4, 1, "w")

    words = r"rank [03] has waited 0.3 s in reduce_scatter of w, which .*: .*rank 1.*rank 2"
    with pytest.raises(TimeoutError, match=words) as caught:
        zm.threads(4, run, timeout=0.3)
    assert "waits in" not in str(caught.value).split("rank 1")[1].split(";")[0]


def test_timeout_tells_where_other_ranks_wait():
    """A rank that is held up elsewhere comes back into a collective that the others have left."""

    def run(world):
        if world.rank == 0:
            world.start_all_gather(np.zeros(1), np.zeros(2), [1, 1], "lost").wait()
        else:
            time.sleep(0.6)
            world.barrier()

    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0.3 s in all_gather of lost"):
        zm.threads(2, run, timeout=0.3)


# ---- debug mode ----------------------------------------------------------------------------------


def gather(n, dtype=np.float32, unit="a"):
    def call(world):
        whole = np.zeros(n * world.size, dtype)
        world.all_gather(np.zeros(n, dtype), whole, [n] * world.size, unit)

    return call


def reduce(n, unit="a"):
    def call(world):
        bucket = np.zeros(n * world.size, np.float32)
        world.reduce_scatter(bucket, bucket[:n].copy(), [n] * world.size, 1, unit)

    return call


def broadcast(n):
    return lambda world: world.broadcast(np.zeros(n), 0, "a")


MISMATCHES = {
    "size": (gather(2), gather(3), "all_gather of a, 6 float32", "all_gather of a, 9 float32"),
    "dtype": (gather(2), gather(2, np.int16), "all_gather of a, 6 float32", "a, 6 int16"),
    "unit": (gather(2), gather(2, unit="b"), "all_gather of a, 6", "all_gather of b, 6"),
    "verb": (reduce(2), gather(2), "reduce_scatter of a, 6", "all_gather of a, 6"),
    "numbers": (lambda w: w.agree([1]), lambda w: w.agree([1, 2]), "1 float64", "2 float64"),
    "agree": (broadcast(4), lambda w: w.agree([1]), "broadcast of a, 4", "agree of"),
    "barrier": (lambda w: w.barrier(), lambda w: w.agree([1]), "barrier", "agree"),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", MISMATCHES)
def test_o085_debug_mode_names_both_collectives(what, odd):
    """At the 7th of a row, on all ranks, before anything is sent."""
    usual, other, *words = MISMATCHES[what]

    def run(world):
        for step in range(1, 8):
            if step < 7:
                usual(world)
                continue
            with pytest.raises(RuntimeError) as caught:
                (other if world.rank == odd else usual)(world)
        assert caught.value.on_all_ranks
        return str(caught.value)

    (message, *others) = zm.threads(3, run, debug=True, timeout=5)
    assert "ranks call different collectives: rank 0 calls" in message
    assert all(word in message for word in words) and set(others) == {message}
