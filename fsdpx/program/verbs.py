"""The table of verbs: which slots each verb takes, reads, adds into and gives, where it runs and what it moves.

Running, checking, counting and printing all read this table; none of them knows a verb by heart.

A slot is a named place for one value. In the table a slot is written as a kind and what it ranges over:

    "full:page"      the slot of the action's own page, e.g. full3
    "full:pages"     one slot for each page that the action's unit uses, tied ones included
    "act:last"       activations that this unit is the last to read;  "act:kept"  those read again later
    "act:inputs"     the model's inputs;     "act:outputs"  the model's outputs;     "act:out"  the unit's own outputs
    "dact:out" "dact:in" "dact:outputs"      gradients of the same
    "saved:unit"     per unit and microbatch;  "loss:mb" "seed:mb"  per microbatch;  "loss:all"  of all microbatches
    "final:page" "final:all"  gradients as they are updated with: "total", or "tied" where TIE sums it with other ranks'
    "total:twins"    of the pages of this rank that hold one parameter
    "edge:last" "edge:kept" "edge:arrives"     what travels: an activation, or its gradient on the way back
    "weight:scored"  where the loss is computed;  "mean" "scale"  one for the whole step
"""

from dataclasses import dataclass

__all__ = ["SLOTS", "VERBS", "Move", "Slot", "Verb", "buffer_of", "kind_of"]


@dataclass(frozen=True)
class Move:
    """Along which mesh axis, which call, and how much: `full` or `shard` of a page, a `pair` of numbers, or an `edge`.

    Axis "peers": the ranks that hold or make parts of the same parameter, whichever axes they lie on.
    """

    axis: str
    call: str
    amount: str


@dataclass(frozen=True)
class Verb:
    """takes: read and emptied. reads: read and left. adds: created or added into. gives: must be empty, is filled."""

    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    lane: str = "compute"
    moves: tuple[Move, ...] = ()
    about: str = "unit"  # what Action.unit counts: "unit", "page", "edge" or nothing


@dataclass(frozen=True)
class Slot:
    """What a kind of slot holds. Kinds with the same `buffer` lie in the same memory and are never alive together."""

    buffer: str
    memory: str  # the kind under which a report counts it


VERBS: dict[str, Verb] = {
    # data in, data out
    "LOAD": Verb(gives=("act:inputs",), lane="host", about=""),
    "LOSS": Verb(takes=("act:outputs",), adds=("dact:outputs", "weight"), gives=("loss:mb",), about=""),
    "SCORE": Verb(takes=("act:outputs",), adds=("weight",), gives=("loss:mb",), about=""),
    "SEED": Verb(takes=("seed:mb",), adds=("dact:outputs", "weight"), lane="host", about=""),
    "MEAN": Verb(
        takes=("loss:all",), gives=("mean",), lane="world", moves=(Move("world", "all_gather", "pair"),), about=""
    ),
    # from stage to stage
    "SEND": Verb(
        takes=("edge:last",), reads=("edge:kept",), lane="pipe", moves=(Move("pipe", "send", "edge"),), about="edge"
    ),
    "RECV": Verb(gives=("edge:arrives",), lane="pipe", moves=(Move("pipe", "recv", "edge"),), about="edge"),
    # parameters
    "GATHER": Verb(
        reads=("shard:page",),
        gives=("full:page",),
        lane="shard",
        moves=(Move("shard", "all_gather", "full"),),
        about="page",
    ),
    "FREE": Verb(takes=("full:page",), lane="host", about="page"),
    # compute
    "F": Verb(takes=("act:last",), reads=("full:pages", "act:kept"), gives=("act:out", "saved:unit")),
    "E": Verb(takes=("act:last",), reads=("full:pages", "act:kept"), gives=("act:out",)),
    "C": Verb(takes=("act:last",), reads=("full:pages", "act:kept"), gives=("act:out", "held:unit")),
    "R": Verb(takes=("held:unit",), reads=("full:pages",), gives=("saved:unit",)),
    "B": Verb(takes=("dact:out", "saved:unit"), reads=("full:pages",), adds=("grad:pages", "dact:in")),
    "I": Verb(takes=("dact:out", "saved:unit"), reads=("full:pages",), adds=("dact:in",), gives=("kept:unit",)),
    "W": Verb(takes=("kept:unit",), adds=("grad:pages",)),
    # gradients
    "REDUCE": Verb(
        takes=("grad:page",),
        gives=("sum:page",),
        lane="shard",
        moves=(Move("shard", "reduce_scatter", "full"),),
        about="page",
    ),
    "SETTLE": Verb(takes=("sum:page",), adds=("part:page",), lane="host", about="page"),
    "JOIN": Verb(
        takes=("part:page",),
        gives=("total:page",),
        lane="replica",
        moves=(Move("replica", "all_reduce", "shard"),),
        about="page",
    ),
    "TIE": Verb(
        takes=("total:twins",),
        gives=("tied:twins",),
        lane="peers",
        moves=(Move("peers", "all_gather", "shard"),),
        about="page",
    ),
    # update
    "NORM": Verb(
        takes=("weight:scored",),
        reads=("final:all",),
        gives=("scale",),
        lane="world",
        moves=(Move("world", "all_gather", "pair"),),
        about="",
    ),
    "COMMIT": Verb(reads=("mean", "scale"), lane="world", about=""),
    "UPDATE": Verb(takes=("final:page",), reads=("scale",), adds=("shard:page",), about="page"),
}

SLOTS: dict[str, Slot] = {
    "shard": Slot("shard", "parameters"),
    "full": Slot("full", "parameters"),
    "grad": Slot("grad", "gradients"),
    "sum": Slot("grad", "gradients"),
    "part": Slot("part", "gradients"),
    "total": Slot("part", "gradients"),
    "tied": Slot("part", "gradients"),
    "act": Slot("act", "activations"),
    "dact": Slot("dact", "activations"),
    "saved": Slot("saved", "activations"),
    "held": Slot("held", "activations"),
    "kept": Slot("kept", "activations"),
    "seed": Slot("seed", "activations"),
    "loss": Slot("loss", "control"),
    "weight": Slot("weight", "control"),
    "mean": Slot("mean", "control"),
    "scale": Slot("scale", "control"),
}


def kind_of(slot: str) -> str:
    """The kind of a slot: "full3" and "act5.0" are a "full" and an "act"."""
    return slot.rstrip("0123456789.")


def buffer_of(slot: str) -> str:
    """The memory that a slot lies in: that of "sum3" is "grad3"."""
    kind = kind_of(slot)
    return SLOTS[kind].buffer + slot[len(kind) :]
