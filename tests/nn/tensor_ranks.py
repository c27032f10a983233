"""One process and thread ranks of a tensor axis run the same model on the same batch, and are compared."""

from types import SimpleNamespace

import numpy as np
import pytest

from fsdpx import nn, spawn
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Mesh, connect_axes, make_single_rank_axes
from fsdpx.nn.init import make_initial_values
from fsdpx.nn.layer import LayerContext, find_sequence_length

in_all_ways = pytest.mark.parametrize(
    ("width", "sequence", "split"), [(2, None, False), (3, None, True), (2, "parallel", True), (3, "parallel", False)]
)
"""Numbers of ranks that divide features, heads and positions and that do not, with and without sequence parallelism,
and both forms of backward."""


def environment(axes=None, **options):
    return LayerContext(np, axes or make_single_rank_axes(), Random(5, step=2), **options)


def full(model):
    """Whole parameters, moved away from zeros and ones, where a forgotten factor would not show."""
    rng = np.random.default_rng(1)
    return {
        name: a + 0.1 * rng.standard_normal(a.shape)
        for name, a in make_initial_values(model.specs(), 3, np.float64).items()
    }


def local(model, p, rank, width):
    return {n: s.cut.take_shard(p[n], rank, width).copy() if s.cut else p[n].copy() for n, s in model.specs().items()}


def once(model, loss, p, x, target, env, split=False):
    """What one rank gets: the output, total and weight of the loss, gradients of the input and of parameters, and what
    it sent in each pass."""
    g = {name: np.zeros_like(p[name]) for name, spec in model.specs().items() if spec.trainable}
    counters = env.mesh.counters
    begin = counters.copy()
    y, saved = model.forward(env, p, x)
    middle = counters.copy()
    total, weight, held = loss.forward(env, y, target)
    dy = loss.backward(env, held, 0.7)
    before = counters.copy()
    if split:
        dx, kept = model.backward_input(env, p, saved, dy)
        model.backward_params(env, g, kept)
    else:
        dx = model.backward(env, p, g, saved, dy)
    sent = {"forward": middle.get_counts_since(begin), "backward": counters.get_counts_since(before)}
    return SimpleNamespace(y=y, total=total, weight=weight, dx=dx, g=g, **sent)


def on_axis(width, body):
    """`body` on `width` thread ranks of a tensor axis."""
    return spawn(lambda comm: body(connect_axes(Mesh(shard=1, tensor=width), comm)), width)


def assembled(planned, runs, name):
    """A gradient as the engine puts it together."""
    spec = planned.model.specs()[name]
    if spec.cut is None:
        if name in planned.partial:
            return sum(run.g[name] for run in runs)
        for run in runs[1:]:
            np.testing.assert_array_equal(run.g[name], runs[0].g[name], err_msg=f"{name} differs between ranks")
        return runs[0].g[name]
    whole = np.full(spec.shape, np.nan)
    for rank, run in enumerate(runs):
        spec.cut.put_shard(whole, run.g[name], rank, len(runs))
    return whole


def compare(model, loss, x, target, width, split=False, options=None, **planning):
    """Output, loss and gradients are those of one process, to 1e-12. Return the planned model, and what each rank got.
    options: of the environment; planning: of `parallelize`."""
    p, options = full(model), options or {}
    want = once(model, loss, p, x, target, environment(**options), split)
    planned = nn.sharding.parallelize(model, loss, width, **planning)

    def body(axes):
        mine = local(planned.model, p, axes.tensor.rank, width)
        env = environment(axes, time=find_sequence_length([x]), **options)
        return once(planned.model, planned.loss, mine, x, target, env, split)

    runs = on_axis(width, body)
    check(planned, want, runs)
    return planned, runs


def compare_mse(model, shape, width, split=False, **options):
    """As `compare`, with squared errors of an output of the input's shape. Both are random."""
    x, target = np.random.default_rng(2).standard_normal((2, *shape))
    return compare(model, nn.MSELoss(), x, target, width, split, **options)


def check(planned, want, runs):
    """What the ranks got, put together, is what one process got."""
    add = sum if getattr(planned.loss, "partial", False) else max
    assert add(run.weight for run in runs) == want.weight
    np.testing.assert_allclose(add(run.total for run in runs), want.total, rtol=1e-12)
    dim = planned.output_dim
    y = runs[-1].y if dim is None else np.concatenate([run.y for run in runs], dim)
    np.testing.assert_allclose(y, want.y, rtol=1e-12, atol=1e-12)
    for run in runs:
        if want.dx is not None:
            np.testing.assert_allclose(run.dx, want.dx, rtol=1e-12, atol=1e-12)
    assert runs[0].g.keys() == want.g.keys()
    for name, array in want.g.items():
        got = assembled(planned, runs, name)
        np.testing.assert_allclose(got, array, rtol=1e-12, atol=1e-12, err_msg=name)
