"""The board: how the ranks of a node tell one another where they are, in memory that all can read.

Each rank has a row of slots. Its k-th message goes into slot k modulo `SLOTS`: what it is about, a
place in shared memory, up to `NOTE_BYTES` bytes of text or numbers, and, written last, the number
k itself. A rank reads its neighbours' slots when all of them hold k: whatever a neighbour wrote
before it posted is then there to be read. That is a barrier and a message in one, without a call
into the operating system or into MPI, and the only synchronisation that shared memory needs.

A slot is written again `SLOTS` messages later. All ranks post the same messages in the same order,
so a rank gets one message ahead of the slowest, or `SLOTS` / 2 where it starts requests without
waiting for them (`SharedTransport` sees to that), but never that far.

A rank that waits spins for some microseconds, then yields its core, then sleeps, longer the longer
it has waited: with more ranks than cores, the one that it waits for may need this very core.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from zeromp._jit import kernel
from zeromp.world.memory import Window

SLOTS = 32
SLOT_BYTES = 256
HEAD_BYTES = 32  # int64: number, what, window, offset
NOTE_BYTES = SLOT_BYTES - HEAD_BYTES
BOARD_BYTES = SLOTS * SLOT_BYTES
SPINS = 2000  # a few microseconds
YIELD_SECONDS = 0.001
LONGEST_SLEEP = 0.001


@intrinsic
def _load(_context: Any, address: Any) -> Any:
    """Read an int64; what its writer wrote before it is visible after."""

    def generate(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(address), generate


@intrinsic
def _store(_context: Any, address: Any, value: Any) -> Any:
    """Write an int64 after all that this rank has written before."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], place, "release", 8)
        return context.get_dummy_value()

    return types.void(address, value), generate


@intrinsic
def _copy(_context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy bytes from address to address."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to, of = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], 1)
        return context.get_dummy_value()

    return types.void(target, source, size), generate


@kernel("void(int64, int64, int64, int64, int64)")
def _post(slot, number, what, window, offset):  # type: ignore[no-untyped-def]
    _store(slot + 8, what)
    _store(slot + 16, window)
    _store(slot + 24, offset)
    _store(slot, number)


@kernel("boolean(int64[::1], int64, int64, int64, int64[:, ::1])")
def _arrived(boards, slot, number, spins, table):  # type: ignore[no-untyped-def]  # (L,), ..., (L, 3)
    """Copy the heads of a slot from all boards, unless one of them has not been posted yet."""
    for rank in range(boards.size):
        place = boards[rank] + slot
        left = spins
        while _load(place) < number:
            left -= 1
            if left < 0:
                return False
        for i in range(3):
            table[rank, i] = _load(place + 8 + 8 * i)
    return True


@kernel("void(int64[::1], int64[::1], int64[::1])")
def copy_all(sources, targets, sizes):  # type: ignore[no-untyped-def]  # (n,) addresses and bytes
    """Copy n ranges of memory, in order."""
    for i in range(sizes.size):
        if sizes[i] > 0:
            _copy(targets[i], sources[i], sizes[i])


class Board:
    """A board of this node's ranks.

    Parameters
    ----------
    window : Window
        Where the board lies, BOARD_BYTES of each rank's segment, zeroed before any rank posts.
    offset : int
        From which byte on.
    index : int
        This rank's place in its node.
    poke : callable
        Called now and then while waiting long, for what must go on meanwhile.
    """

    def __init__(self, window: Window, offset: int, index: int, poke: Callable[[], Any]) -> None:
        self.mine = window.segment[offset : offset + BOARD_BYTES]
        self.boards = window.bases + offset
        self.address = int(self.boards[index])
        self.poke = poke
        self.posted = 0

    def post(self, what: int, window: int = 0, offset: int = 0, note: bytes = b"") -> int:
        """Post the next message, and return its number."""
        self.posted += 1
        slot = self.posted % SLOTS * SLOT_BYTES
        if note:
            start = slot + HEAD_BYTES
            self.mine[start : start + len(note)] = np.frombuffer(note, np.uint8)
        _post(self.address + slot, self.posted, what, window, offset)
        return self.posted

    def wait(self, number: int) -> NDArray[np.int64]:
        """Wait until all have posted a message; return its (what, window, offset) by rank."""
        slot = number % SLOTS * SLOT_BYTES
        table = np.empty((self.boards.size, 3), np.int64)
        if not _arrived(self.boards, slot, number, SPINS, table):
            start = time.perf_counter()
            while not _arrived(self.boards, slot, number, 0, table):
                waited = time.perf_counter() - start
                if waited < YIELD_SECONDS:
                    os.sched_yield()
                else:
                    time.sleep(min(waited / 10, LONGEST_SLEEP))
                    self.poke()
        return table

    def notes(self, number: int, into: NDArray[np.uint8]) -> None:
        """Read what all ranks have noted in a message; `into` has shape (L, bytes)."""
        ranks, size = into.shape
        sources = self.boards + (number % SLOTS * SLOT_BYTES + HEAD_BYTES)
        first = into.__array_interface__["data"][0]
        targets = first + size * np.arange(ranks, dtype=np.int64)
        copy_all(sources, targets, np.full(ranks, size, np.int64))
