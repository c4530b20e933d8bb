"""Llama's decoder: token embedding, blocks of attention and of a gated perceptron, a head.

Shapes: B batch, T time, C channels (the width), H heads, I hidden channels, V vocabulary; L blocks.

Pre-norm by RMS, rotary positions, SwiGLU, no biases, matrices of shape (outputs, inputs). Touvron
et al. 2023, arXiv:2302.13971, section 2.2. Initial values are drawn as for `gpt`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import gated
from zeromp import layers as ops
from zeromp.models.units import Model, Parameter, Saved, Scope, Unit, Visit
from zeromp.wire import F32

Arrays = Mapping[str, F32]

_STD = 0.02
_MULTIPLE = 64  # the hidden channels are rounded up to one of it


@dataclass(frozen=True)
class Lookup:
    """``x = wte[ids]``. Saves the ids (B, T)."""

    def forward(self, w: Arrays, x: NDArray[Any], scope: Scope) -> tuple[F32, Saved]:
        """Return the residual stream, shape (B, T, C), for ids x."""
        ids = x.astype(np.int64)  # a copy: the caller may use its array again
        table = w["wte.weight"]
        y = scope.new((*ids.shape, table.shape[1]))
        np.take(table, ids, axis=0, out=y, mode="clip")  # ids are checked; "raise" would copy
        return y, (ids,)

    def backward(
        self,
        w: Arrays,  # noqa: ARG002
        saved: Saved,
        dy: F32,
        g: Arrays,
        scope: Scope,  # noqa: ARG002
    ) -> None:
        """Add the gradient of the table to g."""
        ops.embedding_backward(saved[0], dy, g.get("wte.weight"), None)

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count the ids, saved and given."""
        return 8 * batch * time, 8 * batch * time


@dataclass(frozen=True)
class Block:
    """``x += proj(attention(rotate(qkv(norm1(x))))); x += down(swiglu(gate_up(norm2(x))))``.

    Saves x, qkv as rotated, what attention gave, the stream in the middle, what SwiGLU was given,
    and the statistics. The backward makes the outputs of norms and SwiGLU anew from these.
    """

    name: str
    width: int
    heads: int
    hidden: int

    def forward(self, w: Arrays, x: F32, scope: Scope) -> tuple[F32, Saved]:
        """Return the residual stream after the block, shape (B, T, C)."""
        new = scope.new
        normed, stats1 = gated.rmsnorm(x, self._weight(w, "norm1"), new)
        qkv = gated.rotate(ops.linear(normed, self._weight(w, "qkv"), None, new), self.heads)
        del normed
        mixed, sums = ops.attention(qkv, self.heads, new)
        middle = ops.linear(mixed, self._weight(w, "proj"), None, new)
        np.add(middle, x, out=middle)
        normed, stats2 = gated.rmsnorm(middle, self._weight(w, "norm2"), new)
        hidden = ops.linear(normed, self._weight(w, "gate_up"), None, new)
        del normed
        y = ops.linear(gated.swiglu(hidden, new), self._weight(w, "down"), None, new)
        np.add(y, middle, out=y)
        return y, (x, stats1, qkv, mixed, sums, middle, stats2, hidden)

    def _weight(self, w: Arrays, layer: str) -> F32:
        return w[f"{self.name}.{layer}.weight"]

    def backward(self, w: Arrays, saved: Saved, dy: F32, g: Arrays, scope: Scope) -> F32:
        """Return dx, shape (B, T, C); write the gradients of the block's weights to g."""
        new = scope.new
        x, stats1, qkv, mixed, sums, middle, stats2, hidden = saved

        d = self._linear(w, "down", gated.swiglu(hidden, new), dy, g, scope)
        d = gated.swiglu_backward(hidden, d, new)
        d = self._linear(w, "gate_up", self._again(w, "norm2", middle, stats2, scope), d, g, scope)
        dy = self._norm(w, "norm2", middle, stats2, d, dy, g)

        d = self._linear(w, "proj", mixed, dy, g, scope)
        d = gated.rotate(ops.attention_backward(qkv, mixed, sums, d, new), self.heads, back=True)
        d = self._linear(w, "qkv", self._again(w, "norm1", x, stats1, scope), d, g, scope)
        return self._norm(w, "norm1", x, stats1, d, dy, g)

    def _again(self, w: Arrays, layer: str, x: F32, stats: F32, scope: Scope) -> F32:
        return gated.rmsnorm_again(x, self._weight(w, layer), stats, scope.new)

    def _linear(self, w: Arrays, layer: str, x: F32, dy: F32, g: Arrays, scope: Scope) -> F32:
        gradient = g.get(f"{self.name}.{layer}.weight")
        return ops.linear_backward(x, self._weight(w, layer), dy, gradient, None, scope.new)

    def _norm(
        self, w: Arrays, layer: str, x: F32, stats: F32, dy: F32, more: F32, g: Arrays
    ) -> F32:
        gradient = g.get(f"{self.name}.{layer}.weight")
        return gated.rmsnorm_backward(x, self._weight(w, layer), stats, dy, gradient, more)

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count 6 C + 2 I + H + 2 numbers per token saved, C given."""
        tokens = 4 * batch * time
        return tokens * (6 * self.width + 2 * self.hidden + self.heads + 2), tokens * self.width


@dataclass(frozen=True)
class Head:
    """``logits = norm(x) @ matrix.T``. Saves x and the statistics."""

    matrix: str
    width: int

    def forward(self, w: Arrays, x: F32, scope: Scope) -> tuple[F32, Saved]:
        """Return the logits, shape (B, T, V)."""
        normed, stats = gated.rmsnorm(x, w["norm.weight"], scope.new)
        return ops.linear(normed, w[self.matrix], None, scope.new), (x, stats)

    def backward(self, w: Arrays, saved: Saved, dy: F32, g: Arrays, scope: Scope) -> F32:
        """Return dx, shape (B, T, C); write the gradients of the norm and of the matrix to g."""
        x, stats = saved
        normed = gated.rmsnorm_again(x, w["norm.weight"], stats, scope.new)
        matrix = self.matrix
        d = ops.linear_backward(normed, w[matrix], dy, g.get(matrix), None, scope.new)
        return gated.rmsnorm_backward(x, w["norm.weight"], stats, d, g.get("norm.weight"))

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count C + 1 numbers per token saved, C given."""
        tokens = 4 * batch * time
        return tokens * (self.width + 1), tokens * self.width


def _block(name: str, width: int, hidden: int, num_blocks: int) -> Unit:
    small = _STD / math.sqrt(2 * num_blocks)
    return Unit(
        name,
        (
            Parameter(f"{name}.norm1.weight", (width,), fill=1.0),
            Parameter(f"{name}.qkv.weight", (3 * width, width), std=_STD),
            Parameter(f"{name}.proj.weight", (width, width), std=small),
            Parameter(f"{name}.norm2.weight", (width,), fill=1.0),
            Parameter(f"{name}.gate_up.weight", (2 * hidden, width), std=_STD),
            Parameter(f"{name}.down.weight", (width, hidden), std=small),
        ),
    )


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"llama: {name} {value} must be at least 1")
    if sizes["width"] % (2 * sizes["heads"]):
        raise ValueError(
            f"llama: width {sizes['width']} must be an even multiple of the number of heads, "
            f"{sizes['heads']}: rotary positions turn pairs of channels"
        )


def llama(
    vocab: int = 256,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    hidden: int | None = None,
    tied: bool = False,
) -> Model:
    """Declare Llama's decoder for token ids (B, T), T up to the context.

    Parameters
    ----------
    vocab, layers, width, heads, context : int
        `width` is an even multiple of `heads`. No weight depends on the context.
    hidden : int or None
        Channels of the perceptron; None takes 8/3 of the width, rounded up to a multiple of 64:
        as many weights as with four times the width and no gate.
    tied : bool
        Whether the head's matrix is the token embedding: one parameter, in a unit visited twice.

    Returns
    -------
    Model
        Units ``embed`` (wte, and norm if tied), ``blocks.0`` and so on, ``head`` (norm, head) if
        not tied. Targets are ids (B, T), -1 where there is nothing to predict.
    """
    if hidden is None:
        hidden = -(-8 * width // (3 * _MULTIPLE)) * _MULTIPLE
    sizes = {"vocab": vocab, "layers": layers, "width": width, "heads": heads, "context": context}
    _check_sizes({**sizes, "hidden": hidden})
    wte = Parameter("wte.weight", (vocab, width), std=_STD)
    norm = Parameter("norm.weight", (width,), fill=1.0)
    matrix = wte if tied else Parameter("head.weight", (vocab, width), std=_STD)
    blocks = [_block(f"blocks.{i}", width, hidden, layers) for i in range(layers)]
    if tied:
        units = (Unit("embed", (wte, norm)), *blocks)
    else:
        units = (Unit("embed", (wte,)), *blocks, Unit("head", (norm, matrix)))
    path = (
        Visit("embed", Lookup(), writes=(), adds=(wte.name,)),
        *(Visit(b.name, Block(b.name, width, heads, hidden), writes=b.names) for b in blocks),
        Visit(
            units[0 if tied else -1].name,
            Head(matrix.name, width),
            writes=(norm.name, matrix.name),
        ),
    )
    return Model(
        name=f"llama-{layers}x{width}",
        units=units,
        path=path,
        loss=ops.cross_entropy,
        count=ops.count_targets,
        check=functools.partial(ops.check_batch, vocab=vocab, context=context),
        vocab=vocab,
        context=context,
        num_multiplied=layers * (4 * width * width + 3 * width * hidden) + vocab * width,
        attention_width=layers * width,
    )
