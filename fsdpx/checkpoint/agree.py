"""All ranks know what one of them finds out: results by rank, or the same error on all of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsdpx.checkpoint.commit import named
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import CheckpointError, FsdpxError

__all__ = ["agreed", "alone", "in_words", "place", "same", "together"]

T = TypeVar("T")


def together(world: Communicator, where: str, body: Callable[[], T]) -> list[T]:
    """`body()` of every rank, in rank order. Where it raises, whatever it is, all ranks raise CheckpointError with the
    text of the first rank that did: the others would wait for it. Collective."""
    value: Any = None
    problem, cause = None, None
    try:
        value = body()
    except Exception as error:
        problem, cause = in_words(error), error
    for rank, (_, text) in enumerate(everyone := world.all_gather_plain((value, problem))):
        if text is not None:
            who = f"rank {rank}: " if world.size > 1 else ""
            raise CheckpointError(text if text.startswith(where) else f"{where}: {who}{text}") from cause
    return [value for value, _ in everyone]


def alone(world: Communicator, where: str, body: Callable[[], T]) -> T:
    """`body()` of rank 0, on every rank. Collective."""
    return together(world, where, lambda: body() if world.rank == 0 else None)[0]  # type: ignore[return-value]


def same(world: Communicator, where: str, **choices: str) -> None:
    """CheckpointError on all ranks if they differ in a choice; names the ranks. Collective."""
    _demand_same(where, world.all_gather_plain(choices))


def place(world: Communicator, call: str, path: Any, **choices: str) -> Path:
    """The path that `call` was given, if it can be one and all ranks gave the same and the same choices; else
    CheckpointError on all of them. Collective."""
    return Path(agreed(world, call, lambda: {"path": str(named(path)), **choices})["path"])


def agreed(world: Communicator, where: str, choices: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """`choices()`, if it gives the same on all ranks; else, or where it raises, CheckpointError on all. Collective."""
    everyone = together(world, where, choices)
    _demand_same(where, everyone)
    return everyone[0]


def _demand_same(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if (other := theirs.get(name, "none")) != first:
                raise CheckpointError(f"{where}: ranks differ in {name}: rank 0 has {first}, rank {rank} has {other}")


def in_words(error: BaseException) -> str:
    """An error as text, the same on every system."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{error.strerror} ({name})" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, FsdpxError) else f"{type(error).__name__}: {error}"
