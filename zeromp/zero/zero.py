"""Zero: named arrays in, gradients in, step. For those who bring their own gradients."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from zeromp.adamw import AdamW, Rule
from zeromp.checkpoint.loading import LoadReport
from zeromp.checkpoint.saving import Saver
from zeromp.stage1_optimizer import ShardedOptimizer
from zeromp.stage2_gradients import ShardedGradients
from zeromp.stages import stage_of
from zeromp.store import Placement
from zeromp.wire import F32, format_of
from zeromp.world import World, alike, alone
from zeromp.zero import construct, given, resume
from zeromp.zero.asked import Asked
from zeromp.zero.fused import Fused
from zeromp.zero.holders import Holders
from zeromp.zero.micro import MicroBatches
from zeromp.zero.norm import first_bad, square_norm
from zeromp.zero.report import Report
from zeromp.zero.settings import Group, Options, Source


class Zero:
    """Parameters, gradients and optimizer states of N ranks, sharded as the stage says.

    Every method that communicates must be called on all ranks: `backward`, `step`, `full`,
    `master`, `moments`, `gathered`, `sweep`, `save`, `load`, `finish_save`.

    Parameters
    ----------
    params : dict of str to array_like, or Source
        Named float arrays, equal on all ranks. They are copied, never changed. One array under
        two names is one parameter (tied).
    world : World
        None for a single rank.
    stage : {0, 1, 2, 3}
    wire : {"bfloat16", "float16", "float32"}
        Format in which parameters and gradients are stored and sent. Arithmetic is float32.
    optimizer : AdamW or SGD
    groups : sequence of Group
        Everything decays alike if none are given.
    **options
        See `zeromp.zero.Options`.

    Examples
    --------
    >>> import numpy as np, zeromp as zm
    >>> zero = zm.Zero({"w": np.array([1.0, -2.0, 3.0])}, wire="float32", stage=3,
    ...                optimizer=zm.SGD(lr=0.1, momentum=0.0))
    >>> for _ in range(50):
    ...     zero.backward({"w": zero.full("w")})   # the gradient of |w|^2 / 2
    ...     report = zero.step()
    >>> bool(np.abs(zero.full("w")).max() < 0.02)
    True
    """

    def __init__(
        self,
        params: Mapping[str, Any] | Source,
        *,
        world: World | None = None,
        stage: int = 1,
        wire: str = "bfloat16",
        optimizer: Rule | None = None,
        groups: Sequence[Group] = (),
        **options: Any,
    ) -> None:
        self.world = world or alone()
        self.rule: Rule = AdamW() if optimizer is None else optimizer
        self.stage, self.wire = stage, wire
        self.aliases: dict[str, str] = {}
        with self.world.together():
            self.options = Options.of(options)
            stage_of(stage), format_of(wire)
            self.rule.check()
            if isinstance(params, Source):
                source = params
            else:
                source, self.aliases = construct.untie(params, self.options)
            placement = Placement.parse(self.options.offload, self.options.offload_tile)
            placement.check(stage, source.recompute)
            construct.check_shared(stage, self.options)
            construct.check_fused(stage, wire, self.options, placement)
            self.layout = construct.lay_out(source, wire, self.options, self.world, self.aliases)
            self._sorted = construct.Sorted(groups, self.layout)
            self.loss_scaling = construct.make_loss_scale(wire, self.options)
        self.world.same("settings", self._settings())
        self.holders = Holders(
            self.layout,
            self.world,
            stage,
            self.rule,
            self.options,
            self._sorted.group_of,
            source.visits,
        )
        self.store, self.case = self.holders.store, self.holders.case
        self.parameters = self.holders.parameters
        self.gradients = self.holders.gradients
        self.optimizer = self.holders.optimizer
        self._fused = None
        if self.options.fused:
            assert isinstance(self.gradients, ShardedGradients)
            assert isinstance(self.optimizer, ShardedOptimizer)
            self._fused = Fused(self.layout, self.gradients, self.optimizer, self.world)
        self.applied = self.skipped = self.attempts = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._norm: float | None = None
        self._micro = MicroBatches(self.world, self.options.micro_batches)
        self.holders.load_initial(source)
        self._saver = Saver(self.holders)
        self.world.ledger.section = "train"

    @property
    def groups(self) -> dict[str, Group]:
        """Parameter groups by name; their numbers may be changed between steps."""
        return self._sorted.groups

    def _settings(self) -> str:
        """All that must be the same on every rank, as text."""
        return "\n".join(
            [
                f"stage {self.stage}, wire {self.wire}, reduce {self.world.reduce}",
                f"optimizer {self.rule}",
                f"aliases {self.aliases}",
                *self._sorted.table(),
                *self.options.table(),
                self.layout.table(),
            ]
        )

    # ---- a step ----------------------------------------------------------------------------------

    def begin(
        self, weight: float, rows: int = 0, error: Exception | None = None, rules: int = 0
    ) -> tuple[float, int]:
        """Start a micro-batch: agree on its weight over all ranks.

        Parameters
        ----------
        weight : float
            Of this rank's share of the mean: its number of tokens.
        rows : int
            Samples on this rank.
        error : Exception or None
            What is wrong with this rank's data; raised on all ranks.
        rules : int
            Checksum of what must be the same on all ranks: the path.

        Returns
        -------
        float
            What the gradient of this rank's *sum* of losses must be multiplied by.
        int
            Number of this rank's first sample in the global batch.
        """
        if self._fused is not None and error is None:
            try:
                self._fused.check_prepared()
            except ValueError as unprepared:
                error = unprepared
        factor, first_sample = self._micro.begin(weight, rows, error, rules)
        return self.loss_scaling.value * factor, first_sample

    def close_unit(self, unit: str) -> None:
        """Take in a unit's finished bucket; with a fused update, use it up."""
        self.gradients.close(unit)
        if self._fused is not None:
            self._fused.update(unit)

    def end(self, loss_sum: float) -> float:
        """Finish a micro-batch with this rank's sum of losses; returns the mean over all ranks."""
        return self._micro.end(loss_sum)

    def backward(
        self, gradients: Mapping[str, Any], weight: float = 1.0, loss: float = math.nan
    ) -> float:
        """Take in the gradients of one micro-batch.

        Parameters
        ----------
        gradients : dict of str to array_like
            By name, in any order: gradient of this rank's *mean* loss, not scaled. A missing name
            counts as zeros. Values are asked for unit by unit, so a lazy mapping need not hold all.
        weight : float
            Of this rank in the mean over ranks, such as its number of samples. With equal weights
            the step uses the plain mean over ranks and micro-batches.
        loss : float
            This rank's mean loss, for the report.

        Returns
        -------
        float
            Mean loss over all ranks, by weight.
        """
        start = time.perf_counter()
        error = given.refusal(gradients, weight, self.layout, self.aliases)
        factor, _ = self.begin(weight, 0, error)
        for unit in self.layout.units:
            for name, view in self.gradients.bucket(unit).items():
                names = [name, *(a for a, owner in self.aliases.items() if owner == name)]
                given.write(view, names, gradients, np.float32(factor * weight))
            self.close_unit(unit)
        mean = self.end(loss * weight if weight else 0.0)
        self.seconds["backward"] += time.perf_counter() - start
        return mean

    def prepare(self, lr: float | None = None, clip: float | None = None) -> None:
        """Say how the next step updates, before its backward: with ``fused=True`` only.

        Parameters
        ----------
        lr, clip : float or None
            As for `step`, which then takes none; clipping uses the norm of the step before.
        """
        rate = self.rule.lr if lr is None else lr
        rates = self._sorted.rates(rate, self.rule)
        asked = Asked(rate, clip, rates, self.rule)
        asked.check(self.world, self._micro, started=False, fused=self._fused is not None)
        assert self._fused is not None
        unscale = 1 / self.loss_scaling.value
        self._fused.prepare(self.applied + 1, asked, self._norm, unscale)

    def step(self, lr: float | None = None, clip: float | None = None) -> Report:
        """Reduce what is not reduced yet, clip, and update all parameters.

        It uses the micro-batches that have come since the last step, also if they are fewer than
        `micro_batches`: the mean is over what is there.

        Parameters
        ----------
        lr : float or None
            Learning rate; None takes the optimizer's.
        clip : float or None
            Upper limit of the gradient's norm; None does not clip.

        Returns
        -------
        Report
            If any rank's gradient holds inf or NaN the step is skipped on all ranks:
            `applied` is False, and nothing has changed but the loss scale.

        Raises
        ------
        FloatingPointError
            On all ranks, when `patience` steps in a row were skipped.
        """
        start = time.perf_counter()
        self._saver.poll()
        if self._fused is not None:
            report = self._fused.finish(self._micro, self.loss_scaling.value)
            self._norm = report.grad_norm
            self.applied += 1
            self.attempts += 1
            self.zero_grad()
            self.seconds["optimizer"] += time.perf_counter() - start
            return report
        rate = self.rule.lr if lr is None else lr
        rates = self._sorted.rates(rate, self.rule)
        Asked(rate, clip, rates, self.rule).check(self.world, self._micro)
        scale = self.loss_scaling.value
        unscale = self._micro.unscale / scale
        self.gradients.finish()
        norm = math.sqrt(square_norm(self.layout, self.gradients, self.world)) * unscale
        self._norm = norm
        finite = math.isfinite(norm)
        reason = "" if finite else first_bad(self.layout, self.gradients, self.world)
        clip_factor = min(1.0, clip / norm) if finite and clip is not None and norm > 0 else 1.0
        if finite:
            self.optimizer.step(self.applied + 1, unscale * clip_factor, rates)
            self.applied += 1
        else:
            self.skipped += 1
        loss, weight = self._micro.loss, self._micro.weight
        self.attempts += 1
        self.zero_grad()
        self._note(reason)
        self.seconds["optimizer"] += time.perf_counter() - start
        return Report(finite, loss, norm, clip_factor, rate, scale, weight, reason)

    def _note(self, reason: str) -> None:
        """Tell the loss scale, and say on rank 0 that a step was skipped."""
        if not reason:
            self.loss_scaling.applied()
            return
        self.world.print(f"step {self.attempts} skipped: {reason}")
        try:
            self.loss_scaling.skipped(reason)
        except FloatingPointError as error:
            raise alike(error) from None

    def zero_grad(self) -> None:
        """Forget the gradients that have come since the last step."""
        self.gradients.clear()
        self._micro.clear()

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        keep: int | None = None,
        extra: dict[str, Any] | None = None,
        rank_extra: Any = None,
        wait: bool = True,
        seed: int | None = None,
    ) -> Path:
        """Write a checkpoint; every rank writes its own pieces. Call on all ranks, between steps.

        Parameters
        ----------
        directory : path
            Gets a folder ``step-...`` for each checkpoint, and a file ``model.h5`` in which every
            array of the newest can be read whole, by name, by any HDF5 tool.
        keep : int or None
            Complete checkpoints to keep, this one included; None keeps all.
        extra : dict or None
            JSON values to be given back by `load`, equal on all ranks: the place in the data, say.
        rank_extra : object
            JSON values of this rank alone, such as the state of a random generator.
        wait : bool
            False returns at once; a thread writes the numbers, and those that the next step is
            about to change are copied first. The checkpoint is complete after the step at
            which all ranks have written, or after `finish_save`; an error shows up there.
        seed : int or None
            For the record.

        Returns
        -------
        Path
            The checkpoint's folder.

        Raises
        ------
        OSError
            On all ranks, if one can't write; checkpoints before this one are untouched.
        """
        with self.world.ledger.within("checkpoint"):
            request = resume.request(self, directory, keep, extra, rank_extra, seed)
            return self._saver.save(request, wait)

    def finish_save(self) -> Path | None:
        """Wait for a ``save(..., wait=False)``; its folder, or None if all are complete."""
        return self._saver.finish()

    def load(
        self,
        directory: str | Path,
        *,
        weights_only: bool = False,
        if_exists: bool = False,
        verify: bool = True,
    ) -> LoadReport | None:
        """Continue from a checkpoint of any number of ranks, stage and wire. Call on all ranks.

        Parameters
        ----------
        directory : path
            One checkpoint's folder, or the folder of many: then the newest that is sound is taken,
            and a line on rank 0 says which ones are not, and why.
        weights_only : bool
            Take masters and parameters alone: moments and counters start at zero.
        if_exists : bool
            Start afresh, and say so, if there is no checkpoint. An error otherwise.
        verify : bool
            Compare checksums before anything is changed: every file is read once more.

        Returns
        -------
        LoadReport or None
            None if it starts afresh.

        Raises
        ------
        FileNotFoundError, Broken, Mismatch
            On all ranks: there is none; a file is missing or damaged; it is of another model.
        """
        self._saver.finish()
        return resume.load(self, directory, weights_only, if_exists, verify)

    # ---- what it knows ---------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of all arrays, second names of tied ones included."""
        return [*(a.name for a in self.layout.arrays), *self.aliases]

    def lr(self) -> float:
        """Learning rate that the next step uses unless it is given one."""
        return self.rule.lr

    def grad_norm(self) -> float | None:
        """Norm before clipping of the last attempt at a step; None before the first."""
        return self._norm

    def loss_scale(self) -> float:
        """Scale of the next backward: 1 unless the wire is float16."""
        return self.loss_scaling.value

    def state(self) -> dict[str, float]:
        """Counters: attempts at a step, applied and skipped ones, loss scale."""
        return {
            "attempts": self.attempts,
            "applied": self.applied,
            "skipped": self.skipped,
            "loss_scale": self.loss_scaling.value,
        }

    def describe(self) -> str:
        """Effective configuration, as text of a few lines."""
        ranks = "rank" if self.world.size == 1 else "ranks"
        head = (
            f"stage {self.stage} on {self.world.size} {ranks} ({self.world.transport.name}, "
            f"reduce={self.world.reduce}), wire {self.wire}, {self.rule}"
        )
        if self.holders.placement != Placement():
            head += f", offload {self.holders.placement}"
            if self.store.disk is not None:
                head += f" in {self.store.disk.folder.path} ({self.store.disk.way})"
        if self.wire == "float16":
            head += f", loss scale {self.loss_scaling.value:g}"
        return "\n".join(
            [
                head,
                *self._sorted.describe(self.rule),
                *construct.describe_kinds(self.layout, self.options),
            ]
        )

    # ---- whole arrays ----------------------------------------------------------------------------

    def full(self, name: str) -> F32:
        """Whole parameter as stored, widened to float32: a copy. Call on all ranks.

        NumPy has no bfloat16, so 16-bit parameters come back as float32 numbers that fit into 16
        bits; `dtype` tells the stored format.
        """
        return self.holders.full(self._own_name(name))

    def master(self, name: str) -> F32:
        """Whole float32 master of a parameter: a copy. Call on all ranks.

        Where a parameter is stored in float32, or frozen, it is the parameter itself.
        """
        return self.holders.master(self._own_name(name))

    def moments(self, name: str) -> dict[str, F32]:
        """Whole float32 optimizer state of a parameter by kind ("m", "v"): copies. On all ranks."""
        return self.holders.moments(self._own_name(name))

    def dtype(self, name: str) -> str:
        """Format in which a parameter is stored: "float32", "bfloat16" or "float16"."""
        return self.layout.find(self._own_name(name))[1].format

    def close(self) -> None:
        """Remove this rank's files from the disk, if anything is offloaded there. On all ranks.

        Happens by itself at the end of the process. Arrays on disk must not be used after it.
        """
        self.store.close()

    def _own_name(self, name: str) -> str:
        return self.aliases.get(name, name)

    @contextmanager
    def gathered(self, unit: str, edit: bool = False) -> Iterator[dict[str, F32]]:
        """Hold a unit's whole parameters for the length of a block. Call on all ranks.

        Parameters
        ----------
        unit : str
            A unit, or the name of an array: its unit.
        edit : bool
            Hand out the float32 masters to be changed. What rank 0 has made of them when the block
            ends is what all ranks continue from: masters, stored parameters, everywhere. Optimizer
            states are kept. Other ranks' changes are dropped.

        Yields
        ------
        dict of str to ndarray
            Copies by name; read-only unless `edit`.
        """
        with self.world.together():
            if unit not in self.layout.units:
                unit = self.layout.find(self._own_name(unit))[1].unit
        if edit:
            self._saver.finish()
        names = [a.name for a in self.layout.arrays if a.unit == unit]
        values = {name: self.master(name) if edit else self.full(name) for name in names}
        for array in values.values():
            array.flags.writeable = edit
        named = values | {a: values[o] for a, o in self.aliases.items() if o in values}
        yield named
        if edit:
            with self.world.together():
                for name in names if self.world.rank == 0 else ():
                    if named[name] is not values[name]:  # replaced, not written to
                        values[name][...] = named[name]
            self.holders.edit(unit, values)

    def sweep(self, order: Sequence[str] | None = None) -> Iterator[tuple[str, Mapping[str, F32]]]:
        """Walk units with their float32 weights at hand. Call on all ranks, in the same order.

        Parameters
        ----------
        order : sequence of str or None
            Units; None walks all.

        Yields
        ------
        str, dict of str to ndarray
            Unit and its weights by name, valid until the next unit is asked for; not to be changed.
        """
        units = list(self.layout.units if order is None else order)
        yield from zip(units, self.parameters.sweep(units), strict=True)
