"""One entry of a program: a verb, the unit or page and the microbatch it is about. Prints as "F3.0", parses back."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpx.errors import ProgramError

__all__ = ["Action", "marked", "parse"]

_TEXT = re.compile(r"([A-Z]+)(\d+)?(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """op: a verb of the table. unit: number of the unit (or of the page, for verbs that move pages). mb: microbatch."""

    op: str
    unit: int | None = None
    mb: int | None = None

    def __str__(self) -> str:
        unit = "" if self.unit is None else str(self.unit)
        return self.op + unit + ("" if self.mb is None else f".{self.mb}")


def parse(text: str) -> tuple[Action, ...]:
    """The inverse of printing: actions separated by white space."""
    actions = []
    for word in text.split():
        match = _TEXT.fullmatch(word)
        if match is None:
            wanted = "expected a verb in capitals, a number and .microbatch, as in F3.0"
            raise ProgramError(f"{word!r} is no action: {wanted}")
        unit, mb = (None if number is None else int(number) for number in match.groups()[1:])
        actions.append(Action(match[1], unit, mb))
    return tuple(actions)


def marked(actions: Sequence[Action], at: int, around: int = 6) -> str:
    """The neighbourhood of an action with an arrow under it."""
    start = max(at - around, 0)
    words = [str(a) for a in actions[start : at + around + 1]]
    lead = "... " if start else ""
    arrow = len(lead) + sum(len(w) + 1 for w in words[: at - start])
    return f"  {lead}{' '.join(words)}\n  {' ' * arrow}^"
