"""Placement: on which tier each kind of array lives."""

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("parameters", "gradients", "master", "m", "v", "buffers", "activations")
TIERS = ("device", "host", "disk")

PAGE = 4096
TILE = (
    2**20
)  # elements: smaller ones leave the threads less time at a stretch (benchmarks/offload.py)
TILE_SLOTS = 4  # tiles of the streaming update that are read, updated and written at a time
READ_AHEAD = 3  # units whose pieces are read from disk ahead of the one that is gathered


@dataclass(frozen=True)
class Placement:
    """Tier of each thing that can be moved off the device.

    Parameters
    ----------
    optimizer, gradients, parameters, activations : {"device", "host", "disk"}
        "optimizer" is the master and the moments; "activations" what recomputation keeps: the input
        of each unit.
    tile : int
        Elements of a tile, in which the update walks arrays that lie on disk.
    """

    optimizer: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    activations: str = "device"
    tile: int = TILE

    @classmethod
    def parse(cls, text: str | Mapping[str, str], tile: int = TILE) -> "Placement":
        """Read ``"optimizer=disk,gradients=host"``, or a dict of the same; ValueError if wrong."""
        things = ("optimizer", "gradients", "parameters", "activations")
        if isinstance(text, str):
            parts = [part.strip() for part in text.split(",") if part.strip()]
            if wrong := [part for part in parts if part.count("=") != 1]:
                raise ValueError(
                    f"offload={text!r}: {wrong[0]!r} must be THING=TIER, as in "
                    "optimizer=disk,gradients=host"
                )
            pairs = [[word.strip() for word in part.split("=")] for part in parts]
            chosen = dict(pairs)
            if len(chosen) < len(pairs):
                raise ValueError(f"offload={text!r} names a thing twice")
        else:
            chosen = dict(text)
        for thing, tier in chosen.items():
            if thing not in things:
                raise ValueError(f"offload: {thing!r} is unknown: use {', '.join(things)}")
            if tier not in TIERS:
                raise ValueError(f"offload: {thing}={tier!r} is no tier: use {', '.join(TIERS)}")
        if not isinstance(tile, int) or tile < PAGE:
            raise ValueError(f"offload_tile={tile!r} must be a whole number, at least {PAGE}")
        return cls(**chosen, tile=tile)

    def check(self, stage: int, recompute: bool | None = None) -> None:
        """ValueError for a placement that makes no sense.

        Parameters
        ----------
        stage : int
        recompute : bool or None
            None where there are no activations: gradients are brought by the user.
        """
        for thing, least in (("parameters", 3), ("gradients", 2)):
            if getattr(self, thing) != "device" and stage < least:
                raise ValueError(
                    f"offload: {thing}={getattr(self, thing)} needs stage {least} or higher, not "
                    f"{stage}: below, every rank keeps them whole, and each would move all of them"
                )
        if self.activations != "device" and not recompute:
            raise ValueError(
                f"offload: activations={self.activations} needs an Engine with recompute=True: "
                "what is moved is the input of each unit, from which the rest is computed again"
            )

    def tier(self, kind: str) -> str:
        """Tier of a kind of array."""
        assert kind in KINDS, kind
        if kind in ("master", "m", "v"):
            return self.optimizer
        return "device" if kind == "buffers" else str(getattr(self, kind))

    @property
    def update(self) -> str:
        """Where the optimizer computes: beside its states, and never on disk."""
        return "device" if self.optimizer == "device" else "host"

    @property
    def on_disk(self) -> bool:
        """Whether anything lies on disk."""
        return "disk" in (self.optimizer, self.gradients, self.parameters, self.activations)

    def __str__(self) -> str:
        moved = {k: getattr(self, k) for k in ("optimizer", "gradients", "parameters")}
        moved["activations"] = self.activations
        return ",".join(f"{k}={tier}" for k, tier in moved.items() if tier != "device") or "none"


def crossings(source: str, target: str) -> list[tuple[str, str]]:
    """Boundaries that bytes cross from one tier to another; disk and device meet at the host."""
    low, high = TIERS.index(source), TIERS.index(target)
    step = 1 if high > low else -1
    return [(TIERS[i], TIERS[i + step]) for i in range(low, high, step)]


def share(size: int, sharers: int, sharer: int) -> int:
    """Elements that one of the sharers of an array answers for."""
    return size * (sharer + 1) // sharers - size * sharer // sharers


def page_up(num_bytes: int) -> int:
    """Bytes of whole pages that hold so many."""
    return -(-num_bytes // PAGE) * PAGE


def tile_bytes(elements: int, itemsizes: list[int]) -> int:
    """Bytes of one slot that holds a tile of several arrays, each from a page's start."""
    return sum(page_up(elements * size) for size in itemsizes)


def slot_count(size: int, tile: int) -> int:
    """Slots that a shard of `size` elements uses."""
    return min(TILE_SLOTS, -(-size // tile))
