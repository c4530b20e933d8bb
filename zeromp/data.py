"""Token files, and each rank's slice of every batch."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromp.world import World

BYTES = 256  # vocabulary of text that is read as bytes


def standard_library() -> list[Path]:
    """Python files of the running Python's own standard library: text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if skip.isdisjoint(p.relative_to(root).parts))


class Tokens:
    """A sequence of tokens, from which rows of `context` + 1 are drawn.

    Parameters
    ----------
    files : path, sequence of paths, or None
        Text files, read as bytes and joined; or one ``.npy`` file that holds a 1-D integer array,
        which is mapped, not read. None takes Python's standard library (about 13 MB of text).
    context : int
        Tokens in a row of x; y is the same row, one token on.
    vocab : int or None
        Number of token ids; None means 256 for text, and the largest id + 1 of a token file.
    held_out : float
        Fraction at the end that `batches` never touches and `held_out_batch` draws from.
    seed : int
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path] | None = None,
        *,
        context: int,
        vocab: int | None = None,
        held_out: float = 0.05,
        seed: int = 0,
    ) -> None:
        if files is None:
            files = standard_library()
        paths = [Path(f) for f in ([files] if isinstance(files, str | Path) else files)]
        self.tokens = _read(paths)
        self.context, self.seed = context, seed
        if vocab is None:
            is_text = self.tokens.dtype == np.uint8
            vocab = BYTES if is_text else int(self.tokens.max(initial=0)) + 1
        self.vocab = vocab
        self.num_train = int(self.tokens.size * (1 - held_out))
        if min(self.num_train, self.tokens.size - self.num_train or context + 1) < context + 1:
            raise ValueError(
                f"{self.tokens.size} tokens are too few: rows of context + 1 = {context + 1} are "
                f"drawn from the first {self.num_train} and from the {held_out:.0%} held out"
            )

    def batches(
        self, step: int, global_batch: int, micro: int, world: World
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield this rank's micro-batches of one step.

        The rows of a step depend on the seed and the step alone. Micro-batch i gives rank r rows
        (i N + r) `micro` to (i N + r + 1) `micro`, so that the global batch is the same for any N.

        Yields
        ------
        x, y : ndarray of int64 of shape (micro, context)
        """
        check_batch(global_batch, micro, world.size)
        starts = self._starts(global_batch, 0, self.num_train, step)
        for i in range(global_batch // (micro * world.size)):
            first = (i * world.size + world.rank) * micro
            yield self._rows(starts[first : first + micro])

    def held_out_batch(
        self, rows: int, world: World, draw: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw this rank's share of `rows` rows of the held-out text, the same for any N."""
        starts = self._starts(rows, self.num_train, self.tokens.size, -1 - draw)
        return self._rows(
            starts[rows * world.rank // world.size : rows * (world.rank + 1) // world.size]
        )

    def _starts(self, rows: int, low: int, high: int, step: int) -> NDArray[np.int64]:
        sequence = np.random.SeedSequence([self.seed, abs(step), int(step < 0)])
        rng = np.random.Generator(np.random.PCG64(sequence))
        return rng.integers(low, high - self.context, rows)

    def _rows(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = np.empty((len(starts), self.context + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self.tokens[start : start + self.context + 1]
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def check_batch(global_batch: int, micro: int, num_ranks: int) -> int:
    """Micro-batches per rank and step; ValueError, with the equation, if they do not divide."""
    if micro < 1 or global_batch < 1 or global_batch % (micro * num_ranks):
        raise ValueError(
            f"global batch {global_batch} must be micro-batch {micro} x {num_ranks} ranks x a "
            f"whole number of micro-batches per step; {micro} x {num_ranks} = "
            f"{micro * num_ranks} does not divide it"
        )
    return global_batch // (micro * num_ranks)


def _read(paths: Sequence[Path]) -> NDArray[Any]:
    """All tokens: a mapped array, or the bytes of all files in order."""
    missing = [str(p) for p in paths if not p.is_file()]
    if missing or not paths:
        raise ValueError(f"no such file: {', '.join(missing) or 'none was given'}")
    if len(paths) == 1 and paths[0].suffix == ".npy":
        tokens: NDArray[Any] = np.load(paths[0], mmap_mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(
                f"{paths[0]}: {tokens.dtype} of shape {tokens.shape}; a token file holds a 1-D "
                "array of integers"
            )
        return tokens
    return np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8)
