"""Are the arguments of a call good? Asked before anything is sent, so that a bad call never hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from fsdpx.comm.calls import Array, Call, Counts, Pieces, ReduceOp, even_pieces, pieces
from fsdpx.comm.reduction import is_half, kind_of, objection
from fsdpx.cuda.devices import gpu_of, where
from fsdpx.errors import ConfigError, ShapeError

__all__ = [
    "TAGS", "Ranks", "address", "at_root", "complain", "copy", "flat", "group", "one_each", "operation", "overlay",
    "peer", "piece", "pieces_of", "same_device", "same_dtype", "tag_in_range",
]  # fmt: skip

USUAL = frozenset("dfDFbhilqBHILQ?")
"""dtype.char of what communicators move, but for 16-bit floats."""
TAGS = 16384
"""User tags are below this, the library's own at or above it; MPI guarantees 32767."""
ALGORITHMS = ("library", "ring")


class Ranks(Protocol):
    """The part of a communicator that a check needs."""

    rank: int
    size: int


def complain(kind: type[ConfigError], comm: Ranks, call: Call, message: str) -> NoReturn:
    """Raise `kind` with the words every communication error starts with."""
    raise kind(f"{call.name} on rank {comm.rank}: {message}")


def flat(comm: Ranks, call: Call, name: str, array: Array) -> None:
    """`array` is one-dimensional, contiguous and of a dtype that communicators move."""
    if type(array) is np.ndarray and array.ndim == 1 and array.flags.c_contiguous:
        dtype = array.dtype
        if dtype.char in USUAL and dtype.isnative:  # the same answer as below, sooner
            return
    if getattr(array, "ndim", None) != 1:
        shape = getattr(array, "shape", type(array).__name__)
        complain(ShapeError, comm, call, f"{name} must be a flat array (1-D), not {shape}: use array.reshape(-1)")
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.c_contiguous:
        complain(ShapeError, comm, call, f"{name} is not contiguous: communicate a contiguous copy")
    try:
        kind_of(array.dtype)
    except ConfigError as error:
        complain(ConfigError, comm, call, f"{name}: {error}")


def same_dtype(comm: Ranks, call: Call, send: Array, recv: Array) -> None:
    if send.dtype != recv.dtype:
        complain(ConfigError, comm, call, f"send is {send.dtype}, recv is {recv.dtype}: they must be the same")


def same_device(comm: Ranks, call: Call, send: Array, recv: Array) -> None:
    """Both on the host, or both on one GPU."""
    if type(send) is type(recv) is np.ndarray:  # the same answer as below, sooner
        return
    if gpu_of(send) != gpu_of(recv):
        complain(ConfigError, comm, call, f"send lies {where(send)}, recv {where(recv)}: put both on one device")


def pieces_of(comm: Ranks, call: Call, name: str, array: Array, counts: Counts) -> Pieces:
    """The cut of `array` over the ranks, by `counts` or balanced."""
    n = array.size
    if counts is None:
        return even_pieces(n, comm.size)
    found = pieces(counts)
    one_each(comm, call, counts)
    if min(counts) < 0:
        complain(ShapeError, comm, call, f"a count is negative: {list(counts)}")
    if found.total != n:
        complain(ShapeError, comm, call, f"counts add up to {found.total}, but {name} has {n} elements")
    return found


def one_each(comm: Ranks, call: Call, counts: tuple[int, ...]) -> None:
    """There is a count for each rank."""
    if len(counts) != comm.size:
        complain(ShapeError, comm, call, f"{len(counts)} counts for {comm.size} ranks")


def piece(comm: Ranks, call: Call, name: str, array: Array, count: int) -> None:
    """`array` has exactly the elements of this rank."""
    if array.size != count:
        complain(ShapeError, comm, call, f"{name} has {array.size} elements, but {count} belong to this rank")


def operation(comm: Ranks, call: Call) -> None:
    """The operation exists and has a meaning for the dtype, and the algorithm can do it."""
    dtype = call.arrays[0].dtype
    call.op = ReduceOp.of(call.op)
    why_not = objection(call.op, dtype)
    if why_not is not None:
        complain(ConfigError, comm, call, why_not)
    if call.algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        complain(ConfigError, comm, call, f"unknown algorithm {call.algorithm!r}: use one of {known}")
    if call.algorithm == "ring" and is_half(dtype):
        complain(ConfigError, comm, call, f"a ring does not add {dtype} in rank order: use algorithm='library'")
    if call.wire is not None:
        _on_a_wire(comm, call, dtype)


def _on_a_wire(comm: Ranks, call: Call, dtype: Any) -> None:
    """The format asked for in `call.wire` is available; from here on it is a dtype."""
    call.wire = np.dtype(call.wire)
    if kind_of(dtype) != "float" or not is_half(call.wire):
        complain(ConfigError, comm, call, f"wire={call.wire.name} for {dtype}: float32 or float64 in a 16-bit format")
    if call.op is not ReduceOp.SUM or call.algorithm != "library":
        way = f"{call.op.name} by {call.algorithm!r}"
        complain(ConfigError, comm, call, f"wire={call.wire.name} with {way}: use SUM, algorithm='library'")


def tag_in_range(comm: Ranks, call: Call) -> None:
    """The tag is one that users may take."""
    if not 0 <= call.tag < TAGS:
        complain(ConfigError, comm, call, f"tag={call.tag} is out of range: 0 <= tag < {TAGS}")


def peer(comm: Ranks, call: Call, name: str, other: int) -> None:
    """`other` is a rank of this communicator."""
    if not 0 <= other < comm.size:
        complain(ConfigError, comm, call, f"{name}={other} is not a rank: there are ranks 0 to {comm.size - 1}")


def at_root(comm: Ranks, call: Call, name: str, array: Array) -> None:
    """Only root needs this array, and must have it."""
    if array is None:
        complain(ShapeError, comm, call, f"this rank is root and needs an array for {name}")
    flat(comm, call, name, array)


def group(comm: Ranks, ranks: Sequence[int]) -> None:
    """`ranks` can be a subgroup with this rank in it."""
    call = Call("subgroup")
    for other in ranks:
        peer(comm, call, "ranks", other)
    if comm.rank not in ranks or len(set(ranks)) != len(ranks):
        complain(ConfigError, comm, call, f"ranks={list(ranks)} must name this rank, and no rank twice")


def address(array: Array) -> int:
    """Where the first element lies in memory; for arrays without memory, which object it is."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface["data"][0] if interface else id(array)


def overlay(a: Array, b: Array) -> bool:
    """Whether both are views that start at the same element: how in-place calls are recognised."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size and b.size:
        return a is b or (np.may_share_memory(a, b) and address(a) == address(b))  # the first is fast
    return a is b or address(a) == address(b)


def copy(target: Array, source: Array) -> None:
    """target = source, unless they are the same memory already."""
    if not overlay(target, source):
        target[...] = source
