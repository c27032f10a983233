"""count: bytes, calls and lifetimes of the buffers of a program, read off the table of verbs before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fsdpx.program.action import Action
from fsdpx.program.compiler import Program
from fsdpx.program.slots import SLOTS, Slot, buffer_of
from fsdpx.program.stage import spell
from fsdpx.program.verbs import VERBS, Move

__all__ = ["Calls", "Lifetime", "Sizes", "Traffic", "lifetimes", "traffic"]


Calls = tuple[tuple[str, int], ...]
"""Collectives, and how many times n - own elements each moves: once, an all-reduce twice."""


@dataclass(frozen=True)
class Sizes:
    """What a rank's bytes depend on. full, shard: elements per page, whole and on this rank; widths: of mesh axes."""

    full: Mapping[int, int]
    shard: Mapping[int, int]
    replica_own: Mapping[int, int]  # elements of the shard that this replica would own in an all-reduce
    param_itemsize: int
    grad_itemsize: int
    widths: dict[str, int]
    calls: Calls = (("reduce_scatter", 1),)  # how a reduce over shards is carried, and over replicas
    calls_all: Calls = (("all_reduce", 2),)
    ties: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)  # (axis, call, elements)
    tie_itemsize: int = 4
    edges: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (edge, microbatch) -> bytes


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one (axis, call)."""

    calls: int = 0
    bytes: int = 0


def traffic(program: Program, sizes: Sizes) -> dict[tuple[str, str], Traffic]:
    """Per mesh axis and collective, on this rank; per page n elements, own elements o on the axis:

    all-gather and reduce-scatter n - o, all-reduce 2 (n - o); a message between stages its own. Control messages
    ("pair") are a few bytes and left out, and so is what layers move themselves along the tensor axis.
    """
    total: dict[tuple[str, str], Traffic] = {}
    for action in program.actions:
        for axis, call, nbytes in _moved(action, sizes):
            have = total.get((axis, call), Traffic())
            total[axis, call] = Traffic(have.calls + 1, have.bytes + nbytes)
    return total


def _moved(action: Action, sizes: Sizes) -> Iterator[tuple[str, str, int]]:
    """(axis, collective, bytes) of an action."""
    itemsizes = {"param": sizes.param_itemsize, "grad": sizes.grad_itemsize, "tie": sizes.tie_itemsize}
    for move in VERBS[action.op].moves:
        if move.format == "control":
            continue
        assert action.unit is not None
        if move.amount == "edge":
            nbytes = sizes.edges.get((action.unit, action.mb or 0), 0)
            if nbytes:
                yield move.axis, move.call, nbytes
        elif move.axis == "peers":
            for axis, call, elements in sizes.ties[action.unit]:
                yield axis, call, elements * itemsizes[move.format]
        elif sizes.widths[move.axis] > 1:
            for call, times in _carried(move, sizes):
                yield move.axis, call, _elements(move, action.unit, sizes) * times * itemsizes[move.format]


def _carried(move: Move, sizes: Sizes) -> Calls:
    """The collectives that a move of the table turns into."""
    return {"reduce_scatter": sizes.calls, "all_reduce": sizes.calls_all}.get(move.call, ((move.call, 1),))


def _elements(move: Move, page: int, sizes: Sizes) -> int:
    if move.amount == "full":
        return sizes.full[page] - sizes.shard[page]
    return sizes.shard[page] - sizes.replica_own[page]


@dataclass(frozen=True)
class Lifetime:
    """A buffer lives from the start of action `start` to the end of action `stop`."""

    slot: Slot
    start: int
    stop: int


def lifetimes(program: Program) -> list[Lifetime]:
    """When each lent buffer is alive, by birth: those that the program itself fills and empties, and all scratch.

    Slots of one buffer are one life (sum3 goes on where grad3 ended). A buffer may live several times. Scratch that
    nobody ends lives to the last action.
    """
    return sorted([*_filled(program), *_scratch(program)], key=lambda life: life.start)


def _filled(program: Program) -> Iterator[Lifetime]:
    carried = {buffer_of(slot) for slot in program.begins | program.ends}
    born: dict[Slot, int] = {}
    for at, slots in enumerate(program.slots):
        given = {buffer_of(slot) for slot in (*slots.adds, *slots.gives)}
        for buffer in given - carried:
            if SLOTS[buffer.kind].lent:
                born.setdefault(buffer, at)
        for buffer in map(buffer_of, slots.takes):
            if buffer in born and buffer not in given:
                yield Lifetime(buffer, born.pop(buffer), at)


def _scratch(program: Program) -> Iterator[Lifetime]:
    ends: dict[Slot, int] = {}  # the next action that takes or reads a slot, seen from the last action backwards
    last = len(program.actions) - 1
    for at, action in reversed(list(enumerate(program.actions))):
        for scratch in VERBS[action.op].scratch:
            until = spell(scratch.until, action, program.stage, program.microbatches) if scratch.until else []
            stop = min((ends.get(slot, last) for slot in until), default=at)
            yield Lifetime(Slot(scratch.kind, action.unit), at, stop)
        ends |= dict.fromkeys((*program.slots[at].takes, *program.slots[at].reads), at)
