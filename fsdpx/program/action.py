"""One entry of a program: a verb, the unit or page and the microbatch it is about. Prints as "F3.0", parses back."""

import re
from dataclasses import dataclass

from fsdpx.errors import ProgramError

__all__ = ["Action", "parse"]

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
    return tuple(_parse_one(word) for word in text.split())


def _parse_one(word: str) -> Action:
    match = _TEXT.fullmatch(word)
    if match is None:
        raise ProgramError(f"{word!r} is no action: expected a verb in capitals, a number and .microbatch, as in F3.0")
    op, unit, mb = match.groups()
    return Action(op, None if unit is None else int(unit), None if mb is None else int(mb))
