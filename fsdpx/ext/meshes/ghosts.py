"""Exchange of ghosts: each rank receives the values of other ranks' nodes that its own edges read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.ext.meshes.local_graph import GraphLayer, LocalGraph, has_no_data, require_node_features
from fsdpx.nn.layer import Array, LayerContext, Params

__all__ = [
    "ExchangeGhosts",
    "append_ghosts",
    "append_ghosts_backward",
    "start_appending_ghosts",
    "start_appending_ghosts_backward",
]

GHOSTS, GHOST_GRADIENTS = 4, 5
"""Tags of messages with values of ghosts, and of messages with their gradients."""


class ExchangeGhosts(GraphLayer):
    """Appends the values of ghosts (nodes of other ranks) to the values of the owned nodes: (samples, nodes, features)
    -> (samples, nodes + ghosts, features).

    Layers that read the senders of edges exchange ghosts automatically. If several such layers read the same values,
    put this layer before them so that the values are sent only once. Each rank receives ghosts x features numbers per
    sample, and sends back the same number of gradients in the backward pass."""

    gives = "ghosts"

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if self.has_ghosts:
            return x, ()
        return append_ghosts(env, self.graph, self, x), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return (dy if self.has_ghosts else append_ghosts_backward(env, self.graph, dy)), ()


def append_ghosts(env: LayerContext, graph: LocalGraph, layer: Any, x: Array) -> Array:
    """Return the values x (samples, nodes, features) of owned nodes, followed by the values of the ghosts. Communicates
    with the ranks that own this rank's ghosts, and with the ranks that have this rank's nodes as ghosts. Error messages
    name `layer`."""
    return start_appending_ghosts(env, graph, layer, x)()


def append_ghosts_backward(env: LayerContext, graph: LocalGraph, dy: Array) -> Array:
    """Return the gradient with respect to the owned nodes' values, given the gradient dy for owned nodes and ghosts.
    This is the adjoint of `append_ghosts`: each rank sends the gradients of its ghosts to the owners, which add them in
    rank order."""
    return start_appending_ghosts_backward(env, graph, dy)()


def start_appending_ghosts(env: LayerContext, graph: LocalGraph, layer: Any, x: Array) -> Callable[[], Array]:
    """Start the messages of `append_ghosts`. Return a function that waits for them and returns the result of
    `append_ghosts`."""
    require_node_features(layer, x, graph.nodes)
    if not graph.sends and not graph.receives:
        return lambda: x
    xp, (samples, _, features), what = env.xp, x.shape, env.random.path
    ranks, arriving = env.mesh.domain[0], []
    for rank, first, stop in graph.receives:
        flat = xp.empty((samples * (stop - first) * features,), dtype=x.dtype)
        arriving.append((ranks.recv(flat, rank, GHOSTS, what=what), flat, first, stop))
    leaving = [ranks.send(_pack_rows(env, x, rows), rank, GHOSTS, what=what) for rank, rows in _list_sends(env, graph)]

    def finish() -> Array:
        y = xp.empty((samples, graph.row_count, features), dtype=x.dtype)
        y[:, : graph.nodes] = x
        for handle, flat, first, stop in arriving:
            handle.wait()
            y[:, graph.nodes + first : graph.nodes + stop] = flat.reshape(samples, stop - first, features)
        for handle in leaving:
            handle.wait()
        return y

    return finish


def start_appending_ghosts_backward(env: LayerContext, graph: LocalGraph, dy: Array) -> Callable[[], Array]:
    """Start the messages of `append_ghosts_backward`. Return a function that waits for them and returns the result of
    `append_ghosts_backward`."""
    if not graph.sends and not graph.receives:
        return lambda: dy
    xp, (samples, _, features), what, nodes = env.xp, dy.shape, env.random.path, graph.nodes
    ranks, arriving, leaving = env.mesh.domain[0], [], []
    for rank, rows in _list_sends(env, graph):
        flat = xp.empty((samples * rows.size * features,), dtype=dy.dtype)
        arriving.append((ranks.recv(flat, rank, GHOST_GRADIENTS, what=what), flat, rows))
    for rank, first, stop in graph.receives:
        flat = xp.ascontiguousarray(dy[:, nodes + first : nodes + stop]).reshape(-1)
        leaving.append(ranks.send(flat, rank, GHOST_GRADIENTS, what=what))

    def finish() -> Array:
        dx = dy[:, :nodes].copy()
        for handle, flat, rows in arriving:
            handle.wait()
            if not has_no_data(env):
                # a message contains each row at most once; if a row occurred several times, += would add only one of
                # its values
                dx[:, rows] += flat.reshape(samples, rows.size, features)
        for handle in leaving:
            handle.wait()
        return dx

    return finish


def _pack_rows(env: LayerContext, x: Array, rows: Array) -> Array:
    """Pack the rows `rows` of x (samples, nodes, features) into a flat array to send as one message."""
    if has_no_data(env):
        return env.xp.empty((x.shape[0] * rows.size * x.shape[2],), dtype=x.dtype)
    return env.xp.ascontiguousarray(x[:, rows]).reshape(-1)


def _list_sends(env: LayerContext, graph: LocalGraph) -> list[tuple[int, Array]]:
    """Return (receiving rank, owned rows) for each message to send. The rows are arrays on the device of `env`."""
    if env.xp is np or has_no_data(env):
        return list(graph.sends)
    key = "sends of a graph", id(graph)
    if (cached := env.constants.get(key)) is None or cached[0] is not graph.sends:  # the graph may have been replaced
        cached = env.constants[key] = graph.sends, [(rank, env.xp.asarray(rows)) for rank, rows in graph.sends]
    found: list[tuple[int, Array]] = cached[1]
    return found
