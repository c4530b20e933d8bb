"""World: each collective against NumPy, for odd, tiny and empty sizes, and what ranks agree on."""

from itertools import pairwise

import numpy as np
import pytest
from toys import rounded

import zeromp as zm
from zeromp import wire

SIZES = (0, 1, 2, 5, 64, 1003)
WAYS = ("mpi", "ordered", "shared")
FORMATS = ("float32", "bfloat16", "float16")
DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


def fresh(world, **settings):
    """The same ranks with other settings, and an empty ledger."""
    return zm.World(world.transport, **settings)


def cut(n, ranks):
    """Odd pieces that add up to n; some are empty where n is small."""
    edges = [n * r // ranks for r in range(ranks + 1)]
    return [b - a for a, b in pairwise(edges)]


def lopsided(n, ranks):
    """All on the last rank."""
    return [0] * (ranks - 1) + [n]


def part(counts, rank):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def bits(x, name):
    """float32 numbers that fit the format, as it stores them; by NumPy alone."""
    x = np.asarray(x, np.float32)
    if name == "float32":
        return x.copy()
    if name == "float16":
        return x.astype(np.float16).view(np.int16)
    return (rounded(x, "bfloat16").view(np.uint32) >> 16).astype(np.uint16)


def numbers(stored, name):
    """Stored numbers as float32."""
    if name == "float32":
        return stored
    if name == "float16":
        return stored.view(np.float16).astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def integers(n, rank):
    """Small enough that any sum of 16 ranks is exact in each format."""
    return np.random.default_rng([7, rank, n]).integers(-8, 9, n).astype(np.float32)


def normal(n, rank):
    return np.random.default_rng([8, rank, n]).standard_normal(n, np.float32)


def reduced(world, x, name, counts, factor):
    bucket = bits(x, name)
    piece = np.empty(counts[world.rank], bucket.dtype)
    world.reduce_scatter(bucket, piece, counts, factor, "u")
    return piece


# ---- reduce-scatter ------------------------------------------------------------------------------


@pytest.mark.parametrize("cutter", [cut, lopsided])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_reduce_scatter_of_exact_sums(world, way, name, cutter):
    for max_bytes in (2**30, 1000, 1):
        w = fresh(world, reduce=way, max_bytes=max_bytes)
        for n in SIZES:
            counts = cutter(n, w.size)
            piece = reduced(w, integers(n, w.rank), name, counts, 0.5)
            mean = 0.5 * sum(integers(n, r) for r in range(w.size))
            expected = bits(rounded(mean, name), name)[part(counts, w.rank)]
            assert piece.tobytes() == expected.tobytes(), (n, max_bytes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", ["ordered", "shared"])
def test_folds_in_rank_order_and_rounds_once(world, way, name):
    n, factor = 1003, np.float32(1 / world.size)
    counts = cut(n, world.size)
    total = np.zeros(n, np.float32)
    for r in range(world.size):
        total += rounded(normal(n, r), name)
    expected = bits(rounded(total * factor, name), name)[part(counts, world.rank)]
    for max_bytes in (2**30, 1000):
        w = fresh(world, reduce=way, max_bytes=max_bytes)
        piece = reduced(w, rounded(normal(n, w.rank), name), name, counts, factor)
        assert piece.tobytes() == expected.tobytes(), max_bytes


@pytest.mark.parametrize(
    ("name", "ulp"), [("float32", 2**-24), ("bfloat16", 2**-9), ("float16", 2**-12)]
)
def test_mpi_sums_within_its_roundings(world, name, ulp):
    n, counts = 1003, cut(1003, world.size)
    terms = np.stack([rounded(normal(n, r), name).astype(np.float64) for r in range(world.size)])
    here = part(counts, world.rank)
    w = fresh(world, reduce="mpi")
    piece = numbers(reduced(w, terms[w.rank], name, counts, 1.0), name)
    bound = 2 * ulp * w.size * np.abs(terms).sum(axis=0)  # half an ulp at each addition, and slack
    assert (np.abs(piece - terms.sum(axis=0)[here]) <= bound[here]).all()


def test_only_ordered_survives_sums_beyond_float16(world):
    counts = cut(10, world.size)
    for way in WAYS:
        w = fresh(world, reduce=way)
        piece = numbers(reduced(w, np.full(10, 60000.0), "float16", counts, 1 / w.size), "float16")
        survives = w.reduce in ("ordered", "shared") or w.size == 1
        assert (piece == 60000 if survives else np.isinf(piece)).all(), way


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_nan_and_inf_arrive(world, way, name):
    n, counts = 37, cut(37, world.size)
    x = np.zeros(n, np.float32)
    if world.rank == world.size - 1:
        x[[3, 30]] = np.nan, np.inf
    piece = numbers(reduced(fresh(world, reduce=way), x, name, counts, 1.0), name)
    expected = np.zeros(n, np.float32)
    expected[[3, 30]] = np.nan, np.inf
    np.testing.assert_array_equal(piece, expected[part(counts, world.rank)])


# ---- all-gather, broadcast -----------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("cutter", [cut, lopsided])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int16, np.uint8, np.float64])
@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_all_gather(world, way, dtype, cutter, in_place):
    for max_bytes in (2**30, 1000, 1):
        w = fresh(world, reduce=way, max_bytes=max_bytes)
        for n in SIZES:
            counts = cutter(n, w.size)
            expected = np.random.default_rng(n).integers(0, 255, n).astype(dtype)
            whole = np.zeros(n, dtype)
            here = part(counts, w.rank)
            piece = whole[here] if in_place else expected[here].copy()
            piece[:] = expected[here]
            w.all_gather(piece, whole, counts)
            assert whole.tobytes() == expected.tobytes(), (n, max_bytes)


@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_gathers_in_flight_together(world, way):
    for max_bytes in (2**30, 1000):
        w = fresh(world, reduce=way, max_bytes=max_bytes)
        wanted = [
            np.random.default_rng(i).standard_normal(n, np.float32) for i, n in enumerate(SIZES)
        ]
        flying = []
        for expected in wanted:
            counts = cut(expected.size, w.size)
            whole = np.full(expected.size, np.nan, np.float32)
            piece = expected[part(counts, w.rank)].copy()
            flying.append((w.start_all_gather(piece, whole, counts), whole))
        table = w.agree([w.rank])  # other collectives may come in between
        for (request, whole), expected in zip(flying, wanted, strict=True):
            request.wait()
            assert whole.tobytes() == expected.tobytes()
        assert table[:, 0].tolist() == list(range(w.size))


@pytest.mark.parametrize("max_bytes", [2**30, 1000, 1])
def test_broadcast_from_each_rank(world, max_bytes):
    w = fresh(world, max_bytes=max_bytes)
    for root in range(w.size):
        for n in (0, 1, 777):
            array = normal(n, w.rank)
            w.broadcast(array, root)
            assert array.tobytes() == normal(n, root).tobytes()


# ---- the same bits as threads --------------------------------------------------------------------


def collect(w):
    """Bytes of all that a rank gets, over sizes and formats."""
    found = []
    for name in FORMATS:
        for n in SIZES:
            counts = cut(n, w.size)
            piece = reduced(w, rounded(normal(n, w.rank), name), name, counts, 1 / 3)
            whole = np.empty(n, piece.dtype)
            w.all_gather(piece, whole, counts, "u")
            found += [piece.tobytes(), whole.tobytes()]
    found.append(w.agree([w.rank / 3, np.nan, np.inf]).tobytes())
    return found, dict(w.ledger.sent_bytes), dict(w.ledger.messages), dict(w.ledger.unit_bytes)


@pytest.mark.parametrize("way", ["ordered", "shared"])
def test_bits_and_ledger_are_those_of_threads(world, way):
    expected = zm.threads(world.size, collect)
    for max_bytes in (2**30, 1000):
        assert collect(fresh(world, reduce=way, max_bytes=max_bytes)) == expected[world.rank]


def test_mpi_has_the_same_bits_twice(world):
    assert collect(fresh(world, reduce="mpi")) == collect(fresh(world, reduce="mpi"))


# ---- the ledger ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [2**30, 1000])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_ledger_counts_each_byte_once_per_receiver(world, way, name, max_bytes):
    w = fresh(world, reduce=way, max_bytes=max_bytes)
    n, others = 1003, w.size - 1
    counts, size = cut(n, w.size), 4 if name == "float32" else 2
    own = counts[w.rank]
    piece = reduced(w, normal(n, w.rank), name, counts, 1.0)
    w.ledger.section = "train"
    w.all_gather(piece, np.empty(n, piece.dtype), counts, "v")
    w.broadcast(np.zeros(n, piece.dtype), w.size - 1, "v")
    w.agree([1.0, 2.0, 3.0])
    ledger = w.ledger
    assert ledger.sent("reduce_scatter", "setup") == (n - own) * size
    assert ledger.sent("all_gather") == own * others * size
    assert ledger.sent("broadcast") == (n * others * size if w.rank == w.size - 1 else 0)
    assert ledger.sent("agree") == 3 * 8 * others
    assert ledger.unit_bytes["setup", "reduce_scatter", "u"] == (n - own) * size
    assert ledger.unit_bytes["train", "all_gather", "v"] == own * others * size
    assert set(ledger.messages.values()) == {1}


# ---- what ranks agree on -------------------------------------------------------------------------


def test_agree_gives_everyones_numbers(world):
    table = world.agree([world.rank / 3, -0.0, np.nan, 1e300])
    expected = [[r / 3, -0.0, np.nan, 1e300] for r in range(world.size)]
    assert table.dtype == np.float64
    assert table.tobytes() == np.array(expected).tobytes()


def test_same_names_first_rank_and_line_that_differ(world):
    world.same("settings", "a\nb\nc")
    world.same("nothing", "")
    text = "a\nb\nç" if world.rank < world.size - 1 else "a\nB"
    if world.size == 1:
        return
    with pytest.raises(ValueError, match="settings must be the same on all ranks") as caught:
        world.same("settings", text)
    assert f"rank 0 has 'b', rank {world.size - 1} has 'B'" in str(caught.value)
    with pytest.raises(ValueError, match=r"'c'.*nothing"):
        world.same("settings", "a\nb\nc" if world.rank == 0 else "a\nb")


WRONG = {  # an error of one rank, and what it is on all: the nearest builtin that takes a text
    "builtin": (ValueError("it is wrong: ä"), ValueError),
    "no text": (FloatingPointError(), FloatingPointError),
    "file": (FileNotFoundError(2, "No such file", "x.txt"), FileNotFoundError),
    "ours": (zm.OverBudget("too much"), MemoryError),
    "not a text": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ValueError),
}


@pytest.mark.parametrize("what", WRONG)
def test_together_raises_one_ranks_error_on_all(world, what):
    error, kind = WRONG[what]
    with pytest.raises(kind) as caught, world.together():
        if world.rank == world.size - 1:
            raise error
    assert str(error) in str(caught.value)
    assert caught.value.on_all_ranks
    if world.size > 1:
        assert f"(on rank {world.size - 1})" in str(caught.value)
    world.barrier()


def test_together_passes_what_is_right(world):
    with world.together():
        pass
    with pytest.raises(ValueError, match="mine"), world.together():
        raise ValueError("mine")
    assert world.agree([1.0]).sum() == world.size


@pytest.mark.parametrize("wrong", ["verb", "size", "dtype", "unit"])
@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_debug_names_both_calls_that_differ(world, way, wrong):
    w = fresh(world, reduce=way, debug=True)
    assert collect(w)[0] == collect(fresh(world, reduce=way))[0]
    if w.size == 1:
        return
    last = w.rank == w.size - 1
    n = 7 if last and wrong == "size" else 5
    dtype = np.uint16 if last and wrong == "dtype" else np.float32
    counts = [n] * w.size
    with pytest.raises(RuntimeError, match="ranks call different collectives") as caught:
        if last and wrong == "verb":
            w.broadcast(np.zeros(5, np.float32), 0, "u")
        else:
            unit = "v" if last and wrong == "unit" else "u"
            w.all_gather(np.zeros(n, dtype), np.zeros(n * w.size, dtype), counts, unit)
    named = {"verb": "broadcast of u", "size": str(7 * w.size), "dtype": "uint16", "unit": "of v"}
    text = str(caught.value)
    assert f"rank 0 calls all_gather of u, {5 * w.size} float32" in text
    assert f"rank {w.size - 1} calls" in text
    assert named[wrong] in text
    w.barrier()


def test_unknown_way_to_reduce(world):
    with pytest.raises(
        ValueError, match="'fast' is unknown: use one of auto, shared, ordered, mpi"
    ):
        fresh(world, reduce="fast")


def test_formats_are_those_of_the_wire():
    assert {n: wire.format_of(n).dtype for n in FORMATS} == {
        n: np.dtype(d) for n, d in DTYPES.items()
    }
