"""A communicator that moves its arguments into windows first, so that any test of communicators tests windows."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from ranks import carrier

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.comm.calls import HandleWithCallback, get_progress
from fsdpx.core.comm.communicator import ReduceOp

ROOM = 1 << 20


def open_node(machines: Any = None, timeout: float = 30.0) -> Any:
    from fsdpx.core.comm.node.node import NodeCommunicator

    return NodeCommunicator(carrier(timeout), machines)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    comm = open_node()
    yield comm
    comm.close()


@pytest.fixture(scope="module")
def room(world: Any) -> Iterator[np.ndarray]:
    memory = world.allocate_shared(ROOM)
    yield memory
    world.free_shared(memory)


def back(handle: Any, outside: np.ndarray, inside: np.ndarray) -> HandleWithCallback:
    """The handle of a call that is complete when its result has been copied out."""
    return HandleWithCallback(handle, partial(np.copyto, outside, inside))


class Shelf:
    """Shared memory that arrays take one place after the other of, from the beginning again at its end."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.used = memory, 0

    def place_like(self, array: np.ndarray) -> np.ndarray:
        self.used %= ROOM - (1 << 14)
        place = self.memory[self.used : self.used + array.nbytes].view(array.dtype)
        self.used += -(-(array.nbytes + 1) // 64) * 64
        return place


class InWindows:
    """Around a NodeCommunicator. `common`: gathers go into memory that the whole machine shares."""

    def __init__(self, comm: Any, room: np.ndarray, shared: np.ndarray | None = None) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.progress = get_progress(comm)
        self.room, self.common = Shelf(room), None if shared is None else Shelf(shared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def _inside(self, array: np.ndarray) -> np.ndarray:
        place = self.room.place_like(array)
        place[...] = array
        return place

    def all_gather(self, send, recv, counts=None, *, what=""):
        if not _flat(send, recv):
            return self.comm.all_gather(send, recv, counts, what=what)
        into = self._inside(recv) if self.common is None else self.common.place_like(recv)
        start = sum(counts[: self.rank]) if counts else recv.size * self.rank // self.size
        own = into[start : start + send.size]
        alike = self.common is None and (own.size, own.dtype) == (send.size, send.dtype)
        if alike and self.room.used % 128:  # now and then in place
            own[...] = send
        else:
            own = self._inside(send)
        return back(self.comm.all_gather(own, into, counts, what=what), recv, into)

    def reduce_scatter(self, send, recv, op=ReduceOp.SUM, counts=None, *, what="", wire=None):
        if not _flat(send, recv):
            return self.comm.reduce_scatter(send, recv, op, counts, what=what, wire=wire)
        given, alike = self._inside(send), [recv.size] * self.size
        if recv.base is send or recv is send:
            start = (get_data_pointer(recv) - get_data_pointer(send)) // recv.itemsize
            out = given[start : start + recv.size]
        elif self.room.used % 128 and sum(alike) == send.size and counts in (None, alike):
            # now and then onto its own piece
            out = given[recv.size * self.rank : recv.size * (self.rank + 1)]
        else:
            out = self._inside(recv)
        return back(self.comm.reduce_scatter(given, out, op, counts, what=what, wire=wire), recv, out)

    def all_reduce(self, buf, op=ReduceOp.SUM, algorithm="library", *, what="", wire=None):
        if not _flat(buf):
            return self.comm.all_reduce(buf, op, algorithm, what=what, wire=wire)
        inside = self._inside(buf)
        return back(self.comm.all_reduce(inside, op, algorithm, what=what, wire=wire), buf, inside)

    def broadcast(self, buf, root, *, what=""):
        inside = self._inside(buf)
        return back(self.comm.broadcast(inside, root, what=what), buf, inside)

    def all_to_all(self, send, recv, send_counts=None, recv_counts=None, *, what=""):
        given, into = self._inside(send), self._inside(recv)
        return back(self.comm.all_to_all(given, into, send_counts, recv_counts, what=what), recv, into)


def _flat(*arrays: np.ndarray) -> bool:
    return all(a.ndim == 1 and a.flags.c_contiguous for a in arrays)
