"""Programs, which describe a training step as a flat list of actions, such as the forward pass of a layer or an
all-gather of parameters. This package uses only the standard library."""

from fsdpx.core.program.verifier import check, require_pipeline_programs_finish, compile_and_check_pipe, validate
from fsdpx.core.program.compiler import PROGRAM_KINDS, PASSES, Program, ProgramKind, ProgramRequest, SyncRules, compile
from fsdpx.core.program.traffic import SlotLifetime, Transfers, TrafficSizes, Traffic, find_lifetimes, count_traffic
from fsdpx.core.program.simulator import (
    ActionTimes,
    StageCosts,
    ActionEvent,
    PipelineSchedule,
    compute_bubble,
    compute_idle_share,
    simulate,
    simulate_programs,
)
from fsdpx.core.program.passes import order_sequentially
from fsdpx.core.program.pipeline import (
    Edge,
    ActionSlots,
    Stage,
    StageUnit,
    find_values_without_gradient,
    get_buffer_slots_of_action,
    make_stages,
)
from fsdpx.core.program.step_choices import StepChoices
from fsdpx.core.program.schedules import (
    SCHEDULES,
    ScheduleFunction,
    count_in_flight,
    make_placed_schedule,
    make_schedule,
)
from fsdpx.core.program.verbs import (
    SLOTS,
    VERBS,
    Action,
    VerbTransfer,
    ScratchBuffer,
    Slot,
    SlotKind,
    Verb,
    get_buffer_slot,
    parse_actions,
)

__all__ = [
    "PASSES",
    "PROGRAM_KINDS",
    "SCHEDULES",
    "SLOTS",
    "VERBS",
    "Action",
    "ActionEvent",
    "ActionSlots",
    "ActionTimes",
    "Edge",
    "PipelineSchedule",
    "Program",
    "ProgramKind",
    "ProgramRequest",
    "ScheduleFunction",
    "ScratchBuffer",
    "Slot",
    "SlotKind",
    "SlotLifetime",
    "Stage",
    "StageCosts",
    "StageUnit",
    "StepChoices",
    "SyncRules",
    "Traffic",
    "TrafficSizes",
    "Transfers",
    "Verb",
    "VerbTransfer",
    "check",
    "compile",
    "compile_and_check_pipe",
    "compute_bubble",
    "compute_idle_share",
    "count_in_flight",
    "count_traffic",
    "find_lifetimes",
    "find_values_without_gradient",
    "get_buffer_slot",
    "get_buffer_slots_of_action",
    "make_placed_schedule",
    "make_schedule",
    "make_stages",
    "order_sequentially",
    "parse_actions",
    "require_pipeline_programs_finish",
    "simulate",
    "simulate_programs",
    "validate",
]  # fmt: skip
