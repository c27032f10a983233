"""The interface to state that is stored in a slower level than memory (offload). Extensions implement the levels and
transfer the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.core.program import Slot

__all__ = ["IN_MEMORY", "StateStorage", "StorageLevelChoice", "StoredSlots"]

StoredSlots = tuple[tuple[Slot, Slot], ...]
"""Pairs of slots: a slot whose value is in a slower level between programs, and the slot that stands in for it during
that time."""


class StateStorage:
    """A rank's rows in a slower level. The base class has no rows.

    busy_seconds: seconds during which transfers ran since the last `reset_counters`; None: nothing is ever transferred.
    """

    busy_seconds: float | None = None

    def fill_slots(self, state: Any) -> None:
        """Fill the slots of a new `TrainState`."""

    def reset_counters(self) -> None:
        """Reset the counters of transfers."""

    def get_bytes_per_transfer_by_verb(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
        """Return verb -> (number, microbatch) -> bytes that this storage transfers in a step, in the form of
        `TrafficSizes.amounts`. For activations these are the bytes of the last batch."""
        return {}

    def get_buffer_nbytes(self, slot: Slot) -> int | None:
        """Return the bytes of memory that a slot needs while its value is in memory; None if the value is always in
        memory."""
        return None

    def map_array(self, row: Any) -> Any:
        """Return the array of a row. The array is valid as long as it is referenced."""
        raise AssertionError(f"{row} is in memory")

    def close(self) -> None:
        """Release the level's files and buffers. Collective."""


class StorageLevelChoice(ABC):
    """The choice of the state that is kept in a slower level between uses. Derive from this class to write such a
    level."""

    @abstractmethod
    def require_something_to_store(self, optimizer: Any, average: Any) -> None:
        """Raise ConfigError if there is nothing that this level could store."""

    @abstractmethod
    def pair_slots_with_stand_ins(self, pages: Mapping[int, bool], units: int, slots: bool) -> StoredSlots:
        """Return the slots whose values are in the level between programs, paired with the slots that stand in for
        them.

        Parameters
        ----------
        pages : number of each page -> whether it is trained
        units : number of units
        slots : whether the optimizer has state

        Returns
        -------
        StoredSlots : pairs of slots
        """

    @abstractmethod
    def assign_row_level(self, row: Any) -> Any:
        """Return a row of the ledger with the level in which it is stored. row: the row as laid out for memory."""

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
