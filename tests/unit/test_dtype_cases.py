"""K12 of cases.md: number formats, and the layout of arrays that users bring."""

import time

import numpy as np
import pytest
from toys import PINNED, STAGES, arrays, cut, gradient, rounded, state, trained

import zeromp as zm
from zeromp import layers


def threads(num_ranks, function):
    return zm.threads(num_ranks, function, debug=True, timeout=20)


def mean_of(value_of_rank, num_ranks, stage, wire, **options):
    """What the mean of one gradient, constant on each rank, arrives as; and the report."""

    def train(world):
        zero = zm.Zero(
            {"w": np.zeros(9)},
            world=world,
            stage=stage,
            wire=wire,
            optimizer=zm.SGD(lr=0.0, momentum=0.0),
            loss_scale=1.0,
            **options,
        )
        zero.backward({"w": np.full(9, value_of_rank(world.rank))}, loss=1.0)
        return zero.step(), zero.moments("w")["m"]

    results = threads(num_ranks, train)
    report, found = results[0]
    assert all(r == report and np.array_equal(m, found) for r, m in results)
    assert (found == found[0]).all()
    return float(found[0]), report


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", ["pattern", "predicate"])
def test_o064_16_bit_and_float32_parameters_in_one_group(stage, wire, how):
    keep = "norm.*" if how == "pattern" else lambda name, shape: len(shape) == 1
    given = {
        "first": np.cos(np.arange(15.0)).reshape(3, 5),
        "norm.w": np.full(5, 1 + 2**-20),
        "second": np.sin(np.arange(10.0)).reshape(5, 2),
        "norm.b": np.full(7, -3 * 2**-20),
    }

    def train(world):
        zero = zm.Zero(
            given,
            world=world,
            stage=stage,
            wire=wire,
            keep_float32=keep,
            optimizer=zm.SGD(lr=0.1, momentum=0.0),
            loss_scale=1.0,
            poison=True,
        )
        formats = {name: zero.dtype(name) for name in given}
        zero.backward({name: np.full(a.shape, 1 + 2**-20) for name, a in given.items()})
        zero.step(lr=0.0)
        full = {name: zero.full(name) for name in given}
        return formats, full, {name: zero.moments(name)["m"] for name in given}

    for formats, full, m in threads(3, train):
        for name, array in given.items():
            kept = "float32" if name.startswith("norm") else wire
            assert formats[name] == kept
            np.testing.assert_array_equal(full[name], rounded(array, kept))
            np.testing.assert_array_equal(m[name], rounded(np.full(array.shape, 1 + 2**-20), kept))


@pytest.mark.parametrize("stage", STAGES)
def test_o065_what_is_kept_in_float32_is_said_and_what_users_hold_is_not_cast(stage):
    given = {"w": np.linspace(0, 1, 6), "rotary": np.linspace(0, 1, 4, dtype=np.float32) / 3}
    before = {name: array.copy() for name, array in given.items()}

    def train(world):
        zero = zm.Zero(given, world=world, stage=stage, keep_float32=["rotary"])
        zero.backward({"w": np.ones(6)})
        zero.step(lr=0.0)
        return zero.describe(), zero.full("rotary"), zero.master("w")

    for text, rotary, master in threads(2, train):
        assert "keep float32: rotary" in text
        assert rotary.tobytes() == before["rotary"].tobytes()
        np.testing.assert_array_equal(master, before["w"].astype(np.float32))
    for name, array in given.items():
        assert array.dtype == before[name].dtype
        assert array.tobytes() == before[name].tobytes()


def reversed_memory(a):
    return np.ascontiguousarray(a[::-1])[::-1]


def strided(a):
    wide = np.zeros((a.shape[0], 2 * a.shape[1]), a.dtype)
    wide[:, ::2] = a
    return wide[:, ::2]


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


LAYOUTS = {
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "Fortran": np.asfortranarray,
    "sliced": strided,
    "negative stride": reversed_memory,
    "big-endian": lambda a: a.astype(">f4"),
    "big-endian float64": lambda a: a.astype(">f8"),
    "float64": lambda a: a.astype(np.float64),
    "read-only": read_only,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_o066_arrays_of_any_memory_layout(stage, layout):
    n, cuts = 20, {"w": (4, 5)}
    lay_out = LAYOUTS[layout]

    def train(world):
        given = {"w": lay_out(arrays(n, cuts)["w"])}
        copy = given["w"].copy()
        zero = zm.Zero(
            given, world=world, stage=stage, wire="float32", optimizer=zm.AdamW(**PINNED)
        )
        for t in (1, 2):
            g = lay_out(cut(gradient(n, world.rank, t).astype(np.float32), cuts)["w"])
            bytes_before = g.tobytes()
            zero.backward({"w": g})
            zero.step()
            assert g.tobytes() == bytes_before
        assert np.array_equal(given["w"], copy)
        return state(zero)

    ref = trained(n, 2, 2)
    for found in threads(2, train):
        np.testing.assert_allclose(found["full"], ref.p, atol=1e-6)
        np.testing.assert_allclose(found["m"], ref.m, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_o066_broadcast_arrays(stage):
    def train(world):
        rule = zm.SGD(lr=0.5, momentum=0.0)
        row, one = np.arange(3.0), np.float32(1.0)
        given = {"w": np.broadcast_to(row, (4, 3)), "b": np.broadcast_to(one, (5,))}
        zero = zm.Zero(given, world=world, stage=stage, wire="float32", optimizer=rule)
        zero.backward(
            {name: np.broadcast_to(np.float32(2.0), a.shape) for name, a in given.items()}
        )
        zero.step()
        assert np.array_equal(row, np.arange(3.0))
        return zero.full("w"), zero.full("b")

    for w, b in threads(2, train):
        np.testing.assert_array_equal(w, np.tile(np.arange(3.0) - 1, (4, 1)))
        np.testing.assert_array_equal(b, np.zeros(5))


@pytest.mark.parametrize("given", [np.arange(4), np.ones(4, bool), np.ones(4, complex)])
def test_o066_arrays_that_are_not_floating_point_are_refused(given):
    with pytest.raises(ValueError, match=f"'w' is {given.dtype}: it must be a real floating"):
        zm.Zero({"w": given})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"reduce_wire": "float32"}, 2051 / 4),
        ({}, float(np.float16(2051 / 4))),  # as float16, but added in float32 and rounded once
    ],
)
def test_o067_float16_gradients_are_added_in_float32(stage, options, mean):
    found, _ = mean_of(lambda rank: 1.0 if rank else 2048.0, 4, stage, "float16", **options)
    assert found == mean


@pytest.mark.parametrize("stage", STAGES)
def test_o067_reduce_wire_names_the_type_in_which_gradients_travel(stage):
    def train(world, wire):
        zero = zm.Zero({"w": np.ones(12)}, world=world, stage=stage, reduce_wire=wire)
        zero.backward({"w": np.ones(12)})
        zero.step()
        return world.ledger.sent("reduce_scatter")

    assert threads(2, lambda w: train(w, None)) == [2 * 6, 2 * 6]
    assert threads(2, lambda w: train(w, "float32")) == [4 * 6, 4 * 6]


def test_o068_repeated_tokens_add_up():
    ids = np.array([[3, 3, 3, 5]])
    dwte, dwpe = np.zeros((7, 2), np.float32), np.zeros((4, 2), np.float32)
    layers.embedding_backward(ids, np.ones((1, 4, 2), np.float32), dwte, dwpe)
    assert dwte[:, 0].tolist() == [0, 0, 0, 3, 0, 1, 0]
    assert (dwpe == 1).all()


@pytest.mark.parametrize("bad", [-1, 7])
def test_o068_token_ids_out_of_range_are_refused(bad):
    table = np.zeros((7, 2), np.float32)
    with pytest.raises(ValueError, match=f"token id {bad} is out of range"):
        layers.embedding(np.array([[1, bad]]), table, table)
    engine = zm.Engine(zm.models.gpt(7, layers=1, width=4, heads=1, context=2))
    with pytest.raises(ValueError, match=f"token id {bad} is out of range"):
        engine.backward(np.array([[1, bad]]), np.array([[1, 1]]))


def test_o068_the_backward_is_about_as_fast_as_the_forward():
    vocab, width, batch, time_ = 50_000, 256, 64, 128
    wte, wpe = np.ones((vocab, width), np.float32), np.ones((time_, width), np.float32)
    dwte, dwpe = np.zeros_like(wte), np.zeros_like(wpe)
    ids = np.random.default_rng(0).integers(0, vocab, (batch, time_))

    def best(call):
        seconds = []
        for _ in range(7):
            begin = time.perf_counter()
            result = call()
            seconds.append(time.perf_counter() - begin)
        return min(seconds), result

    forward, x = best(lambda: layers.embedding(ids, wte, wpe))
    backward, _ = best(lambda: layers.embedding_backward(ids, x, dwte, dwpe))
    assert backward <= 5 * forward


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_o069_bfloat16_gradients_travel_as_bfloat16(stage, value):
    found, report = mean_of(lambda rank: value, 2, stage, "bfloat16")
    assert report.applied
    assert found == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("value", "tolerance"), [(30000.0, 0), (6e-8, 0.01)])
def test_o070_a_mean_in_the_range_of_float16_is_found(stage, value, tolerance):
    found, report = mean_of(lambda rank: value, 8, stage, "float16")
    assert report.applied
    assert report.reason == ""
    assert found == pytest.approx(value, rel=tolerance)
