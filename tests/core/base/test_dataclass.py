"""Classes of this package's `dataclass` behave as those of Python's."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from fsdpx.core.base import dataclass as ours


class Point:
    """Of each kind of field."""

    x: int
    y: "list[int]" = field(default_factory=list)
    color: str = "red"
    secret: float = field(default=0.5, repr=False, compare=False)
    made: int = field(init=False)
    seen: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.x + 1)


def make(decorator: Callable[..., Any], body: type, **options: bool) -> Any:
    names = {name: value for name, value in vars(body).items() if name not in ("__dict__", "__weakref__")}
    return decorator(type(body.__name__, (), names), **options)


def outcome(run: Callable[[], object]) -> tuple[object, ...]:
    try:
        return type(result := run()), repr(result)
    except Exception as error:
        return type(error), str(error).replace("Point.", "")


def describe(kind: Any) -> list[object]:
    a, b, c = kind(1), kind(1, secret=2.0), kind(2, [3], "blue")
    return [
        str(inspect.signature(kind)), kind.__init__.__annotations__, kind.__match_args__, kind.__doc__,
        [one == other for one in (a, b, c) for other in (a, b, c)], a == (1, [], "red"), a.y is b.y, a.y, a.seen,
        outcome(lambda: hash(a) and 0), *[outcome(lambda x=x: hash(kind(1, ())) == hash(kind(x, ()))) for x in (1, 2)],
        repr(c).partition(" at ")[0], outcome(lambda: setattr(a, "x", 3)), outcome(lambda: setattr(a, "other", 3)), a.x,
        outcome(lambda: delattr(c, "color")), outcome(lambda: kind()), outcome(lambda: kind(1, size=2)),
        dataclasses.asdict(dataclasses.replace(c, x=5)), dataclasses.asdict(copy.copy(c)),
        kind.__dataclass_params__.frozen,
    ]  # fmt: skip


OPTIONS = [{}, {"frozen": True}, {"frozen": True, "eq": False}, {"repr": False}, {"frozen": True, "slots": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_behave_as_those_of_python(options: dict[str, bool]) -> None:
    assert describe(make(ours.dataclass, Point, **options)) == describe(make(dataclasses.dataclass, Point, **options))


class Undocumented:
    x: int


Undocumented.__doc__ = None


class OwnConstructor:
    """Takes twice what it keeps."""

    x: int

    def __init__(self, x: int) -> None:
        self.x = x // 2


class Keywords:
    """A field that a call must name."""

    y: int = field(default=0, kw_only=True)
    x: int = 1


class Unstored:
    """A value for the constructor alone."""

    x: int
    scale: dataclasses.InitVar[int] = 2

    def __post_init__(self, scale: int) -> None:
        self.x *= scale


class LeftOut:
    """A field that counts in comparisons but not in hashes."""

    x: int
    y: int = field(default=0, hash=False)


@pytest.mark.parametrize("body", [Undocumented, OwnConstructor, Keywords, Unstored, LeftOut])
def test_unusual_classes_are_those_of_python(body: type) -> None:
    def describe(kind: Any) -> list[object]:
        calls: list[Callable[[], object]] = [lambda: kind(6), lambda: kind(6, 3), lambda: kind(6, y=3)]
        hashes = [outcome(lambda call=call: hash(call()) == hash(kind(6))) for call in calls]
        made = [repr(outcome(lambda call=call: repr(call()))) for call in calls]
        return [str(inspect.signature(kind)), kind.__doc__, *made, *hashes]

    for frozen in (False, body in (Undocumented, LeftOut)):
        want = describe(make(dataclasses.dataclass, body, frozen=frozen))
        assert describe(make(ours.dataclass, body, frozen=frozen)) == want


@ours.dataclass(frozen=True)
class Pair:
    """What pickle finds by its name, with a constructor for two."""

    left: Any
    right: Any = None


@dataclasses.dataclass(frozen=True)
class Triple(Pair):
    """A class of a user that derives from one of this package."""

    third: int = 3


class Loose(Pair):
    """Without a decorator, it may take other attributes, but keeps its fields."""


def test_classes_derive_from_them_and_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Triple(1, 2))) == Triple(1, 2, 3) != Pair(1, 2)
    assert hash(Triple(1)) == hash(Triple(1))
    loose = Loose(1)
    loose.other = 2  # type: ignore[attr-defined]
    for attribute in ("left", "right"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=attribute):
            setattr(loose, attribute, 1)
    cycle = Pair([])
    cycle.left.append(cycle)
    assert repr(cycle) == "Pair(left=[...], right=None)"
