"""grid: a schedule, or what ran, as lines of text: one per rank of the pipe, time from left to right."""

from collections import defaultdict
from collections.abc import Sequence
from string import ascii_lowercase

from fsdpx.program.action import Action
from fsdpx.program.plan import Plan
from fsdpx.program.simulate import Costs, Event, simulate
from fsdpx.program.verbs import VERBS

__all__ = ["arrow", "grid"]

UNIT = Costs(forward=1, backward_input=1, backward_params=1)
IDLE = "."


def grid(plan_or_events: "Plan | Sequence[Event]", width: int = 120) -> str:
    """What each rank computes, in equal steps of time.

    A cell is a verb and a microbatch: "F0". Where a rank has several stages, a letter tells them apart ("F0b"), and a
    last line says which is which. An action longer than a step goes on as "--", a step without work is ".". Plans are
    drawn with forward and each half of backward as long as a step; events with the shortest action as the step.
    Lines longer than `width` characters are cut and end in "...". Only what computes is drawn, no messages.

    Raises ProgramError for a plan whose ranks wait for each other.
    """
    events = plan_or_events if isinstance(plan_or_events, Sequence) else simulate(plan_or_events, UNIT)
    events = [e for e in events if VERBS[e.action.op].lane == "compute" and e.end > e.start and e.action.mb is not None]
    if not events:
        return "(nothing is computed)"
    letters = _letters(events)
    cells = _cells(events, letters)
    wide = max(len(cell) for row in cells.values() for cell in row)
    lead = len(f"rank {max(cells)}")
    lines = [
        f"{f'rank {rank}':<{lead}}  " + " ".join(f"{c:<{wide}}" for c in _joined(cells[rank], wide)).rstrip()
        for rank in sorted(cells)
    ]
    return "\n".join([*(_cut(line, width) for line in lines), *_legend(letters)])


def _letters(events: Sequence[Event]) -> dict[int, str]:
    """Stage -> letter: the nth stage of its rank has the nth letter. Nothing where every rank has one stage."""
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


def _legend(letters: dict[int, str]) -> list[str]:
    stages: dict[str, list[str]] = defaultdict(list)
    for stage, letter in sorted(letters.items()):
        stages[letter].append(str(stage))
    return ["; ".join(f"{letter}: stages {' '.join(stages[letter])}" for letter in sorted(stages))] if letters else []


def _cells(events: Sequence[Event], letters: dict[int, str]) -> dict[int, list[str]]:
    """Per rank one text per step; what goes on from the step before is "-"."""
    step = min(e.end - e.start for e in events)
    zero = min(e.start for e in events)
    rows: dict[int, list[str]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        row = rows[event.rank]
        row += [IDLE] * (round((event.start - zero) / step) - len(row))
        row.append(_label(event.action, letters))
        row += ["-"] * (round((event.end - zero) / step) - len(row))
    return rows


def _label(action: Action, letters: dict[int, str]) -> str:
    return f"{action.op}{action.mb}{letters.get(action.unit, '') if action.unit is not None else ''}"


def _joined(row: list[str], wide: int) -> list[str]:
    return ["-" * wide if cell == "-" else cell for cell in row]


def arrow(plan: Plan, rank: int, position: int, width: int = 120) -> str:
    """The lists of all ranks around one step, with a ^ under it: "rank 1  F1.0 B1.0 F1.1", in the order of the lists,
    whatever the time. Works for plans that cannot run. position: may be the length of the list, for a missing end.
    """
    words = [[str(action) for action in row] for row in plan.ranks]
    wide = max((len(word) for row in words for word in row), default=1) + 1
    lead = len(f"rank {len(words) - 1}") + 2
    room = max((width - lead - 8) // wide, 1)  # steps that fit beside "... " and " ..."
    first = max(min(position - room // 2, max(map(len, words)) - room), 0)
    lines = []
    for number, row in enumerate(words):
        text = f"{f'rank {number}':<{lead}}" + ("... " if first else "")
        here = "".join(f"{word:<{wide}}" for word in row[first : first + room])
        lines.append((text + here + ("..." if len(row) > first + room else "")).rstrip())
        if number == rank:
            lines.append(" " * (len(text) + (position - first) * wide) + "^")
    return "\n".join(lines)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 4, 0)].rstrip() + " ..."
