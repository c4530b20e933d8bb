"""Weights out to files and in again (K10: O-055, O-056, O-057; O-049)."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import toys

import zeromp as zm

MODEL = zm.models.gpt(vocab=13, layers=2, width=6, heads=2, context=5)
NAMES = [p.name for unit in MODEL.units for p in unit.parameters]


def make(world, stage=3, wire="bfloat16", **options):
    return zm.Engine(MODEL, world=world, stage=stage, wire=wire, poison=True, **options)


def train(engine, steps=1, seed=0):
    rng = np.random.default_rng([seed, engine.world.rank])
    for _ in range(steps):
        x, y = rng.integers(0, 13, (2, 2, 5))
        engine.backward(x, y)
        engine.step(lr=0.01)


def widened(raw):
    """Float32 of bfloat16's bits."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def read_with_library(path):
    """All arrays of a file as float32, by the safetensors library or NumPy."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name].astype(np.float32) for name in file.files}
    found = {}
    for name, about in safetensors.deserialize(path.read_bytes()):
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[about["dtype"]]
        raw = np.frombuffer(about["data"], kind)
        values = widened(raw) if about["dtype"] == "BF16" else raw.astype(np.float32)
        found[name] = values.reshape(about["shape"])
    return found


def equal(found, expected):
    assert list(found) == list(expected) or set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        assert found[name].tobytes() == values.tobytes(), name


# ---- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_o055_every_array_equals_full_to_the_bit(tmp_path, stage, ending):
    """O-055: a GPT of 28 arrays, 3 ranks: each is right, not the first alone."""
    path = tmp_path / f"w.{ending}"

    def job(world):
        engine = make(world, stage, "float32")
        train(engine)
        zm.weights.export(engine, path)
        return {name: engine.full(name) for name in NAMES}

    expected = zm.threads(3, job)[0]
    assert len(expected) == 28
    found = read_with_library(path)
    equal(found, expected)
    if ending == "safetensors":
        equal(safetensors.numpy.load_file(path), expected)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing is left beside it


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_masters_and_their_16_bit_forms(tmp_path, wire):
    """Float32 gives the masters; the format of the wire gives what training uses."""

    def job(world):
        engine = make(world, 2, wire, loss_scale=1024.0 if wire == "float16" else None)
        train(engine, 2)
        for dtype in ("float32", wire):
            zm.weights.export(engine.zero, tmp_path / f"{dtype}.safetensors", dtype)
        return [{n: get(n) for n in NAMES} for get in (engine.master, engine.full)]

    masters, stored = zm.threads(3, job)[0]
    assert any((masters[n] != stored[n]).any() for n in NAMES)
    equal(read_with_library(tmp_path / "float32.safetensors"), masters)
    equal(read_with_library(tmp_path / f"{wire}.safetensors"), stored)
    assert stored[NAMES[0]].tobytes() == toys.rounded(masters[NAMES[0]], wire).tobytes()
    equal(zm.weights.load(tmp_path / f"{wire}.safetensors"), stored)


@pytest.mark.parametrize("stage", [0, 3])
def test_o056_export_at_any_time(tmp_path, stage):
    """O-056: after construction, a step, evaluation, and inside `gathered`: whole and finite."""
    shapes = {p.name: p.shape for unit in MODEL.units for p in unit.parameters}

    def job(world):
        engine = make(world, stage)
        x, y = np.zeros((2, 1, 5), np.int64)

        def check(when):
            zm.weights.export(engine, tmp_path / f"{when}.safetensors", "bfloat16")
            expected = {name: engine.full(name) for name in NAMES}
            if world.rank == 0:
                equal(read_with_library(tmp_path / f"{when}.safetensors"), expected)
                for name, values in expected.items():
                    assert values.shape == shapes[name]
                    assert np.isfinite(values).all()

        check("made")
        train(engine)
        check("step")
        engine.evaluate(x, y)
        check("evaluated")
        with engine.gathered("wte.weight"):
            check("gathered")
        with engine.gathered("wte.weight", edit=True) as values:
            values["wte.weight"][...] = 0.5
            check("editing")
        check("edited")
        assert (engine.full("wte.weight") == 0.5).all()
        return engine.world.ledger.sent("all_gather", "train")

    zm.threads(2, job)


def test_export_leaves_the_ledger_of_training_alone(tmp_path):
    def job(world):
        engine = make(world)
        before = dict(world.ledger.sent_bytes)
        zm.weights.export(engine, tmp_path / "w.npz")
        changed = {k for k, v in world.ledger.sent_bytes.items() if v != before.get(k, 0)}
        assert {section for section, _ in changed} <= {"inspect"}

    zm.threads(2, job)


def test_o057_export_holds_one_array_at_a_time(tmp_path):
    """O-057: 2 ranks, 16 MB in one unit; each holds twice the largest array at most."""
    arrays = {f"a{i}": np.full((512, 512), i, np.float32) for i in range(16)}
    largest, total = 2**20, 2**24

    def job(world):
        zero = zm.Zero(arrays, world=world, stage=3, bucket=2**30)
        world.barrier()
        if world.rank == 0:
            tracemalloc.start()
        world.barrier()
        zm.weights.export(zero, tmp_path / "w.safetensors")
        world.barrier()
        peak = tracemalloc.get_traced_memory()[1]
        world.barrier()
        tracemalloc.stop()
        return peak

    peak = zm.threads(2, job)[0]
    assert peak < 2 * 2 * largest + 2 * 2**20 < total
    equal(read_with_library(tmp_path / "w.safetensors"), arrays)


def test_tied_arrays_are_stored_once_under_the_first_name(tmp_path):
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"embed": w, "b": np.ones((), np.float32), "head": w, "none": np.ones((0, 4), "f4")}
    zero = zm.Zero(arrays, wire="float32")
    for ending in ("safetensors", "npz"):
        zm.weights.export(zero, tmp_path / f"w.{ending}")
    with safetensors.safe_open(tmp_path / "w.safetensors", "np") as file:
        assert sorted(file.keys()) == ["b", "embed", "none"]
        assert file.metadata() == {"format": "np", "head": "embed"}
    equal(zm.weights.load(tmp_path / "w.safetensors"), arrays)
    equal(zm.weights.load(tmp_path / "w.npz"), {k: v for k, v in arrays.items() if k != "head"})


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("w.pt", "float32", "end in .safetensors or .npz"),
        ("w.npz", "bfloat16", "NumPy has no bfloat16"),
        ("w.npz", "int8", "'int8' is unknown"),
        ("w.npz", "float16", "'a' holds 1e\\+06, more than float16 can"),
    ],
)
def test_what_export_refuses_on_all_ranks(tmp_path, name, dtype, words):
    def job(world):
        zero = zm.Zero({"a": np.array([1.0, 1e6]), "b": np.ones(3)}, world=world, stage=3)
        with pytest.raises(ValueError, match=words):
            zm.weights.export(zero, tmp_path / name, dtype)

    zm.threads(2, job)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_told_on_all_ranks_and_the_old_file_stays(tmp_path):
    (tmp_path / "w.npz").write_text("old")

    def job(world):
        zero = zm.Zero({"a": np.array([1.0, 1e6])}, world=world, stage=3)
        with pytest.raises(OSError, match="No such file"):
            zm.weights.export(zero, tmp_path / "nowhere" / "w.npz")
        with pytest.raises(ValueError, match="float16"):
            zm.weights.export(zero, tmp_path / "w.npz", "float16")

    zm.threads(2, job)
    assert (tmp_path / "w.npz").read_text() == "old"


# ---- in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_o049_an_engine_from_a_file_has_the_same_loss(tmp_path, ending):
    """O-049: exported, loaded by other ranks at another stage: the same evaluation."""
    path = tmp_path / f"w.{ending}"
    x, y = np.random.default_rng(3).integers(0, 13, (2, 4, 5))

    def before(world):
        engine = make(world, 3, "float32")
        train(engine, 5)
        zm.weights.export(engine, path)
        return engine.evaluate(x, y), engine.full("wte.weight")

    def after(world):
        engine = make(world, 1, "float32", seed=7, weights=zm.weights.load(path))
        return engine.evaluate(x, y), engine.full("wte.weight")

    was, now = zm.threads(3, before)[0], zm.threads(2, after)[0]
    assert was[1].tobytes() == now[1].tobytes()
    assert abs(was[0] - now[0]) < 1e-6
    untrained = make(zm.alone(), 1, "float32").evaluate(x, y)
    assert abs(untrained - now[0]) > 1e-3


def test_names_by_dict_and_by_function(tmp_path):
    path = tmp_path / "w.safetensors"
    arrays = {"h.0.w": np.ones((2, 3), "f4"), "h.0.mask": np.ones(2, np.int64)}
    safetensors.numpy.save_file(arrays, path)
    assert set(zm.weights.load(path)) == set(arrays)
    found = zm.weights.load(path, {"h.0.w": "w"})
    assert set(found) == {"w", "h.0.mask"}
    assert found["w"].dtype == np.float32
    with pytest.raises(ValueError, match=r"'h.0.mask' is I64, which is no weight's dtype"):
        found["h.0.mask"]
    keep = zm.weights.load(path, lambda name: None if "mask" in name else name[4:])
    assert list(keep) == ["w"]
    assert "h.0.w" not in keep
    with pytest.raises(ValueError, match=r"has no array 'h\.1\.w'"):
        zm.weights.load(path, {"h.1.w": "w"})
    with pytest.raises(ValueError, match="both come to 'x'"):
        zm.weights.load(path, lambda name: "x")


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
def test_files_of_other_writers_become_float32(tmp_path, dtype):
    values = np.linspace(-2, 2, 6).reshape(2, 3).astype(dtype)
    fortran = {"a": np.asfortranarray(values), "b": np.float64(1 / 3)}
    np.savez_compressed(tmp_path / "w.npz", **fortran)
    safetensors.numpy.save_file({"a": values, "b": np.array(1 / 3)}, tmp_path / "w.safetensors")
    for ending in ("npz", "safetensors"):
        found = zm.weights.load(tmp_path / f"w.{ending}")
        expected = {"a": values.astype(np.float32), "b": np.array(1 / 3, np.float32)}
        equal(found, expected)
        assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in found.values())


def test_an_engine_says_which_weight_is_missing_or_misshapen(tmp_path):
    path = tmp_path / "w.npz"
    zm.weights.export(make(zm.alone()), path)
    drop = zm.weights.load(path, lambda name: None if name == "ln_f.bias" else name)
    with pytest.raises(ValueError, match=r"'ln_f.bias' of unit .* is missing"):
        make(zm.alone(), weights=drop)
    swap = {"wte.weight": "wpe.weight", "wpe.weight": "wte.weight"}
    with pytest.raises(ValueError, match=r"shape \(5, 6\); it must be \(13, 6\)"):
        make(zm.alone(), weights=zm.weights.load(path, swap))


def damaged(path, how):
    data = path.read_bytes()
    about = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    text = json.dumps(about).encode()
    return {
        "empty": b"",
        "text": b"not a file of weights, by far",
        "header": data[:20],
        "data": data[:-1],
        "long": struct.pack("<Q", 2**60) + data[8:],
        "list": struct.pack("<Q", 4) + b"[12]" + bytes(64),
        "short": struct.pack("<Q", len(text)) + text + bytes(12),
    }[how]


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
@pytest.mark.parametrize("how", ["empty", "text", "header", "data", "long", "list", "short"])
def test_a_damaged_file_is_one_clear_error(tmp_path, ending, how):
    path = tmp_path / f"w.{ending}"
    zm.weights.export(zm.Zero({"a": np.arange(4.0)}, wire="float32"), path)
    path.write_bytes(damaged(path, how))
    with pytest.raises(ValueError, match=r"w.*(damaged|truncated)"):
        zm.weights.load(path)["a"]


def test_weights_are_read_one_by_one(tmp_path):
    """A file of 8 MB: opening it, and reading one array of 1 MB, takes little more than that."""
    path = tmp_path / "w.safetensors"
    shapes = {f"a{i}": (2**18,) for i in range(8)}
    with zm.weights.writing(path, shapes) as put:
        for i, name in enumerate(shapes):
            put(name, np.full(2**18, i, np.float32))
    tracemalloc.start()
    found = zm.weights.load(path)
    assert found["a5"].sum() == 5 * 2**18
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * 2**20
    assert repr(found) == f"<8 arrays of {path}>"
