"""Engine: Zero plus the loop over units, forward, backward, and recomputation."""

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp import gemm
from zeromp.adamw import Rule
from zeromp.checkpoint import LoadReport
from zeromp.models import Model, Saved, Scope, Visit
from zeromp.pool import Pool
from zeromp.store import OverBudget, Stack
from zeromp.wire import F32
from zeromp.world import World
from zeromp.world.cores import blas_threads
from zeromp.zero import Group, Report, Source, Zero


class Engine:
    """Trains a model on N ranks. Every method that computes must be called on all ranks.

    Forward walks the model's path, backward walks it in reverse. What stage runs shows nowhere in
    this loop: weights come from a sweep of the parameters' holder, gradients go into buckets of the
    gradients' holder, and the optimizer's holder makes the step.

    Parameters
    ----------
    model : Model
    world : World
        None for a single rank.
    stage : {0, 1, 2, 3}
    wire : {"bfloat16", "float16", "float32"}
    optimizer : AdamW or SGD
    groups : sequence of Group
    seed : int
        Of initial weights and dropout.
    **options
        ``recompute=True`` keeps only each unit's input in forward and computes the unit again in
        backward; ``weights`` (dict of arrays by name, or a callable that is given a unit's name)
        replaces the model's initial values; the others are those of `zeromp.zero.Options`.
    """

    def __init__(
        self,
        model: Model,
        *,
        world: World | None = None,
        stage: int = 1,
        wire: str = "bfloat16",
        optimizer: Rule | None = None,
        groups: Sequence[Group] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.model = model
        self.seed = seed
        self.recompute = bool(options.pop("recompute", False))
        weights = options.pop("weights", None)
        units = {unit.name: unit for unit in model.units}
        source = Source(
            {u.name: {p.name: p.shape for p in u.parameters} for u in model.units},
            _initial(weights, lambda name: model.initial(units[name], seed), model),
            tuple(visit.unit for visit in reversed(model.path)),
            self.recompute,
        )
        self.zero = Zero(
            source,
            world=world,
            stage=stage,
            wire=wire,
            optimizer=optimizer,
            groups=groups,
            **options,
        )
        self.world = self.zero.world
        with self.world.ledger.within("setup"):
            layers = "\n".join(repr(visit.layer) for visit in model.path)
            loss = getattr(model.loss, "__qualname__", "")
            rules = f"recompute {self.recompute}\nseed {seed}\nmodel {model.name} {loss}\n{layers}"
            self.world.same("engine settings", rules)
        self.seconds = self.zero.seconds
        self.predicted_activations = {"device": 0, "host": 0, "disk": 0}  # the most, by tier
        self.predicted_moves = 0  # bytes of inputs that were to be put on another tier
        self.pool = Pool(poison=bool(options.get("poison")))

    # ---- training --------------------------------------------------------------------------------

    def backward(
        self, x: NDArray[Any], y: NDArray[Any], path: Sequence[Visit] | None = None
    ) -> float:
        """Compute the gradient of one micro-batch, forward and backward.

        Parameters
        ----------
        x, y : ndarray
            This rank's samples and targets, as the model takes them; ranks may have different
            numbers of them. Targets of -1 do not count.
        path : sequence of Visit or None
            Another path through the model's units, of visits from ``model.path``; the same on all
            ranks.

        Returns
        -------
        float
            Mean loss over the targets of all ranks.

        Raises
        ------
        ValueError
            On all ranks, if one rank's data do not fit the model; nothing has been computed then.
        """
        weight, error = self._weigh(x, y)
        if path is None:
            path = self.model.path
        else:
            error = error or self._refuse_path(path)
        stack = None
        if error is None:
            stack, error = self._predict_activations(path, x)
        visits = zlib.crc32(" ".join(visit.unit for visit in path).encode())
        rows = len(x) if error is None else 0
        factor, first_sample = self.zero.begin(weight, rows, error, visits)
        scope = Scope(self.seed, self.zero.attempts, first_sample, True, self.pool.empty)
        start = time.perf_counter()
        assert stack is not None
        output, saved = self._forward(path, x, scope, stack)
        store = self.zero.store
        with (
            store.holding("activations", _distinct_bytes(saved)),
            store.holding("activations", stack.num_bytes, stack.tier),
        ):
            loss_sum = self.model.loss(output, y, factor)
            middle = time.perf_counter()
            last = [output]
            del output  # the logits are of no use after the first layer of backward
            self._backward(path, saved, last.pop(), scope, stack)
        self.seconds["forward"] += middle - start
        self.seconds["backward"] += time.perf_counter() - middle
        return self.zero.end(loss_sum)

    def _weigh(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Exception | None]:
        """Count the targets, or say what is wrong with the data."""
        try:
            self.model.check(x, y)
        except ValueError as error:
            return 0.0, error
        return float(self.model.count(y)), None

    def _refuse_path(self, path: Sequence[Visit]) -> Exception | None:
        """What is wrong with a path that is not the model's own, if anything."""
        visits = [visit.unit for visit in reversed(path)]
        if unknown := set(visits) - set(self.zero.layout.units):
            return ValueError(f"path visits units that the model lacks: {', '.join(unknown)}")
        if shared := self.zero.gradients.buckets.conflict(visits):
            return ValueError(
                f"path keeps the gradients of {shared[0]!r} and {shared[1]!r} open together, for "
                "which no buckets were drawn: build the Engine with a model that has this path"
            )
        return None

    def _predict_activations(
        self, path: Sequence[Visit], x: NDArray[Any]
    ) -> tuple[Stack | None, Exception | None]:
        """Predict what a micro-batch keeps until backward; a place for it, or why there is none."""
        shape = x.shape[:2] if self.model.context else (len(x), 1)
        numbers = [visit.layer.activation_bytes(*shape) for visit in path]
        store = self.zero.store
        tier = store.placement.activations
        kept = [n for (_, n), visit in zip(numbers[:-1], path, strict=False) if not visit.carried]
        inputs = kept if self.recompute else []
        saved = numbers[-1:] if self.recompute else numbers
        need = Counter({"device": sum(of_saved for of_saved, _ in saved)})
        need[tier] += sum(inputs)
        if tier != "device":
            self.predicted_moves += sum(inputs)
        for name, num_bytes in need.items():
            self.predicted_activations[name] = max(self.predicted_activations[name], num_bytes)
        try:
            store.check("activations", need["device"])
            return store.stack(inputs), None
        except (OverBudget, OSError) as error:
            return None, error

    def _forward(
        self, path: Sequence[Visit], x: NDArray[Any], scope: Scope, stack: Stack
    ) -> tuple[F32, list[Saved]]:
        """Output, and what backward needs of each visit.

        With recompute that is each visit's input, but for the last visit, whose backward is next,
        and for those whose input comes back with the gradient.
        """
        saved: list[Saved] = []
        for weights, visit in zip(self._sweep(path), path, strict=True):
            y, kept = visit.layer.forward(weights, x, scope)
            if self.recompute and visit is not path[-1]:
                kept = () if visit.carried else (stack.put(x),)
            saved.append(kept)
            x = y
        return x, saved

    def _backward(
        self,
        path: Sequence[Visit],
        saved: list[Saved],
        dy: F32 | None,
        scope: Scope,
        stack: Stack,
    ) -> None:
        """Write every unit's gradient into its bucket, and close it at the unit's last visit."""
        gradients = self.zero.gradients
        order = path[::-1]
        last = {visit.unit: i for i, visit in enumerate(order)}
        opened: set[str] = set()
        for i, (weights, visit) in enumerate(zip(self._sweep(order), order, strict=True)):
            kept = saved.pop()
            if self.recompute and i > 0 and not visit.carried:
                _, kept = visit.layer.forward(weights, stack.take(kept[0]), scope)
            bucket = gradients.bucket(visit.unit)
            if visit.unit not in opened:
                opened.add(visit.unit)
                for name in bucket.keys() - set(visit.writes):
                    bucket[name].fill(0)
            assert dy is not None
            dy = visit.layer.backward(weights, kept, dy, bucket, scope)
            del kept
            if last[visit.unit] == i:
                self.zero.close_unit(visit.unit)
        for unit in self.zero.layout.units:
            if unit not in opened:
                for view in gradients.bucket(unit).values():
                    view.fill(0)
                self.zero.close_unit(unit)

    def _sweep(self, path: Sequence[Visit]) -> Iterator[Mapping[str, F32]]:
        return self.zero.parameters.sweep([visit.unit for visit in path])

    def prepare(self, lr: float | None = None, clip: float | None = None) -> None:
        """Say how the next step updates, with ``fused=True``: see `Zero.prepare`."""
        self.zero.prepare(lr, clip)

    def step(self, lr: float | None = None, clip: float | None = None) -> Report:
        """Make the step: see `Zero.step`."""
        return self.zero.step(lr, clip)

    # ---- use -------------------------------------------------------------------------------------

    def evaluate(self, x: NDArray[Any], y: NDArray[Any]) -> float:
        """Mean loss over the targets of all ranks, without gradient or dropout, at any time."""
        weight, error = self._weigh(x, y)
        with self.world.ledger.within("evaluate"):
            with self.world.together():
                if error is not None:
                    raise error
            output = self._infer(x)
            loss_sum = self.model.loss(output, y, 0.0)
            loss, total = self.world.agree([loss_sum, weight]).sum(axis=0)
        return float(loss / total) if total else math.nan

    def predict(self, x: NDArray[Any]) -> F32:
        """Output of the model for this rank's x, without dropout. Call on all ranks."""
        with self.world.ledger.within("evaluate"):
            with self.world.together():
                self.model.check(x, None)
            return self._infer(x)

    def _infer(self, x: NDArray[Any]) -> F32:
        scope = Scope(self.seed, self.zero.attempts, 0, False, self.pool.empty)
        for weights, visit in zip(self._sweep(self.model.path), self.model.path, strict=True):
            x, _ = visit.layer.forward(weights, x, scope)
        return x

    def generate(
        self, prompt: Sequence[int], length: int, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """Draw tokens that continue a prompt, from a model of tokens. Call on all ranks.

        Parameters
        ----------
        prompt : sequence of int
            At least one token.
        length : int
            Tokens to draw.
        temperature : float
            Of the softmax; 0 takes the likeliest token.
        seed : int

        Returns
        -------
        list of int
            Prompt and continuation; the same on all ranks.
        """
        tokens = [int(token) for token in prompt]
        with self.world.together():
            if self.model.context is None:
                raise ValueError(f"model {self.model.name} has no tokens to generate")
            if not tokens or temperature < 0:
                raise ValueError("generate needs a prompt of one token at least, temperature >= 0")
        rng = np.random.default_rng(seed)
        for _ in range(length):
            logits = self.predict(np.array([tokens[-self.model.context :]]))[0, -1]
            tokens.append(_draw(logits.astype(np.float64), temperature, rng))
        return tokens

    def describe(self) -> str:
        """Effective configuration: see `Zero.describe`; and what makes the products."""
        threads = blas_threads()
        return (
            f"{self.zero.describe()}\n"
            f"products by {gemm.name()}, {threads} thread{'s' if threads > 1 else ''} per rank"
        )

    def close(self) -> None:
        """Remove this rank's files from the disk: see `Zero.close`."""
        self.zero.close()

    # ---- what Zero does --------------------------------------------------------------------------

    @property
    def applied(self) -> int:
        """Applied steps."""
        return self.zero.applied

    def save(self, directory: str | Path, **options: Any) -> Path:
        """Write a checkpoint: see `Zero.save`."""
        return self.zero.save(directory, **{"seed": self.seed, **options})

    def finish_save(self) -> Path | None:
        """Wait for a save in the background: see `Zero.finish_save`."""
        return self.zero.finish_save()

    def load(self, directory: str | Path, **options: Any) -> LoadReport | None:
        """Continue from a checkpoint, with its seed of dropout: see `Zero.load`."""
        report = self.zero.load(directory, **options)
        if report is not None and report.record["seed"] is not None:
            self.seed = report.record["seed"]
        return report

    def full(self, name: str) -> F32:
        """Whole parameter: see `Zero.full`."""
        return self.zero.full(name)

    def master(self, name: str) -> F32:
        """Whole float32 master: see `Zero.master`."""
        return self.zero.master(name)

    def moments(self, name: str) -> dict[str, F32]:
        """Whole optimizer state: see `Zero.moments`."""
        return self.zero.moments(name)

    def gathered(self, unit: str, edit: bool = False) -> AbstractContextManager[dict[str, F32]]:
        """Hold a unit's whole parameters, to read or edit: see `Zero.gathered`."""
        return self.zero.gathered(unit, edit)


def _initial(
    weights: Any, draw: Callable[[str], Mapping[str, F32]], model: Model
) -> Callable[[str], Mapping[str, F32]]:
    """Return a source of initial values by unit: the model's, or those that the user brings."""
    if weights is None:
        return draw
    units = {unit.name: unit for unit in model.units}

    def bring(name: str) -> Mapping[str, F32]:
        given = weights(name) if callable(weights) else weights
        values = {}
        for p in units[name].parameters:
            if p.name not in given:
                raise ValueError(f"weights: {p.name!r} of unit {name!r} is missing")
            values[p.name] = np.asarray(given[p.name], np.float32, order="C")
            if values[p.name].shape != p.shape:
                raise ValueError(
                    f"weights: {p.name!r} has shape {values[p.name].shape}; it must be {p.shape}"
                )
        return values

    return bring


def _distinct_bytes(saved: Sequence[Saved]) -> int:
    """Bytes of all saved arrays, each counted once."""
    arrays = {id(a): a.nbytes for kept in saved for a in kept if isinstance(a, np.ndarray)}
    return sum(arrays.values())


def _draw(logits: NDArray[np.float64], temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    return int(rng.choice(p.size, p=p / p.sum()))
