"""Are the arguments of a verb good? Asked before anything is sent, so that a bad call never hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np

from fsdpx.comm.communicator import Array, Pieces, ReduceOp, even_pieces, pieces
from fsdpx.comm.reduction import kind_of, objection
from fsdpx.errors import ConfigError, ShapeError

__all__ = [
    "TAGS",
    "address",
    "at_root",
    "complain",
    "cut",
    "flat",
    "group",
    "operation",
    "overlay",
    "peer",
    "piece",
    "pieces_of",
    "rooted",
    "same_dtype",
    "tag_in_range",
]

Counts = Sequence[int] | None

USUAL = frozenset("dfilqBLQ?")
"""dtype.char of what communicators move, but for 16-bit floats."""
TAGS = 16384
"""User tags are below this, the library's own at or above it; MPI guarantees 32767."""


def complain(kind: type[ConfigError], verb: str, rank: int, what: str, message: str) -> NoReturn:
    """Raise `kind` with the words every communication error starts with."""
    raise kind(f"{verb}{f' of {what}' if what else ''} on rank {rank}: {message}")


def flat(verb: str, rank: int, what: str, name: str, array: Array) -> None:
    """`array` is one-dimensional, contiguous and of a dtype that communicators move."""
    if type(array) is np.ndarray and array.ndim == 1 and array.flags.c_contiguous:
        dtype = array.dtype
        if dtype.char in USUAL and dtype.isnative:  # the same answer as below, sooner
            return
    if getattr(array, "ndim", None) != 1:
        shape = getattr(array, "shape", type(array).__name__)
        complain(
            ShapeError,
            verb,
            rank,
            what,
            f"{name} must be a flat array (1-D), not {shape}: use array.reshape(-1)",
        )
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.c_contiguous:
        complain(ShapeError, verb, rank, what, f"{name} is not contiguous: communicate a contiguous copy")
    try:
        kind_of(array.dtype)
    except ConfigError as error:
        complain(ConfigError, verb, rank, what, f"{name}: {error}")


def same_dtype(verb: str, rank: int, what: str, send: Array, recv: Array) -> None:
    """Both arrays hold the same type."""
    if send.dtype != recv.dtype:
        complain(
            ConfigError,
            verb,
            rank,
            what,
            f"send is {send.dtype}, recv is {recv.dtype}: they must be the same",
        )


def pieces_of(verb: str, rank: int, size: int, what: str, name: str, array: Array, counts: Counts) -> Pieces:
    """The cut of `array` over the ranks, by `counts` or balanced."""
    n = array.size
    if counts is None:
        return even_pieces(n, size)
    found = pieces(tuple(counts))
    if len(found.counts) != size:
        complain(ShapeError, verb, rank, what, f"{len(found.counts)} counts for {size} ranks")
    if min(found.counts) < 0:
        complain(ShapeError, verb, rank, what, f"a count is negative: {list(found.counts)}")
    if found.total != n:
        complain(ShapeError, verb, rank, what, f"counts add up to {found.total}, but {name} has {n} elements")
    return found


def piece(verb: str, rank: int, what: str, name: str, array: Array, count: int) -> None:
    """`array` has exactly the elements of this rank."""
    if array.size != count:
        message = f"{name} has {array.size} elements, but {count} belong to this rank"
        complain(ShapeError, verb, rank, what, message)


def operation(verb: str, rank: int, what: str, op: ReduceOp | str, dtype: np.dtype) -> ReduceOp:
    """The reduce operation meant by `op`, if it has a meaning for `dtype`."""
    op = ReduceOp.of(op)
    why_not = objection(op, dtype)
    if why_not is not None:
        complain(ConfigError, verb, rank, what, why_not)
    return op


def peer(verb: str, rank: int, size: int, what: str, name: str, other: int) -> None:
    """`other` is a rank of this communicator."""
    if not 0 <= other < size:
        complain(ConfigError, verb, rank, what, f"{name}={other} is not a rank: there are ranks 0 to {size - 1}")


def tag_in_range(verb: str, rank: int, what: str, tag: int) -> None:
    """`tag` is one that users may take."""
    if not 0 <= tag < TAGS:
        complain(ConfigError, verb, rank, what, f"tag={tag} is out of range: 0 <= tag < {TAGS}")


class Sized(Protocol):
    """A communicator, as far as a check looks."""

    rank: int
    size: int


def cut(verb: str, comm: Sized, what: str, full: str, whole: Array, own: str, part: Array, counts: Counts) -> Pieces:
    """How the array named `full` is cut, after both arrays and `counts` are found good."""
    rank = comm.rank
    flat(verb, rank, what, own, part)
    flat(verb, rank, what, full, whole)
    same_dtype(verb, rank, what, part, whole)
    found = pieces_of(verb, rank, comm.size, what, full, whole, counts)
    piece(verb, rank, what, own, part, found.counts[rank])
    return found


def rooted(
    verb: str,
    comm: Sized,
    what: str,
    full: str,
    whole: Array,
    own: str,
    part: Array,
    root: int,
    counts: Counts,
) -> Pieces | None:
    """The same where only `root` has the whole; None elsewhere."""
    rank = comm.rank
    peer(verb, rank, comm.size, what, "root", root)
    if rank == root:
        return cut(verb, comm, what, full, at_root(verb, rank, what, full, whole), own, part, counts)
    flat(verb, rank, what, own, part)
    if counts is not None:
        if len(counts) != comm.size:
            complain(ShapeError, verb, rank, what, f"{len(counts)} counts for {comm.size} ranks")
        piece(verb, rank, what, own, part, counts[rank])
    return None


def at_root(verb: str, rank: int, what: str, name: str, array: Array) -> Array:
    """The array that only root needs, and must have."""
    if array is None:
        complain(ShapeError, verb, rank, what, f"this rank is root and needs an array for {name}")
    flat(verb, rank, what, name, array)
    return array


def group(comm: Sized, ranks: Sequence[int]) -> None:
    """`ranks` can be a subgroup with this rank in it."""
    for other in ranks:
        peer("subgroup", comm.rank, comm.size, "", "ranks", other)
    if comm.rank not in ranks or len(set(ranks)) != len(ranks):
        message = f"ranks={list(ranks)} must name this rank, and no rank twice"
        complain(ConfigError, "subgroup", comm.rank, "", message)


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
