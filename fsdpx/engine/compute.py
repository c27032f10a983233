"""A unit's forward and backward: its nodes one after the other, values handed on by number."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from fsdpx.array import kernels
from fsdpx.array.namespace import namespace_of
from fsdpx.errors import ConfigError
from fsdpx.layout.units import Unit
from fsdpx.nn.layer import Env
from fsdpx.nn.sort import CALLS_NUMPY, Node, calls_numpy

__all__ = ["backward", "backward_input", "backward_params", "forward"]

Arrays = Sequence[Mapping[str, Any]]
Grads = Sequence[Mapping[str, Any]]
Envs = list[Env]
NOTHING = object()
"""The entry kept for a node that gets no gradient."""


def forward(
    unit: Unit,
    envs: Envs,
    params: Arrays,
    values: dict[int, Any],
    keep: bool,
    constant: Container[int] = (),
) -> list[Any]:
    """Run the nodes on `values` (value -> array, extended in place); per node what backward needs, or nothing.

    constant: values whose gradient is not needed, and for which nothing is kept."""
    saved: list[Any] = []
    for node, env, p in zip(unit.nodes, envs, params, strict=True):
        inputs = node.inputs
        x = values[inputs[0]] if len(inputs) == 1 else tuple(values[v] for v in inputs)
        try:
            values[node.output], kept = node.layer.forward(env, p, x)
        except Exception as error:
            _blame(error, "forward", node)
            raise
        saved.append(kept if keep and node.output not in constant else None)
    return saved


def backward(
    unit: Unit,
    envs: Envs,
    params: Arrays,
    grads: Grads,
    saved: list[Any],
    dvalues: dict[int, Any],
    constant: Container[int],
) -> None:
    """Both halves of backward, last node first. dvalues: gradient by value, extended in place with those of the inputs,
    without those of `constant`, values whose gradient is not needed."""
    for i in range(len(unit.nodes) - 1, -1, -1):
        node, held, saved[i] = unit.nodes[i], saved[i], None
        dy = dvalues.pop(node.output, None)
        if dy is None:  # nothing that counts depends on this node
            continue
        leaf = all(v in constant for v in node.inputs)
        run = node.layer.backward_leaf if leaf else node.layer.backward
        try:
            dx = run(envs[i], params[i], grads[i], held, dy)
        except Exception as error:
            _blame(error, "backward", node)
            raise
        if not leaf:
            if getattr(dx, "dtype", None) is not dy.dtype:
                _demand_format(node, dx, dy)
            _spread(node.inputs, dx, dvalues, constant)


def backward_input(
    unit: Unit,
    envs: Envs,
    params: Arrays,
    saved: list[Any],
    dvalues: dict[int, Any],
    constant: Container[int] = (),
) -> list[Any]:
    """The first half only; what `backward_params` needs, per node."""
    kept: list[Any] = [NOTHING] * len(unit.nodes)
    for i in range(len(unit.nodes) - 1, -1, -1):
        node, held, saved[i] = unit.nodes[i], saved[i], None
        dy = dvalues.pop(node.output, None)
        if dy is None:
            continue
        try:
            dx, late = node.layer.backward_input(envs[i], params[i], held, dy)
            kept[i] = late if unit.trains[i] else NOTHING
        except Exception as error:
            _blame(error, "backward", node)
            raise
        _demand_format(node, dx, dy)
        _spread(node.inputs, dx, dvalues, constant)
    return kept


def backward_params(unit: Unit, envs: Envs, grads: Grads, kept: Sequence[Any]) -> None:
    """The second half only: adds into `grads`."""
    for i in range(len(unit.nodes) - 1, -1, -1):
        if not grads[i] or kept[i] is NOTHING:
            continue
        node = unit.nodes[i]
        try:
            node.layer.backward_params(envs[i], grads[i], kept[i])
        except Exception as error:
            _blame(error, "the parameter gradients", node)
            raise


def _blame(error: Exception, where: str, node: Node) -> None:
    """Name the layer in which it happened, and the reason if it is known."""
    why = f", which {CALLS_NUMPY}" if calls_numpy(error) else ""
    error.add_note(f"in {where} of layer {node.path!r} {node.layer!r}{why}")


def _demand_format(node: Node, dx: Any, dy: Any) -> None:
    """A wrong format would be noticed only in a layer that is not to blame, or not at all."""
    for part in dx if isinstance(dx, tuple) else (dx,):
        if part is not None and part.dtype != dy.dtype:
            raise ConfigError(
                f"layer {node.path!r} {node.layer!r}: backward gives {part.dtype} for a dy of {dy.dtype}: make "
                "constants Python floats, and arrays by env.xp with dtype=dy.dtype"
            )


def _spread(inputs: tuple[int, ...], dx: Any, dvalues: dict[int, Any], constant: Container[int]) -> None:
    """Add a node's input gradients to those that other readers of the inputs gave."""
    if len(inputs) == 1 and inputs[0] not in dvalues:  # nearly always
        if dx is not None and inputs[0] not in constant:
            dvalues[inputs[0]] = dx
        return
    several = dx if len(inputs) > 1 and dx is not None else (dx,) * len(inputs)
    for value, gradient in zip(inputs, several, strict=True):
        if gradient is not None and value not in constant:
            have = dvalues.get(value)
            dvalues[value] = gradient if have is None else kernels.add(namespace_of(have), have, gradient)
