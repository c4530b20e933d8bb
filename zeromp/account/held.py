"""Bytes that a rank holds, by tier and kind."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from zeromp.account.case import ITEMSIZE, Case, FlatCase
from zeromp.flat import bucket_slots
from zeromp.store.placement import (
    READ_AHEAD,
    TIERS,
    Placement,
    page_up,
    share,
    slot_count,
    tile_bytes,
)


def held(case: Case, stage: int) -> dict[str, int]:
    """Bytes that a rank holds on the device between steps, by kind; activations come on top.

    Returns
    -------
    dict of str to int
        "parameters", "gradients", "master", one entry per optimizer state, and "buffers": what is
        reused from unit to unit, as wide as the widest one.
    """
    return held_by_tier(case, stage)["device"]


def held_by_tier(case: Case, stage: int) -> dict[str, dict[str, int]]:
    """Bytes that a rank holds between steps, by tier and kind; see `held`.

    "buffers" on the host are what bytes pass through on their way to and from the disk.
    """
    total: dict[str, Counter[str]] = {tier: Counter() for tier in TIERS}
    place = case.placement
    for flat in case.flats:
        pieces = flat.pieces(case.num_ranks, case.rank)
        full, shard = sum(flat.sizes.values()), sum(pieces)
        device = total["device"]
        stored = shard if stage >= 3 else share(full, case.sharers, case.sharer)
        total[place.parameters]["parameters"] += stored * ITEMSIZE[flat.format]
        device["buffers"] += _sweep_bytes(case, flat, stage)
        if not flat.trainable:
            continue
        kept = max(pieces) if case.fused else shard if stage >= 2 else full
        total[place.gradients]["gradients"] += kept * ITEMSIZE[case.kept(flat)]
        states = _covered(case, flat, stage) * 4
        total[place.optimizer]["master"] += 0 if flat.format == "float32" else states
        for kind in case.states:
            total[place.optimizer][kind] += states
        device["buffers"] += _gradient_bytes(case, flat, stage)
    total["device"]["buffers"] += _received_bytes(case)
    total["host"]["buffers"] += _staging_bytes(case, stage) + _tile_bytes(case, stage)
    if place.parameters == "disk":
        widest = sum(page_up(_widest_piece(case, f) * ITEMSIZE[f.format]) for f in case.flats)
        total["host"]["buffers"] += (case.prefetch + 1 + READ_AHEAD) * widest
    return {tier: dict(kinds) for tier, kinds in total.items()}


def _covered(case: Case, flat: FlatCase, stage: int) -> int:
    """Elements of which a rank holds the optimizer states."""
    return sum(flat.pieces(case.num_ranks, case.rank) if stage >= 1 else flat.sizes.values())


def _widest_piece(case: Case, flat: FlatCase) -> int:
    return max(flat.pieces(case.num_ranks, case.rank))


def _received_bytes(case: Case) -> int:
    """With ordered reduction, all ranks' pieces of the widest unit."""
    if not case.ordered:
        return 0
    sizes = [_widest_piece(case, f) * ITEMSIZE[case.sent(f)] for f in case.flats if f.trainable]
    return case.num_ranks * max(sizes, default=0)


def _staging_bytes(case: Case, stage: int) -> int:
    """One piece, in whichever format is widest, of what is on disk."""
    place, sizes = case.placement, [0]
    for flat in case.flats:
        piece = _widest_piece(case, flat)
        if place.parameters == "disk":
            sizes.append(piece * ITEMSIZE[flat.format])
        if flat.trainable and place.gradients == "disk":
            sizes.append(piece * ITEMSIZE[case.kept(flat)])
        if flat.trainable and place.optimizer == "disk" and flat.format != "float32":
            sizes.append(4 * (piece if stage >= 1 else max(flat.sizes.values())))
    return max(sizes)


def _tile_bytes(case: Case, stage: int) -> int:
    """Slots of the streaming update."""
    place, need, number = case.placement, 0, 0
    for flat in case.flats:
        if not flat.trainable:
            continue
        size = _covered(case, flat, stage)
        itemsizes = [n for _, tier, n, _ in operands(case, flat) if tier == "disk"]
        if itemsizes and size:
            need = max(need, tile_bytes(min(place.tile, size), itemsizes))
            number = max(number, slot_count(size, place.tile))
    return need * number


def operands(case: Case, flat: FlatCase) -> Iterator[tuple[str, str, int, str]]:
    """Arrays of an update: kind, tier, bytes per element, and whether read and written ("rw")."""
    place = case.placement
    yield "gradients", place.gradients, ITEMSIZE[case.kept(flat)], "r"
    if flat.format == "float32":
        yield "parameters", place.parameters, 4, "rw"
    else:
        yield "master", place.optimizer, 4, "rw"
        yield "parameters", place.parameters, ITEMSIZE[flat.format], "w"
    for kind in case.states:
        yield kind, place.optimizer, 4, "rw"


def _sweep_bytes(case: Case, flat: FlatCase, stage: int) -> int:
    """One float32 buffer to widen 16-bit weights; at stage 3 also the window."""
    widest = max(flat.sizes.values())
    widened = 0 if flat.format == "float32" else 4 * widest
    buffer = share(widest, case.sharers, case.sharer) * ITEMSIZE[flat.format]
    return widened + ((case.prefetch + 1) * buffer if stage >= 3 else 0)


def _gradient_bytes(case: Case, flat: FlatCase, stage: int) -> int:
    """Buckets of the units that are open together, a unit and a piece in the format as sent."""
    kept, sent = case.kept(flat), case.sent(flat)
    in_place = stage < 2 and case.micro_batches == 1 and kept == "float32"
    visits = [u for u in case.visits if u in flat.sizes]
    late = case.late if stage >= 2 else 0
    bucket = 0 if in_place else 4 * sum(bucket_slots(visits, flat.sizes, late)[1])
    outgoing = max(flat.sizes.values()) * ITEMSIZE[sent] if stage < 2 and kept != sent else 0
    direct = stage >= 2 and sent == kept and case.micro_batches == 1
    widest_piece = max(flat.pieces(case.num_ranks, case.rank))
    return bucket + outgoing + (0 if direct else widest_piece * ITEMSIZE[sent])


def lowest_stage(case: Case, budget: int, activations: int = 0) -> int | None:
    """Lowest stage whose predicted bytes fit into a budget as things are placed, or None."""
    fitting = (s for s in range(4) if sum(held(case, s).values()) + activations <= budget)
    return next(fitting, None)


OFFLOADS = (  # rungs above stage 3, in the order in which they cost traffic
    {"optimizer": "host"},
    {"optimizer": "host", "gradients": "host"},
    {"optimizer": "host", "gradients": "host", "parameters": "host"},
)


def lowest_rung(case: Case, budget: int, activations: int = 0) -> str | None:
    """Lowest rung whose bytes fit into a budget, in words: a stage, or stage 3 with offload."""
    bare = replace(case, placement=Placement())
    stage = lowest_stage(bare, budget, activations)
    if stage is not None:
        return f"stage {stage}"
    for moved in OFFLOADS:
        case = replace(case, placement=Placement.parse(moved))
        if sum(held(case, 3).values()) + activations <= budget:
            return f"stage 3 with offload={case.placement} (or disk for host)"
    return None
