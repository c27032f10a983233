"""The states that a `Rollout` feeds back to its model. This module splits inputs into states, adds noise to states, and
fills their ghost cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.ghost_cells import (
    add_to_own_cells,
    drop_ghost_cells,
    exchange_ghost_cells,
    exchange_ghost_cells_backward,
)
from fsdpx.ext.fields.local_arrays import require_weights_of_cells, require_weights_of_channels
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.losses import CellWeights
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["StateField", "StateGradients", "take_range"]


def take_range(array: Array, dim: int, start: int, count: int) -> Array:
    """Return a view of `count` elements along dim `dim`, starting at `start`."""
    return array[(slice(None),) * dim + (slice(start, start + count),)]


@dataclass(frozen=True)
class StateField:
    """One of the fields that a `Rollout` feeds back to its model. Each field lies on its own grid.

    Attributes
    ----------
    name : name of the model's input
    label : `name` if the Rollout has several fields, otherwise ""
    inputs : number of states in the input
    constants : number of constant channels that follow the states in the input
    noise : standard deviation of the noise that is added to each state in training
    noise_weights : factor by which the noise is multiplied in each cell of this rank's part, or None
    parts : partition of a state, with ghost cells; None if this rank holds the full field, or if the state consists of
        scalars
    """

    name: str
    label: str
    inputs: int
    constants: int
    noise: float = 0.0
    noise_weights: CellWeights | None = None
    parts: FieldPartition | None = None

    @property
    def ghosts(self) -> FieldPartition | None:
        """The partition of this field's states, including the ghost cells; None if the arrays have no ghost cells."""
        return self.parts if self.parts is not None and self.parts.ghosts else None

    @property
    def stack_dim(self) -> int:
        """The dim along which states are stacked: the dim of the channels or, on a mesh, the dim of the node
        features."""
        return 1 if self.parts is None or self.parts.has_cells else 2

    def describe(self, word: str) -> str:
        """Return a phrase for error messages: `word`, such as " of input", followed by the name of the field. Return ""
        if the Rollout has only one field."""
        return f"{word} {self.label!r}" if self.label else ""

    @property
    def order_advice(self) -> str:
        """Text that error messages append to advise on the order of states. It is "" if the Rollout has only one
        field."""
        return ", and return the states in the order of its inputs" * bool(self.label)

    def require_ghost_cells(self, owner: object, parts: FieldPartition | None) -> None:
        """Raise ConfigError unless `parts`, the partition of a state, has ghost cells."""
        if parts is None or not parts.ghosts:
            about = self.describe(" for state")
            raise ConfigError(
                f"{owner!r}: boundary=True needs a grid with ghost cells{about}, as in fsdpx.Grid(..., ghosts=1)"
            )

    def split(self, owner: object, x: Array) -> tuple[list[Array], Array | None]:
        """Split the input `x` into the states, oldest first, and the constant channels (None if there are none)."""
        dim = self.stack_dim
        channels, rest = divmod(x.shape[dim] - self.constants, self.inputs) if x.ndim > dim else (0, 0)
        if channels < 1 or rest:
            each, shape = ("channels", "channels, ...") if dim == 1 else ("features", "nodes, features")
            raise ShapeError(
                f"{owner!r} wants{self.describe(' input')} (samples, {shape}) with {self.inputs} states of as many "
                f"{each}, and {self.constants} constants after them, got {tuple(x.shape)}"
            )
        if self.inputs == 1 and not self.constants:
            return [x], None
        states = [take_range(x, dim, i * channels, channels) for i in range(self.inputs)]
        return states, take_range(x, dim, self.inputs * channels, self.constants) if self.constants else None

    def require_fitting_result(self, owner: object, y: Array, last: Array) -> None:
        """Raise ShapeError unless `y`, the result of a step, has as many channels as the state `last` and, if states
        have no ghost cells, the same shape."""
        dim = self.stack_dim
        if y.shape[dim] != last.shape[dim] or (self.ghosts is None and tuple(y.shape) != tuple(last.shape)):
            raise ShapeError(
                f"{owner!r}: a step returns {tuple(y.shape)} for {tuple(last.shape)}{self.describe(' of state')}: it "
                f"must keep the shape{self.order_advice}"
            )

    def require_fitting_walls(self, owner: object, state: Array, walls: Array, steps: int) -> None:
        """Raise an error unless `walls`, the input with boundary values, fits `state`."""
        self.require_ghost_cells(owner, self.parts)
        wanted = (state.shape[0], steps * state.shape[1], *state.shape[2:])
        if tuple(walls.shape) != wanted:
            about = self.describe(" for state")
            raise ShapeError(f"{owner!r} wants boundary values of shape {wanted}{about}, got {tuple(walls.shape)}")

    def take_walls(self, walls: Array, channels: int, step: int) -> Array:
        """Return a view of the boundary values for the step with index `step`. These are `channels` channels of
        `walls`."""
        return take_range(walls, self.stack_dim, step * channels, channels)

    def adds_noise(self, env: LayerContext) -> bool:
        return env.training and self.noise > 0

    def fill_ghosts(self, env: LayerContext, y: Array, initial: Array) -> Array:
        """Return the state `y` with ghost cells added, for use as the input of the next step. Ghost cells beyond walls
        are copied from `initial`. If the states of this field have no ghost cells, return `y` unchanged."""
        return y if self.ghosts is None else exchange_ghost_cells(env, y, initial, self.ghosts)

    def fill_ghosts_backward(self, env: LayerContext, dstate: Array, dinitial: Array | None) -> Array:
        """Return the gradient of `y` in `fill_ghosts`, and add the gradient of `initial` to `dinitial`. `dstate` is
        overwritten."""
        return dstate if self.ghosts is None else exchange_ghost_cells_backward(env, dstate, dinitial, self.ghosts)

    def add_noise(self, env: LayerContext, owner: object, state: Array, index: int) -> Array:
        """Return `state`, the input state with index `index`, with Gaussian noise added in training. The noise is
        computed with the Box-Muller method (1958) from random numbers that depend on the position in the full field."""
        if not self.adds_noise(env):
            return state
        ghosts, xp = self.ghosts, env.xp
        own = state if ghosts is None else drop_ghost_cells(env, state, ghosts)

        parts = self.parts if ghosts is None else ghosts.without_ghosts()

        def make_fractions(name: str) -> Array:
            random, shape = env.random.child(self.label).child(f"{name}{index}"), tuple(own.shape)
            if parts is None:
                return random.get_number_range(shape).make_fractions(xp).reshape(shape)
            return parts.get_random_numbers(random, shape, env.mesh.domain).make_fractions(xp).reshape(shape)

        radius = xp.sqrt(-2.0 * xp.log(1.0 - make_fractions("radius").astype(np.float64)))
        noise = self.noise * radius * xp.cos(2.0 * math.pi * make_fractions("angle").astype(np.float64))
        if self.noise_weights is not None:
            noise = self._multiply_noise_by_weights(env, owner, noise)
        own = own + noise.astype(state.dtype)
        return own if ghosts is None else exchange_ghost_cells(env, own, state, ghosts)

    def _multiply_noise_by_weights(self, env: LayerContext, owner: object, noise: Array) -> Array:
        """Return the noise multiplied by `noise_weights`."""
        parts = FieldPartition if self.parts is None else self.parts
        first: Array = parts.to_channels_first(noise)
        assert self.noise_weights is not None
        weights = self.noise_weights if parts.has_cells else self.noise_weights.of_nodes
        name = f"noise_weights{self.describe(' of state')}"
        require_weights_of_channels(owner, name, weights, first)
        if getattr(env.xp, "holds_no_data", False):  # in a dry run, `noise` may cover the full field
            return noise
        weights.require_broadcastable(owner, first.shape, name, ShapeError)
        return parts.to_channels_first(first * weights.reshape_to_broadcast(env, first))

    def require_local_cells(self, owner: object, cells: tuple[int, ...]) -> None:
        """Raise ShapeError unless `noise_weights` fit `cells`, the shape of this rank's part."""
        require_weights_of_cells(owner, f"noise_weights{self.describe(' of state')}", self.noise_weights, cells)

    def add_noise_backward(self, env: LayerContext, dstate: Array) -> Array:
        """Return the gradient of an input state, given the gradient `dstate` of the noisy state."""
        if self.ghosts is None:
            return dstate
        dwalls = env.xp.zeros_like(dstate)
        own = exchange_ghost_cells_backward(env, dstate.copy(), dwalls, self.ghosts)
        return add_to_own_cells(env, own, dwalls, self.ghosts)


class StateGradients:
    """Accumulates the gradients of one field of a `Rollout` in the backward pass.

    `state` is one of the field's states, including ghost cells; the gradient of each state has the same shape.
    `constants` and `walls` are the constant channels and the boundary values of the field, or None. `dtype` is the
    dtype of gradients."""

    def __init__(
        self, env: LayerContext, field: StateField, steps: int, state: Array, constants: Any, walls: Any, dtype: Any
    ) -> None:
        self.env, self.field, self.dtype, self.shape = env, field, dtype, state.shape
        self.channels = state.shape[field.stack_dim]
        self.states: list[Array | None] = [None] * (field.inputs + steps)
        self.constants = None if constants is None else env.xp.zeros(constants.shape, dtype=dtype)
        self.walls = None if field.ghosts is None else env.xp.zeros(state.shape, dtype=dtype)
        self.boundary = None if walls is None else env.xp.zeros(walls.shape, dtype=dtype)

    def take_gradient_of_result(self, dy: Array | None, step: int) -> Array | None:
        """Return the gradient of the result of the step with index `step`. `dy` is the gradient of the results of all
        steps, or None if the loss does not depend on these results. Return None if nothing depends on the result of
        this step."""
        field, number = self.field, self.field.inputs + step
        own = None if dy is None else take_range(dy, field.stack_dim, step * self.channels, self.channels)
        own = None if own is None else self.env.xp.ascontiguousarray(own)
        later, self.states[number] = self.states[number], None
        if later is None:
            return own
        into = self.walls if self.boundary is None else field.take_walls(self.boundary, self.channels, step + 1)
        later = field.fill_ghosts_backward(self.env, later, into)
        return later if own is None else own + later

    def add_gradient_of_input(self, dwindow: Array, step: int, detach: bool) -> None:
        """Add `dwindow`, the gradient of the model's input in the step with index `step`, to the gradients of the
        states and constant channels in this input. If `detach` is true, leave out the states that earlier steps of the
        model produced."""
        inputs, dim = self.field.inputs, self.field.stack_dim
        for i in range(step, step + inputs):
            if i < inputs or not detach:
                piece = take_range(dwindow, dim, (i - step) * self.channels, self.channels)
                self.states[i] = piece.copy() if self.states[i] is None else self.states[i] + piece
        if self.constants is not None:
            self.constants = self.constants + take_range(dwindow, dim, inputs * self.channels, self.field.constants)

    def join_gradient_of_input(self) -> Array:
        """Return the gradient of the Rollout's input: that of its states, followed by that of its constant channels."""
        xp, field = self.env.xp, self.field
        found = [xp.zeros(self.shape, dtype=self.dtype) if d is None else d for d in self.states[: field.inputs]]
        if self.walls is not None:
            found[-1] = found[-1] + self.walls
        if field.adds_noise(self.env):
            found = [field.add_noise_backward(self.env, d) for d in found]
        if self.constants is not None:
            found.append(self.constants)
        return found[0] if len(found) == 1 else concatenate_on_device(xp, found, field.stack_dim)
