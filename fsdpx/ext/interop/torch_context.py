"""Random numbers and batch norms of PyTorch modules, independent of the way the batch is split over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpx import nn
from fsdpx.errors import ConfigError
from fsdpx.ext.interop.aten_kernels import NATIVE_KERNELS, run_aten_attention_with_own_kernel
from fsdpx.ext.interop.tensors import to_array, to_tensor
from fsdpx.nn.layer import LayerContext

__all__ = ["REPLACED_OPERATIONS", "GlobalNorm", "drawing_torch_numbers_from_context", "may_draw_random_numbers"]

_now = threading.local()
aten: Any = torch.ops.aten


@contextmanager
def drawing_torch_numbers_from_context(env: LayerContext, samples: int, intercept: bool) -> Iterator[None]:
    """Context manager that makes this thread's PyTorch modules draw random numbers from `env`, for `samples` samples.

    `intercept` states whether to intercept operations that draw random numbers. It is False if the modules contain no
    such operations. Raises ConfigError if an operation still draws from PyTorch's generator, because the numbers would
    depend on the layout of the ranks."""
    _now.env = env
    before = torch.default_generator.get_state()
    try:
        with _CounterRandomMode(env, samples) if intercept else nullcontext():
            yield
    finally:
        _now.env = None
    if not torch.equal(before, torch.default_generator.get_state()):
        raise ConfigError(
            "the module draws random numbers in a way that is not known here (dropout and torch.rand_like are): the "
            "result would depend on the number of ranks"
        )


class _CounterRandomMode(TorchDispatchMode):
    """Dispatch mode that makes random operations use counter-based random numbers. Each number depends only on the
    seed, the layer, the step, the index of the sample in the global batch, and the count of earlier draws."""

    def __init__(self, env: LayerContext, samples: int) -> None:
        super().__init__()
        self.env, self.samples, self.draws = env, samples, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _OWN.get(func)
        return func(*args, **(kwargs or {})) if own is None else own(self, *args, **(kwargs or {}))

    def draw_uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Return a uniform random number in [0, 1) for each element of `like`, whose dim 0 is the sample dim."""
        name = f"draw{self.draws}"
        self.draws += 1
        if getattr(self.env.xp, "holds_no_data", False):
            return torch.zeros(like.shape, device=like.device)
        if self.samples == 0 or like.numel() % self.samples:
            raise ConfigError(
                f"the module draws random numbers of shape {tuple(like.shape)} for {self.samples} samples: they must "
                "belong to samples, dim 0 first, to be the same for any split of a batch"
            )
        rows = (self.samples, like.numel() // self.samples)
        return to_tensor(self.env.child(name).random.uniform(self.env.xp, rows)).reshape(like.shape)


def _fill_bernoulli(mode: _CounterRandomMode, x: torch.Tensor, p: float = 0.5, **options: Any) -> torch.Tensor:
    """Set each element of x in place to 1 with probability p, else to 0. For dropout, p is the probability of keeping
    an element."""
    return x.copy_(mode.draw_uniform(x) >= 1.0 - p)


def _draw_native_dropout(
    mode: _CounterRandomMode, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    keep = mode.draw_uniform(x) >= p
    return x * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0), keep


def _draw_rand_like(
    mode: _CounterRandomMode, x: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    return mode.draw_uniform(x).to(dtype or x.dtype)


_OWN: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _fill_bernoulli,
    aten.native_dropout.default: _draw_native_dropout,
    aten.rand_like.default: _draw_rand_like,
}


class GlobalNorm(torch.nn.Module):
    """Batch norm over the global batch. It replaces PyTorch's batch norm, which would see only this rank's samples.

    Its parameters, running statistics and results are the same as in `fsdpx.nn.BatchNorm`."""

    def __init__(self, norm: Any, path: str) -> None:
        super().__init__()
        if norm.momentum is None or not norm.track_running_stats:
            raise ConfigError(
                f"{path!r} {norm}: batch norms need running statistics that move by a momentum; "
                "momentum=None and track_running_stats=False are not known here"
            )
        self.layer = nn.BatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine)
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        env = _now.env
        # this norm uses its running statistics because the user has called eval() on it
        if not self.training and env.training:
            env = replace(env, training=False)
        affine = (self.weight, self.bias) if self.layer.affine else ()
        return _BatchNormFunction.apply(env, self.layer, x, self.running_mean, self.running_var, *affine)


class _BatchNormFunction(torch.autograd.Function):
    """Autograd function that runs `fsdpx.nn.BatchNorm`."""

    @staticmethod
    def forward(
        ctx: Any,
        env: LayerContext,
        layer: nn.BatchNorm,
        x: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        *affine: Any,
    ) -> torch.Tensor:
        named = dict(zip(("weight", "bias"), affine, strict=False))
        p = {n: to_array(env.xp, t) for n, t in (named | {"running_mean": mean, "running_var": var}).items()}
        y, (_, *statistics, ctx.count) = layer.forward(env, p, to_array(env.xp, x))
        ctx.env, ctx.layer = env, layer
        ctx.save_for_backward(x, *(to_tensor(a, x.device) for a in statistics), *affine)
        return to_tensor(y, x.device)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        xp, layer = ctx.env.xp, ctx.layer
        x, mean, rstd, *affine = (to_array(xp, t) for t in ctx.saved_tensors)
        p = dict(zip(("weight", "bias"), affine, strict=False))
        dx, kept = layer.backward_input(ctx.env, p, (x, mean, rstd, ctx.count), to_array(xp, dys[0].contiguous()))
        g = {name: xp.zeros_like(a) for name, a in p.items()}
        layer.backward_params(ctx.env, g, kept)
        found = [to_tensor(a, dys[0].device) for a in (dx, *g.values())]
        return None, None, found[0], None, None, *found[1:]


def _apply_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return torch.dropout(x, p, train and _now.env.training)


def _apply_native_dropout(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, None]:
    return _apply_dropout(x, p, train), None


def _scaled_dot_product_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    return run_aten_attention_with_own_kernel(
        q, k, v, mask, dropout_p if _now.env.training else 0.0, is_causal, **options
    )


def _call_with_grad_mode(enabled: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return function(*arguments)


REPLACED_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: _apply_dropout,
    aten.native_dropout.default: _apply_native_dropout,
    aten.scaled_dot_product_attention.default: _scaled_dot_product_attention,
    torch._higher_order_ops.wrap_with_set_grad_enabled: _call_with_grad_mode,
    **NATIVE_KERNELS,
}
"""Operation in a module that was exported in training mode -> its replacement. Some replacements depend on whether the
layer is in training mode."""


DROPOUT_ARGUMENT = {_apply_dropout: 1, _apply_native_dropout: 1, _scaled_dot_product_attention: 4}
"""Operation with dropout -> position of the dropout probability among its arguments."""


def may_draw_random_numbers(graph: fx.GraphModule) -> bool:
    """Return whether any operation in an fx graph may draw random numbers in training."""
    return any(_may_draw(node) for module in graph.modules() for node in getattr(module, "graph", fx.Graph()).nodes)


def _may_draw(node: fx.Node) -> bool:
    if (at := DROPOUT_ARGUMENT.get(node.target)) is None:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    given = node.args[at] if len(node.args) > at else node.kwargs.get("dropout_p", 0.0)
    return bool(given) and node.args[2:3] != (False,)
