"""What happens when: a training step as a flat list of actions. Standard library only."""

from fsdpx.program.action import Action, parse
from fsdpx.program.check import check, check_pipe
from fsdpx.program.compiler import KINDS, Program, Request, compile
from fsdpx.program.count import Calls, Lifetime, Sizes, Traffic, lifetimes, peak, traffic
from fsdpx.program.passes import one_by_one
from fsdpx.program.pipeline import pipeline
from fsdpx.program.stage import Edge, Slots, Stage, StageUnit, expand
from fsdpx.program.verbs import SLOTS, VERBS, Move, Slot, Verb, buffer_of, kind_of

__all__ = [
    "KINDS", "SLOTS", "VERBS", "Action", "Calls", "Edge", "Lifetime", "Move", "Program", "Request", "Sizes", "Slot", "Slots",
    "Stage", "StageUnit", "Traffic", "Verb", "buffer_of", "check", "check_pipe", "compile", "expand", "kind_of", "lifetimes", "one_by_one", "parse",
    "peak", "pipeline", "traffic",
]  # fmt: skip
