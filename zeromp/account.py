"""What the papers predict: bytes held per rank, bytes sent per step. From sizes, never from arrays.

With psi parameters, N ranks, and Adam on a 16-bit wire, a rank holds (K = 12 bytes of states)

    stage 0   2 psi + 2 psi + 12 psi            = 16 psi
    stage 1   2 psi + 2 psi + 12 psi / N        =  4 psi + 12 psi / N
    stage 2   2 psi + 2 psi / N + 12 psi / N    =  2 psi + 14 psi / N
    stage 3   (2 + 2 + 12) psi / N              = 16 psi / N

and sends, with (N-1)/N of each reduce-scatter or all-gather going to other ranks, 2 psi elements
per step at stages 0 to 2 and 3 psi at stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054, sections
5 and 7). Exactly: rank r owns p_r = n(r+1)//N - nr//N of a unit's n elements, sends n - p_r in a
reduce-scatter, and p_r (N-1) in an all-gather, which over all ranks makes n (N-1) both times.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeromp.flat import Layout, bucket_slots, cuts

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
AGREED_NUMBERS = {"begin": 4, "end": 1, "check": 4, "error": 1, "norm": 1}
NUMBER_BYTES = 8


@dataclass(frozen=True)
class FlatCase:
    """Elements of each unit, of one format, trainable or frozen."""

    format: str
    trainable: bool
    sizes: Mapping[str, int]

    def pieces(self, num_ranks: int, rank: int) -> list[int]:
        """Elements of this rank's piece of each unit."""
        return [
            edges[rank + 1] - edges[rank]
            for edges in (cuts(n, num_ranks) for n in self.sizes.values())
        ]


@dataclass(frozen=True)
class Case:
    """All that a prediction depends on, but for the stage.

    Parameters
    ----------
    flats : tuple of FlatCase
    num_ranks, rank : int
    states : tuple of str
        Kinds of optimizer state per parameter beside the master.
    micro_batches : int
    travel : str or None
        Format in which gradients of 16-bit parameters are sent; None for their own.
    prefetch : int
    visits : tuple of str
        Units in the order in which backward visits them.
    ordered : bool
        Whether ranks fold in rank order, which takes a buffer to receive all pieces.
    """

    flats: tuple[FlatCase, ...]
    num_ranks: int
    rank: int
    states: tuple[str, ...] = ("m", "v")
    micro_batches: int = 1
    travel: str | None = None
    prefetch: int = 1
    visits: tuple[str, ...] = ()
    ordered: bool = False

    @classmethod
    def of(
        cls, layout: Layout, plan: object, states: tuple[str, ...], prefetch: int, reduce: str
    ) -> "Case":
        """Collect the sizes of a layout, and the choices of a `GradientPlan`."""
        travel = getattr(plan, "travel")  # noqa: B009 - a floor above defines it
        return cls(
            tuple(
                FlatCase(f.format.name, f.trainable, {u: f.size(u) for u in f.counts})
                for f in layout.flats
            ),
            layout.num_ranks,
            layout.rank,
            states,
            getattr(plan, "micro_batches"),  # noqa: B009
            travel.name if travel else None,
            prefetch,
            getattr(plan, "visits"),  # noqa: B009
            reduce == "ordered",
        )

    def kept(self, flat: FlatCase) -> str:
        """Format in which gradients are kept."""
        return "float32" if self.micro_batches > 1 else self.sent(flat)

    def sent(self, flat: FlatCase) -> str:
        """Format in which gradients are sent."""
        return self.travel if self.travel and flat.format != "float32" else flat.format


def held(case: Case, stage: int) -> dict[str, int]:
    """Bytes that a rank holds between steps, by kind; activations come on top.

    Returns
    -------
    dict of str to int
        "parameters", "gradients", "master", one entry per optimizer state, and "buffers": what is
        reused from unit to unit, as wide as the widest one.
    """
    total: Counter[str] = Counter()
    received = 0
    for flat in case.flats:
        pieces = flat.pieces(case.num_ranks, case.rank)
        full, shard = sum(flat.sizes.values()), sum(pieces)
        total["parameters"] += (shard if stage >= 3 else full) * ITEMSIZE[flat.format]
        total["buffers"] += _sweep_bytes(case, flat, stage)
        if not flat.trainable:
            continue
        states = shard if stage >= 1 else full
        total["gradients"] += (shard if stage >= 2 else full) * ITEMSIZE[case.kept(flat)]
        total["master"] += 0 if flat.format == "float32" else states * 4
        for kind in case.states:
            total[kind] += states * 4
        total["buffers"] += _gradient_bytes(case, flat, stage)
        received = max(received, case.num_ranks * max(pieces) * ITEMSIZE[case.sent(flat)])
    total["buffers"] += received if case.ordered else 0
    return dict(total)


def _sweep_bytes(case: Case, flat: FlatCase, stage: int) -> int:
    """One float32 buffer to widen 16-bit weights; at stage 3 also the window."""
    widest = max(flat.sizes.values())
    widened = 0 if flat.format == "float32" else 4 * widest
    window = (case.prefetch + 1) * widest * ITEMSIZE[flat.format] if stage >= 3 else 0
    return widened + window


def _gradient_bytes(case: Case, flat: FlatCase, stage: int) -> int:
    """Buckets of the units that are open together, a unit and a piece in the format as sent."""
    kept, sent = case.kept(flat), case.sent(flat)
    in_place = stage < 2 and case.micro_batches == 1 and kept == "float32"
    visits = [u for u in case.visits if u in flat.sizes]
    bucket = 0 if in_place else 4 * sum(bucket_slots(visits, flat.sizes)[1])
    outgoing = max(flat.sizes.values()) * ITEMSIZE[sent] if stage < 2 and kept != sent else 0
    direct = stage >= 2 and sent == kept and case.micro_batches == 1
    widest_piece = max(flat.pieces(case.num_ranks, case.rank))
    return bucket + outgoing + (0 if direct else widest_piece * ITEMSIZE[sent])


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
    numbers += skipped * 2  # which parameter, and whether NaN
    agreed = (case.num_ranks - 1) * NUMBER_BYTES * numbers
    return {"reduce_scatter": reduced, "all_gather": gathered, "agree": agreed}


# ---- the papers' closed forms --------------------------------------------------------------------


FORMULAS = ("2 + 2 + 12", "4 + 12/N", "2 + 14/N", "16/N")  # of `model_state_bytes`, by stage


def model_state_bytes(psi: float, num_ranks: int, stage: int, states: int = 12) -> float:
    """Bytes per rank of parameters, gradients and optimizer states on a 16-bit wire.

    Parameters
    ----------
    psi : float
        Parameters.
    num_ranks, stage : int
    states : int
        Bytes of optimizer states per parameter, K in the paper: 12 for mixed-precision Adam.

    Returns
    -------
    float

    References
    ----------
    Rajbhandari et al. 2020, arXiv:1910.02054, section 5 and figure 1.
    """
    shares = [1 / num_ranks if stage >= thing else 1.0 for thing in (3, 2, 1)]
    return psi * sum(b * share for b, share in zip((2, 2, states), shares, strict=True))


def largest_model(device_bytes: float, num_ranks: int, stage: int) -> float:
    """Parameters whose states fill a device: the inverse of `model_state_bytes` (table 2)."""
    return device_bytes / model_state_bytes(1.0, num_ranks, stage)


def traffic_elements(psi: float, num_ranks: int, stage: int) -> float:
    """Elements that a rank sends per step, one micro-batch, no unit visited twice (section 7)."""
    return (3 if stage >= 3 else 2) * psi * (num_ranks - 1) / num_ranks


def lowest_stage(case: Case, budget: int, activations: int = 0) -> int | None:
    """Lowest stage whose predicted bytes fit into a budget, or None."""
    fitting: Iterable[int] = (
        s for s in range(4) if sum(held(case, s).values()) + activations <= budget
    )
    return next(iter(fitting), None)
