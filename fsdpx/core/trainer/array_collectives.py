"""The functional API: collectives on arrays of any shape over the default communicator.

Functions return new arrays and do not modify their arguments, except that an argument `out` receives the result."""

from __future__ import annotations

from math import prod
from typing import Any, Literal, overload

import numpy as np

from fsdpx.core.array.devices import get_device_of_array
from fsdpx.core.comm import default_communicator as defaults
from fsdpx.core.comm.call_agreement import CallSignature, make_signature
from fsdpx.core.comm.calls import (
    AllCounts,
    Array,
    Arrays,
    Call,
    FlatPartition,
    Handle,
    ReduceOp,
    make_balanced_partition,
    make_partition_from_counts,
)
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import find_node_communicator, unwrap_message_backend
from fsdpx.core.comm.message_backend import MessageBackend
from fsdpx.core.comm.reduction import explain_undefined_reduction, get_dtype_kind, reduce_in_rank_order_into
from fsdpx.core.comm.watched import report_call_to_watchdog
from fsdpx.core.trainer.initialize import default_communicator
from fsdpx.errors import ConfigError, DesyncError, ShapeError

__all__ = [
    "Future", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
]  # fmt: skip


class Future:
    """Handle of an asynchronous collective (`async_op=True`). `wait()` returns the resulting array; `test()` returns
    whether the call is complete."""

    __slots__ = ("_handle", "_result")

    def __init__(self, handle: Handle, result: Any) -> None:
        self._handle, self._result = handle, result

    def test(self) -> bool:
        return self._handle.test()

    def wait(self) -> np.ndarray:
        self._handle.wait()
        return self._result


def barrier() -> None:
    """Wait until every rank has called `barrier`. Collective."""
    opened = _report_call_and_get_communicator("barrier")
    if opened.agreement is None:
        opened.comm.barrier().wait()
    else:
        # no barrier is needed, because comparing the calls already waits for all ranks
        _agree_on_signature(opened, make_signature("barrier"))


@overload
def all_reduce(x: Any, op: ReduceOp | str = ..., out: Array = ..., async_op: Literal[False] = ...) -> np.ndarray: ...
@overload
def all_reduce(x: Any, op: ReduceOp | str = ..., out: Array = ..., *, async_op: Literal[True]) -> Future: ...
def all_reduce(x: Any, op: ReduceOp | str = ReduceOp.SUM, out: Array = None, async_op: bool = False) -> Array | Future:
    """Reduce `x` over all ranks and return the result, in the shape of `x`. Collective.

    Parameters
    ----------
    x : array, of the same shape and dtype on every rank
    op : how values are combined: "sum", "avg", "max", "min", "prod", or a `ReduceOp`
    out : array that receives the result; may be `x` itself (default: a new array)
    async_op : if True, return a `Future` immediately

    Returns
    -------
    array or Future : `out` or a new array; with `async_op`, a `Future` for that array
    """
    if not isinstance(async_op, bool):
        raise ConfigError(f"all_reduce(async_op={async_op!r}): True or False is needed")
    x = _as_contiguous_array(x)
    opened, letters = _report_call_and_get_communicator("all_reduce"), None
    call = _make_call_signature("all_reduce", x, op)
    if not async_op:
        letters = _agree_on_signature(opened, call, x)
    how = ReduceOp.from_name(op)
    if letters is not None and out is None and explain_undefined_reduction(how, x.dtype) is None:
        out = np.empty(x.shape, x.dtype)
        reduce_in_rank_order_into(letters, how, (out.reshape(-1),))
        return out
    if out is None:
        out = x.copy()
    elif out is not x:
        if not (hasattr(out, "shape") and hasattr(out, "dtype")):
            raise ConfigError(f"all_reduce(out={out!r}): an array is needed")
        if out.shape != x.shape or out.dtype != x.dtype:
            raise ShapeError(f"out is {out.dtype}{list(out.shape)}, but x is {x.dtype}{list(x.shape)}")
        _view_output_as_flat_or_raise(out)[...] = x.reshape(-1)
    whole = Call("all_reduce", (_view_output_as_flat_or_raise(out),), how, shape=x.shape)
    if not async_op:
        opened.comm.issue(whole).wait()
        return out
    return Future(_start_async_call(opened, call, whole), out)


def all_gather(x: Any) -> np.ndarray:
    """Stack the `x` of all ranks along a new first dimension, and return the result on every rank. Collective.

    Parameters
    ----------
    x : array, of the same shape and dtype on every rank

    Returns
    -------
    array : shape (ranks, *x.shape), in rank order
    """
    x = _as_contiguous_array(x)
    comm = _agree_on_call_and_get_comm("all_gather", x)
    out = _empty_like(x, (comm.size, *x.shape))
    _run_collective_and_wait(comm, "all_gather", (x.reshape(-1), out.reshape(-1)), x, counts=(None,))
    return out


def reduce_scatter(x: Any, op: ReduceOp | str = ReduceOp.SUM) -> np.ndarray:
    """Reduce `x` over all ranks and return this rank's rows of the result. Collective.

    Parameters
    ----------
    x : array of n rows (dim 0), of the same shape and dtype on every rank
    op : how values are combined; see `all_reduce`

    Returns
    -------
    array : on rank r of N, the rows from floor(n r/N) up to, but not including, floor(n (r+1)/N)
    """
    x = _as_contiguous_array(x)
    comm = _agree_on_call_and_get_comm("reduce_scatter", x, op)
    rows, cut = _partition_rows_over_ranks("reduce_scatter", x.shape, comm.size)
    out = _empty_like(x, (rows.counts[comm.rank], *x.shape[1:]))
    _run_collective_and_wait(comm, "reduce_scatter", (x.reshape(-1), out.reshape(-1)), x, op, counts=(cut.counts,))
    return out


def broadcast(x: Any, root: int = 0) -> np.ndarray:
    """Send the `x` of rank `root` to all ranks and return it. Collective.

    Parameters
    ----------
    x : array, of the same shape and dtype on every rank; only the values on rank `root` are used
    root : rank that sends

    Returns
    -------
    array : a new array on every rank
    """
    x = _as_contiguous_array(x)
    comm, out = _agree_on_call_and_get_comm("broadcast", x, root=root), x.copy()
    _run_collective_and_wait(comm, "broadcast", (out.reshape(-1),), x, root=root)
    return out


def reduce(x: Any, op: ReduceOp | str = ReduceOp.SUM, root: int = 0) -> np.ndarray | None:
    """Reduce `x` over all ranks. Return the result on rank `root`, and None on all other ranks. Collective.

    Parameters
    ----------
    x : array, of the same shape and dtype on every rank
    op : how values are combined; see `all_reduce`
    root : rank that receives the result

    Returns
    -------
    array or None : shape of `x` on rank `root`
    """
    x = _as_contiguous_array(x)
    comm = _agree_on_call_and_get_comm("reduce", x, op, root)
    out = _empty_like(x, x.shape) if comm.rank == root else None
    _run_collective_and_wait(comm, "reduce", (x.reshape(-1), None if out is None else out.reshape(-1)), x, op, root)
    return out


def gather(x: Any, root: int = 0) -> np.ndarray | None:
    """Stack the `x` of all ranks along a new first dimension. Return the result on rank `root`, and None on all other
    ranks. Collective.

    Parameters
    ----------
    x : array, of the same shape and dtype on every rank
    root : rank that receives the result

    Returns
    -------
    array or None : shape (ranks, *x.shape), in rank order, on rank `root`
    """
    x = _as_contiguous_array(x)
    comm = _agree_on_call_and_get_comm("gather", x, root=root)
    out = _empty_like(x, (comm.size, *x.shape)) if comm.rank == root else None
    _run_collective_and_wait(
        comm, "gather", (x.reshape(-1), None if out is None else out.reshape(-1)), x, root=root, counts=(None,)
    )
    return out


def scatter(x: Any = None, root: int = 0) -> np.ndarray:
    """Split the `x` of rank `root` along its first dimension, and return this rank's rows. Collective.

    Parameters
    ----------
    x : array of n rows, needed on rank `root` only
    root : rank that sends

    Returns
    -------
    array : on rank r of N, the rows from floor(n r/N) up to, but not including, floor(n (r+1)/N)
    """
    comm = _agree_on_call_and_get_comm("scatter", root=root)
    x = _as_contiguous_array(x) if comm.rank == root else None
    given = comm.all_gather_value((root, None if x is None else (x.shape, x.dtype)))
    if any(other != root for other, _ in given):
        raise DesyncError(f"ranks called different collectives: scatter from root {[other for other, _ in given]}")
    shape, dtype = given[root][1]
    like = np.empty(0, dtype) if x is None else x
    rows, cut = _partition_rows_over_ranks("scatter", shape, comm.size)
    out = _empty_like(like, (rows.counts[comm.rank], *shape[1:]))
    comm.scatter(None if x is None else x.reshape(-1), out.reshape(-1), root, cut.counts).wait()
    return out


def all_to_all(x: Any) -> np.ndarray:
    """Split `x` into one block of rows per rank, send block r to rank r, and return the received blocks in rank order.
    Collective.

    Parameters
    ----------
    x : array, of the same shape and dtype on every rank; its first dimension must be divisible by the number of ranks

    Returns
    -------
    array : shape of `x`; row block r came from rank r

    Raises
    ------
    ShapeError : if the first dimension is not divisible by the number of ranks
    """
    x = _as_contiguous_array(x)
    comm = _agree_on_call_and_get_comm("all_to_all", x)
    if x.ndim == 0 or x.shape[0] % comm.size:
        raise ShapeError(f"all_to_all: the first dimension of shape {x.shape} is not a multiple of {comm.size} ranks")
    out = _empty_like(x, x.shape)
    _run_collective_and_wait(comm, "all_to_all", (x.reshape(-1), out.reshape(-1)), x, counts=(None, None))
    return out


def send(x: Any, dest: int, tag: int = 0) -> None:
    """Send `x` to rank `dest`. Return as soon as `x` may be overwritten, perhaps before the message arrives.

    Parameters
    ----------
    x : array
    dest : rank that receives the message with `recv`
    tag : number that identifies the message, 0 to 16383; the receiver must pass the same number
    """
    comm, x = default_communicator(), _as_contiguous_array(x).reshape(-1)
    if unwrap_message_backend(comm) is not None:
        comm.send(_make_message_header(x), dest, tag).wait()
    comm.send(x, dest, tag).wait()


def recv(out: Array, source: int, tag: int = 0) -> np.ndarray:
    """Receive an array from rank `source` into `out` and return `out`.

    Parameters
    ----------
    out : contiguous array, of the size and dtype of the message
    source : rank that sends the message with `send`
    tag : number that identifies the message, 0 to 16383; must be the number that the sender passes

    Returns
    -------
    array : `out`

    Raises
    ------
    DesyncError : if the message does not have the size and dtype of `out`; the message is then discarded
    """
    comm, into = default_communicator(), _view_output_as_flat_or_raise(out)
    get_dtype_kind(into.dtype)
    # check size and dtype here if ranks are processes; if they run as threads, the backend checks them
    if unwrap_message_backend(comm) is not None:
        head = np.empty(HEADER_BYTES, np.uint8)
        comm.recv(head, source, tag).wait()
        if head.tobytes() != _make_message_header(into).tobytes():
            name, size, itemsize = head.tobytes().decode().split()
            comm.recv(np.empty(int(size) * int(itemsize), np.uint8), source, tag).wait()
            here = f"{into.dtype.name}[{into.size}]"
            raise DesyncError(f"recv from rank {source}, tag {tag}: it sends {name}[{size}], out is {here}")
    comm.recv(into, source, tag).wait()
    return out


HEADER_BYTES = 32
"""Size in bytes of the header that precedes a message between two ranks. The header holds the dtype, the number of
elements, and the number of bytes per element."""


def _make_message_header(x: Array) -> Array:
    return np.frombuffer(f"{x.dtype.name} {x.size} {x.dtype.itemsize}".encode().ljust(HEADER_BYTES), np.uint8)


def _report_call_and_get_communicator(verb: str) -> defaults.DefaultCommunicator:
    """Tell the default communicator's watchdog that this rank is making the call `verb`, and return the
    communicator."""
    comm = default_communicator()
    report_call_to_watchdog(comm, verb)
    opened = defaults.get_default()
    assert opened is not None
    return opened


NO_ROOT: Any = object()
"""Default value of `root`, for collectives without a root. The default is not None, because a caller may pass None by
mistake."""


def _agree_on_call_and_get_comm(
    verb: str, x: Array = None, op: ReduceOp | str | None = None, root: int = NO_ROOT
) -> Communicator:
    """Return the default communicator once all ranks have confirmed that they make the same call with matching
    arguments. Otherwise raise the same error on every rank."""
    opened = _report_call_and_get_communicator(verb)
    _agree_on_signature(opened, _make_call_signature(verb, x, op, root))
    if root is not NO_ROOT and (isinstance(root, bool) or not isinstance(root, int | np.integer)):
        raise ConfigError(f"{verb}(root={root!r}): the number of a rank is needed")
    return opened.comm


def _agree_on_signature(
    opened: defaults.DefaultCommunicator, call: CallSignature, letter: Array = None
) -> list[Array] | None:
    if opened.agreement is None:
        return None
    return opened.agreement.agree_on_call(call, letter if type(letter) is np.ndarray else None)


def _start_async_call(opened: defaults.DefaultCommunicator, call: CallSignature, whole: Call) -> Handle:
    """Start an asynchronous collective. Use a separate communicator, because ranks may issue asynchronous collectives
    in different orders relative to other collectives. If an extension's backend provides no separate communicator,
    first compare the calls of all ranks, and then use the default communicator."""
    agreement = opened.agreement
    if agreement is None:
        return opened.comm.issue(whole)
    if not isinstance(opened.comm, MessageBackend) and find_node_communicator(opened.comm) is None:
        _agree_on_signature(opened, call)
        return opened.comm.issue(whole)
    return agreement.start_after_agreement(call, lambda: agreement.comm.issue(whole))


def _make_call_signature(verb: str, x: Array, op: ReduceOp | str | None = None, root: Any = NO_ROOT) -> CallSignature:
    name = op.name if isinstance(op, ReduceOp) else None if op is None else _get_op_name(op)
    # a root that is not an int is rejected later, after the ranks have compared their calls
    root = None if root is NO_ROOT else root if type(root) is int else repr(root)
    if x is None:
        return make_signature(verb, root=root)
    return make_signature(verb, x.dtype, x.shape, name, root)


def _get_op_name(op: str) -> str:
    try:
        return ReduceOp.from_name(op).name
    except ConfigError:  # an unknown operation is rejected later, after the ranks have compared their calls
        return repr(op)


def _run_collective_and_wait(
    comm: Communicator, verb: str, arrays: Arrays, x: Array, op: ReduceOp | str = ReduceOp.SUM, root: int = 0,
    counts: AllCounts = (),
) -> None:  # fmt: skip
    """Run a collective on flat arrays and wait for it. Error messages show the shape of `x`, the array that the user
    passed. See `Call` for `counts`."""
    comm.issue(Call(verb, arrays, ReduceOp.from_name(op), root, counts, shape=x.shape)).wait()


def _as_contiguous_array(x: Any) -> Array:
    """Return `x` as a contiguous array in native byte order. Copy it only if necessary."""
    x = get_device_of_array(x).as_array(x)
    if not x.dtype.isnative:
        return x.astype(x.dtype.newbyteorder("="), order="C")
    return x if x.flags.c_contiguous else x.copy(order="C")


def _empty_like(like: Array, shape: tuple[int, ...]) -> Array:
    return np.empty_like(like, shape=shape, order="C")


def _view_output_as_flat_or_raise(out: Array) -> Array:
    """Return a flat view of an output array. Raise ShapeError unless the array is contiguous, and ConfigError if it is
    read-only."""
    if not out.flags.c_contiguous:
        raise ShapeError("out is not contiguous: pass a contiguous array")
    if not getattr(out.flags, "writeable", True):  # arrays without this flag are always writable
        raise ConfigError("out is read-only: pass an array that can be written, such as out.copy()")
    return out.reshape(-1)


def _partition_rows_over_ranks(verb: str, shape: tuple[int, ...], size: int) -> tuple[FlatPartition, FlatPartition]:
    """Divide dim 0 of an array of this shape evenly among `size` ranks. Return two partitions: the number of rows of
    each rank, and the number of elements in these rows."""
    if not shape:
        raise ShapeError(f"{verb}: x has no dimension to split")
    rows, width = make_balanced_partition(shape[0], size), prod(shape[1:])
    return rows, make_partition_from_counts(tuple(count * width for count in rows.counts))
