"""The loops that layers need: everything but the matrix products, compiled, over float32 arrays.

Shapes: B batch, T time, C channels, H heads, V vocabulary; R rows of any kind, mostly B * T.

The same bits everywhere: see [Note: same bits] in `zeromp.vectors`. Sums down a column are made row
after row. NaN in, NaN out.
"""

import math

import numpy as np
from numpy.typing import NDArray

from zeromp._jit import inlined, kernel
from zeromp.vectors import dot, exp, largest, total, wide

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
_ZERO, _ONE = np.float32(0), np.float32(1)

# ---- layer norm and GELU -------------------------------------------------------------------------

_EPSILON = np.float32(1e-5)  # added to the variance, as in GPT-2
_BLOCK = 512  # slow loops write here first: near 4 kB apart, arrays seem to overlap (4K aliasing)
_SLOPE, _CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)


@kernel("void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[:, ::1])")
def layernorm(x: F32, weight: F32, bias: F32, stats: F32, y: F32) -> None:
    # x (R, C), weight (C,), bias (C,), stats (2, R), y (R, C)
    """Write ``y = (x - mean) * rstd * weight + bias``, and each row's mean and rstd to stats."""
    wide()
    for r in range(x.shape[0]):
        row, out = x[r], y[r]
        mean = total(row) / np.float32(row.size)
        for c in range(row.size):
            out[c] = row[c] - mean
        rstd = _ONE / np.sqrt(dot(out, out) / np.float32(row.size) + _EPSILON)
        for c in range(row.size):
            out[c] = out[c] * rstd * weight[c] + bias[c]
        stats[0, r], stats[1, r] = mean, rstd


@kernel("void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[:, ::1])")
def layernorm_again(x: F32, weight: F32, bias: F32, stats: F32, y: F32) -> None:
    # x (R, C), weight (C,), bias (C,), stats (2, R), y (R, C)
    """Write y as `layernorm` did, to the bit, from its statistics."""
    wide()
    for r in range(x.shape[0]):
        row, out = x[r], y[r]
        mean, rstd = stats[0, r], stats[1, r]
        for c in range(row.size):
            out[c] = (row[c] - mean) * rstd * weight[c] + bias[c]


@kernel(
    "void(float32[:, ::1], float32[::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], "
    "float32[::1], float32[::1])"
)
def layernorm_backward(
    x: F32, weight: F32, stats: F32, dy: F32, more: F32, dweight: F32, dbias: F32
) -> None:
    # x (R, C), weight (C,), stats (2, R), dy (R, C), more (R or 0, C), dweight (C,), dbias (C,)
    """Turn dy into dx, plus `more` if it has rows, in place; write dweight and dbias."""
    wide()
    size = weight.size
    normed, scaled = np.empty_like(weight), np.empty_like(weight)
    for c in range(size):
        dweight[c], dbias[c] = _ZERO, _ZERO
    for r in range(x.shape[0]):
        row, d = x[r], dy[r]
        mean, rstd = stats[0, r], stats[1, r]
        for c in range(size):
            normed[c] = (row[c] - mean) * rstd
            scaled[c] = d[c] * weight[c]
        for c in range(size):
            dweight[c] += d[c] * normed[c]
            dbias[c] += d[c]
        shift = total(scaled) / np.float32(size)
        slope = dot(scaled, normed) / np.float32(size)
        for c in range(size):
            d[c] = (scaled[c] - shift - normed[c] * slope) * rstd
        if more.shape[0] > 0:
            add = more[r]
            for c in range(size):
                d[c] += add[c]


@inlined
def _gelu_exp(z):  # type: ignore[no-untyped-def]
    """e^(-2 u), u as in `layers.gelu`."""
    return exp(-_SLOPE * (z + _CUBE * z * z * z))


@kernel("void(float32[:, ::1], float32[::1], float32[:, ::1])")
def gelu(x: F32, bias: F32, y: F32) -> None:  # (R, C), (C,), (R, C)
    """Write ``y = z / 2 * (1 + tanh(u)) = z * sigmoid(2 u)``, z and u as in `layers.gelu`."""
    wide()
    block = np.empty(_BLOCK, np.float32)
    for r in range(x.shape[0]):
        for start in range(0, x.shape[1], _BLOCK):
            row, out = x[r, start : start + _BLOCK], y[r, start : start + _BLOCK]
            b = bias[start : start + _BLOCK]
            for i in range(row.size):
                z = row[i] + b[i]
                block[i] = z / (_ONE + _gelu_exp(z))
            for i in range(row.size):
                out[i] = block[i]


@kernel("void(float32[:, ::1], float32[::1], float32[:, ::1], float32[::1])")
def gelu_backward(x: F32, bias: F32, dy: F32, dbias: F32) -> None:  # (R, C), (C,), (R, C), (C,)
    """Turn dy into dx in place; write its sum over all rows to dbias."""
    wide()
    block = np.empty(_BLOCK, np.float32)
    for c in range(dbias.size):
        dbias[c] = _ZERO
    for r in range(x.shape[0]):
        for start in range(0, x.shape[1], _BLOCK):
            row, d = x[r, start : start + _BLOCK], dy[r, start : start + _BLOCK]
            b, sums = bias[start : start + _BLOCK], dbias[start : start + _BLOCK]
            for i in range(row.size):
                z = row[i] + b[i]
                e = _gelu_exp(z)
                s = _ONE / (_ONE + e)
                slope = _SLOPE * (_ONE + np.float32(3) * _CUBE * z * z)
                block[i] = s + z * (s * (e * s)) * slope
            for i in range(row.size):
                block[i] *= d[i]
            for i in range(row.size):
                d[i] = block[i]
                sums[i] += block[i]


# ---- losses --------------------------------------------------------------------------------------


@kernel("float64(float32[:, ::1], int64[::1], float32)")
def cross_entropy(logits: F32, targets: I64, factor: np.float32) -> float:  # (R, V), (R,), scalar
    """Sum of -log softmax(logits)[target], target >= 0; logits become factor * its gradient."""
    wide()
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
        share = factor / norm
        for v in range(row.size):
            row[v] *= share
        row[target] -= factor
    return loss


# ---- biases, embeddings, dropout -----------------------------------------------------------------


@kernel("void(float32[:, ::1], float32[::1])")
def bias_add(y: F32, bias: F32) -> None:  # (R, C), (C,)
    """Add the bias to each row of y in place."""
    wide()
    for r in range(y.shape[0]):
        row = y[r]
        for c in range(row.size):
            row[c] += bias[c]


@kernel("void(float32[:, ::1], float32[::1], float32[:, ::1])")
def residual_add(y: F32, bias: F32, residual: F32) -> None:  # (R, C), (C,), (R, C)
    """Add the bias, then the residual, to y in place."""
    wide()
    for r in range(y.shape[0]):
        row, more = y[r], residual[r]
        for c in range(row.size):
            row[c] = (row[c] + bias[c]) + more[c]


@kernel("void(float32[:, ::1], float32[::1])")
def bias_gradient(dy: F32, dbias: F32) -> None:  # (R, C), (C,)
    """Write the sum of the rows of dy, added from the first to the last."""
    wide()
    for c in range(dbias.size):
        dbias[c] = _ZERO
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
