"""What of a `Zero` a checkpoint holds beside its numbers, and taking up from there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromp.checkpoint.choosing import choose
from zeromp.checkpoint.loading import (
    LoadReport,
    check_match,
    load_numbers,
    rank_extra,
)
from zeromp.checkpoint.reading import Checkpoint
from zeromp.checkpoint.saving import Request

if TYPE_CHECKING:
    from zeromp.zero.zero import Zero

SCALE_COUNTERS = ("good_steps", "bad_steps", "tolerance")


def request(
    zero: "Zero",
    directory: str | Path,
    keep: int | None,
    extra: dict[str, Any] | None,
    own: Any,
    seed: int | None,
) -> Request:
    """What is to be saved, of this moment; checked on all ranks."""
    zero.world.barrier(f"save to {directory}")
    with zero.world.together():
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1; None keeps all checkpoints")
        if zero._micro.weights:
            raise ValueError(
                f"save between steps: {len(zero._micro.weights)} micro-batches have come since the "
                "last step, and gradients are not saved. Call step first, or zero_grad"
            )
        common, mine = _json("extra", extra or {}), _json("rank_extra", own)
    zero.world.same("save's directory, keep and extra", f"{directory}\n{keep}\n{common}")
    rule = zero.rule
    run = {
        "applied": zero.applied,
        "skipped": zero.skipped,
        "attempts": zero.attempts,
        "loss_scale": asdict(zero.loss_scaling),
        "optimizer": {
            "name": type(rule).__name__,
            "states": list(rule.states),
            **json.loads(_json("optimizer", vars(rule))),
        },
        "groups": [
            {"name": g.name, "lr_factor": g.lr_factor, "weight_decay": g.weight_decay}
            for g in zero.groups.values()
        ],
        "group_of": zero._sorted.group_of,
        "seed": seed,
        "extra": json.loads(common),
    }
    return Request(
        Path(directory), run, zero.stage, zero.wire, dict(zero.aliases), keep, mine.encode()
    )


def load(
    zero: "Zero", directory: str | Path, weights_only: bool, if_exists: bool, verify: bool
) -> LoadReport | None:
    """Load a checkpoint into a `Zero`; see `Zero.load`."""
    world = zero.world
    with world.ledger.within("setup"):
        try:
            path, record, num_bytes = choose(world, Path(directory), verify)
        except FileNotFoundError as error:
            if not if_exists:
                raise
            world.print(f"{error}: starting afresh")
            return None
        with Checkpoint(path, record) as checkpoint:
            with world.together():
                notes = check_match(zero.holders, checkpoint, weights_only)
            load_numbers(zero.holders, checkpoint, weights_only)
            report = LoadReport(
                path, checkpoint.record, checkpoint.bytes_read, num_bytes, notes=notes
            )
            with world.together():
                report.rank_extra = rank_extra(world, checkpoint)
    report.extra = record.run["extra"]
    zero.zero_grad()
    if weights_only:
        zero.applied = zero.skipped = zero.attempts = 0
    else:
        _resume(zero, report)
    for note in report.notes:
        world.print(f"note: {note}")
    return report


def _resume(zero: "Zero", report: LoadReport) -> None:
    """Take up counters and loss scale; note the settings that differ."""
    run = report.record
    zero.applied, zero.skipped, zero.attempts = (
        run[name] for name in ("applied", "skipped", "attempts")
    )
    scale, there = zero.loss_scaling, run["loss_scale"]
    if scale.dynamic and there["dynamic"]:
        scale.value = there["value"]
    elif scale.dynamic != there["dynamic"]:
        report.notes.append(
            f"loss scale {there['value']:g} of wire {run['wire']} is not used with {zero.wire}"
        )
    if scale.dynamic == there["dynamic"]:
        for name in SCALE_COUNTERS:
            setattr(scale, name, there[name])
    here = {"name": type(zero.rule).__name__, "states": list(zero.rule.states), **vars(zero.rule)}
    for name, value in json.loads(_json("optimizer", here)).items():
        if run["optimizer"].get(name) != value:
            before = run["optimizer"].get(name)
            report.notes.append(f"{name} was {before} in the checkpoint; {value} is used now")


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} must be made of what JSON has (dict, list, str, numbers, bool, None): {error}"
        ) from None
