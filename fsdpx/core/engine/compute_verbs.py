"""The operations that compute: load inputs, forward, loss, backward and recompute. They run the nodes (layer calls) of
a unit (group of layers) in order. Each activation has an integer ID, by which nodes refer to it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.engine.not_finite import require_finite
from fsdpx.core.engine.run import ProgramRun, UnitFunctions, Values, get_action_target, get_microbatch_number
from fsdpx.core.program import Action, StageUnit
from fsdpx.core.state.gradients import Gradient
from fsdpx.core.state.units import Unit
from fsdpx.errors import ConfigError
from fsdpx.nn.gradient_accumulation import GradientEntries
from fsdpx.nn.layer import LayerContext, require_result_is_pair
from fsdpx.nn.layer_list import Node
from fsdpx.nn.losses import Loss, match_memory_order
from fsdpx.nn.shape_inference import CALLS_NUMPY, UNKNOWN, is_missing_function_error, is_numpy_call_error

__all__ = [
    "UNIT_FUNCTIONS", "backward_unit", "backward_unit_input", "backward_unit_params",
    "compute_loss_and_output_gradients", "compute_loss_only", "forward_unit", "forward_unit_checkpointed",
    "forward_unit_without_saving", "load_microbatch_inputs", "recompute_unit", "run_unit_backward",
    "run_unit_backward_input", "run_unit_backward_params", "run_unit_forward", "start_backward_from_caller_gradients",
]  # fmt: skip

Arrays = Sequence[Mapping[str, Any]]
Grads = Sequence[Mapping[str, Any]]
UnitContexts = list[LayerContext]
ANY_ORDER_KERNELS = frozenset(
    "channels_last relu gelu silu sigmoid tanh_backward max_pool avg_pool multiply_along_dim".split()
)
"""Names of layer kernels whose compiled code gives bitwise identical results for any memory order of the arrays."""
NO_VALUE = object()
"""Placeholder for a node (layer call) that gets no parameter gradient, in a list with one value per node."""


def run_unit_forward(
    unit: Unit,
    envs: UnitContexts,
    params: Arrays,
    values: dict[int, Any],
    keep: bool,
    constant: Container[int] = (),
    released: Sequence[Sequence[int]] = (),
) -> list[Any]:
    """Run the forward pass of all nodes (layer calls) in a unit (group of layers). `values` is a dict that maps
    activation IDs (integers) to arrays. The nodes' outputs are added to it. Return one entry per node: the data that
    the node saves for backward if `keep` is true, and None otherwise.

    `constant` holds the IDs of the activations that need no gradient; nothing is saved for them. For each node,
    `released` holds the IDs of the activations to remove from `values` once the node has run. The next layers can then
    reuse their memory while it is still in the cache. By default, no activations are removed."""
    saved: list[Any] = []
    for n, (node, env, p) in enumerate(zip(unit.nodes, envs, params, strict=True)):
        inputs = node.inputs
        x = values[inputs[0]] if len(inputs) == 1 else tuple(values[v] for v in inputs)
        try:
            y, kept = node.layer.forward(env, p, _fix_memory_order(env, node.layer.kernel_names, x))
        except Exception as error:
            _annotate_layer_error(error, "forward", node)
            raise
        if len(node.outputs) == 1:
            values[node.outputs[0]] = y
        else:
            values.update(zip(node.outputs, y, strict=True))
        saved.append(kept if keep and any(v not in constant for v in node.outputs) else None)
        x = y = kept = None  # free the memory of released activations before the next layer allocates its output
        for v in released[n] if released else ():
            del values[v]
    return saved


def run_unit_backward(
    unit: Unit,
    envs: UnitContexts,
    params: Arrays,
    grads: Grads,
    saved: list[Any],
    dvalues: dict[int, Any],
    constant: Container[int],
) -> None:
    """Run the backward pass of the nodes (layer calls) of a unit (group of layers), last node first. This computes the
    gradients of both inputs and parameters.

    `dvalues` is a dict that maps the ID (an integer) of an activation to its gradient. The input gradients of the nodes
    are added to this dict. Activations in `constant` need no gradient."""
    for i in range(len(unit.nodes) - 1, -1, -1):
        node, held, saved[i] = unit.nodes[i], saved[i], None
        dy = _pop_output_gradients(node, dvalues)
        if dy is None:  # skip this node, because the loss does not depend on it
            continue
        leaf = all(v in constant for v in node.inputs)
        run = node.layer.backward_leaf if leaf else node.layer.backward
        try:
            dx = run(envs[i], params[i], grads[i], held, _fix_memory_order(envs[i], node.layer.kernel_names, dy))
        except Exception as error:
            _annotate_layer_error(error, "backward", node)
            raise
        if not leaf:
            if getattr(dx, "dtype", None) is not getattr(dy, "dtype", dy):
                _require_input_gradient_keeps_dtype(node, dx, dy)
            _accumulate_input_gradients(node.inputs, dx, dvalues, constant)


def run_unit_backward_input(
    unit: Unit,
    envs: UnitContexts,
    params: Arrays,
    saved: list[Any],
    dvalues: dict[int, Any],
    constant: Container[int] = (),
) -> list[Any]:
    """Run only the half of the backward pass that computes input gradients. For each node (layer call), return what
    `run_unit_backward_params` needs to compute the parameter gradients."""
    kept: list[Any] = [NO_VALUE] * len(unit.nodes)
    for i in range(len(unit.nodes) - 1, -1, -1):
        node, held, saved[i] = unit.nodes[i], saved[i], None
        dy = _pop_output_gradients(node, dvalues)
        if dy is None:
            continue
        try:
            ordered = _fix_memory_order(envs[i], node.layer.kernel_names, dy)
            dx, late = require_result_is_pair(node.layer.backward_input(envs[i], params[i], held, ordered))
            kept[i] = late if unit.trains[i] else NO_VALUE
        except Exception as error:
            _annotate_layer_error(error, "backward", node)
            raise
        _require_input_gradient_keeps_dtype(node, dx, dy)
        _accumulate_input_gradients(node.inputs, dx, dvalues, constant)
    return kept


def run_unit_backward_params(unit: Unit, envs: UnitContexts, grads: Grads, kept: Sequence[Any]) -> None:
    """Run only the half of the backward pass that computes parameter gradients, and add these gradients to `grads`."""
    for i in range(len(unit.nodes) - 1, -1, -1):
        if not grads[i] or kept[i] is NO_VALUE:
            continue
        node = unit.nodes[i]
        try:
            node.layer.backward_params(envs[i], grads[i], kept[i])
        except Exception as error:
            _annotate_layer_error(error, "the parameter gradients", node)
            raise


def _fix_memory_order(env: LayerContext, names: Iterable[str] | None, values: Any) -> Any:
    """Return `values` (an array or a tuple of arrays), converted to C-contiguous memory order if needed. This is needed
    if results must not depend on the memory order, but the layer's kernels might depend on it. `names` holds the names
    of these kernels."""
    if not env.ignores_memory_order or getattr(env.xp, "holds_no_data", False):
        return values
    is_compiled = env.xp is np and kernels.get_implementation_name("relu") == "numba"
    if is_compiled and not ANY_ORDER_KERNELS.isdisjoint(names or ()):
        return values
    if isinstance(values, tuple):
        return tuple(_fix_memory_order(env, names, one) for one in values)
    return values if values is None or values.ndim < 2 else env.xp.ascontiguousarray(values)


UNIT_FUNCTIONS = UnitFunctions(run_unit_forward, run_unit_backward, run_unit_backward_input, run_unit_backward_params)
"""The functions that run the layers of a unit, unless observers replace them."""


def _pop_output_gradients(node: Node, dvalues: dict[int, Any]) -> Any:
    """Remove the gradients of a node's outputs from `dvalues`, and return them as an array, or as a tuple if there are
    several. The tuple contains None for each output that the loss does not depend on. If the loss depends on none of
    the outputs, return None."""
    if len(node.outputs) == 1:
        return dvalues.pop(node.outputs[0], None)
    found = tuple([dvalues.pop(v, None) for v in node.outputs])
    return None if all(dy is None for dy in found) else found


def _annotate_layer_error(error: Exception, where: str, node: Node) -> None:
    """Add a note to `error` with the layer that failed, the method (`where`, such as "forward"), and the likely cause
    if it is known. If the layer called a NumPy function that shape-only arrays do not support, raise ConfigError
    instead.
    """
    if is_missing_function_error(error):
        raise ConfigError(f"layer {node.path!r} {node.layer!r} in {where} calls {error}; {UNKNOWN}") from error
    why = f", which {CALLS_NUMPY}" if is_numpy_call_error(error) else ""
    error.add_note(f"in {where} of layer {node.path!r} {node.layer!r}{why}")


def _require_input_gradient_keeps_dtype(node: Node, dx: Any, dy: Any) -> None:
    """Raise ConfigError if an input gradient `dx` and the output gradient `dy` have different dtypes. Without this
    check, the mistake would show up in another layer, or not at all."""
    dtypes = [one.dtype for one in (dy if isinstance(dy, tuple) else (dy,)) if one is not None]
    for part in dx if isinstance(dx, tuple) else (dx,):
        if part is not None and part.dtype not in dtypes:
            raise ConfigError(
                f"layer {node.path!r} {node.layer!r}: backward returns {part.dtype} for a dy of {dtypes[0]}: make "
                "constants Python floats, and arrays by env.xp with dtype=dy.dtype"
            )


def _accumulate_input_gradients(
    inputs: tuple[int, ...], dx: Any, dvalues: dict[int, Any], constant: Container[int]
) -> None:
    """Add the input gradients of a node (layer call) to the gradients that other nodes have computed for the same
    activations."""
    # fast path: a single input to which no other node has contributed a gradient yet
    if len(inputs) == 1 and inputs[0] not in dvalues:
        if dx is not None and inputs[0] not in constant:
            dvalues[inputs[0]] = dx
        return
    several = dx if len(inputs) > 1 and dx is not None else (dx,) * len(inputs)
    for value, gradient in zip(inputs, several, strict=True):
        if gradient is not None and value not in constant:
            have = dvalues.get(value)
            dvalues[value] = gradient if have is None else kernels.add(namespace_of(have), have, gradient)


def load_microbatch_inputs(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    batch, used = run.get_microbatch(action), run.stage.used_inputs
    return (None,) * len(used) if batch is None else tuple(batch.inputs[v] for v in used)


def forward_unit(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    keep = get_action_target(action) in run.stage.units_with_backward
    outputs, saved = _run_forward(run, action, taken, read, added, keep)
    return (*outputs, *([saved] if keep else []), *added)


def forward_unit_without_saving(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    unit = run.placement.stage.units[get_action_target(action)]
    inputs = len(unit.pages) + len(unit.reads)
    outputs, _ = _run_forward(run, action, taken, read[:inputs], read[inputs:], keep=False)
    return tuple(outputs)


def forward_unit_checkpointed(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Run the forward pass of a unit (group of layers), and save only its inputs (activation checkpointing). They are
    saved as a dict that maps activation IDs (integers) to arrays."""
    outputs, _ = _run_forward(run, action, taken, read, added, keep=False)
    if run.get_microbatch(action) is None:
        return (*outputs, None, *added)
    unit = run.placement.stage.units[get_action_target(action)]
    held = dict(zip((*unit.takes, *unit.reads), (*taken, *read[len(unit.pages) :]), strict=True))
    return (*outputs, held, *added)


def _run_forward(
    run: ProgramRun, action: Action, taken: Values, read: Values, statistics: Values, keep: bool
) -> tuple[list[Any], Any]:
    u, batch = get_action_target(action), run.get_microbatch(action)
    unit, place, views = run.placement.stage.units[u], run.placement, run.views
    if batch is None:
        return [None] * len(unit.gives), None
    pages, kept = read[: len(unit.pages)], read[len(unit.pages) :]
    values = dict(zip((*unit.takes, *unit.reads), (*taken, *kept), strict=True))
    params = views.view_unit_parameters(u, (*pages, *statistics))
    known, envs = run.units[u], run.get_layer_contexts_of_microbatch(batch)[1][u]
    released = () if keep or place.options.check_finite else known.released_values
    saved = run.functions.forward(known, envs, params, values, keep, run.stage.constant, released)
    outputs = [values[v] for v in unit.gives]
    if place.options.check_finite:
        whole = run.units[u]
        for node in whole.nodes:
            description = f"the output of layer {node.path!r} in unit {whole.name!r}"
            for v in node.outputs:
                require_finite(place, values[v], description, action)
    return outputs, saved


def recompute_unit(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    u, batch, views = get_action_target(action), run.get_microbatch(action), run.views
    if batch is None:
        return (None,)
    unit, envs = run.units[u], run.get_layer_contexts_of_microbatch(batch, recomputing=True)[1][u]
    params, values = views.view_unit_parameters(u, read), dict(taken[0])
    return (run.functions.forward(unit, envs, params, values, True, run.stage.constant),)


def backward_unit(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Run both halves of the backward pass layer by layer, so that arrays saved for parameter gradients are freed
    early."""
    u, batch, views = get_action_target(action), run.get_microbatch(action), run.views
    unit, pages = run.placement.stage.units[u], _list_trainable_pages(run, u)
    gradients, have = _get_or_create_gradients(run, pages, added), added[len(pages) :]
    if batch is None:
        return _add_empty_microbatches(gradients, have)
    inner, dvalues = _list_inputs_and_known_gradients(run, unit, taken, have)
    entries = _get_gradients_and_mark_blank(run, action, pages, gradients)
    params, grads, saved = views.view_unit_parameters(u, read), views.view_unit_gradients(u, entries), taken[-1]
    envs, constant = run.get_layer_contexts_of_microbatch(batch)[1][u], run.stage.constant
    run.functions.backward(run.units[u], envs, params, grads, saved, dvalues, constant)
    _zero_unwritten_and_require_finite(run, action, entries)
    return (*gradients, *(dvalues.get(v) for v in inner))


def backward_unit_input(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    u, batch = get_action_target(action), run.get_microbatch(action)
    unit = run.placement.stage.units[u]
    if batch is None:
        return (None, *added)
    inner, dvalues = _list_inputs_and_known_gradients(run, unit, taken, added)
    known, envs, params = (
        run.units[u],
        run.get_layer_contexts_of_microbatch(batch)[1][u],
        run.views.view_unit_parameters(u, read),
    )
    kept = run.functions.backward_input(known, envs, params, taken[-1], dvalues, run.stage.constant)
    return (kept, *(dvalues.get(v) for v in inner))


def backward_unit_params(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    u, batch = get_action_target(action), run.get_microbatch(action)
    pages = _list_trainable_pages(run, u)
    gradients = _get_or_create_gradients(run, pages, added)
    if batch is None:
        return _add_empty_microbatches(gradients, ())
    entries = _get_gradients_and_mark_blank(run, action, pages, gradients)
    grads = run.views.view_unit_gradients(u, entries)
    envs = run.get_layer_contexts_of_microbatch(batch)[1][u]
    run.functions.backward_params(run.units[u], envs, grads, taken[0])
    _zero_unwritten_and_require_finite(run, action, entries)
    return tuple(gradients)


def _list_trainable_pages(run: ProgramRun, unit: int) -> list[int]:
    return [p for p in run.stage.units[unit].pages if run.stage.trainable[p]]


def _list_inputs_and_known_gradients(
    run: ProgramRun, unit: StageUnit, taken: Values, have: Values
) -> tuple[list[int], dict[int, Any]]:
    """Return two results for a unit (group of layers): the IDs of its inputs that need a gradient, and a dict that maps
    activation IDs (integers) to the gradients that are already known.

    The dict contains the gradients of the unit's outputs (all entries of `taken` except the last). It also contains the
    gradients in `have`. Other units have already computed these gradients for inputs that they share with this unit."""
    inner, output_values = ([v for v in some if v not in run.stage.constant] for some in (unit.inputs, unit.gives))
    known = dict(zip((*output_values, *inner), (*taken[:-1], *have), strict=True))
    return inner, {v: d for v, d in known.items() if d is not None}


def _get_or_create_gradients(run: ProgramRun, pages: list[int], added: Values) -> list[Gradient]:
    return [run.workspace.create_gradient(p, run.views) if g is None else g for p, g in zip(pages, added, strict=False)]


def _add_empty_microbatches(gradients: list[Gradient], have: Values) -> Values:
    for gradient in gradients:
        gradient.add_empty_microbatch()
    return (*gradients, *have)


def _get_gradients_and_mark_blank(
    run: ProgramRun, action: Action, pages: list[int], gradients: list[Gradient]
) -> list[GradientEntries]:
    """For each page (flat parameter buffer) in `pages`, return a dict that maps parameter names to gradients. If a
    page's gradient is still empty, mark its entries as blank, so that layers overwrite them instead of adding to
    them."""
    opened = []
    for page, gradient in zip(pages, gradients, strict=True):
        entries = run.views.get_gradient_entries(
            run.placement.layout.pages[page], gradient.get_microbatch_buffer(get_microbatch_number(action))
        )
        if gradient.is_blank:
            gradient.is_blank = False
            entries.mark_all_blank()
        opened.append(entries)
    return opened


def _zero_unwritten_and_require_finite(run: ProgramRun, action: Action, opened: list[GradientEntries]) -> None:
    """Set to zero the gradients that no layer wrote. If the option `check_finite` is set, also check for NaN and Inf,
    except with a dynamic loss scale, where overflow is expected."""
    # report only the parameters in `own_views` as idle (without a gradient), because tied parameters may get their
    # gradient in another unit
    own_views = run.views.own[get_action_target(action)]
    for page in opened:
        run.workspace.state.idle.update((name, None) for name in page.zero_unwritten() if name in own_views)
    if run.placement.options.check_finite and not run.scaler.dynamic:
        unit = run.placement.layout.units[get_action_target(action)].name
        for page in opened:
            for name, entry in page.items():
                require_finite(run.placement, entry.array, f"the gradient of {name!r} in unit {unit!r}", action)


def compute_loss_and_output_gradients(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Return the summed loss of a microbatch, its weight, and the output gradients. Add the weight to the total weight
    of the step."""
    batch, find = run.get_microbatch(action), run.placement.loss
    *have, weight = added
    if batch is None:
        return ((0.0, 0.0), *have, weight or 0.0)
    if not have:  # no layer is trained, so no gradient is needed
        return compute_loss_only(run, action, taken, read, added)
    env = run.get_layer_contexts_of_microbatch(batch)[0]
    # make outputs C-contiguous if needed, because the result of a NumPy sum depends on the memory order
    y = _fix_memory_order(env, (), taken[0] if len(taken) == 1 else taken)
    compute = getattr(type(find), "forward_and_backward", Loss.forward_and_backward)
    target = _fix_memory_order(env, (), batch.target)
    total, share, dy = compute(find, env, y, target, run.scaler.value)
    each = (dy,) if len(taken) == 1 else tuple(dy)
    _require_gradients_match_outputs(find, taken, each)
    dys = _drop_constant_gradients(run, each)
    return ((float(total), float(share)), *_add_optional_gradients(have, dys), (weight or 0.0) + float(share))


def _require_gradients_match_outputs(loss: Any, outputs: Values, dys: Values) -> None:
    """Raise ConfigError if a gradient that the loss returns does not have the shape and dtype of the corresponding
    output. Without this check, a layer would fail later."""
    for y, d in zip(outputs, dys, strict=True):
        if not hasattr(d, "dtype") or d.dtype != y.dtype or d.shape != y.shape:
            description = f"{d.dtype}{list(d.shape)}" if hasattr(d, "dtype") else type(d).__name__
            raise ConfigError(
                f"{loss!r}: backward returns {description} for an output of {y.dtype}{list(y.shape)}; "
                "nn.Loss: the gradient has the shape and dtype of y"
            )


def compute_loss_only(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Return the summed loss of a microbatch and its weight, without gradients. Add the weight to the total weight of
    the step."""
    batch = run.get_microbatch(action)
    if batch is None:
        return ((0.0, 0.0), added[0] or 0.0)
    env = run.get_layer_contexts_of_microbatch(batch)[0]
    # make outputs C-contiguous if needed, because the result of a NumPy sum depends on the memory order
    y = _fix_memory_order(env, (), taken[0] if len(taken) == 1 else taken)
    loss, target = run.placement.loss, _fix_memory_order(env, (), batch.target)
    total, share, _ = loss.forward(env, y, match_memory_order(loss, target, y))
    return ((float(total), float(share)), (added[0] or 0.0) + float(share))


def start_backward_from_caller_gradients(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Start the backward pass from the output gradients that the caller passes. These gradients are treated as
    gradients of a mean loss, so their total weight is 1, or 1 per replica if replicas train independently."""
    *have, weight = added
    factor, axes = run.scaler.value, run.placement.axes
    dys = [d * factor if factor != 1.0 else d for d in _drop_constant_gradients(run, taken[0])]
    data = axes.data if run.placement.sync_policy.is_synchronous else axes.shard
    unit_seed = 1.0 if data.rank == 0 and axes.tensor.rank == 0 else 0.0
    return (*_add_optional_gradients(have, dys), unit_seed if weight is None else weight)


def _drop_constant_gradients(run: ProgramRun, dys: Values) -> list[Any]:
    """Return the output gradients, excluding outputs that need no gradient, such as inputs that are also outputs."""
    return [d for v, d in zip(run.stage.outputs, dys, strict=True) if v not in run.stage.constant]


def _add_optional_gradients(have: Iterable[Any], dys: Iterable[Any]) -> list[Any]:
    return [h if d is None else d if h is None else h + d for h, d in zip(have, dys, strict=True)]
