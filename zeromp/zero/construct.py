"""From what a user hands to `Zero` to a layout, groups and a loss scale; and what is refused."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zeromp import account
from zeromp.adamw import Rule
from zeromp.flat import Array, Layout
from zeromp.store import Disk, OverBudget, Placement, Store, numa
from zeromp.wire import F32, LossScale
from zeromp.world import World
from zeromp.zero.settings import Group, Options, Source, matches, warn_of_unmatched

JOB_BYTES = 8  # random, of the name of a job's folder
DEFAULT_SCALE = 65536.0  # of the loss in float16: 2^16, as in most mixed-precision training


def untie(params: Mapping[str, Any], options: Options) -> tuple[Source, dict[str, str]]:
    """Keep one name of each array that has several; the others become aliases of it."""
    if not params:
        raise ValueError("no arrays were given: params must name at least one")
    first: dict[int, str] = {}
    distinct, aliases = {}, {}
    for name, array in params.items():
        owner = options.tied.get(name) or first.setdefault(id(array), name)
        if owner == name:
            distinct[name] = array
        elif owner in params and np.shape(params[owner]) == np.shape(array):
            aliases[name] = owner
        else:
            raise ValueError(
                f"{name!r} {np.shape(array)} can't be tied to {owner!r}: that must be an array of "
                "the same shape"
            )
    for name, owner in options.tied.items():
        if owner not in distinct:
            raise ValueError(f"{name!r} can't be tied to {owner!r}: no such array was given")
        aliases[name] = owner
    return Source.of_arrays(distinct, options.bucket), aliases


def lay_out(
    source: Source, wire: str, options: Options, world: World, aliases: Mapping[str, str]
) -> Layout:
    """Cut a source's arrays for the ranks of a world."""
    shapes = {n: (u, s) for u, arrays in source.shapes.items() for n, s in arrays.items()}
    for what in ("frozen", "keep_float32"):
        warn_of_unmatched(what, getattr(options, what), [*shapes, *aliases])
    arrays = tuple(
        Array(
            name,
            unit,
            tuple(shape),
            "float32" if matches(options.keep_float32, name, shape) else wire,
            not matches(options.frozen, name, shape),
        )
        for name, (unit, shape) in shapes.items()
    )
    if not any(a.trainable for a in arrays):
        raise ValueError("all arrays are frozen: there is nothing to train")
    return Layout(arrays, world.size, world.rank)


class Sorted:
    """Trainable parameters, sorted into groups.

    Attributes
    ----------
    groups : dict of str to Group
        "default" last.
    group_of : dict of str to int
        Number of each parameter's group.
    """

    def __init__(self, groups: Sequence[Group], layout: Layout) -> None:
        every = [*groups, Group("default", lambda *_: True)]
        if len({g.name for g in every}) < len(every):
            names = [g.name for g in groups]
            raise ValueError(f"group names must differ, and 'default' is taken: {names}")
        trained = [a for a in layout.arrays if a.trainable]
        for group in groups:
            warn_of_unmatched(f"group {group.name!r}", group.match, [a.name for a in trained])
        self.groups = {g.name: g for g in every}
        self.group_of = {
            a.name: next(i for i, g in enumerate(every) if matches(g.match, a.name, a.shape))
            for a in trained
        }

    def rates(self, lr: float, rule: Rule) -> F32:
        """Rows of learning rate and weight decay, one per group."""
        rows = [(lr * g.lr_factor, self._decay(g, rule)) for g in self.groups.values()]
        return np.array(rows, np.float32)

    def _decay(self, group: Group, rule: Rule) -> float:
        return rule.weight_decay if group.weight_decay is None else group.weight_decay

    def table(self) -> list[str]:
        """Lines on which ranks must agree."""
        groups = [(g.name, g.lr_factor, g.weight_decay) for g in self.groups.values()]
        return [f"groups {groups}", f"members {self.group_of}"]

    def describe(self, rule: Rule) -> list[str]:
        """One line per group: what decays, and who is in it."""
        lines = []
        for number, group in enumerate(self.groups.values()):
            names = [name for name, of in self.group_of.items() if of == number]
            if names:
                lines.append(
                    f"group {group.name}: weight decay {self._decay(group, rule):g}, "
                    f"lr x {group.lr_factor:g}: {shortened(names)}"
                )
        return lines


def describe_kinds(layout: Layout, options: Options) -> list[str]:
    """Lines on what is frozen, and what is kept in float32."""
    lines = []
    for what in ("frozen", "keep_float32"):
        rule = getattr(options, what)
        names = [a.name for a in layout.arrays if matches(rule, a.name, a.shape)]
        if names:
            lines.append(f"{what.replace('_', ' ')}: {shortened(names)}")
    return lines


def shortened(names: Sequence[str]) -> str:
    """A list of all names, those that differ in their first number together: ``blocks.{0,1}.w``."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.fullmatch(r"(\D*)(\d+)(.*)", name)
        key = (match[1], match[3]) if match else (name, "")
        numbers.setdefault(key, []).extend([match[2]] if match else [])
    return ", ".join(
        f"{before}{found[0] if len(found) == 1 else '{' + ','.join(found) + '}'}{after}"
        if found
        else before
        for (before, after), found in numbers.items()
    )


def make_loss_scale(wire: str, options: Options) -> LossScale:
    """Return the loss scale: dynamic for float16, otherwise constant, and 1 unless asked for."""
    dynamic = wire == "float16"
    value = options.loss_scale
    if value is None:
        value = DEFAULT_SCALE if dynamic else 1.0
    return LossScale(
        value,
        options.loss_scale_window,
        options.hysteresis,
        options.min_loss_scale,
        options.patience,
        dynamic,
    )


def check_shared(stage: int, options: Options) -> None:
    """ValueError where ranks that share weights would all write them."""
    if options.share_weights and stage == 0:
        raise ValueError(
            "share_weights=True needs stage 1 or higher: at stage 0 every rank updates all weights"
        )


def check_fused(stage: int, wire: str, options: Options, placement: Placement) -> None:
    """ValueError for settings with which the update can't be fused into backward."""
    if not options.fused:
        return
    wrong = [
        f"{name} {value}, not {needs}"
        for name, value, needs, fits in (
            ("stage", stage, "2 or 3", stage >= 2),
            ("micro_batches", options.micro_batches, "1", options.micro_batches == 1),
            ("wire", wire, "bfloat16 or float32", wire != "float16"),
            ("gradients on", placement.gradients, "device", placement.gradients == "device"),
        )
        if not fits
    ]
    if wrong:
        raise ValueError(f"fused=True can't be used with {'; '.join(wrong)}")


def make_store(world: World, placement: Placement, options: Options) -> Store:
    """Return the store of this rank; with something on disk, in a folder of the job's own."""
    job = np.frombuffer(secrets.token_bytes(JOB_BYTES), np.uint8).copy()
    if placement.on_disk:
        world.broadcast(job, 0)
    with world.together():
        disk = None
        if options.host_numa_node is not None:
            numa.check_node(options.host_numa_node)
        if placement.on_disk:
            if options.offload_dir is None:
                raise ValueError(
                    f"offload={placement} needs offload_dir, a folder on the disk to be used"
                )
            disk = Disk(
                options.offload_dir,
                job.tobytes().hex(),
                world.rank,
                world.size,
                options.offload_io,
                options.keep_offload,
            )
        return Store(
            options.device_memory,
            placement,
            disk,
            options.host_numa_node,
            lambda: world.ledger.section,
            world,
        )


def check_budget(case: account.Case, stage: int, budget: int | None) -> None:
    """OverBudget, with the lowest stage that fits, if a stage needs more than the device has."""
    need = account.held(case, stage)
    if budget is None or sum(need.values()) <= budget:
        return
    lowest = account.lowest_rung(case, budget)
    advice = (
        "no stage fits, not even with all that can be moved on the host or the disk: use more "
        "ranks, narrower units, or fewer bytes per number"
        if lowest is None
        else f"the lowest rung that fits is {lowest}"
    )
    parts = ", ".join(f"{kind} {size:,}" for kind, size in need.items() if size)
    raise OverBudget(
        f"stage {stage} on {case.num_ranks} ranks needs {sum(need.values()):,} bytes per rank "
        f"before activations ({parts}); the device has {budget:,}: {advice}"
    )


def check_finite(name: str, values: F32) -> None:
    """ValueError if an array holds inf or NaN."""
    finite = np.isfinite(values).reshape(-1)
    if not finite.all():
        bad = int(finite.argmin())
        raise ValueError(
            f"array {name!r} holds {values.reshape(-1)[bad]} at flat index {bad}: values must be "
            "finite"
        )
