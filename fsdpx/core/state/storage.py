"""Interface to state in a slower level than memory (offload). Extensions implement the levels and move the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.core.program import Slot

__all__ = ["IN_MEMORY", "StateStorage", "StorageLevelChoice", "StoredSlots"]

StoredSlots = tuple[tuple[Slot, Slot], ...]
"""Slots whose values are in a slower level between programs, each with the slot that stands for it meanwhile."""


class StateStorage:
    """A rank's rows in a slower level. The base class has none.

    busy_seconds: seconds of transfers since the last `reset_counters`; None: nothing is ever transferred.
    """

    busy_seconds: float | None = None

    def fill_slots(self, state: Any) -> None:
        """Fill the slots of a new `TrainState`."""

    def reset_counters(self) -> None:
        """Reset the counters."""

    def get_moved_bytes_by_verb(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
        """Return the bytes that each verb of this storage transfers in a step; for activations, those of the last
        batch."""
        return {}

    def get_buffer_nbytes(self, slot: Slot) -> int | None:
        """Return the bytes of memory that a slot needs while its value is in memory; None if it always is."""
        return None

    def map_array(self, row: Any) -> Any:
        """Return the array of a row, valid as long as it is referenced."""
        raise AssertionError(f"{row} lies in memory")

    def close(self) -> None:
        """Release the level's files and buffers. Collective."""


class StorageLevelChoice(ABC):
    """The option of what to keep in a slower level between uses. Inherit from it to write a level."""

    @abstractmethod
    def require_something_to_store(self, optimizer: Any, average: Any) -> None:
        """Raise ConfigError if there is nothing to store."""

    @abstractmethod
    def pair_slots_with_stand_ins(self, pages: Mapping[int, bool], units: int, slots: bool) -> StoredSlots:
        """Return the slots whose values are in the level between programs, with the slots that stand for them.

        Parameters
        ----------
        pages : number of a page -> whether it is trained
        units : number of units
        slots : whether the optimizer has state

        Returns
        -------
        StoredSlots : pairs of slots
        """

    @abstractmethod
    def assign_row_level(self, row: Any) -> Any:
        """Return a row of the ledger, laid out for memory, changed to the level where it is stored."""

    @abstractmethod
    def open_storage(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        """Return the storage of this rank with space for these rows. Collective."""


@dataclass(frozen=True)
class Memory(StorageLevelChoice):
    """The choice to keep everything in memory."""

    def require_something_to_store(self, optimizer: Any, average: Any) -> None:
        return

    def pair_slots_with_stand_ins(self, pages: Mapping[int, bool], units: int, slots: bool) -> StoredSlots:
        return ()

    def assign_row_level(self, row: Any) -> Any:
        return row

    def open_storage(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        return StateStorage()


IN_MEMORY = Memory()
