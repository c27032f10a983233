"""How much is tried: a part of it by `make check`, all of it by `make test`, more by `make thorough`."""

from collections.abc import Iterable
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
CHECK = settings.get_current_profile_name() == "check"


in_full = pytest.mark.skipif(CHECK, reason="a matrix for make test; make check has its parts")


def few(cases: Iterable[T], each: int) -> list[T]:
    """All cases; for `make check` one of `each`, the first one among them."""
    return list(cases)[:: each if CHECK else 1]


def examples(number: int) -> int:
    """For a property that is tried `number` times by `make test`."""
    return max(number * settings().max_examples // 60, 1)
