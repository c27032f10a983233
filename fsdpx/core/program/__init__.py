"""What happens when: a training step as a flat list of actions. Standard library only."""

from fsdpx.core.program.verifier import check, check_pipe, prove, validate
from fsdpx.core.program.compiler import KINDS, PASSES, Program, ProgramKind, Request, Sync, compile
from fsdpx.core.program.traffic import Lifetime, Moves, Sizes, Traffic, lifetimes, traffic
from fsdpx.core.program.simulator import (
    ActionTimes,
    Costs,
    Event,
    PipelineSchedule,
    bubble,
    idle,
    simulate,
    simulate_programs,
)
from fsdpx.core.program.passes import one_by_one
from fsdpx.core.program.pipeline import Edge, Slots, Stage, StageUnit, constants, expand, pipeline
from fsdpx.core.program.step_choices import StepChoices
from fsdpx.core.program.schedules import SCHEDULES, ScheduleFunction, in_flight, placed, schedule
from fsdpx.core.program.verbs import SLOTS, VERBS, Action, Move, Scratch, Slot, SlotKind, Verb, buffer_of, parse

__all__ = [
    "KINDS", "PASSES", "SCHEDULES", "SLOTS", "VERBS", "Action", "ActionTimes", "Costs", "Edge", "Event", "Lifetime",
    "Move", "Moves", "PipelineSchedule", "Program", "ProgramKind", "Request", "ScheduleFunction", "Scratch",
    "Sizes", "Slot", "SlotKind", "Slots", "Stage", "StageUnit", "StepChoices", "Sync", "Traffic", "Verb",
    "bubble", "buffer_of", "check", "check_pipe", "compile", "constants", "expand", "idle",
    "in_flight", "lifetimes", "one_by_one", "parse", "pipeline", "placed", "prove", "schedule", "simulate",
    "simulate_programs", "traffic", "validate",
]  # fmt: skip
