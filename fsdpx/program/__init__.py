"""What happens when: a training step as a flat list of actions. Standard library only."""

from fsdpx.program.check import check, check_pipe, prove, validate
from fsdpx.program.compiler import KINDS, Program, ProgramKind, Request, Sync, compile
from fsdpx.program.count import Lifetime, Moves, Sizes, Traffic, lifetimes, traffic
from fsdpx.program.machine import (
    ActionTimes,
    Costs,
    Event,
    PipelineSchedule,
    arrow,
    bubble,
    grid,
    idle,
    simulate,
    simulate_programs,
)
from fsdpx.program.passes import one_by_one
from fsdpx.program.pipeline import Edge, Slots, Stage, StageUnit, constants, expand, pipeline
from fsdpx.program.schedules import SCHEDULES, ScheduleFunction, in_flight, placed, schedule
from fsdpx.program.verbs import SLOTS, VERBS, Action, Move, Scratch, Slot, SlotKind, Verb, buffer_of, parse

__all__ = [
    "KINDS", "SCHEDULES", "SLOTS", "VERBS", "Action", "ActionTimes", "Costs", "Edge", "Event", "Lifetime", "Move",
    "Moves", "PipelineSchedule", "Program", "ProgramKind", "Request", "ScheduleFunction", "Scratch", "Sizes",
    "Slot", "SlotKind", "Slots", "Stage", "StageUnit", "Sync", "Traffic", "Verb", "arrow", "bubble", "buffer_of",
    "check", "check_pipe", "compile", "constants", "expand", "grid", "idle", "in_flight", "lifetimes",
    "one_by_one", "parse", "pipeline", "placed", "prove", "schedule", "simulate", "simulate_programs",
    "traffic", "validate",
]  # fmt: skip
