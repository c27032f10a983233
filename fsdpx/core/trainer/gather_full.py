"""Gather full arrays on every rank from their shards: outputs of a model, parameters, gradients and running
statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.half import cast_float_to_dtype, store
from fsdpx.core.array.namespace import to_host
from fsdpx.core.comm.communicator import ReduceOp
from fsdpx.core.program import Slot
from fsdpx.core.state.flat_parameters import Page
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import ConfigError
from fsdpx.nn import collectives
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.optim.optimizer import AVERAGE_SLOT

__all__ = [
    "all_gather_gradients",
    "all_gather_parameters",
    "all_gather_running_statistics",
    "all_reduce_model_input_gradients",
    "copy_weights_and_get_restorer",
    "gather_outputs_over_tensor_and_pipeline",
    "replace_by_averages_and_get_restore",
    "take_output_gradient_shard",
]  # fmt: skip


def gather_outputs_over_tensor_and_pipeline(
    placement: Placement, outputs: tuple[Any, ...], shapes: Sequence[tuple[int, ...]], batch: Microbatch
) -> tuple[Any, ...]:
    """Return the full outputs of the model on every pipeline rank: gather them over the tensor axis if they are
    sharded, then broadcast them over the pipeline. Collective over both axes.

    Parameters
    ----------
    placement : placement of this rank
    outputs : outputs on the pipeline rank that computes them; empty on the other ranks
    shapes : shapes of the full outputs
    batch : the microbatch; the shapes and dtypes of the outputs follow from it
    """
    gathered_outputs = []
    for i, (value, shape) in enumerate(zip(placement.stage.outputs, shapes, strict=True)):
        whole = _all_gather_output_over_tensor(placement, outputs[i], shape) if outputs else None
        if placement.axes.pipe.size > 1:
            whole = _broadcast_last_stage_output(placement, whole, value, shape, batch)
        gathered_outputs.append(whole)
    return tuple(gathered_outputs)


def take_output_gradient_shard(placement: Placement, dy: Any) -> Any:
    """Return this tensor rank's shard of `dy`, which is the gradient with respect to a full output."""
    dim = placement.output_dim
    return dy if dim is None else collectives.take_shard(placement.xp, placement.axes.tensor, dy, dim)


def all_reduce_model_input_gradients(
    placement: Placement, found: Mapping[Slot, Any], batch: Microbatch, scale: float
) -> list[Any]:
    """Return the gradient with respect to each model input, on every rank that works on the same samples. The gradient
    of an integer input is None. Collective over the pipeline.

    Parameters
    ----------
    placement : placement of this rank
    found : gradients of the inputs that this rank's stages read, keyed by slot (name of a value in a program); they
        are summed over the pipeline ranks
    batch : the microbatch
    scale : loss scale; the gradients are divided by it
    """
    gradients: list[Any] = []
    for v, array in zip(placement.stage.inputs, batch.inputs, strict=True):
        if has_integer_dtype(array):
            gradients.append(None)
            continue
        dx = found.get(Slot("dact", v, 0))
        dx = placement.xp.zeros(array.shape, dtype=array.dtype) if dx is None else dx
        if placement.axes.pipe.size > 1:
            flat = placement.xp.ascontiguousarray(dx).reshape(-1).copy()
            placement.axes.pipe.all_reduce(flat, ReduceOp.SUM, what="gradient of the inputs").wait()
            dx = flat.reshape(array.shape)
        gradients.append(dx if scale == 1.0 else dx / scale)
    return gradients


def _all_gather_output_over_tensor(placement: Placement, own: Any, shape: tuple[int, ...]) -> Any:
    """Return the full output, gathered from the shards `own` of the tensor ranks. Collective over the tensor axis."""
    dim = placement.output_dim
    if dim is None:
        return own
    return collectives.all_gather_replicated(placement.xp, placement.axes.tensor, own, dim, shape[dim], what="outputs")


def _broadcast_last_stage_output(
    placement: Placement, whole: Any, value: int, shape: tuple[int, ...], batch: Microbatch
) -> Any:
    """Broadcast an output from the rank of the last pipeline stage, and return it on every pipeline rank. `whole` is
    the output on the last stage's rank, and None on all other ranks; `value` is the index of the output among the
    model's activations. Collective over the pipeline."""
    xp = placement.xp
    dtype = placement.value_shapes.shape_of(value, batch).dtype
    flat = xp.empty((prod(shape),), dtype=dtype) if whole is None else xp.ascontiguousarray(whole).reshape(-1)
    placement.axes.pipe.broadcast(flat, placement.layout.spread.home[-1], what="outputs").wait()
    return flat.reshape(shape)


BLOCK_ELEMENTS = 1 << 16
"""Averages of parameters are computed in blocks of this many elements."""


def all_gather_parameters(state: TrainState, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return the full parameters on every rank, as a dict that maps canonical names to NumPy arrays. Collective.

    Parameters
    ----------
    state : train state of this rank
    names : names of the parameters to return; pages (flat parameter buffers) that hold none of them are not sent
        (default: all)
    """

    def gather_page(page: Page) -> Any:
        return _all_gather_page_over_shards(state, page, state.ledger.get_array("master", page.index))

    return _all_gather_full_arrays(state, gather_page, gradients=False, names=names)


def all_gather_gradients(state: TrainState) -> dict[str, np.ndarray]:
    """Return the full accumulated gradients on every rank, as a dict that maps canonical names to NumPy arrays. They
    are gradients of the summed loss, not yet divided by the loss weight. Collective."""

    def gather_page(page: Page) -> Any:
        p, total = page.index, state.placement.xp.zeros((page.size,), dtype=state.placement.formats.gradients)
        if (part := state.store.get(Slot("part", p))) is not None:
            total = _all_gather_page_over_shards(state, page, part)
            state.placement.axes.replica.all_reduce(total, ReduceOp.SUM, what="gradients").wait()
        if (gradient := state.store.get(Slot("grad", p))) is not None:
            local = gradient.get_microbatch_buffer(0).copy()
            state.placement.axes.data.all_reduce(local, ReduceOp.SUM, what="gradients").wait()
            total = total + local
        if page.partial:
            state.placement.axes.tensor.all_reduce(total, ReduceOp.SUM, what="gradients").wait()
        return total

    return _all_gather_full_arrays(state, gather_page, gradients=True)


def all_gather_running_statistics(state: TrainState) -> dict[str, np.ndarray]:
    """Return the running statistics, such as those of BatchNorm, on every rank, as a dict that maps names to arrays.
    The pipeline rank that runs a layer provides the layer's statistics. Collective."""
    state_arrays = {}
    for name in state.placement.layout.statistic_specs:
        flat = np.array(to_host(state.view_running_statistic(name).reshape(-1)))
        state.placement.axes.pipe.broadcast(
            flat, state.placement.pipe_rank_by_statistic[name], what=f"state {name}"
        ).wait()
        state_arrays[name] = flat.reshape(state.placement.layout.specs[name].shape)
    return state_arrays


def copy_weights_and_get_restorer(state: TrainState) -> Callable[[], None]:
    """Copy this rank's parameters and running statistics, and return a function that restores them.

    The caller must synchronize all ranks before the copy and before the restore, because other ranks may still be
    reading this rank's arrays in shared memory."""
    state.wait_for_transfers()
    kinds = ("master", "outer", "statistic")
    copies = [(array, array.copy()) for row, array in state.ledger.iterate_saved_rows() if row.key.kind in kinds]

    def restore_state() -> None:
        for array, copy in copies:
            array[...] = copy
        state.invalidate_full_parameters()

    return restore_state


def replace_by_averages_and_get_restore(state: TrainState) -> Callable[[], None]:
    """Replace the parameters with their averages over time, and return a function that restores the parameters. Raise
    ConfigError if the optimizer keeps no averages. The caller must synchronize all ranks before the replacement and
    before the restore."""
    place = state.placement
    if AVERAGE_SLOT not in place.slot_formats:
        raise ConfigError("weights='average': no average is kept; say distribute(..., average=fsdpx.EMA(0.999))")
    if place.sync_policy.owner == "replica":
        raise ConfigError("weights='average': in local training each replica has its own average; leave weights out")
    put_back = copy_weights_and_get_restorer(state)
    for p in place.stage.trained_pages:
        master, kept = state.ledger.get_array("master", p), state.ledger.get_array("average", p, AVERAGE_SLOT)
        for block in (slice(start, start + BLOCK_ELEMENTS) for start in range(0, master.size, BLOCK_ELEMENTS)):
            x, difference = (
                cast_float_to_dtype(place.xp, array[block], place.formats.gradients) for array in (master, kept)
            )
            x += difference
            store(place.xp, x, master[block])
    state.invalidate_full_parameters()
    return put_back


def _all_gather_full_arrays(
    state: TrainState, gather_page: Callable[[Page], Any], gradients: bool, names: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """Return full parameters or gradients on every rank, as a dict that maps canonical names to arrays. Collective.

    Parameters
    ----------
    state : train state of this rank
    gather_page : function that returns all elements of a page (a flat parameter buffer of this tensor rank). It is
        called only for pages that this pipeline rank holds
    gradients : if True, gather the gradients of trainable pages, summed over tied copies; if False, gather parameters
    names : names of the parameters to return; pages that hold none of them are not sent (default: all)
    """
    arrays: dict[str, np.ndarray] = {}
    dtype = state.placement.formats.gradients if gradients else state.placement.formats.master
    homes = {p: stage.rank for stage in reversed(state.placement.stages) for p in stage.pages}
    for page in state.placement.layout.pages:
        if gradients and not page.trainable:
            continue
        if names is not None and not any(f.source in names for f in page.fields):
            continue
        parts = (
            page.view_parameters_by_name(to_host(gather_page(page))) if page.index in state.placement.pages else None
        )
        for f in page.fields:
            full = _all_gather_tensor_shards(state, f.source, None if parts is None else parts[f.name], dtype)
            state.placement.axes.pipe.broadcast(full.reshape(-1), homes[page.index], what=f"parameter {f.name}").wait()
            arrays[f.source] = full + arrays[f.source] if gradients and f.source in arrays else full
    return arrays


def _all_gather_page_over_shards(state: TrainState, page: Page, shard: Any) -> Any:
    """All-gather a page (flat parameter buffer) from the ranks of the shard axis, and return all elements of the page.
    Collective over the shard axis."""
    place, here = state.placement, state.placement.pages[page.index]
    full = place.xp.empty((page.size,), dtype=shard.dtype)
    own_part = full[here.own_range.start : here.own_range.stop]
    own_part[...] = shard[: own_part.size]
    place.axes.shard.all_gather(own_part, full, here.counts, what=f"page {place.format_page_name(page.index)}").wait()
    return full


def _all_gather_tensor_shards(state: TrainState, name: str, local: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """Return the full parameter `name`, gathered from the shards of the tensor ranks. Collective over the tensor axis.

    `local` is this rank's shard. It is None on pipeline ranks without the parameter. These ranks get an uninitialized
    array of the full shape."""
    spec, tensor = state.placement.layout.specs[name], state.placement.axes.tensor
    if local is None:
        return np.empty(spec.shape, dtype)
    if spec.cut is None or tensor.size == 1:
        return np.array(local)
    shapes = [spec.cut.local_shape(spec.shape, rank, tensor.size) for rank in range(tensor.size)]
    counts = [prod(shape) for shape in shapes]
    every = np.empty(sum(counts), local.dtype)
    first = sum(counts[: tensor.rank])
    every[first : first + local.size] = local.reshape(-1)
    tensor.all_gather(every[first : first + local.size], every, counts, what=f"parameter {name}").wait()
    full = np.empty(spec.shape, local.dtype)
    for rank, shape in enumerate(shapes):
        start = sum(counts[:rank])
        spec.cut.put_shard(full, every[start : start + counts[rank]].reshape(shape), rank, tensor.size)
    return full
