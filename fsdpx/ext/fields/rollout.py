"""`Rollout`: autoregressive training, which applies a model repeatedly to its own output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.core.base.messages import shorten_value
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.local_arrays import HoldsLocalArray
from fsdpx.ext.fields.over_parts import (
    TakesScalars,
    TakesSeveralGrids,
    find_scalar_inputs,
    partition_model_of_fields,
)
from fsdpx.ext.fields.rollout_state import StateField, StateGradients, take_range
from fsdpx.nn.container import list_input_names, list_output_names, unwrap_single
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
from fsdpx.nn.shard_specs import FieldPartition, Kind, ShardingContext
from fsdpx.nn.tensor_plan import ShardingWalk

__all__ = ["Rollout"]


class SavedStates(NamedTuple):
    """Arrays that the forward pass of a `Rollout` saves for the backward pass.

    Attributes
    ----------
    states : one entry per point in time, beginning with the times of the input states. An entry is a tuple with one
        state per field, or None if these states are read only by steps without a gradient
    constants : for each field, the constant channels, or None
    others : all inputs of the model that are not states
    walls : for each field, the values of the ghost cells beyond walls in each step; () without boundary values
    """

    states: tuple[tuple[Array, ...] | None, ...]
    constants: tuple[Array | None, ...]
    others: tuple[Array, ...]
    walls: tuple[Array, ...] = ()


def _make_state_option(name: str) -> Any:
    """Return a property that reads an option of a `Rollout`: a single value if the state has one field, else a tuple
    with one value per field."""
    return property(lambda self: unwrap_single([getattr(state, name) for state in self.states]))


class Rollout(Layer, HoldsLocalArray, TakesScalars, TakesSeveralGrids):
    """Applies a model repeatedly, `steps` times, to its own output, and returns all new states, stacked along dim 1.

    The layer maps (samples, channels, ...) to (samples, steps x channels, ...). Its parameters and their names are the
    same as in the model. Only the states are saved for the backward pass, which recomputes each step. Memory must
    therefore hold all states and the activations of one step. On a mesh, the layer maps (samples, nodes, features) to
    (samples, nodes, steps x features). On a mesh, "channels" in the text below means the features, and "dim 1" means
    the last dim.

    The first input of the model has the form that `data.FieldDataset` returns: the last `inputs` states, oldest first,
    followed by `constants` channels that never change. The model returns the next state. Any further inputs of the
    model are also inputs of the Rollout.

    If the model returns several fields, the state consists of all of them: output i of the model is the next state of
    input i, and the Rollout has as many outputs as the model. Each field has its own channels and, with
    `Grid.with_inputs`, its own grid, such as velocities on faces and a pressure in cells. States may also be scalars.

    Inputs named in `forcing` hold the values for all steps, stacked along dim 1, (samples, steps x channels, ...). All
    other inputs are the same in every step. Each input is a field, or consists of scalars (samples, n). All inputs have
    the same names as in the model.

    If the arrays of a grid have ghost cells, each rank receives the ghost cells of later states from neighboring ranks.
    Periodic dims wrap around. Ghost cells beyond walls keep their values from the input or, with `boundary`, get new
    values in each step. The layout of the grid must have channels ("c") even if a state has only one channel, because
    states are stacked along the channels.

    Parameters
    ----------
    net : model that returns the next state, given the last states as its first input
    steps : number of times that the model is applied
    inputs : number of states that the model reads; default 1
    constants : number of constant channels, such as a land mask, that follow the states in the first input; for several
        fields, a sequence with the number of each field. Default 0
    forcing : names of the inputs of `net` whose values differ from step to step, such as solar radiation. If `net` is
        not a container, its inputs are named "x0", "x1" and so on. Default: none
    noise : standard deviation of the Gaussian noise that is added to the input states during training. The noise
        teaches the model to correct its own errors (Sanchez-Gonzalez et al. 2020). The noise does not depend on how the
        field is partitioned over ranks. For several fields, one number for all or one per field. Default 0
    noise_weights : factor by which the noise is multiplied in each cell of this rank's part, such as 0 on boundaries:
        an array (*cells) or (channels, *cells) of numbers >= 0; on a mesh (nodes,) or (nodes, features), for the nodes
        that this rank owns. For several fields, a sequence with one array or None per field. Default: all 1
    pushforward : number of initial steps without gradient, which only produce the input of the next step (Brandstetter
        et al. 2022 use 1 of 2 steps). The errors of these steps are included in the loss but contribute no gradient.
        Default 0
    detach : whether to stop gradients from flowing from a step to the steps before it; default False
    boundary : whether the Rollout takes one more input, after the inputs of the model, with boundary values for each
        step. This input has the shape of `steps` states with ghost cells, stacked along dim 1. Step i reads the ghost
        cells beyond walls from state i of this input, except that the first step reads them from the first input. All
        other cells of this input are ignored. For several fields, there is one such input per field. Default False
    """

    takes_ghosts = True
    constants, noise, noise_weights = map(_make_state_option, ("constants", "noise", "noise_weights"))

    def __init__(
        self,
        net: Layer,
        steps: int,
        *,
        inputs: int = 1,
        constants: int | Sequence[int] = 0,
        forcing: str | Sequence[str] = (),
        noise: float | Sequence[float] = 0.0,
        noise_weights: Any = None,
        pushforward: int = 0,
        detach: bool = False,
        boundary: bool = False,
    ) -> None:
        require_positive(self, steps=steps, inputs=inputs)
        if not isinstance(net, Layer) or not net.n_inputs or net.n_inputs < net.n_outputs:
            raise ConfigError(f"Rollout: the model must have an input for each output, got {net!r}")
        self.net, self.steps, self.inputs = insert_integer_casts(net, None), steps, inputs
        self.forcing = (forcing,) if isinstance(forcing, str) else tuple(forcing)
        self.pushforward, self.detach = _parse_whole_number("pushforward", pushforward, steps), bool(detach)
        names, count = list_input_names(net), net.n_outputs
        self._names = names
        self.n_outputs = count
        options = (
            _parse_each("constants", constants, count, constants == 0, _parse_whole_number),
            _parse_each("noise", noise, count, isinstance(noise, Real), _parse_noise),
            _parse_each("noise_weights", noise_weights, count, noise_weights is None, _parse_weights),
        )
        rows = zip(names[:count], *options, strict=True)
        self.states = tuple(StateField(name, name if count > 1 else "", inputs, *row) for name, *row in rows)
        if wrong := [name for name in self.forcing if name not in names[count:]]:
            after = "its first" if count == 1 else f"its {count} states"
            raise ConfigError(
                f"Rollout: forcing names {', '.join(map(repr, wrong))}; the inputs of the model after {after} are "
                f"{', '.join(map(repr, names[count:])) or 'none'}"
            )
        self.n_inputs = len(names) + bool(boundary) * count
        self.scalar_inputs = tuple(i for i, scalar in enumerate(find_scalar_inputs(net)) if scalar)
        words = find_dtypes_read_by_inputs(net, len(names), [frozenset({"numbers"})] * count)
        # if layers read a state in several dtypes, cast it to the dtype in which the model computes ("numbers"),
        # because later states are computed in this dtype
        of_states = (choose_dtype_word(one) if len(one) == 1 else "numbers" for one in words[:count])
        self.takes = (*of_states, *map(choose_dtype_word, words[count:]), *["numbers"] * (self.n_inputs - len(names)))
        self.collective, self.kernel_names = net.collective, list_kernels(net)

    def specs(self) -> dict[str, ParameterSpec]:
        return self.net.specs()

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kinds, names = request.kinds, self._names
        if not any(isinstance(kind, FieldPartition) for kind in kinds[: self.n_outputs]):
            return super().shard_over_ranks(request)
        location = f"{request.path!r} {self!r}"
        has_cells = all(kind.has_cells for kind in kinds if isinstance(kind, FieldPartition))
        for i, (name, kind) in enumerate(zip(names, kinds, strict=False)):
            if has_cells and isinstance(kind, FieldPartition) == (i in self.scalar_inputs):
                wanted = "scalars, which each rank has in full" if i in self.scalar_inputs else "a field"
                raise ConfigError(f"{location} reads {kind} as input {name!r}, which must be {wanted}")
        for state, kind, boundary in zip(self.states, kinds, kinds[len(names) :], strict=False):
            if boundary != kind:
                raise ConfigError(
                    f"{location} reads {boundary} as boundary values, which must be {kind}, as state {state.name!r}: "
                    "give both inputs the same grid"
                )
        net, found = self._shard_net(request, has_cells)
        for state, kind, output in zip(self.states, kinds, found, strict=False):
            if output != (kind.without_ghosts() if isinstance(kind, FieldPartition) else kind):
                raise ConfigError(
                    f"{location}: a step returns {output} for {kind}{state.describe(' of state')}: it must keep the "
                    f"shape and the partition{state.order_advice}"
                )
        made = copy(self)
        made.net, made.kernel_names = net, list_kernels(net)
        parts = (kind if isinstance(kind, FieldPartition) else None for kind in kinds)
        made.states = tuple(replace(state, parts=one) for state, one in zip(self.states, parts, strict=False))
        return ShardedLayer(made, found[0], kinds=tuple(found))

    def _shard_net(self, request: ShardingContext, has_cells: bool) -> tuple[Layer, Sequence[Kind]]:
        """Return the model that each rank runs, and the distribution of its outputs."""
        kinds = request.kinds[: len(self._names)]
        if has_cells:
            parts = [kind for kind in kinds if isinstance(kind, FieldPartition)]
            made = partition_model_of_fields(self.net, parts, outputs=kinds)
            return made.model, made.outputs
        walk = ShardingWalk(1, None, {}, request.redistribution_functions)
        return walk.shard_layer(self.net, request.path, kinds)

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        given, fields = x if self.n_inputs != 1 else (x,), self.states
        others, walls = tuple(given[len(fields) : len(self._names)]), tuple(given[len(self._names) :])
        windows, constants = zip(*[f.split(self, a) for f, a in zip(fields, given, strict=False)], strict=True)
        for field, window, own in zip(fields, windows, walls, strict=False):
            field.require_fitting_walls(self, window[0], own, self.steps)
        noisy = [
            [field.add_noise(env, self, state, i) for i, state in enumerate(window)]
            for field, window in zip(fields, windows, strict=True)
        ]
        states, found = list(zip(*noisy, strict=True)), []
        last = states[-1]
        for step in range(self.steps):
            inputs = self._make_step_inputs(env, SavedStates(tuple(states), constants, others), step)
            y, _ = self.net.forward(env.child(f"step{step}"), p, inputs)
            found.append(y if len(fields) > 1 else (y,))
            for field, result, own in zip(fields, found[-1], last, strict=True):
                field.require_fitting_result(self, result, own)
            if step < self.steps - 1:
                around = [f.take_walls(a, b.shape[1], step + 1) for f, a, b in zip(fields, walls, last, strict=False)]
                rows = zip(fields, found[-1], around or last, strict=True)
                states.append(tuple([field.fill_ghosts(env, result, initial) for field, result, initial in rows]))
        kept = (None,) * self.pushforward + tuple(states[self.pushforward :])
        by_field = zip(fields, zip(*found, strict=True), strict=True)
        y = unwrap_single([concatenate_on_device(env.xp, list(one), field.stack_dim) for field, one in by_field])
        return y, tuple(SavedStates(kept, constants, others, walls))

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Any) -> tuple[Any, Any]:
        kept = []

        def run_step(step: int, at: LayerContext, held: Any, dy_step: Any) -> Any:
            dx, more = self.net.backward_input(at, p, held, dy_step)
            kept.append((step, more))
            return dx

        return self._run_steps_backward(env, p, SavedStates(*saved), dy, run_step), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for step, more in kept:
            self.net.backward_params(env.child(f"step{step}"), g, more)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> Any:
        def run_step(step: int, at: LayerContext, held: Any, dy_step: Any) -> Any:
            return self.net.backward(at, p, g, held, dy_step)

        return self._run_steps_backward(env, p, SavedStates(*saved), dy, run_step)

    def _run_steps_backward(
        self, env: LayerContext, p: Params, saved: SavedStates, dy: Any, run_step: Callable[..., Any]
    ) -> Any:
        """Run the backward passes of all steps that have a gradient, in reverse order, and return the gradients of the
        inputs. `run_step(step, context, saved, dy)` runs the backward pass of one step, and returns the gradients with
        respect to the model's inputs."""
        dys = dy if self.n_outputs > 1 else (dy,)
        dtype = next(one.dtype for one in dys if one is not None)
        rows = zip(self.states, saved.states[-1] or (), saved.constants, saved.walls or dys, strict=True)
        gradients = [
            StateGradients(env, field, self.steps, state, constants, walls if saved.walls else None, dtype)
            for field, state, constants, walls in rows
        ]
        per_step = [dict[int, Array]() for _ in saved.others]
        for step in reversed(range(self.pushforward, self.steps)):
            dresults = [one.take_gradient_of_result(own, step) for one, own in zip(gradients, dys, strict=True)]
            at = env.child(f"step{step}")
            held = self.net.forward(replace(at, recomputing=True), p, self._make_step_inputs(env, saved, step))[1]
            found = run_step(step, at, held, unwrap_single(dresults))
            dwindows = found if len(self._names) > 1 else (found,)
            for gradient, dwindow in zip(gradients, dwindows, strict=False):
                if dwindow is not None:
                    gradient.add_gradient_of_input(dwindow, step, self.detach)
            for found_per_step, dother in zip(per_step, dwindows[len(gradients) :], strict=True):
                if dother is not None:
                    found_per_step[step] = dother
        others = zip(self._names[len(gradients) :], saved.others, per_step, strict=True)
        dothers = [self._join_step_gradients_of_input(env.xp, *row) for row in others]
        dwalls = [one.boundary for one in gradients if one.boundary is not None]
        return unwrap_single([*(one.join_gradient_of_input() for one in gradients), *dothers, *dwalls])

    def require_ghost_cells(self, parts: FieldPartition | None) -> None:
        """Check that the states have ghost cells if the Rollout has boundary values.

        Parameters
        ----------
        parts : partition of the states; None on one rank

        Raises
        ------
        ConfigError
            if there are boundary values, and the states have no ghost cells
        """
        for state in self.states if self.boundary else ():
            state.require_ghost_cells(self, parts)

    def _join_step_gradients_of_input(self, xp: Any, name: str, other: Array, found: dict[int, Array]) -> Array | None:
        """Return the gradient of an input other than the states. `found` maps each step to the gradient of the input's
        values in that step. If `found` is empty, as for integer inputs, return None."""
        if not found:
            return None
        if name not in self.forcing:
            return sum(list(found.values())[1:], start=next(iter(found.values())))
        zeros = xp.zeros_like(next(iter(found.values())))
        return concatenate_on_device(xp, [found.get(step, zeros) for step in range(self.steps)], self._get_dim(other))

    def get_declared_input_names(self) -> tuple[str, ...]:
        """Return the names of the model's inputs, followed by a name for each input with boundary values."""
        names = list(self._names)
        for state in self.states if self.boundary else ():
            name = f"{state.label}_boundary" if state.label else "boundary"
            while name in names:
                name += "_"
            names.append(name)
        return tuple(names)

    def get_declared_output_names(self) -> tuple[str, ...]:
        return list_output_names(self.net)

    @property
    def boundary(self) -> bool:
        """Whether the last inputs hold the boundary values of each step."""
        return self.n_inputs != len(self._names)

    @property
    def parts(self) -> FieldPartition | None:
        """Partition of the first state that is a field, with ghost cells. If None, this rank holds the full fields."""
        return next((state.parts for state in self.states if state.parts is not None), None)

    def _get_dim(self, other: Array) -> int:
        """Return the dim along which the values of all steps are stacked in `other`, which is any input except the
        states. For scalars, (samples, n), this is the last dim."""
        return min(max(state.stack_dim for state in self.states), other.ndim - 1)

    def _make_step_inputs(self, env: LayerContext, saved: SavedStates, step: int) -> Any:
        """Return the model's inputs for one step: a single array, or a tuple if there are several inputs."""
        times, given = saved.states[step : step + self.inputs], []
        for number, (field, constants) in enumerate(zip(self.states, saved.constants, strict=True)):
            window = [at[number] for at in times if at is not None] + ([] if constants is None else [constants])
            given.append(window[0] if len(window) == 1 else concatenate_on_device(env.xp, window, field.stack_dim))
        for name, other in zip(self._names[len(given) :], saved.others, strict=True):
            if name in self.forcing:
                dim = self._get_dim(other)
                size, rest = divmod(other.shape[dim], self.steps) if other.ndim > 1 else (0, 0)
                if size < 1 or rest:
                    raise ShapeError(
                        f"{self!r} wants {self.steps} values of forcing {name!r} in dim {dim}, got {tuple(other.shape)}"
                    )
                other = env.xp.ascontiguousarray(take_range(other, dim, step * size, size))
            given.append(other)
        return unwrap_single(given)

    def require_fit_local_part(self, find_cells: Callable[[FieldPartition], tuple[int, ...]]) -> None:
        for state in self.states:
            if state.parts is not None:
                state.require_local_cells(self, find_cells(state.parts))


def _parse_each(
    name: str, value: Any, count: int, is_shared: bool, parse: Callable[[str, Any], Any]
) -> tuple[Any, ...]:
    """Return a tuple with the result of `parse(name, entry)` for each of `count` states. If `is_shared`, or if there is
    only one state, `value` itself is the entry of each state. Otherwise, `value` is a sequence with one entry per
    state."""
    if count == 1 or is_shared:
        value = [value] * count
    elif not isinstance(value, list | tuple) or len(value) != count:
        raise ConfigError(
            f"Rollout: the model has {count} states: {name} must be a tuple with one entry for each, got "
            f"{shorten_value(value)}"
        )
    return tuple([parse(name, one) for one in value])


def _parse_whole_number(name: str, value: Any, stop: float = math.inf) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value < stop:
        below = "" if stop == math.inf else f", below steps={stop}"
        raise ConfigError(f"Rollout: {name} must be a whole number >= 0{below}, got {value!r}")
    return int(value)


def _parse_noise(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ConfigError(f"Rollout: {name} must be a number >= 0, got {value!r}")
    return float(value)


def _parse_weights(name: str, value: Any) -> CellWeights | None:
    return None if value is None else CellWeights("Rollout", value)
