"""The functional API: collectives on arrays of any shape, over the default communicator.

Results are new arrays; the arguments stay as they are, unless `out` is one of them."""

from __future__ import annotations

from math import prod
from typing import Any, Literal, overload

import numpy as np

from fsdpx.core.array.namespace import unmasked
from fsdpx.core.comm import default_communicator as defaults
from fsdpx.core.comm.call_agreement import Signature, signature
from fsdpx.core.comm.calls import AllCounts, Array, Arrays, Call, Handle, Pieces, ReduceOp, even_pieces, pieces
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import carrier_of, node_of
from fsdpx.core.comm.message_backend import Carrier
from fsdpx.core.comm.reduction import fold, kind_of, objection
from fsdpx.core.comm.watched import note
from fsdpx.core.trainer.initialize import default
from fsdpx.errors import ConfigError, DesyncError, ShapeError

__all__ = [
    "Future", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
]  # fmt: skip


class Future:
    """The result of a call with `async_op=True`: `wait()` returns the array, `test()` says whether it is there."""

    __slots__ = ("_handle", "_result")

    def __init__(self, handle: Handle, result: Any) -> None:
        self._handle, self._result = handle, result

    def test(self) -> bool:
        return self._handle.test()

    def wait(self) -> Any:
        self._handle.wait()
        return self._result


def barrier() -> None:
    """Return when every rank has called it."""
    opened = _opened("barrier")
    if opened.agreement is None:
        opened.comm.barrier().wait()
    else:
        _settle(opened, signature("barrier"))  # which all have come to when it is settled


@overload
def all_reduce(x: Any, op: ReduceOp | str = ..., out: Array = ..., async_op: Literal[False] = ...) -> Array: ...
@overload
def all_reduce(x: Any, op: ReduceOp | str = ..., out: Array = ..., *, async_op: Literal[True]) -> Future: ...
def all_reduce(x: Any, op: ReduceOp | str = ReduceOp.SUM, out: Array = None, async_op: bool = False) -> Array | Future:
    """Reduce `x`, of the same shape and dtype on every rank, over all ranks, in the shape of `x`.

    Parameters
    ----------
    op : how values are combined, "sum", "avg", "max", "min" or "prod".
    out : takes the result; may be `x` itself. A new array otherwise.
    async_op : return a `Future` at once.
    """
    if not isinstance(async_op, bool):
        raise ConfigError(f"all_reduce(async_op={async_op!r}): True or False is needed")
    x = _array(x)
    opened, call, letters = _opened("all_reduce"), _signature("all_reduce", x, op), None
    if not async_op:
        letters = _settle(opened, call, x)
    how = ReduceOp.of(op)
    if letters is not None and out is None and objection(how, x.dtype) is None:
        out = np.empty(x.shape, x.dtype)
        fold(letters, how, (out.reshape(-1),))
        return out
    if out is None:
        out = x.copy()
    elif out is not x:
        if not (hasattr(out, "shape") and hasattr(out, "dtype")):
            raise ConfigError(f"all_reduce(out={out!r}): an array is needed")
        if out.shape != x.shape or out.dtype != x.dtype:
            raise ShapeError(f"out is {out.dtype}{list(out.shape)}, but x is {x.dtype}{list(x.shape)}")
        _flat(out)[...] = x.reshape(-1)
    whole = Call("all_reduce", (_flat(out),), how, shape=x.shape)
    if not async_op:
        opened.comm.issue(whole).wait()
        return out
    return Future(_begun(opened, call, whole), out)


def all_gather(x: Any) -> Array:
    """Stack `x` of every rank, of the same shape and dtype everywhere, on a new first dimension."""
    x = _array(x)
    comm = _called("all_gather", x)
    out = _empty(x, (comm.size, *x.shape))
    _do(comm, "all_gather", (x.reshape(-1), out.reshape(-1)), x, counts=(None,))
    return out


def reduce_scatter(x: Any, op: ReduceOp | str = ReduceOp.SUM) -> Array:
    """Reduce `x`, n rows of the same shape and dtype on every rank, by `op`, a name as in `all_reduce` or a ReduceOp;
    return this rank's rows of the result, floor(n r/N) to floor(n (r+1)/N)."""
    x = _array(x)
    comm = _called("reduce_scatter", x, op)
    rows, cut = _rows("reduce_scatter", x.shape, comm.size)
    out = _empty(x, (rows.counts[comm.rank], *x.shape[1:]))
    _do(comm, "reduce_scatter", (x.reshape(-1), out.reshape(-1)), x, op, counts=(cut.counts,))
    return out


def broadcast(x: Any, root: int = 0) -> Array:
    """Return `x` of rank `root` on every rank; its shape and dtype are the same everywhere."""
    x = _array(x)
    comm, out = _called("broadcast", x, root=root), x.copy()
    _do(comm, "broadcast", (out.reshape(-1),), x, root=root)
    return out


def reduce(x: Any, op: ReduceOp | str = ReduceOp.SUM, root: int = 0) -> Array | None:
    """Reduce `x`, of the same shape and dtype on every rank, by `op` as in `all_reduce`, at rank `root`; None
    elsewhere."""
    x = _array(x)
    comm = _called("reduce", x, op, root)
    out = _empty(x, x.shape) if comm.rank == root else None
    _do(comm, "reduce", (x.reshape(-1), None if out is None else out.reshape(-1)), x, op, root)
    return out


def gather(x: Any, root: int = 0) -> Array | None:
    """Stack `x` of every rank, of the same shape and dtype everywhere, on a new first dimension at rank `root`; None
    elsewhere."""
    x = _array(x)
    comm = _called("gather", x, root=root)
    out = _empty(x, (comm.size, *x.shape)) if comm.rank == root else None
    _do(comm, "gather", (x.reshape(-1), None if out is None else out.reshape(-1)), x, root=root, counts=(None,))
    return out


def scatter(x: Any = None, root: int = 0) -> Array:
    """Cut `x` of rank `root`, needed there only, along its first dimension and return this rank's rows, balanced as in
    `reduce_scatter`."""
    comm = _called("scatter", root=root)
    x = _array(x) if comm.rank == root else None
    given = comm.all_gather_plain((root, None if x is None else (x.shape, x.dtype)))
    if any(other != root for other, _ in given):
        raise DesyncError(f"ranks called different collectives: scatter from root {[other for other, _ in given]}")
    shape, dtype = given[root][1]
    like = np.empty(0, dtype) if x is None else x
    rows, cut = _rows("scatter", shape, comm.size)
    out = _empty(like, (rows.counts[comm.rank], *shape[1:]))
    comm.scatter(None if x is None else x.reshape(-1), out.reshape(-1), root, cut.counts).wait()
    return out


def all_to_all(x: Any) -> Array:
    """Send row block r of `x` to rank r; row block r of the result came from there. `x` is of the same shape and dtype
    on every rank; the number of ranks divides its first dimension."""
    x = _array(x)
    comm = _called("all_to_all", x)
    if x.ndim == 0 or x.shape[0] % comm.size:
        raise ShapeError(f"all_to_all: the first dimension of shape {x.shape} is not a multiple of {comm.size} ranks")
    out = _empty(x, x.shape)
    _do(comm, "all_to_all", (x.reshape(-1), out.reshape(-1)), x, counts=(None, None))
    return out


def send(x: Any, dest: int, tag: int = 0) -> None:
    """Send `x` to rank `dest`, which names the same `tag`, 0 to 16383; return when `x` may be changed again."""
    comm, x = default(), _array(x).reshape(-1)
    if carrier_of(comm) is not None:
        comm.send(_header(x), dest, tag).wait()
    comm.send(x, dest, tag).wait()


def recv(out: Array, source: int, tag: int = 0) -> Array:
    """Receive an array from rank `source`, which names the same `tag`, into `out`, of its size and dtype; return it.
    DesyncError for a message of another size or dtype, which is then gone."""
    comm, into = default(), _flat(out)
    kind_of(into.dtype)
    if carrier_of(comm) is not None:  # thread ranks compare what they give each other
        head = np.empty(HEADER, np.uint8)
        comm.recv(head, source, tag).wait()
        if head.tobytes() != _header(into).tobytes():
            name, size, itemsize = head.tobytes().decode().split()
            comm.recv(np.empty(int(size) * int(itemsize), np.uint8), source, tag).wait()
            here = f"{into.dtype.name}[{into.size}]"
            raise DesyncError(f"recv from rank {source}, tag {tag}: it sends {name}[{size}], out is {here}")
    comm.recv(into, source, tag).wait()
    return out


HEADER = 32
"""Bytes before a message between two ranks: its dtype, number of elements, and bytes of each."""


def _header(x: Array) -> Array:
    return np.frombuffer(f"{x.dtype.name} {x.size} {x.dtype.itemsize}".encode().ljust(HEADER), np.uint8)


def _opened(verb: str) -> defaults.Default:
    """The default communicator, on which all ranks call this."""
    comm = default()
    note(comm, verb)
    opened = defaults.current()
    assert opened is not None
    return opened


NO_ROOT: Any = object()
"""Of calls that have no root; None is no number of a rank."""


def _called(verb: str, x: Array = None, op: ReduceOp | str | None = None, root: int = NO_ROOT) -> Communicator:
    """The default communicator, once all ranks have agreed that they make the same call: an error is then an error on
    every rank."""
    opened = _opened(verb)
    _settle(opened, _signature(verb, x, op, root))
    if root is not NO_ROOT and (isinstance(root, bool) or not isinstance(root, int | np.integer)):
        raise ConfigError(f"{verb}(root={root!r}): the number of a rank is needed")
    return opened.comm


def _settle(opened: defaults.Default, call: Signature, letter: Array = None) -> list[Array] | None:
    if opened.agreement is None:
        return None
    return opened.agreement.settle(call, letter if type(letter) is np.ndarray else None)


def _begun(opened: defaults.Default, call: Signature, whole: Call) -> Handle:
    """A call that goes on by itself: on a communicator of its own, for it may begin later here than elsewhere, amid
    other calls. NCCL has one alone: there ranks wait for each other first."""
    agreement = opened.agreement
    if agreement is None:
        return opened.comm.issue(whole)
    if not isinstance(opened.comm, Carrier) and node_of(opened.comm) is None:
        _settle(opened, call)
        return opened.comm.issue(whole)
    return agreement.after(call, lambda: agreement.comm.issue(whole))


def _signature(verb: str, x: Array, op: ReduceOp | str | None = None, root: Any = NO_ROOT) -> Signature:
    name = op.name if isinstance(op, ReduceOp) else None if op is None else _op_name(op)
    root = None if root is NO_ROOT else root if type(root) is int else repr(root)  # what is no number is said later
    if x is None:
        return signature(verb, root=root)
    return signature(verb, x.dtype, x.shape, name, root)


def _op_name(op: str) -> str:
    try:
        return ReduceOp.of(op).name
    except ConfigError:  # said when all ranks have come
        return repr(op)


def _do(
    comm: Communicator, verb: str, arrays: Arrays, x: Array, op: ReduceOp | str = ReduceOp.SUM, root: int = 0,
    counts: AllCounts = (),
) -> None:  # fmt: skip
    """Make a call on flat arrays for the user's array `x`."""
    comm.issue(Call(verb, arrays, ReduceOp.of(op), root, counts, shape=x.shape)).wait()


def _array(x: Any) -> Array:
    """`x` as an array whose flat view is contiguous, in the byte order of this machine."""
    x = x if type(x) is np.ndarray or hasattr(x, "__cuda_array_interface__") else unmasked(x)
    if not x.dtype.isnative:
        return x.astype(x.dtype.newbyteorder("="), order="C")
    return x if x.flags.c_contiguous else x.copy(order="C")


def _empty(like: Array, shape: tuple[int, ...]) -> Array:
    return np.empty_like(like, shape=shape, order="C")


def _flat(out: Array) -> Array:
    """The flat view of an array that is written to, which must therefore be contiguous."""
    if not out.flags.c_contiguous:
        raise ShapeError("out is not contiguous: pass a contiguous array")
    if not getattr(out.flags, "writeable", True):  # arrays of a GPU always are
        raise ConfigError("out is read-only: pass an array that can be written, such as out.copy()")
    return out.reshape(-1)


def _rows(verb: str, shape: tuple[int, ...], size: int) -> tuple[Pieces, Pieces]:
    """The cut of dim 0, in rows and in elements."""
    if not shape:
        raise ShapeError(f"{verb}: x has no dimension to cut")
    rows, width = even_pieces(shape[0], size), prod(shape[1:])
    return rows, pieces(tuple(count * width for count in rows.counts))
