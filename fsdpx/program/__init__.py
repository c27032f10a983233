"""What happens when: a training step as a flat list of actions. Standard library only."""

from fsdpx.program.action import Action, parse
from fsdpx.program.check import check
from fsdpx.program.compiler import KINDS, Program, Request, compile
from fsdpx.program.count import Calls, Lifetime, Sizes, Traffic, lifetimes, peak, traffic
from fsdpx.program.stage import Slots, Stage, StageUnit, expand
from fsdpx.program.verbs import SLOTS, VERBS, Move, Slot, Verb, buffer_of, kind_of

__all__ = [
    "KINDS", "SLOTS", "VERBS", "Action", "Calls", "Lifetime", "Move", "Program", "Request", "Sizes", "Slot", "Slots",
    "Stage", "StageUnit", "Traffic", "Verb", "buffer_of", "check", "compile", "expand", "kind_of", "lifetimes", "parse",
    "peak", "traffic",
]  # fmt: skip
