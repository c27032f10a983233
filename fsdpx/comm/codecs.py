"""Codecs: how the gradients of one page are carried when they are reduced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

from fsdpx.array.kernels import add_widened, store
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.namespace import namespace_of
from fsdpx.comm.calls import Array, Handle, ReduceOp, split_evenly
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.steps import Finish
from fsdpx.config import half_name
from fsdpx.errors import ConfigError

__all__ = ["Cast", "Codec", "Plain", "codec"]

Calls = tuple[tuple[str, int], ...]
Memory = Mapping[str, Array]


class Codec(ABC):
    """Sums a flat gradient over a communicator; inherit it for a codec of your own."""

    itemsize: int | None = None
    """Bytes of an element on its way; None: as many as in the gradient."""
    calls: Calls = (("reduce_scatter", 1),)
    """The collectives that `reduce` makes, and how many times each moves n - own elements of `itemsize` bytes."""
    calls_all: Calls = (("all_reduce", 2),)
    """The same of `reduce_all`."""

    @abstractmethod
    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        """Sum `grad` over the ranks; this rank's part arrives in `out`.

        Parameters
        ----------
        grad : n elements, flat; lost in any case.
        out : `counts[comm.rank]` elements; it may be the start of `grad`.
        counts : elements of the part of each rank.
        scratch : as many bytes as `scratch(n, comm.size)` says, free until the handle is complete.
        memory : what `memory(n)` asked for: zero before the first step, then as this codec left it.
        what : names the gradient in errors.
        """

    @abstractmethod
    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        """Sum `grad` over the ranks, in place, for all of them; arguments as in `reduce`."""

    def scratch(self, size: int, width: int) -> int:
        """Bytes that a reduce of `size` elements over `width` ranks needs while it lasts."""
        return 0

    def memory(self, size: int) -> Mapping[str, int]:
        """What this rank keeps from step to step for a gradient of `size` elements, an error feedback for example:
        names, and numbers of elements in the dtype of the gradient."""
        return {}


class Plain(Codec):
    """Gradients travel as they are: one reduce-scatter, or one all-reduce; (n - n/N) or twice that per rank.

    `algorithm` of all-reduces: "library", the backend's own, or "ring", ours, which is faster than some libraries' from
    a few MiB on."""

    def __init__(self, algorithm: str = "library") -> None:
        if algorithm not in ("library", "ring"):
            raise ConfigError(f"Plain({algorithm!r}): choose the algorithm library or ring")
        self.algorithm = algorithm

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, ReduceOp.SUM, counts, what=what)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, ReduceOp.SUM, self.algorithm, what=what)


class Cast(Codec):
    """Gradients travel in 16 bits to their owner, who adds them in fp32 in rank order: (n - n/N) 2-byte elements,
    one rounding per contribution, none in the sum. For all ranks the sum is rounded once more and gathered. `name` of
    the format: "bf16" or "float16"."""

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


def codec(choice: str | Codec | None, reduce: str, compute: str, algorithm: str = "library") -> Codec:
    """The codec behind a name, or the one that a precision implies, whose all-reduces are by `algorithm`."""
    if choice is None:
        return Plain(algorithm) if dtype_of(reduce).itemsize >= dtype_of(compute).itemsize else Cast(reduce)
    if isinstance(choice, str):
        if choice in ("plain", "ring"):
            return Plain("ring" if choice == "ring" else "library")
        if half_name(choice) in ("bf16", "float16"):
            return Cast(choice)
        raise ConfigError(f"unknown codec {choice!r}: choose one of plain, ring, bf16, fp16, or pass a Codec")
    if not isinstance(choice, Codec):
        raise ConfigError(f"codec={choice!r} is no Codec: pass plain, ring, bf16, fp16 or an object of a class of it")
    return choice
