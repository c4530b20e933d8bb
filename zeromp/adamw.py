"""AdamW and SGD on flat arrays: one fused pass each, and the schedules of the learning rate.

[Note: the same bits for any cut] A kernel walks *segments*: runs of elements that belong to one
array. Each element is computed from its own numbers alone, by float32 operations that IEEE 754
rounds correctly (no fused multiply-add, no fast mathematics), so that its bits do not depend on
where shards or segments are cut, and equal NumPy's for the same float32 formula.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeromp._jit import inlined, kernel
from zeromp.vectors import wide
from zeromp.wire import Bits, narrow, widen

F32 = NDArray[np.float32]

# Columns of a table of segments: sizes and starts in each of the arrays that a kernel is given.
SIZE, STATE, GRADIENT, PARAMETER = range(4)


class Rule(Protocol):
    """An optimizer's arithmetic; what it is applied to belongs to the caller."""

    lr: float
    weight_decay: float

    @property
    def states(self) -> tuple[str, ...]:
        """Kinds of float32 state kept per parameter beside the master."""

    def check(self) -> None:
        """ValueError for numbers that make no sense; `Zero` asks on all ranks together."""

    def update(
        self,
        step: int,
        factor: float,
        arrays: "Arrays",
        segments: NDArray[np.int64],
        rates: F32,
    ) -> None:
        """Update all segments in place for applied step 1, 2, ...; see `AdamW.update`."""


@dataclass(frozen=True)
class Arrays:
    """What one update reads and writes, each array in the extent of its holder.

    Parameters
    ----------
    gradient : ndarray
        float32 or 16-bit numbers.
    master : ndarray of float32
        Where `copy` is None, the parameters themselves; else in the extent of the states.
    states : sequence of ndarray of float32
    copy : ndarray or None
        16-bit parameters, which receive the rounded master.
    """

    gradient: Bits
    master: F32
    states: Sequence[F32]
    copy: Bits | None

    def operands(self) -> list[tuple[NDArray[Any], int, str]]:
        """Each array, the column of its starts in a table of segments, and how it is used: r, w."""
        column = PARAMETER if self.copy is None else STATE
        found: list[tuple[NDArray[Any], int, str]] = [
            (self.gradient, GRADIENT, "r"),
            (self.master, column, "rw"),
            *((state, STATE, "rw") for state in self.states),
        ]
        return found if self.copy is None else [*found, (self.copy, PARAMETER, "w")]

    @staticmethod
    def of(operands: Sequence[NDArray[Any]], has_copy: bool) -> "Arrays":
        """Arrays from a list in the order of `operands`."""
        states = operands[2:-1] if has_copy else operands[2:]
        return Arrays(operands[0], operands[1], states, operands[-1] if has_copy else None)


@dataclass
class AdamW:
    """AdamW: Adam with decoupled weight decay.

    Parameters
    ----------
    lr : float
        Learning rate where `step` is given none.
    betas : (float, float)
    eps : float
    weight_decay : float
        For groups that name none of their own.

    Notes
    -----
    At applied step t = 1, 2, ... with gradient g::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    References
    ----------
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, arXiv:1711.05101,
    algorithm 2; Kingma and Ba, Adam, 2015, arXiv:1412.6980.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    states = ("m", "v")

    def check(self) -> None:
        """ValueError for numbers that make no sense."""
        _check_rates(self.lr, self.weight_decay)
        if not all(0 <= beta < 1 for beta in self.betas) or not self.eps > 0:
            raise ValueError(f"AdamW: betas {self.betas} must be in [0, 1), eps {self.eps} above 0")

    def update(
        self,
        step: int,
        factor: float,
        arrays: Arrays,
        segments: NDArray[np.int64],
        rates: F32,
    ) -> None:
        """Update all segments in place.

        Parameters
        ----------
        step : int
            Applied steps, this one included.
        factor : float
            Multiplies each gradient: clipping and the loss scale.
        arrays : Arrays
        segments : ndarray of int64 of shape (k, 4)
            Size, and start in states, gradient and parameters, of each segment.
        rates : ndarray of float32 of shape (k, 2)
            Learning rate and weight decay of each segment.
        """
        beta1, beta2 = self.betas
        constants = np.array(
            [
                factor,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                1 / (1 - beta1**step),
                1 / math.sqrt(1 - beta2**step),
                self.eps,
            ],
            np.float32,
        )
        m, v = arrays.states
        common = (m, v, segments, rates, constants)
        if arrays.copy is None:
            _adamw(arrays.gradient, arrays.master, *common)
        else:
            _adamw_copy(arrays.gradient, arrays.master, arrays.copy, *common)


@dataclass
class SGD:
    """Stochastic gradient descent with momentum and decoupled weight decay.

    Parameters
    ----------
    lr, momentum, weight_decay : float

    Notes
    -----
    With gradient g: ``m <- momentum m + g`` and ``p <- p (1 - lr wd) - lr m``. Tests of sharding
    use it beside AdamW, which hides a gradient that is wrong by a factor.
    """

    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0
    states = ("m",)

    def check(self) -> None:
        """ValueError for numbers that make no sense."""
        _check_rates(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"SGD: momentum {self.momentum} must be in [0, 1)")

    def update(
        self,
        step: int,  # noqa: ARG002 - the same call as AdamW's
        factor: float,
        arrays: Arrays,
        segments: NDArray[np.int64],
        rates: F32,
    ) -> None:
        """Update all segments in place; parameters as in `AdamW.update`."""
        constants = np.array([factor, self.momentum], np.float32)
        (m,) = arrays.states
        if arrays.copy is None:
            _sgd(arrays.gradient, arrays.master, m, segments, rates, constants)
        else:
            _sgd_copy(arrays.gradient, arrays.master, arrays.copy, m, segments, rates, constants)


def _check_rates(lr: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value} must be finite and not negative")


# ---- kernels: g gradient, p master, m and v moments, c 16-bit copy ------------------------------

_TABLES = "int64[:, ::1], float32[:, ::1], float32[::1]"
_PAIRS = [("float32", "uint16"), ("float32", "int16"), ("uint16", "uint16"), ("int16", "int16")]


@inlined
def _adamw_element(g, p, m, v, decay, lr, c):  # type: ignore[no-untyped-def]
    """Return new m, v and p of one element; `c` holds the eight constants of `AdamW.update`."""
    g = g * c[0]
    m = c[1] * m + c[2] * g
    v = c[3] * v + c[4] * (g * g)
    return m, v, p * decay - lr * (m * c[5]) / (np.sqrt(v) * c[6] + c[7])


@kernel(f"void(float32[::1], float32[::1], float32[::1], float32[::1], {_TABLES})")
def _adamw(gradient, parameters, m_all, v_all, segments, rates, c):  # type: ignore[no-untyped-def]
    """AdamW on float32 parameters, which are their own master."""
    wide()
    one = np.float32(1)
    for k in range(segments.shape[0]):
        n, i0, g0, p0 = segments[k, 0], segments[k, 1], segments[k, 2], segments[k, 3]
        g, p = gradient[g0 : g0 + n], parameters[p0 : p0 + n]
        m, v = m_all[i0 : i0 + n], v_all[i0 : i0 + n]
        lr = rates[k, 0]
        decay = one - lr * rates[k, 1]
        for i in range(n):
            m[i], v[i], p[i] = _adamw_element(g[i], p[i], m[i], v[i], decay, lr, c)


@kernel(*(f"void({g}[::1], float32[::1], {c}[::1], float32[::1], float32[::1], {_TABLES})"
          for g, c in _PAIRS))  # fmt: skip
def _adamw_copy(gradient, master, copy, m_all, v_all, segments, rates, c):  # type: ignore[no-untyped-def]
    """AdamW on a float32 master, with a 16-bit copy out."""
    wide()
    one = np.float32(1)
    for k in range(segments.shape[0]):
        n, i0, g0, c0 = segments[k, 0], segments[k, 1], segments[k, 2], segments[k, 3]
        g, p, out = gradient[g0 : g0 + n], master[i0 : i0 + n], copy[c0 : c0 + n]
        m, v = m_all[i0 : i0 + n], v_all[i0 : i0 + n]
        lr = rates[k, 0]
        decay = one - lr * rates[k, 1]
        for i in range(n):
            m[i], v[i], p[i] = _adamw_element(widen(g[i]), p[i], m[i], v[i], decay, lr, c)
            out[i] = narrow(out[i], p[i])


@kernel(f"void(float32[::1], float32[::1], float32[::1], {_TABLES})")
def _sgd(gradient, parameters, m_all, segments, rates, c):  # type: ignore[no-untyped-def]
    """SGD on float32 parameters, which are their own master."""
    wide()
    one = np.float32(1)
    for k in range(segments.shape[0]):
        n, i0, g0, p0 = segments[k, 0], segments[k, 1], segments[k, 2], segments[k, 3]
        g, p, m = gradient[g0 : g0 + n], parameters[p0 : p0 + n], m_all[i0 : i0 + n]
        lr = rates[k, 0]
        decay = one - lr * rates[k, 1]
        for i in range(n):
            m[i] = c[1] * m[i] + g[i] * c[0]
            p[i] = p[i] * decay - lr * m[i]


@kernel(*(f"void({g}[::1], float32[::1], {c}[::1], float32[::1], {_TABLES})"
          for g, c in _PAIRS))  # fmt: skip
def _sgd_copy(gradient, master, copy, m_all, segments, rates, c):  # type: ignore[no-untyped-def]
    """SGD on a float32 master, with a 16-bit copy out."""
    wide()
    one = np.float32(1)
    for k in range(segments.shape[0]):
        n, i0, g0, c0 = segments[k, 0], segments[k, 1], segments[k, 2], segments[k, 3]
        g, p, out = gradient[g0 : g0 + n], master[i0 : i0 + n], copy[c0 : c0 + n]
        m = m_all[i0 : i0 + n]
        lr = rates[k, 0]
        decay = one - lr * rates[k, 1]
        for i in range(n):
            m[i] = c[1] * m[i] + widen(g[i]) * c[0]
            p[i] = p[i] * decay - lr * m[i]
            out[i] = narrow(out[i], p[i])


# ---- schedules -----------------------------------------------------------------------------------


def constant(step: int, peak: float, warmup: int = 0) -> float:
    """Learning rate at applied step 0, 1, ...: rises to `peak` in `warmup` steps, then stays."""
    return peak * min(1.0, (step + 1) / warmup) if warmup > 0 else peak


def linear(step: int, steps: int, peak: float, warmup: int = 0, floor: float = 0.0) -> float:
    """Learning rate at applied step 0, 1, ...: rises to `peak` in `warmup` steps, falls to `floor`.

    The k-th step of the warm-up, k = 1, ..., warmup, uses peak k / warmup: the first step is never
    made at the full rate, nor at zero. Step `steps` - 1 is the last.
    """
    if step < warmup:
        return constant(step, peak, warmup)
    progress = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    return floor + (peak - floor) * (1 - progress)


def cosine(step: int, steps: int, peak: float, warmup: int = 0, floor: float = 0.0) -> float:
    """Learning rate at applied step 0, 1, ...: like `linear`, falling along half a cosine."""
    if step < warmup:
        return constant(step, peak, warmup)
    progress = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
