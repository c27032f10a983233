"""Halo exchange of a partitioned field, in the forward and backward passes, overlapped with computation on the rank's
own cells.

A layer can take the halo as separate slabs, which are blocks of cells next to the rank's part. This avoids a copy of
the part. Alternatively, a layer can take a single array that contains both the part and its halo."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.ext.fields.halo import HaloSpec, get_rank_along
from fsdpx.ext.fields.halo_plan import HaloLine, HaloPlan, OwnCells, find_overlap_slices, make_halo_plan, slice_dim
from fsdpx.nn.layer import Array, Layer, LayerContext, Params
from fsdpx.nn.shard_specs import FieldPartition

__all__ = [
    "HaloBox",
    "HaloSlabs",
    "RepartitionField",
    "exchange_halo",
    "exchange_halo_backward",
    "exchange_slab_gradients",
]

HALO, HALO_GRADIENT = 2, 3
"""Tags of messages with halo cells, and of messages with their gradients."""


class HaloBox(NamedTuple):
    """A block of cells. `offset` is the position of its first cell in the array of own cells and halo, along each cell
    dim."""

    offset: tuple[int, ...]
    cells: Array


def _get_halo_plan(env: LayerContext, halos: Sequence[HaloSpec], shape: Sequence[int]) -> HaloPlan:
    """Return the cached plan of this rank's halo exchange for a part with this `shape`."""
    return make_halo_plan(env.xp, tuple(halos), tuple(shape), tuple([line.rank for line in env.mesh.domain]))


def _intersect_box(offset: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[slice, ...], ...]:
    """Find the overlap of a box and the array that contains the own cells and the halo. The box has position `offset`
    and shape `shape`; the array has shape `sizes`. Return the index of the overlap in the array, and its index in the
    box."""
    rows = [find_overlap_slices(*row) for row in zip(offset, shape[2:], sizes[2:], strict=True)]
    return tuple((slice(None), slice(None), *one) for one in zip(*rows, strict=True))


class HaloSlabs:
    """A halo exchange in progress. The constructor starts to send and receive along the first dim.

    Attributes
    ----------
    plan : plan of the exchange
    boxes : this rank's own cells, followed by the slabs of halo cells received so far
    """

    def __init__(self, env: LayerContext, x: Array, halos: Sequence[HaloSpec], padding_value: float = 0.0) -> None:
        self._env, self._padding_value, self._done = env, padding_value, 0
        self.plan = _get_halo_plan(env, halos, x.shape)
        self.boxes = [HaloBox(self.plan.offset, x)]
        self._begun = self._start_next_exchange()

    def wait_for_slabs(self) -> list[HaloBox]:
        """Finish the exchange along all dims, and return the slabs of halo cells."""
        while self._begun is not None:
            self._finish_exchange(*self._begun)
            self._begun = self._start_next_exchange()
        return self.boxes[1:]

    def _start_next_exchange(self) -> Any:
        """Start sending and receiving along the next dim. Return (slabs, receives, sends), or None if all dims are
        done."""
        if self._done == len(self.plan.lines):
            return None
        line, what = self.plan.lines[self._done], self._env.random.path
        slabs = [HaloBox(offset, self._make_buffer(shape)[1]) for offset, shape in line.slabs]
        arriving, leaving = [], []
        for one in line.arriving:
            flat, cells = self._make_buffer(one.shape)
            handle = self._env.mesh.domain[line.dim - 2].recv(flat, one.rank, HALO, what=what)
            arriving.append((handle, cells, one.parts))
        for message in line.leaving:
            flat, cells = self._make_buffer(message.shape)
            self._copy_to_message(cells, message.cells)
            leaving.append(self._env.mesh.domain[line.dim - 2].send(flat, message.rank, HALO, what=what))
        for number, own in line.own:
            self._copy_to_message(slabs[number].cells, own)
        return slabs, arriving, leaving

    def _finish_exchange(self, slabs: list[HaloBox], arriving: list[Any], leaving: list[Any]) -> None:
        for handle, cells, parts in arriving:
            handle.wait()
            for number, into, which in parts:
                slabs[number].cells[into] = cells[which]
        for handle in leaving:
            handle.wait()
        self.boxes += slabs
        self._done += 1

    def _make_buffer(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        flat, cells = _make_message_buffer(self._env.xp, shape, self.boxes[0].cells.dtype)
        if self._done:
            # set corner cells beyond the ends of the field, which no message contains
            flat[...] = self._padding_value
        return flat, cells

    def _copy_to_message(self, message: Array, own: OwnCells) -> None:
        """Copy the local cells that `own` lists into a message or slab."""
        for number, there, here in own.copies:
            message[there] = self.boxes[number].cells[here]


def exchange_slab_gradients(
    env: LayerContext, halos: Sequence[HaloSpec], boxes: list[HaloBox], compute_own: Callable[[], Array]
) -> Array:
    """Send the gradients of halo cells to the owners of these cells, and return the gradient of this rank's part.

    `boxes` holds the box of own cells, followed by boxes with the gradients of all slabs. `compute_own` is called while
    messages are in flight, and must return the gradient of own cells. Received gradients are added to it in rank
    order."""
    lines, found, boxes = _get_halo_plan(env, halos, boxes[0].cells.shape).lines, None, list(boxes)
    for line in reversed(lines):
        kept = len(boxes) - len(line.slabs)
        slabs, boxes = [box.cells for box in boxes[kept:]], boxes[:kept]
        arriving, leaving = _start_gradient_exchange(env, line, boxes[0].cells.dtype, slabs)
        if found is None:
            found = compute_own()
            boxes[0] = HaloBox(boxes[0].offset, found)
        for number, cells in line.own:
            _add_message_gradients(boxes, cells, slabs[number])
        for handle, cells, message in arriving:
            handle.wait()
            _add_message_gradients(boxes, cells, message)
        for handle in leaving:
            handle.wait()
    return compute_own() if found is None else found


def _start_gradient_exchange(
    env: LayerContext, line: HaloLine, dtype: Any, slabs: list[Array]
) -> tuple[list[Any], list[Any]]:
    """Start to send and receive the gradients of halo cells along one dim.

    Returns (handle, cells, buffer) for each receive, and the handles of the sends."""
    xp, what, arriving, leaving = env.xp, env.random.path, [], []
    for message in line.leaving:
        flat, cells = _make_message_buffer(xp, message.shape, dtype)
        handle = env.mesh.domain[line.dim - 2].recv(flat, message.rank, HALO_GRADIENT, what=what)
        arriving.append((handle, message.cells, cells))
    for one in line.arriving:
        flat, cells = _make_message_buffer(xp, one.shape, dtype)
        for number, into, which in one.parts:
            cells[which] = slabs[number][into]
        leaving.append(env.mesh.domain[line.dim - 2].send(flat, one.rank, HALO_GRADIENT, what=what))
    return arriving, leaving


def _add_message_gradients(boxes: list[HaloBox], own: OwnCells, message: Array) -> None:
    """Add the gradients of halo cells to the local cells from which the halo cells were copied in the forward pass.
    `message` is the message or slab that contains these gradients."""
    for number, there, here in own.adds:
        out = boxes[number].cells[here]
        out += message[there]


def exchange_halo(env: LayerContext, x: Array, halos: Sequence[HaloSpec], padding_value: float = 0.0) -> Array:
    """Return one array that contains `x`, this rank's part of a field, and its halo. Communicates with the ranks that
    own the halo cells.

    `padding_value` is the value of cells beyond the ends of the field in mode "zeros". If several dims are padded with
    fixed values, the corner cells get the value of the last of these dims."""
    for halo in halos:
        if halo.ghosts:
            x = x[slice_dim(env.xp, halo.dim, halo.get_read_slice(get_rank_along(env, halo.cuts, halo.dim - 2)))]
    rims = HaloSlabs(env, x, [halo for halo in halos if not halo.is_covered_by_ghosts], padding_value)
    rims.wait_for_slabs()
    if not rims.plan.lines:
        return x
    y = _empty_like(env.xp, x, rims.plan.lines[-1].whole)
    places = [_intersect_box(box.offset, box.cells.shape, y.shape) for box in rims.boxes]
    if sum(math.prod(y[there].shape) for there, _ in places) < math.prod(y.shape):
        y[...] = padding_value
    for box, (there, here) in zip(rims.boxes, places, strict=True):
        y[there] = box.cells[here]
    if any(halo.has_constants for halo in halos):
        for halo in halos:
            _fill_beyond_ends(env, y, halo, padding_value)
    return y


def _fill_beyond_ends(env: LayerContext, y: Array, halo: HaloSpec, padding_value: float) -> None:
    """At each end of the field that is padded with a fixed value, set the cells of `y` beyond the end to this value."""
    start, _ = halo.needs[get_rank_along(env, halo.cuts, halo.dim - 2)]
    low, high = (max(end.cell - start, 0) for end in halo.field_ends)
    for side, cells in zip(halo.padding_sides, (slice(0, low), slice(high, None)), strict=True):
        if side == "zeros" or not isinstance(side, str):
            y[slice_dim(env.xp, halo.dim, cells)] = padding_value if side == "zeros" else side


def exchange_halo_backward(env: LayerContext, dy: Array, halos: Sequence[HaloSpec]) -> Array:
    """Return the gradient of this rank's part, given the gradient `dy` of the array with the part and its halo.

    This is the adjoint of `exchange_halo`: the gradient of each halo cell is sent to the rank that owns the cell, and
    is added to the cell's gradient there."""
    shape, mine = list(dy.shape), [halo for halo in halos if not halo.is_covered_by_ghosts]
    for halo in mine:
        start, stop = halo.provided_cell_intervals[get_rank_along(env, halo.cuts, halo.dim - 2)]
        shape[halo.dim] = stop - start
    offset, lines = _get_halo_plan(env, mine, shape)
    if lines:
        boxes = [
            HaloBox(one, _empty_like(env.xp, dy, size))
            for one, size in ((offset, shape), *(slab for line in lines for slab in line.slabs))
        ]
        for box in boxes:
            there, here = _intersect_box(box.offset, box.cells.shape, dy.shape)
            box.cells[...] = 0
            box.cells[here] = dy[there]
        dy = exchange_slab_gradients(env, mine, boxes, lambda: boxes[0].cells)
    for halo in halos:
        if halo.ghosts:
            rank, whole = get_rank_along(env, halo.cuts, halo.dim - 2), list(dy.shape)
            whole[halo.dim] = halo.cuts[rank + 1] - halo.cuts[rank] + sum(halo.ghosts[rank])
            inner, dy = dy, env.xp.zeros(tuple(whole), dtype=dy.dtype)
            dy[slice_dim(env.xp, halo.dim, halo.get_read_slice(rank))] = inner
    return dy


def _make_message_buffer(xp: Any, shape: Sequence[int], dtype: Any) -> tuple[Array, Array]:
    """Allocate a message buffer. Return it both as a flat array and as a view of shape `shape` with channels last in
    memory."""
    flat = xp.empty((math.prod(shape),), dtype=dtype)
    cells = flat.reshape(shape[0], *shape[2:], shape[1])
    return flat, cells.transpose(0, cells.ndim - 1, *range(1, cells.ndim - 1))


def _empty_like(xp: Any, x: Array, shape: Sequence[int]) -> Array:
    """Return an uninitialized array of shape `shape` with the dtype of `x`. If `x` has channels last in memory, the
    result does as well."""
    last = xp is np and x.shape[1] > 1 and x.strides[1] == x.itemsize
    return _make_message_buffer(xp, shape, x.dtype)[1] if last else xp.empty(tuple(shape), dtype=x.dtype)


class RepartitionField(Layer):
    """Redistributes a field from one partition over the ranks to another, and drops any ghost cells.

    Parameters
    ----------
    parts : partition of the input
    wanted : partition of the output, for the same number of cells
    """

    takes = "passed"

    def __init__(self, parts: FieldPartition, wanted: FieldPartition) -> None:
        self.parts, self.wanted = parts, wanted
        self._halos = tuple(
            HaloSpec(d + 2, cuts, tuple(zip(out, out[1:], strict=False)), ghosts=parts.get_ghosts_along(d))
            for d, (cuts, out) in enumerate(zip(parts.cuts, wanted.cuts, strict=True))
        )

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return exchange_halo(env, x, self._halos), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return exchange_halo_backward(env, dy, self._halos), ()
