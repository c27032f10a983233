"""Layers that reshape, combine or scale arrays: Flatten, Add, Multiply, Scale, FirstToken and Concat."""

import math
from typing import Any

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_finite_arguments, require_positive

__all__ = ["Add", "Concat", "FirstToken", "Flatten", "Multiply", "Scale", "require_equal_shapes"]


class Flatten(Layer):
    """Flattens dim `start_dim` and all later dims into one.

    Parameters
    ----------
    start_dim : the first dim to merge, at least 1
    """

    takes = "passed"

    def __init__(self, start_dim: int = 1) -> None:
        require_positive(self, start_dim=start_dim)
        self.start_dim = start_dim

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        # reshape(-1) cannot infer the size if there are 0 samples
        size = math.prod(x.shape[self.start_dim :])
        return x.reshape(*x.shape[: self.start_dim], size), tuple(x.shape)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return dy.reshape(saved), ()


class Add(Layer):
    """Adds several arrays of equal shape."""

    takes = "passed"
    acts_on = "element"
    kernel_names = ("add",)
    n_inputs = None

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, ...]) -> tuple[Array, Any]:
        require_equal_shapes(self, x)
        y = x[0]
        for part in x[1:]:
            y = kernels.add(env.xp, y, part)
        return y, (len(x),)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[tuple[Array, ...], Any]:
        return (dy,) * saved[0], ()


class Multiply(Layer):
    """Multiplies several arrays of equal shape element by element."""

    takes = "passed"
    acts_on = "element"
    n_inputs = None

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, ...]) -> tuple[Array, Any]:
        require_equal_shapes(self, x)
        return math.prod(x[1:], start=x[0]), tuple(x)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[tuple[Array, ...], Any]:
        # the derivative with respect to factor x is the product of the other factors; computing this product as y / x
        # would fail for x = 0
        return tuple(math.prod((*saved[:i], *saved[i + 1 :]), start=dy) for i in range(len(saved))), ()


class Scale(Layer):
    """Multiplies the input by a number.

    Parameters
    ----------
    factor : the number
    """

    acts_on = "element"
    cheap = True

    def __init__(self, factor: float) -> None:
        require_finite_arguments(self, factor=factor)
        self.factor = float(factor)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return (x * self.factor).astype(x.dtype, copy=False), (x,)

    def recompute(self, env: LayerContext, p: Params, saved: Any) -> Array:
        return (saved[0] * self.factor).astype(saved[0].dtype, copy=False)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return (dy * self.factor).astype(dy.dtype, copy=False), ()


class FirstToken(Layer):
    """Selects the first token of each sample: `(samples, time, ...)` -> `(samples, ...)`."""

    takes = "passed"

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return x[:, 0], (tuple(x.shape),)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx = env.xp.zeros(saved[0], dtype=dy.dtype)
        dx[:, 0] = dy
        return dx, ()


class Concat(Layer):
    """Concatenates several arrays along one dim.

    Parameters
    ----------
    dim : the dim along which to concatenate; must not be 0, the sample dim
    """

    takes = "passed"
    n_inputs = None

    def __init__(self, dim: int = -1) -> None:
        if dim == 0:
            raise ConfigError("Concat: dim 0 is samples; choose a dim that lies within one sample")
        self.dim = dim
        # a negative dim other than -1 may refer to dim 1, the positions, so such a layer needs whole samples
        self.acts_on = "position" if dim == -1 or dim > 1 else "sample"
        self.fields = self.takes_ghosts = dim == 1

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, ...]) -> tuple[Array, Any]:
        if any(self.dim == -part.ndim for part in x):
            raise ShapeError(f"{self!r}: dim {self.dim} of {-self.dim} dims is samples; choose a dim within one sample")
        others = {part.shape[: self.dim] + part.shape[self.dim :][1:] for part in x}
        if len(others) != 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in x)
            raise ShapeError(f"{self!r} wants inputs that differ in dim {self.dim} only, got {shapes}")
        return concatenate_on_device(env.xp, x, self.dim), tuple(part.shape[self.dim] for part in x)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[tuple[Array, ...], Any]:
        turned = env.xp.moveaxis(dy, self.dim, 0)
        pieces, start = [], 0
        for size in saved:
            pieces.append(env.xp.moveaxis(turned[start : start + size], 0, self.dim))
            start += size
        return tuple(pieces), ()


def require_equal_shapes(layer: Layer, x: tuple[Array, ...]) -> None:
    shapes = [tuple(part.shape) for part in x]
    if len(set(shapes)) != 1:
        raise ShapeError(f"{layer!r} wants inputs of one shape, got {', '.join(map(str, shapes))}")
