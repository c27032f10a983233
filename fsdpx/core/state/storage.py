"""State in a slower level than memory, as far as the core asks for it: extensions say where it lies, and move it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fsdpx.core.program import Slot

__all__ = ["StateStorage", "StorageChoice"]


class StateStorage(Protocol):
    """Where a rank's rows of a slower level lie.

    seconds: for which it has moved something since the last `reset`. spilled: bytes of the activations of the last
    run, by slot."""

    spilled: dict[Slot, int]

    @property
    def seconds(self) -> float: ...

    def reset(self) -> None: ...

    def size(self, record: Slot) -> int:
        """Bytes of what lies there of a slot."""

    def buffer_nbytes(self, record: Slot) -> int:
        """Bytes of memory that a slot needs while it is here."""

    def mapped(self, row: Any) -> Any:
        """The array of a row, for as long as it is referenced."""

    def close(self) -> None: ...


class StorageChoice(ABC):
    """What a user wants in a slower level between uses; inherit it for a level of your own.

    what: of "optimizer", "parameters", "activations" and "gradients"."""

    what: Any

    @abstractmethod
    def check(self, optimizer: Any, average: Any) -> None:
        """ConfigError where there is nothing to store."""

    @abstractmethod
    def records(self, pages: Mapping[int, bool], units: int, slots: bool) -> tuple[Slot, ...]:
        """The slots whose values lie there between uses.

        Parameters
        ----------
        pages : number of a page -> whether it is trained
        units : how many there are
        slots : whether the optimizer keeps a state
        """

    @abstractmethod
    def open(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        """The storage of this rank, with room for these rows. Collective."""
