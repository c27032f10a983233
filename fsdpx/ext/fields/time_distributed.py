"""`TimeDistributed`: applies a model to each of the states that a `Rollout` returns."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.over_parts import partition_model_of_fields
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    ShardedLayer,
    list_kernels,
    require_positive,
)
from fsdpx.nn.layer_list import find_dtypes_read_by_inputs
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext

__all__ = ["TimeDistributed"]


class TimeDistributed(Layer):
    """Applies a model to each of `steps` states stacked along dim 1, such as the result of a `Rollout`, and stacks the
    results in the same way.

    The input is (samples, steps x channels, *cells). If the model returns scalars (samples, n), such as the drag on a
    body, the result is (samples, steps x n). If the model returns a field of n channels, the result is (samples, steps
    x n, *cells). The layer's parameters and their names are the same as in the model.

    Parameters
    ----------
    net : model with one input, a state, and one output
    steps : number of states
    """

    takes_ghosts = True
    parts: FieldPartition | None = None

    def __init__(self, net: Layer, steps: int) -> None:
        require_positive(self, steps=steps)
        if not isinstance(net, Layer) or (net.n_inputs, net.n_outputs) != (1, 1):
            raise ConfigError(f"TimeDistributed: the model must have one input and one output, got {net!r}")
        self.net, self.steps = net, steps
        (words,) = find_dtypes_read_by_inputs(net, 1, [frozenset({"numbers"})])
        self.takes = next(iter(words)) if len(words) == 1 else "numbers"
        self.collective, self.kernel_names = net.collective, list_kernels(net)

    def specs(self) -> dict[str, ParameterSpec]:
        return self.net.specs()

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        (kind,) = request.kinds
        if not isinstance(kind, FieldPartition):
            return super().shard_over_ranks(request)
        if not kind.has_cells:
            raise ConfigError(f"{request.path!r} {self!r} reads {kind}: it is for fields of cells, not for meshes")
        made = copy(self)
        made.net, _, (result,) = partition_model_of_fields(self.net, (kind,))
        made.parts, made.kernel_names = kind, list_kernels(made.net)
        return ShardedLayer(made, result)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 2 or x.shape[1] % self.steps or not x.shape[1]:
            raise ShapeError(f"{self!r} wants (samples, {self.steps} x channels, ...), got {tuple(x.shape)}")
        pairs = [
            self.net.forward(env.child(f"step{step}"), p, self._take_step(env, x, step)) for step in range(self.steps)
        ]
        return concatenate_on_device(env.xp, [y for y, _ in pairs], 1), tuple(saved for _, saved in pairs)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        return self._run_steps_backward(
            env, saved, dy, lambda at, held, dstep: self.net.backward(at, p, g, held, dstep)
        )

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        kept = []

        def run_step(at: LayerContext, held: Any, dstep: Array) -> Array:
            dx, more = self.net.backward_input(at, p, held, dstep)
            kept.append((at, more))
            return dx

        return self._run_steps_backward(env, saved, dy, run_step), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for at, more in kept:
            self.net.backward_params(at, g, more)

    def _run_steps_backward(
        self, env: LayerContext, saved: Any, dy: Array, run_step: Callable[[LayerContext, Any, Array], Array]
    ) -> Array:
        found = [
            run_step(env.child(f"step{step}"), held, self._take_step(env, dy, step)) for step, held in enumerate(saved)
        ]
        return concatenate_on_device(env.xp, found, 1)

    def _take_step(self, env: LayerContext, x: Array, step: int) -> Array:
        """Return the channels of `x` that belong to time step number `step`."""
        size = x.shape[1] // self.steps
        return env.xp.ascontiguousarray(x[:, step * size : (step + 1) * size])
