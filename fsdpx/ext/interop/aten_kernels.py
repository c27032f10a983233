"""Replaces PyTorch operations in exported modules with fsdpx's matmuls and kernels.

The replacements use the fastest available library and keep less data for the backward pass. PyTorch handles the dtypes
and devices that the replacements do not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from fsdpx.core.array import blas, kernels
from fsdpx.ext.interop.tensors import to_array, to_tensor
from fsdpx.nn.gradient_accumulation import linear_forward

__all__ = ["NATIVE_KERNELS", "RESHAPES", "fuse_gelu_and_norm_into_next_linear", "run_aten_attention_with_own_kernel"]

aten: Any = torch.ops.aten
SUPPORTED_DTYPES = (torch.float32, torch.float64)
DEFAULTS = (None, None, None, None, 1e-5)  # default arguments of aten.layer_norm: input, shape, weight, bias, eps


def run_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `aten.linear` with fsdpx's matmul, or with PyTorch if fsdpx does not support the arguments."""
    if not _can_run_natively(x, weight, bias):
        return aten.linear.default(x, weight, bias)
    return _apply_linear(x, weight, bias, None)


def run_addmm(
    bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute `aten.addmm` with samples as rows, using fsdpx's matmul if it supports the arguments."""
    if not _can_run_natively(x, weight, bias) or bias.ndim != 1 or beta != 1 or alpha != 1:
        return aten.addmm.default(bias, x, weight, beta=beta, alpha=alpha)
    return _apply_linear(x, weight.t(), bias, None)


def run_gelu_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str = "none"
) -> torch.Tensor:
    """Compute `aten.gelu` followed by `aten.linear`. The two are fused so that the GELU's result need not be saved. The
    backward pass recomputes it."""
    if not _can_run_natively(x, weight, bias):
        return run_linear(aten.gelu.default(x, approximate=approximate), weight, bias)
    return _apply_linear(x, weight, bias, approximate)


def run_norm_linear(
    x: torch.Tensor, shape: Sequence[int], scale: torch.Tensor | None, shift: torch.Tensor | None, eps: float,
    weight: torch.Tensor, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute `aten.layer_norm` over the last dim followed by `aten.linear`. The two are fused so that the norm's
    result need not be saved. The backward pass recomputes it."""
    if not _can_run_natively(x, weight, bias, scale, shift):
        return run_linear(aten.layer_norm.default(x, shape, scale, shift, eps), weight, bias)
    y = _NormLinear.apply(x.reshape(-1, x.shape[-1]), scale, shift, eps, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def run_aten_attention_with_own_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute `aten.scaled_dot_product_attention`, using fsdpx's attention kernel if it supports the arguments."""
    alike = q.ndim == 4 and (enable_gqa or q.shape[1] == k.shape[1]) and (not is_causal or q.shape[2] == k.shape[2])
    if mask is not None or dropout_p or not alike or q.shape[0] != k.shape[0] or not _can_run_natively(q, k, v):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten.scaled_dot_product_attention.default(q, k, v, mask, dropout_p, is_causal, **options)
    return _Attention.apply(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)


NATIVE_KERNELS: dict[Any, Callable[..., Any]] = {aten.linear.default: run_linear, aten.addmm.default: run_addmm}
"""Operation -> its replacement. Attention is in `REPLACED_OPERATIONS` instead because its dropout depends on the mode
(training or evaluation)."""


RESHAPES: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Views and the reshapes that replace them. A view is valid only for certain strides of a tensor. PyTorch's exporter
knows the strides that PyTorch's operations produce in a single process, but fsdpx's operations and messages may produce
other strides. A reshape makes a copy if a view is impossible. The copy is as good as a view, because exported graphs
never write in place."""


def fuse_gelu_and_norm_into_next_linear(graph: fx.Graph) -> None:
    """Fuse each GELU or layer norm in a graph with the linear layer that reads its result, unless another operation
    also reads the result."""
    for node in graph.nodes:
        source = node.args[0] if node.target is run_linear else None
        if not isinstance(source, fx.Node) or len(source.users) != 1:
            continue
        if source.target is aten.gelu.default:
            node.target, node.args, node.kwargs = run_gelu_linear, (source.args[0], *node.args[1:]), dict(source.kwargs)
        elif source.target is aten.layer_norm.default and not source.kwargs and len(source.args[1]) == 1:
            given = (*source.args, *DEFAULTS[len(source.args) :])[: len(DEFAULTS)]
            node.target, node.args = run_norm_linear, (*given, *node.args[1:])
        else:
            continue
        graph.erase_node(source)


def _can_run_natively(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    if first.dtype not in SUPPORTED_DTYPES or first.device.type not in ("cpu", "meta"):
        return False
    return first.numel() > 0 and all(a is None or (a.dtype == first.dtype and a.numel() > 0) for a in others)


def _apply_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any, gelu: str | None) -> torch.Tensor:
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, gelu)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """Autograd function for `x @ weight.T + bias`, or `gelu(x) @ weight.T + bias`, with x `(rows, n)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, gelu: str | None) -> torch.Tensor:
        ctx.gelu, ctx.biased = gelu, bias is not None
        ctx.save_for_backward(x, weight)
        if x.is_meta:
            return x.new_empty(x.shape[0], weight.shape[0])
        a = to_array(np, x)
        if gelu is not None:
            a = kernels.gelu(np, a, gelu)
        return to_tensor(linear_forward(np, a, to_array(np, weight), None if bias is None else to_array(np, bias)))

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        inner, outer, last = wanted[0], wanted[1], wanted[2]
        if x.is_meta:
            found = (torch.empty_like(x), torch.empty_like(weight), x.new_empty(weight.shape[0]))
            return *(d if want else None for d, want in zip(found, wanted, strict=False)), None
        a, w, dy = to_array(np, x), to_array(np, weight), to_array(np, dys[0].contiguous())
        dx = np.empty(a.shape, a.dtype) if inner else None
        if dx is not None and ctx.gelu is not None:
            blas.gemm(dx, dy, w)
            a = kernels.recompute_gelu_and_backward(np, a, dx, ctx.gelu)
        elif ctx.gelu is not None:
            a = kernels.gelu(np, a, ctx.gelu)
        dw = np.empty_like(w) if outer else None
        db = np.empty(w.shape[0], w.dtype) if last else None
        into = (None if dw is None else (dw, False)), (None if db is None else (db, False))
        if dx is not None and ctx.gelu is None:
            blas.linear_backward(dx, *into, dy, a, w)
        else:
            blas.linear_backward_params(*into, dy, a)
        return *(None if d is None else to_tensor(d) for d in (dx, dw, db)), None


class _NormLinear(torch.autograd.Function):
    """Autograd function for `layer_norm(x) @ weight.T + bias`, with x `(rows, n)`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: Any, shift: Any, eps: float, weight: torch.Tensor, bias: Any
    ) -> torch.Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, scale, shift, weight, bias)
        if x.is_meta:
            return x.new_empty(x.shape[0], weight.shape[0])
        n, _, _ = kernels.layer_norm(np, *_as_arrays(x, scale, shift), eps)
        return to_tensor(linear_forward(np, n, *_as_arrays(weight, bias)))

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, scale, shift, weight, bias = ctx.saved_tensors
        if x.is_meta:
            found = [None if t is None else torch.empty_like(t) for t in (x, scale, shift, weight, bias)]
            return *found[:3], None, *found[3:]
        a, factor, offset, w, dy = _as_arrays(x, scale, shift, weight, dys[0].contiguous())
        n, mean, rstd = kernels.layer_norm(np, a, factor, offset, ctx.eps)
        wanted, dn = ctx.needs_input_grad, np.empty(a.shape, a.dtype)
        dw = np.empty_like(w) if wanted[4] else None
        db = np.empty(w.shape[0], w.dtype) if wanted[5] else None
        blas.linear_backward(dn, None if dw is None else (dw, False), None if db is None else (db, False), dy, n, w)
        gw, gb = (np.zeros_like(t) if want else None for t, want in ((factor, wanted[1]), (offset, wanted[2])))
        dx = kernels.layer_norm_backward_input(np, a, factor, mean, rstd, dn)
        kernels.layer_norm_backward_params(np, a, mean, rstd, dn, gw, gb)
        made = [None if d is None else to_tensor(d) for d in (dx, gw, gb, dw, db)]
        return *made[:3], None, *made[3:]


def _as_arrays(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if t is None else to_array(np, t) for t in tensors]


class _Attention(torch.autograd.Function):
    """Autograd function for scaled dot-product attention, softmax(scale q k^T) v for each head."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        ctx.causal, ctx.scale = causal, scale
        if q.is_meta:
            samples, heads, time, width = q.shape
            o, lse = q.new_empty(samples, time, heads, width).transpose(1, 2), q.new_empty(q.shape[:3])
        else:
            found = kernels.attention(np, *(to_array(np, a) for a in (q, k, v)), causal, scale)
            o, lse = (to_tensor(a) for a in found)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *dos: torch.Tensor) -> tuple[Any, ...]:
        if dos[0].is_meta:
            return *(torch.empty_like(a) for a in ctx.saved_tensors[:3]), None, None
        arrays = (to_array(np, a) for a in (*ctx.saved_tensors, dos[0]))
        dq, dk, dv = kernels.attention_backward(np, *arrays, ctx.causal, ctx.scale)
        return *(to_tensor(d) for d in (dq, dk, dv)), None, None
