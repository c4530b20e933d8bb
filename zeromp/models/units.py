"""What a model is: units of declared parameters, and the path on which layers visit them.

Shapes: B batch, T time; a layer knows the rest.

[Note: path] A model is data. Its units say which arrays are gathered and reduced together; its
path says in which order layers use them. Forward walks the path, backward walks it in reverse. A
unit may be visited more than once, as with an embedding that is the head too (tied weights).

[Note: saved] What a forward saves for its backward holds arrays only, never a view of a weight or a
gradient: such a view would keep a released buffer alive. A backward leaves saved arrays as they
are, but may overwrite dy.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeromp.models.parts import Part
from zeromp.pool import fresh
from zeromp.wire import F32

Saved = tuple[Any, ...]  # arrays or None


@dataclass(frozen=True)
class Parameter:
    """What a model declares of one array.

    Parameters
    ----------
    name : str
        Unique in the model, such as ``blocks.0.qkv.weight``.
    shape : tuple of int
    std : float
        Initial values are normal with this standard deviation,
    fill : float
        or this constant where `std` is 0.
    part : Part or None
        What it is a part of, if it is a tile: see `zeromp.models.tiled`.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    fill: float = 0.0
    part: Part | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together.

    Parameters
    ----------
    name : str
        Unique in the model.
    parameters : tuple of Parameter
    whole : Unit or None
        What it is a tile of: its initial values are parts of that unit's.
    """

    name: str
    parameters: tuple[Parameter, ...]
    whole: "Unit | None" = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(p.name for p in self.parameters)


@dataclass(frozen=True)
class Scope:
    """Where a forward happens: all that the masks of dropout depend on, and where arrays come from.

    Parameters
    ----------
    seed : int
    step : int
    first_sample : int
        Number of the first sample of this micro-batch in the global batch.
    train : bool
        Without it, nothing is dropped.
    new : callable
        ``new(shape)`` is a float32 array with arbitrary values, from `zeromp.pool.Pool` or new.
    """

    seed: int = 0
    step: int = 0
    first_sample: int = 0
    train: bool = False
    new: Callable[[tuple[int, ...]], F32] = fresh

    def key(self, site: str) -> int:
        """Return the 64-bit key of the dropout at a place in the model."""
        sequence = np.random.SeedSequence([self.seed, self.step, zlib.crc32(site.encode())])
        return int(sequence.generate_state(1, np.uint64)[0])


class Layer(Protocol):
    """A pair of pure functions over weights that it is handed by their full names."""

    def forward(self, w: Mapping[str, F32], x: Any, scope: Scope) -> tuple[F32, Saved]:
        """Return the output, and what the backward needs. Neither w nor x is changed."""
        ...

    def backward(
        self, w: Mapping[str, F32], saved: Saved, dy: F32, g: Mapping[str, F32], scope: Scope
    ) -> F32 | None:
        """Return the gradient of x; write or add those of weights to g (see `Visit`).

        A name absent from g is frozen: its product is skipped. A layer of the model's input returns
        None. dy may be overwritten.
        """
        ...

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Bytes of what forward saves, each array once, and bytes of its x."""
        ...


@dataclass(frozen=True)
class Visit:
    """One stop on a model's path.

    Parameters
    ----------
    unit : str
    layer : Layer
    writes : tuple of str
        Names whose gradient this visit's backward writes.
    adds : tuple of str
        Names whose gradient it adds to: the caller hands zeros, or what an earlier visit of the
        same backward left.
    carried : bool
        What its backward needs of its input comes along with the gradient, so that recomputation
        keeps nothing of this visit: its backward is handed ``saved = ()``.
    """

    unit: str
    layer: Layer
    writes: tuple[str, ...]
    adds: tuple[str, ...] = ()
    carried: bool = False


@dataclass(frozen=True)
class Again:
    """A layer that is visited again: it adds where the bare layer writes."""

    layer: Layer
    writes: tuple[str, ...]

    def forward(self, w: Mapping[str, F32], x: Any, scope: Scope) -> tuple[F32, Saved]:
        """Forward of the bare layer."""
        return self.layer.forward(w, x, scope)

    def backward(
        self, w: Mapping[str, F32], saved: Saved, dy: F32, g: Mapping[str, F32], scope: Scope
    ) -> F32 | None:
        """Backward of the bare layer into arrays of its own, which are then added to g."""
        own = {name: np.empty_like(g[name]) for name in self.writes if name in g}
        dx = self.layer.backward(w, saved, dy, {**g, **own}, scope)
        for name, gradient in own.items():
            np.add(g[name], gradient, out=g[name])
        return dx

    def activation_bytes(self, batch: int, time: int) -> tuple[int, int]:
        """Those of the bare layer."""
        return self.layer.activation_bytes(batch, time)


def _adding(visits: tuple[Visit, ...]) -> tuple[Visit, ...]:
    """Let visits whose gradients were met before in backward add to them instead of writing."""
    met: set[str] = set()
    path = []
    for visit in reversed(visits):
        again = tuple(name for name in visit.writes if name in met)
        if again:
            writes = tuple(name for name in visit.writes if name not in met)
            layer, adds = Again(visit.layer, again), visit.adds + again
            visit = Visit(visit.unit, layer, writes, adds, visit.carried)
        met.update(visit.writes + visit.adds)
        path.append(visit)
    return tuple(reversed(path))


@dataclass(frozen=True)
class Model:
    """Units, the path through them, and the loss at its end.

    Parameters
    ----------
    name : str
    units : tuple of Unit
    path : tuple of Visit
        In forward order. Where a visit would write a gradient that a later one has, its layer is
        replaced by one that adds (`Again`), so that any unit may be visited any number of times.
    loss : callable
        ``loss(output, targets, factor)`` is the sum of the losses in float64; it overwrites the
        output with factor times its gradient.
    count : callable
        ``count(targets)`` is the number of targets that count: the mean loss is sum / count.
    check : callable
        ``check(x, targets or None)`` raises ValueError on input that the model cannot take.
    vocab, context : int, optional
        Number of token ids, and the most tokens in a row.
    num_multiplied : int
        Parameters that take part in a matrix product.
    attention_width : int
        Channels of all attention layers together.
    """

    name: str
    units: tuple[Unit, ...]
    path: tuple[Visit, ...]
    loss: Callable[[F32, NDArray[Any], float], float]
    count: Callable[[NDArray[Any]], int]
    check: Callable[[NDArray[Any], NDArray[Any] | None], None]
    vocab: int | None = None
    context: int | None = None
    num_multiplied: int = 0
    attention_width: int = 0

    def __post_init__(self) -> None:
        """Check that names are unique and that the path visits all units; see `path`."""
        object.__setattr__(self, "path", _adding(self.path))
        names = [p.name for unit in self.units for p in unit.parameters]
        units = {unit.name for unit in self.units}
        if len(set(names)) < len(names) or len(units) < len(self.units):
            raise ValueError(f"model {self.name}: names of units and of parameters must be unique")
        if lost := units ^ {visit.unit for visit in self.path}:
            raise ValueError(f"model {self.name}: units and path disagree about {sorted(lost)}")

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, those used twice counted once."""
        return sum(p.size for unit in self.units for p in unit.parameters)

    def initial(self, unit: Unit, seed: int) -> dict[str, F32]:
        """Draw a unit's initial values: they depend on the seed and the unit's name alone.

        Those of a tile are parts of the values of the unit that was cut.
        """
        whole = unit.whole or unit
        sequence = np.random.SeedSequence([seed, zlib.crc32(whole.name.encode())])
        rng = np.random.Generator(np.random.PCG64(sequence))
        kept = {p.part.name if p.part else p.name: p for p in unit.parameters}
        values = {}
        for p in whole.parameters:
            own = kept.get(p.name)
            if p.std:  # drawn if not kept, too: what comes next depends on it
                part = own.part if own else Part(p.name, p.shape, 0, ())
                drawn = (part or Part(p.name, p.shape, 0, ((0, p.shape[0]),))).draw(rng, p.std)
            if own:
                values[own.name] = drawn if p.std else np.full(own.shape, p.fill, np.float32)
        return values

    def flops_per_token(self, time: int | None = None) -> int:
        """Floating-point operations of forward and backward per token (or sample, without tokens).

        6 N + 12 L C T, with N the parameters that are multiplied, L layers, C channels, and T the
        context or `time`: attention counted in full, recomputation not (Chowdhery et al. 2022,
        arXiv:2204.02311, appendix B).
        """
        length = self.context if time is None else time
        return 6 * self.num_multiplied + 12 * self.attention_width * (length or 0)

    def activation_bytes(self, batch: int, time: int = 1) -> list[tuple[int, int]]:
        """For each visit, bytes of what its forward saves, and bytes of its input.

        Each saved array counts once, in the visit that saves it; an input that is saved counts in
        both numbers. Token ids are int64.
        """
        return [visit.layer.activation_bytes(batch, time) for visit in self.path]
