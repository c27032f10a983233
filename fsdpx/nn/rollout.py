"""Rollout: a model that is applied to its own result, step after step, and trained through all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpx.array.namespace import joined
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.cut import CutRequest, Parts
from fsdpx.nn.layer import Array, Env, Layer, Params, Portion, Spec, positive
from fsdpx.nn.plan import over_parts

__all__ = ["Rollout"]


class Rollout(Layer):
    """The states after each of `steps` steps of a model, beside each other in dim 1: (samples, channels, ...) to
    (samples, steps x channels, ...). Parameters are those of the model, under its names.

    Only the states are kept for backward: each step is run forward again there, so that memory is that of the states
    and of the activations of one step.

    Parameters
    ----------
    net : a model of one input and one output of the same shape
    steps : how often it is applied
    """

    def __init__(self, net: Layer, steps: int) -> None:
        positive(self, steps=steps)
        if not isinstance(net, Layer) or (net.n_inputs, net.n_outputs) != (1, 1):
            raise ConfigError(f"Rollout: a model of one input and one output is needed, got {net!r}")
        self.net, self.steps = net, steps
        self.collective, self.runs = net.collective, net.runs

    def specs(self) -> dict[str, Spec]:
        return self.net.specs()

    def cut(self, request: CutRequest) -> Portion:
        kind = request.kinds[0]
        if not isinstance(kind, Parts):
            return super().cut(request)
        net, found = over_parts(self.net, kind)
        if found != kind:
            raise ConfigError(f"{request.path!r} {self!r}: a step must leave a field as it was, and cut alike")
        return Portion(Rollout(net, self.steps), kind)

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        states = [x]
        for step in range(self.steps):
            y, _ = self.net.forward(env.at(f"step{step}"), p, states[-1])
            if tuple(y.shape) != tuple(x.shape):
                raise ShapeError(f"{self!r}: a step makes {tuple(y.shape)} of {tuple(x.shape)}: it must keep the shape")
            states.append(y)
        return joined(env.xp, states[1:], 1), states[:-1]

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx, kept = None, []
        for step in reversed(range(self.steps)):
            dx, more = self.net.backward_input(*self._recomputed(env, p, saved, step), self._of_step(env, dy, step, dx))
            kept.append((step, more))
        return dx, kept

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        for step, more in kept:
            self.net.backward_params(env.at(f"step{step}"), g, more)

    def backward(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        dx = None
        for step in reversed(range(self.steps)):
            at, _, kept = self._recomputed(env, p, saved, step)
            dx = self.net.backward(at, p, g, kept, self._of_step(env, dy, step, dx))
        return dx

    def _recomputed(self, env: Env, p: Params, states: Any, step: int) -> tuple[Env, Params, Any]:
        """What a step has saved, from its state."""
        at = env.at(f"step{step}")
        return at, p, self.net.forward(replace(at, recomputing=True), p, states[step])[1]

    def _of_step(self, env: Env, dy: Array, step: int, later: Array | None) -> Array:
        """The gradient of a step's result: that of the state itself, and what the steps after it ask for."""
        channels = dy.shape[1] // self.steps
        own = env.xp.ascontiguousarray(dy[:, step * channels : (step + 1) * channels])
        return own if later is None else own + later
