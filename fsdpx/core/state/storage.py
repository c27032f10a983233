"""The interface for offloading state to storage that is slower than memory, such as a disk. Extensions implement this
interface and transfer the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.program import Slot

__all__ = ["IN_MEMORY", "StateStorage", "StorageLevelChoice", "StoredSlots"]

StoredSlots = tuple[tuple[Slot, Slot], ...]
"""Pairs of slots (named values of a program): a slot whose value is offloaded between programs, and a slot that holds a
placeholder in the meantime."""


class StateStorage:
    """The offloaded state of a rank. The base class offloads nothing.

    Attributes
    ----------
    busy_seconds : seconds spent on data transfers since the last `reset_counters`; None if nothing is ever transferred
    """

    busy_seconds: float | None = None

    def fill_slots_with_placeholders(self, state: Any) -> None:
        """Put placeholders for offloaded arrays into the slots (named values) of a new `TrainState`."""

    def reset_counters(self) -> None:
        """Set the transfer counters to zero."""

    def get_bytes_per_transfer_by_record(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
        """Return the number of bytes that each transfer to or from this storage moves, in the format of
        `TrafficSizes.amounts`: for each kind of item, such as "record", a dict that maps (item index, microbatch index)
        to a number of bytes. For activations, use the sizes from the last batch."""
        return {}

    def get_fetch_buffer_nbytes(self, slot: Slot) -> int | None:
        """Return the number of bytes of memory that an offloaded value needs once it is loaded, or None if the value is
        never offloaded."""
        return None

    def map_array(self, row: Any) -> Any:
        """Return the offloaded array that a row of the ledger (table of a rank's arrays) describes. The array is valid
        as long as it is referenced."""
        raise AssertionError(f"{row} is in memory")

    def close(self) -> None:
        """Close files and free buffers. Collective."""


class StorageLevelChoice(ABC):
    """Base class for offload options. An option determines which state is kept in storage that is slower than memory
    while it is not in use."""

    @abstractmethod
    def require_something_to_store(self, optimizer: Any, average: Any) -> None:
        """Raise ConfigError if nothing would be offloaded, for example because the optimizer has no state."""

    @abstractmethod
    def pair_offloaded_slots_with_placeholders(self, pages: Mapping[int, bool], units: int, slots: bool) -> StoredSlots:
        """Return the slots (named values of a program) that are offloaded between programs, each paired with the slot
        that holds a placeholder in the meantime.

        Parameters
        ----------
        pages : maps the index of each page (flat parameter buffer) to True if the page is trained, and to False
            otherwise
        units : number of units (groups of layers)
        slots : whether the optimizer has state

        Returns
        -------
        StoredSlots : pairs (offloaded slot, placeholder slot)
        """

    @abstractmethod
    def assign_row_level(self, row: Any) -> Any:
        """Return `row`, a row of the ledger (table of a rank's arrays). If this option offloads the array, change the
        storage level in the returned row."""

    @abstractmethod
    def open_storage(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        """Open this rank's storage, with space for the offloaded arrays. `rows` contains the rows of the rank's ledger
        (table of its arrays). Collective."""


@dataclass(frozen=True)
class Memory(StorageLevelChoice):
    """The default for the option `offload`: everything is kept in memory."""

    def require_something_to_store(self, optimizer: Any, average: Any) -> None:
        return

    def pair_offloaded_slots_with_placeholders(self, pages: Mapping[int, bool], units: int, slots: bool) -> StoredSlots:
        return ()

    def assign_row_level(self, row: Any) -> Any:
        return row

    def open_storage(self, placement: Any, rows: Sequence[Any]) -> StateStorage:
        return StateStorage()


IN_MEMORY = Memory()
