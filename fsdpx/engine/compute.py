"""A unit's forward and backward: its nodes one after the other, values handed on by number."""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.layout.units import Unit
from fsdpx.nn.layer import Env

__all__ = ["backward", "backward_input", "backward_params", "forward"]

Arrays = list[dict[str, Any]]
Envs = list[Env]
NOTHING = object()
"""What is kept of a node that gets no gradient."""


def forward(unit: Unit, envs: Envs, params: Arrays, values: dict[int, Any], keep: bool) -> list[Any]:
    """Run the nodes on `values` (value -> array, extended in place); per node what backward needs, or nothing."""
    saved = []
    for node, env, p in zip(unit.nodes, envs, params, strict=True):
        x = values[node.inputs[0]] if len(node.inputs) == 1 else tuple(values[v] for v in node.inputs)
        try:
            values[node.output], kept = node.layer.forward(env, p, x)
        except Exception as error:
            error.add_note(f"in forward of layer {node.path!r} {node.layer!r}")
            raise
        saved.append(kept if keep else None)
    return saved


def backward(unit: Unit, envs: Envs, params: Arrays, grads: Arrays, saved: list[Any], dvalues: dict[int, Any]) -> None:
    """Both halves, last node first. dvalues: gradient by value, extended in place with those of the inputs."""
    for i in reversed(range(len(unit.nodes))):
        kept = _node_input(unit, i, envs[i], params[i], saved[i], dvalues)
        saved[i] = None
        _node_params(unit, i, envs[i], grads[i], kept)


def backward_input(unit: Unit, envs: Envs, params: Arrays, saved: list[Any], dvalues: dict[int, Any]) -> list[Any]:
    """The first half only; what `backward_params` needs, per node."""
    kept: list[Any] = [None] * len(unit.nodes)
    for i in reversed(range(len(unit.nodes))):
        kept[i] = _node_input(unit, i, envs[i], params[i], saved[i], dvalues)
        saved[i] = None
    return kept


def backward_params(unit: Unit, envs: Envs, grads: Arrays, kept: Sequence[Any]) -> None:
    """The second half only: adds into `grads`."""
    for i in reversed(range(len(unit.nodes))):
        _node_params(unit, i, envs[i], grads[i], kept[i])


def _node_input(unit: Unit, i: int, env: Env, p: Mapping[str, Any], saved: Any, dvalues: dict[int, Any]) -> Any:
    node = unit.nodes[i]
    dy = dvalues.pop(node.output, None)
    if dy is None:  # nothing that counts depends on this node
        return NOTHING
    try:
        dx, kept = node.layer.backward_input(env, p, saved, dy)
    except Exception as error:
        error.add_note(f"in backward of layer {node.path!r} {node.layer!r}")
        raise
    several = dx if len(node.inputs) > 1 and dx is not None else (dx,) * len(node.inputs)
    for value, gradient in zip(node.inputs, several, strict=True):
        if gradient is not None:
            have = dvalues.get(value)
            dvalues[value] = gradient if have is None else have + gradient
    return kept


def _node_params(unit: Unit, i: int, env: Env, g: Mapping[str, Any], kept: Any) -> None:
    if not g or kept is NOTHING:
        return
    node = unit.nodes[i]
    try:
        node.layer.backward_params(env, g, kept)
    except Exception as error:
        error.add_note(f"in the parameter gradients of layer {node.path!r} {node.layer!r}")
        raise
