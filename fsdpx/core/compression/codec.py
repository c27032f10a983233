"""Gradient codecs. They compress and reduce the gradients of a page (a flat buffer of several parameters). This file
contains the base class, and the codecs that send gradients unchanged or as 16-bit floats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.arguments import wrap_constructor_with_argument_check
from fsdpx.core.comm.calls import Array, Handle, ReduceOp, split_evenly
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError

__all__ = ["Cast16", "Codec", "Memory", "NoCompression", "ReshardRule", "Transfers"]

Transfers = tuple[tuple[str, int], ...]
"""The collectives of a reduce, as pairs (name, number of bytes that a rank sends)."""
Memory = Mapping[str, Array]
ReshardRule = Literal["sum", "same", "reset"]
"""How a codec's memory array changes when a checkpoint is loaded or the number of ranks changes. "sum": the array holds
the error to add to each gradient element; the errors of removed ranks are added to the errors of the remaining ranks,
so that the sum over all ranks stays the same. "same": the array is equal on all ranks that reduce together. "reset":
the array is zeroed, and not saved in checkpoints."""


class Codec(ABC):
    """Base class of gradient codecs. A codec sums a flat gradient over a communicator, usually in compressed form. To
    write a codec, inherit from this class."""

    def __init_subclass__(cls) -> None:
        wrap_constructor_with_argument_check(cls)

    elementwise: bool = False
    """True if the result for an element is independent of the other elements reduced with it."""
    feedback: bool = False
    """True if the codec keeps the rounding or truncation error of gradients. Like the gradients, this error contains
    the loss scale as a factor, so the loss scale must not change."""
    reshard_rules: Mapping[str, ReshardRule] = {"error": "sum"}
    """The reshard rule of each memory array, keyed by name. Arrays that are not listed have the rule "reset". An array
    with the rule "sum" has as many elements as the gradient."""

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        """Return the codec for a flat gradient that consists of tensors of these shapes. The base class returns
        `self`.

        Parameters
        ----------
        shapes : shapes of the tensors in order. If a rank's shard holds only part of a tensor, the complete rows in
            this part count as one tensor, and an incomplete row before or after them counts as a vector

        Returns
        -------
        Codec : codec for one page (flat buffer of several parameters)
        """
        return self

    def get_user_note(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return a note for users about how the codec treats parameters of these shapes. The note is printed once. The
        base class has no note.

        Parameters
        ----------
        shapes : maps parameter names to shapes

        Returns
        -------
        str : the note, "" if there is none
        """
        return ""

    @abstractmethod
    def reduce_scatter(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        """Start summing `grad` over the ranks, and return the handle. Each rank receives its own part of the sum in
        `out`. Collective.

        Parameters
        ----------
        grad : flat array of n elements, which are overwritten
        out : array of `counts[comm.rank]` elements for the result; may be the start of `grad`, or this rank's part of
            `grad`
        counts : number of elements of each rank's part
        scratch : `scratch_bytes(n, comm.size)` bytes, free to use until the handle is complete
        memory : arrays of the sizes in `memory_sizes(n)`; they are zero before the first step and keep their values
            between steps
        what : name of the gradient in error messages

        Returns
        -------
        Handle : handle to wait for before reading `out`
        """

    @abstractmethod
    def all_reduce(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        """Start summing `grad` over the ranks in place, and return the handle. Every rank receives the full sum.
        Collective.

        Parameters
        ----------
        grad : flat array of n elements; holds the sum when the handle is complete
        scratch : `scratch_bytes(n, comm.size)` bytes, free to use until the handle is complete
        memory : arrays of the sizes in `memory_sizes(n)`; they are zero before the first step and keep their values
            between steps
        what : name of the gradient in error messages

        Returns
        -------
        Handle : handle to wait for before reading `grad`
        """

    def predict_transfers(self, counts: Sequence[int], rank: int, itemsize: int) -> Transfers:
        """Return the collectives of one `reduce_scatter` and the number of bytes that `rank` sends in each. Traffic
        reports use this. The base class assumes one reduce-scatter of the uncompressed gradient.

        Parameters
        ----------
        counts : number of elements of each rank's part
        rank : the sender
        itemsize : bytes per element of the gradient

        Returns
        -------
        Transfers : (collective, bytes) pairs
        """
        return (("reduce_scatter", (sum(counts) - counts[rank]) * itemsize),)

    def predict_all_reduce_transfers(self, size: int, width: int, rank: int, itemsize: int) -> Transfers:
        """Return the collectives of one `all_reduce` and the number of bytes that `rank` sends in each. This is used
        for traffic reports. The base class assumes one all-reduce of the uncompressed gradient.

        Parameters
        ----------
        size : number of elements of the gradient
        width : number of ranks that reduce together
        rank : the sender
        itemsize : bytes per element of the gradient

        Returns
        -------
        Transfers : (collective, bytes) pairs
        """
        return (("all_reduce", 2 * (size - split_evenly(size, width)[rank]) * itemsize),)

    def check(self, dtype: Any) -> None:
        """Raise ConfigError if the codec cannot reduce gradients of `dtype`. The base class accepts every dtype.

        Parameters
        ----------
        dtype : dtype of the gradients

        Raises
        ------
        ConfigError : if the codec does not support this dtype
        """
        return

    def warm_up(self, dtype: Any) -> None:
        """Compile or load the CPU kernels for gradients of `dtype`, so that the first step does not have to wait for
        them. The base class has no kernels.

        Parameters
        ----------
        dtype : dtype of the gradients
        """
        return

    def scratch_bytes(self, size: int, width: int) -> int:
        """Return the size of the scratch memory that one reduce needs until its handle is complete. The base class
        returns 0.

        Parameters
        ----------
        size : number of elements of the gradient
        width : number of ranks that reduce together

        Returns
        -------
        int : size in bytes
        """
        return 0

    def memory_sizes(self, size: int) -> Mapping[str, int]:
        """Return the sizes of the arrays, such as error feedback, that this rank keeps between steps for a gradient.
        The base class keeps no arrays. `reshard_rules` determines how the arrays are redistributed when the number of
        ranks changes.

        Parameters
        ----------
        size : number of elements of the gradient

        Returns
        -------
        Mapping : maps the name of each array to its number of elements; the arrays have the dtype of the gradient
        """
        return {}

    def add_and_clear_kept_error(self, grad: Array, memory: Memory) -> None:
        """Add the kept error (error feedback) to the gradient, then set the error to zero. If there is only one rank,
        this method is called instead of `reduce_scatter`. Only arrays whose reshard rule is "sum" are added and
        cleared.

        Parameters
        ----------
        grad : flat gradient, changed in place
        memory : arrays of the sizes in `memory_sizes(grad.size)`, changed in place
        """
        for name, kept in memory.items():
            if self.reshard_rules.get(name) == "sum":
                grad += kept
                kept[...] = 0


class NoCompression(Codec):
    """Codec that sums gradients in their own dtype with one reduce-scatter or one all-reduce. For n elements, each of N
    ranks sends n - n/N elements in a reduce-scatter, and twice as many in an all-reduce.

    Parameters
    ----------
    algorithm : algorithm for all-reduces: "library" (default) for the backend's own algorithm, or "ring" for fsdpx's
        ring algorithm, which is faster than some libraries for gradients of more than a few MiB
    """

    elementwise = True

    def __init__(self, algorithm: str = "library") -> None:
        if algorithm not in ("library", "ring"):
            raise ConfigError(f"NoCompression({algorithm!r}): choose the algorithm library or ring")
        self.algorithm = algorithm

    def reduce_scatter(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, ReduceOp.SUM, counts, what=what)

    def all_reduce(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, ReduceOp.SUM, self.algorithm, what=what)


class Cast16(Codec):
    """Codec that sends gradients as 16-bit floats, which halves the traffic compared with float32. The owner of each
    part adds up the contributions in float32 and in rank order.

    Each contribution is rounded once; the sum is rounded only in `all_reduce`. Within a host, nothing is sent: the
    owner reads the other ranks' gradients from shared memory and rounds them on the fly. If all ranks' parts have the
    same size, the send and receive buffers reuse the memory of the gradient.

    Parameters
    ----------
    name : the dtype, "bf16" or "float16"
    """

    elementwise = True

    def __init__(self, name: str) -> None:
        self.dtype = parse_dtype(name)
        if self.dtype.itemsize != 2:
            raise ConfigError(f"Cast16({name!r}): a 16-bit format is needed, float16 or bf16")

    def predict_transfers(self, counts: Sequence[int], rank: int, itemsize: int) -> Transfers:
        return super().predict_transfers(counts, rank, self.dtype.itemsize)

    def predict_all_reduce_transfers(self, size: int, width: int, rank: int, itemsize: int) -> Transfers:
        return super().predict_all_reduce_transfers(size, width, rank, self.dtype.itemsize)

    def reduce_scatter(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, counts=counts, what=what, wire=self.dtype)

    def all_reduce(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, what=what, wire=self.dtype)
