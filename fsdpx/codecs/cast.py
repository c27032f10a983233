"""Gradients in 16 bits, added in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fsdpx.array.arena import address
from fsdpx.array.kernels import add_widened, narrowed, store
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.namespace import namespace_of
from fsdpx.codecs.codec import Calls, Codec, Memory
from fsdpx.comm.calls import Array, Handle, split_evenly
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.steps import Finish
from fsdpx.errors import ConfigError

__all__ = ["Cast"]

FIRST = 16
"""Elements that are cast by themselves where the result lies in the place of what it is made of."""


class Cast(Codec):
    """Gradients travel in 16 bits to their owner, who adds them in fp32 in rank order: (n - n/N) 2-byte elements,
    one rounding per contribution, none in the sum. For all ranks the sum is rounded once more and gathered. `name` of
    the format: "bf16" or "float16".

    What is sent and what arrives take no more memory than the gradient has, whose place they take."""

    elementwise = True
    itemsize: int | None = 2
    calls: Calls = (("all_to_all", 1),)
    calls_all: Calls = (("all_to_all", 1), ("all_gather", 1))

    def __init__(self, name: str) -> None:
        self.dtype = dtype_of(name)
        if self.dtype.itemsize != 2:
            raise ConfigError(f"Cast({name!r}): a 16-bit format is needed, float16 or bf16")

    def scratch(self, size: int, width: int) -> int:
        """None if all parts are equal; else what arrives from `width` ranks is a little more than half of the gradient
        (of parts that are not balanced much more: that finds memory of its own)."""
        return 2 * (size + width) if size % width else 0

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        n, own, width = grad.size, counts[comm.rank], comm.size
        xp, room, arriving = namespace_of(grad), grad.view(self.dtype), own * width
        if arriving <= room.size - max(n, own * grad.itemsize // 2):  # beside what is sent, and the sum afterwards
            parts = room[room.size - arriving :]
        elif 2 * arriving <= scratch.size:
            parts = scratch[: 2 * arriving].view(self.dtype)
        else:
            parts = xp.empty(arriving, dtype=self.dtype)
        wire = room[:n]
        _narrow(xp, grad, wire)  # an overflow becomes Inf, which the loss scale looks for
        handle = comm.all_to_all(wire, parts, counts, [own] * width, what=what)
        within = 0 <= address(out) - address(grad) < grad.nbytes

        def add() -> None:
            total = grad[:own] if within else out  # where nothing is left that others read, and no part lies
            store(xp, parts[:own], total)
            for r in range(1, width):
                add_widened(xp, parts[r * own : (r + 1) * own], total)
            if total is not out:
                out[...] = total

        return Finish(handle, add)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        xp, n, counts = namespace_of(grad), grad.size, split_evenly(grad.size, comm.size)
        own, start = counts[comm.rank], sum(counts[: comm.rank])
        total, wire = grad[:own], grad.view(self.dtype)[:n]
        self.reduce(comm, grad, total, counts, scratch, memory, what=what).wait()
        _narrow(xp, total, wire[:own])
        mine = wire[start : start + own]
        mine[...] = wire[:own]
        return Finish(comm.all_gather(mine, wire, counts, what=what), partial(_widen, xp, wire, grad))


def _narrow(xp: Any, x: Array, out: Array) -> None:
    """out = x, where `out` begins at the same byte and its elements are smaller."""
    out[:FIRST] = narrowed(xp, x[:FIRST], out.dtype)
    for start, stop in _doubling(x.size):
        store(xp, x[start:stop], out[start:stop])


def _widen(xp: Any, x: Array, out: Array) -> None:
    """The same where they are larger."""
    for start, stop in reversed(list(_doubling(x.size))):
        store(xp, x[start:stop], out[start:stop])
    out[:FIRST] = narrowed(xp, x[:FIRST], out.dtype)


def _doubling(size: int) -> Iterator[tuple[int, int]]:
    """Runs of elements, each as long as all before it: in half the bytes, it ends where it begins."""
    start = FIRST
    while start < size:
        yield start, min(2 * start, size)
        start *= 2
