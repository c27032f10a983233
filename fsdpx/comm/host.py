"""The ranks of one machine, and the memory they share: windows that each of them can read and write."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

import numpy as np

from fsdpx.comm.calls import Array, address
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.mapped import FOLDER, Mapping

__all__ = ["Host", "HostWindow", "WindowAddress", "free_bytes"]

RESERVE = 4 << 20
"""Bytes of shared memory that are left for the library that carries messages."""


class WindowAddress(NamedTuple):
    """Where an array lies: in the part of rank `owner` (of the machine) of a window, from byte `offset`."""

    window: int
    owner: int
    offset: int

    @property
    def words(self) -> memoryview:
        """The same as three 64-bit words."""
        return np.array(self, np.int64).data


class HostWindow:
    """One allocation: a part of each rank of the machine, all mapped by all. Collective to make. fence: a rank that
    sees what is written after it also sees everything written before it."""

    def __init__(self, here: Communicator, nbytes: int) -> None:
        self._mapping = Mapping(here, nbytes, at_once=False)  # each page then lies near the rank that uses it first
        self.parts: list[Array] = self._mapping.parts
        self.addresses = [address(part) for part in self.parts]
        self.fence = _fence()

    def free(self) -> None:
        """The memory is gone: no array of it may be used any more."""
        self.parts = []
        self._mapping.close()


class Host:
    """The machine of this rank as `world`, all ranks of the job, sees it. here: the ranks on this machine, in the order
    of their world ranks, of which `leader` is the lowest, its name."""

    def __init__(self, world: Communicator, here: Communicator, leader: int) -> None:
        self.world, self.here, self.leader = world, here, leader
        self.rank, self.size = here.rank, here.size
        self.common: set[int] = set()  # windows of which all ranks of a group use the same part
        self.windows: dict[int, HostWindow] = {}
        self.abandoned: list[Array] = []  # arrays in windows whose owner is no more
        self.persistent: ModuleType | None = None  # `fsdpx.comm.persistent`, once there is memory to share
        self._owners: dict[int, tuple[int, int]] = {}
        self._places: dict[int, tuple[Array, WindowAddress]] = {}
        self._views: dict[tuple[int, ...], Array] = {}
        self._made = 0

    def window(self, nbytes: int) -> int | None:
        """The number of a new window, with `nbytes` of memory of this rank; ranks may differ. None, on all ranks, if
        some machine has too little memory for what its ranks want. Collective over the world."""
        wanted = sum(self.here.all_gather_plain(nbytes))
        if not all(self.world.all_gather_plain(wanted <= free_bytes())):
            return None
        window, number = HostWindow(self.here, nbytes), self._made
        self._made += 1
        self.windows[number] = window
        self._owners.update({id(part): (number, owner) for owner, part in enumerate(window.parts)})
        return number

    def release(self, array: Array) -> None:
        """Free this rank's side of the window that `array` lies in. No view of it may be in use. Nothing is sent."""
        place = self.find(array)
        assert place is not None, "only what was allocated is released"
        window = self.windows.pop(place.window)
        self.common.discard(place.window)
        for part in window.parts:
            del self._owners[id(part)]
        self._places.clear()
        self._views.clear()
        window.free()

    def release_abandoned(self) -> None:
        """Free the windows of what was abandoned, unless they have been closed."""
        with suppress(IndexError):  # none is left; another thread may have taken the last
            while True:
                array = self.abandoned.pop()
                if self.find(array) is not None:
                    self.release(array)

    def find(self, array: Array) -> WindowAddress | None:
        """Where an array lies, None if not in a window. The answer is kept for the same object."""
        known = self._places.get(id(array))
        if known is not None:
            return known[1]
        place = self._search(array)
        if place is not None:  # others are not held: they may be large, and finding that they lie nowhere is fast
            if len(self._places) >= 4096:
                self._places.clear()
            self._places[id(array)] = (array, place)  # holding the view keeps its id taken
        return place

    def _search(self, array: Array) -> WindowAddress | None:
        if not isinstance(array, np.ndarray):
            return None
        owner = self._owners.get(id(array)) or self._owners.get(id(array.base))
        if owner is None:
            return None
        part = self.windows[owner[0]].parts[owner[1]]
        return WindowAddress(*owner, address(array) - address(part))

    def view(self, place: Sequence[int], start: int, size: int, dtype: np.dtype) -> Array:
        """`size` elements, from element `start` on, of the array that lies at a place."""
        key = (*place, start, size, dtype.num)
        made = self._views.get(key)
        if made is None:
            if len(self._views) >= 4096:
                self._views.clear()
            window, owner, offset = place
            begin = offset + start * dtype.itemsize
            made = self.windows[window].parts[owner][begin : begin + size * dtype.itemsize].view(dtype)
            self._views[key] = made
        return made

    def close(self) -> None:
        """Free all windows."""
        while self.windows:  # some may go meanwhile, as the trainer that has forgotten them is collected
            self.windows.popitem()[1].free()
        self._owners.clear()
        self._places.clear()
        self._views.clear()
        if self.here is not self.world:
            self.here.close()


def _fence() -> Callable[[], None]:
    """Processors other than x86 may show stores to others in another order. A lock that is held orders what comes
    before its release and what comes after it is taken again."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return lambda: None
    lock = threading.Lock()
    lock.acquire()

    def order() -> None:
        lock.release()
        lock.acquire()

    return order


def free_bytes() -> int:
    """Bytes of shared memory that are left on this machine; without a limit of its own, more than any rank wants."""
    if not os.path.isdir(FOLDER):
        return 1 << 62
    found = os.statvfs(FOLDER)
    return max(found.f_bavail * found.f_frsize - RESERVE, 0)
