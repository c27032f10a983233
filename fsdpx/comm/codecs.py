"""Codecs: how the gradients of one page are carried when they are reduced."""

from collections.abc import Sequence
from typing import Any, Protocol

from fsdpx.array.kernels import add_widened, store
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.namespace import namespace_of
from fsdpx.comm.communicator import Communicator, Handle, ReduceOp
from fsdpx.comm.steps import Finish
from fsdpx.errors import ConfigError

__all__ = ["Cast", "Codec", "Plain", "codec"]


Calls = tuple[tuple[str, int], ...]


class Codec(Protocol):
    """Sums a flat gradient over a communicator.

    calls, calls_all: the collectives that `reduce` and `reduce_all` make, for predictions of traffic, and how many
    times each moves n - own elements of `itemsize` bytes. itemsize None: that of the gradient.
    """

    itemsize: int | None
    calls: Calls
    calls_all: Calls

    def reduce(
        self, comm: Communicator, grad: Any, out: Any, counts: Sequence[int], memory: Any, *, what: str
    ) -> Handle:
        """Sum `grad` (n elements) over the ranks; this rank's part (`counts[rank]` elements) arrives in `out`.

        `out` may be the start of `grad`, which is lost in any case. memory: what `scratch` asked for.
        """
        ...

    def reduce_all(self, comm: Communicator, grad: Any, memory: Any, *, what: str) -> Handle:
        """Sum `grad` over the ranks, in place, for all of them."""
        ...

    def scratch(self, size: int, width: int) -> int:
        """Bytes of memory that a reduce of `size` elements over `width` ranks needs."""
        ...


class Plain:
    """Gradients travel as they are: one reduce-scatter, or one all-reduce; (n - n/N) or twice that per rank.

    algorithm: of all-reduces, "library" (the backend's own) or "ring" (ours; faster than some libraries' from a few
    MiB on).
    """

    itemsize: int | None = None
    calls: Calls = (("reduce_scatter", 1),)
    calls_all: Calls = (("all_reduce", 2),)

    def __init__(self, algorithm: str = "library") -> None:
        if algorithm not in ("library", "ring"):
            raise ConfigError(f"Plain({algorithm!r}): choose the algorithm library or ring")
        self.algorithm = algorithm

    def reduce(
        self, comm: Communicator, grad: Any, out: Any, counts: Sequence[int], memory: Any, *, what: str
    ) -> Handle:
        return comm.reduce_scatter(grad, out, ReduceOp.SUM, counts, what=what)

    def reduce_all(self, comm: Communicator, grad: Any, memory: Any, *, what: str) -> Handle:
        return comm.all_reduce(grad, ReduceOp.SUM, self.algorithm, what=what)

    def scratch(self, size: int, width: int) -> int:
        return 0


class Cast:
    """Gradients travel in 16 bits to their owner, who adds them in fp32 in rank order: (n - n/N) 2-byte elements,
    one rounding per contribution, none in the sum. For all ranks the sum is rounded once more and gathered."""

    itemsize: int | None = 2
    calls: Calls = (("all_to_all", 1),)
    calls_all: Calls = (("all_to_all", 1), ("all_gather", 1))

    def __init__(self, name: str) -> None:
        self.dtype = dtype_of(name)
        if self.dtype.itemsize != 2:
            raise ConfigError(f"Cast({name!r}): a 16-bit format is needed, float16 or bf16")

    def scratch(self, size: int, width: int) -> int:
        """What is sent (n elements) and what is received (a part from each rank, n + width at most)."""
        return 2 * (2 * size + width)

    def reduce(
        self, comm: Communicator, grad: Any, out: Any, counts: Sequence[int], memory: Any, *, what: str
    ) -> Handle:
        n, own, width = grad.size, counts[comm.rank], comm.size
        wire, parts = memory[: 2 * n].view(self.dtype), memory[2 * n : 2 * (n + own * width)].view(self.dtype)
        xp = namespace_of(grad)
        store(xp, grad, wire)  # an overflow becomes Inf, which the loss scale looks for
        handle = comm.all_to_all(wire, parts, counts, [own] * width, what=what)

        def add() -> None:
            store(xp, parts[:own], out)
            for r in range(1, width):
                add_widened(xp, parts[r * own : (r + 1) * own], out)

        return Finish(handle, add)

    def reduce_all(self, comm: Communicator, grad: Any, memory: Any, *, what: str) -> Handle:
        from fsdpx.comm.communicator import split_evenly

        n, counts = grad.size, split_evenly(grad.size, comm.size)
        own, start = counts[comm.rank], sum(counts[: comm.rank])
        total = namespace_of(grad).empty((own,), dtype=grad.dtype)
        self.reduce(comm, grad, total, counts, memory, what=what).wait()
        wire = memory[: 2 * n].view(self.dtype)
        store(namespace_of(grad), total, wire[start : start + own])
        handle = comm.all_gather(wire[start : start + own], wire, counts, what=what)

        def widen() -> None:
            store(namespace_of(grad), wire, grad)

        return Finish(handle, widen)


def codec(choice: "str | Codec | None", reduce: str, compute: str, algorithm: str = "library") -> Codec:
    """The codec behind a name, or the one that a precision implies; all-reduces by `algorithm` if nobody says more."""
    if choice is None:
        return Plain(algorithm) if dtype_of(reduce).itemsize >= dtype_of(compute).itemsize else Cast(reduce)
    if isinstance(choice, str):
        if choice in ("plain", "ring"):
            return Plain("ring" if choice == "ring" else "library")
        if choice in ("bf16", "fp16", "float16"):
            return Cast("float16" if choice == "fp16" else choice)
        raise ConfigError(f"unknown codec {choice!r}: choose one of plain, ring, bf16, fp16, or pass a Codec")
    if not all(hasattr(choice, name) for name in ("reduce", "reduce_all", "scratch", "calls", "calls_all", "itemsize")):
        raise ConfigError(f"codec={choice!r} is no Codec: pass plain, ring, bf16, fp16 or an object with its methods")
    return choice
