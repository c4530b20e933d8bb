"""What a rank holds, as saving and loading see it: stored arrays, and the elements they cover."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from zeromp.checkpoint.files import Dataset
from zeromp.flat import Extent, Flat, Layout
from zeromp.stage1_optimizer import States
from zeromp.store import Store
from zeromp.world import World


class Parameters(Protocol):
    """What is needed of rung 3."""

    arrays: list[NDArray[Any]]
    extents: list[Extent]

    def publish(self) -> None:
        """Make updated pieces known to all ranks."""


class Optimizer(Protocol):
    """What is needed of rung 1."""

    extents: list[Extent]
    states: list[States]


class Held(Protocol):
    """A layout, and who holds what of it."""

    layout: Layout
    world: World
    store: Store

    @property
    def parameters(self) -> Parameters:
        """Holder of parameters."""

    @property
    def optimizer(self) -> Optimizer:
        """Holder of masters and moments."""


class Part(NamedTuple):
    """A dataset to be written, and the stored arrays whose elements it takes, end to end."""

    dataset: Dataset
    views: list[NDArray[Any]]


def own_parts(held: Held) -> Iterator[Part]:
    """Yield a rank's own pieces: the same at every stage, since every rank's pieces are.

    16-bit parameters that are trained are left out: they are their masters, rounded.
    """
    for index, flat in enumerate(held.layout.flats):
        for kind, (array, extent) in kept(held, index).items():
            views = _own(flat, array, extent)
            format_name = flat.format.name if kind == "parameters" else "float32"
            size = sum(flat.counts[unit][held.layout.rank] for unit in flat.counts)
            yield Part(Dataset(f"flat{index}/{kind}", format_name, size), views)


def kept(held: Held, index: int) -> dict[str, tuple[NDArray[Any], Extent]]:
    """Arrays of a flat that a checkpoint holds, by kind, with what they cover."""
    parameters = held.parameters.arrays[index], held.parameters.extents[index]
    if not held.layout.flats[index].trainable:
        return {"parameters": parameters}
    states = held.optimizer.states[index]
    master = parameters if states.master is None else (states.master, states.extent)
    return {"master": master} | {k: (a, states.extent) for k, a in states.moments.items()}


def _own(flat: Flat, array: NDArray[Any], extent: Extent) -> list[NDArray[Any]]:
    return [array] if extent.sharded else [array[extent.own[unit]] for unit in flat.counts]
