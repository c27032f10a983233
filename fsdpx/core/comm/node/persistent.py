"""Persistent collectives in shared memory. The arguments are checked and the array addresses are looked up only once.
After that, a collective can be started many times, and compiled code does all waiting and adding.

Persistent collectives use the same shared records as `NodeCollective`, so a rank that runs a persistent collective can
synchronize with a rank that runs a `NodeCollective`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.array.jit import CompiledFunction
from fsdpx.core.comm.calls import Array, Call, FlatPartition, ReduceOp, format_call_label, spin_until
from fsdpx.core.comm.node import atomics
from fsdpx.core.comm.node.rendezvous import NodeGroup, make_timeout_error
from fsdpx.core.comm.node.shared_windows import BOARD_SLOTS, WindowAddress

__all__ = [
    "MIN_STREAMED_BYTES", "PersistentCollective", "StartedCollective", "compile_collective_kernels",
    "make_persistent_gather_or_barrier", "make_persistent_shared_memory_sum",
]  # fmt: skip

SPINS_PER_STEP = 512
"""Number of polls (about 20 us in total) after which compiled code returns to Python. Python then advances other
transfers before polling continues."""
MIN_STREAMED_BYTES = 4 << 20
"""Results of at least this many bytes bypass the caches, where they would only evict other data. Smaller results are
worth caching, because they are read soon."""

Run = Callable[[int, int, int, int], int]
_SUMS: dict[str, CompiledFunction] = {
    "f": atomics.synchronize_and_add32,
    "d": atomics.synchronize_and_add64,
    "bfloat16": atomics.synchronize_and_add_bfloat16,
    "float16": atomics.synchronize_and_add_float16,
}
"""Compiled functions that sum arrays, keyed by dtype. The functions for the 16-bit dtypes sum float32 arrays, and round
each value to the 16-bit dtype before adding it."""


def compile_collective_kernels(kind: str) -> None:
    """Compile the code of collectives in shared memory, or load it from the cache, so that the first collective does
    not have to wait. `kind` is the name of the dtype of the sums."""
    for run in (atomics.poll_barrier, _SUMS.get(kind) or _SUMS[np.dtype(kind).char]):
        run.compile_for_arguments(0, 0, 0, 0)


def make_persistent_gather_or_barrier(group: NodeGroup, call: Call, own: Array | None = None) -> PersistentCollective:
    """Return a persistent barrier, or a persistent all-gather into an array that all ranks share. `own` is the
    destination of this rank's piece, or None if the piece is already in place."""
    return PersistentCollective(group, call, atomics.poll_barrier, None, own, _make_argument_row(group, 0, 1, []))


def make_persistent_shared_memory_sum(
    group: NodeGroup, call: Call, address: WindowAddress, pieces: FlatPartition
) -> PersistentCollective:
    """Return a persistent collective that adds the input arrays of all ranks (the first array of each rank's call).
    This rank adds only the elements of its own piece.

    `address` is the address of this rank's input array. If the call has a second array, the sum is written to that
    array; otherwise it is written to the input arrays of all ranks."""
    first, last, rank = call.arrays[0], call.arrays[-1], group.rank
    separate = len(call.arrays) > 1
    outs = [get_data_pointer(last)] if separate else [0] * group.size
    divisor = group.size if call.op is ReduceOp.AVG else 1
    run = _SUMS[first.dtype.char if call.wire is None else call.wire.name]
    row = _make_argument_row(
        group, pieces.counts[rank], divisor, outs, stream=separate and last.nbytes >= MIN_STREAMED_BYTES
    )
    persistent_call = PersistentCollective(group, call, run, address, None, row)
    persistent_call.skip = pieces.displs[rank] * first.dtype.itemsize
    persistent_call.set_peer_address(group.lane, address)
    return persistent_call


def _make_argument_row(group: NodeGroup, n: int, divisor: int, outs: list[int], stream: bool = False) -> Array:
    """Return the array of arguments for compiled code, in the layout described in `atomics`. `n` is the number of
    elements to add, and `outs` lists the addresses of the output arrays. The addresses of the arrays to add are filled
    in later."""
    ranks = group.size
    head = [ranks, group.lane, n, divisor, int(stream), len(outs)]
    return np.array(
        [*head, *group.board.addresses, *[0] * ranks, *[-1] * (atomics.ADDRESS_WORDS * ranks), *outs], np.int64
    )


class PersistentCollective:
    """A collective that can be started many times with the same arrays. It keeps only weak references to the arrays,
    because they may be large.

    Attributes
    ----------
    run : compiled function that advances the collective
    words : address of this rank's array as 64-bit words; None if other ranks do not read the array
    own : array to which the call's first array is copied at each start; None if nothing is copied
    skip : byte offset of the elements that this rank adds, the same in every rank's array"""

    __slots__ = (
        "_everywhere", "_row", "_words", "first", "host_group", "last", "own", "run", "skip", "start", "verb", "words"
    )  # fmt: skip

    def __init__(
        self, group: NodeGroup, call: Call, run: Run, address: WindowAddress | None, own: Array | None, row: Array
    ) -> None:
        self.host_group, self.verb, self.run, self.own = group, call.verb, run, own
        self.words = None if address is None else address.word_view
        arrays = call.arrays or (row,)
        self.first, self.last = ref(arrays[0]), ref(arrays[-1])
        self._everywhere = address is not None and len(arrays) == 1
        self._row, self._words, self.start = row, memoryview(row), get_data_pointer(row)
        self.skip = 0

    def begin(self, arrays: tuple[Array, ...], what: str) -> StartedCollective:
        """Start the collective, and return its handle."""
        if self.own is not None:
            self.own[...] = arrays[0]
        group, started = self.host_group, StartedCollective()
        started.persistent, started.what, started.done = self, what, False
        started.number = number = group.reserve_collective_number(started)
        started.at = group.board.post_record(number, self.words)
        group.progress.pending.append(started)
        return started

    def read_peer_addresses(self, number: int) -> None:
        """Read the addresses of the other ranks' arrays from the records that these ranks have posted in shared memory
        for collective number `number`."""
        for lane in self.host_group.others:
            self.set_peer_address(lane, self.host_group.board.read_words(lane, number, atomics.ADDRESS_WORDS))

    def set_peer_address(self, lane: int, address: Sequence[int]) -> None:
        """Store the address of one rank's array in the arguments for the compiled code. `lane` is the index of that
        rank on this host."""
        words, ranks, (window, owner, offset) = self._words, self.host_group.size, address
        window_address = self.host_group.memory.windows[window].addresses[owner] + offset + self.skip
        words[atomics.HEAD + ranks + lane] = window_address
        for i, word in enumerate(address):
            words[atomics.HEAD + 2 * ranks + atomics.ADDRESS_WORDS * lane + i] = word
        if self._everywhere:
            words[atomics.HEAD + (2 + atomics.ADDRESS_WORDS) * ranks + lane] = window_address


class StartedCollective:
    """The handle of a persistent collective that has been started. The class has no `__init__`, because calling it
    would take a fifth of the time needed to start a collective."""

    __slots__ = ("at", "done", "number", "persistent", "what")
    persistent: PersistentCollective
    what: str
    number: int
    at: int
    done: bool

    def test(self) -> bool:
        return self.done or self._advance_collective(0)

    def wait(self) -> None:
        group = self.persistent.host_group
        if self.done or self._advance_collective(SPINS_PER_STEP if group.progress.polls_before_yield else 0):
            return
        if not spin_until(self.test, group.progress, group.timeout):
            raise make_timeout_error(self, group, self._find_late_ranks())

    def is_slot_free(self) -> bool:
        """Return whether the shared record of this collective may be overwritten by a later collective."""
        return self.test()

    def __str__(self) -> str:
        group = self.persistent.host_group
        return f"{format_call_label(self.persistent.verb, self.what)} on rank {group.rank} of {group.size}"

    def _advance_collective(self, max_polls: int) -> bool:
        persistent, number = self.persistent, self.number
        stands = persistent.run(persistent.start, number, self.at, max_polls)
        if stands == atomics.MOVED:
            persistent.read_peer_addresses(number)
            stands = persistent.run(persistent.start, number, self.at, max_polls)
        if stands != atomics.COMPLETE:
            return False
        self.done = True
        persistent.host_group.progress.pending.remove(self)
        persistent.host_group.latest[number % BOARD_SLOTS] = None
        return True

    def _find_late_ranks(self) -> list[int]:
        group, number = self.persistent.host_group, self.number
        absent = [lane for lane in group.others if not group.board.has_posted(lane, number)]
        return absent or [lane for lane in group.others if not group.board.has_finished(lane, number)]
