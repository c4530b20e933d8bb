"""Loading: any number of ranks, stage and format from any other; each rank reads what it holds.

Elements are found by name and place, never by shard: what a rank holds of an array is cut into
*runs*, each from one dataset of one file. Masters are read, rounded to 16 bits where parameters
are, and published; moments are read; frozen arrays are read by whoever holds them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeromp.checkpoint.errors import Mismatch
from zeromp.checkpoint.files import ITEM_BYTES, TILE_BYTES, tiles
from zeromp.checkpoint.held import Held
from zeromp.checkpoint.reading import Checkpoint, Source
from zeromp.flat import Array, Extent, Flat
from zeromp.wire import convert
from zeromp.world import World


@dataclass
class LoadReport:
    """What a load did; equal on all ranks but for the bytes and `rank_extra`.

    Parameters
    ----------
    path : Path
        The checkpoint's folder.
    record : dict
        All its metadata.
    bytes_read : int
        Of numbers, read into this rank's arrays; equals `predicted_bytes`.
    bytes_verified : int
        Read by this rank beforehand, to compare checksums: each file is read by one rank.
    extra : dict
        What `save` was given.
    rank_extra : object
        What `save` was given on this rank; None if the number of ranks differs.
    notes : list of str
        What of the checkpoint was not used, and what differs from it here.
    """

    path: Path
    record: dict[str, Any]
    bytes_read: int = 0
    bytes_verified: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    rank_extra: Any = None
    notes: list[str] = field(default_factory=list)


# ---- does it fit? --------------------------------------------------------------------------------


def check_match(held: Held, checkpoint: Checkpoint, weights_only: bool) -> list[str]:
    """Mismatch, with all differences, unless the checkpoint is of this model and optimizer.

    Returns
    -------
    list of str
        What of the checkpoint will not be used.
    """
    lines, used, unused = [], set(), []
    for array in held.layout.arrays:
        stored = checkpoint.find_array(array.name)
        if stored is None:
            lines.append(f"missing in the checkpoint: {array.name} {array.shape}")
            continue
        used.add(stored.name)
        if stored.shape != array.shape:
            lines.append(f"shape of {array.name}: {stored.shape} there, {array.shape} here")
        if array.trainable and not weights_only and not stored.trainable:
            lines.append(f"moments of {array.name} are missing: it was frozen; it is trained here")
        if stored.trainable and not array.trainable:
            unused.append(f"moments of {array.name} are not used: it is frozen here")
    for array in checkpoint.arrays:
        if array.name not in used:
            lines.append(f"missing here: {array.name} {array.shape}")
    if not weights_only:
        lines += _compare_states(held, checkpoint)
    if lines:
        advice = "" if weights_only else "; weights_only=True asks for no moments"
        shown = lines[:20] + [f"... and {len(lines) - 20} more"] * (len(lines) > 20)
        raise Mismatch(f"{checkpoint.path} does not fit{advice}:\n  " + "\n  ".join(shown))
    return unused


def _compare_states(held: Held, checkpoint: Checkpoint) -> list[str]:
    """What the optimizers' states differ in: those of another optimizer mean other things."""
    there = checkpoint.record["optimizer"]
    rule = held.optimizer.states[0].rule
    name = type(rule).__name__
    if (there["name"], tuple(there["states"])) == (name, tuple(rule.states)):
        return []
    return [f"optimizer: {there['name']} with {', '.join(there['states'])} there, {name} with "
            f"{', '.join(rule.states)} here"]  # fmt: skip


# ---- numbers in ----------------------------------------------------------------------------------


class Run(NamedTuple):
    """Elements that lie together in a dataset of a file, and in the arrays here."""

    source_flat: int
    source: Source
    kind: str
    starts: tuple[int, ...]  # in each of the extents that `runs` was given


def load_numbers(held: Held, checkpoint: Checkpoint, weights_only: bool) -> None:
    """Read all that this rank holds into its arrays, then publish parameters.

    With `weights_only` moments become zero.
    """
    with held.world.ledger.within("setup"):
        with held.world.together():
            for index, flat in enumerate(held.layout.flats):
                if flat.trainable:
                    _load_trained(held, checkpoint, index, weights_only)
                else:
                    _load_weights(held, checkpoint, index, held.parameters.extents[index], None)
        held.parameters.publish()


def _load_trained(held: Held, checkpoint: Checkpoint, index: int, weights_only: bool) -> None:
    states = held.optimizer.states[index]
    _load_weights(held, checkpoint, index, states.extent, states.master)
    flat = held.layout.flats[index]
    tile = np.zeros(TILE_BYTES // 8, np.float32)
    for kind, array in states.moments.items():
        if weights_only:
            tile.fill(0)
            for part in tiles(array.size, 8):
                held.store.write(tile[: part.stop - part.start], array[part])
            continue
        for run in runs(flat, states.extent, [states.extent], checkpoint):
            for values, at in _tiles_of(checkpoint, run, kind, tile):
                start = run.starts[0] + at
                held.store.write(values, array[start : start + values.size])


def _load_weights(
    held: Held, checkpoint: Checkpoint, index: int, extent: Extent, master: NDArray[Any] | None
) -> None:
    """Read what an extent covers into the master, if there is one, and into the parameters."""
    flat, stored = held.layout.flats[index], held.parameters.arrays[index]
    tile = np.empty(TILE_BYTES // 8, np.float32)
    narrow = np.empty(tile.size if stored.dtype != np.float32 else 0, stored.dtype)
    for run in runs(flat, extent, [extent, held.parameters.extents[index]], checkpoint):
        for values, at in _tiles_of(checkpoint, run, run.kind, tile):
            places = [slice(s + at, s + at + values.size) for s in run.starts]
            if master is not None:
                held.store.write(values, master[places[0]])
            rounded = values
            if narrow.size:
                rounded = narrow[: values.size]
                convert(values, rounded)
            held.store.write(rounded, stored[places[1]])


def _tiles_of(
    checkpoint: Checkpoint, run: Run, kind: str, tile: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.float32], int]]:
    """Read a run tile by tile; yields the numbers, and where they begin in the run."""
    rank, start, size = run.source
    for part in tiles(size, 8):
        values = tile[: part.stop - part.start]
        source = Source(rank, start + part.start, values.size)
        checkpoint.read_source(f"flat{run.source_flat}/{kind}", source, values)
        yield values, part.start


def runs(flat: Flat, extent: Extent, places: list[Extent], checkpoint: Checkpoint) -> list[Run]:
    """Cut what an extent covers of a flat into runs.

    Parameters
    ----------
    flat : Flat
    extent : Extent
    places : list of Extent
        Of the arrays that hold these elements: it, or others that cover more.
    checkpoint : Checkpoint
    """
    found: list[Run] = []
    for array, low, high, unit, at in covered(flat, extent):
        bases = [(p.own if extent.sharded else p.spans)[unit].start + at for p in places]
        stored = checkpoint.find_array(array.name)
        assert stored is not None
        source_flat = checkpoint.flat_of(stored.name)
        kind = checkpoint.kinds(stored.name)[0]
        for source in checkpoint.sources(stored.name, low, high):
            run = Run(source_flat, source, kind, tuple(bases))
            bases = [base + source.size for base in bases]
            if found and (joined := _join(found[-1], run)):
                found[-1] = joined
            else:
                found.append(run)
    return found


def covered(flat: Flat, extent: Extent) -> Iterator[tuple[Array, int, int, str, int]]:
    """Yield what an extent covers: array, its first and last + 1 element, unit, place in it."""
    for unit, arrays in flat.arrays.items():
        piece = flat.piece[unit] if extent.sharded else slice(0, flat.size(unit))
        for array, start in arrays:
            low, high = max(start, piece.start), min(start + array.size, piece.stop)
            if low < high:
                yield array, low - start, high - start, unit, low - piece.start


def _join(a: Run, b: Run) -> Run | None:
    """One run of two, if the second goes on where the first ends, there and here."""
    size = a.source.size
    goes_on = Run(
        a.source_flat,
        Source(a.source.rank, a.source.start + size, b.source.size),
        a.kind,
        tuple(start + size for start in a.starts),
    )
    if goes_on != b:
        return None
    return a._replace(source=a.source._replace(size=size + b.source.size))


def predicted_bytes(held: Held, checkpoint: Checkpoint, weights_only: bool = False) -> int:
    """Bytes that this rank has to read: of masters, moments and frozen arrays that it holds."""
    total = 0
    for index, flat in enumerate(held.layout.flats):
        if flat.trainable:
            extent = held.optimizer.states[index].extent
            moments = 0 if weights_only else len(held.optimizer.states[index].moments)
        else:
            extent, moments = held.parameters.extents[index], 0
        for array, low, high, _, _ in covered(flat, extent):
            stored = checkpoint.find_array(array.name)
            assert stored is not None
            width = 4 if stored.trainable else ITEM_BYTES[stored.format]
            total += (high - low) * (width + 4 * moments)
    return total


def rank_extra(world: World, checkpoint: Checkpoint) -> Any:
    """What this rank had saved of its own; None at another number of ranks."""
    if checkpoint.contents.num_ranks != world.size:
        return None
    return json.loads(checkpoint.read_bytes(world.rank, "extra") or b"null")
