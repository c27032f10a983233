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


def draw_gradient(y: np.ndarray) -> np.ndarray:
    """The same for each result of this shape."""
    return noise(*y.shape, seed=1)


def run_alone(layer: Layer, p: dict[str, np.ndarray], x: Any, dy: Any = draw_gradient) -> Ran:
    """x: an array or a tuple. dy: a function of the result. Gradients of several inputs lie one after the other."""
    env = env_of(None)
    y, saved = layer.forward(env, p, x)
    g = {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}
    dx = layer.backward(env, p, g, saved, dy(y))
    return Ran(y, np.concatenate(dx) if isinstance(dx, tuple) else dx, g, FieldPartition.on_one_rank(y.shape[2:]))


def run_over(layer: Any, p: dict[str, np.ndarray], x: Any, dy: np.ndarray, dims: Any, parts: FieldPartition) -> Ran:
    """The same on ranks that have `parts` of x; gradients of parameters are summed over them. layer: a layer or a
    function that makes the one of the rank at a place."""

    def one(comm: Communicator) -> Ran:
        env, place = env_of(comm, dims), place_of(comm.rank, dims)
        mine = layer if isinstance(layer, Layer) else layer(place)
        if isinstance(mine, Container):
            mine, outputs = partition_model(mine, parts)
        else:
            portion = mine.shard_over_ranks(ShardingContext("layer", [parts] * mine.n_inputs, 1))
            assert isinstance(portion.kind, FieldPartition)
            mine, outputs = portion.layer, portion.kind
        y, saved = mine.forward(env, p, each(lambda a: part(a, parts.cuts, place), x))
        g = {name: np.zeros_like(p[name]) for name, spec in mine.specs().items() if spec.trainable}
        dx = mine.backward(env, p, g, saved, part(dy, outputs.cuts, place))
        return Ran(y, np.concatenate(dx) if isinstance(dx, tuple) else dx, g, outputs)

    found = spawn(one, int(np.prod(dims)))
    g, outputs = {name: sum(ran.g[name] for ran in found) for name in found[0].g}, found[0].outputs
    y, dx = (whole(a, q, dims) for a, q in (([r.y for r in found], outputs), ([r.dx for r in found], parts)))
    return Ran(y, dx, g, outputs)


def demand_loss_of_whole(
    loss: Any, y: np.ndarray, target: np.ndarray, dims: Any, seed: int, rtol: float = 1e-10, atol: float = 1e-14
) -> tuple[float, float, np.ndarray]:
    """A loss over parts of any sizes has the values of the whole to 1e-12, and its gradient to `rtol` and `atol`. loss:
    a loss or a function of (parts, place) that makes it. Returns total, weight and gradient of the whole."""

    def run(parts: FieldPartition, place: list[int], comm: Communicator | None = None) -> tuple[float, float, Any]:
        made = loss if isinstance(loss, Loss) else loss(parts, place)
        mine, t, env = part(y, parts.cuts, place), part(target, parts.cuts, place), env_of(comm, dims)
        made.validate(mine.shape, t)
        bound = made.bind_partition(parts) if comm else made
        total, weight, saved = bound.forward(env, mine, t)
        return total, weight, bound.backward(env, saved, 0.5)

    alone = run(FieldPartition.on_one_rank(y.shape[2:]), [0] * len(dims))
    parts = cuts_of(y.shape[2:], dims, seed)
    found = spawn(lambda comm: run(parts, place_of(comm.rank, dims), comm), int(np.prod(dims)))
    assert (sum(f[0] for f in found), sum(f[1] for f in found)) == pytest.approx(alone[:2], rel=1e-12)
    np.testing.assert_allclose(whole([f[2] for f in found], parts, dims), alone[2], rtol=rtol, atol=atol)
    return alone


def demand_layer_of_whole(layer: Layer, p: dict[str, np.ndarray], x: Any, dims: Any, seed: int) -> tuple[Ran, Ran]:
    """A layer over parts of any sizes gives what it gives alone: results and gradients. Returns both, alone first."""
    alone = run_alone(layer, p, x)
    cells = (x[0] if isinstance(x, tuple) else x).shape[2:]
    found = run_over(layer, p, x, draw_gradient(alone.y), dims, cuts_of(cells, dims, seed))
    assert_close({"y": found.y, "dx": found.dx, **found.g}, {"y": alone.y, "dx": alone.dx, **alone.g}, 1e-12)
    return alone, found


def demand_like_torch(layer: Layer, x: tuple[np.ndarray, ...], dy: Any, formula: Any) -> Any:
    """A layer gives what `formula(p, x)` gives in PyTorch: results, and gradients in one backward pass and in two. dy:
    a gradient for each result. Returns what the layer saved."""
    torch = pytest.importorskip("torch")
    env, specs = env_of(None), layer.specs().items()
    p = {name: 0.3 * noise(*spec.shape, seed=i) for i, (name, spec) in enumerate(specs)}
    tp, tx = ({k: torch.tensor(a, requires_grad=True) for k, a in d.items()} for d in (p, dict(enumerate(x))))
    wanted = formula(tp, tuple(tx.values()))
    torch.autograd.backward(wanted, each(torch.tensor, dy))
    y, saved = layer.forward(env, p, x)
    assert_close(y, each(lambda a: a.detach(), wanted), 1e-13)
    for two_passes in (False, True):
        g = {name: np.zeros_like(a) for name, a in p.items()}
        if two_passes:
            dx, late = layer.backward_input(env, p, saved, dy)
            layer.backward_params(env, g, late)
        else:
            dx = layer.backward(env, p, g, saved, dy)
        # no step with a gradient reads an input without one
        wanted_dx = [np.zeros_like(d) if a.grad is None else a.grad for d, a in zip(dx, tx.values(), strict=True)]
        assert_close({"g": g, "dx": dx}, {"g": {name: tp[name].grad for name in g}, "dx": wanted_dx}, 1e-12)
    return saved


def demand_adjoint(ran: Ran, x: np.ndarray, zero: np.ndarray | float = 0.0) -> None:
    """<F x, dy> = <x, F* dy> to 1e-13 of |F x| |dy|, for the dy of `demand_layer_of_whole`. zero: the result for 0."""
    y, dy = ran.y - zero, draw_gradient(ran.y)
    assert abs((y * dy).sum() - (x * ran.dx).sum()) <= 1e-13 * np.linalg.norm(y) * np.linalg.norm(dy)
