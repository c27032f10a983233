"""Multi-head attention with input and output projections, and the base class for attention containers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.container import ChildCall, Container, map_saved
from fsdpx.nn.init import Init, uniform, zeros
from fsdpx.nn.layer import LayerContext, Params, require_positive
from fsdpx.nn.linear import Linear
from fsdpx.nn.per_head import Attention
from fsdpx.nn.shard_specs import ColumnParallel, RowParallel

__all__ = ["AttentionContainer", "MultiHeadAttention", "compute_head_features"]


class AttentionContainer(Container):
    """Base class for containers whose last two steps are an `Attention` and a Linear output projection. The container
    is one FSDP unit: its parameters are all-gathered together.

    If `env.recompute` contains "attention", only the input of the `Attention` is saved, and the backward pass
    recomputes the attention."""

    unit = True

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        y, saved = super().forward(env, p, x)
        if saved and "attention" in env.recompute:
            *before, (_, read), _ = saved
            saved = (*before, (read,), ())
        return y, saved

    def _run_backward_steps(
        self,
        env: LayerContext,
        parts: Mapping[str, Any],
        backward_step: Callable[[ChildCall, Any, Any], Any],
        saved: Any,
        dy: Any,
        constant: Collection[str] = (),
    ) -> Any:
        *before, held, last = saved
        if last == ():
            step = self.steps[-2]
            (read,) = map_saved(held, partial(self._recompute_if_placeholder, env, parts, saved))
            merged, held = step.layer.forward(env.child(step.name), {}, read)
            last = (merged,)
        return super()._run_backward_steps(env, parts, backward_step, (*before, held, last), dy, constant)


class MultiHeadAttention(AttentionContainer):
    """Multi-head attention (Vaswani et al. 2017): `softmax(q @ k^T / sqrt(d_head)) @ v` for each head. Input and output
    have the shape `(samples, time, d_model)`. The layer is one FSDP unit: its parameters are all-gathered together.

    A single matrix product computes queries, keys and values. Parameters are `qkv.weight (3 * d_model, d_model)`, with
    rows in the order of PyTorch's `in_proj_weight`, `qkv.bias (3 * d_model,)`, `out.weight (d_model, d_model)` and
    `out.bias (d_model,)`. As in PyTorch, `qkv.weight` is drawn from the Xavier uniform distribution, and biases are
    initialized to 0.

    Parameters
    ----------
    d_model : number of features of the input and the output
    n_heads : number of heads, a divisor of d_model
    causal : whether a position attends only to itself and to earlier positions
    dropout : dropout probability of attention weights. If it is not 0, the attention weights, an array (samples, heads,
        time, time), are saved for the backward pass
    bias : whether the two projections have biases
    init : initializer of `qkv.weight`; if None, the Xavier uniform distribution
    out_init : initializer of `out.weight`; if None, the default initializer of `Linear`
    """

    aliases: ClassVar = {
        "in_proj_weight": "qkv.weight",
        "in_proj_bias": "qkv.bias",
        "out_proj.weight": "out.weight",
        "out_proj.bias": "out.bias",
    }

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        require_positive(self, d_model=d_model, n_heads=n_heads)
        self.d_model, self.n_heads, self.causal, self.bias = d_model, n_heads, bool(causal), bool(bias)
        self.dropout, self.init, self.out_init = dropout, init, out_init
        d_head = compute_head_features(self, d_model, n_heads)
        xavier = uniform(math.sqrt(6.0 / (4 * d_model)))
        qkv = Linear(d_model, 3 * d_model, bias, init=init or xavier, bias_init=zeros)
        out = Linear(d_model, d_model, bias, init=out_init, bias_init=zeros)
        attend = Attention(n_heads, n_heads, d_head, causal, fused=True, dropout=dropout)
        self.plan = {"qkv": ColumnParallel(blocks=3, grain=d_head), "out": RowParallel()}
        steps = [("qkv", qkv, "x"), ("", attend, "qkv"), ("out", out, "")]
        super().__init__([ChildCall(name, layer, (x,), (name,)) for name, layer, x in steps], ("x",), ("out",))

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            wanted = f"(samples, time, {self.d_model})"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        return super().forward(env, p, x)


def compute_head_features(owner: object, d_model: int, n_heads: int) -> int:
    """Return d_model / n_heads, the number of features per head. Raise ConfigError if d_model is not a multiple of
    n_heads; the message names the class of `owner`."""
    if d_model % n_heads:
        raise ConfigError(f"{type(owner).__name__}: d_model {d_model} is not a multiple of n_heads {n_heads}")
    return d_model // n_heads
