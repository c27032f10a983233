"""State in a slower level than memory, as far as the core asks for it: extensions say where it lies, and move it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.core.program import Slot

__all__ = ["IN_MEMORY", "Standing", "StateStorage", "StorageChoice"]

Standing = tuple[tuple[Slot, Slot], ...]
"""Slots whose values lie in a slower level between programs, and the slots that stand for them meanwhile."""


class StateStorage:
    """Where a rank's rows of a slower level lie; here there are none.

    busy_seconds: for which it has moved something since the last `reset_counters`; None: it moves nothing."""

    busy_seconds: float | None = None

    def fill_slots(self, state: Any) -> None:
        """Fill the slots of a `TrainState` that has just been made."""

    def reset_counters(self) -> None:
        """Restart counting."""

    def get_moved_bytes(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
        """Bytes that its verbs move, see `Sizes.amounts`; of activations as the last batch was."""
        return {}

    def buffer_nbytes(self, slot: Slot) -> int | None:
        """Bytes of memory that a slot needs while it is here; None: it always is."""
        return None

    def map_array(self, row: Any) -> Any:
        """The array of a row, for as long as it is referenced."""
        raise AssertionError(f"{row} lies in memory")

    def close(self) -> None:
        """Let go of the level. Collective."""


class StorageChoice(ABC):
    """What a user wants in a slower level between uses; inherit it for a level of your own."""

    @abstractmethod
    def check(self, optimizer: Any, average: Any) -> None:
        """ConfigError where there is nothing to store."""

    @abstractmethod
    def list_stored_slots(self, pages: Mapping[int, bool], units: int, slots: bool) -> Standing:
        """The slots whose values lie there between programs, and those that stand for them.

        Parameters
        ----------
        pages : number of a page -> whether it is trained
        units : how many there are
        slots : whether the optimizer keeps a state
        """

    @abstractmethod
    def place_row(self, row: Any) -> Any:
        """A row of the ledger as it was laid out for memory, at the level where it lies."""

    @abstractmethod
    def open_storage(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        """The storage of this rank, with room for these rows. Collective."""


@dataclass(frozen=True)
class Memory(StorageChoice):
    """Everything stays in memory."""

    def check(self, optimizer: Any, average: Any) -> None:
        return

    def list_stored_slots(self, pages: Mapping[int, bool], units: int, slots: bool) -> Standing:
        return ()

    def place_row(self, row: Any) -> Any:
        return row

    def open_storage(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        return StateStorage()


IN_MEMORY = Memory()
