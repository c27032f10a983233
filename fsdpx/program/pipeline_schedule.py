"""A pipeline schedule: what each rank of the pipe does in which order, stage by stage, microbatch by microbatch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdpx.errors import ProgramError
from fsdpx.program.verbs import Action, parse

__all__ = ["PipelineSchedule"]


@dataclass(frozen=True)
class PipelineSchedule:
    """What a schedule gives. ranks: one list of actions per rank of the pipe. home: the rank of each stage."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    home: tuple[int, ...]
    stages: int
    microbatches: int

    @classmethod
    def of(cls, name: str, rows: Iterable[str | Sequence[Action | str]], microbatches: int) -> "PipelineSchedule":
        """From lists of actions, or their text, per rank. A stage is at home where its first F stands.

        Raises ProgramError for text that is no action, and for stages without any F."""
        ranks = tuple(_row(name, rank, row) for rank, row in enumerate(rows))
        forwards = [(a.unit, rank) for rank, row in enumerate(ranks) for a in row if a.op == "F" and a.unit is not None]
        home = dict(reversed(forwards))
        stages = max(home, default=0) + 1
        lost = [str(stage) for stage in range(stages) if stage not in home]
        if lost:
            raise ProgramError(f"schedule {name!r}: no rank has an F of stage {', '.join(lost)}")
        return cls(name, ranks, tuple(home[stage] for stage in range(stages)), stages, microbatches)

    def __str__(self) -> str:
        """One line per rank: what a text file of this schedule says."""
        return "\n".join(" ".join(map(str, row)) for row in self.ranks)


def _row(name: str, rank: int, row: str | Sequence[Action | str]) -> tuple[Action, ...]:
    words = [row] if isinstance(row, str) else row
    try:
        return tuple(a for word in words for a in ([word] if isinstance(word, Action) else parse(word)))
    except ProgramError as error:
        raise ProgramError(f"schedule {name!r}, rank {rank}: {error}") from None
