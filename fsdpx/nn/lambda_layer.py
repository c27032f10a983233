"""Lambda: a layer that applies a NumPy function to each element, with a derivative that is checked numerically."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Array, Layer, LayerContext, Params
from fsdpx.nn.shape import require_equal_shapes

__all__ = ["Lambda"]

Function = Callable[..., Any]
POINTS, STEP, TOLERANCE = 64, 1e-6, 1e-5


class Lambda(Layer):
    """Applies a differentiable function to each element of an array, for example `Lambda(np.sin, np.cos)`, or to
    corresponding elements of several arrays.

    The constructor compares the derivative with central differences at 64 normally distributed points, except where the
    central differences are not finite. The constructor raises ConfigError if the derivative does not match the central
    differences, if the function does not act on each element separately, or if the function converts float32 to
    float64.

    Parameters
    ----------
    function : function of one or several arrays of equal shape, written with NumPy functions, which also accept CuPy
        arrays
    derivative : function that takes the arguments of `function` and returns the derivative of `function`; for several
        inputs, a tuple with the partial derivative for each input
    """

    acts_on = "element"

    def __init__(self, function: Function, derivative: Function | Sequence[Function]) -> None:
        self.function = function
        self.derivative = tuple(derivative) if isinstance(derivative, Sequence) else (derivative,)
        self.n_inputs = len(self.derivative)
        if not self.derivative or not all(map(callable, (function, *self.derivative))):
            raise ConfigError(f"Lambda({function!r}, {derivative!r}): a function and its derivative are needed")
        for role, candidate in (("function", function), *(("derivative", by) for by in self.derivative)):
            if not _accepts_argument_count(candidate, self.n_inputs):
                raise ConfigError(
                    f"{self!r}: the {role} does not take {self.n_inputs} inputs, which is the number of derivatives: "
                    "two inputs need a tuple of two derivatives, nn.Lambda(f, (by_a, by_b)), each of both inputs"
                )
        with np.errstate(all="ignore"):
            self._require_elementwise_functions()

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        inputs = self._as_inputs(x)
        require_equal_shapes(self, inputs)
        if getattr(env.xp, "holds_no_data", False):  # the shape and dtype are known, so the function need not run
            return env.xp.empty_like(inputs[0]), inputs
        return self.function(*inputs).astype(inputs[0].dtype, copy=False), inputs

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        if getattr(env.xp, "holds_no_data", False):
            dx = [env.xp.empty_like(dy) for _ in self.derivative]
        else:
            dx = [(dy * by(*saved)).astype(dy.dtype, copy=False) for by in self.derivative]
        return (dx[0] if len(dx) == 1 else tuple(dx)), ()

    def __repr__(self) -> str:
        first, *by = (getattr(f, "__name__", type(f).__name__) for f in (self.function, *self.derivative))
        return f"Lambda({first}, {by[0] if len(by) == 1 else '(' + ', '.join(by) + ')'})"

    def _as_inputs(self, x: Any) -> tuple[Array, ...]:
        return (x,) if self.n_inputs == 1 else tuple(x)

    def _require_elementwise_functions(self) -> None:
        x = [np.random.default_rng(seed).standard_normal(POINTS) for seed in range(len(self.derivative))]
        y = np.asarray(self.function(*x))
        turned = np.asarray(self.function(*(a[::-1].copy() for a in x)))
        if y.shape != x[0].shape or not np.array_equal(turned[::-1], y, equal_nan=y.dtype.kind == "f"):
            raise ConfigError(f"{self!r}: the function does not act on each element by itself; write a layer instead")
        narrow = [a.astype(np.float32) for a in x]
        for role, function in (("function", self.function), *(("derivative", by) for by in self.derivative)):
            if (kind := (narrow[0] * function(*narrow)).dtype) != np.float32:
                raise ConfigError(f"{self!r}: the {role} turns float32 into {kind}: make constants Python floats")
        for i, by in enumerate(self.derivative):
            self._require_matching_derivative(x, i, by, y)

    def _require_matching_derivative(self, x: list[np.ndarray], i: int, by: Function, y: np.ndarray) -> None:
        """Raise ConfigError unless `by`, the derivative with respect to input number `i`, agrees with central
        differences."""
        sides = [self.function(*x[:i], x[i] + step, *x[i + 1 :]) for step in (STEP, -STEP)]
        want, got = (sides[0] - sides[1]) / (2 * STEP), np.broadcast_to(by(*x), y.shape)
        finite = np.isfinite(want)
        if not finite.any():
            raise ConfigError(f"{self!r}: the function has no finite value between -2 and 2, so it cannot be checked")
        limit = TOLERANCE * np.maximum(np.abs(want), 1.0) + np.finfo(float).eps / STEP * np.abs(y)
        wrong = np.flatnonzero(finite & ~(np.abs(got - want) <= limit))
        if len(wrong):
            wrong_row, which = int(wrong[0]), f" by input {i}" if len(x) > 1 else ""
            place = ", ".join(f"{float(a[wrong_row]):.6g}" for a in x)
            raise ConfigError(
                f"{self!r}: at {place} the derivative{which} gives {float(got[wrong_row]):.6g}, but the function "
                "rises by "
                f"{float(want[wrong_row]):.6g}"
            )


def _accepts_argument_count(function: Function, inputs: int) -> bool:
    """Return whether the function can be called with `inputs` positional arguments; True if its signature is unknown.
    """
    if isinstance(function, np.ufunc):
        return function.nin == inputs
    try:
        expects = signature(function)
    except (TypeError, ValueError):  # compiled functions may lack a signature
        return True
    try:
        expects.bind(*range(inputs))
    except TypeError:
        return False
    return True
