"""Which choices go with ranks that step at their own speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fsdpx.comm.mesh import Mesh
from fsdpx.config import Apart, Async, Precision
from fsdpx.errors import ConfigError
from fsdpx.layout.units import Layout
from fsdpx.nn.sort import Sorted
from fsdpx.trainer.choices import is_collective
from fsdpx.trainer.recipe import Recipe

__all__ = ["check_apart"]


def check_apart(
    choice: Apart, mesh: Mesh, recipe: Recipe, layout: Layout, formats: Precision, model: Sorted, xp: Any
) -> None:
    """ConfigError, the same on all ranks, for what needs all ranks in a step, or parameters elsewhere than in host
    memory."""
    found = [*_of_ranks(choice, mesh, recipe, layout, model), *_of_arrays(choice, recipe, layout, formats, xp)]
    if found:
        raise ConfigError(f"strategy {choice!r}: {found[0]}")


def _of_ranks(choice: Apart, mesh: Mesh, recipe: Recipe, layout: Layout, model: Sorted) -> Iterator[str]:
    training, data = recipe.training, recipe.distribution
    for axis in ("pipe", "tensor"):
        if mesh.width(axis) > 1:
            yield f"the {axis} axis of {mesh.width(axis)} ranks keeps step; leave it out"
    other = "replica" if isinstance(choice, Async) else "shard"
    if mesh.width(other) > 1:
        yield f"there is no {other} axis, the mesh says {mesh}; leave mesh out"
    if data.offload is not None:
        yield "what several ranks change does not lie on one rank's disk; leave offload out"
    if training.chunks is not None:
        yield f"chunks={training.chunks} adds the gradients of all ranks along a tree; leave chunks out"
    if data.codec is not None:
        yield f"codec={data.codec!r} carries sums over ranks, and there are none; leave codec out"
    if training.clip_norm is not None and isinstance(choice, Async) and choice.staleness == 0:
        yield f"clip_norm={training.clip_norm}: no rank knows the norm of the sum before it updates; leave it out"
    for node in model.nodes:
        if is_collective(node.layer):
            yield f"layer {node.layer!r} takes statistics over the global batch; use LayerNorm or RMSNorm"
    for name in layout.state:
        yield f"running statistics ({name}) would differ from rank to rank; use LayerNorm or RMSNorm"


def _of_arrays(choice: Apart, recipe: Recipe, layout: Layout, formats: Precision, xp: Any) -> Iterator[str]:
    if xp is not np:
        yield f"parameters lie in a window in host memory, and device={recipe.machinery.device!r}; use device='cpu'"
    if formats.loss_scale == "dynamic":
        yield "loss_scale='dynamic' is found by all ranks together; use a number, or precision='bf16'"
    if formats.updated == "bf16":
        yield "parameters that several ranks update are float32 or float64; use precision='bf16'"
    for name in ("param", "reduce"):
        if getattr(formats, name) is not None:
            yield f"{name}={getattr(formats, name)!r} is a format of messages, and there are none; leave it out"
