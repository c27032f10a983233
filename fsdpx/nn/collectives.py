"""Differentiable collectives for layers. The functions come in pairs. Each function of a pair is the adjoint (backward
pass) of the other one.

A value on an axis of N ranks is in one of three states:

    replicated   every rank holds the same value, which counts once
    sharded      every rank holds a shard along one dim; the shards together are one value
    separate     every rank holds a different value

    function                from         to           forward          adjoint
    mark_separate           replicated   separate     nothing          all_reduce_sum
    all_reduce_sum          separate     replicated   all-reduce       mark_separate
    all_gather_dim          sharded      separate     all-gather       reduce_scatter_dim
    reduce_scatter_dim      separate     sharded      reduce-scatter   all_gather_dim
    take_shard              replicated   sharded      take a slice     all_gather_replicated
    all_gather_replicated   sharded      replicated   all-gather       take_shard
    all_to_all_dims         sharded      sharded      all-to-all       itself, dims swapped
    all_to_all_rows         separate     separate     all-to-all       itself, counts swapped

Each pair satisfies <F x, y> = <x, F* y>, where replicated values count once in the inner product, and other values are
summed over the ranks. For an array of n bytes, each rank sends 2n(N-1)/N bytes in an all-reduce, n(N-1)/N in an
all-gather or a reduce-scatter, and n(N-1)/N^2 in all_to_all_dims. In all_to_all_rows, each rank sends only the rows
that other ranks receive. On an axis of size 1, nothing is communicated or copied."""

import builtins
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fsdpx.errors import ShapeError
from fsdpx.nn.layer import AxisRanks, Pending
from fsdpx.nn.shard_specs import shard_bounds

__all__ = [
    "PendingCollective", "all_gather_dim", "all_gather_replicated", "all_reduce_sum", "all_to_all_dims",
    "all_to_all_rows", "mark_separate", "reduce_scatter_dim", "require_divisible_dim", "slice_dim",
    "start_all_gather_dim", "start_all_reduce_sum", "start_reduce_scatter_dim", "take_shard",
]  # fmt: skip

Array = Any
Shape = tuple[int, ...]


class PendingCollective:
    """A collective in progress; `wait()` returns its result. The object holds a reference to `sent`, the send buffer,
    because the buffer must stay alive until `wait` has returned."""

    __slots__ = ("_finish", "_handle", "_sent")

    def __init__(self, handle: Pending | None, finish: Any, sent: Array = None) -> None:
        self._handle, self._finish, self._sent = handle, finish, sent

    def wait(self) -> Array:
        if self._handle is not None:
            self._handle.wait()
        return self._finish()


def mark_separate(xp: Any, comm: AxisRanks, x: Array) -> Array:
    """Return the replicated `x` unchanged. Call this function before the ranks use the same `x` in different
    computations. Each rank then gets a different gradient of `x`, and the adjoint, `all_reduce_sum`, sums these
    gradients."""
    return x


def all_reduce_sum(xp: Any, comm: AxisRanks, x: Array, *, fresh: bool = False, what: str = "") -> Array:
    """Return the sum of `x` over the ranks, on every rank. If `fresh` is true, the sum may overwrite `x`. `what` names
    the call in error messages. Collective."""
    return start_all_reduce_sum(xp, comm, x, fresh=fresh, what=what).wait()


def start_all_reduce_sum(
    xp: Any, comm: AxisRanks, x: Array, *, fresh: bool = False, what: str = ""
) -> PendingCollective:
    """Like `all_reduce_sum`, but return a handle without waiting for the result. Collective."""
    if comm.size == 1:
        return PendingCollective(None, lambda: x)
    flat = _flatten_contiguous(xp, x)
    if not fresh:
        flat = flat.copy()
    return PendingCollective(comm.all_reduce(flat, what=what), lambda: flat.reshape(x.shape))


def all_gather_dim(xp: Any, comm: AxisRanks, x: Array, dim: int, total: int | None = None, *, what: str = "") -> Array:
    """Return the shards of all ranks concatenated along `dim`. `total` is the size of the full dim. If `total` is None,
    all shards have equal sizes. `what` names the call in error messages. Collective."""
    return start_all_gather_dim(xp, comm, x, dim, total, what=what).wait()


def start_all_gather_dim(
    xp: Any, comm: AxisRanks, x: Array, dim: int, total: int | None = None, *, what: str = ""
) -> PendingCollective:
    """Like `all_gather_dim`, but return a handle without waiting for the result. Collective."""
    if comm.size == 1:
        return PendingCollective(None, lambda: x)
    dim = dim % x.ndim
    shapes = _list_part_shapes(x.shape, dim, x.shape[dim] * comm.size if total is None else total, comm)
    assert tuple(x.shape) == shapes[comm.rank], f"{what}: a part of shape {tuple(x.shape)}, not {shapes[comm.rank]}"
    counts = [math.prod(shape) for shape in shapes]
    sent, flat = _flatten_contiguous(xp, x), xp.empty((builtins.sum(counts),), dtype=x.dtype)
    handle = comm.all_gather(sent, flat, counts, what=what)
    return PendingCollective(handle, lambda: _join_flattened_parts(xp, flat, shapes, dim), sent)


def reduce_scatter_dim(xp: Any, comm: AxisRanks, x: Array, dim: int, *, what: str = "") -> Array:
    """Sum `x` over the ranks, and return this rank's shard of the sum along `dim`. `what` names the call in error
    messages. Collective."""
    return start_reduce_scatter_dim(xp, comm, x, dim, what=what).wait()


def start_reduce_scatter_dim(xp: Any, comm: AxisRanks, x: Array, dim: int, *, what: str = "") -> PendingCollective:
    """Like `reduce_scatter_dim`, but return a handle without waiting for the result. Collective."""
    if comm.size == 1:
        return PendingCollective(None, lambda: x)
    dim = dim % x.ndim
    shapes = _list_part_shapes(x.shape, dim, x.shape[dim], comm)
    counts = [math.prod(shape) for shape in shapes]
    sent, own_part = _split_and_flatten_parts(xp, x, shapes, dim), xp.empty((counts[comm.rank],), dtype=x.dtype)
    handle = comm.reduce_scatter(sent, own_part, counts=counts, what=what)
    return PendingCollective(handle, lambda: own_part.reshape(shapes[comm.rank]), sent)


def take_shard(xp: Any, comm: AxisRanks, x: Array, dim: int) -> Array:
    """Return a view of this rank's shard of the replicated `x` along `dim`."""
    return slice_dim(x, dim, *shard_bounds(x.shape[dim], comm.rank, comm.size))


def all_gather_replicated(
    xp: Any, comm: AxisRanks, x: Array, dim: int, total: int | None = None, *, what: str = ""
) -> Array:
    """Return the shards of all ranks concatenated along `dim`. Every rank must use the result in the same computation.
    Collective.

    Because all ranks do the same computation with the result, they get equal gradients of it. Therefore, the adjoint is
    `take_shard`, which communicates nothing. The arguments are the same as for `all_gather_dim`."""
    return all_gather_dim(xp, comm, x, dim, total, what=what)


def all_to_all_dims(
    xp: Any, comm: AxisRanks, x: Array, split: int, merge: int, total: int | None = None, *, what: str = ""
) -> Array:
    """Redistribute a value from shards along the dim `merge` to shards along the dim `split`. Collective.

    `total` is the size of the full dim `merge`. If `total` is None, all shards have equal sizes. `what` names the call
    in error messages. The adjoint swaps `split` and `merge`."""
    if comm.size == 1:
        return x
    split, merge = split % x.ndim, merge % x.ndim
    out = _list_part_shapes(x.shape, split, x.shape[split], comm)
    whole = x.shape[merge] * comm.size if total is None else total
    into = _list_part_shapes(out[comm.rank], merge, whole, comm)
    counts, received = ([math.prod(shape) for shape in shapes] for shapes in (out, into))
    sent, flat = _split_and_flatten_parts(xp, x, out, split), xp.empty((builtins.sum(received),), dtype=x.dtype)
    comm.all_to_all(sent, flat, counts, received, what=what).wait()
    return _join_flattened_parts(xp, flat, into, merge)


def all_to_all_rows(
    xp: Any, comm: AxisRanks, x: Array, send_counts: Sequence[int], recv_counts: Sequence[int], *, what: str = ""
) -> Array:
    """Send the rows of `x`, ordered by destination rank, and return the received rows, ordered by source rank.
    Collective.

    `send_counts` and `recv_counts` are the numbers of rows to send to each rank and to receive from each rank. The
    adjoint swaps these two arguments. `what` names the call in error messages."""
    if comm.size == 1:
        return x
    row = math.prod(x.shape[1:])
    y = xp.empty((builtins.sum(recv_counts), *x.shape[1:]), dtype=x.dtype)
    counts = [n * row for n in send_counts], [n * row for n in recv_counts]
    comm.all_to_all(_flatten_contiguous(xp, x), y.reshape(-1), *counts, what=what).wait()
    return y


def slice_dim(x: Array, dim: int, start: int, stop: int) -> Array:
    """Return a view of the elements [start, stop) along `dim`."""
    return x[(*(slice(None),) * (dim % x.ndim), slice(start, stop))]


def require_divisible_dim(shape: Sequence[int], dim: int, size: int, what: str = "") -> None:
    """Raise ShapeError unless the size of the dim is a multiple of `size`, the number of ranks. The message begins with
    `what`, the name of the call."""
    if shape[dim] % size:
        raise ShapeError(
            f"{f'{what}: ' if what else ''}dim {dim} of an array of shape {tuple(shape)} is {shape[dim]}, which is not "
            f"a multiple of the {size} ranks it is cut over, as it must be where inputs differ in length: fill it up, "
            "give all inputs one length, or use mesh tensor=1"
        )


def _list_part_shapes(shape: Sequence[int], dim: int, total: int, comm: AxisRanks) -> list[Shape]:
    """Return the shape of each rank's shard if `total` elements along `dim` are sharded over the ranks of `comm`."""
    shapes = []
    for rank in range(comm.size):
        start, stop = shard_bounds(total, rank, comm.size)
        shapes.append((*shape[:dim], stop - start, *shape[dim + 1 :]))
    return shapes


def _split_and_flatten_parts(xp: Any, x: Array, shapes: Sequence[Shape], dim: int) -> Array:
    """Split `x` along `dim` into parts of the given shapes, flatten the parts, and return them concatenated in a 1-D
    buffer. If all dims before `dim` have size 1, and `x` is contiguous, return a view."""
    if math.prod(x.shape[:dim]) == 1:
        return _flatten_contiguous(xp, x)
    flat = xp.empty((x.size,), dtype=x.dtype)
    for own_array, flat_part in _iterate_parts_with_buffer_views(x, flat, shapes, dim):
        flat_part[...] = own_array
    return flat


def _join_flattened_parts(xp: Any, flat: Array, shapes: Sequence[Shape], dim: int) -> Array:
    """Invert `_split_and_flatten_parts`: return the array whose flattened parts along `dim` are concatenated in the 1-D
    buffer `flat`."""
    first = shapes[0]
    whole = (*first[:dim], builtins.sum(shape[dim] for shape in shapes), *first[dim + 1 :])
    if math.prod(first[:dim]) == 1:
        return flat.reshape(whole)
    y = xp.empty(whole, dtype=flat.dtype)
    for own_array, flat_part in _iterate_parts_with_buffer_views(y, flat, shapes, dim):
        own_array[...] = flat_part
    return y


def _iterate_parts_with_buffer_views(
    x: Array, flat: Array, shapes: Sequence[Shape], dim: int
) -> Iterator[tuple[Array, Array]]:
    """Yield two views of equal shape for each part of `x` along `dim`: the part itself, and the part's range in the 1-D
    buffer `flat`."""
    offset = start = 0
    for shape in shapes:
        size = math.prod(shape)
        yield slice_dim(x, dim, start, start + shape[dim]), flat[offset : offset + size].reshape(shape)
        offset, start = offset + size, start + shape[dim]


def _flatten_contiguous(xp: Any, x: Array) -> Array:
    return xp.ascontiguousarray(x).reshape(-1)
