"""One rank alone: an Env and parameters to run layers with."""

import numpy as np

from fsdpx.core.array.random import Random
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.nn import LayerContext
from fsdpx.nn.init import make_initial_values


def env(training=True, xp=np, mesh=None, row=0):
    return LayerContext(xp, mesh or make_single_rank_axes(), Random(seed=5, path="", step=0, row=row), training)


def parameters(layer, dtype=np.float64):
    return make_initial_values(layer.specs(), seed=3, dtype=dtype)


def gradients(layer, p):
    return {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}


def run_both(layer, p, x, dy, context=None):
    """Forward and backward: the output, and the gradients of the input and of the parameters."""
    context, g = context or env(), gradients(layer, p)
    y, saved = layer.forward(context, p, x)
    return y, layer.backward(context, p, g, saved, dy), g


def list_leaves(saved):
    """What is in a tuple of tuples, such as a layer keeps for backward."""
    return [leaf for part in saved for leaf in list_leaves(part)] if isinstance(saved, tuple) else [saved]


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)
