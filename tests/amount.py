"""How much is tried: a part of it by `make check`, all of it by `make test`, more by `make thorough`."""

from collections.abc import Iterable
from itertools import product
from typing import TypeVar

from hypothesis import settings

T, U = TypeVar("T"), TypeVar("U")
CHECK = settings.get_current_profile_name() == "check"
THOROUGH = settings.get_current_profile_name() == "thorough"


def few(cases: Iterable[T], each: int) -> list[T]:
    """All cases; for `make check` one of `each`, the first one among them."""
    return list(cases)[:: each if CHECK else 1]


def pairs(first: Iterable[T], second: Iterable[U]) -> list[tuple[T, U]]:
    """Each value of both lists, in as few pairs as that takes; all pairs for `make thorough`."""
    a, b = list(first), list(second)
    return list(product(a, b)) if THOROUGH else [(a[n % len(a)], b[n % len(b)]) for n in range(max(len(a), len(b)))]


def examples(number: int) -> int:
    """For a property that is tried `number` times by `make test`."""
    return max(number * settings().max_examples // 60, 1)
