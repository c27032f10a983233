"""The pipe of a trainer: its schedule for any number of microbatches, and the proof that all ranks' programs fit."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpx.comm.backend import TAGS
from fsdpx.errors import ConfigError
from fsdpx.program import Action, Edge, PipelineSchedule, Request, Stage, check_pipe, compile, placed, schedule

__all__ = ["Pipe", "tag"]


@dataclass
class Pipe:
    """choice: name, function or file of the schedule. width: ranks of the pipe. dealt: the number of stages,
    or the rank of each, where that was given."""

    choice: str | Callable[..., Any]
    width: int = 1
    dealt: int | tuple[int, ...] | None = None
    _schedules: dict[int, PipelineSchedule] = field(default_factory=dict)
    _proved: set[Request] = field(default_factory=set)

    def schedule(self, microbatches: int) -> PipelineSchedule:
        """The actions of each rank in order; ConfigError if the schedule needs more microbatches."""
        if microbatches not in self._schedules:
            numbers = self.choice, self.width, microbatches
            made = schedule(*numbers) if self.dealt is None else placed(*numbers, self.dealt)
            self._schedules[microbatches] = made
        return self._schedules[microbatches]

    def home(self, microbatches: int) -> tuple[int, ...]:
        """The rank of each stage. One rank runs the model as one stage."""
        home = self.schedule(microbatches).home if self.width > 1 or isinstance(self.choice, str) else ()
        return home if self.width > 1 else (0,)

    def many(self, home: tuple[int, ...]) -> str:
        """Why there are so many stages, if there are more than ranks and the schedule chose their number."""
        if self.dealt is not None or len(home) <= self.width:
            return ""
        name = self.choice if isinstance(self.choice, str) else getattr(self.choice, "__name__", "of your own")
        return f" (schedule {name!r} puts {len(home) // self.width} on each of {self.width} ranks)"

    def words(self, microbatches: int) -> str:
        """The schedule as text, rank by rank."""
        return str(self.schedule(microbatches)) if self.width > 1 else ""

    def order(self, microbatches: int, rank: int) -> tuple[Action, ...] | None:
        """Forwards and backwards of one rank; None without a pipe: one microbatch after the other."""
        return None if self.width == 1 else self.schedule(microbatches).ranks[rank]

    def prove(self, request: Request, stages: tuple[Stage, ...]) -> None:
        """Compile what all ranks of the pipe run for a request like this one, and check that it finishes."""
        bare = replace(request, resident=frozenset(), grads=frozenset(), parts=frozenset(), weighed=False)
        if self.width == 1 or bare in self._proved:
            return
        self._proved.add(bare)
        programs = []
        for rank, stage in enumerate(stages):
            order = None if request.order is None else self.order(request.microbatches, rank)
            seen = replace(stage, trainable=request.stage.trainable, constant=request.stage.constant)
            programs.append(compile(replace(bare, stage=seen, order=order)))
        check_pipe(programs)
        last = request.microbatches - 1
        if any(tag(stages[0], e, last, request.microbatches) >= TAGS for e in stages[0].edges):
            raise ConfigError(
                f"{request.microbatches} microbatches and {len(stages[0].edges)} values between stages need more than "
                f"{TAGS} different messages between two ranks: use fewer microbatches"
            )


def tag(stage: Stage, edge: Edge, mb: int, microbatches: int) -> int:
    """A number of its own for each message between two ranks: they may be received in any order."""
    pair = (edge.sender, edge.receiver)
    before = sum((e.sender, e.receiver) == pair for e in stage.edges[: edge.number])
    return before * microbatches + mb
