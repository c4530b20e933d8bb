"""Tiles: wide layers cut into pieces that are units of their own, visited one after the other.

Shapes: B batch, T time, C channels, I inputs, O outputs; j counts tiles.

[Note: tiles] A unit's weights are gathered whole, so the widest unit sets what a rank must hold for
a moment (window, widened weights, buckets). Cut into t tiles it needs about 1/t of that. One array
passes from visit to visit, so it holds side by side what later tiles need. Forward adds up outputs
(or appends them), backward adds up the gradients of the input that all tiles share. That input is
saved by the last tile alone: in backward it comes to the others along with the gradient
(`Visit.carried`), so that what is kept does not grow with the number of tiles.
Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.3, "memory-centric tiling".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeromp import layers as ops
from zeromp.models.parts import Part, ranges
from zeromp.models.units import Model, Parameter, Saved, Scope, Unit, Visit
from zeromp.wire import F32

Arrays = Mapping[str, F32]


# ---- units ---------------------------------------------------------------------------------------


def tile(
    whole: Unit,
    prefix: str,
    index: int,
    cuts: Mapping[str, tuple[int, tuple[tuple[int, int], ...]]],
    uncut: Sequence[str] = (),
) -> Unit:
    """Unit of tile `index`: parts of some parameters, by axis and runs, and others as they are."""
    parameters = []
    for p in whole.parameters:
        if p.name in cuts:
            part = Part(p.name, p.shape, *cuts[p.name])
            layer, kind = p.name.rsplit(".", 1)
            name = f"{layer}.tile{index}.{kind}"
            parameters.append(Parameter(name, part.shape, p.std, p.fill, part))
        elif p.name in uncut:
            parameters.append(p)
    return Unit(f"{prefix}.tile{index}", tuple(parameters), whole)


# ---- from whole arrays to tiles and back ---------------------------------------------------------


def cut_tiles(model: Model, values: Mapping[str, F32]) -> dict[str, F32]:
    """Arrays by the names of a tiled model, from those of the same model without tiles.

    So weights of an untiled model, from a file or from `Engine.full`, become the ``weights`` of a
    tiled one; moments are cut alike. Names that the model lacks are left out.
    """
    found = {}
    for p in (p for unit in model.units for p in unit.parameters):
        name, shape = (p.part.name, p.part.whole) if p.part else (p.name, p.shape)
        array = _find(values, name, shape)
        found[p.name] = p.part.cut(array) if p.part else array
    return found


def join_tiles(model: Model, values: Mapping[str, F32]) -> dict[str, F32]:
    """Arrays by the names of the untiled model, from those of a tiled one: undoes `cut_tiles`."""
    found: dict[str, F32] = {}
    for p in (p for unit in model.units for p in unit.parameters):
        array = _find(values, p.name, p.shape)
        if p.part:
            whole = found.setdefault(p.part.name, np.empty(p.part.whole, np.float32))
            p.part.put(array, whole)
        else:
            found[p.name] = array
    return found


def _find(values: Mapping[str, F32], name: str, shape: tuple[int, ...]) -> F32:
    if name not in values:
        raise ValueError(f"tiles: {name!r} is missing; values must hold every array of the model")
    array = np.asarray(values[name], np.float32)
    if array.shape != shape:
        raise ValueError(f"tiles: {name!r} has shape {array.shape}; it must be {shape}")
    return array


# ---- tiles of a linear layer ---------------------------------------------------------------------


@dataclass(frozen=True)
class DenseTile:
    """Some outputs of ``gelu(x @ w.T + b)``, without GELU in the last layer of a model.

    The first tile is given x, the others x and the outputs so far, side by side: (B, I + ...); the
    last gives all outputs alone. In backward x, dx and the gradients of earlier outputs pass; the
    first layer of a model needs no dx, and passes none.
    """

    name: str
    inputs: int
    spans: tuple[tuple[int, int], ...]
    index: int
    first: bool
    last: bool

    @property
    def _ends(self) -> bool:
        return self.index == len(self.spans) - 1

    def _linear(self, w: Arrays, x: F32) -> F32:
        name = f"{self.name}.tile{self.index}"
        return ops.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def forward(self, w: Arrays, x: F32, scope: Scope) -> tuple[F32, Saved]:  # noqa: ARG002
        """Return x and the outputs up to this tile's, or all outputs after the last tile."""
        whole, x = x, np.ascontiguousarray(x[:, : self.inputs])
        y = self._linear(w, x)
        saved = (x if self._ends else None, None if self.last else y)
        before = whole[:, self.inputs :] if self._ends else whole
        return np.concatenate(
            [before, y if self.last else ops.gelu(y, np.zeros(y.shape[-1], np.float32))], axis=1
        ), saved

    def backward(
        self,
        w: Arrays,
        saved: Saved,
        dy: F32,
        g: Arrays,
        scope: Scope,  # noqa: ARG002
    ) -> F32 | None:
        """Return x, dx and the gradients of earlier outputs, or dx alone before the first tile."""
        start, stop = self.spans[self.index]
        x, y = saved or (None, None)
        dx = None
        if not self._ends:
            x = np.ascontiguousarray(dy[:, : self.inputs])
            dx = None if self.first else dy[:, self.inputs : 2 * self.inputs]
        earlier, own = dy[:, -stop : start - stop], np.ascontiguousarray(dy[:, start - stop :])
        if not self.last:
            y = self._linear(w, x) if y is None else y
            own = ops.gelu_backward(y, np.zeros(y.shape[-1], np.float32), own, None)
        name = f"{self.name}.tile{self.index}"
        dw, db = g.get(f"{name}.weight"), g.get(f"{name}.bias")
        if self.first:
            ops.linear_gradients(x, own, dw, db)
            return np.concatenate([x, earlier], axis=1) if self.index else None
        d = ops.linear_backward(x, w[f"{name}.weight"], own, dw, db)
        if dx is not None:
            np.add(d, dx, out=d)
        return np.concatenate([x, d, earlier], axis=1) if self.index else d

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Count inputs in the last tile, outputs but in the last layer; inputs, outputs so far."""
        start, stop = self.spans[self.index]
        rows = 4 * batch * time
        saved = self.inputs * self._ends + (0 if self.last else stop - start)
        return rows * saved, rows * (self.inputs + start)


def tiled_dense(
    whole: Unit, outputs: int, inputs: int, tiles: int, first: bool, last: bool
) -> list[tuple[Unit, Visit]]:
    """Cut a unit of one linear layer by its outputs, into units ``layers.0.tile0`` and so on.

    Parameters
    ----------
    whole : Unit
    outputs, inputs, tiles : int
        Tiles are at most as many as outputs.
    first, last : bool
        Whether the layer is the first or the last of its model.
    """
    spans, stops = ranges(outputs, tiles), []
    for j, span in enumerate(spans):
        unit = tile(whole, whole.name, j, dict.fromkeys(whole.names, (0, (span,))))
        layer = DenseTile(whole.name, inputs, spans, j, first, last)
        stops.append((unit, Visit(unit.name, layer, writes=unit.names, carried=j < len(spans) - 1)))
    return stops
