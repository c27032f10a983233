"""Slots: named places for one value each, and the table of what kinds of them there are."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["SLOTS", "Slot", "SlotKind", "buffer_of"]


class Slot(NamedTuple):
    """kind: one of SLOTS. at: number of the page, unit or value. mb: microbatch. Prints as "full3" or "act5.0"."""

    kind: str
    at: int | None = None
    mb: int | None = None

    def __str__(self) -> str:
        at = "" if self.at is None else str(self.at)
        return self.kind + at + ("" if self.mb is None else f".{self.mb}")


@dataclass(frozen=True)
class SlotKind:
    """Kinds with the same `buffer` lie in the same memory and are never alive together.

    memory: the heading under which a report counts it. lent: lies in the slab that is planned for each program,
    unless it is there before or after it."""

    buffer: str
    memory: str
    lent: bool = False


SLOTS: dict[str, SlotKind] = {
    # parameters, and what else is kept from step to step
    "shard": SlotKind("shard", "parameters", lent=True),
    "full": SlotKind("full", "parameters", lent=True),
    "slots": SlotKind("slots", "optimiser", lent=True),  # of a page: a dict name -> array
    "stored": SlotKind("stored", "control"),  # of a record: its values lie in a slower level
    "memory": SlotKind("memory", "codec memory"),  # what a codec keeps per page, e.g. error feedback
    "stats": SlotKind("stats", "state"),  # running statistics of a unit
    # gradients
    "grad": SlotKind("grad", "gradients", lent=True),
    "sum": SlotKind("grad", "gradients", lent=True),
    "part": SlotKind("part", "gradients"),
    "total": SlotKind("part", "gradients"),
    "tied": SlotKind("part", "gradients"),
    # replicas that train by themselves: where a round began, what outer steps keep, and what is under way between them
    "outer": SlotKind("outer", "outer parameters"),
    "velocity": SlotKind("velocity", "outer optimiser"),
    "delta": SlotKind("delta", "gradients"),
    "next": SlotKind("next", "outer parameters"),
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
    "trained": SlotKind("trained", "control"),  # by a replica, since each fragment was last sent
    "share": SlotKind("share", "control"),
    "agreed": SlotKind("agreed", "control"),
    "pushed": SlotKind("pushed", "control"),  # this rank's gradient of a page is where it is held
    # scratch
    "wire": SlotKind("wire", "scratch", lent=True),
    "carry": SlotKind("carry", "scratch", lent=True),
    "trade": SlotKind("trade", "scratch", lent=True),
    "join": SlotKind("join", "scratch", lent=True),
    "tie": SlotKind("tie", "scratch", lent=True),
    "parcel": SlotKind("parcel", "scratch", lent=True),
}


def buffer_of(slot: Slot) -> Slot:
    """The memory that a slot lies in: that of sum3 is grad3."""
    kind = SLOTS[slot.kind].buffer
    return slot if kind == slot.kind else Slot(kind, slot.at, slot.mb)
