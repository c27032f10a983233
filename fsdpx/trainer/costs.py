"""Measured costs of a model's layers, for cutting it into stages of equal time."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx.array.random import Random
from fsdpx.comm.mesh import alone
from fsdpx.engine.warm import warm
from fsdpx.nn.layer import Env, Layer, dotted
from fsdpx.nn.sort import Node, Sorted, as_taken, sort, specs_of, with_numbers

__all__ = ["layer_costs"]


def layer_costs(model: Layer, x: Any, repeat: int = 3, dtype: str = "float32", seed: int = 0) -> dict[str, float]:
    """Path of each layer -> seconds of its forward and backward, for `distribute(costs=...)`. Without communication.

    Under MPI measure on one rank and hand the result to all, or the ranks would cut differently:
    `comm.all_gather_plain(layer_costs(...) if comm.rank == 0 else None)[0]`.

    Parameters
    ----------
    model : the model, as for `distribute`
    x : a batch, an array or a tuple of them
    repeat : number of runs, of which the quickest counts
    dtype : of parameters
    seed : of their initial values
    """
    ordered, xp = sort(with_numbers(model, dtype)), np
    warm(xp, model, None, None, (dtype, dtype, dtype), norm=False)
    made = {
        name: spec.init(seed, name, 0, spec.size, spec.shape).astype(dtype).reshape(spec.shape)
        for name, spec in specs_of(ordered).items()
    }
    arrays = x if isinstance(x, tuple) else (x,)
    given = [as_taken(a, word, dtype) for a, word in zip(arrays, ordered.takes, strict=True)]
    runs = [_once(ordered, made, given, seed) for _ in range(repeat)]
    return {path: min(run[path] for run in runs) for path in runs[0]}


def _once(model: Sorted, parameters: Mapping[str, Any], x: list[Any], seed: int) -> dict[str, float]:
    root = Env(np, alone(), Random(seed), True)
    values = list(x)
    saved, costs = [], {}
    for node in model.nodes:
        p, inputs = _arrays(model, node, parameters), tuple(values[v] for v in node.inputs)
        begin = perf_counter()
        y, kept = node.layer.forward(root.at(node.path), p, inputs[0] if len(inputs) == 1 else inputs)
        costs[node.path] = perf_counter() - begin
        values.append(y)
        saved.append(kept)
    for node, kept in zip(reversed(model.nodes), reversed(saved), strict=True):
        p = _arrays(model, node, parameters)
        trained = {name for name, spec in node.layer.specs().items() if spec.trainable}
        g = {name: np.zeros_like(array) for name, array in p.items() if name in trained}
        dy = np.ones_like(values[node.output])
        begin = perf_counter()
        node.layer.backward(root.at(node.path), p, g, kept, dy)
        costs[node.path] += perf_counter() - begin
    return costs


def _arrays(model: Sorted, node: Node, parameters: Mapping[str, Any]) -> dict[str, Any]:
    names = {local: dotted(node.path, local) for local in node.layer.specs()}
    return {local: parameters[model.ties.get(full, full)] for local, full in names.items()}
