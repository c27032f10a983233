"""The table of verbs: which slots each verb takes, reads, adds into and gives, where it runs and what it moves.

Running, checking, counting and printing all read this table; none of them knows a verb by heart.

In the table a slot is written as a kind and what it ranges over:

    "full:page"      the slot of the action's own page, e.g. full3;  "memory:coded"  likewise, if its codec keeps memory
    "full:pages"     one slot for each page that the action's unit uses, tied ones included;  "grad:trained"  of those
                     that are trained;  "total:twins"  of the pages of this rank that hold one parameter
    "act:last"       activations that this unit is the last to read;  "act:kept"  those read again later
    "act:inputs"     the model's inputs;     "act:outputs"  the model's outputs;     "act:out"  the unit's own outputs
    "dact:found" "dact:in" "dact:made"  gradients of the unit's outputs, its inputs, and the model's outputs, each
                     without constants: values whose gradient is not needed
    "stats:moving"   of the action's unit, if it has running statistics;  "kept:unit"  per unit and microbatch
    "saved:back"     likewise, if the unit has a backward
    "loss:mb" "seed:mb"  per microbatch;  "loss:all"  of all microbatches
    "grad:every" "pushed:every"  of all trained pages
    "final:page" "final:all"  gradients as they are updated with: "total", or "tied" where TIE sums it with other ranks'
    "edge:last" "edge:kept" "edge:arrives"  what travels: an activation, or its gradient on the way back
    "record:here"    the slot whose value lies in a slower level between uses; "stored:here"  that it lies there as
                     it is here; "stored:once"  until it is fetched, "stored:always"  until it changes,
                     "stored:changed"  of the records of the action's own page
    "weight:scored"  where the loss is computed;  "mean" "scale" "share" "trained"  one for the whole step
"""

from dataclasses import dataclass
from functools import cached_property

__all__ = ["VERBS", "Move", "Scratch", "Verb", "partner"]


@dataclass(frozen=True)
class Move:
    """Along which mesh axis, which call, and how much: `full` or `shard` of a page, a few `numbers`, an `edge`, a
    `record`, or `parts` of matrices that ranks put together.

    Axis "peers": the ranks that hold or make parts of the same parameter, whichever axes they lie on; "disk": no
    ranks, but a slower level of this one. format: whose bytes an element has: those of "param", "grad", "tie"
    (gradients summed by TIE), "value" (what an edge carries), "record" (its arrays), "update" (what the
    optimiser says) or "control" (a few numbers, not counted)."""

    axis: str
    call: str
    amount: str
    format: str


@dataclass(frozen=True)
class Scratch:
    """Short-lived memory of a verb, one of the kinds of SLOTS, for the action's page.

    It lives from the action to the first later one that takes or reads the slot `until`; "": for the action only."""

    kind: str
    until: str = ""


@dataclass(frozen=True)
class Verb:
    """takes: read and emptied. reads: read and left. adds: created or added into. gives: must be empty, is filled."""

    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    lane: str = "compute"
    moves: tuple[Move, ...] = ()
    within: tuple[Move, ...] = ()  # what it moves and waits for itself
    about: str = "unit"  # what Action.unit counts: "unit", "page", "edge", "record" or nothing
    scratch: tuple[Scratch, ...] = ()

    @cached_property
    def meets(self) -> bool:
        """Whether it waits for other ranks of the pipe that do the same. It moves a few bytes; no time is counted."""
        return self.lane in ("world", "peers")

    @cached_property
    def sends(self) -> bool:
        return any(move.call == "send" for move in self.moves)

    @cached_property
    def receives(self) -> bool:
        return any(move.call == "recv" for move in self.moves)


NUMBERS = Move("world", "all_gather", "numbers", "control")

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
                 lane="pipe", moves=(Move("pipe", "send", "edge", "value"),)),
    "RECV": Verb(gives=("edge:arrives",), about="edge", lane="pipe", moves=(Move("pipe", "recv", "edge", "value"),)),
    # parameters
    "GATHER": Verb(reads=("shard:page",), gives=("full:page",), about="page", scratch=(Scratch("wire", "full:page"),),
                   lane="shard", moves=(Move("shard", "all_gather", "full", "param"),)),
    "FREE": Verb(takes=("full:page",), lane="host", about="page"),
    # a slower level
    "FETCH": Verb(takes=("stored:once",), reads=("stored:always",), gives=("record:here",), about="record", lane="disk",
                  moves=(Move("disk", "read", "record", "record"),)),
    "STORE": Verb(takes=("record:here",), gives=("record:here", "stored:here"), about="record", lane="disk",
                  moves=(Move("disk", "write", "record", "record"),)),
    "EVICT": Verb(takes=("record:here",), lane="host", about="record"),
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
    # gradients; the sum of a reduce may go straight to where the part is kept
    "REDUCE": Verb(takes=("grad:page",), adds=("part:page", "memory:coded"), gives=("sum:page",), about="page",
                   scratch=(Scratch("carry", "sum:page"), Scratch("trade", "part:page")),
                   lane="shard", moves=(Move("shard", "reduce_scatter", "full", "grad"),)),
    "SETTLE": Verb(takes=("sum:page",), adds=("part:page",), lane="host", about="page"),
    "JOIN": Verb(takes=("part:page",), gives=("total:page",), adds=("memory:coded",), about="page",
                 scratch=(Scratch("join"),), lane="replica", moves=(Move("replica", "all_reduce", "shard", "grad"),)),
    "OWN": Verb(takes=("part:page",), gives=("total:page",), lane="host", about="page"),
    "TIE": Verb(takes=("total:twins",), gives=("tied:twins",), about="page", scratch=(Scratch("tie"),),
                lane="peers", moves=(Move("peers", "all_gather", "shard", "tie"),)),
    # update
    "SCALE": Verb(takes=("weight:scored",), reads=("mean", "final:all"), gives=("scale",), lane="host", about=""),
    "NORM": Verb(takes=("loss:all", "weight:scored"), reads=("final:all",), gives=("mean", "scale"), about="",
                 lane="world", moves=(NUMBERS,)),
    "COMMIT": Verb(reads=("mean", "scale"), gives=("agreed",), lane="world", moves=(NUMBERS,), about=""),
    "UPDATE": Verb(takes=("final:page", "stored:changed"), reads=("scale", "shard:page", "slots:page"),
                   adds=("shard:page", "slots:page"), about="page",
                   within=(Move("shard", "all_to_all", "parts", "update"),)),
    # replicas that train by themselves meet
    "SHARE": Verb(reads=("mean", "trained"), gives=("share",), lane="world", moves=(NUMBERS,), about=""),
    "DELTA": Verb(reads=("shard:page", "outer:page", "share"), adds=("memory:coded",), gives=("delta:page",),
                  about="page", scratch=(Scratch("parcel", "delta:page"),),
                  lane="replica", moves=(Move("replica", "reduce_scatter", "shard", "grad"),)),
    "OUTER": Verb(takes=("delta:page",), adds=("outer:page", "velocity:page"), gives=("next:page",), about="page",
                  lane="replica", moves=(Move("replica", "all_gather", "shard", "grad"),)),
    "ADOPT": Verb(takes=("next:page",), adds=("shard:page",), about="page"),
    # ranks apart, each at its own speed: nothing of this waits for a call of another rank
    "PULL": Verb(gives=("full:page",), lane="window", about="page"),
    "ALONE": Verb(takes=("loss:all", "weight:scored"), reads=("grad:every",), gives=("mean", "scale"), about=""),
    "PUSH": Verb(takes=("grad:page",), reads=("mean", "scale"), gives=("pushed:page",), lane="window", about="page"),
    "TICK": Verb(takes=("pushed:every",), lane="window", about=""),
    "MIX": Verb(takes=("pushed:page",), lane="window", about="page"),
}
# fmt: on


def partner(op: str) -> str:
    """The verb at the other end of a message: the receive of a send, and the send of a receive."""
    sends = VERBS[op].sends
    return next(other for other, verb in VERBS.items() if (verb.receives if sends else verb.sends))
