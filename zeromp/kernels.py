"""The loops that layers need: everything but the matrix products, compiled, over float32 arrays.

Shapes: B batch, T time, C channels, H heads, V vocabulary; R rows of any kind, mostly B * T.

[Note: same bits] A result depends on values and shapes alone: not on where an array starts in
memory, nor on how wide the processor's vectors are. So sums along a row are made in 32 lanes, whose
order is written out (`total`, `dot`), and sums down a column row after row. NaN in, NaN out.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numpy.typing import NDArray

from zeromp._jit import inlined, kernel

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
intrinsic: Callable[[Any], Any] = extending.intrinsic

_LANES, _FLOAT, _INT = 32, ir.FloatType(), ir.IntType(32)

# ---- reductions along a row, exp -----------------------------------------------------------------


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


_ZERO, _ONE, _LIMIT = np.float32(0), np.float32(1), np.float32(87)
_ROUND = np.float32(1.5 * 2**23)  # near this number, float32 has no digits after the point
_LOG2_E = np.float32(math.log2(math.e))
# Cephes library, expf.c: ln 2, first a part so short that k times it is exact, and a polynomial for
# (e^x - 1 - x) / x^2 on |x| < ln(2) / 2.
_LN2 = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P = 5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3
_P0, _P1, _P2, _P3, _P4, _P5 = map(np.float32, (*_P, 1.9875691500e-4))


@inlined
def exp(x: np.float32) -> np.float32:
    """e^x to one unit in the last place; 0 below -87, e^87 above 87, NaN for NaN."""
    y = _LIMIT if x > _LIMIT else (-_LIMIT if x < -_LIMIT else x)
    rounded = np.float32(y * _LOG2_E + _ROUND)  # its lowest bits are the integer k
    k = rounded - _ROUND
    y = (y - k * _LN2[0]) - k * _LN2[1]
    p = ((((_P5 * y + _P4) * y + _P3) * y + _P2) * y + _P1) * y + _P0
    exponent = np.int32((rounded.view(np.int32) << 23) + (127 << 23))
    return _ZERO if x < -_LIMIT else (p * (y * y) + y + _ONE) * exponent.view(np.float32)


# ---- layer norm and GELU -------------------------------------------------------------------------

_EPSILON = np.float32(1e-5)  # added to the variance, as in GPT-2
_BLOCK = 512  # slow loops write here first: near 4 kB apart, arrays seem to overlap (4K aliasing)
_SLOPE, _CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)


@kernel("void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[:, ::1])")
def layernorm(x: F32, weight: F32, bias: F32, stats: F32, y: F32) -> None:
    # x (R, C), weight (C,), bias (C,), stats (2, R), y (R, C)
    """Write ``y = (x - mean) * rstd * weight + bias``, and each row's mean and rstd to stats."""
    for r in range(x.shape[0]):
        row, out = x[r], y[r]
        mean = total(row) / np.float32(row.size)
        for c in range(row.size):
            out[c] = row[c] - mean
        rstd = _ONE / np.sqrt(dot(out, out) / np.float32(row.size) + _EPSILON)
        for c in range(row.size):
            out[c] = out[c] * rstd * weight[c] + bias[c]
        stats[0, r], stats[1, r] = mean, rstd


@kernel(
    "void(float32[:, ::1], float32[::1], float32[:, ::1], float32[:, ::1], "
    "float32[::1], float32[::1])"
)
def layernorm_backward(x: F32, weight: F32, stats: F32, dy: F32, dweight: F32, dbias: F32) -> None:
    # x (R, C), weight (C,), stats (2, R), dy (R, C), dweight (C,), dbias (C,)
    """Turn dy into dx in place; write dweight and dbias."""
    dweight[:], dbias[:] = _ZERO, _ZERO
    normed, scaled = np.empty_like(weight), np.empty_like(weight)
    for r in range(x.shape[0]):
        row, d = x[r], dy[r]
        mean, rstd = stats[0, r], stats[1, r]
        for c in range(row.size):
            normed[c] = (row[c] - mean) * rstd
            scaled[c] = d[c] * weight[c]
            dweight[c] += d[c] * normed[c]
            dbias[c] += d[c]
        shift = total(scaled) / np.float32(row.size)
        slope = dot(scaled, normed) / np.float32(row.size)
        for c in range(row.size):
            d[c] = (scaled[c] - shift - normed[c] * slope) * rstd


@kernel("void(float32[::1], float32[::1])")
def gelu(x: F32, y: F32) -> None:  # (n,), (n,)
    """Write ``y = x / 2 * (1 + tanh(u)) = x * sigmoid(2 u)``, u as in `layers.gelu`."""
    block = np.empty(_BLOCK, np.float32)
    for start in range(0, x.size, _BLOCK):
        z, out = x[start : start + _BLOCK], y[start : start + _BLOCK]
        for i in range(z.size):
            block[i] = _ONE + exp(-_SLOPE * (z[i] + _CUBE * z[i] * z[i] * z[i]))
        for i in range(z.size):
            out[i] = z[i] / block[i]


@kernel("void(float32[::1], float32[::1])")
def gelu_backward(x: F32, dy: F32) -> None:  # (n,), (n,)
    """Turn dy into dx in place."""
    block = np.empty(_BLOCK, np.float32)
    for start in range(0, x.size, _BLOCK):
        z, d = x[start : start + _BLOCK], dy[start : start + _BLOCK]
        for i in range(z.size):
            e = exp(-_SLOPE * (z[i] + _CUBE * z[i] * z[i] * z[i]))
            s = _ONE / (_ONE + e)
            slope = _SLOPE * (_ONE + np.float32(3) * _CUBE * z[i] * z[i])
            block[i] = s + z[i] * (s * (e * s)) * slope
        for i in range(z.size):
            d[i] *= block[i]


# ---- softmax and losses --------------------------------------------------------------------------


@kernel("void(float32[:, ::1], float32)")
def causal_softmax(scores: F32, scale: np.float32) -> None:  # (R, T), R = B * H * T, scalar
    """Turn scores into probabilities in place: row t of each T sees columns 0 to t, 0 elsewhere."""
    for r in range(scores.shape[0]):
        seen = r % scores.shape[1] + 1
        row = scores[r, :seen]
        top = largest(row)
        for t in range(row.size):
            row[t] = exp((row[t] - top) * scale)
        factor = _ONE / total(row)
        for t in range(row.size):
            row[t] *= factor
        scores[r, seen:] = _ZERO


@kernel("void(float32[:, ::1], float32[:, ::1], float32)")
def causal_softmax_backward(p: F32, d: F32, scale: np.float32) -> None:  # (R, T), (R, T), scalar
    """Turn d, the gradient of the probabilities p, into that of the scores in place."""
    for r in range(d.shape[0]):
        seen = r % d.shape[1] + 1
        share, row = p[r, :seen], d[r, :seen]
        mean = dot(share, row)
        for t in range(row.size):
            row[t] = share[t] * (row[t] - mean) * scale
        d[r, seen:] = _ZERO


@kernel("float64(float32[:, ::1], int64[::1], float32)")
def cross_entropy(logits: F32, targets: I64, factor: np.float32) -> float:  # (R, V), (R,), scalar
    """Sum of -log softmax(logits)[target], target >= 0; logits become factor * its gradient."""
    loss = 0.0
    for r in range(logits.shape[0]):
        row, target = logits[r], targets[r]
        if target < 0:
            row[:] = _ZERO
            continue
        top = largest(row)
        chosen = row[target] - top
        for v in range(row.size):
            row[v] = exp(row[v] - top)
        norm = total(row)
        loss += math.log(np.float64(norm)) - np.float64(chosen)
        for v in range(row.size):
            row[v] *= factor / norm
        row[target] -= factor
    return loss


# ---- biases, embeddings, dropout -----------------------------------------------------------------


@kernel("void(float32[:, ::1], float32[::1])")
def bias_add(y: F32, bias: F32) -> None:  # (R, C), (C,)
    """Add the bias to each row of y in place."""
    for r in range(y.shape[0]):
        row = y[r]
        for c in range(row.size):
            row[c] += bias[c]


@kernel("void(float32[:, ::1], float32[::1])")
def bias_gradient(dy: F32, dbias: F32) -> None:  # (R, C), (C,)
    """Write the sum of the rows of dy, added from the first to the last."""
    dbias[:] = _ZERO
    for r in range(dy.shape[0]):
        row = dy[r]
        for c in range(row.size):
            dbias[c] += row[c]


@kernel("void(int64[::1], float32[:, ::1], float32[:, ::1], int64, float32[:, ::1])")
def embedding(ids: I64, tokens: F32, positions: F32, time: int, x: F32) -> None:
    # ids (B * T,), tokens (V, C), positions (at least T, C), scalar T, x (B * T, C)
    """Write ``x[b, t] = tokens[ids[b, t]] + positions[t]``."""
    for r in range(ids.size):
        token, position, row = tokens[ids[r]], positions[r % time], x[r]
        for c in range(row.size):
            row[c] = token[c] + position[c]


@kernel("void(int64[::1], float32[:, ::1], float32[:, ::1])")
def scatter_add(ids: I64, dx: F32, table: F32) -> None:  # (R,), (R, C), (V, C)
    """Add row r of dx to row ids[r] of the table, in place, from the first to the last."""
    for r in range(ids.size):
        row, d = table[ids[r]], dx[r]
        for c in range(row.size):
            row[c] += d[c]


@inlined
def mix(z: np.uint64) -> np.uint64:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel("void(float32[:, ::1], uint64, uint64, float64, float32[:, ::1])")
def dropout(x: F32, key: np.uint64, first_sample: np.uint64, rate: float, y: F32) -> None:
    # x (B, n), scalars, y (B, n)
    """Write ``y = x / (1 - rate)``, and 0 with probability `rate`.

    Number i of sample b stays or goes by a hash of (key, first_sample + b, i) and of nothing else.
    """
    golden, block = np.uint64(0x9E3779B97F4A7C15), 512  # words made at once: they stay in cache
    threshold, scale = np.uint32(rate * 2.0**32), np.float32(1.0 / (1.0 - rate))
    words = np.empty(block, np.uint64)
    bits = words.view(np.uint32)
    for b in range(x.shape[0]):
        stream = mix(mix(key) + golden * (first_sample + np.uint64(b)))
        for start in range(0, x.shape[1], 2 * block):
            for i in range(block):
                words[i] = mix(stream + golden * np.uint64(start // 2 + i))
            row, out = x[b, start : start + 2 * block], y[b, start : start + 2 * block]
            for i in range(row.size):
                out[i] = row[i] * scale if bits[i] >= threshold else _ZERO
