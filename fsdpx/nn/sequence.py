"""Sequence parallelism: layers that shard the model's input and all-gather its output, and losses for sharded
outputs."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import DataError
from fsdpx.nn import collectives
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_time_dim
from fsdpx.nn.linear import make_call_label, require_known_length
from fsdpx.nn.losses import Loss, WrappedLoss

__all__ = ["AllGatherFeatures", "ShardedBatchLoss", "ShardedSequenceLoss", "SplitSequence", "WithInputOutput"]


class SplitSequence(Layer):
    """Takes this rank's shard of a replicated array, along the sequence (dim 1) or the samples (dim 0).

    The backward pass all-gathers the gradient: for an array of n bytes on N ranks, each rank sends n(N-1)/N bytes.
    Integer inputs have no gradient.

    Parameters
    ----------
    dim : the dim to shard, 1 or 0
    """

    takes = "passed"

    def __init__(self, dim: int = 1) -> None:
        self.dim = dim

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if self.dim == 1:
            require_time_dim(x)
            require_known_length(env, x, make_call_label(env, "sequence"))
        elif env.time is None and env.mesh.tensor.size > 1:
            raise DataError(
                f"{make_call_label(env, 'input')}: sequence='samples' takes inputs that all have one length of dim 1"
            )
        return collectives.take_shard(env.xp, env.mesh.tensor, x, self.dim), (has_integer_dtype(x), x.shape[self.dim])

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array | None, Any]:
        index, total = saved
        if index or dy is None:
            return None, ()
        return collectives.all_gather_replicated(
            env.xp, env.mesh.tensor, dy, self.dim, total, what=make_call_label(env, "gradient")
        ), ()


class AllGatherFeatures(Layer):
    """All-gathers an array along its last dim, so that every rank has the full array. `total` is the full size of the
    dim. For an array of n bytes on N ranks, each rank sends n(N-1)/N bytes."""

    def __init__(self, total: int) -> None:
        self.total = total

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return collectives.all_gather_replicated(
            env.xp, env.mesh.tensor, x, -1, self.total, what=make_call_label(env, "output")
        ), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return collectives.take_shard(env.xp, env.mesh.tensor, dy, -1), ()


class WithInputOutput(Layer):
    """Runs a model between two optional layers, one before and one after the model. Unlike in a `Sequential`, the
    names of parameters do not change."""

    def __init__(self, layer: Layer, enter: Layer | None = None, leave: Layer | None = None) -> None:
        self.layer, self.enter, self.leave = layer, enter, leave
        self.collective, self.takes = layer.collective, layer.takes
        self.n_inputs, self.n_outputs = layer.n_inputs, layer.n_outputs

    def specs(self) -> dict[str, Any]:
        return self.layer.specs()

    def children(self) -> dict[str, Layer]:
        return {"": self.layer}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        entered: tuple[Any, ...] = ()
        if self.enter:
            x, entered = self.enter.forward(env, {}, x)
        y, held = self.layer.forward(env, p, x)
        return (self.leave.forward(env, {}, y)[0] if self.leave else y), (entered, held)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Any:
        entered, held = saved
        dx = self.layer.backward(env, p, g, held, self._backward_output_layer(env, dy))
        return self._backward_input_layer(env, entered, dx)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.layer.backward_leaf(env, p, g, saved[1], self._backward_output_layer(env, dy))

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        entered, held = saved
        dx, kept = self.layer.backward_input(env, p, held, self._backward_output_layer(env, dy))
        return self._backward_input_layer(env, entered, dx), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        self.layer.backward_params(env, g, kept)

    def _backward_output_layer(self, env: LayerContext, dy: Array) -> Array:
        return self.leave.backward_input(env, {}, (), dy)[0] if self.leave else dy

    def _backward_input_layer(self, env: LayerContext, entered: Any, dx: Any) -> Any:
        return self.enter.backward_input(env, {}, entered, dx)[0] if self.enter else dx


class ShardedBatchLoss(WrappedLoss):
    """Computes `loss` for an output that is sharded by samples (dim 0) over the tensor axis. All ranks have the full
    target.

    The total and the weight cover only this rank's samples. Nothing is communicated."""

    partial = True

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        return self.loss.forward(env, y, collectives.take_shard(env.xp, env.mesh.tensor, target, 0))

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        self.loss.validate((target.shape[0], *shape[1:]), target)


class ShardedSequenceLoss(WrappedLoss):
    """Computes `loss` for an output that is sharded by positions (dim 1) over a tensor axis of `width` ranks. All
    ranks have the full target.

    The total and the weight cover only this rank's positions. Nothing is communicated."""

    acts_on = "position"
    partial = True

    def __init__(self, loss: Loss, width: int) -> None:
        super().__init__(loss)
        self.width = width

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        assert env.mesh.tensor.size == self.width, f"a tensor axis of {env.mesh.tensor.size}, not {self.width}"
        _, time = env.sequence_offset(y.shape[1])
        if target.ndim < 2 or target.shape[1] != time:
            raise DataError(
                f"{self!r}: the output is cut along dim 1 by sequence=..., and the target with it: dim 1 of the target "
                f"must be {time}, got a target of shape {tuple(target.shape)}"
            )
        return self.loss.forward(env, y, collectives.take_shard(env.xp, env.mesh.tensor, target, 1))

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        if len(shape) < 2:
            raise DataError(f"{self!r}: an output of shape {tuple(shape)} has no dim 1 to be cut along")
        time = target.shape[1] if target.ndim > 1 else 0
        # if the output does not fit the target, pass a `time` that does not fit either, so that `self.loss.validate`
        # raises the error
        if shape[1] not in (time // self.width, -(-time // self.width)):
            time = shape[1] * self.width
        self.loss.validate((shape[0], time, *shape[2:]), target)
