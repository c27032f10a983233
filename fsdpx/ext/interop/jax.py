"""JAX functions as layers.

layer = fsdpx.ext.interop.jax.JaxFunction(apply, params)  # y = apply(params, x)"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError
from fsdpx.ext.interop.function_layer import DifferentiableLayer
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.layer import Array

__all__ = ["JaxFunction"]

_lock = threading.Lock()  # ranks that run as threads share the layer, so only one of them may compile at a time


class JaxFunction(DifferentiableLayer):
    """A layer that computes a JAX function of a pytree of parameters. All of its parameters are gathered and freed
    together.

    `jax.jit` compiles the forward and backward passes (`jax.vjp`) separately, once for each input shape. The forward
    pass saves the residuals for the backward pass, except parameters and inputs. Arrays are passed to JAX without
    copies if JAX supports zero-copy transfer.

    Parameters
    ----------
    function : y = function(params, *inputs), which must be pure, as JAX requires; y is one array, and dim 0 of y and of
        the inputs is the sample dim
    params : pytree of the initial values. All ranks use the values of rank 0. Parameters are named by their paths, such
        as "0.w" in [{"w": ...}]
    inputs : number of arrays that the function takes in addition to `params`; default 1

    Raises
    ------
    ConfigError : for parameters that are not floats, a function that JAX cannot differentiate, or float64 without
        `jax.config.update("jax_enable_x64", True)`
    """

    def __init__(self, function: Callable[..., Any], params: Any, inputs: int = 1) -> None:
        leaves, self._tree = tree_util.tree_flatten_with_path(params)
        super().__init__(function, {_format_path(path): leaf for path, leaf in leaves}, inputs)
        self._made: dict[Any, _CompiledFunction] = {}

    def evaluate_function(self, xp: Any, p: Sequence[Array], inputs: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        compiled = self._get_or_compile(p, inputs)
        if getattr(xp, "holds_no_data", False):
            return _make_shape_only(xp, compiled.result), [_make_shape_only(xp, one) for one in compiled.kept]
        y, kept = compiled.forward([_to_jax(a) for a in p], [_to_jax(a) for a in inputs])
        return _from_jax(xp, y), [_from_jax(xp, one) for one in kept]

    def pull_back_gradients(
        self, xp: Any, kept: Sequence[Array], p: Sequence[Array], inputs: Sequence[Array], dy: Array
    ) -> tuple[Sequence[Array | None], Sequence[Array]]:
        whole = [has_integer_dtype(a) for a in inputs]
        if getattr(xp, "holds_no_data", False):
            dx = [None if w else xp.empty_like(a) for w, a in zip(whole, inputs, strict=True)]
            return dx, [xp.empty_like(a) for a in p]
        given = [_to_jax(a) for a in kept], [_to_jax(a) for a in p], [_to_jax(a) for a in inputs]
        dp, found = self._get_or_compile(p, inputs).backward(*given, _to_jax(dy))
        return [None if w else _from_jax(xp, d) for w, d in zip(whole, found, strict=True)], [
            _from_jax(xp, d) for d in dp
        ]

    def _get_or_compile(self, p: Sequence[Array], inputs: Sequence[Array]) -> _CompiledFunction:
        shapes = [[jax.ShapeDtypeStruct(tuple(a.shape), a.dtype) for a in arrays] for arrays in (p, inputs)]
        key = str(shapes)
        with _lock:
            if key not in self._made:
                if any(s.dtype == np.float64 for s in (*shapes[0], *shapes[1])) and not jax.config.jax_enable_x64:
                    raise ConfigError(
                        f'{self!r}: JAX would compute in float32: jax.config.update("jax_enable_x64", True) comes '
                        "first, or precision is float32"
                    )
                self._made[key] = self._compile_function(*shapes)
            return self._made[key]

    def _compile_function(self, p: Any, inputs: Any) -> _CompiledFunction:
        """Return the forward and backward functions, compiled by JAX for inputs of these shapes.

        Forward returns the result and the residuals that backward needs, except parameters and inputs. Parameters are
        excluded because they are freed after forward and gathered again for backward."""
        inner: list[Any] = []

        def evaluate_and_pull(leaves: Any, arrays: Any) -> Any:
            y, pulled = jax.vjp(
                lambda ls, xs: self.function(tree_util.tree_unflatten(self._tree, ls), *xs), leaves, arrays
            )
            held, tree = tree_util.tree_flatten(pulled)
            inner[:] = [tree]
            return y, held

        try:
            traced = jax.make_jaxpr(evaluate_and_pull)(p, inputs).jaxpr
            result, held = jax.eval_shape(evaluate_and_pull, p, inputs)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"{self!r}: JAX cannot differentiate it: {str(error).splitlines()[0]}") from error
        if not hasattr(result, "shape"):
            raise ConfigError(f"{self!r} gives {type(result).__name__}; a layer gives one array")
        tree, given = inner[0], {id(var): n for n, var in enumerate(traced.invars)}
        sources = [given.get(id(var)) for var in traced.outvars[1:]]
        keep = [n for n, source in enumerate(sources) if source is None]

        def run_forward(leaves: Any, arrays: Any) -> Any:
            y, held = evaluate_and_pull(leaves, arrays)
            return y, [held[n] for n in keep]

        def run_backward(kept: Any, leaves: Any, arrays: Any, dy: Any) -> Any:
            left, read = iter(kept), [*leaves, *arrays]
            pulled = tree_util.tree_unflatten(tree, [next(left) if s is None else read[s] for s in sources])
            return pulled(dy)

        return _CompiledFunction(result, [held[n] for n in keep], jax.jit(run_forward), jax.jit(run_backward))


@dataclass(frozen=True)
class _CompiledFunction:
    """The forward and backward functions that JAX compiled for certain input shapes. `result` and `kept` are the shapes
    of the two values that forward returns."""

    result: Any
    kept: list[Any]
    forward: Any
    backward: Any


def _format_path(path: Any) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path) or "value"


def _to_jax(array: Array) -> jax.Array:
    return jax.numpy.asarray(array) if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def _from_jax(xp: Any, array: jax.Array) -> Array:
    """Wait until JAX has computed an array, and return it as an array of `xp`.

    JAX returns arrays before they are computed. Until then, the engine must not reuse the memory of the inputs."""
    done = jax.block_until_ready(array)
    return np.asarray(done) if xp is np else xp.from_dlpack(done)


def _make_shape_only(xp: Any, shape: Any) -> Array:
    name = np.dtype(shape.dtype).name
    return xp.empty(tuple(shape.shape), dtype=parse_dtype("bf16") if name == "bfloat16" else np.dtype(name))
