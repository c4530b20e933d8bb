"""What a prediction depends on: sizes and settings, never arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeromp.flat import Layout, cuts
from zeromp.store.placement import Placement
from zeromp.world import World

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    fused : bool
        Whether a piece of gradient is used up before the next is reduced.
    late : int
        Units whose reduction may be under way while the next unit's gradient is made.
    sharers, sharer : int
        Ranks that hold full weights together, and which of them this one is.
    placement : Placement
        What is not on the device.
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
    fused: bool = False
    late: int = 0
    sharers: int = 1
    sharer: int = 0
    placement: Placement = field(default_factory=Placement)

    @classmethod
    def of(
        cls,
        layout: Layout,
        plan: object,
        states: tuple[str, ...],
        prefetch: int,
        world: World,
        placement: Placement | None = None,
        share_weights: bool = False,
    ) -> "Case":
        """Collect the sizes of a layout, the choices of a `GradientPlan`, and those of a world."""
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
            world.reduce == "ordered",
            getattr(plan, "fused"),  # noqa: B009
            getattr(plan, "late"),  # noqa: B009
            world.sharers if share_weights else 1,
            world.sharer if share_weights else 0,
            placement or Placement(),
        )

    def kept(self, flat: FlatCase) -> str:
        """Format in which gradients are kept."""
        return "float32" if self.micro_batches > 1 else self.sent(flat)

    def sent(self, flat: FlatCase) -> str:
        """Format in which gradients are sent."""
        return self.travel if self.travel and flat.format != "float32" else flat.format
