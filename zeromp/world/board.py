"""The board and the tally: how the ranks of a node tell one another where they are.

Both lie in memory that all can read.

Each rank has a row of slots. Its k-th message goes into slot k modulo `SLOTS`: what it is about, a
place in shared memory, up to `NOTE_BYTES` bytes of text or numbers, and, written last, the number
k itself. A rank reads its neighbours' slots when all of them hold k: whatever a neighbour wrote
before it posted is then there to be read. That is a barrier and a message in one, without a call
into the operating system or into MPI, and the only synchronisation that shared memory needs.

A slot is written again `SLOTS` messages later. All ranks post the same messages in the same order,
so a rank gets one message ahead of the slowest, or `SLOTS` / 2 where it posts without waiting
(`SharedTransport` sees to that), but never that far.

A tally is one number per rank: how many things of some kind, which all do in the same order, it has
done. Who must know that all have done the k-th waits until all numbers are k or more.

A rank that waits spins for some microseconds, then yields its core, then sleeps, longer the longer
it has waited: with more ranks than cores, the one that it waits for may need this very core.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from zeromp._jit import kernel

if TYPE_CHECKING:
    from zeromp.world.memory import Window

SLOTS = 32
SLOT_BYTES = 256
HEAD_BYTES = 32  # int64: number, what, window, offset
NOTE_BYTES = SLOT_BYTES - HEAD_BYTES
BOARD_BYTES = SLOTS * SLOT_BYTES
TALLY_BYTES = 64  # a line of the cache
SPINS = 2000  # a few microseconds
YIELDS = 50
AWAKE_SECONDS = 0.001
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


_yield = types.ExternalFunction("sched_yield", types.int32())


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def _post(slot, number, what, window, offset, note, size):  # type: ignore[no-untyped-def]
    if size > 0:
        _copy(slot + HEAD_BYTES, note, size)
    _store(slot + 8, what)
    _store(slot + 16, window)
    _store(slot + 24, offset)
    _store(slot, number)


@kernel("int64(int64[::1], int64, int64, int64, int64, int64[:, ::1])")
def _arrived(boards, slot, number, spins, yields, table):  # type: ignore[no-untyped-def]
    """Copy the heads of a slot from all boards once they are posted.

    Returns 0 if one has not been posted yet, 1 if all are about the same, and 2 if they are not.
    """
    same = 1
    for rank in range(boards.size):
        place = boards[rank] + slot
        tries = 0
        while _load(place) < number:
            tries += 1
            if tries > spins:
                if tries > spins + yields:
                    return 0
                _yield()
        for i in range(3):
            table[rank, i] = _load(place + 8 + 8 * i)
        if table[rank, 0] != table[0, 0]:
            same = 2
    return same


@kernel("int64(int64[::1], int64, int64, int64)")
def _reached(tallies, number, spins, yields):  # type: ignore[no-untyped-def]
    """Whether all tallies have come to a number."""
    for rank in range(tallies.size):
        tries = 0
        while _load(tallies[rank]) < number:
            tries += 1
            if tries > spins:
                if tries > spins + yields:
                    return 0
                _yield()
    return 1


@kernel("void(int64, int64)")
def _set(tally, number):  # type: ignore[no-untyped-def]
    _store(tally, number)


@kernel("void(int64, int64, int64)")
def copy_bytes(source, target, size):  # type: ignore[no-untyped-def]
    """Copy memory from address to address."""
    if size > 0:
        _copy(target, source, size)


@kernel("void(int64[::1], int64, int64)")
def _notes(slots, size, target):  # type: ignore[no-untyped-def]
    for rank in range(slots.size):
        _copy(target + rank * size, slots[rank] + HEAD_BYTES, size)


@kernel("void(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64)")
def copy_pieces(places, starts, sizes, low, high, itemsize, target, own):  # type: ignore[no-untyped-def]
    """Copy elements low to high of all pieces but one's own into the whole at `target`.

    `places` is where the neighbours' elements low lie, `starts` where their pieces begin in the
    whole. It begins with the one after one's own: not all read the same neighbour at once.
    """
    for i in range(1, places.size):
        rank = (own + i) % places.size
        count = min(sizes[rank], high) - low
        if count > 0:
            to = target + (starts[rank] + low) * itemsize
            _copy(to, places[rank], count * itemsize)


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
    differ : callable
        Called with the heads of a message that is not about the same on all ranks.
    poke : callable
        Called now and then while waiting long, for what must go on meanwhile.
    """

    def __init__(
        self,
        window: "Window",
        offset: int,
        index: int,
        differ: Callable[[NDArray[np.int64]], None],
        poke: Callable[[], Any],
    ) -> None:
        self.boards = window.bases + offset
        self.address = int(self.boards[index])
        self.differ, self.poke = differ, poke
        self.heads = np.empty((self.boards.size, 3), np.int64)
        self.posted = 0

    def post(
        self, what: int, window: int = 0, offset: int = 0, note: NDArray[Any] | None = None
    ) -> int:
        """Post the next message, and return its number."""
        self.posted += 1
        slot = self.address + self.posted % SLOTS * SLOT_BYTES
        if note is None:
            _post(slot, self.posted, what, window, offset, 0, 0)
        else:
            first = note.__array_interface__["data"][0]
            _post(slot, self.posted, what, window, offset, first, note.nbytes)
        return self.posted

    def wait(self, number: int) -> NDArray[np.int64]:
        """Wait until all have posted a message; return its heads (what, window, offset), by rank.

        They are overwritten by the next call.
        """
        slot = number % SLOTS * SLOT_BYTES
        boards, heads = self.boards, self.heads
        state = _patiently(
            lambda spins, yields: _arrived(boards, slot, number, spins, yields, heads), self.poke
        )
        if state == 2:
            self.differ(heads)
        return heads

    def here(self, number: int) -> bool:
        """Whether all have posted a message, without waiting."""
        slot = number % SLOTS * SLOT_BYTES
        return bool(_arrived(self.boards, slot, number, 0, 0, self.heads))

    def notes(self, number: int, into: NDArray[Any]) -> None:
        """Write what all ranks have noted in a message, of equal sizes, one after the other."""
        slots = self.boards + number % SLOTS * SLOT_BYTES
        _notes(slots, into.nbytes // slots.size, into.__array_interface__["data"][0])


class Tally:
    """How many things each rank of this node has done.

    Parameters
    ----------
    window : Window
        Where the tally lies, TALLY_BYTES of each rank's segment, zeroed before any rank counts.
    offset : int
        From which byte on.
    index : int
        This rank's place in its node.
    poke : callable
        See `Board`.
    """

    def __init__(self, window: "Window", offset: int, index: int, poke: Callable[[], Any]) -> None:
        self.tallies = window.bases + offset
        self.address = int(self.tallies[index])
        self.poke = poke

    def reach(self, number: int) -> None:
        """Say that this rank has done the things up to a number."""
        _set(self.address, number)

    def wait(self, number: int) -> None:
        """Wait until all have."""
        tallies = self.tallies
        _patiently(lambda spins, yields: _reached(tallies, number, spins, yields), self.poke)


def _patiently(look: Callable[[int, int], int], poke: Callable[[], Any]) -> int:
    """Look until there is something to be seen, and return that."""
    seen = look(SPINS, YIELDS)
    start = 0.0
    while not seen:  # now and then in Python, so that signals and other threads get a turn
        start = start or time.perf_counter()
        waited = time.perf_counter() - start
        if waited > AWAKE_SECONDS:
            time.sleep(min(waited / 10, LONGEST_SLEEP))
            poke()
        seen = look(0, YIELDS)
    return seen
