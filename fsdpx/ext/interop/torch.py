"""Adapters that let `distribute` accept PyTorch modules and losses.

trainer = fsdpx.distribute(net, loss=torch.nn.CrossEntropyLoss(), optimizer=fsdpx.optim.AdamW(lr=1e-3))"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.interop.module import TorchModule
from fsdpx.ext.interop.module_splitting import find_tied_names, split_module_into_layers
from fsdpx.ext.interop.tensors import to_array, to_tensor
from fsdpx.nn.container import Sequential
from fsdpx.nn.layer import Array, Layer, LayerContext, join_path
from fsdpx.nn.losses import Loss

if TYPE_CHECKING:
    from fsdpx.ext.fields.grid import Grid

__all__ = ["TorchLoss", "TorchModule", "adapt_torch", "from_torch", "to_array", "to_tensor"]


def adapt_torch(model: Any, loss: Any, domain: Any = None) -> tuple[Any, Any]:
    """Return the model and the loss, with a PyTorch module converted to a layer and a PyTorch loss to a `TorchLoss`.
    Anything else is returned unchanged. If `domain` is a grid, the module is converted to layers that run on this
    grid."""
    is_module = isinstance(model, torch.nn.Module)
    layer = from_torch(model, domain=domain if _is_grid_domain(domain) else None) if is_module else model
    return layer, TorchLoss(loss) if isinstance(loss, torch.nn.Module) else loss


def _is_grid_domain(domain: Any) -> bool:
    if domain is None:
        return False
    from fsdpx.ext.fields.grid import Grid  # imported only if there is a domain, because other jobs do not need fields

    return isinstance(domain, Grid)


def from_torch(
    module: torch.nn.Module,
    *example: Any,
    units: Callable[[str, torch.nn.Module], bool] | Sequence[str] | None = None,
    output: str | int | None = None,
    domain: Grid | None = None,
) -> Layer:
    """Convert a PyTorch module to a layer, or to a container of layers that can be gathered and freed separately.

    Parameters keep their names, and shared parameters are tied. Without an example, a `torch.nn.Sequential` becomes a
    `Sequential` of its children, and any other module becomes one `TorchModule`. With an example, the module is split.
    PyTorch exports it (`torch.export`), and every unit (a submodule) becomes a layer that is gathered, computed and
    freed on its own, and that can be placed on a pipeline stage. Units are exported in the dtype of the module.

    With `domain`, each layer and function that the module calls becomes the equivalent fsdpx layer for a field split
    over ranks. To find these layers, the module runs once on tensors without data that have the size of the full field.

    Parameters
    ----------
    module : any module that autograd can differentiate
    example : example inputs of the module, arrays or tensors with at least 2 samples; later inputs may have other sizes
    units : patterns (fnmatch) of classes or paths, such as "LlamaDecoderLayer", or a function of (path, module) that
        returns whether the module is a unit; if None (default), the elements of each `torch.nn.ModuleList`. Other
        modules with parameters become separate units
    output : selects the output from the result of `forward`, as in `TorchModule`; default None
    domain : grid over which the module is to run; default None. The examples then only define the number of inputs and
        their channels, as fields (samples, channels, *cells) or scalars (samples, n). Without an example, the module
        has one input, with as many channels as its first layer expects

    Returns
    -------
    Layer

    Raises
    ------
    ConfigError : for a module that PyTorch cannot export, a pattern that matches nothing, or a unit that returns
        several tensors; with `domain`, for a layer or function that has no equivalent fsdpx layer for a part of a field
    """
    if domain is not None:
        if not _is_grid_domain(domain):
            raise ConfigError(f"from_torch(domain=...) takes a fsdpx.Grid, not {type(domain).__name__}")
        if units is not None or output is not None:
            raise ConfigError(
                "from_torch(domain=...): units= and output= are for modules without a grid; leave them out"
            )
        from fsdpx.ext.interop.field_module import convert_to_field_layers

        return convert_to_field_layers(module, example, domain)
    if example:
        return split_module_into_layers(module, example, units, output)
    if units is not None:
        raise ConfigError("from_torch(units=...) needs an example of the inputs: from_torch(module, x, units=...)")
    if output is not None:
        return TorchModule(module, output=output)
    layers = _convert_sequential_children(module)
    if layers is None:
        return TorchModule(module)
    names = {join_path(name, local) for name, layer in layers.items() for local in layer.specs()}
    return Sequential(
        layers, ties={alias: name for alias, name in find_tied_names(module).items() if {alias, name} <= names}
    )


def _convert_sequential_children(module: torch.nn.Module) -> dict[str, Layer] | None:
    """Return the children of a `torch.nn.Sequential` as layers by name, or None if `module` is not a `Sequential`."""
    if type(module) is not torch.nn.Sequential or not len(module):
        return None
    inner = (
        (name, child, _convert_sequential_children(child))
        for name, child in module._modules.items()
        if child is not None
    )
    return {name: TorchModule(child) if layers is None else Sequential(layers) for name, child, layers in inner}


LABELS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
SUMS = (
    torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss, torch.nn.BCELoss,
    torch.nn.BCEWithLogitsLoss, torch.nn.PoissonNLLLoss, torch.nn.SoftMarginLoss,
)  # fmt: skip
SAME_SHAPE_LOSSES = (
    *SUMS, torch.nn.KLDivLoss, torch.nn.HingeEmbeddingLoss, torch.nn.MultiLabelMarginLoss,
    torch.nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
SAME_SHAPE_FUNCTIONS = {
    getattr(torch.nn.functional, name)
    for name in (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss", "kl_div", "hinge_embedding_loss",
        "multilabel_margin_loss", "multilabel_soft_margin_loss",
    )
}  # fmt: skip
"""Losses whose output and target must have the same shape. PyTorch would broadcast a target of another shape, and would
thus compare each output with the targets of all samples."""


class TorchLoss(Loss):
    """Wraps a PyTorch loss, or a function of (output, target) that returns the mean over the samples, for use as an
    fsdpx loss.

    The losses of all shards of a batch are summed. As in PyTorch, the sum is divided by the number of elements in the
    full batch or, in classification, by the total weight of the targets that are not ignored. For any other function,
    the means of the shards are averaged, weighted by the number of samples in each shard. 16-bit outputs are first
    converted to float32, as under `torch.autocast`.

    Parameters
    ----------
    function : a loss such as `torch.nn.CrossEntropyLoss()`, with `reduction="mean"`, or a function of two tensors
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        if isinstance(function, torch.nn.Module) and next(function.parameters(), None) is not None:
            raise ConfigError(f"{function}: a loss with parameters is not trained here; make it a part of the model")
        if (reduction := getattr(function, "reduction", "mean")) != "mean":
            raise ConfigError(f"{function}: reduction={reduction!r} gives no mean over a batch; use 'mean'")
        self.function = function
        self._needs_same_shape = isinstance(function, SAME_SHAPE_LOSSES) or function in SAME_SHAPE_FUNCTIONS
        self._sum: Any = function
        if isinstance(function, (*LABELS, *SUMS)):
            self._sum = copy.copy(function)
            self._sum.reduction = "sum"

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        given, wanted = to_tensor(y).detach().requires_grad_(), to_tensor(target)
        with torch.enable_grad():
            output = given.float() if given.dtype.itemsize < 4 else given  # a 16-bit mean would be too inaccurate
        if isinstance(self.function, LABELS) and not wanted.is_floating_point():
            wanted = wanted.to(torch.int64)
        elif wanted.is_floating_point() or self._needs_same_shape:
            wanted = wanted.to(output.dtype)
        weight = self._compute_weight(output, wanted)
        with torch.enable_grad():
            total = self._sum(output, wanted) if y.shape[0] else output.sum()
            if self._sum is self.function:
                total = total * weight
        if total.ndim:
            raise DataError(f"{self!r} gives a tensor of shape {tuple(total.shape)}: a loss is one number")
        bare = getattr(env.xp, "holds_no_data", False)
        return (0.0 if bare else float(total.detach())), weight, (given, total)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        given, total = saved
        (gradient,) = torch.autograd.grad(total, given, torch.full_like(total, seed))
        return to_array(env.xp, gradient)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        if not target.shape or target.shape[0] != shape[0]:
            raise DataError(f"{self!r}: a target of shape {tuple(target.shape)} for {shape[0]} samples")
        given, output = tuple(target.shape), tuple(shape)
        if isinstance(self.function, LABELS):
            self._require_labels(output, target)
        elif self._needs_same_shape and given != output:
            raise DataError(
                f"{self!r} needs a target of the output's shape {output}, got {given}: PyTorch would repeat one of them"
            )

    def _require_labels(self, output: tuple[int, ...], target: Array) -> None:
        """Raise DataError unless the target has class probabilities in the output's shape, or valid integer labels. Dim
        1 of the output is the class dim."""
        whole = np.dtype(target.dtype).kind in "iu"
        wanted = (output[:1] + output[2:]) if whole else output
        if np.dtype(target.dtype).kind == "b" or tuple(target.shape) != wanted:
            kind = "labels" if whole else "probabilities"
            is_last = len(output) > 2 and whole and tuple(target.shape) == output[:-1]
            remedy = "; if the classes are the last dim, use fsdpx.nn.CrossEntropyLoss" if is_last else ""
            raise DataError(
                f"{self!r}: {kind} for an output of shape {output} have the shape {wanted}, got {tuple(target.shape)} "
                f"of {target.dtype}{remedy}"
            )
        ignored = self.function.ignore_index  # type: ignore[attr-defined]
        if whole and bool((wrong := ((target < 0) | (target >= output[1])) & (target != ignored)).any()):
            raise DataError(
                f"{self!r}: label {int(target[wrong][0])} is out of range: it must be from 0 to {output[1] - 1}, or "
                f"ignore_index {ignored}"
            )

    def _compute_weight(self, output: torch.Tensor, target: torch.Tensor) -> float:
        if isinstance(self.function, SUMS):
            return float(output.numel())
        if not isinstance(self.function, LABELS):
            return float(output.shape[0])
        if target.is_floating_point():  # the target holds class probabilities
            return float(output.numel() // max(output.shape[1], 1))
        if target.device.type == "meta":
            return float(target.numel())
        counted = target[target != self.function.ignore_index]
        weights = self.function.weight
        return float(counted.numel() if weights is None else weights[counted].sum())

    def __repr__(self) -> str:
        return f"TorchLoss({self.function!r})"
