"""Draw pipeline schedules as text that shows what each rank computes in each time step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from string import ascii_lowercase

from fsdpx.core.program.simulator import UNIT_COSTS, ActionEvent, PipelineSchedule, simulate
from fsdpx.core.program.verbs import VERBS

__all__ = ["draw_schedule", "format_marked_schedule_step"]


def draw_schedule(drawn: PipelineSchedule | Sequence[ActionEvent], width: int = 120) -> str:
    """Draw what each rank computes in each time step, as text.

    A cell consists of an operation and a microbatch, such as "F0". If a rank has several stages, a letter
    distinguishes them ("F0b"), and the last line explains the letters. An action longer than one time step continues
    as "--"; an idle time step is ".". Only computation is drawn, not messages.

    Parameters
    ----------
    drawn : a schedule or a list of events. For a schedule, the forward pass and each half of the backward pass take one
        time step. For events, one time step is the duration of the shortest event
    width : number of characters per line; longer lines are truncated and end in "..."

    Returns
    -------
    str : one line per rank

    Raises
    ------
    ProgramError : if the schedule deadlocks
    """
    events = drawn if isinstance(drawn, Sequence) else simulate(drawn, UNIT_COSTS)
    events = [e for e in events if VERBS[e.action.op].lane == "compute" and e.end > e.start and e.action.mb is not None]
    if not events:
        return "(nothing is computed)"
    letters = _assign_stage_letters(events)
    cells = _format_timeline_cells_of_each_rank(events, letters)
    wide = max(len(cell) for row in cells.values() for cell in row)
    lead = len(f"rank {max(cells)}")
    lines = []
    for rank, row in sorted(cells.items()):
        steps = ("-" * wide if cell == "-" else f"{cell:<{wide}}" for cell in row)
        line = f"{f'rank {rank}':<{lead}}  {' '.join(steps).rstrip()}"
        lines.append(line if len(line) <= width else line[: max(width - 4, 0)].rstrip() + " ...")
    return "\n".join([*lines, *_format_legend(letters)])


def _assign_stage_letters(events: Sequence[ActionEvent]) -> dict[int | None, str]:
    """Map each stage to a letter that distinguishes it from other stages of its rank: the nth stage of a rank gets the
    nth letter. Return {} if every rank has only one stage."""
    there: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.action.unit is not None:
            there[event.rank].add(event.action.unit)
    if max(map(len, there.values()), default=0) < 2:
        return {}
    return {
        stage: ascii_lowercase[n] if n < len(ascii_lowercase) else f":{n}"
        for stages in there.values()
        for n, stage in enumerate(sorted(stages))
    }


def _format_legend(letters: dict[int | None, str]) -> list[str]:
    stages: dict[str, str] = defaultdict(str)
    for stage, letter in sorted(letters.items()):
        stages[letter] += f" {stage}"
    return ["; ".join(f"{letter}: stages{stages[letter]}" for letter in sorted(stages))] if letters else []


def _format_timeline_cells_of_each_rank(
    events: Sequence[ActionEvent], letters: dict[int | None, str]
) -> dict[int, list[str]]:
    """Return, for each rank, the texts of its cells, one cell per time step. The text "-" means that the action of the
    previous cell continues.
    """
    step = min(e.end - e.start for e in events)
    zero = min(e.start for e in events)
    rows: dict[int, list[str]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        row, action = rows[event.rank], event.action
        row += ["."] * (round((event.start - zero) / step) - len(row))
        row.append(f"{action.op}{action.mb}{letters.get(action.unit, '')}")
        row += ["-"] * (round((event.end - zero) / step) - len(row))
    return rows


def format_marked_schedule_step(schedule: PipelineSchedule, rank: int, position: int, width: int = 120) -> str:
    """Format an excerpt of a schedule, with a ^ below the marked entry. There is one line per rank, such as "rank 1
    F1.0 B1.0 F1.1". The lines show the actions at list positions close to the marked entry.

    Actions are aligned by list position and not by time, so the function also works for schedules that cannot run.
    `position` is the index of the marked entry in the list of rank `rank`. If `position` is the length of this list,
    the mark shows that an entry is missing at the end of the list."""
    words = [[str(action) for action in row] for row in schedule.ranks]
    wide = max((len(word) for row in words for word in row), default=1) + 1
    lead = len(f"rank {len(words) - 1}") + 2
    shown = max((width - lead - 8) // wide, 1)  # number of entries that fit into a line between "... " and " ..."
    first = max(min(position - shown // 2, max(map(len, words)) - shown), 0)
    lines = []
    for number, row in enumerate(words):
        text = f"{f'rank {number}':<{lead}}" + ("... " if first else "")
        here = "".join(f"{word:<{wide}}" for word in row[first : first + shown])
        lines.append((text + here + ("..." if len(row) > first + shown else "")).rstrip())
        if number == rank:
            lines.append(" " * (len(text) + (position - first) * wide) + "^")
    return "\n".join(lines)
