"""One rank alone: an Env and parameters to run layers with."""

from typing import Any

import numpy as np

from fsdpx.core.array.random import Random
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.nn import Layer, LayerContext
from fsdpx.nn.init import make_initial_values


def env(training: bool = True, xp: Any = np, mesh: Any = None, row: int = 0) -> LayerContext:
    return LayerContext(xp, mesh or make_single_rank_axes(), Random(seed=5, path="", step=0, row=row), training)


def parameters(layer: Layer, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    return make_initial_values(layer.specs(), seed=3, dtype=dtype)


def gradients(layer: Layer, p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}


def run_both(
    layer: Layer, p: dict[str, np.ndarray], x: Any, dy: Any, context: LayerContext | None = None
) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Forward and backward: the output, and the gradients of the input and of the parameters."""
    context, g = context or env(), gradients(layer, p)
    y, saved = layer.forward(context, p, x)
    return y, layer.backward(context, p, g, saved, dy), g


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)
