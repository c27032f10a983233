"""The table of verbs (the operations that a program's actions run), and the table of slots (the named buffers that
these operations read and write)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ProgramError

__all__ = [
    "SLOTS",
    "VERBS",
    "Action",
    "ScratchBuffer",
    "Slot",
    "SlotKind",
    "Verb",
    "VerbTransfer",
    "format_action_with_neighbors",
    "get_buffer_slot",
    "get_partner_verb",
    "parse_actions",
]  # fmt: skip

_TEXT = re.compile(r"([A-Z]+)(\d+)?(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a program, such as F3.0: the forward pass (F) of unit 3 for microbatch 0.

    Parameters
    ----------
    op : the operation, a key of `VERBS`
    unit : ID (an integer) of the target of the action. The target is a unit (group of layers), a page (flat parameter
        buffer) for transfers of parameters and gradients, or a message for sends and receives; None for operations
        without a target
    mb : index of the microbatch; None for operations that do not work on a microbatch
    """

    op: str
    unit: int | None = None
    mb: int | None = None

    def __str__(self) -> str:
        unit = "" if self.unit is None else str(self.unit)
        return self.op + unit + ("" if self.mb is None else f".{self.mb}")


def parse_actions(text: str) -> tuple[Action, ...]:
    """Parse text with actions separated by white space, such as "F3.0 B3.0". This is the inverse of `str(action)`.

    Parameters
    ----------
    text : one word per action: the operation in capitals, followed by the ID of the target (if any), and by "." and the
        index of the microbatch (if any)

    Returns
    -------
    tuple of Action : in the order of the text

    Raises
    ------
    ProgramError : if a word is not a valid action
    """
    actions = []
    for word in text.split():
        match = _TEXT.fullmatch(word)
        if match is None:
            wanted = "expected a verb in capitals, a number and .microbatch, as in F3.0"
            raise ProgramError(f"{word!r} is no action: {wanted}")
        unit, mb = (None if number is None else int(number) for number in match.groups()[1:])
        actions.append(Action(match[1], unit, mb))
    return tuple(actions)


def format_action_with_neighbors(actions: Sequence[Action], index: int) -> str:
    """Return the text of an action and its neighbors (six before, six after), with an arrow below the action."""
    start = max(index - 6, 0)
    words = [str(a) for a in actions[start : index + 7]]
    lead = "... " if start else ""
    arrow = len(lead) + sum(len(w) + 1 for w in words[: index - start])
    return f"  {lead}{' '.join(words)}\n  {' ' * arrow}^"


class Slot(NamedTuple):
    """A named buffer of a program, such as "full3" (gathered parameters of page 3) or "act5.0" (activation 5 of
    microbatch 0).

    Attributes
    ----------
    kind : a key of `SLOTS`
    at : ID (an integer) of the page (flat parameter buffer), unit (group of layers) or value (activation)
    mb : index of the microbatch
    """

    kind: str
    at: int | None = None
    mb: int | None = None

    def __str__(self) -> str:
        index_text = "" if self.at is None else str(self.at)
        return self.kind + index_text + ("" if self.mb is None else f".{self.mb}")


@dataclass(frozen=True)
class SlotKind:
    """Properties of all slots (named buffers) of one kind.

    Attributes
    ----------
    buffer : the kind of slot whose memory slots of this kind use, such as "grad" for the kind "sum". Two slots that use
        the same memory are never alive at the same time
    memory : category under which memory reports count these slots
    in_slab : whether the memory is in the slab (the block that is planned for each program). Even if this is true,
        slots that are alive before or after the program are not in the slab
    raw : whether the values are untyped bytes
    """

    buffer: str
    memory: str
    in_slab: bool = False
    raw: bool = False


SLOTS: dict[str, SlotKind] = {
    # state that is kept between steps
    "shard": SlotKind("shard", "parameters", in_slab=True),
    "full": SlotKind("full", "parameters", in_slab=True),
    "slots": SlotKind("slots", "optimizer", in_slab=True),  # optimizer state of a page, as a dict of arrays by name
    # state that a gradient codec keeps for a page, such as error feedback
    "memory": SlotKind("memory", "codec memory"),
    "stats": SlotKind("stats", "state"),  # running statistics of a unit, as in batch norm
    "grad": SlotKind("grad", "gradients", in_slab=True),
    "sum": SlotKind("grad", "gradients", in_slab=True),
    "part": SlotKind("part", "gradients"),
    "total": SlotKind("part", "gradients"),
    "tied": SlotKind("part", "gradients"),
    "act": SlotKind("act", "activations"),
    "dact": SlotKind("dact", "activations"),
    "saved": SlotKind("saved", "activations"),
    "held": SlotKind("held", "activations"),
    "kept": SlotKind("kept", "activations"),
    "seed": SlotKind("seed", "activations"),
    # scalars, such as the mean loss
    "loss": SlotKind("loss", "control"),
    "weight": SlotKind("weight", "control"),
    "mean": SlotKind("mean", "control"),
    "scale": SlotKind("scale", "control"),
    "agreed": SlotKind("agreed", "control"),
    "wire": SlotKind("wire", "scratch", in_slab=True),
    "carry": SlotKind("carry", "scratch", in_slab=True, raw=True),
    "trade": SlotKind("trade", "scratch", in_slab=True),
    "join": SlotKind("join", "scratch", in_slab=True, raw=True),
    "tie": SlotKind("tie", "scratch", in_slab=True),
}


def get_buffer_slot(slot: Slot) -> Slot:
    """Return the slot (named buffer) that owns the memory of `slot`. For example, the reduced gradient sum3 uses the
    memory of the gradient buffer grad3."""
    kind = SLOTS[slot.kind].buffer
    return slot if kind == slot.kind else Slot(kind, slot.at, slot.mb)


@dataclass(frozen=True)
class VerbTransfer:
    """A transfer that an operation makes on a mesh axis.

    Attributes
    ----------
    axis : mesh axis; "peers" stands for the ranks that hold or compute parts of the same parameter, along any axes
    call : name of the collective, or "send" or "recv"
    amount : what is sent: the `full` page (flat parameter buffer) or a `shard` of it, a few `numbers`, the value of an
        `edge`, or `parts` of matrices that ranks combine. Extensions add amounts (see `TrafficSizes.amounts`)
    format : type of the data, which determines the bytes per element: "param", "grad", "tie" (gradients of tied
        parameters), "value" (a value sent between stages), "update" (data of the optimizer) or "control" (a few
        numbers, not counted)
    """

    axis: str
    call: str
    amount: str
    format: str


@dataclass(frozen=True)
class ScratchBuffer:
    """Temporary memory of an operation on a page (flat parameter buffer).

    Attributes
    ----------
    kind : a key of `SLOTS`
    until : a slot (named buffer); the memory stays in use until the first later action that takes or reads this slot.
        If "", it is in use only during the action
    """

    kind: str
    until: str = ""


@dataclass(frozen=True)
class Verb:
    """An operation of programs, as a row of the table `VERBS`. It specifies the slots (named buffers) that the
    operation uses, and the data that it transfers.

    Parameters
    ----------
    takes : slots that are read and emptied
    reads : slots that are read and stay filled
    adds : slots that are created or added to
    gives : slots that are empty before the operation and that it fills
    lane : resource that the operation occupies, which runs one operation at a time: "compute", "host", or the mesh
        axis of its transfers
    moves : transfers that the operation starts
    within : transfers that the operation both starts and waits for
    about : what `Action.unit` refers to: "unit", "page", "edge", "record", or "" for nothing
    scratch : temporary memory
    """

    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    lane: str = "compute"
    moves: tuple[VerbTransfer, ...] = ()
    within: tuple[VerbTransfer, ...] = ()
    about: str = "unit"
    scratch: tuple[ScratchBuffer, ...] = ()

    @cached_property
    def is_synchronizing(self) -> bool:
        """True if the operation waits until the other pipeline ranks run it as well. These operations send only a few
        bytes, and simulations assume that sending them takes no time."""
        return self.lane in ("world", "peers")

    @cached_property
    def is_send(self) -> bool:
        return any(move.call == "send" for move in self.moves)

    @cached_property
    def is_receive(self) -> bool:
        return any(move.call == "recv" for move in self.moves)


NUMBERS = VerbTransfer("world", "all_gather", "numbers", "control")

# fmt: off
VERBS: dict[str, Verb] = {
    # load a batch, and compute losses and their mean
    "LOAD": Verb(gives=("act:inputs",), lane="host", about=""),
    "LOSS": Verb(takes=("act:outputs",), adds=("dact:made", "weight"), gives=("loss:mb",), about=""),
    "SCORE": Verb(takes=("act:outputs",), adds=("weight",), gives=("loss:mb",), about=""),
    "SEED": Verb(takes=("seed:mb",), adds=("dact:made", "weight"), lane="host", about=""),
    "MEAN": Verb(takes=("loss:all",), reads=("weight:scored",), gives=("mean",), about="",
                 lane="world", moves=(NUMBERS,)),
    # messages between pipeline stages
    "SEND": Verb(takes=("edge:last",), reads=("edge:kept",), about="edge",
                 lane="pipe", moves=(VerbTransfer("pipe", "send", "edge", "value"),)),
    "RECV": Verb(gives=("edge:arrives",), about="edge", lane="pipe",
                 moves=(VerbTransfer("pipe", "recv", "edge", "value"),)),
    # all-gather parameters, and free them again
    "GATHER": Verb(reads=("shard:page",), gives=("full:page",), about="page",
                   scratch=(ScratchBuffer("wire", "full:page"),),
                   lane="shard", moves=(VerbTransfer("shard", "all_gather", "full", "param"),)),
    "FREE": Verb(takes=("full:page",), lane="host", about="page"),
    # run the forward or backward pass of a unit (group of layers)
    "F": Verb(takes=("act:last",), reads=("full:pages", "act:kept"), adds=("stats:moving",),
              gives=("act:out", "saved:back")),
    "E": Verb(takes=("act:last",), reads=("full:pages", "act:kept", "stats:moving"), gives=("act:out",)),
    "C": Verb(takes=("act:last",), reads=("full:pages", "act:kept"), adds=("stats:moving",),
              gives=("act:out", "held:unit")),
    "R": Verb(takes=("held:unit",), reads=("full:pages", "stats:moving"), gives=("saved:unit",)),
    "B": Verb(takes=("dact:found", "saved:unit"), reads=("full:pages", "stats:moving"),
              adds=("grad:trained", "dact:in")),
    "I": Verb(takes=("dact:found", "saved:unit"), reads=("full:pages", "stats:moving"), adds=("dact:in",),
              gives=("kept:unit",)),
    "W": Verb(takes=("kept:unit",), adds=("grad:trained",)),
    # reduce gradients over ranks; REDUCE may add its result directly to the slot "part"
    "REDUCE": Verb(takes=("grad:page",), adds=("part:page", "memory:coded"), gives=("sum:page",), about="page",
                   scratch=(ScratchBuffer("carry", "sum:page"), ScratchBuffer("trade", "part:page")),
                   lane="shard", moves=(VerbTransfer("shard", "reduce_scatter", "full", "grad"),)),
    "SETTLE": Verb(takes=("sum:page",), adds=("part:page",), lane="host", about="page"),
    "JOIN": Verb(takes=("part:page",), gives=("total:page",), adds=("memory:coded",), about="page",
                 scratch=(ScratchBuffer("join"),), lane="replica",
                 moves=(VerbTransfer("replica", "all_reduce", "shard", "grad"),)),
    "TIE": Verb(takes=("whole:twins",), gives=("tied:twins",), about="page", scratch=(ScratchBuffer("tie"),),
                lane="peers", moves=(VerbTransfer("peers", "all_gather", "shard", "tie"),)),
    # scale gradients, and update parameters
    "SCALE": Verb(takes=("weight:scored",), reads=("mean", "final:all"), gives=("scale",), lane="host", about=""),
    "NORM": Verb(takes=("loss:all", "weight:scored"), reads=("final:all",), gives=("mean", "scale"), about="",
                 lane="world", moves=(NUMBERS,)),
    "COMMIT": Verb(reads=("mean", "scale"), gives=("agreed",), lane="world", moves=(NUMBERS,), about=""),
    "UPDATE": Verb(takes=("final:page",), reads=("scale", "shard:page", "slots:page"),
                   adds=("shard:page", "slots:page"), about="page",
                   within=(VerbTransfer("shard", "all_to_all", "parts", "update"),)),
}
# fmt: on
"""Maps names to verbs. Extensions can add verbs."""


@cache
def get_partner_verb(op: str) -> str:
    """Return the operation at the other end of a message: the receive for a send, the send for a receive."""
    sends = VERBS[op].is_send
    return next(other for other, verb in VERBS.items() if (verb.is_receive if sends else verb.is_send))
