"""Layers made from functions that another library, such as autograd or JAX, differentiates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from autograd import make_vjp

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.interop.initial_values import InitialValues
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params

__all__ = ["AutogradFunction", "DifferentiableLayer"]


class DifferentiableLayer(Layer):
    """Base class for layers that compute `y = function(params, *inputs)`. The subclass differentiates the function.

    `function` must be deterministic and return one array whose dim 0 is the sample dim. `names` are the names of the
    parameters, in the order of their initial values. `n_inputs` is the number of arrays that the function takes in
    addition to the parameters."""

    kernel_names = None
    takes = "given"
    given_values: InitialValues

    def __init__(self, function: Callable[..., Any], initial_values: Mapping[str, Any], n_inputs: int) -> None:
        if not callable(function):
            raise ConfigError(f"{type(self).__name__}({function!r}, ...): a function of (params, x) is needed")
        self.function, self.n_inputs = function, n_inputs
        arrays = {name: np.asarray(value) for name, value in initial_values.items()}
        for name, array in arrays.items():
            if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
                raise ConfigError(f"{self!r}: parameter {name!r} is {array.dtype}; parameters are floats")
        self.names = tuple(arrays)
        self.given_values = InitialValues(arrays)
        self._shapes = {name: array.shape for name, array in arrays.items()}

    @abstractmethod
    def evaluate_function(self, xp: Any, p: Sequence[Array], inputs: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """Evaluate the function. Return its result and the arrays to keep for `pull_back_gradients`.

        In a dry run, arrays are shape-only."""

    @abstractmethod
    def pull_back_gradients(
        self, xp: Any, kept: Sequence[Array], p: Sequence[Array], inputs: Sequence[Array], dy: Array
    ) -> tuple[Sequence[Array | None], Sequence[Array]]:
        """Return the gradients of the inputs and of the parameters, given the gradient `dy` of the output. The
        gradient of an integer input is None."""

    def specs(self) -> dict[str, ParameterSpec]:
        return self.given_values.make_parameter_specs(self._shapes, self.names)

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        inputs = x if isinstance(x, tuple) else (x,)
        y, kept = self.evaluate_function(env.xp, [p[name] for name in self.names], inputs)
        if not y.shape or y.shape[0] != inputs[0].shape[0]:
            raise ShapeError(
                f"{self!r} gives an array of shape {tuple(y.shape)} for inputs of {inputs[0].shape[0]} samples: dim 0 "
                "of the result is samples"
            )
        return y, (*inputs, *kept)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        inputs, kept = saved[: self.n_inputs], saved[self.n_inputs :]
        dx, dp = self.pull_back_gradients(env.xp, kept, [p[name] for name in self.names], inputs, dy)
        return (dx[0] if self.n_inputs == 1 else tuple(dx)), dict(zip(self.names, dp, strict=True))

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for name, gradient in kept.items():
            if name in g:
                g[name][...] += gradient

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.function, '__name__', type(self.function).__name__)})"


class AutogradFunction(DifferentiableLayer):
    """A layer that computes a function written with `autograd.numpy`. All of its parameters are gathered and freed
    together.

    The backward pass evaluates the function again. Otherwise, autograd would keep references to parameters, whose
    memory is freed between the forward and backward passes. A dry run evaluates the function once, with zeros. Only
    NumPy arrays are supported.

    Parameters
    ----------
    function : y = function(params, *inputs), where y is one array, and dim 0 of y and of the inputs is the sample dim
    params : nested dicts, lists and tuples of initial values. All ranks use the values of rank 0. Parameters are named
        by their paths, such as "0.w" in [{"w": ...}]
    inputs : number of arrays that the function takes in addition to `params`; default 1

    Raises
    ------
    ConfigError : for parameters that are not floats, or a function that autograd cannot differentiate
    """

    def __init__(self, function: Callable[..., Any], params: Any, inputs: int = 1) -> None:
        super().__init__(function, dict(_iterate_named_leaves(params)), inputs)
        # nested structure of the parameters, with each array replaced by its index
        self._params = _unflatten_leaves(params, iter(range(len(self.names))))

    def evaluate_function(self, xp: Any, p: Sequence[Array], inputs: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        if getattr(xp, "holds_no_data", False):
            zeros = [[np.zeros(a.shape, a.dtype) for a in arrays] for arrays in (p, inputs)]
            y = self._call_function(*zeros)
            self._make_pullback(*zeros)  # raises ConfigError if autograd cannot differentiate the function
            return xp.empty(y.shape, dtype=y.dtype), ()
        return self._call_function(p, inputs), ()

    def pull_back_gradients(
        self, xp: Any, kept: Sequence[Array], p: Sequence[Array], inputs: Sequence[Array], dy: Array
    ) -> tuple[Sequence[Array | None], Sequence[Array]]:
        if getattr(xp, "holds_no_data", False):
            return [None if has_integer_dtype(a) else xp.empty_like(a) for a in inputs], [xp.empty_like(a) for a in p]
        found = self._make_pullback(p, inputs)(dy)
        dx = iter(found[len(p) :])
        return [None if has_integer_dtype(a) else next(dx) for a in inputs], found[: len(p)]

    def _call_function(self, p: Sequence[Array], inputs: Sequence[Array]) -> Array:
        y = self.function(_unflatten_leaves(self._params, iter(p)), *inputs)
        if not hasattr(y, "shape"):
            raise ConfigError(f"{self!r} gives {type(y).__name__}; a layer gives one array")
        return np.asarray(y, dtype=next((a.dtype for a in (*p, *inputs) if not has_integer_dtype(a)), None))

    def _make_pullback(self, p: Sequence[Array], inputs: Sequence[Array]) -> Callable[[Array], Any]:
        """Evaluate the function, and return its vector-Jacobian product.

        The vector-Jacobian product maps the gradient of the output to the gradients of all parameters, followed by the
        gradients of the inputs that are not integers."""

        def run_function(floats: Any) -> Any:
            rest = iter(floats[len(p) :])
            read = [a if has_integer_dtype(a) else next(rest) for a in inputs]
            return self.function(_unflatten_leaves(self._params, iter(floats[: len(p)])), *read)

        try:
            pulled: Callable[[Array], Any] = make_vjp(run_function)(
                (*p, *(a for a in inputs if not has_integer_dtype(a)))
            )[0]
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(f"{self!r}: autograd cannot differentiate it: {str(error).splitlines()[0]}") from error
        return pulled


def _iterate_named_leaves(params: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, array) for each array in nested dicts, lists and tuples, with paths such as "0.w"."""
    inner = (
        params.items() if isinstance(params, dict) else enumerate(params) if isinstance(params, list | tuple) else None
    )
    if inner is None:
        yield path or "value", params
        return
    for key, value in inner:
        yield from _iterate_named_leaves(value, f"{path}.{key}" if path else str(key))


def _unflatten_leaves(params: Any, leaves: Iterator[Any]) -> Any:
    """Return the nested structure of `params` with arrays replaced by `leaves` and tuples replaced by lists."""
    if isinstance(params, dict):
        return {key: _unflatten_leaves(value, leaves) for key, value in params.items()}
    if isinstance(params, list | tuple):
        return [_unflatten_leaves(value, leaves) for value in params]
    return next(leaves)
