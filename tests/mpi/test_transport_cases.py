"""Cases of shared/cases.md that need several ranks: K16, and O-006, O-007, O-023, O-084."""

import numpy as np
import pytest
import toys

import zeromp as zm

STAGES = (0, 1, 2, 3)
WAYS = ("mpi", "ordered", "shared")


def fresh(world, reduce="mpi", **settings):
    return zm.World(world.transport, reduce=reduce, **settings)


def zero_of(world, n, cuts, stage, wire="float32", **options):
    if wire in toys.SCALE:
        options.setdefault("loss_scale", toys.SCALE[wire])
    options.setdefault("optimizer", zm.AdamW(**toys.PINNED))
    arrays = options.pop("arrays", None) or toys.arrays(n, cuts)
    return zm.Zero(arrays, world=world, stage=stage, wire=wire, poison=True, **options)


def mean_of(zero):
    """Mean gradient of the one step that has been made: the momentum of SGD."""
    return toys.whole(lambda name: zero.moments(name)["m"], zero.names)


# ---- O-006, O-007: which rank brings which gradient, and when ------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bringer", ["first", "last"])
def test_o006_gradient_missing_on_some_ranks(world, stage, bringer):
    """A missing gradient counts as zeros, whichever rank has it."""
    a, b = np.arange(5, dtype=np.float32), np.full(3, 6.0, np.float32)
    zero = zero_of(fresh(world), 8, [5, 3], stage, optimizer=zm.SGD(lr=0.1, momentum=0.9), bucket=4)
    given = {"a0": a}
    if world.rank == {"first": 0, "last": world.size - 1}[bringer]:
        given["a1"] = b
    zero.backward(given)
    assert zero.step().applied
    expected = np.concatenate([a, b / world.size])
    np.testing.assert_allclose(mean_of(zero), expected, rtol=1e-6)
    zero.backward({})  # none at all
    assert zero.step().grad_norm == 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_o007_gradients_in_different_order(world, way, stage):
    n, cuts = 14, {"a": 5, "b": 3, "c": 6}
    found = {}
    for kind in ("in order", "by rank"):
        zero = zero_of(fresh(world, way), n, cuts, stage, bucket=4)
        for t in range(1, 4):
            gradients = toys.cut(toys.gradient(n, world.rank, t), cuts)
            names = list(gradients)
            if kind == "by rank":
                names = names[::-1] if world.rank % 2 else names[1:] + names[:1]
            zero.backward({name: gradients[name] for name in names})
            assert zero.step().applied
        found[kind] = toys.state(zero)
    ref = toys.trained(n, world.size, 3)
    for what, array in found["by rank"].items():
        assert array.tobytes() == found["in order"][what].tobytes(), what
    np.testing.assert_allclose(found["by rank"]["full"], ref.p, atol=1e-6)
    np.testing.assert_allclose(found["by rank"]["m"], ref.m, atol=1e-6)
    np.testing.assert_allclose(found["by rank"]["v"], ref.v, atol=1e-6)


# ---- O-023: all micro-batches of all ranks count -------------------------------------------------


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_o023_no_micro_batch_is_left_out(world, way, stage, wire):
    n, cuts, micros = 37, [16, 20, 1], 4
    zero = zero_of(
        fresh(world, way),
        n,
        cuts,
        stage,
        wire,
        micro_batches=micros,
        reduce_wire="float32",
        optimizer=zm.SGD(lr=0.1, momentum=0.9),
    )
    toys.feed(zero, n, cuts, 1, micros)
    report = zero.step()
    assert report.weight == micros * world.size
    mean = mean_of(zero)
    np.testing.assert_allclose(mean, toys.mean_gradient(n, world.size, 1, micros), atol=1e-6)
    world.same("mean gradient", mean.tobytes().hex())


# ---- O-084: different numbers of batches ---------------------------------------------------------


def test_o084_in_step_ends_on_all_ranks_with_the_shortest(world):
    zero = zero_of(fresh(world), 10, [10], 2)
    mine = iter(range(5 + world.rank))
    for _ in world.in_step(mine):
        toys.feed(zero, 10, [10], zero.applied + 1)
        zero.step()
    assert zero.applied == 5
    assert list(world.in_step([1] if world.rank == 0 else [])) == ([1] if world.size == 1 else [])
    np.testing.assert_allclose(
        toys.whole(zero.full, zero.names), toys.trained(10, world.size, 5).p, atol=1e-6
    )


# ---- O-086: messages are split -------------------------------------------------------------------


@pytest.mark.parametrize("wire", toys.WIRES)
@pytest.mark.parametrize("stage", STAGES)
def test_o086_a_lowered_limit_changes_no_bit(world, stage, wire):
    n, cuts = 4001, {"a": (40, 50), "b": 2001}
    found, sent = [], []
    for way, max_bytes in (("ordered", 2**30), ("ordered", 1000), ("shared", 1000)):
        w = fresh(world, way, max_bytes=max_bytes)
        zero = zero_of(w, n, cuts, stage, wire)
        assert all(r.applied for r in toys.steps(zero, n, cuts, 3, clip=1.0))
        found.append(toys.state(zero))
        sent.append(dict(w.ledger.sent_bytes))
    for what, array in found[0].items():
        assert array.tobytes() == found[1][what].tobytes() == found[2][what].tobytes(), what
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("stage", STAGES)
def test_o086_a_lowered_limit_with_the_librarys_sum(world, stage):
    n, cuts = 4001, {"a": (40, 50), "b": 2001}
    zero = zero_of(fresh(world, "mpi", max_bytes=1000), n, cuts, stage)
    toys.steps(zero, n, cuts, 3)
    np.testing.assert_allclose(
        toys.whole(zero.full, zero.names), toys.trained(n, world.size, 3).p, atol=1e-6
    )


# ---- O-087: no pickles ---------------------------------------------------------------------------


class UpperCaseOnly:
    """A communicator whose lower-case names, those that pickle, are not there."""

    def __init__(self, comm):
        self._comm = comm
        self.calls = []

    def __getattr__(self, name):
        if not name[0].isupper():
            raise AssertionError(f"{name} pickles")
        self.calls.append(name)
        return getattr(self._comm, name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_o087_no_collective_pickles(world, way, stage, monkeypatch):
    if not hasattr(world.transport, "comm"):
        pytest.skip("no MPI")
    n, cuts = 41, {"a": (4, 5), "b": 21}
    zero = zero_of(fresh(world, way), n, cuts, stage, "float16")
    comm = UpperCaseOnly(world.transport.comm)
    monkeypatch.setattr(world.transport, "comm", comm)
    toys.steps(zero, n, cuts, 3, clip=0.1)
    zero.backward({"b": np.full(21, 1e9 if world.rank == 0 else 1.0, np.float32)})
    report = zero.step()
    assert (zero.applied, zero.skipped) == (3, 1)
    assert report.reason == "inf in the gradient of 'b'"
    assert zero.loss_scale() == toys.SCALE["float16"] / 2
    toys.state(zero)
    with zero.gathered("a", edit=True) as weights:
        weights["a"][:] = 1
    assert "Bcast" in comm.calls
    assert ("Iallgatherv" in comm.calls) == (way != "shared")
    assert ("Reduce_scatter" in comm.calls) == (way == "mpi")


# ---- O-089, O-090: replicas ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_o089_ranks_start_from_different_weights(world, stage):
    arrays = toys.arrays(14, {"a": 5, "b": 3, "c": 6})
    if world.rank == world.size - 1:
        arrays["b"] = arrays["b"] + 1
    if world.size == 1:
        zero_of(fresh(world), 14, [], stage, arrays=arrays)
        return
    with pytest.raises(ValueError, match="initial values must be the same on all ranks") as caught:
        zero_of(fresh(world), 14, [], stage, arrays=arrays, bucket=4)
    assert "unit unit1 with b" in str(caught.value)
    assert f"rank {world.size - 1} has" in str(caught.value)
    model = zm.models.mlp((3, 4, 2))
    with pytest.raises(ValueError, match="initial values must be the same"):
        zm.Engine(model, world=fresh(world), stage=stage, seed=world.rank)


@pytest.mark.parametrize("wire", toys.WIRES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1])
def test_o090_replicas_stay_equal(world, stage, way, wire):
    """Each rank's own copy, not a gathered one."""
    n, cuts = 101, {"a": (7, 9), "b": 38}
    zero = zero_of(fresh(world, way), n, cuts, stage, wire)
    reports = toys.steps(zero, n, cuts, 200, clip=0.5)
    before = zero.world.ledger.sent("all_gather", "inspect")
    whole = toys.whole(zero.full, zero.names)
    assert zero.world.ledger.sent("all_gather", "inspect") == before
    world.same("replicas", whole.tobytes().hex())
    world.same("reports", repr(reports))
    assert zero.applied == 200
    assert np.isfinite(whole).all()
    assert all(r.clip_factor == min(1.0, 0.5 / r.grad_norm) for r in reports)


# ---- O-091: bucket sizes -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_o091_bucket_size_changes_no_result(world, way, stage):
    n, cuts = 56, {"a": (3, 4), "b": 1, "c": 4, "d": (2, 17), "e": 5}
    means, units = [], []
    for bucket in (1, 5, 64, 10**9):
        zero = zero_of(
            fresh(world, way), n, cuts, stage, bucket=bucket, optimizer=zm.SGD(lr=0.1, momentum=0.9)
        )
        toys.steps(zero, n, cuts, 1)
        means.append(mean_of(zero))
        units.append(len(zero.layout.units))
    assert units == [5, 4, 1, 1]
    np.testing.assert_allclose(means[0], toys.mean_gradient(n, world.size, 1), atol=1e-6)
    for other in means[1:]:
        np.testing.assert_allclose(other, means[0], rtol=1e-6, atol=1e-8)
        if world.size <= 2 or way != "mpi":  # at 2 ranks there is one order only
            assert other.tobytes() == means[0].tobytes()
