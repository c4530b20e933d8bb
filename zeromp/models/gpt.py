"""GPT-2's decoder: token and position embedding, blocks of attention and perceptron, a head.

Shapes: B batch, T time, C channels (the width), H heads, V vocabulary; L blocks.

Pre-norm, GELU by tanh, biases everywhere but in the head, matrices of shape (outputs, inputs).
Matrices start normal with standard deviation 0.02 (Radford et al. 2018, "Improving language
understanding by generative pre-training", section 4.1); those that write to the residual stream
with 0.02 / sqrt(2 L), since 2 L of them add up (Radford et al. 2019, "Language models are
unsupervised multitask learners", section 2.3).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import layers as ops
from zeromp.models.tiled_block import tiled_block
from zeromp.models.units import Model, Parameter, Saved, Scope, Unit, Visit
from zeromp.wire import F32

Arrays = Mapping[str, F32]

_STD = 0.02


def _weights(w: Arrays, name: str) -> tuple[F32, F32]:
    return w[f"{name}.weight"], w[f"{name}.bias"]


def _gradients(g: Arrays, name: str) -> tuple[F32 | None, F32 | None]:
    return g.get(f"{name}.weight"), g.get(f"{name}.bias")


def _drop(x: F32, rate: float, site: str, scope: Scope) -> F32:
    """Dropout in training, x itself otherwise; forward and backward alike."""
    if not scope.train or rate == 0:
        return x
    return ops.dropout(x, rate, scope.key(site), scope.first_sample, scope.new)


@dataclass(frozen=True)
class Lookup:
    """``x = wte[ids] + wpe``, with dropout. Saves the ids (B, T)."""

    dropout: float

    def forward(self, w: Arrays, x: NDArray[Any], scope: Scope) -> tuple[F32, Saved]:
        """Return the residual stream, shape (B, T, C), for ids x."""
        ids = x.astype(np.int64)  # a copy: the caller may use its array again
        y = ops.embedding(ids, w["wte.weight"], w["wpe.weight"], scope.new)
        return _drop(y, self.dropout, "embed", scope), (ids,)

    def backward(
        self,
        w: Arrays,  # noqa: ARG002
        saved: Saved,
        dy: F32,
        g: Arrays,
        scope: Scope,
    ) -> None:
        """Add the gradients of both tables to g."""
        dx = _drop(dy, self.dropout, "embed", scope)
        ops.embedding_backward(saved[0], dx, g.get("wte.weight"), g.get("wpe.weight"))

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count the ids, saved and given."""
        return 8 * batch * time, 8 * batch * time


@dataclass(frozen=True)
class Block:
    """``x += proj(attention(qkv(ln1(x)))); x += out(gelu(fc(ln2(x))))``, dropout before each +=.

    Saves x, qkv, what attention gave, the stream in the middle, what GELU was given, and the
    statistics. The backward makes the outputs of layer norms and GELU anew from these: that costs
    one pass each and saves six numbers of sixteen.
    """

    name: str
    width: int
    heads: int
    dropout: float

    def forward(self, w: Arrays, x: F32, scope: Scope) -> tuple[F32, Saved]:
        """Return the residual stream after the block, shape (B, T, C)."""
        of, new = self.name, scope.new
        normed, stats1 = ops.layernorm(x, *_weights(w, f"{of}.ln1"), new)
        qkv = ops.linear(normed, *_weights(w, f"{of}.qkv"), new)
        del normed
        mixed, sums = ops.attention(qkv, self.heads, new)
        middle = self._residual(w, "proj", mixed, x, scope)
        normed, stats2 = ops.layernorm(middle, *_weights(w, f"{of}.ln2"), new)
        weight, bias = _weights(w, f"{of}.fc")
        hidden = ops.linear(normed, weight, None, new)
        del normed
        y = self._residual(w, "out", ops.gelu(hidden, bias, new), middle, scope)
        return y, (x, stats1, qkv, mixed, sums, middle, stats2, hidden)

    def _residual(self, w: Arrays, layer: str, x: F32, residual: F32, scope: Scope) -> F32:
        """Return residual + dropout(linear(x))."""
        name = f"{self.name}.{layer}"
        weight, bias = _weights(w, name)
        if not scope.train or self.dropout == 0:
            return ops.residual_add(ops.linear(x, weight, None, scope.new), bias, residual)
        y = _drop(ops.linear(x, weight, bias, scope.new), self.dropout, name, scope)
        return np.add(y, residual, out=y)

    def backward(self, w: Arrays, saved: Saved, dy: F32, g: Arrays, scope: Scope) -> F32:
        """Return dx, shape (B, T, C); write the gradients of the block's weights to g."""
        of, new = self.name, scope.new
        x, stats1, qkv, mixed, sums, middle, stats2, hidden = saved

        bias = w[f"{of}.fc.bias"]
        d = _drop(dy, self.dropout, f"{of}.out", scope)
        d = self._linear(w, "out", ops.gelu(hidden, bias, new), d, g, scope)
        d = ops.gelu_backward(hidden, bias, d, g.get(f"{of}.fc.bias"))
        normed = ops.layernorm_again(middle, *_weights(w, f"{of}.ln2"), stats2, new)
        d = self._linear(w, "fc", normed, d, g, scope, bias=False)
        dy = self._layernorm(w, "ln2", middle, stats2, d, dy, g)

        d = _drop(dy, self.dropout, f"{of}.proj", scope)
        d = self._linear(w, "proj", mixed, d, g, scope)
        d = ops.attention_backward(qkv, mixed, sums, d, new)
        normed = ops.layernorm_again(x, *_weights(w, f"{of}.ln1"), stats1, new)
        d = self._linear(w, "qkv", normed, d, g, scope)
        return self._layernorm(w, "ln1", x, stats1, d, dy, g)

    def _linear(
        self, w: Arrays, layer: str, x: F32, dy: F32, g: Arrays, scope: Scope, bias: bool = True
    ) -> F32:
        name = f"{self.name}.{layer}"
        dw, db = _gradients(g, name)
        return ops.linear_backward(x, w[f"{name}.weight"], dy, dw, db if bias else None, scope.new)

    def _layernorm(
        self, w: Arrays, layer: str, x: F32, stats: F32, dy: F32, more: F32, g: Arrays
    ) -> F32:
        name = f"{self.name}.{layer}"
        weight, gradients = w[f"{name}.weight"], _gradients(g, name)
        return ops.layernorm_backward(x, weight, stats, dy, *gradients, more)

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count 10 C + H + 4 numbers per token saved, C given."""
        tokens = 4 * batch * time
        return tokens * (10 * self.width + self.heads + 4), tokens * self.width


@dataclass(frozen=True)
class Head:
    """``logits = ln_f(x) @ matrix.T``. Saves x and the statistics."""

    matrix: str
    width: int

    def forward(self, w: Arrays, x: F32, scope: Scope) -> tuple[F32, Saved]:
        """Return the logits, shape (B, T, V)."""
        normed, stats = ops.layernorm(x, *_weights(w, "ln_f"), scope.new)
        return ops.linear(normed, w[self.matrix], None, scope.new), (x, stats)

    def backward(self, w: Arrays, saved: Saved, dy: F32, g: Arrays, scope: Scope) -> F32:
        """Return dx, shape (B, T, C); write the gradients of ln_f and of the matrix to g."""
        x, stats = saved
        normed = ops.layernorm_again(x, *_weights(w, "ln_f"), stats, scope.new)
        matrix = self.matrix
        d = ops.linear_backward(normed, w[matrix], dy, g.get(matrix), None, scope.new)
        return ops.layernorm_backward(x, w["ln_f.weight"], stats, d, *_gradients(g, "ln_f"))

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count C + 2 numbers per token saved, C given."""
        tokens = 4 * batch * time
        return tokens * (self.width + 2), tokens * self.width


def _layernorm(name: str, width: int) -> tuple[Parameter, ...]:
    return (
        Parameter(f"{name}.weight", (width,), fill=1.0),
        Parameter(f"{name}.bias", (width,)),
    )


def _linear(name: str, outputs: int, inputs: int, std: float) -> tuple[Parameter, ...]:
    return (
        Parameter(f"{name}.weight", (outputs, inputs), std=std),
        Parameter(f"{name}.bias", (outputs,)),
    )


def _block(name: str, width: int, num_blocks: int) -> Unit:
    std, small = _STD, _STD / math.sqrt(2 * num_blocks)
    return Unit(
        name,
        (
            *_layernorm(f"{name}.ln1", width),
            *_linear(f"{name}.qkv", 3 * width, width, std),
            *_linear(f"{name}.proj", width, width, small),
            *_layernorm(f"{name}.ln2", width),
            *_linear(f"{name}.fc", 4 * width, width, std),
            *_linear(f"{name}.out", width, 4 * width, small),
        ),
    )


def _stops(
    block: Unit, width: int, heads: int, dropout: float, tiles: int
) -> list[tuple[Unit, Visit]]:
    """Units of a block and how they are visited: one, or its tiles."""
    if tiles > 1:
        return tiled_block(block, width, heads, dropout, tiles)
    layer = Block(block.name, width, heads, dropout)
    return [(block, Visit(block.name, layer, writes=block.names))]


def _check_sizes(
    vocab: int, layers: int, width: int, heads: int, context: int, rate: float, tiles: int
) -> None:
    sizes = {"vocab": vocab, "layers": layers, "width": width, "heads": heads, "context": context}
    sizes["tiles"] = tiles
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"gpt: {name} {value} must be at least 1")
    if width % heads:
        raise ValueError(f"gpt: width {width} must be a multiple of the number of heads, {heads}")
    if not 0 <= rate < 1:
        raise ValueError(f"gpt: dropout {rate} must be at least 0 and below 1")


def gpt(
    vocab: int = 256,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    dropout: float = 0.0,
    tied: bool = True,
    tiles: int = 1,
) -> Model:
    """Declare GPT-2's decoder for token ids (B, T), T up to the context.

    Parameters
    ----------
    vocab, layers, width, heads, context : int
    dropout : float
        After the embedding and before each residual addition.
    tied : bool
        Whether the head's matrix is the token embedding: one parameter, in a unit visited twice.
    tiles : int
        Cut each block into so many tiles of its perceptron, and as many of its attention, or one
        per head: units that are visited one after the other (`zeromp.models.tiled`). The function
        and its initial values are the same. The embedding and the head are not cut.

    Returns
    -------
    Model
        Units ``embed`` (wte, wpe, and ln_f if tied), ``blocks.0`` and so on (with tiles,
        ``blocks.0.attention.tile0``, ``blocks.0.perceptron.tile0``), ``head`` (ln_f, head) if not
        tied. Targets are ids (B, T), -1 where there is nothing to predict.
    """
    _check_sizes(vocab, layers, width, heads, context, dropout, tiles)
    wte = Parameter("wte.weight", (vocab, width), std=_STD)
    wpe = Parameter("wpe.weight", (context, width), std=_STD)
    ln_f = _layernorm("ln_f", width)
    last = tuple(p.name for p in ln_f)
    head = wte if tied else Parameter("head.weight", (vocab, width), std=_STD)
    whole = [_block(f"blocks.{i}", width, layers) for i in range(layers)]
    stops = [stop for block in whole for stop in _stops(block, width, heads, dropout, tiles)]
    blocks = [unit for unit, _ in stops]
    if tied:
        units = (Unit("embed", (wte, wpe, *ln_f)), *blocks)
    else:
        units = (Unit("embed", (wte, wpe)), *blocks, Unit("head", (*ln_f, head)))
    path = (
        Visit("embed", Lookup(dropout), writes=(), adds=(wte.name, wpe.name)),
        *(visit for _, visit in stops),
        Visit(units[0 if tied else -1].name, Head(head.name, width), writes=(*last, head.name)),
    )
    return Model(
        name=f"gpt-{layers}x{width}" + (f"-{tiles}tiles" if tiles > 1 else ""),
        units=units,
        path=path,
        loss=ops.cross_entropy,
        count=ops.count_targets,
        check=functools.partial(ops.check_batch, vocab=vocab, context=context),
        vocab=vocab,
        context=context,
        num_multiplied=layers * 12 * width * width + vocab * width,
        attention_width=layers * width,
    )
