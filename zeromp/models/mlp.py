"""Multi-layer perceptron: linear layers with GELU between them.

Shapes: B batch, I inputs, O outputs of a layer.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import layers as ops
from zeromp.models.tiled import tiled_dense
from zeromp.models.units import Model, Parameter, Saved, Scope, Unit, Visit
from zeromp.wire import F32


@dataclass(frozen=True)
class Dense:
    """``gelu(x @ w.T + b)``, without GELU in the last layer. Saves x and x @ w.T."""

    name: str
    inputs: int
    outputs: int
    first: bool
    last: bool

    def forward(self, w: Mapping[str, F32], x: F32, scope: Scope) -> tuple[F32, Saved]:
        """Return the outputs, shape (B, O)."""
        weight, bias = w[f"{self.name}.weight"], w[f"{self.name}.bias"]
        if self.last:
            return ops.linear(x, weight, bias, scope.new), (x, None)
        y = ops.linear(x, weight, None, scope.new)
        return ops.gelu(y, bias, scope.new), (x, y)

    def backward(
        self, w: Mapping[str, F32], saved: Saved, dy: F32, g: Mapping[str, F32], scope: Scope
    ) -> F32 | None:
        """Return dx, shape (B, I), but None for the model's input; write gradients to g."""
        x, y = saved
        dw, db = g.get(f"{self.name}.weight"), g.get(f"{self.name}.bias")
        if not self.last:
            dy, db = ops.gelu_backward(y, w[f"{self.name}.bias"], dy, db), None
        if self.first:
            ops.linear_gradients(x, dy, dw, db)
            return None
        return ops.linear_backward(x, w[f"{self.name}.weight"], dy, dw, db, scope.new)

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count inputs and, but in the last layer, outputs saved, inputs given."""
        rows = 4 * batch * time
        return rows * (self.inputs + (0 if self.last else self.outputs)), rows * self.inputs


def _check_values(array: NDArray[Any], width: int, what: str) -> None:
    ops.check_float(array, (len(array), width) if array.ndim else (0, width), what)
    if not np.isfinite(array).all():
        raise ValueError(f"mlp: {what} hold inf or NaN; all must be finite")


def _check(x: NDArray[Any], y: NDArray[Any] | None, inputs: int, outputs: int, ids: bool) -> None:
    """ValueError unless x is finite float32 (B, I), and y ids (B,) or finite float32 (B, O)."""
    _check_values(x, inputs, "inputs")
    if y is None:
        return
    if ids:
        ops.check_targets(y, x.shape[:1], outputs)
        return
    _check_values(y, outputs, "targets")
    if len(y) != len(x):
        raise ValueError(f"mlp: {len(y)} targets for {len(x)} inputs; they must be as many")


def _size(targets: NDArray[Any]) -> int:
    return int(targets.size)


def mlp(sizes: tuple[int, ...] = (8, 32, 4), loss: str = "cross_entropy", tiles: int = 1) -> Model:
    """Perceptron for float32 inputs (B, sizes[0]).

    Parameters
    ----------
    sizes : tuple of int
        Inputs, hidden layers, outputs.
    loss : str
        ``cross_entropy`` for targets that are integers (B,), -1 where there is nothing to predict,
        or ``mse``, the mean over all outputs, for float32 targets (B, sizes[-1]).
    tiles : int
        Cut each layer by its outputs into so many units, or one per output if those are fewer,
        visited one after the other (`zeromp.models.tiled`); same function, same initial values.

    Returns
    -------
    Model
        Units ``layers.0`` and so on (with tiles, ``layers.0.tile0``), weights normal with standard
        deviation 1 / sqrt(inputs).
    """
    sizes = tuple(sizes)
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"mlp: sizes {sizes} must be two numbers or more, all at least 1")
    if loss not in ("cross_entropy", "mse"):
        raise ValueError(f"mlp: loss {loss!r} must be 'cross_entropy' or 'mse'")
    if tiles < 1:
        raise ValueError(f"mlp: tiles {tiles} must be at least 1")
    last = len(sizes) - 2
    stops: list[tuple[Unit, Visit]] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        name = f"layers.{i}"
        weight = Parameter(f"{name}.weight", (outputs, inputs), std=1 / math.sqrt(inputs))
        bias = Parameter(f"{name}.bias", (outputs,))
        unit = Unit(name, (weight, bias))
        if tiles > 1:
            stops += tiled_dense(unit, outputs, inputs, tiles, first=i == 0, last=i == last)
        else:
            layer = Dense(name, inputs, outputs, first=i == 0, last=i == last)
            stops.append((unit, Visit(name, layer, writes=unit.names)))
    ids = loss == "cross_entropy"
    return Model(
        name="mlp-" + "x".join(map(str, sizes)) + (f"-{tiles}tiles" if tiles > 1 else ""),
        units=tuple(unit for unit, _ in stops),
        path=tuple(visit for _, visit in stops),
        loss=ops.cross_entropy if ids else ops.mse,
        count=ops.count_targets if ids else _size,
        check=functools.partial(_check, inputs=sizes[0], outputs=sizes[-1], ids=ids),
        num_multiplied=sum(a * b for a, b in pairwise(sizes)),
    )
