"""What tests compare with: a GPT and AdamW in plain NumPy float64, and the peers' data and losses.

Nothing here imports zeromp. Weights, tokens and losses are those of shared/peers (PyTorch 2.13 and
DeepSpeed; peers.md, section "Loss curves"), so that a loss found there must be found here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

# ---- the peers' benchmark ----------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A size of the peers' GPT: peers/gpt_shapes.py."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int

    @property
    def params(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocab + self.context + 2) * self.width

    @property
    def flops_per_token(self) -> int:
        multiplied = self.layers * 12 * self.width**2 + self.vocab * self.width
        return 6 * multiplied + 12 * self.layers * self.width * self.context


SIZES = {
    "XS": Shape(layers=4, width=128, heads=4, context=128, vocab=256),
    "S": Shape(layers=6, width=384, heads=6, context=256, vocab=256),
    "M": Shape(layers=12, width=768, heads=12, context=256, vocab=8192),
}
SEED = 1234  # of weights and tokens
PEERS_ADAMW = {"lr": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "wd": 0.01}
# fmt: off
LOSSES = {  # (size, global batch): losses of the first steps
    ("XS", 16): (
        5.568896, 5.230472, 5.001148, 4.846112, 4.673909, 4.553855, 4.407652, 4.303086, 4.172966,
        4.058936, 3.940802, 3.914090, 3.764918, 3.669802, 3.537447, 3.478733, 3.335495, 3.303074,
        3.166254, 3.095309,
    ),
    ("XS", 32): (
        5.566957, 5.175152, 4.904817, 4.774379, 4.587095, 4.474919, 4.324147, 4.229374, 4.107028,
        3.962197, 3.872379, 3.772916, 3.656393, 3.520579, 3.452524, 3.355943, 3.231916, 3.158491,
        3.076318, 2.953762,
    ),
    ("S", 8): (
        5.618660, 5.198424, 4.660657, 4.205299, 4.213926, 4.258602, 3.536862, 3.682044, 3.981444,
        3.046776, 3.330590, 2.722200,
    ),
    ("S", 16): (
        5.622457, 5.072916, 4.462527, 3.889477, 4.191343, 3.483992, 3.426276, 3.372585, 3.353293,
        2.907026, 2.616021, 2.517330,
    ),
    ("M", 4): (9.166225, 9.146569, 9.185054, 9.185779, 9.247720),
    ("M", 8): (9.158411, 9.137339, 9.142485, 9.182529, 9.188255),
}
# fmt: on


class MarkovTokens:
    """Tokens of the peers: each follows from the one before, or else from chance."""

    def __init__(self, vocab: int, context: int, seed: int, keep: float = 0.9) -> None:
        self.vocab, self.context, self.seed, self.keep = vocab, context, seed, keep
        self.follower = np.random.default_rng(seed).permutation(vocab)

    def batch(self, step: int, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets (rows, context) of a step's global batch."""
        rng = np.random.default_rng([self.seed, step])
        noise = rng.integers(self.vocab, size=(rows, self.context + 1))
        kept = rng.random((rows, self.context + 1)) < self.keep
        out = np.empty((rows, self.context + 1), np.int64)
        out[:, 0] = noise[:, 0]
        for t in range(1, self.context + 1):
            out[:, t] = np.where(kept[:, t], self.follower[out[:, t - 1]], noise[:, t])
        return np.ascontiguousarray(out[:, :-1]), np.ascontiguousarray(out[:, 1:])


def init_weights(shape: Shape, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights of the peers, drawn in the order of PyTorch's named_parameters()."""
    rng = np.random.default_rng(seed)
    c = shape.width
    weights = {}

    def matrix(name: str, rows: int, columns: int, std: float = 0.02) -> None:
        normal = rng.standard_normal((rows, columns), dtype=np.float32)
        weights[f"{name}.weight"] = normal * np.float32(std)

    def vector(name: str, size: int, *, norm: bool = False) -> None:
        if norm:
            weights[f"{name}.weight"] = np.ones(size, np.float32)
        weights[f"{name}.bias"] = np.zeros(size, np.float32)

    small = 0.02 / math.sqrt(2 * shape.layers)
    matrix("wte", shape.vocab, c)
    matrix("wpe", shape.context, c)
    for i in range(shape.layers):
        block = f"blocks.{i}"
        vector(f"{block}.ln1", c, norm=True)
        vector(f"{block}.ln2", c, norm=True)
        for name, rows, columns, std in (
            ("qkv", 3 * c, c, 0.02),
            ("proj", c, c, small),
            ("fc", 4 * c, c, 0.02),
            ("out", c, 4 * c, small),
        ):
            matrix(f"{block}.{name}", rows, columns, std)
            vector(f"{block}.{name}", rows)
    vector("ln_f", c, norm=True)
    return weights


# ---- a GPT in float64 --------------------------------------------------------------------------


def layernorm(x: F64, w: F64, b: F64) -> F64:
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5) * w + b


def gelu(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(qkv: F64, heads: int) -> F64:
    """One sample and one head at a time: qkv (B, T, 3 C) to (B, T, C)."""
    batch, time, width = qkv.shape
    c, d = width // 3, width // 3 // heads
    y = np.empty((batch, time, c))
    future = np.triu(np.ones((time, time), bool), 1)
    for b in range(batch):
        for h in range(heads):
            q, k, v = (qkv[b, :, i * c + h * d : i * c + (h + 1) * d] for i in range(3))
            scores = np.where(future, -np.inf, q @ k.T / math.sqrt(d))
            y[b, :, h * d : (h + 1) * d] = softmax(scores) @ v
    return y


def gpt_logits(
    w: dict[str, Any],
    ids: NDArray[np.int64],
    heads: int,
    masks: Mapping[str, F64] | None = None,
) -> F64:
    """Logits (B, T, V) of the GPT of peers/torch_gpt.py, with a head of its own if w has one.

    `masks` holds what dropout multiplies with, by the name of the place.
    """
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    masks = masks or {}

    def linear(x: F64, name: str) -> F64:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: F64, name: str) -> F64:
        return layernorm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def dropped(x: F64, place: str) -> F64:
        return x * masks.get(place, 1.0)

    x = dropped(w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]], "embed")
    for i in range(sum(name.endswith("qkv.bias") for name in w)):
        of = f"blocks.{i}"
        y = attention(linear(norm(x, f"{of}.ln1"), f"{of}.qkv"), heads)
        x = x + dropped(linear(y, f"{of}.proj"), f"{of}.proj")
        y = gelu(linear(norm(x, f"{of}.ln2"), f"{of}.fc"))
        x = x + dropped(linear(y, f"{of}.out"), f"{of}.out")
    return norm(x, "ln_f") @ w.get("head.weight", w["wte.weight"]).T


def cross_entropy(logits: F64, targets: NDArray[np.int64]) -> float:
    """Mean of -log softmax over the targets that are not -1."""
    kept = targets >= 0
    chosen = np.take_along_axis(softmax(logits[kept]), targets[kept][:, None], axis=-1)
    return float(-np.log(chosen).mean())


def gpt_loss(
    w: dict[str, Any],
    ids: NDArray[np.int64],
    targets: NDArray[np.int64],
    heads: int,
    masks: Mapping[str, F64] | None = None,
) -> float:
    """Mean loss of the GPT above."""
    return cross_entropy(gpt_logits(w, ids, heads, masks), targets)


def finite_difference(f: Callable[[F64], float], x: Any, index: Any, h: float = 1e-4) -> float:
    """Derivative of f with respect to x[index], of fourth order in h."""
    x = np.array(x, np.float64)
    start, values = x[index], {}
    for k in (-2, -1, 1, 2):
        x[index] = start + k * h
        values[k] = f(x)
    return (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * h)


# ---- AdamW -------------------------------------------------------------------------------------


def adamw(
    p: F64,
    g: F64,
    m: F64,
    v: F64,
    t: int,
    lr: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    wd: float = 0.1,
) -> tuple[F64, F64, F64]:
    """New p, m, v after step t = 1, 2, ...: shared/cases.md, "ref"."""
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p * (1 - lr * wd) - lr * step, m, v


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of a norm are multiplied with, so that the norm is at most `limit`."""
    return min(1.0, limit / norm) if norm else 1.0
