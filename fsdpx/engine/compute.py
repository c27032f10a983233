"""A unit's forward and backward: its nodes one after the other, values handed on by number."""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.layout.units import Unit
from fsdpx.nn.layer import Env

__all__ = ["backward", "backward_input", "backward_params", "forward"]

Arrays = list[dict[str, Any]]
Grads = Sequence[Mapping[str, Any]]
Envs = list[Env]
NOTHING = object()
"""What is kept of a node that gets no gradient."""


def forward(unit: Unit, envs: Envs, params: Arrays, values: dict[int, Any], keep: bool) -> list[Any]:
    """Run the nodes on `values` (value -> array, extended in place); per node what backward needs, or nothing."""
    saved = []
    for node, env, p in zip(unit.nodes, envs, params, strict=True):
        inputs = node.inputs
        x = values[inputs[0]] if len(inputs) == 1 else tuple(values[v] for v in inputs)
        try:
            values[node.output], kept = node.layer.forward(env, p, x)
        except Exception as error:
            error.add_note(f"in forward of layer {node.path!r} {node.layer!r}")
            raise
        saved.append(kept if keep else None)
    return saved


def backward(unit: Unit, envs: Envs, params: Arrays, grads: Grads, saved: list[Any], dvalues: dict[int, Any]) -> None:
    """Both halves, last node first. dvalues: gradient by value, extended in place with those of the inputs."""
    for i in range(len(unit.nodes) - 1, -1, -1):
        node, held, saved[i] = unit.nodes[i], saved[i], None
        dy = dvalues.pop(node.output, None)
        if dy is None:  # nothing that counts depends on this node
            continue
        try:
            dx = node.layer.backward(envs[i], params[i], grads[i], held, dy)
        except Exception as error:
            error.add_note(f"in backward of layer {node.path!r} {node.layer!r}")
            raise
        _spread(node.inputs, dx, dvalues)


def backward_input(unit: Unit, envs: Envs, params: Arrays, saved: list[Any], dvalues: dict[int, Any]) -> list[Any]:
    """The first half only; what `backward_params` needs, per node."""
    kept: list[Any] = [NOTHING] * len(unit.nodes)
    for i in range(len(unit.nodes) - 1, -1, -1):
        node, held, saved[i] = unit.nodes[i], saved[i], None
        dy = dvalues.pop(node.output, None)
        if dy is None:
            continue
        try:
            dx, kept[i] = node.layer.backward_input(envs[i], params[i], held, dy)
        except Exception as error:
            error.add_note(f"in backward of layer {node.path!r} {node.layer!r}")
            raise
        _spread(node.inputs, dx, dvalues)
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
            error.add_note(f"in the parameter gradients of layer {node.path!r} {node.layer!r}")
            raise


def _spread(inputs: tuple[int, ...], dx: Any, dvalues: dict[int, Any]) -> None:
    """Add a node's input gradients to those that other readers of the inputs gave."""
    if len(inputs) == 1 and inputs[0] not in dvalues:  # nearly always
        if dx is not None:
            dvalues[inputs[0]] = dx
        return
    several = dx if len(inputs) > 1 and dx is not None else (dx,) * len(inputs)
    for value, gradient in zip(inputs, several, strict=True):
        if gradient is not None:
            have = dvalues.get(value)
            dvalues[value] = gradient if have is None else have + gradient
