"""`OffloadConfig`, the option `offload`: which state is stored on disk between uses, and where in a program it is read
and written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.core.program import Slot
from fsdpx.core.state.ledger import LedgerRow
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import StorageLevelChoice, StoredSlots
from fsdpx.errors import ConfigError
from fsdpx.ext.offload import verbs as verbs
from fsdpx.ext.offload.disk import DiskStorage, open_disk_storage
from fsdpx.ext.offload.records import SPILLED, pair_with_stored_slots

__all__ = ["OffloadConfig"]

OFFLOADED = ("optimizer", "parameters", "activations", "gradients")
"""Valid choices for `OffloadConfig.what`."""
STATE = ("slot", "average")
"""Kinds of rows of the ledger (the table of a rank's arrays) that belong to the optimizer state."""


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class OffloadConfig(StorageLevelChoice):
    """Offload state to disk when it is not in use. Each rank writes one file.

    Parameters
    ----------
    folder : path of an existing folder on a fast local disk. No other job or trainer may use the folder at the same
        time
    what : one or more of "optimizer" (optimizer state, including averages; the default), "parameters" (the master
        shard), "activations" (from the forward to the backward pass) and "gradients" (until the update)
    direct : whether to bypass the system's page cache (O_DIRECT). If None (default), bypass it if the file system
        supports this

    Raises
    ------
    ConfigError : a value is invalid
    """

    folder: str | os.PathLike[str]
    what: str | Sequence[str] = "optimizer"
    direct: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise ConfigError(f"OffloadConfig(folder={self.folder!r}): the path of an existing folder is needed")
        what = (self.what,) if isinstance(self.what, str) else self.what
        if not isinstance(what, tuple | list) or not what or any(one not in OFFLOADED for one in what):
            raise ConfigError(f"OffloadConfig(what={self.what!r}): choose from {', '.join(OFFLOADED)}")
        object.__setattr__(self, "what", tuple(name for name in OFFLOADED if name in what))
        object.__setattr__(self, "folder", os.path.expanduser(self.folder))
        if self.direct not in (None, True, False):
            raise ConfigError(f"OffloadConfig(direct={self.direct!r}): choose True, False or None")

    def require_something_to_store(self, optimizer: Any, average: Any) -> None:
        if self.what == ("optimizer",) and not optimizer.slots and average is None:
            raise ConfigError(f"offload={self!r}: {type(optimizer).__name__} keeps no state; leave it out")

    def pair_offloaded_slots_with_placeholders(self, pages: Mapping[int, bool], units: int, slots: bool) -> StoredSlots:
        state = [page for page, trained in pages.items() if trained and slots and "optimizer" in self.what]
        shards = [page for page in pages if "parameters" in self.what]
        spilled = range(units if "activations" in self.what else 0)
        records = (
            *(Slot("slots", p) for p in state),
            *(Slot("shard", p) for p in shards),
            *(Slot(kind, unit) for kind in SPILLED for unit in spilled),
        )
        return pair_with_stored_slots(records)

    def assign_row_level(self, row: LedgerRow) -> LedgerRow:
        kind = row.key.kind
        if (kind == "master" and "parameters" in self.what) or (kind in STATE and "optimizer" in self.what):
            return replace(row, level="slow")
        if "gradients" in self.what and (kind == "part" or (kind == "grad" and row.is_kept)):
            return replace(row, level="map", lifetime="step")
        return row

    def open_storage(self, placement: Placement, rows: Sequence[LedgerRow]) -> DiskStorage:
        return open_disk_storage(placement, rows, self.folder, self.direct, f"offload={self!r}")
