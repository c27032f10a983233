"""Full gradients of a page while backward adds into them, and how they become this rank's reduced part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from fsdpx.comm.communicator import DONE, Communicator, Handle, split_evenly
from fsdpx.engine.engine import Engine
from fsdpx.layout.tree import Node, Stack
from fsdpx.state.pages import PageState

__all__ = ["Chunked", "Gradient", "Pending", "Plainly", "Subtrees", "join", "reduce", "scratch_nbytes"]


class Pending:
    """A value on its way: `wait` ends the transfer and gives it.

    issued, landed: when the transfer began, and when this rank saw its end. busy: seconds of the time between in which
    this rank moved it on or waited for it; the rest was computed over.
    """

    __slots__ = ("busy", "finish", "handle", "issued", "landed")

    def __init__(self, handle: Handle, finish: Callable[[], Any]) -> None:
        self.handle = handle
        self.finish = finish
        self.issued = perf_counter()
        self.landed = 0.0
        self.busy = 0.0

    def wait(self) -> Any:
        begin = perf_counter()
        self.handle.wait()
        self._note(begin)
        return self.finish()

    def test(self) -> bool:
        """Move the transfer on; whether it is complete."""
        begin = perf_counter()
        done = self.handle.test()
        if self._note(begin) and not done:
            self.landed = 0.0
        return done

    def _note(self, begin: float) -> bool:
        """Whether the transfer was still under way at `begin`."""
        flying = self.landed == 0.0
        if flying:
            self.landed = perf_counter()
            self.busy += self.landed - begin
        return flying


class Plainly:
    """One full gradient; microbatches add into it in the order in which they run.

    blank: nothing has been written yet; the first action that works on it leaves no element unwritten.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.blank = True

    def at(self, microbatch: int) -> Any:
        return self.buffer


class Chunked:
    """Gradients of chunks, added along the canonical tree. leaves: buffers for all partial sums alive at once.

    blank: nothing has been written into the current leaf, as in `Plainly`.
    """

    blank = False

    def __init__(self, leaves: list[Any], chunks: range, total: int) -> None:
        self.free = leaves[::-1]
        self.chunks = chunks
        self.stack: Stack[Any] = Stack(total, self._add)
        self.current: tuple[int, Any] | None = None

    def at(self, microbatch: int) -> Any:
        """The leaf of the chunk that runs as `microbatch`; the one before is complete then."""
        if self.current is None or self.current[0] != microbatch:
            self._close()
            self.current = (microbatch, self.free.pop())
            self.blank = True
        return self.current[1]

    def entries(self) -> list[tuple[Node, Any]]:
        """The partial sums of all chunks so far, by node."""
        self._close()
        return self.stack.entries

    def _close(self) -> None:
        if self.current is not None:
            microbatch, leaf = self.current
            self.current = None
            self.stack.push(Node(0, self.chunks[microbatch]), leaf)

    def _add(self, left: Any, right: Any) -> Any:
        left += right
        self.free.append(right)
        return left


Gradient = Plainly | Chunked


def reduce(engine: Engine, state: PageState, gradient: Gradient, first: bool, scratch: Any, what: str) -> Pending:
    """Start to sum a full gradient over the shard axis; the result is this rank's part of it.

    first: no part is there yet, so the sum may go straight to where the part is kept.
    """
    if isinstance(gradient, Chunked):
        return _reduce_tree(engine, state, gradient, scratch, what)
    full = gradient.buffer
    if engine.axes.shard.size == 1:
        return Pending(DONE, lambda: full)
    out = state.part if first else state.reduced(full)
    handle = engine.codec.reduce(engine.axes.shard, full, out, state.counts, scratch, what=what)
    return Pending(handle, lambda: out)


def join(engine: Engine, state: PageState, part: Any, scratch: Any, what: str) -> Pending:
    """Start to sum a part over the replica axis, in place."""
    if isinstance(part, Subtrees):
        total = _join_tree(engine, state, part, what)  # now: the memory of its entries is lent until this action
        return Pending(DONE, lambda: total)
    replica = engine.axes.replica
    if replica.size == 1:
        return Pending(DONE, lambda: part)
    handle = engine.codec.reduce_all(replica, part, scratch, what=what)
    if scratch.size:
        handle.wait()  # its memory is lent for this action only
    return Pending(handle, lambda: part)


@dataclass(frozen=True)
class Subtrees:
    """This rank's elements of partial sums that are not one sum yet, and the scratch that is left."""

    entries: list[tuple[Node, Any]]
    scratch: Any


def _reduce_tree(engine: Engine, state: PageState, gradient: Chunked, scratch: Any, what: str) -> Pending:
    """Along the tree: partial sums go to the owners of their elements, who add them in tree order.

    Bytes per rank and axis: nodes x (n - n/N), where nodes is how many subtrees the rank's chunks make up: one when the
    number of ranks is a power of two that divides the number of chunks.
    """
    shard, total = engine.axes.shard, engine.options.chunks
    assert total is not None
    base = engine.axes.data.rank // shard.size * shard.size
    held = [engine.nodes(range(base + s, base + s + 1)) for s in range(shard.size)]
    trade = Trade(shard, gradient.entries(), held, state.counts, total, scratch, what)
    return Pending(trade, lambda: Subtrees(trade.finish(), scratch[trade.used :]))


def _join_tree(engine: Engine, state: PageState, part: Subtrees, what: str) -> Any:
    replica, width, total = engine.axes.replica, engine.axes.shard.size, engine.options.chunks
    assert total is not None
    if replica.size == 1:
        state.part[...] = part.entries[0][1]
        return state.part
    groups = [engine.nodes(range(r * width, (r + 1) * width)) for r in range(replica.size)]
    counts = split_evenly(state.mine.size, replica.size)
    own = Trade(replica, part.entries, groups, counts, total, part.scratch, what).finish()[0][1]
    replica.all_gather(own, state.part, counts, what=what).wait()
    return state.part


class Trade:
    """One exchange of partial sums: each rank ends with its elements of every node of the group, added as far as the
    tree allows. `held[r]` are the nodes of rank r; scratch takes what arrives, an array of the gradients' dtype."""

    def __init__(
        self,
        comm: Communicator,
        entries: list[tuple[Node, Any]],
        held: Sequence[Sequence[Node]],
        counts: Sequence[int],
        total: int,
        scratch: Any,
        what: str,
    ) -> None:
        self.total, self.used = total, 0
        self.handles: list[Handle] = []
        self.arrived: list[tuple[Node, Any]] = list(entries)
        if comm.size > 1:
            self.arrived = []
            own, none = counts[comm.rank], [0] * comm.size
            for i in range(max(map(len, held))):
                sources = [r for r in range(comm.size) if i < len(held[r])]
                room = scratch[self.used : self.used + own * len(sources)]
                self.used += room.size
                outgoing = (entries[i][1], counts) if i < len(entries) else (scratch[:0], none)
                incoming = [own if r in sources else 0 for r in range(comm.size)]
                self.handles.append(comm.all_to_all(outgoing[0], room, outgoing[1], incoming, what=what))
                self.arrived += [(held[r][i], room[k * own : (k + 1) * own]) for k, r in enumerate(sources)]

    def test(self) -> bool:
        done = [handle.test() for handle in self.handles]  # poke them all
        return all(done)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()

    def finish(self) -> list[tuple[Node, Any]]:
        self.wait()
        stack: Stack[Any] = Stack(self.total, _add)
        for node, values in sorted(self.arrived, key=lambda entry: entry[0].start):
            stack.push(node, values)
        return stack.entries


def _add(left: Any, right: Any) -> Any:
    left += right
    return left


def scratch_nbytes(engine: Engine, state: PageState) -> tuple[int, int]:
    """Memory that reducing and joining a page need beside the gradient itself; with chunks both share the first."""
    shard, replica = engine.axes.shard.size, engine.axes.replica.size
    own = state.mine.size
    if engine.options.chunks is None:
        first = engine.codec.scratch(state.page.size, shard) if shard > 1 else 0
        return first, engine.codec.scratch(own, replica) if replica > 1 else 0
    nodes = 0
    if shard > 1:
        base = engine.axes.data.rank // shard * shard
        nodes += own * sum(len(engine.nodes(range(base + s, base + s + 1))) for s in range(shard))
    if replica > 1:
        part = split_evenly(own, replica)[engine.axes.replica.rank]
        nodes += part * sum(len(engine.nodes(range(r * shard, (r + 1) * shard))) for r in range(replica))
    return nodes * engine.dtype.itemsize, 0
