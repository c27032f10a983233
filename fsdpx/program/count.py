"""count: bytes, calls and peak memory of a program, read off the table of verbs before anything runs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fsdpx.program.action import Action
from fsdpx.program.compiler import Program
from fsdpx.program.verbs import VERBS, Move, buffer_of, kind_of

__all__ = ["Lifetime", "Sizes", "Traffic", "lifetimes", "peak", "traffic"]


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
    for move in VERBS[action.op].moves:
        if move.amount == "pair":
            continue
        assert action.unit is not None
        if move.amount == "edge":
            nbytes = sizes.edges.get((action.unit, action.mb or 0), 0)
            if nbytes:
                yield move.axis, move.call, nbytes
        elif move.axis == "peers":
            for axis, call, elements in sizes.ties[action.unit]:
                yield axis, call, elements * sizes.tie_itemsize
        elif sizes.widths[move.axis] > 1:
            itemsize = sizes.param_itemsize if action.op == "GATHER" else sizes.grad_itemsize
            for call, times in _carried(move, sizes):
                yield move.axis, call, _elements(move, action.unit, sizes) * times * itemsize


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

    name: str
    start: int
    stop: int


def lifetimes(program: Program, buffers: Iterable[str] = ("full", "grad")) -> list[Lifetime]:
    """When each buffer of the given kinds is alive, for those that the program itself both fills and empties.

    Slots of one buffer are one life ("sum3" goes on where "grad3" ended). A buffer may live several times.
    """
    wanted = set(buffers)
    carried = program.begins | program.ends
    born: dict[str, int] = {}
    lives: list[Lifetime] = []
    for at, slots in enumerate(program.slots):
        given = {buffer_of(s) for s in (*slots.adds, *slots.gives)}
        for slot in (*slots.adds, *slots.gives):
            if kind_of(buffer_of(slot)) in wanted and slot not in carried:
                born.setdefault(buffer_of(slot), at)
        for slot in slots.takes:
            name = buffer_of(slot)
            if name in born and name not in given:
                lives.append(Lifetime(name, born.pop(name), at))
    return lives


def peak(lives: Iterable[Lifetime], nbytes: dict[str, int]) -> tuple[int, dict[str, int]]:
    """The most bytes alive at once, and how they split by kind at that moment."""
    changes: dict[int, Counter[str]] = defaultdict(Counter)
    for life in lives:
        changes[life.start][kind_of(life.name)] += nbytes[life.name]
        changes[life.stop + 1][kind_of(life.name)] -= nbytes[life.name]
    now: Counter[str] = Counter()
    best, split = 0, {}
    for at in sorted(changes):
        now.update(changes[at])
        if now.total() > best:
            best, split = now.total(), dict(now)
    return best, split
