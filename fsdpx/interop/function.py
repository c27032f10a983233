"""A function of parameters and inputs that another library differentiates, as a layer: what these have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.interop.values import Values
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec

__all__ = ["Differentiable"]


class Differentiable(Layer):
    """The base of layers that are a function `y = function(params, *inputs)`. Subclasses say how it is differentiated.

    function: gives one array whose dim 0 is samples, and computes the same whenever it gets the same. names: of the
    parameters, in the order of their first values. n_inputs: arrays that it takes beside the parameters."""

    takes = "given"

    def __init__(self, function: Callable[..., Any], first: Mapping[str, Any], n_inputs: int) -> None:
        if not callable(function):
            raise ConfigError(f"{type(self).__name__}({function!r}, ...): a function of (params, x) is needed")
        self.function, self.n_inputs = function, n_inputs
        arrays = {name: np.asarray(value) for name, value in first.items()}
        for name, array in arrays.items():
            if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
                raise ConfigError(f"{self!r}: parameter {name!r} is {array.dtype}; parameters are floats")
        self.names = tuple(arrays)
        self.values = Values(arrays)
        self._shapes = {name: array.shape for name, array in arrays.items()}

    @abstractmethod
    def evaluate(self, xp: Any, p: Sequence[Array], inputs: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """The result, and what `pull` needs beside its other arguments. Arrays may be shape-only."""

    @abstractmethod
    def pull(
        self, xp: Any, kept: Sequence[Array], p: Sequence[Array], inputs: Sequence[Array], dy: Array
    ) -> tuple[Sequence[Array | None], Sequence[Array]]:
        """Gradients of the inputs, None for those of integers, and of the parameters."""

    def specs(self) -> dict[str, Spec]:
        return self.values.specs(self._shapes, self.names)

    def forward(self, env: Env, p: Params, x: Any) -> tuple[Array, Any]:
        inputs = x if isinstance(x, tuple) else (x,)
        y, kept = self.evaluate(env.xp, [p[name] for name in self.names], inputs)
        if not y.shape or y.shape[0] != inputs[0].shape[0]:
            raise ShapeError(
                f"{self!r} gives an array of shape {tuple(y.shape)} for inputs of {inputs[0].shape[0]} samples: dim 0 "
                "of the result is samples"
            )
        return y, (*inputs, *kept)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        inputs, kept = saved[: self.n_inputs], saved[self.n_inputs :]
        dx, dp = self.pull(env.xp, kept, [p[name] for name in self.names], inputs, dy)
        return (dx[0] if self.n_inputs == 1 else tuple(dx)), dict(zip(self.names, dp, strict=True))

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        for name, gradient in kept.items():
            if name in g:
                g[name][...] += gradient

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.function, '__name__', type(self.function).__name__)})"
