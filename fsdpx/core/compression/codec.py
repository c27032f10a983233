"""A codec: how the gradients of one page are carried when they are reduced; as they are, or in 16 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdpx.core.array.namespace import parse_dtype as dtype_of
from fsdpx.core.base.arguments import check_own_constructor
from fsdpx.core.comm.calls import Array, Handle, ReduceOp, split_evenly
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError

__all__ = ["Cast16", "Codec", "Memory", "NoCompression", "ReshardRule", "Transfers"]

Transfers = tuple[tuple[str, int], ...]
"""Collectives, and the bytes that each moves."""
Memory = Mapping[str, Array]
ReshardRule = Literal["sum", "same", "reset"]
"""What becomes of a memory after a load or on other ranks. "sum": what is owed to each element of the gradient; that
of ranks which no longer exist is added to others', so that the sum over all ranks stays the same. "same": equal on
all ranks that sum together. "reset": zero again, and in no checkpoint."""


class Codec(ABC):
    """Sums a flat gradient over a communicator; inherit it for a codec of your own."""

    def __init_subclass__(cls) -> None:
        check_own_constructor(cls)

    elementwise: bool = False
    """Whether what becomes of an element does not depend on the others that are carried with it."""
    feedback: bool = False
    """Whether the codec keeps what gradients lost in it, and so depends on the scale of the loss."""
    reshard_rules: Mapping[str, ReshardRule] = {"error": "sum"}
    """How each `memory` reaches other ranks; "reset" if it is not named. A "sum" has `size` elements."""

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        """This codec for a gradient that holds tensors of `shapes`, one after the other; tensors that are cut are there
        by their whole rows, and vectors before and after them."""
        return self

    def get_user_note(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """What users should know of how it carries parameters of these shapes, said once; "" if there is nothing."""
        return ""

    @abstractmethod
    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        """Sum `grad` over the ranks; this rank's part arrives in `out`.

        Parameters
        ----------
        grad : n elements, flat; lost in any case.
        out : `counts[comm.rank]` elements; it may be the start of `grad`, or this rank's part in it.
        counts : elements of the part of each rank.
        scratch : as many bytes as `scratch(n, comm.size)` says, free until the handle is complete.
        memory : what `memory(n)` asked for: zero before the first step, then as this codec left it.
        what : names the gradient in errors.
        """

    @abstractmethod
    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        """Sum `grad` over the ranks, in place, for all of them; arguments as in `reduce`."""

    def predict_transfers(self, counts: Sequence[int], rank: int, itemsize: int) -> Transfers:
        """The collectives of a `reduce` and the bytes that `rank` sends in each, as reports predict them; here one
        reduce-scatter of the gradient as it is.

        Parameters
        ----------
        counts : elements of the part of each rank.
        rank : whose bytes are asked for.
        itemsize : bytes of an element of the gradient.
        """
        return (("reduce_scatter", (sum(counts) - counts[rank]) * itemsize),)

    def predict_all_reduce_transfers(self, size: int, width: int, rank: int, itemsize: int) -> Transfers:
        """The collectives and bytes of a `reduce_all` of `size` elements over `width` ranks; here one all-reduce."""
        return (("all_reduce", 2 * (size - split_evenly(size, width)[rank]) * itemsize),)

    def check(self, dtype: Any) -> None:
        """ConfigError where gradients of `dtype` cannot be carried; here that is not known."""
        return

    def warm_up(self, dtype: Any) -> None:
        """Make ready what it computes with for gradients of `dtype` on the CPU, before the first step."""
        return

    def scratch_bytes(self, size: int, width: int) -> int:
        """Bytes that a reduce of `size` elements over `width` ranks needs while it lasts."""
        return 0

    def memory_sizes(self, size: int) -> Mapping[str, int]:
        """What this rank keeps from step to step for a gradient of `size` elements, an error feedback for example:
        names, and numbers of elements in the dtype of the gradient. `recut` says what becomes of them."""
        return {}

    def apply_on_one_rank(self, grad: Array, memory: Memory) -> None:
        """This rank has no other to sum with: what is owed joins the gradient, and nothing is kept."""
        for name, kept in memory.items():
            if self.reshard_rules.get(name) == "sum":
                grad += kept
                kept[...] = 0


class NoCompression(Codec):
    """Gradients travel as they are: one reduce-scatter, or one all-reduce; (n - n/N) or twice that per rank.

    `algorithm` of all-reduces: "library", the backend's own, or "ring", ours, which is faster than some libraries' from
    a few MiB on."""

    elementwise = True

    def __init__(self, algorithm: str = "library") -> None:
        if algorithm not in ("library", "ring"):
            raise ConfigError(f"NoCompression({algorithm!r}): choose the algorithm library or ring")
        self.algorithm = algorithm

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, ReduceOp.SUM, counts, what=what)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, ReduceOp.SUM, self.algorithm, what=what)


class Cast16(Codec):
    """Gradients travel in 16 bits and are added in fp32 in rank order by the owner of a part: half the bytes, one
    rounding per contribution, none in the sum. For all ranks the sum is rounded once more. Inside a host nothing
    travels: the rank that adds reads the others' gradients where they lie, and rounds them then. `name` of the format:
    "bf16" or "float16".

    Where all parts are equal, what is sent and what arrives take the place of the gradient, and no more memory."""

    elementwise = True

    def __init__(self, name: str) -> None:
        self.dtype = dtype_of(name)
        if self.dtype.itemsize != 2:
            raise ConfigError(f"Cast16({name!r}): a 16-bit format is needed, float16 or bf16")

    def predict_transfers(self, counts: Sequence[int], rank: int, itemsize: int) -> Transfers:
        return super().predict_transfers(counts, rank, self.dtype.itemsize)

    def predict_all_reduce_transfers(self, size: int, width: int, rank: int, itemsize: int) -> Transfers:
        return super().predict_all_reduce_transfers(size, width, rank, self.dtype.itemsize)

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, counts=counts, what=what, wire=self.dtype)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, what=what, wire=self.dtype)
