"""A communicator that moves its arguments into windows first, so that any test of communicators tests windows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.comm.calls import HandleWithCallback, get_progress
from fsdpx.core.comm.communicator import ReduceOp

ROOM = 1 << 20


def back(handle: Any, outside: np.ndarray, inside: np.ndarray) -> HandleWithCallback:
    """The handle of a call that is complete when its result has been copied out."""
    return HandleWithCallback(handle, partial(np.copyto, outside, inside))


class InWindows:
    """Around a NodeCommunicator. `common`: gathers go into memory that the whole machine shares."""

    def __init__(self, comm: Any, room: np.ndarray, shared: np.ndarray | None = None) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.progress = get_progress(comm)
        self.room, self.shared, self.used, self.used_shared = room, shared, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def _inside(self, array: np.ndarray) -> np.ndarray:
        self.used = self.used % (ROOM - (1 << 14))
        place = self.room[self.used : self.used + array.nbytes].view(array.dtype)
        self.used += -(-(array.nbytes + 1) // 64) * 64
        place[...] = array
        return place

    def _even(self, own: int, total: int, counts: Any) -> bool:
        """Whether the pieces of all ranks are equal."""
        return own * self.size == total and counts in (None, [own] * self.size)

    def _common(self, array: np.ndarray) -> np.ndarray:
        self.used_shared = self.used_shared % (ROOM - (1 << 14))
        place = self.shared[self.used_shared : self.used_shared + array.nbytes].view(array.dtype)
        self.used_shared += -(-(array.nbytes + 1) // 64) * 64
        return place

    def all_gather(self, send, recv, counts=None, *, what=""):
        if not _flat(send, recv):
            return self.comm.all_gather(send, recv, counts, what=what)
        into = self._inside(recv) if self.shared is None else self._common(recv)
        start = sum(counts[: self.rank]) if counts else recv.size * self.rank // self.size
        own = into[start : start + send.size]
        if (
            self.shared is None and self.used % 128 and (own.size, own.dtype) == (send.size, send.dtype)
        ):  # now and then in place
            own[...] = send
        else:
            own = self._inside(send)
        return back(self.comm.all_gather(own, into, counts, what=what), recv, into)

    def reduce_scatter(self, send, recv, op=ReduceOp.SUM, counts=None, *, what="", wire=None):
        if not _flat(send, recv):
            return self.comm.reduce_scatter(send, recv, op, counts, what=what, wire=wire)
        given = self._inside(send)
        if recv.base is send or recv is send:
            start = (get_data_pointer(recv) - get_data_pointer(send)) // recv.itemsize
            out = given[start : start + recv.size]
        elif self.used % 128 and self._even(recv.size, send.size, counts):  # now and then onto its own piece
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
