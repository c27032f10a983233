"""Determine before a program runs how often it calls each collective, how many bytes these calls transfer, and how long
its buffers are in use."""

from collections.abc import Iterator, Mapping

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.program.compiler import Program
from fsdpx.core.program.pipeline import list_slots_of_verb_table_word
from fsdpx.core.program.verbs import SLOTS, VERBS, Action, Slot, get_buffer_slot

__all__ = [
    "SlotLifetime",
    "Traffic",
    "TrafficSizes",
    "Transfers",
    "count_traffic",
    "find_lifetimes",
    "iterate_buffer_lifetimes",
]


Transfers = tuple[tuple[str, int], ...]
"""Collectives as pairs (name, number of bytes that a rank sends)."""

PAGED_KINDS = ("full", "shard", "parts")
"""Values of `VerbTransfer.amount` that depend on the size of a page (flat parameter buffer)."""


@dataclass(frozen=True)
class TrafficSizes:
    """The sizes that determine the traffic of a rank. A page is a flat parameter buffer. Mappings from pages use the
    index of the page as the key.

    Attributes
    ----------
    full : for each page, the number of elements of the full page
    shard : for each page, the number of elements of this rank's shard
    replica_own : for each page, the number of elements of its shard that this rank sums in an all-reduce over replicas
    widths : number of ranks along each mesh axis
    """

    full: Mapping[int, int]
    shard: Mapping[int, int]
    replica_own: Mapping[int, int]
    param_itemsize: int
    grad_itemsize: int
    widths: dict[str, int]
    carried: Mapping[tuple[str, str], Mapping[int, Transfers]] = field(default_factory=dict)
    """collectives of gradient codecs. A key (axis, collective) identifies an uncompressed reduction. Its value is a
    dict that maps a page to the collectives that the page's codec uses instead of this reduction; pages that are not
    listed are sent uncompressed"""
    # for each page, (axis, collective, elements) of each transfer that sums the page's tied gradients
    ties: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)
    tie_itemsize: int = 4
    amounts: Mapping[str, Mapping[tuple[int, int | None], int]] = field(default_factory=dict)
    """sizes of the transfers that do not move pages: for each kind of data (`VerbTransfer.amount`), a dict that maps
    (`Action.unit`, microbatch) to a number of bytes; if a key is missing, nothing is sent"""
    # for each page, (axis, collective, bytes) of each transfer in the page's update
    parts: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """The number of calls of one collective on one mesh axis, and the total number of bytes that this rank sends in
    them."""

    calls: int = 0
    bytes: int = 0


def count_traffic(program: Program, sizes: TrafficSizes) -> dict[tuple[str, str], Traffic]:
    """Count the calls and the bytes that a rank sends in one run of a program, for each mesh axis and collective.
    Reads from and writes to offloaded memory are included.

    If this rank owns o of the n elements of a page on the axis, an all-gather or reduce-scatter counts as n - o
    elements, and an all-reduce counts as 2 (n - o). Control messages of a few bytes and the communication inside layers
    along the tensor axis are not counted.

    Parameters
    ----------
    program : a program, as returned by `fsdpx.core.program.compile`
    sizes : sizes of this rank's pages (flat parameter buffers) and messages

    Returns
    -------
    dict : number of calls and bytes, by (mesh axis, collective)
    """
    total: dict[tuple[str, str], Traffic] = {}
    for action in program.actions:
        for axis, call, nbytes in _list_action_transfers(action, sizes):
            have = total.get((axis, call), Traffic())
            total[axis, call] = Traffic(have.calls + 1, have.bytes + nbytes)
    return total


def _list_action_transfers(action: Action, sizes: TrafficSizes) -> Iterator[tuple[str, str, int]]:
    """Yield (mesh axis, collective, bytes sent by this rank) for each transfer of an action."""
    param = sizes.param_itemsize
    itemsizes = {"param": param, "grad": sizes.grad_itemsize, "tie": sizes.tie_itemsize}
    for move in (*VERBS[action.op].moves, *VERBS[action.op].within):
        if move.format == "control":
            continue
        assert action.unit is not None
        if move.amount not in PAGED_KINDS:
            nbytes = sizes.amounts.get(move.amount, {}).get((action.unit, action.mb))
            yield from [] if nbytes is None else [(move.axis, move.call, nbytes)]
        elif move.amount == "parts":
            yield from sizes.parts.get(action.unit, ())
        elif move.axis == "peers":
            for axis, call, elements in sizes.ties[action.unit]:
                yield axis, call, elements * itemsizes[move.format]
        elif sizes.widths[move.axis] > 1:
            if (moves := sizes.carried.get((move.axis, move.call), {}).get(action.unit)) is not None:
                yield from ((move.axis, call, nbytes) for call, nbytes in moves)
                continue
            whole, own_elements = (
                (sizes.full, sizes.shard) if move.amount == "full" else (sizes.shard, sizes.replica_own)
            )
            times = 2 if move.call == "all_reduce" else 1
            yield (
                move.axis,
                move.call,
                (whole[action.unit] - own_elements[action.unit]) * times * itemsizes[move.format],
            )


@dataclass(frozen=True)
class SlotLifetime:
    """The period in which a buffer is in use: from the start of action number `start` to the end of action number
    `stop`."""

    slot: Slot
    start: int
    stop: int


def find_lifetimes(program: Program) -> list[SlotLifetime]:
    """Return the lifetimes of all temporary buffers of a program, sorted by start. Temporary buffers are scratch
    memory, and the buffers that the program both fills and empties.

    Consecutive slots (named values) that use the same buffer share a lifetime. For example, the lifetime of the
    gradient buffer grad3 continues with sum3. A buffer may have several lifetimes. Scratch memory that is kept for a
    later action lives until that action. If the program has no such action, it lives until the last action of the
    program.

    Parameters
    ----------
    program : a program, as returned by `fsdpx.core.program.compile`

    Returns
    -------
    list of SlotLifetime : sorted by their first action
    """
    carried = {get_buffer_slot(slot) for slot in program.begins | program.ends}
    in_slab = [x for x in iterate_buffer_lifetimes(program) if SLOTS[x.slot.kind].in_slab and x.slot not in carried]
    return sorted([*in_slab, *_find_scratch_lifetimes(program)], key=lambda life: life.start)


def iterate_buffer_lifetimes(program: Program) -> Iterator[SlotLifetime]:
    """Yield the lifetimes of all buffers except scratch memory. If a buffer is already filled before the program,
    `start` is -1. If a buffer stays filled after the program, `stop` is the number of actions."""
    born = dict.fromkeys(map(get_buffer_slot, program.begins), -1)
    for index, slots in enumerate(program.slots):
        given = dict.fromkeys(map(get_buffer_slot, (*slots.adds, *slots.gives)), index)
        born |= {buffer: index for buffer in given if buffer not in born}
        for buffer in map(get_buffer_slot, slots.takes):
            if buffer not in given:
                yield SlotLifetime(buffer, born.pop(buffer), index)
    yield from (SlotLifetime(buffer, start, len(program.actions)) for buffer, start in born.items())


def _find_scratch_lifetimes(program: Program) -> Iterator[SlotLifetime]:
    ends: dict[Slot, int] = {}  # for each slot, the next action that takes or reads it (the loop runs backwards)
    last = len(program.actions) - 1
    for index, action in reversed(list(enumerate(program.actions))):
        for scratch in VERBS[action.op].scratch:
            until = (
                list_slots_of_verb_table_word(scratch.until, action, program.stage, program.microbatches)
                if scratch.until
                else []
            )
            stop = min((ends.get(slot, last) for slot in until), default=index)
            yield SlotLifetime(Slot(scratch.kind, action.unit), index, stop)
        ends |= dict.fromkeys((*program.slots[index].takes, *program.slots[index].reads), index)
