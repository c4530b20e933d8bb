"""RMS norm, SwiGLU and rotary positions, forward and backward, compiled: what Llama has of its own.

Shapes: B batch, T time, C channels, H heads, D = C / H, I hidden channels; R rows, mostly B * T;
"..." stands for any leading axes. Rules and bits as in `zeromp.layers` and `zeromp.kernels`.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from zeromp._jit import kernel
from zeromp.layers import New, check_float
from zeromp.pool import fresh
from zeromp.vectors import dot, exp, wide
from zeromp.wire import F32

_ZERO, _ONE = np.float32(0), np.float32(1)
_EPSILON = np.float32(1e-5)  # added to the mean square, as in Llama 2
_BLOCK = 512  # slow loops write here first: near 4 kB apart, arrays seem to overlap (4K aliasing)
_BASE = 10000.0  # of the rotation's wavelengths


# ---- loops ---------------------------------------------------------------------------------------


@kernel("void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1])")
def _rmsnorm(x: F32, weight: F32, stats: F32, y: F32) -> None:  # (R, C), (C,), (R,), (R, C)
    """Write each row's 1 / root mean square to stats, and ``y = x * rrms * weight``."""
    wide()
    for r in range(x.shape[0]):
        row, out = x[r], y[r]
        rrms = _ONE / np.sqrt(dot(row, row) / np.float32(row.size) + _EPSILON)
        for c in range(row.size):
            out[c] = row[c] * rrms * weight[c]
        stats[r] = rrms


@kernel("void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1])")
def _rmsnorm_again(x: F32, weight: F32, stats: F32, y: F32) -> None:
    """Write y as `_rmsnorm` did, to the bit, from its statistics."""
    wide()
    for r in range(x.shape[0]):
        row, out, rrms = x[r], y[r], stats[r]
        for c in range(row.size):
            out[c] = row[c] * rrms * weight[c]


@kernel(
    "void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[:, ::1], "
    "float32[::1])"
)
def _rmsnorm_backward(x: F32, weight: F32, stats: F32, dy: F32, more: F32, dweight: F32) -> None:
    # x (R, C), weight (C,), stats (R,), dy (R, C), more (R or 0, C), dweight (C,)
    """Turn dy into dx, plus `more` if it has rows, in place; write dweight."""
    wide()
    size = weight.size
    normed, scaled = np.empty_like(weight), np.empty_like(weight)
    for c in range(size):
        dweight[c] = _ZERO
    for r in range(x.shape[0]):
        row, d, rrms = x[r], dy[r], stats[r]
        for c in range(size):
            normed[c] = row[c] * rrms
            scaled[c] = d[c] * weight[c]
        for c in range(size):
            dweight[c] += d[c] * normed[c]
        slope = dot(scaled, normed) / np.float32(size)
        for c in range(size):
            d[c] = (scaled[c] - normed[c] * slope) * rrms
        if more.shape[0] > 0:
            add = more[r]
            for c in range(size):
                d[c] += add[c]


@kernel("void(float32[:, ::1], float32[:, ::1])")
def _swiglu(x: F32, y: F32) -> None:  # (R, 2 I), (R, I)
    """Write ``y = gate * sigmoid(gate) * up``."""
    wide()
    block = np.empty(_BLOCK, np.float32)
    size = y.shape[1]
    for r in range(x.shape[0]):
        for start in range(0, size, _BLOCK):
            out = y[r, start : start + _BLOCK]
            gate, up = x[r, start : start + out.size], x[r, size + start : size + start + out.size]
            for i in range(out.size):
                block[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
            for i in range(out.size):
                out[i] = block[i]


@kernel("void(float32[:, ::1], float32[:, ::1], float32[:, ::1])")
def _swiglu_backward(x: F32, dy: F32, dx: F32) -> None:  # (R, 2 I), (R, I), (R, 2 I)
    """Write dx."""
    wide()
    gates, ups = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    size = dy.shape[1]
    for r in range(x.shape[0]):
        for start in range(0, size, _BLOCK):
            d = dy[r, start : start + _BLOCK]
            gate, up = x[r, start : start + d.size], x[r, size + start : size + start + d.size]
            for i in range(d.size):
                e = exp(-gate[i])
                s = _ONE / (_ONE + e)
                gates[i] = d[i] * up[i] * (s + gate[i] * (s * (e * s)))
                ups[i] = d[i] * (gate[i] * s)
            dgate, dup = dx[r, start : start + d.size], dx[r, size + start : size + start + d.size]
            for i in range(d.size):
                dgate[i] = gates[i]
            for i in range(d.size):
                dup[i] = ups[i]


@kernel("void(float32[:, ::1], float32[:, ::1], float32[:, ::1], int64)")
def _rotate(qkv: F32, cosines: F32, sines: F32, heads: int) -> None:
    # qkv (B * T, 3 C), cosines and sines (T, D / 2)
    """Rotate the queries and keys of each head in place."""
    wide()
    half = cosines.shape[1]
    for r in range(qkv.shape[0]):
        cosine, sine = cosines[r % cosines.shape[0]], sines[r % cosines.shape[0]]
        for head in range(2 * heads):  # those of the queries, then those of the keys
            first = qkv[r, 2 * half * head : 2 * half * head + half]
            second = qkv[r, 2 * half * head + half : 2 * half * (head + 1)]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * cosine[i] - b * sine[i]
                second[i] = b * cosine[i] + a * sine[i]


# ---- pairs ---------------------------------------------------------------------------------------


def _rows(array: F32) -> F32:
    """View an array of shape (..., C) as (R, C)."""
    assert array.flags.c_contiguous and array.dtype == np.float32
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def rmsnorm(x: F32, w: F32, new: New = fresh) -> tuple[F32, F32]:
    """Return ``x / sqrt(mean of x^2 + 1e-5) * w`` along the last axis, and statistics.

    Parameters
    ----------
    x : ndarray of shape (..., C)
    w : ndarray of shape (C,)
    new : callable

    Returns
    -------
    y : ndarray of shape (..., C)
    stats : ndarray of shape (R,)
        1 / root mean square of each row, for the backward.

    References
    ----------
    Zhang, Sennrich 2019, arXiv:1910.07467, section 3.
    """
    check_float(w, x.shape[-1:], "RMS norm weight")
    rows, y = _rows(x), new(x.shape)
    stats = new((len(rows),))
    _rmsnorm(rows, w, stats, _rows(y))
    return y, stats


def rmsnorm_again(x: F32, w: F32, stats: F32, new: New = fresh) -> F32:
    """Return y of `rmsnorm` anew, to the bit: cheaper than the memory to keep it."""
    y = new(x.shape)
    _rmsnorm_again(_rows(x), w, stats, _rows(y))
    return y


def rmsnorm_backward(
    x: F32, w: F32, stats: F32, dy: F32, dw: F32 | None, more: F32 | None = None
) -> F32:
    """Turn dy into dx, plus `more`, in place and return it; write dw, shape (C,)."""
    check_float(dy, x.shape, "gradient of RMS norm")
    check_float(stats, (x.size // x.shape[-1],), "RMS norm statistics")
    dw = np.empty_like(w) if dw is None else dw
    for array in (w, dw):
        check_float(array, x.shape[-1:], "RMS norm weight or its gradient")
    more = x[:0] if more is None else more
    _rmsnorm_backward(_rows(x), w, stats, _rows(dy), _rows(more), dw)
    return dy


def swiglu(x: F32, new: New = fresh) -> F32:
    """Return ``gate * sigmoid(gate) * up``, shape (..., I).

    Parameters
    ----------
    x : ndarray of shape (..., 2 I)
        Gate and up side by side.
    new : callable

    References
    ----------
    Shazeer 2020, arXiv:2002.05202, section 2.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"SwiGLU is given {x.shape[-1]} channels; it needs an even number of them")
    y = new((*x.shape[:-1], x.shape[-1] // 2))
    _swiglu(_rows(x), _rows(y))
    return y


def swiglu_backward(x: F32, dy: F32, new: New = fresh) -> F32:
    """Return dx, shape (..., 2 I), of `swiglu`."""
    check_float(dy, (*x.shape[:-1], x.shape[-1] // 2), "gradient of SwiGLU")
    dx = new(x.shape)
    _swiglu_backward(_rows(x), _rows(dy), _rows(dx))
    return dx


@functools.lru_cache(maxsize=16)
def _angles(time: int, half: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, shape (T, D / 2) each."""
    waves = _BASE ** (-np.arange(half) / half)
    angles = np.arange(time)[:, None] * waves
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(qkv: F32, heads: int, back: bool = False) -> F32:
    """Rotate queries and keys by their positions in place, and return the array.

    Elements i and i + D / 2 of a head at position t are turned by t / 10000^(2 i / D). The backward
    is the rotation back, on the gradient.

    Parameters
    ----------
    qkv : ndarray of shape (B, T, 3 C)
    heads : int
    back : bool

    References
    ----------
    Su et al. 2021, arXiv:2104.09864, section 3.2.
    """
    check_float(qkv, qkv.shape, "qkv")
    width = qkv.shape[2] // 3
    if width % (2 * heads):
        raise ValueError(
            f"rotary positions: {width} channels make no even number for each of {heads} heads"
        )
    cosines, sines = _angles(qkv.shape[1], width // (2 * heads))
    _rotate(_rows(qkv), cosines, -sines if back else sines, heads)
    return qkv
