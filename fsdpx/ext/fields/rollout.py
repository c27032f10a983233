"""`Rollout`: autoregressive training, where a model is applied repeatedly to its own output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.ghost_cells import exchange_ghost_cells, exchange_ghost_cells_backward
from fsdpx.ext.fields.over_parts import partition_model
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
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext

__all__ = ["Rollout"]


class Rollout(Layer):
    """Applies a model `steps` times to its own output, and returns all states stacked in dim 1.

    It maps (samples, channels, ...) to (samples, steps x channels, ...), and has the parameters of the model, under
    the same names. Only the states are saved for backward, which recomputes each step, so memory holds all states and
    the activations of one step.

    If the arrays of a grid have ghost cells, the ghost cells of later states are received from the neighboring ranks,
    also across periodic dims. Ghost cells beyond walls keep the values of the input. The layout of the grid must have
    channels ("c") even for a net of one channel, because the states are stacked along the channels.

    Parameters
    ----------
    net : model with one input and one output of the same shape
    steps : number of times that the model is applied
    """

    takes_ghosts = True

    def __init__(self, net: Layer, steps: int) -> None:
        require_positive(self, steps=steps)
        if not isinstance(net, Layer) or (net.n_inputs, net.n_outputs) != (1, 1):
            raise ConfigError(f"Rollout: a model of one input and one output is needed, got {net!r}")
        self.net, self.steps = net, steps
        self.parts: FieldPartition | None = None  # partition of the input, with ghost cells
        self.collective, self.kernel_names = net.collective, list_kernels(net)

    def specs(self) -> dict[str, ParameterSpec]:
        return self.net.specs()

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind = request.kinds[0]
        if not isinstance(kind, FieldPartition):
            return super().shard_over_ranks(request)
        net, found = partition_model(self.net, kind)
        if found != kind.without_ghosts():
            raise ConfigError(f"{request.path!r} {self!r}: a step must keep the shape and the partition of a field")
        made = Rollout(net, self.steps)
        made.parts = kind if kind.ghosts else None
        return ShardedLayer(made, found)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        states, found = [x], []
        for step in range(self.steps):
            y, _ = self.net.forward(env.child(f"step{step}"), p, states[-1])
            if self.parts is None and tuple(y.shape) != tuple(x.shape):
                raise ShapeError(f"{self!r}: a step makes {tuple(y.shape)} of {tuple(x.shape)}: it must keep the shape")
            found.append(y)
            if self.parts is not None and step < self.steps - 1:
                y = exchange_ghost_cells(env, y, x, self.parts)
            states.append(y)
        return concatenate_on_device(env.xp, found, 1), states[:-1]

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx, kept, dinitial = None, [], self._allocate_wall_gradient(env, saved)
        for step in reversed(range(self.steps)):
            dy_step = self._compute_step_gradient(env, dy, step, dx, dinitial)
            dx, more = self.net.backward_input(*self._recompute_step(env, p, saved, step), dy_step)
            kept.append((step, more))
        return dx if dinitial is None else dx + dinitial, kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for step, more in kept:
            self.net.backward_params(env.child(f"step{step}"), g, more)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        dx, dinitial = None, self._allocate_wall_gradient(env, saved)
        for step in reversed(range(self.steps)):
            at, _, kept = self._recompute_step(env, p, saved, step)
            dx = self.net.backward(at, p, g, kept, self._compute_step_gradient(env, dy, step, dx, dinitial))
        return dx if dinitial is None else dx + dinitial

    def _allocate_wall_gradient(self, env: LayerContext, states: Any) -> Array | None:
        """Return an array of zeros, to which each step adds the gradient of the input's ghost cells beyond walls, or
        None if there are no ghost cells."""
        return None if self.parts is None else env.xp.zeros(states[0].shape, dtype=states[0].dtype)

    def _recompute_step(self, env: LayerContext, p: Params, states: Any, step: int) -> tuple[LayerContext, Params, Any]:
        """Run the forward of one step again from its saved state, and return the context, parameters and saved arrays
        that its backward needs."""
        at = env.child(f"step{step}")
        return at, p, self.net.forward(replace(at, recomputing=True), p, states[step])[1]

    def _compute_step_gradient(
        self, env: LayerContext, dy: Array, step: int, dnext: Array | None, dinitial: Array | None
    ) -> Array:
        """Return the gradient of the output of one step: its slice of `dy` plus `dnext`, the gradient of the next
        step's input."""
        channels = dy.shape[1] // self.steps
        own = env.xp.ascontiguousarray(dy[:, step * channels : (step + 1) * channels])
        if dnext is not None and self.parts is not None:
            dnext = exchange_ghost_cells_backward(env, dnext, dinitial, self.parts)
        return own if dnext is None else own + dnext
