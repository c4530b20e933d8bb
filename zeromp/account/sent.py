"""Bytes that a rank sends, by verb, and bytes that cross between its tiers."""

from collections import Counter
from collections.abc import Sequence

from zeromp.account.case import ITEMSIZE, Case
from zeromp.account.held import operands
from zeromp.store.placement import crossings

AGREED_NUMBERS = {"begin": 4, "end": 1, "check": 4, "error": 1, "norm": 1}
NUMBER_BYTES = 8


def sent(
    case: Case,
    stage: int,
    *,
    applied: int = 1,
    skipped: int = 0,
    micro_batches: int | None = None,
    path: Sequence[str] = (),
) -> dict[str, int]:
    """Bytes that a rank sends while training, by verb.

    Parameters
    ----------
    case : Case
    stage : int
    applied, skipped : int
        Steps.
    micro_batches : int or None
        Of all these steps together; None for `Case.micro_batches` of each.
    path : sequence of str
        Units in forward order, with those visited twice named twice: each visit is gathered, in
        forward and in backward. Empty where gradients are brought along.

    Returns
    -------
    dict of str to int
        "reduce_scatter", "all_gather", and "agree": few numbers that all ranks exchange.
    """
    steps = applied + skipped
    micro = steps * case.micro_batches if micro_batches is None else micro_batches
    reduced = gathered = 0
    for flat in case.flats:
        pieces = dict(zip(flat.sizes, flat.pieces(case.num_ranks, case.rank), strict=True))
        others = case.num_ranks - 1
        if flat.trainable:
            rest = sum(flat.sizes.values()) - sum(pieces.values())
            reduced += (micro if stage >= 2 else steps) * rest * ITEMSIZE[case.sent(flat)]
            sent_format = case.sent(flat) if stage == 0 else flat.format
            if stage < 3:
                gathered += applied * others * sum(pieces.values()) * ITEMSIZE[sent_format]
        if stage >= 3:
            visited = sum(pieces.get(unit, 0) for unit in path)
            gathered += micro * 2 * others * visited * ITEMSIZE[flat.format]
    numbers = micro * (AGREED_NUMBERS["begin"] + AGREED_NUMBERS["end"])
    numbers += steps * sum(AGREED_NUMBERS[key] for key in ("check", "error", "norm"))
    numbers += steps if case.fused else 0  # errors are agreed on at both ends of backward
    numbers += skipped * 2  # which parameter, and whether NaN
    agreed = (case.num_ranks - 1) * NUMBER_BYTES * numbers
    return {"reduce_scatter": reduced, "all_gather": gathered, "agree": agreed}


def moved(
    case: Case,
    stage: int,
    *,
    applied: int = 1,
    skipped: int = 0,
    micro_batches: int | None = None,
    path: Sequence[str] = (),
    activations: int = 0,
) -> dict[tuple[str, str, str], int]:
    """Bytes that cross between a rank's tiers while training.

    An update reads gradients and writes parameters where the states are (on the host, if those are
    on disk); gradients are put away when they are reduced, parameters fetched when a sweep comes to
    them. What is on disk passes the host. With the optimizer on the host that makes, of M 16-bit
    parameters, 2 M bytes of gradients down and 2 M bytes of weights up: the least that any split of
    the work can do (Ren et al. 2021, arXiv:2101.06840, section 3).

    Parameters
    ----------
    case, stage, applied, skipped, micro_batches, path
        As for `sent`.
    activations : int
        Bytes of units' inputs that recomputation keeps, over all micro-batches.

    Returns
    -------
    dict of (kind, source, target) to int
    """
    total: Counter[tuple[str, str, str]] = Counter()

    def cross(kind: str, num_bytes: int, source: str, target: str) -> None:
        for low, high in crossings(source, target):
            total[kind, low, high] += num_bytes

    steps = applied + skipped
    micro = steps * case.micro_batches if micro_batches is None else micro_batches
    place = case.placement
    for flat in case.flats:
        pieces = dict(zip(flat.sizes, flat.pieces(case.num_ranks, case.rank), strict=True))
        shard = sum(pieces.values())
        if flat.trainable:
            covered = shard if stage >= 1 else sum(flat.sizes.values())
            for kind, tier, itemsize, mode in operands(case, flat):
                if "r" in mode:
                    cross(kind, applied * covered * itemsize, tier, place.update)
                if "w" in mode:
                    cross(kind, applied * covered * itemsize, place.update, tier)
            kept = shard * ITEMSIZE[case.kept(flat)]
            cross("gradients", micro * kept, "device", place.gradients)
            if place.gradients == "disk":  # to add to them, for the norm, and for who spoils it
                reads = (micro - steps) + steps + skipped
                cross("gradients", reads * kept, "disk", "host")
        visited = sum(pieces.get(unit, 0) for unit in path) * ITEMSIZE[flat.format]
        cross("parameters", 2 * micro * visited, place.parameters, "device")
    cross("activations", activations, "device", place.activations)
    cross("activations", activations, place.activations, "device")
    return {key: n for key, n in total.items() if n}
