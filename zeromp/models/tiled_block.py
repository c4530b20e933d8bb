"""Tiles of a GPT block: attention by heads, the perceptron by hidden channels.

Shapes: B batch, T time, C channels, H heads; j counts tiles. See `zeromp.models.tiled`, "tiles".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zeromp import layers as ops
from zeromp.models.parts import ranges
from zeromp.models.tiled import tile
from zeromp.models.units import Saved, Scope, Unit, Visit
from zeromp.wire import F32

Arrays = Mapping[str, F32]


def _weights(w: Arrays, name: str) -> tuple[F32, F32]:
    return w[f"{name}.weight"], w[f"{name}.bias"]


def _gradients(g: Arrays, name: str) -> tuple[F32 | None, F32 | None]:
    return g.get(f"{name}.weight"), g.get(f"{name}.bias")


@dataclass(frozen=True)
class Heads:
    """Attention of some heads, between the two linear layers of a tile."""

    count: int
    width: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels taken and given."""
        return 3 * self.count * self.width, self.count * self.width

    def forward(self, x: F32) -> tuple[F32, F32]:
        """Return the output, and its statistics for the backward."""
        return ops.attention(x, self.count)

    def backward(self, x: F32, y: F32, stats: F32, dy: F32) -> F32:
        """Return dx."""
        return ops.attention_backward(x, y, stats, dy)

    @property
    def saved_per_token(self) -> int:
        """Count what is taken and given, and the statistics."""
        return sum(self.sizes) + self.count


@dataclass(frozen=True)
class Hidden:
    """GELU of some hidden channels, between the two linear layers of a tile."""

    width: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels taken and given."""
        return self.width, self.width

    def forward(self, x: F32) -> tuple[F32, None]:
        """Return the output; the backward needs no more."""
        return ops.gelu(x, np.zeros(self.width, np.float32)), None

    def backward(self, x: F32, y: F32, stats: Any, dy: F32) -> F32:  # noqa: ARG002
        """Turn dy into dx in place and return it."""
        return ops.gelu_backward(x, np.zeros(self.width, np.float32), dy, None)

    @property
    def saved_per_token(self) -> int:
        """Count what is taken: what is given is made anew, which costs a pass."""
        return self.width


@dataclass(frozen=True)
class BranchTile:
    """``h += dropout(out_j(inner(into_j(n))))``: what tile j adds to the stream h, n = norm(x).

    The first tile is given x = h, the others (h, n), shape (2, B, T, C); the last gives h alone.
    In backward (dh, dn, n), shape (3, B, T, C), passes: dh as it is, since h is only added to.
    Dropout is the same mask on every tile, so that their sum is dropped as a whole.
    """

    block: str
    norm: str
    into: str
    out: str
    index: int
    count: int
    width: int
    inner: Heads | Hidden
    dropout: float

    @property
    def _first(self) -> bool:
        return self.index == 0

    @property
    def _last(self) -> bool:
        return self.index == self.count - 1

    def _name(self, layer: str) -> str:
        return f"{self.block}.{layer}.tile{self.index}"

    def _drop(self, x: F32, scope: Scope) -> F32:
        if not scope.train or self.dropout == 0:
            return x
        key = scope.key(f"{self.block}.{self.out}")
        return ops.dropout(x, self.dropout, key, scope.first_sample)

    def _inside(self, w: Arrays, n: F32) -> tuple[F32, Any, F32]:
        """What the inner function is given, what it saves, and what it gives."""
        given = ops.linear(n, *_weights(w, self._name(self.into)))
        active, kept = self.inner.forward(given)
        return given, kept, active

    def forward(self, w: Arrays, x: F32, scope: Scope) -> tuple[F32, Saved]:
        """Return (h, n), or h after the last tile."""
        stats = None
        if self._first:
            h, (n, stats) = x, ops.layernorm(x, *_weights(w, f"{self.block}.{self.norm}"))
        else:
            h, n = x
        given, kept, active = self._inside(w, n)
        out = w[f"{self._name(self.out)}.weight"]
        bias = w[f"{self.block}.{self.out}.bias"] if self._first else None
        y = self._drop(ops.linear(active, out, bias), scope)
        saved = (
            x if self._first else None,
            stats,
            (n if self._first else n.copy()) if self._last else None,  # a view would keep h alive
            given,
            kept,
            active if isinstance(self.inner, Heads) else None,
        )
        if self._last:
            return np.add(y, h, out=y), saved
        both = np.empty((2, *h.shape), np.float32)
        np.add(y, h, out=both[0])
        both[1] = n
        return both, saved

    def backward(self, w: Arrays, saved: Saved, dy: F32, g: Arrays, scope: Scope) -> F32:
        """Return (dh, dn, n), or dx before the first tile; write gradients to g."""
        x, stats, n, *inside = saved or (None, None, None)
        if self._last:
            dh, dn = dy, None
        else:
            dh, dn, n = dy
        given, kept, active = inside or self._inside(w, n)
        if active is None:
            active, _ = self.inner.forward(given)

        d = self._drop(dh, scope)
        out = f"{self._name(self.out)}.weight"
        bias = g.get(f"{self.block}.{self.out}.bias")  # only the first tile has it
        d = ops.linear_backward(active, w[out], d, g.get(out), bias)
        d = self.inner.backward(given, active, kept, d)
        into = self._name(self.into)
        d = ops.linear_backward(n, w[f"{into}.weight"], d, *_gradients(g, into))
        if dn is not None:
            d = np.add(d, dn, out=d)
        if self._first:
            norm = f"{self.block}.{self.norm}"
            d = ops.layernorm_backward(x, w[f"{norm}.weight"], stats, d, *_gradients(g, norm))
            return np.add(d, dh, out=d)
        return np.stack([dh, d, n])

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count what the inner function needs; C + 2 more in the first tile, C more in the last."""
        numbers = self.inner.saved_per_token
        numbers += (self.width + 2) * self._first + self.width * self._last
        tokens = 4 * batch * time
        return tokens * numbers, tokens * self.width * (1 if self._first else 2)


def tiled_block(
    block: Unit, width: int, heads: int, dropout: float, tiles: int
) -> list[tuple[Unit, Visit]]:
    """Cut a GPT block: attention by heads, the perceptron by hidden channels.

    Parameters
    ----------
    block : Unit
        With layers ln1, qkv, proj, ln2, fc, out, as `zeromp.models.gpt` declares it.
    width, heads : int
    dropout : float
    tiles : int
        Of the perceptron; those of the attention are at most as many as there are heads.

    Returns
    -------
    list of (Unit, Visit)
        Units ``blocks.0.attention.tile0``, ..., ``blocks.0.perceptron.tile0``, ..., in order.
    """
    stops, each = [], width // heads
    for branch, (norm, into, out), size in (
        ("attention", ("ln1", "qkv", "proj"), heads),
        ("perceptron", ("ln2", "fc", "out"), 4 * width),
    ):
        spans = ranges(size, tiles)
        for j, (start, stop) in enumerate(spans):
            if branch == "attention":
                inner: Heads | Hidden = Heads(stop - start, each)
                columns = (start * each, stop * each)
                rows = tuple((i * width + columns[0], i * width + columns[1]) for i in range(3))
            else:
                inner, columns = Hidden(stop - start), (start, stop)
                rows = (columns,)
            name, cuts = block.name, {}
            cuts[f"{name}.{into}.weight"] = cuts[f"{name}.{into}.bias"] = (0, rows)
            cuts[f"{name}.{out}.weight"] = (1, (columns,))
            whole = (f"{name}.{out}.bias", f"{name}.{norm}.weight", f"{name}.{norm}.bias")
            unit = tile(block, f"{name}.{branch}", j, cuts, whole if j == 0 else ())
            layer = BranchTile(name, norm, into, out, j, len(spans), width, inner, dropout)
            carried = j < len(spans) - 1 and j > 0
            stops.append((unit, Visit(unit.name, layer, writes=unit.names, carried=carried)))
    return stops
