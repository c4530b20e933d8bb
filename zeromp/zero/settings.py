"""What a user can set, and the names of arrays to which it applies."""

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.flat import group_by_size
from zeromp.store.placement import TILE
from zeromp.wire import F32

Match = Sequence[str] | str | Callable[[str, tuple[int, ...]], bool]


@dataclass
class Group:
    """Parameters that share a weight decay and a factor of the learning rate.

    Its numbers may be changed between steps; the next step uses them.

    Parameters
    ----------
    name : str
    match : str, sequence of str, or callable
        Names, or patterns such as ``"*.bias"``, or ``match(name, shape) -> bool``. A parameter
        belongs to the first group that matches; those that none matches form the group "default".
    lr_factor : float
        Multiplies the learning rate of the step.
    weight_decay : float or None
        None takes the optimizer's.
    """

    name: str
    match: Match
    lr_factor: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class Options:
    """Settings of `Zero` and `Engine` that most users leave alone.

    Parameters
    ----------
    frozen : match
        Arrays without gradient and optimizer state; stored, gathered and saved all the same.
    keep_float32 : match
        Arrays stored and sent in float32 beside 16-bit ones.
    tied : dict of str to str
        Second names: ``{"head": "wte"}`` makes head the same parameter as wte.
    bucket : int
        Elements per unit into which `Zero` groups small arrays.
    micro_batches : int
        Calls of `backward` per step. With more than one, gradients are kept in float32.
    reduce_wire : str or None
        Format in which the gradients of 16-bit parameters are sent; None sends them as the
        parameters are stored, "float32" reduces them unrounded for twice the volume.
    loss_scale : float or None
        Initial loss scale; None means 65536 with float16 and 1 otherwise.
    loss_scale_window, hysteresis, min_loss_scale, patience
        See `zeromp.wire.LossScale`.
    prefetch : int
        Stage 3: units gathered ahead of the one in use. Stages 2 and 3, where ranks share memory:
        unless it is 0, a unit's reduction may end while the next unit's gradient is made, for which
        one more bucket is held.
    poison : bool
        Fill released weights with NaN, so that a use after release shows. For tests.
    share_weights : bool
        Stages 1 to 3: the ranks of a node hold one copy of the full weights (at stage 3, of the
        window) together, in shared memory, instead of one each.
    device_memory : int or None
        Bytes that this rank may hold on the device; what is offloaded does not count.
    fused : bool
        Stages 2 and 3, one micro-batch, no float16: update each piece as soon as it is reduced,
        and hold one piece of gradients at a time. Call `Zero.prepare` before each backward. A step
        can't be skipped then, and clipping uses the norm of the step before.
    offload : str or dict
        Where arrays live: ``"optimizer=disk,gradients=host"``, or a dict of the same. Things are
        optimizer (master and moments), gradients (stage 2 and 3), parameters (stage 3) and
        activations (with recompute); tiers are device, host and disk.
    offload_dir : path or None
        Folder for what is on disk. The job makes a folder of its own in it.
    offload_tile : int
        Elements in which the update walks what is on disk.
    offload_io : {"auto", "cached", "direct"}
        Whether bytes go through the page cache or past it; "auto" times both, and keeps
        to the better.
    keep_offload : bool
        Leave the files on disk at the end, for plain HDF5 tools to read.
    host_numa_node : int or None
        NUMA node to which host memory is bound.
    """

    frozen: Match = ()
    keep_float32: Match = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    bucket: int = 2**22
    micro_batches: int = 1
    reduce_wire: str | None = None
    loss_scale: float | None = None
    loss_scale_window: int = 1000
    hysteresis: int = 1
    min_loss_scale: float = 1.0
    patience: int = 50
    prefetch: int = 1
    poison: bool = False
    share_weights: bool = False
    device_memory: int | None = None
    fused: bool = False
    offload: str | Mapping[str, str] = ""
    offload_dir: str | Path | None = None
    offload_tile: int = TILE
    offload_io: str = "auto"
    keep_offload: bool = False
    host_numa_node: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Options from keyword arguments; ValueError, with the nearest name, for an unknown one."""
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(names)}"
                raise ValueError(f"option {name!r} is unknown: {hint}")
        options = cls(**given)
        for name, least in {"bucket": 1, "micro_batches": 1, "prefetch": 0, "patience": 1}.items():
            value = getattr(options, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")
        return options

    def table(self) -> list[str]:
        """Lines on which ranks must agree; matches are compared by what they match."""
        return [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("frozen", "keep_float32", "offload_dir")
        ]


def matches(match: Match, name: str, shape: tuple[int, ...]) -> bool:
    """Whether an array is meant by a list of patterns or a predicate."""
    if callable(match):
        return bool(match(name, shape))
    patterns = [match] if isinstance(match, str) else match
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def warn_of_unmatched(what: str, match: Match, names: Iterable[str]) -> None:
    """Warn of patterns that match no name: most likely a slip."""
    if callable(match):
        return
    names = list(names)
    for pattern in [match] if isinstance(match, str) else sorted(match):
        if not any(fnmatchcase(name, pattern) for name in names):
            warnings.warn(
                f"{what}: pattern {pattern!r} matches none of the {len(names)} names, such as "
                f"{', '.join(names[:3])}",
                RuntimeWarning,
                stacklevel=3,
            )


@dataclass(frozen=True)
class Source:
    """Arrays to be sharded, unit by unit, so that no rank need ever have them all.

    Parameters
    ----------
    shapes : dict of str to dict of str to tuple
        Shapes by unit and name.
    values : callable
        ``values(unit)`` returns the unit's initial float32 arrays by name.
    visits : tuple of str
        Units in the order in which backward visits them.
    recompute : bool
        Whether an Engine keeps the inputs of units only, and computes the rest again.
    """

    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    values: Callable[[str], Mapping[str, F32]]
    visits: tuple[str, ...]
    recompute: bool = False

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Any], bucket: int) -> "Source":
        """Group named arrays, of any layout and float dtype, into units."""
        taken = {name: as_float32(name, array, "array") for name, array in arrays.items()}
        unit_of = group_by_size({name: a.size for name, a in taken.items()}, bucket)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, unit in unit_of.items():
            shapes.setdefault(unit, {})[name] = taken[name].shape
        return cls(shapes, lambda unit: {n: taken[n] for n in shapes[unit]}, tuple(shapes))


def as_float32(name: str, array: Any, what: str) -> NDArray[np.float32]:
    """C-ordered native float32 array of the same values, copied only if needed.

    Strided, Fortran-ordered, broadcast, byte-swapped and read-only arrays are all welcome: MPI
    sends memory, not elements, so they are put in order here. float16 and float64 are converted.
    """
    found = np.asarray(array)
    if found.dtype.kind != "f":
        raise ValueError(
            f"{what} {name!r} is {found.dtype}: it must be a real floating-point array "
            "(bfloat16 arrays of other libraries: convert to float32 first)"
        )
    with np.errstate(over="ignore"):  # what float32 can't hold becomes inf, which is looked for
        return np.asarray(found, np.float32, order="C")
