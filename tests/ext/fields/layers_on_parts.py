"""Layers and losses on parts of fields, compared with those on one rank that has the whole field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from grids import cuts_of, env_of, noise, part, place_of, whole

from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.ext.fields.over_parts import partition_model
from fsdpx.nn import Container, Layer, Loss
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext
from fsdpx.testing import assert_close


@dataclass
class Ran:
    """What a layer gave: its result, the gradient of its input, those of its parameters, and how the result is cut."""

    y: np.ndarray
    dx: np.ndarray
    g: dict[str, np.ndarray]
    outputs: FieldPartition


def each(call: Any, x: Any) -> Any:
    """Of an array, or of each of a tuple."""
    return tuple(map(call, x)) if isinstance(x, tuple) else call(x)


def run_alone(layer: Layer, p: dict[str, np.ndarray], x: Any, dy: Any) -> Ran:
    """x: an array or a tuple. dy: a function of the result. Gradients of several inputs lie one after the other."""
    env = env_of(None)
    y, saved = layer.forward(env, p, x)
    g = {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}
    dx = layer.backward(env, p, g, saved, dy(y))
    return Ran(y, np.concatenate(dx) if isinstance(dx, tuple) else dx, g, FieldPartition.on_one_rank(y.shape[2:]))


def run_over(layer: Layer, p: dict[str, np.ndarray], x: Any, dy: np.ndarray, dims: Any, parts: FieldPartition) -> Ran:
    """The same on ranks that have `parts` of x; gradients of parameters are summed over them."""
    if isinstance(layer, Container):
        mine, outputs = partition_model(layer, parts)
    else:
        portion = layer.shard_over_ranks(ShardingContext("layer", [parts] * (len(x) if isinstance(x, tuple) else 1), 1))
        assert isinstance(portion.kind, FieldPartition)
        mine, outputs = portion.layer, portion.kind

    def one(comm: Communicator) -> Ran:
        env, place = env_of(comm, dims), place_of(comm.rank, dims)
        y, saved = mine.forward(env, p, each(lambda a: part(a, parts.cuts, place), x))
        g = {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}
        dx = mine.backward(env, p, g, saved, part(dy, outputs.cuts, place))
        return Ran(y, np.concatenate(dx) if isinstance(dx, tuple) else dx, g, outputs)

    found = spawn(one, int(np.prod(dims)))
    g = {name: sum(ran.g[name] for ran in found) for name in found[0].g}
    y, dx = (whole(a, q, dims) for a, q in (([r.y for r in found], outputs), ([r.dx for r in found], parts)))
    return Ran(y, dx, g, outputs)


def loss_over(
    loss: Any, y: np.ndarray, target: np.ndarray, dims: Any, parts: FieldPartition
) -> tuple[float, float, np.ndarray]:
    """Total, weight and gradient of a loss on ranks that have `parts`. loss: a function of (parts, place) or a loss."""

    def one(comm: Communicator) -> tuple[float, float, np.ndarray]:
        place = place_of(comm.rank, dims)
        made = loss if isinstance(loss, Loss) else loss(parts, place)
        mine, t = part(y, parts.cuts, place), part(target, parts.cuts, place)
        made.validate(mine.shape, t)
        env, bound = env_of(comm, dims), made.bind_partition(parts)
        total, weight, saved = bound.forward(env, mine, t)
        return total, weight, bound.backward(env, saved, 0.5)

    found = spawn(one, int(np.prod(dims)))
    return sum(f[0] for f in found), sum(f[1] for f in found), whole([f[2] for f in found], parts, dims)


def demand_loss_of_whole(
    loss: Loss, y: np.ndarray, target: np.ndarray, dims: Any, seed: int, rtol: float = 1e-10, atol: float = 1e-14
) -> None:
    """A loss over parts of any sizes has the values of the whole to 1e-12, and its gradient to `rtol` and `atol`."""
    total, weight, saved = loss.forward(env_of(None), y, target)
    dy = loss.backward(env_of(None), saved, 0.5)
    found = loss_over(loss, y, target, dims, cuts_of(y.shape[2:], dims, seed))
    assert found[:2] == pytest.approx((total, weight), rel=1e-12)
    np.testing.assert_allclose(found[2], dy, rtol=rtol, atol=atol)


def demand_layer_of_whole(layer: Layer, p: dict[str, np.ndarray], x: Any, dims: Any, seed: int) -> tuple[Ran, Ran]:
    """A layer over parts of any sizes gives what it gives alone: results and gradients. Returns both, alone first."""
    alone = run_alone(layer, p, x, lambda y: noise(*y.shape, seed=1))
    cells = (x[0] if isinstance(x, tuple) else x).shape[2:]
    found = run_over(layer, p, x, noise(*alone.y.shape, seed=1), dims, cuts_of(cells, dims, seed))
    assert_close({"y": found.y, "dx": found.dx, **found.g}, {"y": alone.y, "dx": alone.dx, **alone.g}, 1e-12)
    return alone, found


def demand_adjoint(ran: Ran, x: np.ndarray, zero: np.ndarray | float = 0.0) -> None:
    """<F x, dy> = <x, F* dy> to 1e-13 of |F x| |dy|, for the dy of `demand_layer_of_whole`. zero: the result for 0."""
    y, dy = ran.y - zero, noise(*ran.y.shape, seed=1)
    assert abs((y * dy).sum() - (x * ran.dx).sum()) <= 1e-13 * np.linalg.norm(y) * np.linalg.norm(dy)
