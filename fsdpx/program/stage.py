"""What a program knows of the model: units, pages and values as numbers, and how a word of the table becomes slots."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fsdpx.program.action import Action
from fsdpx.program.verbs import VERBS

__all__ = ["Slots", "Stage", "StageUnit", "expand"]


@dataclass(frozen=True)
class StageUnit:
    """pages: own first. takes and reads: values it is the last, or not the last, to read. gives: values others read."""

    pages: tuple[int, ...]
    takes: tuple[int, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """units in execution order; trainable: one flag per page; inputs and outputs: values that enter and leave."""

    units: tuple[StageUnit, ...]
    trainable: tuple[bool, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(
        cls,
        units: Iterable[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
        trainable: Iterable[bool],
        inputs: Iterable[int],
        outputs: Iterable[int],
    ) -> "Stage":
        """From (pages, values read, values given) per unit; who reads a value last follows."""
        rows, outputs = list(units), tuple(outputs)
        last = {v: k for k, (_, read, _) in enumerate(rows) for v in read} | dict.fromkeys(outputs, len(rows))
        made = (
            StageUnit(pages, tuple(v for v in read if last[v] == k), tuple(v for v in read if last[v] != k), given)
            for k, (pages, read, given) in enumerate(rows)
        )
        return cls(tuple(made), tuple(trainable), tuple(inputs), outputs)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        return tuple(p for p, flag in enumerate(self.trainable) if flag)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The inputs that some unit reads."""
        read = {v for u in self.units for v in u.takes + u.reads} | set(self.outputs)
        return tuple(v for v in self.inputs if v in read)


@dataclass(frozen=True)
class Slots:
    """The slots of one action, in the order of the table."""

    takes: tuple[str, ...]
    reads: tuple[str, ...]
    adds: tuple[str, ...]
    gives: tuple[str, ...]


def expand(action: Action, stage: Stage, microbatches: int) -> Slots:
    verb = VERBS[action.op]

    def names(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(slot for word in words for slot in _slots(word, action, stage, microbatches))

    return Slots(names(verb.takes), names(verb.reads), names(verb.adds), names(verb.gives))


def _slots(word: str, action: Action, stage: Stage, microbatches: int) -> list[str]:
    kind, _, over = word.partition(":")
    if not over:
        return [kind]
    if kind in ("act", "dact"):
        return [f"{kind}{v}.{action.mb}" for v in _values(kind, over, action, stage)]
    match over:
        case "page":
            return [f"{kind}{action.unit}"]
        case "unit":
            return [f"{kind}{action.unit}.{action.mb}"]
        case "pages":
            pages = stage.units[_unit(action)].pages
            return [f"{kind}{p}" for p in pages if kind != "grad" or stage.trainable[p]]
        case "mb":
            return [f"{kind}.{action.mb}"]
        case "all" if kind == "total":
            return [f"{kind}{p}" for p in stage.trained]
        case "all":
            return [f"{kind}.{m}" for m in range(microbatches)]
    raise AssertionError(f"the table has no word {word!r}")


def _values(word_kind: str, over: str, action: Action, stage: Stage) -> Iterable[int]:
    match over:
        case "inputs":
            return stage.used
        case "outputs" if word_kind == "dact":
            return [v for v in stage.outputs if v not in stage.inputs]
        case "outputs":
            return stage.outputs
        case "last":
            return stage.units[_unit(action)].takes
        case "kept":
            return stage.units[_unit(action)].reads
        case "out":
            return stage.units[_unit(action)].gives
        case "in":
            unit = stage.units[_unit(action)]
            return [v for v in (*unit.takes, *unit.reads) if v not in stage.inputs]
    raise AssertionError(f"the table has no values {over!r}")


def _unit(action: Action) -> int:
    assert action.unit is not None
    return action.unit
