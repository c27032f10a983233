"""Predicts how long a step takes on a machine, given the time of each action. To do so, it simulates how the actions of
all pipeline ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

from fsdpx.core.program import VERBS, Action, ActionEvent
from fsdpx.core.program.simulator import simulate_programs_by_rank
from fsdpx.core.program.verbs import get_partner_verb
from fsdpx.plan.time_model import StepTimes
from fsdpx.plan.world_step import RankDryRun, find_representative_action

__all__ = ["ActionPrice", "StepClock"]


class ActionPrice(NamedTuple):
    """Time that one action takes.

    Attributes
    ----------
    own : seconds of computing
    moving : seconds of communication, by mesh axis
    """

    own: float
    moving: Mapping[str, float]

    @property
    def total_seconds(self) -> float:
        """Seconds of computing and communication together."""
        return self.own + sum(self.moving.values())


class StepClock:
    """Simulates the step on all pipeline ranks. `runs` contains one dry run for each pipeline rank, and `timing` is
    the time model of the machine."""

    def __init__(self, runs: list[RankDryRun], timing: StepTimes) -> None:
        self.runs, self._timing = runs, timing
        self._few = min(min(run.programs) for run in runs)
        self._stage = next(iter(runs[0].programs.values())).stage
        self._known = cache(self._compute_action_price)

    def predict_action_seconds(self, rank: int, action: Action) -> ActionPrice:
        """Return the time that an action takes on a pipeline rank. The action may belong to a microbatch that was not
        part of the dry run."""
        return self._known(rank, find_representative_action(action, self._few))

    def _compute_action_price(self, rank: int, action: Action) -> ActionPrice:
        """Return the time of an action that was part of the dry run. A receive takes no time, because the whole time of
        the transfer is counted for the send."""
        cost, verb = self.runs[rank].costs[action], VERBS[action.op]
        if verb.is_receive:
            return ActionPrice(0.0, {})
        if verb.is_send:
            edge = self._stage.edge_of(action)
            sender, receiver = (self.runs[at].found.rank for at in (edge.sender, edge.receiver))
            nbytes = sum(nbytes for _, _, _, nbytes in cost.calls)
            return ActionPrice(0.0, {"pipe": self._timing.compute_message_seconds(sender, receiver, nbytes)})
        return ActionPrice(*self._timing.predict_action_seconds(cost))

    def simulate_step_timeline(self, microbatches: int) -> tuple[float, list[list[ActionEvent]]]:
        """Simulate the step with the given number of microbatches. Return the time of the step in seconds, and the
        start and end of each action on each pipeline rank."""
        rows = simulate_programs_by_rank(
            [one.get_program(microbatches) for one in self.runs],
            lambda rank, action: self.predict_action_seconds(rank, action).total_seconds,
        )
        return max(event.end for row in rows for event in row), rows

    def average_seconds_by_cause_over_ranks(
        self, rows: list[list[ActionEvent]], step_seconds: float
    ) -> dict[str, float]:
        """Return the step time in seconds by cause ("compute", "bubble", mesh axes, ...), averaged over the pipeline
        ranks. `rows` contains the simulated events of each rank."""
        ways = [
            (partial(self.predict_action_seconds, rank), partial(self._get_transfer_seconds, rank))
            for rank in range(len(rows))
        ]
        shares = [_split_seconds_by_cause(row, step_seconds, *both) for row, both in zip(rows, ways, strict=True)]
        names = dict.fromkeys(name for share in shares for name in share)
        return {name: sum(share.get(name, 0.0) for share in shares) / len(shares) for name in names}

    def _get_transfer_seconds(self, rank: int, action: Action) -> Any:
        """Return the time in seconds to transfer an action's data, excluding the wait for the sender. If the action
        takes longer, the caller attributes the rest to waiting. For an action that neither receives nor synchronizes,
        return inf, which means no limit."""
        verb = VERBS[action.op]
        if not verb.is_receive:
            return self.predict_action_seconds(rank, action).total_seconds if verb.is_synchronizing else inf
        sent = Action(get_partner_verb(action.op), action.unit, action.mb)
        return self.predict_action_seconds(self._stage.edge_of(sent).sender, sent).total_seconds


def _split_seconds_by_cause(
    row: list[ActionEvent],
    step_seconds: float,
    price: Callable[[Action], ActionPrice],
    transfer_seconds: Callable[[Action], float],
) -> dict[str, float]:
    """Split the step time of one rank by cause (what the rank did or waited for), and return the seconds for each
    cause. `row` contains the simulated events of this rank, `price` is the function that predicts the time of an
    action, and `transfer_seconds` is `StepClock._get_transfer_seconds` of this rank."""
    parts = {"compute": 0.0, "optimizer": 0.0}

    def add_seconds(name: str, seconds: float) -> None:
        parts[name] = parts.get(name, 0.0) + seconds

    free, moving = 0.0, dict[float, Action]()
    for event in row:
        action, verb = event.action, VERBS[event.action.op]
        if verb.moves:
            moving[event.end] = action
            continue
        gap, cause = event.start - free, moving.get(event.start)
        if gap > 0 and cause is not None:
            travel = min(transfer_seconds(cause), gap)
            add_seconds(VERBS[cause.op].moves[0].axis, travel)
            gap -= travel
        add_seconds("bubble", max(gap, 0.0))
        own, moved = price(action)
        add_seconds("optimizer" if action.op == "UPDATE" else "compute", own)
        for axis, seconds in moved.items():
            add_seconds(axis, seconds)
        free = event.end
    add_seconds("bubble", step_seconds - free)
    return parts
