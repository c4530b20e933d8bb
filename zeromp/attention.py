"""Causal attention, compiled: one head after the other, 32 queries at a time.

Shapes: B batch, T time, C channels, H heads, D = C / H. T and D are padded to multiples of 32, Tp
and Dp, with zeros.

[Note: attention] The scores of 32 queries and of all keys that they may see lie in one strip of
scratch, keys down and queries across, so that a softmax is a loop over rows of 32. Nothing of size
T * T is ever kept: the forward leaves the logarithm of each row's sum of exponentials, and the
backward makes the probabilities anew from it (Dao et al. 2022, arXiv:2205.14135, section 3). Keys
that come after all 32 queries are skipped.
"""

import numpy as np
from numpy.typing import NDArray

from zeromp._jit import inlined, kernel
from zeromp.tiles import (
    multiply,
    multiply_rows,
    strip_exp,
    strip_largest,
    strip_slopes,
    transpose,
)
from zeromp.vectors import dot, wide

F32 = NDArray[np.float32]

_ZERO, _ONE, _LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


def scratch_size(time: int, depth: int, backward: bool) -> int:
    """Count the numbers of scratch that a kernel needs."""
    long, deep = -(-time // 32) * 32, -(-depth // 32) * 32
    parts = (10, 2) if backward else (4, 1)
    return parts[0] * long * deep + parts[1] * 32 * long + 32 * deep + 96


@inlined
def _take(rows, column, start, time, depth, scratch, to, deep):  # type: ignore[no-untyped-def]
    """Copy a head, T rows of D numbers, into padded scratch."""
    for t in range(time):
        source = rows[start + t, column : column + depth]
        target = scratch[to + t * deep : to + t * deep + depth]
        for d in range(source.size):
            target[d] = source[d]
        for d in range(depth, deep):
            scratch[to + t * deep + d] = _ZERO
    long = (time + 31) // 32 * 32
    for i in range(to + time * deep, to + long * deep):
        scratch[i] = _ZERO


@inlined
def _panels(scratch, source, to, long, deep, width):  # type: ignore[no-untyped-def]
    """Write (Tp, Dp) as panels: for each `width` rows, Dp rows of `width` numbers."""
    for t in range(0, long, 16):
        panel = to + t // width * width * deep + t % width
        for d in range(0, deep, 16):
            transpose(scratch, scratch, source + t * deep + d, deep, panel + d * width, width)


@inlined
def _put(scratch, source, deep, out, start, column, time, depth):  # type: ignore[no-untyped-def]
    """Copy (Tp, Dp) to T rows of D numbers, from row `start` of out on."""
    for t in range(time):
        given = scratch[source + t * deep : source + t * deep + depth]
        row = out[start + t, column : column + depth]
        for d in range(row.size):
            row[d] = given[d]


@inlined
def _give(scratch, source, target, deep, out, start, column, time, depth):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Write (Dp, 32) as up to 32 rows of D numbers, from row `start` of out on."""
    for t in range(0, 32, 16):
        for d in range(0, deep, 16):
            transpose(scratch, scratch, source + d * 32 + t, 32, target + t * deep + d, deep)
    _put(scratch, target, deep, out, start, column, time, depth)


@inlined
def _fill_future(scratch, strip, q, value):  # type: ignore[no-untyped-def]
    """Fill those scores of a strip whose key comes after their query, q to q + 31."""
    for k in range(q + 1, q + 32):
        row = scratch[strip + k * 32 : strip + k * 32 + k - q]
        for i in range(row.size):
            row[i] = value


@inlined
def _divide(scratch, rows, deep, total):  # type: ignore[no-untyped-def]
    """Divide the columns of (Dp, 32) by 32 totals, and leave what these turn into."""
    for i in range(32):
        total[i] = _ONE / total[i]
    for d in range(deep):
        row = scratch[rows + d * 32 : rows + d * 32 + 32]
        for i in range(32):
            row[i] *= total[i]


@kernel("void(float32[:, ::1], int64, int64, float32[::1], float32[:, ::1], float32[::1])")
def forward(qkv, time, depth, scratch, y, stats):  # type: ignore[no-untyped-def]
    # qkv (B T, 3 C), scalars, scratch of `scratch_size`, y (B T, C), stats (B H T,)
    """Write ``softmax(q k^T / sqrt(D)) v`` to y, and each row's log of the sum of exponentials."""
    wide()
    scale = _ONE / np.sqrt(np.float32(depth))
    long, deep = (time + 31) // 32 * 32, (depth + 31) // 32 * 32
    width = y.shape[1]
    heads, area = width // depth, long * deep
    rows, values, keys, queries = 0, area, 2 * area, 3 * area  # q or k; v; panels of k and of q
    strip = 4 * area
    out = strip + 32 * long
    lanes = out + 32 * deep
    top, total = scratch[lanes : lanes + 32], scratch[lanes + 32 : lanes + 64]
    for b in range(y.shape[0] // time):
        for h in range(heads):
            start, column = b * time, h * depth
            _take(qkv, column, start, time, depth, scratch, rows, deep)
            _panels(scratch, rows, queries, long, deep, 32)
            _take(qkv, width + column, start, time, depth, scratch, rows, deep)
            _panels(scratch, rows, keys, long, deep, 16)
            _take(qkv, 2 * width + column, start, time, depth, scratch, values, deep)
            for q in range(0, long, 32):
                seen = q + 32
                for k in range(0, seen, 8):
                    a = keys + k // 16 * 16 * deep + k % 16
                    multiply(scratch, scratch, scratch, a, queries + q * deep, strip + k * 32,
                             deep, 16, 32, 32, False)  # fmt: skip
                _fill_future(scratch, strip, q, _LOWEST)
                strip_largest(scratch, scratch, strip, lanes, seen)
                strip_exp(scratch, scratch, scratch, strip, lanes, lanes + 32, seen, scale)
                for d in range(0, deep, 8):
                    multiply(scratch, scratch, scratch, values + d, strip, out + d * 32,
                             seen, deep, 32, 32, False)  # fmt: skip
                count = min(32, time - q)
                row = stats[(b * heads + h) * time + q : (b * heads + h) * time + q + count]
                for i in range(count):
                    row[i] = top[i] * scale + np.float32(np.log(total[i]))
                _divide(scratch, out, deep, total)
                _give(scratch, out, strip, deep, y, start + q, column, count, depth)


@kernel(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], float32[:, ::1], int64, int64, "
    "float32[::1], float32[:, ::1])"
)
def backward(qkv, y, stats, dy, time, depth, scratch, dqkv):  # type: ignore[no-untyped-def]
    # qkv (B T, 3 C), y (B T, C), stats (B H T,), dy (B T, C), scalars, scratch, dqkv (B T, 3 C)
    """Write the gradient of qkv."""
    wide()
    scale = _ONE / np.sqrt(np.float32(depth))
    long, deep = (time + 31) // 32 * 32, (depth + 31) // 32 * 32
    width = y.shape[1]
    heads, area = width // depth, long * deep
    q_rows, k_rows, d_rows, v_rows = 0, area, 2 * area, 3 * area
    q_panels, k_panels, d_panels, v_panels = 4 * area, 5 * area, 6 * area, 7 * area
    dk, dv = 8 * area, 9 * area
    strip, slopes = 10 * area, 10 * area + 32 * long
    out = slopes + 32 * long
    lanes = out + 32 * deep
    norm, delta = scratch[lanes : lanes + 32], scratch[lanes + 32 : lanes + 64]
    for b in range(y.shape[0] // time):
        for h in range(heads):
            start, column = b * time, h * depth
            _take(qkv, column, start, time, depth, scratch, q_rows, deep)
            _take(qkv, width + column, start, time, depth, scratch, k_rows, deep)
            _take(qkv, 2 * width + column, start, time, depth, scratch, v_rows, deep)
            _take(dy, column, start, time, depth, scratch, d_rows, deep)
            _panels(scratch, q_rows, q_panels, long, deep, 32)
            _panels(scratch, d_rows, d_panels, long, deep, 32)
            _panels(scratch, k_rows, k_panels, long, deep, 16)
            _panels(scratch, v_rows, v_panels, long, deep, 16)
            for q in range(0, long, 32):
                seen, count = q + 32, min(32, time - q)
                norm[:], delta[:] = _ZERO, _ZERO
                norm[:count] = stats[
                    (b * heads + h) * time + q : (b * heads + h) * time + q + count
                ]
                for i in range(count):
                    given = y[start + q + i, column : column + depth]
                    got = dy[start + q + i, column : column + depth]
                    delta[i] = dot(given, got)
                for k in range(0, seen, 8):
                    panel = k // 16 * 16 * deep + k % 16
                    multiply(scratch, scratch, scratch, k_panels + panel, q_panels + q * deep,
                             strip + k * 32, deep, 16, 32, 32, False)  # fmt: skip
                    multiply(scratch, scratch, scratch, v_panels + panel, d_panels + q * deep,
                             slopes + k * 32, deep, 16, 32, 32, False)  # fmt: skip
                strip_slopes(scratch, scratch, scratch, scratch, strip, slopes, lanes, lanes + 32,
                             seen, scale)  # fmt: skip
                _fill_future(scratch, strip, q, _ZERO)
                _fill_future(scratch, slopes, q, _ZERO)
                for d in range(0, deep, 8):
                    multiply(scratch, scratch, scratch, k_rows + d, slopes, out + d * 32,
                             seen, deep, 32, 32, False)  # fmt: skip
                for k in range(0, seen, 8):
                    for d in range(0, deep, 32):
                        at = k * deep + d
                        multiply_rows(scratch, scratch, scratch, strip + k * 32,
                                      d_rows + q * deep + d, dv + at, 32, 1, deep, deep, k < q)  # fmt: skip  # noqa: E501
                        multiply_rows(scratch, scratch, scratch, slopes + k * 32,
                                      q_rows + q * deep + d, dk + at, 32, 1, deep, deep, k < q)  # fmt: skip  # noqa: E501
                _give(scratch, out, strip, deep, dqkv, start + q, column, count, depth)
            _put(scratch, dk, deep, dqkv, start, width + column, time, depth)
            _put(scratch, dv, deep, dqkv, start, 2 * width + column, time, depth)
