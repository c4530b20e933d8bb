"""Norm of the reduced gradient, and who spoils it; from each rank's own pieces, whatever the stage.

Stages agree to the bit because all of them add the same numbers in the same order: squares within a
piece, pieces of a rank unit by unit, ranks in their order, all in float64. A rank's piece counts
once, also where every rank holds all gradients.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeromp.flat import Extent, Layout
from zeromp.store import Store
from zeromp.wire import convert, first_nonfinite, square_sum
from zeromp.world import World


class Gradients(Protocol):
    """What is needed of rung 2: arrays, with this rank's pieces reduced."""

    arrays: list[NDArray[Any]]
    extents: list[Extent]
    store: Store


def square_norm(layout: Layout, gradients: Gradients, world: World) -> float:
    """Squared norm of the whole gradient, equal on all ranks; not finite if an element is not."""
    mine = 0.0
    for piece, _, _ in _own_pieces(layout, gradients):
        mine += square_sum(piece)
    total = 0.0
    for row in world.agree([mine]):
        total += float(row[0])
    return total


def first_bad(layout: Layout, gradients: Gradients, world: World) -> str:
    """Name the first parameter, in the model's order, whose gradient is not finite."""
    order = {array.name: i for i, array in enumerate(layout.arrays)}
    found = (float(len(order)), 0.0)
    for piece, index, unit in _own_pieces(layout, gradients):
        at = first_nonfinite(piece)
        if at < 0:
            continue
        flat = layout.trainable[index]
        inside = flat.piece[unit].start + at
        name = next(a.name for a, start in flat.arrays[unit] if start <= inside < start + a.size)
        value = np.empty(1, np.float32)
        convert(piece[at : at + 1], value)
        found = min(found, (float(order[name]), float(np.isnan(value[0]))))
    number, is_nan = min((row[0], row[1]) for row in world.agree(found).tolist())
    return f"{'NaN' if is_nan else 'inf'} in the gradient of {layout.arrays[int(number)].name!r}"


def _own_pieces(layout: Layout, gradients: Gradients) -> Iterator[tuple[NDArray[Any], int, str]]:
    """Yield this rank's pieces, with the index of their flat and their unit."""
    for index, flat in enumerate(layout.trainable):
        for unit in flat.counts:
            stored = gradients.arrays[index][gradients.extents[index].own[unit]]
            yield gradients.store.reading(stored), index, unit
