"""Losses of PyTorch as losses of fsdpx: a sum over the batch and the weight to divide it by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from fsdpx.errors import ConfigError, DataError
from fsdpx.interop.tensors import array_of, tensor_of
from fsdpx.nn.layer import Array, Env
from fsdpx.nn.losses import Loss

__all__ = ["Criterion"]

LABELS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
SUMS = (
    torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss, torch.nn.BCELoss,
    torch.nn.BCEWithLogitsLoss, torch.nn.PoissonNLLLoss, torch.nn.SoftMarginLoss,
)  # fmt: skip


class Criterion(Loss):
    """A loss of `torch.nn`, or a function of (output, target) that gives the mean over the samples.

    Parts of a batch add up as PyTorch divides the whole: by the number of elements, or for classes by the weights of
    the targets that are not ignored. A function is multiplied by the number of samples of each part.

    Parameters
    ----------
    function : `torch.nn.CrossEntropyLoss()` and others with `reduction="mean"`, or a function of two tensors
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        if isinstance(function, torch.nn.Module) and next(function.parameters(), None) is not None:
            raise ConfigError(f"{function}: a loss with parameters is not trained here; make it a part of the model")
        if (reduction := getattr(function, "reduction", "mean")) != "mean":
            raise ConfigError(f"{function}: reduction={reduction!r} gives no mean over a batch; use 'mean'")
        self.function = function
        self._sum: Any = function
        if isinstance(function, (*LABELS, *SUMS)):
            self._sum = copy.copy(function)
            self._sum.reduction = "sum"

    def forward(self, env: Env, y: Array, target: Array) -> tuple[float, float, Any]:
        output, wanted = tensor_of(y).detach().requires_grad_(), tensor_of(target)
        if wanted.is_floating_point():
            wanted = wanted.to(output.dtype)
        weight = self._weight(output, wanted)
        with torch.enable_grad():
            total = self._sum(output, wanted) if y.shape[0] else output.sum()
            if self._sum is self.function:
                total = total * weight
        if total.ndim:
            raise DataError(f"{self!r} gives a tensor of shape {tuple(total.shape)}: a loss is one number")
        bare = getattr(env.xp, "holds_no_data", False)
        return (0.0 if bare else float(total.detach())), weight, (output, total)

    def backward(self, env: Env, saved: Any, seed: float) -> Array:
        output, total = saved
        (gradient,) = torch.autograd.grad(total, output, torch.full_like(total, seed))
        return array_of(env.xp, gradient)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        if not target.shape or target.shape[0] != shape[0]:
            raise DataError(f"{self!r}: a target of shape {tuple(target.shape)} for {shape[0]} samples")

    def _weight(self, output: torch.Tensor, target: torch.Tensor) -> float:
        if isinstance(self.function, SUMS):
            return float(output.numel())
        if not isinstance(self.function, LABELS):
            return float(output.shape[0])
        if target.is_floating_point():  # probabilities of classes
            return float(output.numel() // max(output.shape[1], 1))
        if target.device.type == "meta":
            return float(target.numel())
        counted = target[target != self.function.ignore_index]
        weights = self.function.weight
        return float(counted.numel() if weights is None else weights[counted].sum())

    def __repr__(self) -> str:
        return f"Criterion({self.function!r})"
