"""Gradients in 16 bits, added in float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdpx.array.kernels import add_widened, store
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.namespace import namespace_of
from fsdpx.codecs.codec import Calls, Codec, Memory
from fsdpx.comm.calls import Array, Handle, split_evenly
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.steps import Finish
from fsdpx.errors import ConfigError

__all__ = ["Cast"]


class Cast(Codec):
    """Gradients travel in 16 bits to their owner, who adds them in fp32 in rank order: (n - n/N) 2-byte elements,
    one rounding per contribution, none in the sum. For all ranks the sum is rounded once more and gathered. `name` of
    the format: "bf16" or "float16"."""

    elementwise = True
    itemsize: int | None = 2
    calls: Calls = (("all_to_all", 1),)
    calls_all: Calls = (("all_to_all", 1), ("all_gather", 1))

    def __init__(self, name: str) -> None:
        self.dtype = dtype_of(name)
        if self.dtype.itemsize != 2:
            raise ConfigError(f"Cast({name!r}): a 16-bit format is needed, float16 or bf16")

    def scratch(self, size: int, width: int) -> int:
        """What is sent (n elements) and what is received (a part from each rank: n + width at most if the cut is
        balanced; a larger part finds memory of its own)."""
        return 2 * (2 * size + width)

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        n, own, width = grad.size, counts[comm.rank], comm.size
        xp, wire = namespace_of(grad), scratch[: 2 * n].view(self.dtype)
        if 2 * (n + own * width) <= scratch.size:
            parts = scratch[2 * n : 2 * (n + own * width)].view(self.dtype)
        else:
            parts = xp.empty(own * width, dtype=self.dtype)
        store(xp, grad, wire)  # an overflow becomes Inf, which the loss scale looks for
        handle = comm.all_to_all(wire, parts, counts, [own] * width, what=what)

        def add() -> None:
            store(xp, parts[:own], out)
            for r in range(1, width):
                add_widened(xp, parts[r * own : (r + 1) * own], out)

        return Finish(handle, add)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        n, counts = grad.size, split_evenly(grad.size, comm.size)
        own, start = counts[comm.rank], sum(counts[: comm.rank])
        total = namespace_of(grad).empty((own,), dtype=grad.dtype)
        self.reduce(comm, grad, total, counts, scratch, memory, what=what).wait()
        wire = scratch[: 2 * n].view(self.dtype)
        store(namespace_of(grad), total, wire[start : start + own])
        handle = comm.all_gather(wire[start : start + own], wire, counts, what=what)
        return Finish(handle, partial(store, namespace_of(grad), wire, grad))
