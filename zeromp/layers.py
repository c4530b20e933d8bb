"""Pure forward and backward pairs over arrays: what a model computes, not where its arrays live.

Shapes: B batch, T time, C channels, H heads, D = C / H, V vocabulary, I inputs, O outputs; "..."
stands for any leading axes, mostly B, T.

[Note: gradients] A backward returns the gradient of its input and writes those of weights to the
arrays it is handed last; None says that a gradient is not wanted, and its product is skipped. They
are written, not added to, but for `embedding_backward`. Arrays are float32 and contiguous. What a
function returns, and its scratch, comes from `new`, such as the ``empty`` of a `zeromp.pool.Pool`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import attention as heads_of
from zeromp import gemm, kernels
from zeromp.pool import fresh
from zeromp.wire import F32

I64 = NDArray[np.int64]
New = Callable[[tuple[int, ...]], F32]

# ---- checks --------------------------------------------------------------------------------------


def check_float(array: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
    """ValueError unless an array is contiguous, float32, and of the given shape."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} is {array.dtype} of shape {array.shape}, contiguous: "
            f"{array.flags.c_contiguous}; it must be contiguous float32 of shape {shape}"
        )


def check_ids(ids: NDArray[Any], limit: int, what: str, lowest: int = 0) -> None:
    """ValueError unless an array holds integers from `lowest` to limit - 1 only."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{what} ids are {ids.dtype}; they must be integers")
    if ids.size == 0:
        return
    for value in (int(ids.min()), int(ids.max())):
        if not lowest <= value < limit:
            rule = f"0 to {limit - 1}" + (", or -1 for a target to be ignored" if lowest else "")
            raise ValueError(f"{what} id {value} is out of range: it must be {rule}")


def check_tokens(ids: NDArray[Any], vocab: int, context: int) -> None:
    """ValueError unless an array (B, T), T up to the context, holds token ids."""
    if ids.ndim != 2 or not 1 <= ids.shape[1] <= context:
        raise ValueError(f"tokens have shape {ids.shape}; it must be (B, T), T from 1 to {context}")
    check_ids(ids, vocab, "token")


def check_targets(targets: NDArray[Any], shape: tuple[int, ...], vocab: int) -> None:
    """ValueError unless targets have a shape and are ids, or -1 where nothing is to predict."""
    if targets.shape != shape:
        raise ValueError(f"targets have shape {targets.shape}; it must be {shape}")
    check_ids(targets, vocab, "target", lowest=-1)


def check_batch(x: NDArray[Any], y: NDArray[Any] | None, vocab: int, context: int) -> None:
    """ValueError unless x and the targets y are arrays (B, T) of ids, T up to the context."""
    check_tokens(x, vocab, context)
    if y is not None:
        check_targets(y, x.shape, vocab)


def _rows(array: F32) -> F32:
    """View an array of shape (..., C) as (R, C)."""
    assert array.flags.c_contiguous and array.dtype == np.float32
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _flat(ids: NDArray[Any]) -> I64:
    """Copy ids to int64 of shape (R,), for kernels."""
    return ids.astype(np.int64).reshape(-1)


# ---- linear --------------------------------------------------------------------------------------


def linear(x: F32, w: F32, b: F32 | None = None, new: New = fresh) -> F32:
    """Return ``x @ w.T + b``, shape (..., O).

    Parameters
    ----------
    x : ndarray of shape (..., I)
    w : ndarray of shape (O, I)
    b : ndarray of shape (O,), optional
    new : callable
    """
    y = new((*x.shape[:-1], len(w)))
    gemm.matmul(_rows(x), w.T, _rows(y))
    if b is not None:
        check_float(b, y.shape[-1:], "bias")
        kernels.bias_add(_rows(y), b)
    return y


def linear_gradients(x: F32, dy: F32, dw: F32 | None, db: F32 | None) -> None:
    """Write the gradients of `linear`'s weights to dw, shape (O, I), and db, shape (O,)."""
    if dw is not None:
        check_float(dw, (dy.shape[-1], x.shape[-1]), "weight gradient")
        gemm.matmul(_rows(dy).T, _rows(x), dw)
    if db is not None:
        check_float(db, dy.shape[-1:], "bias gradient")
        kernels.bias_gradient(_rows(dy), db)


def linear_backward(
    x: F32, w: F32, dy: F32, dw: F32 | None, db: F32 | None, new: New = fresh
) -> F32:
    """Return dx, shape (..., I), of `linear`; write dw, shape (O, I), and db, shape (O,)."""
    linear_gradients(x, dy, dw, db)
    dx = new(x.shape)
    gemm.matmul(_rows(dy), w, _rows(dx))
    return dx


def residual_add(y: F32, b: F32, residual: F32) -> F32:
    """Turn y into ``y + b + residual`` in place and return it: the end of a linear layer."""
    check_float(b, y.shape[-1:], "bias")
    check_float(residual, y.shape, "residual")
    kernels.residual_add(_rows(y), b, _rows(residual))
    return y


# ---- layer norm, GELU, attention -----------------------------------------------------------------


def layernorm(x: F32, w: F32, b: F32, new: New = fresh) -> tuple[F32, F32]:
    """Return ``(x - mean) / sqrt(variance + 1e-5) * w + b`` along the last axis, and statistics.

    Parameters
    ----------
    x : ndarray of shape (..., C)
    w, b : ndarray of shape (C,)

    Returns
    -------
    y : ndarray of shape (..., C)
    stats : ndarray of shape (2, R)
        Mean and 1 / standard deviation of each row, for the backward.

    References
    ----------
    Ba, Kiros, Hinton 2016, arXiv:1607.06450, section 3.
    """
    check_float(w, x.shape[-1:], "layer norm weight")
    check_float(b, x.shape[-1:], "layer norm bias")
    rows, y = _rows(x), new(x.shape)
    stats = new((2, len(rows)))
    kernels.layernorm(rows, w, b, stats, _rows(y))
    return y, stats


def layernorm_again(x: F32, w: F32, b: F32, stats: F32, new: New = fresh) -> F32:
    """Return y of `layernorm` anew, to the bit: cheaper than the memory to keep it."""
    y = new(x.shape)
    kernels.layernorm_again(_rows(x), w, b, stats, _rows(y))
    return y


def layernorm_backward(
    x: F32,
    w: F32,
    stats: F32,
    dy: F32,
    dw: F32 | None,
    db: F32 | None,
    more: F32 | None = None,
) -> F32:
    """Turn dy into dx, plus `more`, in place and return it; write dw and db, shape (C,)."""
    check_float(dy, x.shape, "gradient of layer norm")
    check_float(stats, (2, x.size // x.shape[-1]), "layer norm statistics")
    dw = np.empty_like(w) if dw is None else dw
    db = np.empty_like(w) if db is None else db
    for array in (w, dw, db):
        check_float(array, x.shape[-1:], "layer norm weight or its gradient")
    more = x[:0] if more is None else more
    kernels.layernorm_backward(_rows(x), w, stats, _rows(dy), _rows(more), dw, db)
    return dy


def gelu(x: F32, b: F32, new: New = fresh) -> F32:
    """Return ``z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3)))``, z = x + b, as in GPT-2.

    Parameters
    ----------
    x : ndarray of shape (..., C)
    b : ndarray of shape (C,)
        Bias of the linear layer before: added here, it costs no pass of its own.
    new : callable

    References
    ----------
    Hendrycks, Gimpel 2016, arXiv:1606.08415, section 2.
    """
    check_float(b, x.shape[-1:], "bias")
    y = new(x.shape)
    kernels.gelu(_rows(x), b, _rows(y))
    return y


def gelu_backward(x: F32, b: F32, dy: F32, db: F32 | None) -> F32:
    """Turn dy into dx in place and return it; write db, shape (C,)."""
    check_float(dy, x.shape, "gradient of GELU")
    db = np.empty_like(b) if db is None else db
    check_float(db, b.shape, "bias gradient")
    kernels.gelu_backward(_rows(x), b, _rows(dy), db)
    return dy


def attention(qkv: F32, heads: int, new: New = fresh) -> tuple[F32, F32]:
    """Causal self-attention: ``softmax(q k^T / sqrt(D)) v`` for each head.

    Parameters
    ----------
    qkv : ndarray of shape (B, T, 3 C)
        Queries, keys and values side by side; each holds the heads side by side.
    heads : int
    new : callable

    Returns
    -------
    y : ndarray of shape (B, T, C)
    stats : ndarray of shape (B, H, T)
        Logarithm of each softmax's sum of exponentials, for the backward.

    References
    ----------
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Dao et al. 2022, arXiv:2205.14135.
    """
    batch, time, width = qkv.shape
    check_float(qkv, qkv.shape, "qkv")
    if width % (3 * heads):
        raise ValueError(f"qkv has {width} channels, not a multiple of 3 times {heads} heads")
    depth = width // (3 * heads)
    y, stats = new((batch, time, width // 3)), new((batch, heads, time))
    scratch = new((heads_of.scratch_size(time, depth, backward=False),))
    heads_of.forward(_rows(qkv), time, depth, scratch, _rows(y), stats.reshape(-1))
    return y, stats


def attention_backward(qkv: F32, y: F32, stats: F32, dy: F32, new: New = fresh) -> F32:
    """Return the gradient of qkv, shape (B, T, 3 C), from what `attention` returned and dy."""
    heads, time = stats.shape[1:]
    check_float(dy, y.shape, "gradient of attention")
    depth = y.shape[2] // heads
    dqkv = new(qkv.shape)
    scratch = new((heads_of.scratch_size(time, depth, backward=True),))
    rows = _rows(qkv), _rows(y), stats.reshape(-1), _rows(dy)
    heads_of.backward(*rows, time, depth, scratch, _rows(dqkv))
    return dqkv


# ---- embedding, dropout, losses ------------------------------------------------------------------


def embedding(ids: I64, wte: F32, wpe: F32, new: New = fresh) -> F32:
    """Return ``wte[ids[b, t]] + wpe[t]``, shape (B, T, C).

    Parameters
    ----------
    ids : ndarray of integers, shape (B, T)
        From 0 to V - 1; ValueError otherwise.
    wte : ndarray of shape (V, C)
    wpe : ndarray of shape (at least T, C)
    """
    check_tokens(ids, len(wte), len(wpe))
    check_float(wpe, (len(wpe), wte.shape[1]), "position embedding")
    x = new((*ids.shape, wte.shape[1]))
    kernels.embedding(_flat(ids), wte, wpe, ids.shape[1], _rows(x))
    return x


def embedding_backward(ids: I64, dx: F32, dwte: F32 | None, dwpe: F32 | None) -> None:
    """Add the gradients of `embedding` to dwte and dwpe in place; repeated tokens add up."""
    batch, time = ids.shape
    check_float(dx, (batch, time, dx.shape[-1]), "gradient of the embedding")
    for table, rows in ((dwte, ids), (dwpe, np.tile(np.arange(time), batch))):
        if table is not None:
            check_float(table, (len(table), dx.shape[-1]), "gradient of an embedding")
            check_ids(rows, len(table), "token or position")
            kernels.scatter_add(_flat(rows), _rows(dx), table)


def dropout(x: F32, rate: float, key: int, first_sample: int, new: New = fresh) -> F32:
    """Return x / (1 - rate), or 0 with probability `rate`; the backward is the same call on dy.

    Parameters
    ----------
    x : ndarray of shape (B, ...)
    rate : float
        At least 0, below 1.
    key : int
        64 bits, others for each place and step.
    first_sample : int
        Number of x[0] in the global batch: a sample has the same mask wherever it is computed.

    References
    ----------
    Srivastava et al. 2014, JMLR 15, section 4. Masks by counter instead of by state: Salmon et al.
    2011, doi:10.1145/2063384.2063405.
    """
    y = new(x.shape)
    flat, sample = (len(x), math.prod(x.shape[1:])), np.uint64(first_sample)
    kernels.dropout(x.reshape(flat), np.uint64(key), sample, rate, y.reshape(flat))
    return y


def cross_entropy(logits: F32, targets: I64, factor: float) -> float:
    """Sum in float64 of ``-log softmax(logits)[target]``; in place, logits become their gradient.

    Parameters
    ----------
    logits : ndarray of shape (..., V)
    targets : ndarray of integers, shape (...)
        From 0 to V - 1, or -1 where there is nothing to predict; ValueError otherwise.
    factor : float
        The gradient is multiplied by it.
    """
    check_targets(targets, logits.shape[:-1], logits.shape[-1])
    return float(kernels.cross_entropy(_rows(logits), _flat(targets), np.float32(factor)))


def count_targets(targets: I64) -> int:
    """Count the targets that are not -1."""
    return int(np.count_nonzero(targets >= 0))


def mse(y: F32, targets: F32, factor: float) -> float:
    """Sum in float64 of ``(y - target)^2``; in place, y becomes its gradient times `factor`."""
    check_float(targets, y.shape, "targets")
    np.subtract(y, targets, out=y)
    loss = float(np.square(y, dtype=np.float64).sum())
    np.multiply(y, np.float32(2 * factor), out=y)
    return loss
