"""`Rollout`: autoregressive training, which applies a model repeatedly to its own output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.ghost_cells import (
    add_to_own_cells,
    drop_ghost_cells,
    exchange_ghost_cells,
    exchange_ghost_cells_backward,
)
from fsdpx.ext.fields.local_arrays import HoldsLocalArray, require_weights_of_cells, require_weights_of_channels
from fsdpx.ext.fields.over_parts import TakesScalars, find_scalar_inputs, partition_model
from fsdpx.nn.container import list_input_names, unwrap_single
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
from fsdpx.nn.layer_list import choose_dtype_word, find_dtypes_read_by_inputs, insert_integer_casts
from fsdpx.nn.losses import CellWeights
from fsdpx.nn.shard_specs import FieldPartition, Kind, Replicated, ShardingContext
from fsdpx.nn.tensor_plan import ShardingWalk

__all__ = ["Rollout"]


class SavedStates(NamedTuple):
    """Arrays that the forward pass of a `Rollout` saves for the backward pass.

    Attributes
    ----------
    states : the states, starting with the input states; an entry is None if no step with a gradient reads the state
    constants : the constant channels, or None
    others : all inputs of the model except the first
    boundary : the values of the ghost cells beyond walls in each step, or None
    """

    states: tuple[Array | None, ...]
    constants: Array | None
    others: tuple[Array, ...]
    boundary: Array | None = None


class Rollout(Layer, HoldsLocalArray, TakesScalars):
    """Applies a model repeatedly, `steps` times, to its own output, and returns all new states, stacked along dim 1.

    The layer maps (samples, channels, ...) to (samples, steps x channels, ...). Its parameters and their names are the
    same as in the model. Only the states are saved for the backward pass, which recomputes each step. Memory must
    therefore hold all states and the activations of one step. On a mesh, the layer maps (samples, nodes, features) to
    (samples, nodes, steps x features). On a mesh, "channels" in the text below means the features, and "dim 1" means
    the last dim.

    The first input of the model has the form that `data.FieldDataset` returns: the last `inputs` states, oldest first,
    followed by `constants` channels that never change. The model returns the next state. Any further inputs of the
    model are also inputs of the Rollout. Inputs named in `forcing` hold the values for all steps, stacked along dim 1,
    (samples, steps x channels, ...). All other inputs are the same in every step. Further inputs are fields or scalars
    (samples, n). Inputs have the names that they have in the model.

    If the arrays of a grid have ghost cells, each rank receives the ghost cells of later states from neighboring ranks.
    Periodic dims wrap around. Ghost cells beyond walls keep their values from the input or, with `boundary`, get new
    values in each step. The layout of the grid must have channels ("c") even if a state has only one channel, because
    states are stacked along the channels.

    Parameters
    ----------
    net : model that returns the next state, given the last states as its first input
    steps : number of times that the model is applied
    inputs : number of states that the model reads; default 1
    constants : number of constant channels, such as a land mask, that follow the states in the first input; default 0
    forcing : names of the inputs of `net` whose values differ from step to step, such as solar radiation. If `net` is
        not a container, its inputs are named "x0", "x1" and so on. Default: none
    noise : standard deviation of the Gaussian noise that is added to the input states during training. The noise
        teaches the model to correct its own errors (Sanchez-Gonzalez et al. 2020). The noise does not depend on how the
        field is partitioned over ranks. Default 0
    noise_weights : factor by which the noise is multiplied in each cell of this rank's part, such as 0 on boundaries:
        an array (*cells) or (channels, *cells) of numbers >= 0; on a mesh (nodes,) or (nodes, features), for the nodes
        that this rank owns. Default: all 1
    pushforward : number of initial steps without gradient, which only produce the input of the next step (Brandstetter
        et al. 2022 use 1 of 2 steps). The errors of these steps are included in the loss but contribute no gradient.
        Default 0
    detach : whether to stop gradients from flowing from a step to the steps before it; default False
    boundary : whether the Rollout takes one more input, after the inputs of the model, with boundary values for each
        step. This input has the shape of `steps` states with ghost cells, stacked along dim 1. Step i reads the ghost
        cells beyond walls from state i of this input, except that the first step reads them from the first input. All
        other cells of this input are ignored. Default False
    """

    takes_ghosts = True
    parts: FieldPartition | None = None
    """Partition of the states, with ghost cells. If None, this rank holds the full field."""

    def __init__(
        self,
        net: Layer,
        steps: int,
        *,
        inputs: int = 1,
        constants: int = 0,
        forcing: str | Sequence[str] = (),
        noise: float = 0.0,
        noise_weights: Any = None,
        pushforward: int = 0,
        detach: bool = False,
        boundary: bool = False,
    ) -> None:
        require_positive(self, steps=steps, inputs=inputs)
        if not isinstance(net, Layer) or not net.n_inputs or net.n_outputs != 1:
            raise ConfigError(f"Rollout: the model must have one output and at least one input, got {net!r}")
        for name, value, stop in (("constants", constants, math.inf), ("pushforward", pushforward, steps)):
            if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value < stop:
                below = f", below steps={steps}" if name == "pushforward" else ""
                raise ConfigError(f"Rollout: {name} must be a whole number >= 0{below}, got {value!r}")
        if isinstance(noise, bool) or not isinstance(noise, int | float | np.number) or not 0 <= noise < math.inf:
            raise ConfigError(f"Rollout: noise must be a number >= 0, got {noise!r}")
        self.net, self.steps, self.inputs, self.noise = insert_integer_casts(net, None), steps, inputs, float(noise)
        self.forcing = (forcing,) if isinstance(forcing, str) else tuple(forcing)
        self.constants, self.pushforward, self.detach = int(constants), int(pushforward), bool(detach)
        self.noise_weights = None if noise_weights is None else CellWeights("Rollout", noise_weights)
        names = list_input_names(net)
        if wrong := [name for name in self.forcing if name not in names[1:]]:
            raise ConfigError(
                f"Rollout: forcing names {', '.join(map(repr, wrong))}; the inputs of the model after its first are "
                f"{', '.join(map(repr, names[1:])) or 'none'}"
            )
        self.n_inputs = len(names) + bool(boundary)
        self.scalar_inputs = tuple(i for i, scalar in enumerate(find_scalar_inputs(net)) if scalar)
        words = find_dtypes_read_by_inputs(net, len(names), [frozenset({"numbers"})])
        # later states have the dtype of the results, so a state that layers read in several dtypes is passed as numbers
        takes = (choose_dtype_word(words[0]) if len(words[0]) == 1 else "numbers", *map(choose_dtype_word, words[1:]))
        self.takes = (*takes, "numbers") if boundary else takes
        self.collective, self.kernel_names = net.collective, list_kernels(net)

    def specs(self) -> dict[str, ParameterSpec]:
        return self.net.specs()

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind, *others = request.kinds
        if not isinstance(kind, FieldPartition):
            return super().shard_over_ranks(request)
        location = f"{request.path!r} {self!r}"
        for i, other in enumerate(others, 1):
            if kind.has_cells and other != (Replicated() if i in self.scalar_inputs else kind):
                wanted = "scalars, which each rank has in full" if i in self.scalar_inputs else f"{kind}, as the state"
                raise ConfigError(f"{location} reads {other} as input {i}, which must be {wanted}")
        net, found = self._shard_net(request, kind)
        if found != kind.without_ghosts():
            raise ConfigError(
                f"{location}: a step returns {found} for {kind}: it must keep the shape and the partition"
            )
        made = copy(self)
        made.net, made.parts, made.kernel_names = net, kind, list_kernels(net)
        return ShardedLayer(made, found)

    def _shard_net(self, request: ShardingContext, kind: FieldPartition) -> tuple[Layer, Kind]:
        """Return the model that each rank runs if states are distributed as `kind`, and the distribution of its
        output."""
        if kind.has_cells:
            return partition_model(self.net, kind)
        walk = ShardingWalk(1, None, {}, request.redistribution_functions)
        net, kinds = walk.shard_layer(self.net, request.path, request.kinds)
        return net, kinds[0]

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        first, *others = x if self.n_inputs != 1 else (x,)
        walls = self._require_fitting_boundary_values(first, others.pop()) if self.boundary else None
        states, constants = self._split_states_and_constant_channels(first)
        if self._adds_noise(env):
            states = [self._add_noise(env, state, i) for i, state in enumerate(states)]
        last, ghosts, dim, found = states[-1], self._ghost_partition, self._stack_dim, list[Array]()
        for step in range(self.steps):
            given = self._make_step_inputs(env, SavedStates(tuple(states), constants, tuple(others)), step)
            y, _ = self.net.forward(env.child(f"step{step}"), p, given)
            if y.shape[dim] != last.shape[dim] or (ghosts is None and tuple(y.shape) != tuple(last.shape)):
                raise ShapeError(
                    f"{self!r}: a step returns {tuple(y.shape)} for {tuple(last.shape)}: it must keep the shape"
                )
            found.append(y)
            if ghosts is not None and step < self.steps - 1:
                y = exchange_ghost_cells(env, y, last if walls is None else self._take_walls(walls, step + 1), ghosts)
            states.append(y)
        kept = (None,) * self.pushforward + tuple(states[self.pushforward : -1])
        return concatenate_on_device(env.xp, found, dim), tuple(SavedStates(kept, constants, tuple(others), walls))

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        kept = []

        def run_step(step: int, at: LayerContext, held: Any, dy_step: Array) -> Any:
            dx, more = self.net.backward_input(at, p, held, dy_step)
            kept.append((step, more))
            return dx

        return self._run_steps_backward(env, p, SavedStates(*saved), dy, run_step), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for step, more in kept:
            self.net.backward_params(env.child(f"step{step}"), g, more)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Any:
        def run_step(step: int, at: LayerContext, held: Any, dy_step: Array) -> Any:
            return self.net.backward(at, p, g, held, dy_step)

        return self._run_steps_backward(env, p, SavedStates(*saved), dy, run_step)

    def _run_steps_backward(
        self, env: LayerContext, p: Params, saved: SavedStates, dy: Array, run_step: Callable[..., Any]
    ) -> Any:
        """Run the backward passes of all steps that have a gradient, in reverse order, and return the gradients of the
        inputs. `run_step(step, context, saved, dy)` runs the backward pass of one step, and returns the gradients with
        respect to the model's inputs."""
        xp, ghosts, dim = env.xp, self._ghost_partition, self._stack_dim
        channels = dy.shape[dim] // self.steps
        shape = next(state.shape for state in saved.states if state is not None)
        dstates: list[Array | None] = [None] * (self.inputs + self.steps)
        dwalls = None if ghosts is None else xp.zeros(shape, dtype=dy.dtype)
        dboundary = None if saved.boundary is None else xp.zeros(saved.boundary.shape, dtype=dy.dtype)
        dconstants, per_step = None, [dict[int, Array]() for _ in saved.others]
        for step in reversed(range(self.pushforward, self.steps)):
            dy_step = xp.ascontiguousarray(_take_range(dy, dim, step * channels, channels))
            dnext = dstates[self.inputs + step]
            if dnext is not None:
                into = dwalls if dboundary is None else self._take_walls(dboundary, step + 1)
                dnext = dnext if ghosts is None else exchange_ghost_cells_backward(env, dnext, into, ghosts)
                dy_step = dy_step + dnext
            dstates[self.inputs + step] = None
            at = env.child(f"step{step}")
            given = self._make_step_inputs(env, saved, step)
            found = run_step(step, at, self.net.forward(replace(at, recomputing=True), p, given)[1], dy_step)
            dwindow, *dothers = found if self._has_step_values else (found,)
            for i in range(step, step + self.inputs):
                if i < self.inputs or not self.detach:
                    piece = _take_range(dwindow, dim, (i - step) * channels, channels)
                    dstates[i] = _add_or_copy_piece(xp, dstates[i], piece)
            if self.constants:
                constants = _take_range(dwindow, dim, self.inputs * channels, self.constants)
                dconstants = _add_or_copy_piece(xp, dconstants, constants)
            for found_per_step, dother in zip(per_step, dothers, strict=True):
                if dother is not None:
                    found_per_step[step] = dother
        first = [xp.zeros(shape, dtype=dy.dtype) if d is None else d for d in dstates[: self.inputs]]
        if dwalls is not None:
            first[-1] = first[-1] + dwalls
        if self._adds_noise(env) and ghosts is not None:
            first = [self._add_noise_backward(env, d) for d in first]
        if self.constants:
            first.append(dconstants)
        dx = first[0] if len(first) == 1 else concatenate_on_device(xp, first, dim)
        rows = zip(saved.others, per_step, self._has_step_values, strict=True)
        dothers = [self._join_step_gradients_of_input(xp, *row) for row in rows]
        return unwrap_single([dx, *dothers, *([] if dboundary is None else [dboundary])])

    def require_ghost_cells(self, parts: FieldPartition | None) -> None:
        """Raise ConfigError if the Rollout has boundary values and `parts`, the partition of the states, has no ghost
        cells."""
        if self.boundary and (parts is None or not parts.ghosts):
            raise ConfigError(f"{self!r}: boundary=True needs a grid with ghost cells, as in fsdpx.Grid(..., ghosts=1)")

    def _take_walls(self, walls: Array, step: int) -> Array:
        """Return a view of the boundary values of a step."""
        channels = walls.shape[1] // self.steps
        return _take_range(walls, 1, step * channels, channels)

    def _require_fitting_boundary_values(self, first: Array, walls: Array) -> Array:
        """Return `walls`, the last input of the Rollout, which holds the boundary values. Raise an error unless it fits
        `first`, the first input."""
        self.require_ghost_cells(self.parts)
        channels = (first.shape[1] - self.constants) // self.inputs
        wanted = (first.shape[0], self.steps * channels, *first.shape[2:])
        if tuple(walls.shape) != wanted:
            raise ShapeError(f"{self!r} wants boundary values of shape {wanted}, got {tuple(walls.shape)}")
        return walls

    def _join_step_gradients_of_input(
        self, xp: Any, other: Array, found: dict[int, Array], has_step_values: bool
    ) -> Array | None:
        """Return the gradient of an input other than the states. `found` maps each step to the gradient of the input's
        values in that step. If `found` is empty, as for integer inputs, return None."""
        if not found:
            return None
        if not has_step_values:
            return sum(list(found.values())[1:], start=next(iter(found.values())))
        zeros = xp.zeros_like(next(iter(found.values())))
        return concatenate_on_device(xp, [found.get(step, zeros) for step in range(self.steps)], self._get_dim(other))

    def get_declared_input_names(self) -> tuple[str, ...]:
        """Return the names of the model's inputs, followed by a name for the boundary values if these are an input."""
        names = list_input_names(self.net)
        return (*names, "boundary_" if "boundary" in names else "boundary") if self.boundary else names

    @property
    def boundary(self) -> bool:
        """Whether the last input holds the boundary values of each step."""
        return self.n_inputs != len(list_input_names(self.net))

    @property
    def _ghost_partition(self) -> FieldPartition | None:
        """The partition of the states if arrays have ghost cells, otherwise None."""
        return self.parts if self.parts is not None and self.parts.ghosts else None

    @property
    def _has_step_values(self) -> tuple[bool, ...]:
        """For each input except the first, whether it has different values in each step."""
        return tuple(name in self.forcing for name in list_input_names(self.net)[1:])

    @property
    def _stack_dim(self) -> int:
        """The dim along which states are stacked: the dim of the channels or, on a mesh, the dim of the node
        features."""
        return 1 if self.parts is None or self.parts.has_cells else 2

    def _get_dim(self, other: Array) -> int:
        """Return the dim along which `other` stacks its values for all steps. `other` is any input except the states.
        Scalars, (samples, n), are stacked along their last dim."""
        return min(self._stack_dim, other.ndim - 1)

    def _split_states_and_constant_channels(self, x: Array) -> tuple[list[Array], Array | None]:
        """Split the first input into the states, oldest first, and the constant channels (None if there are none)."""
        dim = self._stack_dim
        channels, rest = divmod(x.shape[dim] - self.constants, self.inputs) if x.ndim > dim else (0, 0)
        if channels < 1 or rest:
            each, shape = ("channels", "channels, ...") if dim == 1 else ("features", "nodes, features")
            raise ShapeError(
                f"{self!r} wants (samples, {shape}) with {self.inputs} states of as many {each}, and "
                f"{self.constants} constants after them, got {tuple(x.shape)}"
            )
        if self.inputs == 1 and not self.constants:
            return [x], None
        states = [_take_range(x, dim, i * channels, channels) for i in range(self.inputs)]
        return states, _take_range(x, dim, self.inputs * channels, self.constants) if self.constants else None

    def _make_step_inputs(self, env: LayerContext, saved: SavedStates, step: int) -> Any:
        """Return the model's inputs for one step: a single array, or a tuple if there are several inputs."""
        window = [*saved.states[step : step + self.inputs], *([] if saved.constants is None else [saved.constants])]
        first = window[0] if len(window) == 1 else concatenate_on_device(env.xp, window, self._stack_dim)
        others = []
        for other, has_step_values in zip(saved.others, self._has_step_values, strict=True):
            if has_step_values:
                dim = self._get_dim(other)
                size, rest = divmod(other.shape[dim], self.steps) if other.ndim > 1 else (0, 0)
                if size < 1 or rest:
                    raise ShapeError(
                        f"{self!r} wants {self.steps} values of each forcing in dim {dim}, got {tuple(other.shape)}"
                    )
                other = env.xp.ascontiguousarray(_take_range(other, dim, step * size, size))
            others.append(other)
        return unwrap_single([first, *others])

    def _adds_noise(self, env: LayerContext) -> bool:
        return env.training and self.noise > 0

    def _add_noise(self, env: LayerContext, state: Array, index: int) -> Array:
        """Return `state`, which is input state number `index`, plus Gaussian noise. The noise is computed with the
        Box-Muller method (1958) from random numbers that depend on the position in the full field."""
        ghosts, xp = self._ghost_partition, env.xp
        own = state if ghosts is None else drop_ghost_cells(env, state, ghosts)

        parts = self.parts if ghosts is None else ghosts.without_ghosts()

        def make_fractions(name: str) -> Array:
            random, shape = env.random.child(f"{name}{index}"), tuple(own.shape)
            if parts is None:
                return random.get_number_range(shape).make_fractions(xp).reshape(shape)
            return parts.get_random_numbers(random, shape, env.mesh.domain).make_fractions(xp).reshape(shape)

        radius = xp.sqrt(-2.0 * xp.log(1.0 - make_fractions("radius").astype(np.float64)))
        noise = self.noise * radius * xp.cos(2.0 * math.pi * make_fractions("angle").astype(np.float64))
        if self.noise_weights is not None:
            noise = self._multiply_noise_by_weights(env, noise)
        own = own + noise.astype(state.dtype)
        return own if ghosts is None else exchange_ghost_cells(env, own, state, ghosts)

    def _multiply_noise_by_weights(self, env: LayerContext, noise: Array) -> Array:
        """Return the noise multiplied by `noise_weights`."""
        parts = FieldPartition if self.parts is None else self.parts
        first: Array = parts.to_channels_first(noise)
        assert self.noise_weights is not None
        weights = self.noise_weights if parts.has_cells else self.noise_weights.of_nodes
        require_weights_of_channels(self, "noise_weights", weights, first)
        if getattr(env.xp, "holds_no_data", False):  # in a dry run, `noise` may cover the full field
            return noise
        weights.require_broadcastable(self, first.shape, "noise_weights", ShapeError)
        return parts.to_channels_first(first * weights.reshape_to_broadcast(env, first))

    def require_local_cells(self, cells: tuple[int, ...]) -> None:
        require_weights_of_cells(self, "noise_weights", self.noise_weights, cells)

    def _add_noise_backward(self, env: LayerContext, dstate: Array) -> Array:
        """Return the gradient of an input state with ghost cells, given the gradient `dstate` of the noisy state."""
        ghosts = self._ghost_partition
        assert ghosts is not None
        dwalls = env.xp.zeros_like(dstate)
        own = exchange_ghost_cells_backward(env, dstate.copy(), dwalls, ghosts)
        return add_to_own_cells(env, own, dwalls, ghosts)


def _take_range(array: Array, dim: int, start: int, count: int) -> Array:
    """Return a view of `count` elements along dim `dim`, starting at `start`."""
    return array[(slice(None),) * dim + (slice(start, start + count),)]


def _add_or_copy_piece(xp: Any, total: Array | None, piece: Array) -> Array:
    """Return `total` + `piece`, or a copy of `piece` if `total` is None."""
    return piece.copy() if total is None else total + piece
