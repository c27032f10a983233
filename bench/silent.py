"""Communication switched off: a trainer that computes on, on stale data, wrong on purpose: only its time counts."""

from collections.abc import Sequence
from typing import Any

from fsdpx.comm.communicator import DONE, Array, Communicator, Handle, ReduceOp

__all__ = ["Silent", "silence"]

SMALL = 4096
"""Bytes up to which a gather is of control numbers: what this rank has is then given as everybody's."""


class Switch:
    """on: communicate. calls: how many calls came by."""

    def __init__(self) -> None:
        self.on, self.calls = True, 0


class Silent:
    """A communicator that passes calls on while the switch is on, and else is done at once."""

    def __init__(self, comm: Communicator, switch: Switch) -> None:
        self.comm, self.switch = comm, switch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def _heard(self) -> bool:
        self.switch.calls += 1
        return self.switch.on

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        if self._heard():
            return self.comm.all_gather(send, recv, counts, what=what)
        if recv.nbytes <= SMALL and counts is None:
            recv.reshape(self.comm.size, -1)[...] = send
        return DONE

    def reduce_scatter(
        self,
        send: Array,
        recv: Array,
        op: ReduceOp = ReduceOp.SUM,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        return self.comm.reduce_scatter(send, recv, op, counts, what=what) if self._heard() else DONE

    def all_reduce(self, buf: Array, *arguments: Any, what: str = "") -> Handle:
        return self.comm.all_reduce(buf, *arguments, what=what) if self._heard() else DONE

    def barrier(self, *, what: str = "") -> Handle:
        return self.comm.barrier(what=what) if self._heard() else DONE

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.comm.all_gather_object(obj) if self._heard() else [obj] * self.comm.size


def silence(trainer: Any) -> Switch:
    """Put the switch into a trainer's communicators."""
    switch = Switch()
    axes = trainer.engine.axes
    for name in ("world", "data", "replica", "shard"):
        counted = getattr(axes, name)
        counted.comm = Silent(counted.comm, switch)
    return switch
