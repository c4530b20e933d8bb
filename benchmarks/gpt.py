"""The GPT that all frameworks train: shapes, initial weights and tokens, from NumPy alone."""

import math
from dataclasses import dataclass, replace

import numpy as np

SEED = 1234
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Shape:
    """GPT-2's decoder with a tied head; `batch` is sequences per rank and step."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    batch: int

    @property
    def num_parameters(self):
        """All parameters; the head shares the token embedding."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocab + self.context + 2) * self.width

    @property
    def flops_per_token(self):
        """6 N + 12 L C T, attention counted in full (Chowdhery et al. 2022, arXiv:2204.02311)."""
        multiplied = self.layers * 12 * self.width**2 + self.vocab * self.width
        return 6 * multiplied + 12 * self.layers * self.width * self.context


SIZES = {
    "XXS": Shape(layers=2, width=32, heads=2, context=16, vocab=64, batch=2),
    "XS": Shape(layers=4, width=128, heads=4, context=128, vocab=256, batch=16),
    "S": Shape(layers=6, width=384, heads=6, context=256, vocab=256, batch=8),
    "M": Shape(layers=12, width=768, heads=12, context=256, vocab=8192, batch=4),
}


def shape_of(size, **changes):
    """A named shape, with some fields replaced."""
    return replace(SIZES[size], **changes)


def shapes(shape):
    """Shapes of all parameters by name, in the order in which `weights` draws them."""
    c = shape.width
    found = {"wte.weight": (shape.vocab, c), "wpe.weight": (shape.context, c)}
    for i in range(shape.layers):
        block = {
            "ln1": (c,),
            "qkv": (3 * c, c),
            "proj": (c, c),
            "ln2": (c,),
            "fc": (4 * c, c),
            "out": (c, 4 * c),
        }
        for layer, of_weight in block.items():
            found[f"blocks.{i}.{layer}.weight"] = of_weight
            found[f"blocks.{i}.{layer}.bias"] = of_weight[:1]
    return {**found, "ln_f.weight": (c,), "ln_f.bias": (c,)}


def weights(shape, seed=SEED):
    """Yield each parameter's name and initial values, as GPT-2 draws them.

    Matrices are normal with 0.02, those that write to the residual stream with 0.02 / sqrt(2 L);
    norms are 1, biases 0.
    """
    rng = np.random.default_rng(seed)
    for name, of_array in shapes(shape).items():
        if len(of_array) == 2:
            last = name.endswith(("proj.weight", "out.weight"))
            std = 0.02 / math.sqrt(2 * shape.layers) if last else 0.02
            yield name, rng.standard_normal(of_array, dtype=np.float32) * np.float32(std)
        else:
            yield name, np.full(of_array, 0.0 if name.endswith("bias") else 1.0, np.float32)


class Tokens:
    """A synthetic language: a token's successor is fixed 9 times in 10, else drawn from all.

    A batch is that of all ranks together; a rank takes its rows, so that any number of ranks with
    the same global batch sees the same data.
    """

    def __init__(self, shape, seed=SEED):
        self.shape, self.seed = shape, seed
        self.successor = np.random.default_rng(seed).permutation(shape.vocab)

    def batch(self, step, rank, ranks):
        """A rank's inputs and targets, int64 of shape (batch, context)."""
        rows, columns = ranks * self.shape.batch, self.shape.context + 1
        rng = np.random.default_rng([self.seed, step])
        noise = rng.integers(self.shape.vocab, size=(rows, columns))
        kept = rng.random((rows, columns)) < 0.9
        tokens = noise.copy()
        for t in range(1, columns):
            tokens[:, t] = np.where(kept[:, t], self.successor[tokens[:, t - 1]], noise[:, t])
        mine = tokens[rank * self.shape.batch : (rank + 1) * self.shape.batch]
        return np.ascontiguousarray(mine[:, :-1]), np.ascontiguousarray(mine[:, 1:])


def measured(shape, tokens, seconds, rates):
    """Step time, tokens per second, and the share of the GEMM rate before and after each step."""
    flops = shape.flops_per_token * tokens
    result = {
        "step_s": float(np.median(seconds)),
        "best_step_s": float(np.min(seconds)),
        "steps": len(seconds),
        "tokens": tokens,
        "tokens_per_s": float(tokens / np.median(seconds)),
    }
    if np.all(rates):
        near = (rates[1:] + rates[:-1]) / 2
        result["gemm_flops_per_s"] = float(np.median(rates))
        result["share_of_gemm"] = float(np.median(flops / np.asarray(seconds) / near))
    return result
