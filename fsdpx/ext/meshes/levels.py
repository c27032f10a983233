"""Layers that move values between a mesh and a coarser one."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple, Protocol

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.ghosts import append_ghosts, append_ghosts_backward
from fsdpx.ext.meshes.local_graph import LocalGraph, MeshPartition, require_node_features
from fsdpx.ext.meshes.over_mesh import TakesRows
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, ShardedLayer
from fsdpx.nn.shard_specs import Kind, ShardingContext

__all__ = ["LevelLink", "LinkedMeshes", "Prolong", "Restrict"]


class LevelLink(NamedTuple):
    """The map between two levels on one rank.

    Attributes
    ----------
    graph : a graph whose nodes are the coarse nodes. It has one edge per fine node, whose sender is the coarse node to
        which the fine node belongs. The edges have no receivers
    fine, coarse : how node values of the two meshes are distributed over the ranks
    """

    graph: LocalGraph
    fine: MeshPartition
    coarse: MeshPartition


class LinkedMeshes(Protocol):
    """Protocol with the attributes of a `MeshLevel` that layers use.

    Attributes
    ----------
    fine, coarse : the two meshes, named in error messages
    shares : 1 / (number of fine nodes that belong to the coarse node), for each coarse node of this rank
    """

    fine: Any
    coarse: Any
    shares: np.ndarray

    def find_node_map(self, kind: Kind) -> LevelLink: ...


class _BetweenLevels(Layer, TakesRows):
    """Base class for the layers that move values between the two meshes of a `MeshLevel`."""

    level: LinkedMeshes
    reads_fine: bool
    kernel_names = ("segment_sum",)
    link: LocalGraph | None = None

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        request.require_no_tensor_plan_mark(self)
        (kind,), made = request.kinds, copy(self)
        found = self.level.find_node_map(kind)
        source, result = (found.fine, found.coarse) if self.reads_fine else (found.coarse, found.fine)
        if kind != source:
            wanted = self.level.fine if self.reads_fine else self.level.coarse
            raise ConfigError(f"{request.path!r} {self!r} reads {kind}, and needs the nodes of {wanted}")
        made.link = found.graph
        return ShardedLayer(made, result)

    def _get_link(self) -> LocalGraph:
        if self.link is None:
            raise ConfigError(f"{self!r} needs a mesh: give distribute domain=fsdpx.Partition(...)")
        return self.link

    def _sum_to_coarse(self, env: LayerContext, fine: Array) -> Array:
        """Sum the values of the fine nodes that belong to each coarse node."""
        link = self._get_link()
        return append_ghosts_backward(env, link, link.sum_at_senders(env, fine))

    def _copy_to_fine(self, env: LayerContext, coarse: Array) -> Array:
        """Copy each coarse node's value to the fine nodes that belong to it."""
        link = self._get_link()
        return link.gather_senders(env, append_ghosts(env, link, self, coarse))


class Restrict(_BetweenLevels):
    """Restriction to a coarser mesh: (samples, fine nodes, features) -> (samples, coarse nodes, features). A coarse
    node gets the mean or the sum of the values of the fine nodes that belong to it, or 0 if there are none.

    If some of a rank's fine nodes belong to a coarse node on another rank, the rank sends only the sum of their values
    to that rank.

    Parameters
    ----------
    level : the `MeshLevel` of the two meshes
    how : "mean" (default) or "sum"
    """

    reads_fine = True

    def __init__(self, level: LinkedMeshes, how: str = "mean") -> None:
        if how not in ("mean", "sum"):
            raise ConfigError(f'Restrict: how={how!r}: choose "mean" or "sum"')
        self.level, self.how = level, how

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_node_features(self, x, self._get_link().edges)
        return self._multiply_by_shares(env, self._sum_to_coarse(env, x)), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return self._copy_to_fine(env, self._multiply_by_shares(env, dy)), ()

    def _multiply_by_shares(self, env: LayerContext, y: Array) -> Array:
        if self.how == "sum" or getattr(env.xp, "holds_no_data", False):
            return y
        return y * env.xp.asarray(self.level.shares.astype(y.dtype))[:, None]


class Prolong(_BetweenLevels):
    """Prolongation from a coarser mesh: (samples, coarse nodes, features) -> (samples, fine nodes, features). A fine
    node gets the value of the coarse node that it belongs to.

    Parameters
    ----------
    level : the `MeshLevel` of the two meshes
    """

    reads_fine = False

    def __init__(self, level: LinkedMeshes) -> None:
        self.level = level

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return self._copy_to_fine(env, x), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return self._sum_to_coarse(env, dy), ()
