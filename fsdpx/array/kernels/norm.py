"""LayerNorm and RMSNorm over rows, with the two halves of their gradients."""

from typing import Any

from fsdpx.array.kernels.dispatch import kernel

__all__ = [
    "layer_norm", "layer_norm_backward_input", "layer_norm_backward_params", "rms_norm", "rms_norm_backward_input",
    "rms_norm_backward_params",
]  # fmt: skip


@kernel()
def layer_norm(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    """(x - mean) rstd weight + bias per row of x (rows, features), rstd = 1 / sqrt(var + eps) (Ba et al. 2016).

    weight, bias: (features,) or None. Returns y, and mean and rstd of shape (rows,), float32 for 16-bit x."""
    mean = xp.mean(x, axis=1)
    centred = x - mean[:, None]
    rstd = 1.0 / xp.sqrt(xp.mean(xp.square(centred), axis=1) + eps)
    y = centred * rstd[:, None]
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias), mean, rstd


@kernel()
def layer_norm_backward_input(xp: Any, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> Any:
    """rstd (h - mean(h) - n mean(h n)) with h = dy weight and n the normalised row."""
    n = (x - mean[:, None]) * rstd[:, None]
    h = dy if weight is None else dy * weight
    along = xp.mean(h * n, axis=1)[:, None]
    return (h - xp.mean(h, axis=1)[:, None] - n * along) * rstd[:, None]


@kernel(narrow=0, into=("gw", "gb"))
def layer_norm_backward_params(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    """Adds sum(dy n) into gw and sum(dy) into gb, over rows; either may be None."""
    if gw is not None:
        gw += xp.sum(dy * ((x - mean[:, None]) * rstd[:, None]), axis=0)
    if gb is not None:
        gb += xp.sum(dy, axis=0)


@kernel()
def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """x rstd weight per row of x (rows, features), rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019).

    weight: (features,) or None. Returns y, and rstd of shape (rows,), float32 for 16-bit x."""
    rstd = 1.0 / xp.sqrt(xp.mean(xp.square(x), axis=1) + eps)
    y = x * rstd[:, None]
    return (y if weight is None else y * weight), rstd


@kernel()
def rms_norm_backward_input(xp: Any, x: Any, weight: Any, rstd: Any, dy: Any) -> Any:
    """rstd (h - n mean(h n)) with h = dy weight and n = x rstd."""
    n = x * rstd[:, None]
    h = dy if weight is None else dy * weight
    return (h - n * xp.mean(h * n, axis=1)[:, None]) * rstd[:, None]


@kernel(narrow=0, into=("gw",))
def rms_norm_backward_params(xp: Any, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    """Adds sum(dy x rstd) over rows into gw."""
    gw += xp.sum(dy * (x * rstd[:, None]), axis=0)
