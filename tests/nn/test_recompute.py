"""Layers that are computed again: the same bits, with less kept."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from setting import env, list_leaves

from fsdpx import nn
from fsdpx.errors import ConfigError
from fsdpx.nn.container import RecomputePlaceholder
from fsdpx.testing import assert_close

MODELS = {
    "block": nn.TransformerBlock(16, 2, dropout=0.1),
    "norms in a row": nn.Residual(nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 16), nn.RMSNorm(16))),
    "containers in containers": nn.Residual(nn.Sequential(nn.TransformerBlock(16, 2), nn.TransformerBlock(16, 2))),
    "given out": nn.Residual(nn.LayerNorm(16)),
}


def run(layer, dtype=np.float32, recompute=(), split=False):
    """What is kept for backward; and the output, the gradient of the input and those of the parameters."""
    rng = np.random.default_rng(1)
    p = {name: rng.standard_normal(spec.shape).astype(dtype) for name, spec in layer.specs().items()}
    g = {name: np.zeros_like(array) for name, array in p.items()}
    x, dy = rng.standard_normal((2, 3, 5, 16)).astype(dtype)
    context = replace(env(), recompute=frozenset(recompute)).child("layer")
    assert context.recompute == {*recompute}
    y, saved = layer.forward(context, p, x)
    if split:
        dx, kept = layer.backward_input(context, p, saved, dy)
        layer.backward_params(context, g, kept)
    else:
        dx = layer.backward(context, p, g, saved, dy)
    return saved, [y, dx, *g.values()]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_with_less_kept(name, monkeypatch):
    saved, results = run(MODELS[name])
    monkeypatch.setattr(nn.LayerNorm, "cheap", False)
    monkeypatch.setattr(nn.RMSNorm, "cheap", False)
    more, wanted = run(MODELS[name])
    assert_close(results, wanted)
    kept, whole = ({id(a): a.nbytes for a in list_leaves(s) if isinstance(a, np.ndarray)} for s in (saved, more))
    if name != "given out":
        assert sum(kept.values()) < sum(whole.values())
        assert any(isinstance(part, RecomputePlaceholder) for part in list_leaves(saved))


def test_nothing_is_left_behind():
    """No cycle keeps activations alive until the collector comes."""
    gc.disable()
    try:
        saved = run(MODELS["block"])[0]
        watched = [weakref.ref(a) for a in list_leaves(saved) if isinstance(a, np.ndarray)]
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
    (more, wanted), (saved, results) = (run(layer, np.float64, names, split) for names in ([], ["attention"]))
    assert_close(results, wanted)
    if isinstance(layer, nn.MultiHeadAttention):
        assert [a.shape for a in list_leaves(saved)] == [(3, 5, 16), (3, 5, 48)]
        assert len(list_leaves(more)) > 2


def test_statistics_do_not_move_when_a_forward_is_made_again():
    layer, x = nn.BatchNorm(3), np.random.default_rng(1).standard_normal((4, 3))
    p = {name: np.ones(3) for name in layer.specs()}
    first, _ = layer.forward(env(), p, x)
    moved = p["running_mean"].copy()
    assert (moved != 1).any()
    second, _ = layer.forward(replace(env(), recomputing=True).child("norm"), p, x)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_array_equal(p["running_mean"], moved)


def test_a_cheap_layer_must_say_how():
    class Forgetful(nn.Tanh):
        cheap = True

    layer = nn.Residual(nn.Sequential(Forgetful(), nn.Linear(16, 16)))
    with pytest.raises(ConfigError, match=r"Forgetful\(\) is cheap but does not define recompute"):
        run(layer)
