"""Arithmetic that numba does not have, as code for LLVM: sums along a row, exponentials, vectors.

[Note: same bits] A result depends on values and shapes alone: not on where an array starts in
memory, nor on how wide the processor's vectors are. So sums along a row are made in 32 lanes, whose
order is written out (`total`, `dot`), and each multiply-add that is rounded once is written as such
(`fused`): nothing is left to the compiler. NaN in, NaN out.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

intrinsic: Callable[[Any], Any] = extending.intrinsic

_LANES, _FLOAT, _INT = 32, ir.FloatType(), ir.IntType(32)

# ---- vectors, fused multiply-add, exp ------------------------------------------------------------


@intrinsic
def wide(_context: Any) -> Any:
    """Let the kernel that calls it use vectors as wide as the processor's: 512 bits, not 256."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # llvmlite knows names of attributes only, and this one has a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Code of x * y + z, rounded once, of numbers or of vectors."""
    suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.{suffix}"), (x, y, z)
    )


_LIMIT, _LOG2_E = 87.0, math.log2(math.e)
_ROUND = 1.5 * 2**23  # near this number, float32 has no digits after the point
# Cephes library, expf.c: ln 2, first a part so short that k times it is exact, and a polynomial for
# (e^x - 1 - x) / x^2 on |x| < ln(2) / 2.
_LN2 = 0.693359375, -2.12194440e-4
_P = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
      5.0000001201e-1)  # fmt: skip


def vector_exp(builder: Any, x: Any) -> Any:
    """Code of `exp`, of one number or of a vector of them."""
    kind = x.type
    whole = ir.VectorType(_INT, kind.count) if isinstance(kind, ir.VectorType) else _INT

    def number(value: float, of: Any = kind) -> Any:
        scalar = value if of is whole else float(np.float32(value))
        return ir.Constant(of, [scalar] * of.count if isinstance(of, ir.VectorType) else scalar)

    def clamp(y: Any, sign: str, limit: float) -> Any:
        return builder.select(builder.fcmp_ordered(sign, y, number(limit)), number(limit), y)

    y = clamp(clamp(x, ">", _LIMIT), "<", -_LIMIT)
    rounded = fused(builder, y, number(_LOG2_E), number(_ROUND))  # its lowest bits are an integer k
    k = builder.fsub(rounded, number(_ROUND))
    for part in _LN2:
        y = fused(builder, k, number(-part), y)
    p = number(_P[0])
    for coefficient in _P[1:]:
        p = fused(builder, p, y, number(coefficient))
    p = builder.fadd(fused(builder, builder.fmul(y, y), p, y), number(1))
    exponent = builder.shl(builder.bitcast(rounded, whole), number(23, whole))
    value = builder.bitcast(builder.add(builder.bitcast(p, whole), exponent), kind)
    return builder.select(builder.fcmp_ordered("<", x, number(-_LIMIT)), number(0), value)


@intrinsic
def exp(_context: Any, x: Any) -> Any:
    """e^x to one unit in the last place; 0 below -87, e^87 above 87, NaN for NaN."""
    return types.float32(x), lambda _ctx, builder, _sig, args: vector_exp(builder, args[0])


# ---- reductions along a row ----------------------------------------------------------------------


def _reduction(item: Callable[..., Any], combine: Callable[..., Any], start: float) -> Any:
    """Code that combines `start` with the `item` of each index of one or two arrays.

    Lane i takes items i, i + 32, and so on; then the upper half of the lanes is combined with the
    lower until one is left. (A plain loop is not vectorised: LLVM may not reorder it.)
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(signature.args, args, strict=True)
        arrays = [context.make_array(kind)(context, builder, value) for kind, value in pairs]
        size = builder.extract_value(arrays[0].shape, 0)
        whole = builder.and_(size, size.type(-_LANES))
        vector = ir.VectorType(_FLOAT, _LANES)
        with builder.goto_entry_block():
            lanes = builder.alloca(vector)
        builder.store(ir.Constant(vector, [_FLOAT(start)] * _LANES), lanes)

        def take(lane: Any, kind: Any, index: Any) -> None:
            at = (builder.bitcast(builder.gep(a.data, [index]), kind.as_pointer()) for a in arrays)
            values = (builder.load(pointer, align=4) for pointer in at)
            builder.store(combine(builder, builder.load(lane), item(builder, *values)), lane)

        with cgutils.for_range_slice(builder, size.type(0), whole, size.type(_LANES)) as (i, _):
            take(lanes, vector, i)
        first = builder.bitcast(lanes, _FLOAT.as_pointer())
        with cgutils.for_range_slice(builder, whole, size, size.type(1)) as (i, _):
            take(builder.gep(first, [builder.sub(i, whole)]), _FLOAT, i)

        result = builder.load(lanes)
        for half in (16, 8, 4, 2, 1):
            parts = [*range(half)], [*range(half, 2 * half)]
            masks = (ir.Constant(ir.VectorType(_INT, half), part) for part in parts)
            halves = (builder.shuffle_vector(result, result, mask) for mask in masks)
            result = combine(builder, *halves)
        return builder.extract_element(result, _INT(0))

    return generate


@intrinsic
def total(_context: Any, row: Any) -> Any:
    """Sum of a row."""
    return types.float32(row), _reduction(lambda _, x: x, lambda b, x, y: b.fadd(x, y), 0.0)


@intrinsic
def dot(_context: Any, row: Any, other: Any) -> Any:
    """Sum of the products of two rows of one length."""
    code = _reduction(lambda b, x, y: b.fmul(x, y), lambda b, x, y: b.fadd(x, y), 0.0)
    return types.float32(row, other), code


@intrinsic
def largest(_context: Any, row: Any) -> Any:
    """Maximum of a row, NaN left out; -inf if nothing remains."""
    take = lambda b, x, y: b.select(b.fcmp_ordered(">", y, x), y, x)  # noqa: E731
    return types.float32(row), _reduction(lambda _, x: x, take, -math.inf)
