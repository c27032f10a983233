"""The functional API: collectives on arrays of any shape, over the default communicator.

Results are new arrays; the arguments stay as they are, unless `out` is one of them.
"""

from __future__ import annotations

import platform
from math import prod
from typing import Any, Literal, overload

import numpy as np

from fsdpx.comm import default as defaults
from fsdpx.comm.communicator import Array, Communicator, Handle, Pieces, ReduceOp, even_pieces, pieces
from fsdpx.comm.guarded import Guarded
from fsdpx.comm.opening import world
from fsdpx.errors import ConfigError, ShapeError

__all__ = [
    "Future",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "default",
    "finalize",
    "gather",
    "init",
    "is_initialized",
    "local_rank",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "world_size",
]


class Future:
    """What `async_op=True` returns: `wait()` returns the array, `test()` says whether it is there."""

    __slots__ = ("_handle", "_result")

    def __init__(self, handle: Handle, result: Any) -> None:
        self._handle, self._result = handle, result

    def test(self) -> bool:
        return self._handle.test()

    def wait(self) -> Any:
        self._handle.wait()
        return self._result


def init(
    backend: str | None = None, comm: Any = None, *, rank: int | None = None, size: int | None = None
) -> Communicator:
    """Open the default communicator and return it; again without arguments: the one that is open.

    With FSDPX_CHECK=1 every collective is compared over the ranks before it begins.

    Parameters
    ----------
    backend : {"node", "mpi", "local", "fake"}, optional
        As in `fsdpx.comm.world`; found out if it is left out.
    comm : mpi4py communicator or Communicator, optional
        Used instead of all ranks; an mpi4py communicator is duplicated.
    rank, size : int, optional
        Of a fake communicator.
    """
    existing = defaults.current()
    asked = (backend, comm, rank, size) != (None, None, None, None)
    if existing is not None and not asked:
        return existing.comm
    if existing is not None and existing.of_thread:
        raise ConfigError("a rank of spawn has its communicator already: call init() without arguments")
    if existing is not None:
        raise ConfigError("fsdpx is initialised already: call finalize() before init with other arguments")
    opened = _open(backend, comm, rank, size)
    defaults.put(opened)
    return opened.comm


def _open(backend: str | None, comm: Any, rank: int | None, size: int | None) -> defaults.Default:
    from fsdpx import environment

    base = world(backend, comm, rank=rank, size=size)
    made = () if base is comm else (base,)
    guarded = environment.read().check and base.size > 1
    final: Communicator = Guarded(base) if guarded else base
    hosts = base.all_gather_object(platform.node())
    return defaults.Default(final, hosts[: base.rank].count(hosts[base.rank]), (final, *made) if guarded else made)


def is_initialized() -> bool:
    """Whether there is a default communicator in this thread."""
    return defaults.current() is not None


def finalize() -> None:
    """Close the default communicator of this process, if `init` made it. Collective."""
    opened = defaults.current()
    if opened is not None and not opened.of_thread:
        defaults.put(None)
        for comm in opened.made:
            comm.close()


def default() -> Communicator:
    """The default communicator; `init()` is called if there is none."""
    return init()


def rank() -> int:
    """This rank's number among all ranks."""
    return default().rank


def world_size() -> int:
    """The number of all ranks."""
    return default().size


def local_rank() -> int:
    """This rank's number among the ranks on the same host."""
    default()
    opened = defaults.current()
    assert opened is not None
    return opened.local_rank


def barrier() -> None:
    """Return when every rank has called it."""
    default().barrier().wait()


@overload
def all_reduce(x: Any, op: ReduceOp | str = ..., out: Array = ..., async_op: Literal[False] = ...) -> Array: ...
@overload
def all_reduce(x: Any, op: ReduceOp | str = ..., out: Array = ..., *, async_op: Literal[True]) -> Future: ...
def all_reduce(x: Any, op: ReduceOp | str = ReduceOp.SUM, out: Array = None, async_op: bool = False) -> Array | Future:
    """Reduce `x` over all ranks, in the shape of `x`.

    Parameters
    ----------
    x : array_like
        Of the same shape and dtype on every rank.
    op : ReduceOp or str
        How values are combined, by default SUM.
    out : array, optional
        Takes the result; may be `x` itself. A new array otherwise.
    async_op : bool
        Return a `Future` at once.
    """
    x = _array(x)
    if out is None:
        out = x.copy()
    elif out is not x:
        _like("out", out, x)
        out[...] = x
    buf = _flat("out", out)
    future = Future(default().all_reduce(buf, ReduceOp.of(op)), out)
    return future if async_op else future.wait()


def all_gather(x: Any) -> Array:
    """Stack `x` of every rank on a new first dimension.

    Parameters
    ----------
    x : array_like
        Of the same shape and dtype on every rank.
    """
    x, comm = _array(x), default()
    out = _empty(x, (comm.size, *x.shape))
    comm.all_gather(_flattened(x), out.reshape(-1)).wait()
    return out


def reduce_scatter(x: Any, op: ReduceOp | str = ReduceOp.SUM) -> Array:
    """Reduce `x` over all ranks and return this rank's rows of the result, floor(n r/N) to floor(n (r+1)/N).

    Parameters
    ----------
    x : array_like
        n rows, of the same shape and dtype on every rank.
    op : ReduceOp or str
        How values are combined, by default SUM.
    """
    x, comm = _array(x), default()
    rows, cut = _rows("reduce_scatter", x, comm.size)
    out = _empty(x, (rows.counts[comm.rank], *x.shape[1:]))
    comm.reduce_scatter(_flattened(x), out.reshape(-1), ReduceOp.of(op), cut.counts).wait()
    return out


def broadcast(x: Any, root: int = 0) -> Array:
    """Return `x` of one rank on every rank.

    Parameters
    ----------
    x : array_like
        Of the same shape and dtype on every rank.
    root : int
        The rank whose `x` it is.
    """
    out = _array(x).copy()
    default().broadcast(_flat("x", out), root).wait()
    return out


def reduce(x: Any, op: ReduceOp | str = ReduceOp.SUM, root: int = 0) -> Array | None:
    """Reduce `x` over all ranks at one of them; None elsewhere.

    Parameters
    ----------
    x : array_like
        Of the same shape and dtype on every rank.
    op : ReduceOp or str
        How values are combined, by default SUM.
    root : int
        The rank that gets the result.
    """
    x, comm = _array(x), default()
    out = _empty(x, x.shape) if comm.rank == root else None
    comm.reduce(_flattened(x), None if out is None else out.reshape(-1), ReduceOp.of(op), root).wait()
    return out


def gather(x: Any, root: int = 0) -> Array | None:
    """Stack `x` of every rank on a new first dimension at one of them; None elsewhere.

    Parameters
    ----------
    x : array_like
        Of the same shape and dtype on every rank.
    root : int
        The rank that gets the result.
    """
    x, comm = _array(x), default()
    out = _empty(x, (comm.size, *x.shape)) if comm.rank == root else None
    comm.gather(_flattened(x), None if out is None else out.reshape(-1), root).wait()
    return out


def scatter(x: Any = None, root: int = 0) -> Array:
    """Cut `x` of one rank along its first dimension and return this rank's rows, balanced as in `reduce_scatter`.

    Parameters
    ----------
    x : array_like
        Needed at `root` only.
    root : int
        The rank whose `x` it is.
    """
    comm = default()
    x = _array(x) if comm.rank == root else None
    shape, dtype = comm.all_gather_object(None if x is None else (x.shape, x.dtype))[root]
    like = np.empty(0, dtype) if x is None else x
    if not shape:
        raise ShapeError("scatter: x has no dimension to cut")
    rows, width = even_pieces(shape[0], comm.size), prod(shape[1:])
    out = _empty(like, (rows.counts[comm.rank], *shape[1:]))
    counts = [count * width for count in rows.counts]
    comm.scatter(None if x is None else _flattened(x), out.reshape(-1), root, counts).wait()
    return out


def all_to_all(x: Any) -> Array:
    """Send row block r of `x` to rank r; row block r of the result came from there.

    Parameters
    ----------
    x : array_like
        Of the same shape and dtype on every rank; the number of ranks divides its first dimension.
    """
    x, comm = _array(x), default()
    if x.ndim == 0 or x.shape[0] % comm.size:
        raise ShapeError(f"all_to_all: the first dimension of shape {x.shape} is not a multiple of {comm.size} ranks")
    out = _empty(x, x.shape)
    comm.all_to_all(_flattened(x), out.reshape(-1)).wait()
    return out


def send(x: Any, dest: int, tag: int = 0) -> None:
    """Send `x` to another rank; return when `x` may be changed again.

    Parameters
    ----------
    x : array_like
        What is sent.
    dest : int
        The rank that receives it.
    tag : int
        The one that the receiver names, 0 to 16383.
    """
    default().send(_flattened(_array(x)), dest, tag).wait()


def recv(out: Array, source: int, tag: int = 0) -> Array:
    """Receive an array from another rank and return it.

    Parameters
    ----------
    out : array
        Takes what arrives, which must be of its size and dtype.
    source : int
        The rank that sends it.
    tag : int
        The one that the sender names.
    """
    default().recv(_flat("out", out), source, tag).wait()
    return out


def _array(x: Any) -> Array:
    return x if isinstance(x, np.ndarray) or hasattr(x, "__cuda_array_interface__") else np.asarray(x)


def _empty(like: Array, shape: tuple[int, ...]) -> Array:
    return np.empty_like(like, shape=shape, order="C")


def _flat(name: str, array: Array) -> Array:
    """The flat view of an array that is written to, which must therefore be contiguous."""
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name} is not contiguous: pass a contiguous array")
    return array.reshape(-1)


def _flattened(array: Array) -> Array:
    """The flat view of an array that is only read; a flat copy where there is no such view."""
    return array.reshape(-1)


def _like(name: str, array: Array, x: Array) -> None:
    if array.shape != x.shape or array.dtype != x.dtype:
        raise ShapeError(f"{name} is {array.dtype}{list(array.shape)}, but x is {x.dtype}{list(x.shape)}")


def _rows(verb: str, x: Array, size: int) -> tuple[Pieces, Pieces]:
    """The cut of dim 0, in rows and in elements."""
    if x.ndim == 0:
        raise ShapeError(f"{verb}: x has no dimension to cut")
    rows = even_pieces(x.shape[0], size)
    width = prod(x.shape[1:])
    return rows, pieces(tuple(count * width for count in rows.counts))
