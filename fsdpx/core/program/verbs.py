"""The table of verbs, the slots that they read and write, and actions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

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
    "format_marked_action",
    "get_buffer_slot",
    "get_partner_verb",
    "parse_actions",
]  # fmt: skip

_TEXT = re.compile(r"([A-Z]+)(\d+)?(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a program. Prints as "F3.0".

    Parameters
    ----------
    op : a verb of `VERBS`
    unit : number of the unit on which the action works, of the page for verbs that transfer pages, or of the edge for
        messages; None for other verbs
    mb : number of the microbatch; None for verbs that do not work on a microbatch
    """

    op: str
    unit: int | None = None
    mb: int | None = None

    def __str__(self) -> str:
        unit = "" if self.unit is None else str(self.unit)
        return self.op + unit + ("" if self.mb is None else f".{self.mb}")


def parse_actions(text: str) -> tuple[Action, ...]:
    """Parse actions separated by white space, such as "F3.0 B3.0". This is the inverse of `str`.

    Parameters
    ----------
    text : verbs in capitals, each followed by its unit number and ".microbatch" if it has them

    Returns
    -------
    tuple of Action : in the order of the text

    Raises
    ------
    ProgramError : a word is not an action
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


def format_marked_action(actions: Sequence[Action], index: int) -> str:
    """Return the text of an action, of the six actions before it and of the six after it, with an arrow below the
    action."""
    start = max(index - 6, 0)
    words = [str(a) for a in actions[start : index + 7]]
    lead = "... " if start else ""
    arrow = len(lead) + sum(len(w) + 1 for w in words[: index - start])
    return f"  {lead}{' '.join(words)}\n  {' ' * arrow}^"


class Slot(NamedTuple):
    """A named place for one value. kind: a key of `SLOTS`. at: number of the page, unit or value. mb: microbatch.
    Prints as "full3" or "act5.0"."""

    kind: str
    at: int | None = None
    mb: int | None = None

    def __str__(self) -> str:
        index_text = "" if self.at is None else str(self.at)
        return self.kind + index_text + ("" if self.mb is None else f".{self.mb}")


@dataclass(frozen=True)
class SlotKind:
    """Properties of a kind of slot. Kinds with the same `buffer` share memory and are never alive together.

    memory: the heading under which reports count it. lent: whether it is allocated in the slab that is planned for each
    program, unless it is alive before or after the program. raw: whether its values are untyped bytes.
    """

    buffer: str
    memory: str
    lent: bool = False
    raw: bool = False


SLOTS: dict[str, SlotKind] = {
    # parameters and other state that outlives a step
    "shard": SlotKind("shard", "parameters", lent=True),
    "full": SlotKind("full", "parameters", lent=True),
    "slots": SlotKind("slots", "optimizer", lent=True),  # optimizer state of a page: a dict name -> array
    "memory": SlotKind("memory", "codec memory"),  # arrays of a codec per page, e.g. error feedback
    "stats": SlotKind("stats", "state"),  # running statistics of a unit
    # gradients
    "grad": SlotKind("grad", "gradients", lent=True),
    "sum": SlotKind("grad", "gradients", lent=True),
    "part": SlotKind("part", "gradients"),
    "total": SlotKind("part", "gradients"),
    "tied": SlotKind("part", "gradients"),
    # activations
    "act": SlotKind("act", "activations"),
    "dact": SlotKind("dact", "activations"),
    "saved": SlotKind("saved", "activations"),
    "held": SlotKind("held", "activations"),
    "kept": SlotKind("kept", "activations"),
    "seed": SlotKind("seed", "activations"),
    # numbers
    "loss": SlotKind("loss", "control"),
    "weight": SlotKind("weight", "control"),
    "mean": SlotKind("mean", "control"),
    "scale": SlotKind("scale", "control"),
    "agreed": SlotKind("agreed", "control"),
    # scratch
    "wire": SlotKind("wire", "scratch", lent=True),
    "carry": SlotKind("carry", "scratch", lent=True, raw=True),
    "trade": SlotKind("trade", "scratch", lent=True),
    "join": SlotKind("join", "scratch", lent=True, raw=True),
    "tie": SlotKind("tie", "scratch", lent=True),
}


def get_buffer_slot(slot: Slot) -> Slot:
    """Return the slot that stands for the memory of `slot`, such as grad3 for sum3."""
    kind = SLOTS[slot.kind].buffer
    return slot if kind == slot.kind else Slot(kind, slot.at, slot.mb)


@dataclass(frozen=True)
class VerbTransfer:
    """A transfer of a verb on a mesh axis. amount: `full` or `shard` of a page, a few `numbers`, the value of an
    `edge`, or `parts` of matrices that ranks combine. Extensions have other amounts, see `TrafficSizes.amounts`.

    axis: "peers" stands for the ranks that hold or compute parts of the same parameter, along any axes. format:
    determines the bytes per element: "param", "grad", "tie" (gradients summed by TIE), "value" (the value of an edge),
    "update" (data of the optimizer) or "control" (a few numbers, not counted).
    """

    axis: str
    call: str
    amount: str
    format: str


@dataclass(frozen=True)
class ScratchBuffer:
    """Temporary memory of a verb for the action's page. kind: a key of `SLOTS`.

    The memory is in use from the action to the first later action that takes or reads the slot `until`. until="": only
    during the action.
    """

    kind: str
    until: str = ""


@dataclass(frozen=True)
class Verb:
    """A row of the table of verbs: how an action uses its slots, and what it transfers.

    Parameters
    ----------
    takes : slots that are read and emptied
    reads : slots that are read and stay filled
    adds : slots that are created or added into
    gives : slots that must be empty and are filled
    lane : what the action occupies, one action at a time: "compute", "host", or the axis of its transfers
    moves : transfers that the action starts
    within : transfers that the action both starts and waits for
    about : what `Action.unit` refers to: "unit", "page", "edge", "record" or nothing
    scratch : temporary memory
    """

    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    lane: str = "compute"
    moves: tuple[VerbTransfer, ...] = ()
    within: tuple[VerbTransfer, ...] = ()  # transfers that the action both starts and waits for
    about: str = "unit"  # what Action.unit numbers: "unit", "page", "edge", "record" or nothing
    scratch: tuple[ScratchBuffer, ...] = ()

    @cached_property
    def is_synchronizing(self) -> bool:
        """True if the verb waits until the other pipeline ranks run it as well. Such a verb sends only a few bytes, to
        which simulations assign no time."""
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
    # data in, data out
    "LOAD": Verb(gives=("act:inputs",), lane="host", about=""),
    "LOSS": Verb(takes=("act:outputs",), adds=("dact:made", "weight"), gives=("loss:mb",), about=""),
    "SCORE": Verb(takes=("act:outputs",), adds=("weight",), gives=("loss:mb",), about=""),
    "SEED": Verb(takes=("seed:mb",), adds=("dact:made", "weight"), lane="host", about=""),
    "MEAN": Verb(takes=("loss:all",), reads=("weight:scored",), gives=("mean",), about="",
                 lane="world", moves=(NUMBERS,)),
    # from stage to stage
    "SEND": Verb(takes=("edge:last",), reads=("edge:kept",), about="edge",
                 lane="pipe", moves=(VerbTransfer("pipe", "send", "edge", "value"),)),
    "RECV": Verb(gives=("edge:arrives",), about="edge", lane="pipe",
                 moves=(VerbTransfer("pipe", "recv", "edge", "value"),)),
    # parameters
    "GATHER": Verb(reads=("shard:page",), gives=("full:page",), about="page",
                   scratch=(ScratchBuffer("wire", "full:page"),),
                   lane="shard", moves=(VerbTransfer("shard", "all_gather", "full", "param"),)),
    "FREE": Verb(takes=("full:page",), lane="host", about="page"),
    # compute
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
    # gradients; the sum of a reduce may be written directly into the part
    "REDUCE": Verb(takes=("grad:page",), adds=("part:page", "memory:coded"), gives=("sum:page",), about="page",
                   scratch=(ScratchBuffer("carry", "sum:page"), ScratchBuffer("trade", "part:page")),
                   lane="shard", moves=(VerbTransfer("shard", "reduce_scatter", "full", "grad"),)),
    "SETTLE": Verb(takes=("sum:page",), adds=("part:page",), lane="host", about="page"),
    "JOIN": Verb(takes=("part:page",), gives=("total:page",), adds=("memory:coded",), about="page",
                 scratch=(ScratchBuffer("join"),), lane="replica",
                 moves=(VerbTransfer("replica", "all_reduce", "shard", "grad"),)),
    "TIE": Verb(takes=("whole:twins",), gives=("tied:twins",), about="page", scratch=(ScratchBuffer("tie"),),
                lane="peers", moves=(VerbTransfer("peers", "all_gather", "shard", "tie"),)),
    # update
    "SCALE": Verb(takes=("weight:scored",), reads=("mean", "final:all"), gives=("scale",), lane="host", about=""),
    "NORM": Verb(takes=("loss:all", "weight:scored"), reads=("final:all",), gives=("mean", "scale"), about="",
                 lane="world", moves=(NUMBERS,)),
    "COMMIT": Verb(reads=("mean", "scale"), gives=("agreed",), lane="world", moves=(NUMBERS,), about=""),
    "UPDATE": Verb(takes=("final:page",), reads=("scale", "shard:page", "slots:page"),
                   adds=("shard:page", "slots:page"), about="page",
                   within=(VerbTransfer("shard", "all_to_all", "parts", "update"),)),
}
# fmt: on
"""Verbs by name. Extensions add their own."""


@cache
def get_partner_verb(op: str) -> str:
    """Return the verb at the other end of a message: the receive for a send, the send for a receive."""
    sends = VERBS[op].is_send
    return next(other for other, verb in VERBS.items() if (verb.is_receive if sends else verb.is_send))
