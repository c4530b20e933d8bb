"""16-bit numbers against NumPy, ml_dtypes and a reference in integers; sums, checks, loss scale."""

import ast
import importlib
import pkgutil
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import zeromp
from zeromp import _jit
from zeromp.wire import (
    FORMATS,
    LossScale,
    accumulate,
    add,
    convert,
    first_nonfinite,
    fold,
    format_of,
    nan_fill,
    scale,
    square_sum,
)

SIZES = (1, 7, 1023, 1024, 1025)
SIXTEEN = ("bfloat16", "float16")
ALL_BITS = np.arange(65536, dtype=np.uint32)

formats = pytest.mark.parametrize("name", FORMATS)
sixteen_bit = pytest.mark.parametrize("name", SIXTEEN)


def stored(values, name):
    """Numbers in a format, by the kernel that is tested below."""
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty(values.shape, FORMATS[name].dtype)
    convert(values, out)
    return out


def value(bits):
    """Float64 values of stored numbers, by NumPy alone."""
    if bits.dtype == np.uint16:
        bits = bits.astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # signalling NaN
        return bits.view(np.float16 if bits.itemsize == 2 else np.float32).astype(np.float64)


def bfloat16_of(bits):
    """Round float32 bits to bfloat16 in Python integers: nearest, ties to even, quiet NaN."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    kept, low = bits >> 16, bits & 0xFFFF
    return kept + (low > 0x8000 or (low == 0x8000 and kept & 1))


def float32_bits():
    """Random bits, and those next to every 16-bit number and every midpoint between two."""
    near = [
        (base + np.int64(d)) & 0xFFFFFFFF
        for shift in (13, 16)  # where float16 and bfloat16 cut the significand
        for base in [np.arange(0, 2**32, 1 << shift, dtype=np.int64)[:: 1 if shift == 16 else 37]]
        for half in (0, 1 << (shift - 1))
        for d in (half - 1, half, half + 1)
    ]
    random = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.int64)
    return np.concatenate([random, *near]).astype(np.uint32)


# ---- conversion ----------------------------------------------------------------------------------


@sixteen_bit
def test_widening_all_65536_numbers(name):
    bits = ALL_BITS.astype(np.uint16).view(FORMATS[name].dtype)
    wide = np.empty(bits.size, np.float32)
    convert(bits, wide)
    np.testing.assert_array_equal(value(wide), value(bits))
    assert (np.signbit(wide) == (ALL_BITS >= 0x8000)).all()
    back = stored(wide, name)
    finite = ~np.isnan(wide)
    assert (back[finite] == bits[finite]).all()
    assert np.isnan(value(back[~finite])).all()


def test_narrowing_to_float16_as_numpy_does():
    x = float32_bits().view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    found, nan = stored(x, "float16"), np.isnan(x)
    assert (found[~nan] == expected[~nan].view(np.int16)).all()
    assert np.isnan(value(found[nan])).all()


def test_narrowing_to_bfloat16_as_ml_dtypes_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = float32_bits().view(np.float32)
    found, nan = stored(x, "bfloat16"), np.isnan(x)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (found[~nan] == expected[~nan]).all()
    assert np.isnan(value(found[nan])).all()


def test_narrowing_to_bfloat16_as_integers_do():
    special = [0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF,
               0x7FC00000, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x7F7F8000]  # fmt: skip
    bits = np.concatenate([np.array(special, np.uint32), float32_bits()[::97]])
    assert stored(bits.view(np.float32), "bfloat16").tolist() == [
        bfloat16_of(b) for b in bits.tolist()
    ]


@pytest.mark.parametrize(("source", "target"), [SIXTEEN, SIXTEEN[::-1]])
def test_between_16_bit_formats_is_one_rounding_of_the_value(source, target):
    bits = ALL_BITS.astype(np.uint16).view(FORMATS[source].dtype)
    out = np.empty(bits.size, FORMATS[target].dtype)
    convert(bits, out)
    with np.errstate(invalid="ignore"):
        expected = stored(value(bits).astype(np.float32), target)
    nan = np.isnan(value(bits))
    assert (out[~nan] == expected[~nan]).all() and np.isnan(value(out[nan])).all()


@formats
def test_converting_to_its_own_format_copies_the_bits(name):
    bits = float32_bits()[:4096].view(np.float32)
    x = bits if name == "float32" else stored(bits, name)
    out = np.empty_like(x)
    convert(x, out)
    assert (out.view(np.uint8) == x.view(np.uint8))[~np.isnan(value(x)).repeat(x.itemsize)].all()


def test_formats_by_name():
    assert [f.itemsize for f in FORMATS.values()] == [4, 2, 2]
    with pytest.raises(ValueError, match="'fp8' is unknown: use one of float32, bfloat16, float16"):
        format_of("fp8")


# ---- sums ----------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 5, 2047, 2049, 4100])
def test_fold_adds_in_rank_order_and_rounds_once(name, ranks, n):
    rng = np.random.default_rng(n + ranks)
    pieces = stored(rng.standard_normal(ranks * n) * 10 ** rng.uniform(-2, 2, ranks * n), name)
    out = np.empty(n, pieces.dtype)
    factor = np.float32(1 / ranks)
    fold(pieces, factor, out)
    rows = value(pieces).reshape(ranks, n)
    total = np.zeros(n, np.float32)
    for row in rows:
        total += row.astype(np.float32)
    assert (out == stored(total * factor, name)).all()
    if name != "float32":  # one rounding of the true mean, but for the rare double rounding
        exact = stored((rows.sum(axis=0) / ranks).astype(np.float32), name)
        assert (out != exact).sum() <= 0.01 * n


def test_fold_does_not_overflow_on_the_way():
    """Four times 60000 leaves float16's range, the mean does not; and order is the ranks'."""
    out = np.empty(1, np.int16)
    fold(stored([60000.0] * 4, "float16"), np.float32(0.25), out)
    assert value(out)[0] == value(stored([60000.0], "float16"))[0]
    out = np.empty(1, np.float32)
    fold(np.float32([1e30, 1.0, -1e30]), np.float32(1), out)
    assert out[0] == 0
    fold(np.float32([1e30, -1e30, 1.0]), np.float32(1), out)
    assert out[0] == 1


@formats
def test_add_accumulate_and_scale_round_once(name):
    rng = np.random.default_rng(1)
    a, b = (stored(rng.standard_normal(1025), name) for _ in range(2))
    wide = value(a).astype(np.float32) + value(b).astype(np.float32)
    total, sum32 = b.copy(), value(b).astype(np.float32)
    add(a, total)
    accumulate(a, sum32)
    assert (total == stored(wide, name)).all() and (sum32 == wide).all()
    third = np.float32(1 / 3)
    scale(total, third)
    assert (total == stored(value(stored(wide, name)).astype(np.float32) * third, name)).all()


@formats
@pytest.mark.parametrize("n", [0, 63, 64, 65, *SIZES])
def test_square_sum(name, n):
    x = stored(np.random.default_rng(n).standard_normal(n), name)
    exact = float(sum(Fraction(v) ** 2 for v in value(x)))
    assert square_sum(x) == pytest.approx(exact, rel=1e-14)
    assert square_sum(np.concatenate([x[:0], x])) == square_sum(x)


@formats
def test_square_sum_of_the_largest_number_is_finite(name):
    largest = {"float32": 3e38, "bfloat16": 3e38, "float16": 65504.0}[name]
    x = stored(np.full(1025, largest), name)
    assert square_sum(x) == pytest.approx(1025 * value(x)[0] ** 2, rel=1e-12)


# ---- inf and NaN ---------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_o015_one_bad_number_is_always_found(name, n, bad):
    """Every kernel that tests or passes on inf and NaN, on views at an offset of 1 too."""
    for place in sorted({0, n // 2, n - 1}):
        for offset in (0, 1):
            x = np.ones(n + offset + 1, np.float32)
            x[offset + place] = bad
            x = stored(x, name)[offset : offset + n]
            assert first_nonfinite(x) == place
            assert not np.isfinite(square_sum(x))
            mean = np.empty(n, x.dtype)
            fold(np.concatenate([stored(np.ones(n), name), x]), np.float32(0.5), mean)
            assert first_nonfinite(mean) == place
            for kernel in (add, accumulate):
                total = np.ones(n, np.float32) if kernel is accumulate else stored(np.ones(n), name)
                kernel(x, total)
                assert first_nonfinite(total) == place


@formats
def test_o015_what_lies_around_a_view_does_not_count(name):
    x = stored(np.r_[np.nan, np.ones(1024), np.inf], name)
    assert first_nonfinite(x[1:-1]) == -1 and square_sum(x[1:-1]) == 1024
    assert first_nonfinite(x[1:1]) == -1


@formats
def test_nan_fill(name):
    x = np.zeros(9, FORMATS[name].dtype)
    nan_fill(x[1:-1])
    assert np.isnan(value(x[1:-1])).all() and value(x[[0, -1]]).tolist() == [0, 0]


# ---- how kernels are compiled --------------------------------------------------------------------

PACKAGE = Path(zeromp.__file__).parent


def test_o015_all_kernels_are_compiled_through_one_door():
    """No jit but in `_jit`, whose two calls name both flags; the cache's hash sees all kernels."""
    users = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        jits = [c for c in calls if ast.unparse(c.func).split(".")[-1] in
                ("njit", "jit", "vectorize", "guvectorize", "stencil", "cfunc")]  # fmt: skip
        if path.name == "_jit.py":
            assert len(jits) == 2
            for call in jits:
                flags = {k.arg: ast.unparse(k.value) for k in call.keywords}
                assert (flags["fastmath"], flags["error_model"]) == ("False", "'numpy'")
        else:
            assert not jits, path
            assert "njit" not in path.read_text(), path
        if re.search(r"zeromp\._jit|from llvmlite", path.read_text()):
            users.add(path.relative_to(PACKAGE).as_posix())
    assert users | {"_jit.py"} == set(_jit.KERNEL_SOURCES)


def test_o015_no_kernel_has_fast_mathematics():
    found = {}
    for module in pkgutil.walk_packages(zeromp.__path__, "zeromp."):
        if module.name.removeprefix("zeromp.world.") not in ("mpi", "guard", "memory", "shared"):
            kernels = vars(importlib.import_module(module.name))
            found |= {n: f for n, f in kernels.items() if isinstance(f, Dispatcher)}
    assert {"convert", "fold_at", "_adamw", "_adamw_copy", "_sgd", "square_sum"} <= found.keys()
    for name, function in found.items():
        assert function.targetoptions["fastmath"] is False, name
        assert function.targetoptions["error_model"] == "numpy", name


# ---- the loss scale ------------------------------------------------------------------------------


def test_loss_scale_doubles_after_a_window_and_halves_at_once():
    s = LossScale(1024.0, window=3, dynamic=True)
    values = []
    for event in "+++ ++- +++-":
        if event == "+":
            s.applied()
        elif event == "-":
            s.skipped("inf")
        else:
            continue
        values.append(s.value)
    assert values == [1024, 1024, 2048, 2048, 2048, 1024, 1024, 1024, 2048, 1024]


def test_hysteresis_tolerates_overflows_until_the_scale_doubles():
    s = LossScale(1024.0, window=2, hysteresis=2, dynamic=True)
    s.skipped("inf")
    assert s.value == 1024
    s.skipped("inf")
    assert s.value == 512
    s.applied(), s.applied()
    assert s.value == 1024
    s.skipped("inf")
    assert s.value == 1024


def test_static_scale_never_moves():
    s = LossScale.for_format("bfloat16")
    for _ in range(2000):
        s.applied()
    s.skipped("inf")
    assert s.value == 1 and LossScale.for_format("float16").value == 65536


@pytest.mark.parametrize(
    "given", [{"value": 3.0}, {"value": np.nan}, {"value": 0.0}, {"value": -2.0}, {"floor": 0.0},
              {"window": 0}, {"hysteresis": 0}, {"patience": 0}]
)  # fmt: skip
def test_loss_scale_refuses_nonsense(given):
    with pytest.raises(ValueError, match="loss scale"):
        LossScale(**given)
