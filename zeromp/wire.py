"""Number formats for storing and sending, arithmetic in float32, and the scaling of the loss.

[Note: 16-bit numbers] A 16-bit number is stored and sent, never computed with: each kernel widens
it to float32, computes, and rounds once on the way out (to nearest, ties to even; NaN stays NaN).
NumPy has no bfloat16, MPI sums none, and numba has no 16-bit arithmetic on CPUs, so both formats
travel as integers that hold their bits. The integer's signedness tells them apart in a kernel:

    float32    float32     the number itself
    bfloat16   uint16      upper half of a float32: 8 bits of exponent, 8 of significand
    float16    int16       IEEE 754 binary16: 5 bits of exponent, 11 of significand
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from zeromp._jit import kernel

F32 = NDArray[np.float32]
Bits = NDArray[Any]  # a float32, uint16 (bfloat16) or int16 (float16) array


@dataclass(frozen=True)
class Format:
    """One row of the table in [Note: 16-bit numbers]."""

    name: str
    dtype: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return int(self.dtype.itemsize)


FORMATS = {
    "float32": Format("float32", np.dtype(np.float32)),
    "bfloat16": Format("bfloat16", np.dtype(np.uint16)),
    "float16": Format("float16", np.dtype(np.int16)),
}


def format_of(name: str) -> Format:
    """Look a format up by name; ValueError if there is none."""
    if name not in FORMATS:
        raise ValueError(f"wire format {name!r} is unknown: use one of {', '.join(FORMATS)}")
    return FORMATS[name]


# ---- one number: bits to float32 and back --------------------------------------------------------


@intrinsic
def widen(_context: Any, bits: Any) -> Any:
    """Value, as float32, of a stored number."""
    if bits not in (types.float32, types.uint16, types.int16):
        return None

    def generate(_ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,) = args
        if signature.args[0] == types.float32:
            return x
        if signature.args[0] == types.int16:
            return builder.fpext(builder.bitcast(x, ir.HalfType()), ir.FloatType())
        i32 = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(x, i32), i32(16)), ir.FloatType())

    return types.float32(bits), generate


@intrinsic
def narrow(_context: Any, like: Any, value: Any) -> Any:
    """Stored form of a float32 in the format of `like` (whose value is not used)."""
    if value != types.float32 or like not in (types.float32, types.uint16, types.int16):
        return None

    def generate(_ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x = args
        if signature.args[0] == types.float32:
            return x
        if signature.args[0] == types.int16:
            return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
        i32 = ir.IntType(32)
        bits = builder.bitcast(x, i32)
        odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        nearest_even = builder.add(builder.add(bits, i32(0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", x, x)
        quiet = builder.or_(bits, i32(0x00400000))
        rounded = builder.select(is_nan, quiet, nearest_even)
        return builder.trunc(builder.lshr(rounded, i32(16)), ir.IntType(16))

    return like(like, value), generate


# ---- arrays of them ------------------------------------------------------------------------------

_EACH = ("float32", "uint16", "int16")


@kernel(*(f"void({a}[::1], {b}[::1])" for a in _EACH for b in _EACH))
def convert(source, out):  # type: ignore[no-untyped-def]  # (n,), (n,)
    """Write `source` to `out`, from and to any format, rounding at most once."""
    for i in range(out.size):
        out[i] = narrow(out[i], widen(source[i]))


@kernel(*(f"void(float32[::1], {a}[::1])" for a in _EACH[1:]))
def narrow_in_place(source, out):  # type: ignore[no-untyped-def]  # (n,), (n,)
    """Convert float32 numbers to 16 bits in their own memory: `out` is its first half."""
    block = np.empty(2048, out.dtype)
    for start in range(0, out.size, block.size):
        size = min(block.size, out.size - start)
        values, narrowed = source[start : start + size], block[:size]
        for i in range(size):
            narrowed[i] = narrow(narrowed[i], values[i])
        target = out[start : start + size]
        for i in range(size):
            target[i] = narrowed[i]


@kernel(*(f"void({a}[::1], {a}[::1])" for a in _EACH))
def add(source, total):  # type: ignore[no-untyped-def]  # (n,), (n,)
    """Add `source` to `total` in place: float32 addition, rounded to the format."""
    for i in range(total.size):
        total[i] = narrow(total[i], widen(total[i]) + widen(source[i]))


@kernel(*(f"void({a}[::1], float32[::1])" for a in _EACH))
def accumulate(source, total):  # type: ignore[no-untyped-def]  # (n,), (n,)
    """Add `source` of any format to a float32 `total` in place."""
    for i in range(total.size):
        total[i] += widen(source[i])


@kernel(*(f"void({a}[::1], float32)" for a in _EACH))
def scale(array, factor):  # type: ignore[no-untyped-def]  # (n,)
    """Multiply in place."""
    for i in range(array.size):
        array[i] = narrow(array[i], widen(array[i]) * factor)


@intrinsic
def _pointer(_context: Any, address: Any, like: Any) -> Any:
    """Pointer to numbers of the type that the array `like` holds."""
    if address != types.int64 or not isinstance(like, types.Array):
        return None
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(address, like), generate


_FROM_TO = [(a, b) for a in _EACH for b in _EACH if "float32" in (a, b) or a == b]


@kernel(*(f"void(int64[::1], {a}[::1], float32, {b}[::1])" for a, b in _FROM_TO))
def fold_at(addresses, like, factor, out):  # type: ignore[no-untyped-def]  # (N,), any, scalar, (n,)
    """Do as `fold` does with N pieces that lie at addresses, and hold numbers of `like`'s type."""
    block = 2048  # 8 kB of sums stay in the first-level cache
    sums = np.empty(block, np.float32)
    last = addresses.size - 1
    for start in range(0, out.size, block):
        size = min(block, out.size - start)
        total, target = sums[:size], out[start : start + size]
        first = carray(_pointer(addresses[0], like), start + size)[start:]
        final = carray(_pointer(addresses[last], like), start + size)[start:]
        if last == 0:
            for i in range(size):
                target[i] = narrow(target[i], widen(first[i]) * factor)
        elif last == 1:
            for i in range(size):
                target[i] = narrow(target[i], (widen(first[i]) + widen(final[i])) * factor)
        else:
            second = carray(_pointer(addresses[1], like), start + size)[start:]
            for i in range(size):
                total[i] = widen(first[i]) + widen(second[i])
            for rank in range(2, last):
                piece = carray(_pointer(addresses[rank], like), start + size)[start:]
                for i in range(size):
                    total[i] += widen(piece[i])
            for i in range(size):
                target[i] = narrow(target[i], (total[i] + widen(final[i])) * factor)


def fold(pieces: Bits, factor: np.float32, out: Bits) -> None:
    """Add the pieces of N ranks in rank order in float32, multiply, and round once.

    `pieces` holds rank 0's n numbers, then rank 1's, and so on: what an all-to-all delivers.
    """
    if out.size:
        first = pieces.__array_interface__["data"][0]
        ranks = np.arange(pieces.size // out.size, dtype=np.int64)
        fold_at(first + ranks * out.nbytes, pieces, factor, out)


@kernel(*(f"float64({a}[::1])" for a in _EACH))
def square_sum(array):  # type: ignore[no-untyped-def]  # (n,)
    """Sum of squares in float64; inf or NaN exactly if the array holds one.

    No square of a float32 overflows in float64. The 64 partial sums are written out, so that the
    result depends on the array alone, not on the processor's vector width.
    """
    lanes = np.zeros(64, np.float64)
    whole = array.size - array.size % 64
    for start in range(0, whole, 64):
        block = array[start : start + 64]
        for i in range(64):
            x = np.float64(widen(block[i]))
            lanes[i] += x * x
    total = 0.0
    for i in range(64):
        total += lanes[i]
    for i in range(whole, array.size):
        x = np.float64(widen(array[i]))
        total += x * x
    return total


@kernel(*(f"int64({a}[::1])" for a in _EACH))
def first_nonfinite(array):  # type: ignore[no-untyped-def]  # (n,)
    """Index of the first inf or NaN, or -1."""
    for i in range(array.size):
        if not np.isfinite(widen(array[i])):
            return i
    return -1


def nan_fill(array: Bits) -> None:
    """Fill an array in place with NaN of its format."""
    patterns = {"f": np.float32(np.nan), "u": np.uint16(0x7FC0), "i": np.int16(0x7E00)}
    array.fill(patterns[array.dtype.kind])


# ---- the loss scale ------------------------------------------------------------------------------


@dataclass
class LossScale:
    """Dynamic scale of the loss: gradients in float16 must neither overflow nor vanish.

    The scale is a power of two, so that it changes exponents and no significand. A step whose
    reduced gradients hold inf or NaN is skipped on all ranks (`Zero.step`) and told to `skipped`.
    In bfloat16 and float32 the scale is 1 and stays 1; skipping works there too.

    Parameters
    ----------
    value : float
        Current scale.
    window : int
        Applied steps in a row after which the scale doubles.
    hysteresis : int
        Overflows since the last doubling that are tolerated before the scale is halved: with 1, the
        first one halves it.
    floor : float
        The scale never falls below this, nor below 1e-30.
    patience : int
        Skipped steps in a row after which training stops with FloatingPointError on all ranks.
    dynamic : bool
        Whether the scale moves at all.
    """

    value: float = 1.0
    window: int = 1000
    hysteresis: int = 1
    floor: float = 1.0
    patience: int = 50
    dynamic: bool = False
    good_steps: int = field(default=0, init=False)
    bad_steps: int = field(default=0, init=False)
    tolerance: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and math.frexp(self.value)[0] == 0.5):
            raise ValueError(f"loss scale {self.value} must be a power of two, such as 65536")
        if self.floor <= 0 or self.window < 1 or self.hysteresis < 1 or self.patience < 1:
            raise ValueError(
                f"loss scale: floor {self.floor} must be above 0; window {self.window}, hysteresis "
                f"{self.hysteresis} and patience {self.patience} at least 1"
            )
        self.tolerance = self.hysteresis

    @classmethod
    def for_format(cls, name: str, initial: float = 65536.0) -> "LossScale":
        """Dynamic from `initial` for float16, constant 1 for the others."""
        return cls(value=initial, dynamic=True) if name == "float16" else cls()

    def applied(self) -> None:
        """Note a step without overflow."""
        self.good_steps, self.bad_steps = self.good_steps + 1, 0
        if self.dynamic and self.good_steps >= self.window:
            self.value, self.good_steps, self.tolerance = self.value * 2, 0, self.hysteresis

    def skipped(self, reason: str) -> None:
        """Note a step that was skipped for `reason`; FloatingPointError when patience is over."""
        self.good_steps, self.bad_steps = 0, self.bad_steps + 1
        if self.bad_steps >= self.patience:
            advice = ": look at the data and the learning rate"
            if self.dynamic and "NaN" in reason:
                advice = f"; a scale of the loss cannot mend that{advice}"
            elif self.dynamic:
                advice = f", at loss scale {self.value:g}: use bfloat16, or a lower learning rate"
            raise FloatingPointError(
                f"{self.bad_steps} steps in a row were skipped, the last because of "
                f"{reason}{advice}"
            )
        if not self.dynamic:
            return
        self.tolerance -= 1
        if self.tolerance <= 0:
            if self.value / 2 < self.floor:
                warnings.warn(
                    f"overflow at the lowest loss scale {self.value:g} ({reason})",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.value = max(self.value / 2, self.floor, 1e-30)
