"""Layers that are computed again: the same bits, with less kept."""

import gc
import weakref

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.core.array.random import Random
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.errors import ConfigError
from fsdpx.nn.container import RecomputePlaceholder
from fsdpx.nn.layer import LayerContext

rng = np.random.default_rng(0)


def env():
    return LayerContext(np, make_single_rank_axes(), Random(0), True)


MODELS = {
    "block": nn.TransformerBlock(16, 2, dropout=0.1),
    "norms in a row": nn.Residual(nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 16), nn.RMSNorm(16))),
    "containers in containers": nn.Residual(nn.Sequential(nn.TransformerBlock(16, 2), nn.TransformerBlock(16, 2))),
    "given out": nn.Residual(nn.LayerNorm(16)),
}


def run(layer):
    rng = np.random.default_rng(1)
    p = {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in layer.specs().items()}
    g = {name: np.zeros_like(array) for name, array in p.items()}
    x, dy = rng.standard_normal((2, 3, 5, 16)).astype(np.float32)
    y, saved = layer.forward(env(), p, x)
    dx = layer.backward(env(), p, g, saved, dy)
    return saved, (y, dx), g


def arrays(held):
    if isinstance(held, tuple):
        for part in held:
            yield from arrays(part)
    else:
        yield held


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_with_less_kept(name, monkeypatch):
    saved, results, g = run(MODELS[name])
    monkeypatch.setattr(nn.LayerNorm, "cheap", False)
    monkeypatch.setattr(nn.RMSNorm, "cheap", False)
    more, want, want_g = run(MODELS[name])
    for got, wanted in zip([*results, *g.values()], [*want, *want_g.values()], strict=True):
        assert got.tobytes() == wanted.tobytes()
    kept, whole = ({id(a): a.nbytes for a in arrays(s) if isinstance(a, np.ndarray)} for s in (saved, more))
    if name != "given out":
        assert sum(kept.values()) < sum(whole.values())
        assert any(isinstance(part, RecomputePlaceholder) for part in arrays(saved))


def test_nothing_is_left_behind():
    """No cycle keeps activations alive until the collector comes."""
    gc.disable()
    try:
        saved, _, _ = run(MODELS["block"])
        watched = [weakref.ref(a) for a in arrays(saved) if isinstance(a, np.ndarray)]
        assert watched
        del saved
        assert not any(ref() is not None for ref in watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiHeadAttention(16, 2),
        nn.MultiHeadAttention(16, 2, dropout=0.3),
        nn.GroupedQueryAttention(16, 2, 1, None, qk_norm=1e-6),
    ],
)
def test_attention_made_again_in_backward(layer, split):
    """Only queries, keys and values are kept, of everything that attention makes. Queries and keys may come from a norm
    of heads, which is a cheap layer: its results are placeholders themselves."""
    kept, recomputed = (attention(layer, names, split) for names in (frozenset[str](), frozenset({"attention"})))
    for got, wanted in zip(recomputed[1:], kept[1:], strict=True):
        assert got.tobytes() == wanted.tobytes()
    if isinstance(layer, nn.MultiHeadAttention):
        assert [a.shape for a in arrays(recomputed[0])] == [(3, 5, 16), (3, 5, 48)]
        assert len(list(arrays(kept[0]))) > 2


def attention(layer, recompute, split):
    rng = np.random.default_rng(1)
    p = {name: rng.standard_normal(spec.shape) for name, spec in layer.specs().items()}
    g = {name: np.zeros_like(array) for name, array in p.items()}
    x, dy = rng.standard_normal((2, 3, 5, 16))
    world = LayerContext(np, make_single_rank_axes(), Random(0), True, recompute).child("attn")
    assert world.recompute == recompute
    y, saved = layer.forward(world, p, x)
    if split:
        dx, rest = layer.backward_input(world, p, saved, dy)
        layer.backward_params(world, g, rest)
    else:
        dx = layer.backward(world, p, g, saved, dy)
    return [saved, y, dx, *g.values()]


def test_statistics_do_not_move_when_a_forward_is_made_again():
    layer, x = nn.BatchNorm(3), np.random.default_rng(1).standard_normal((4, 3))
    p = {name: np.ones(3) for name in layer.specs()}
    first, _ = layer.forward(env(), p, x)
    moved = p["running_mean"].copy()
    assert not np.array_equal(moved, np.ones(3))
    second, _ = layer.forward(
        LayerContext(np, make_single_rank_axes(), Random(0), True, recomputing=True).child("norm"), p, x
    )
    assert first.tobytes() == second.tobytes()
    np.testing.assert_array_equal(p["running_mean"], moved)


def test_a_cheap_layer_must_say_how():
    class Forgetful(nn.Tanh):
        cheap = True

    layer = nn.Residual(nn.Sequential(Forgetful(), nn.Linear(16, 16)))
    with pytest.raises(ConfigError, match=r"Forgetful\(\) is cheap but does not define recompute"):
        run(layer)
