"""The inputs of one run of a program."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdpx.nn.cache import Cache

__all__ = ["Feed", "Microbatch"]


@dataclass(frozen=True)
class Microbatch:
    """One forward's worth of this rank's batch. row: number of its first sample in the global batch."""

    inputs: tuple[Any, ...]
    target: Any
    row: int


@dataclass(frozen=True)
class Feed:
    """batch: the microbatches of this rank; None in place of one without samples. training: the mode of layers such as
    dropout. commit: called with the mean loss and the scale of a step before it updates. cache: as `Env` has it."""

    batch: list[Microbatch | None] = field(default_factory=list)
    training: bool = True
    commit: Callable[[Any, Any], None] | None = None
    cache: Cache | None = None
