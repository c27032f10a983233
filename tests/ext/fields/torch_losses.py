"""Losses of fields as PyTorch users write them: functions of the output and the target, (samples, channels, *cells)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = ["crps", "make_spectrum_rmse", "relative_h1", "relative_l2", "rmse", "vrmse"]


def dims_of_cells(y: Any) -> tuple[int, ...]:
    return tuple(range(2, y.ndim))


def relative_l2(y: Any, target: Any) -> Any:
    return ((y - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


def rmse(y: Any, target: Any) -> Any:
    return (y - target).square().mean(dim=dims_of_cells(y)).sqrt().mean()


def vrmse(y: Any, target: Any) -> Any:
    """Ohana et al. (2024)."""
    dims = dims_of_cells(y)
    variance = target.var(dim=dims)
    return ((y - target).square().mean(dim=dims) / (variance + 1e-7)).sqrt().mean()


def differentiate(y: Any, dim: int) -> Any:
    """Central differences, and one-sided ones of third order at the ends, with `dim` as the last dim."""
    y = y.movedim(dim, -1)
    low, high = (a[..., 0] * -11 + a[..., 1] * 18 - a[..., 2] * 9 + a[..., 3] * 2 for a in (y, y[..., -4:].flip(-1)))
    return torch.cat([low[..., None] / 6, (y[..., 2:] - y[..., :-2]) / 2, high[..., None] / -6], dim=-1)


def relative_h1(y: Any, target: Any) -> Any:
    """Li et al. (2022), with spacing 1."""

    def square(a: Any) -> Any:
        slopes = (differentiate(a, dim) for dim in dims_of_cells(a))
        return sum(part.square().flatten(1).sum(dim=1) for part in (a, *slopes))

    return (square(y - target) / square(target)).sqrt().mean()


def make_spectrum_rmse() -> Callable[[Any, Any], Any]:
    @lru_cache
    def make_shells(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any, int]:
        """The wavenumber of each mode of a real field, how many modes it stands for, and the number of wavenumbers."""
        waves = [np.fft.fftfreq(n, 1 / n) for n in shape[:-1]] + [np.fft.rfftfreq(shape[-1], 1 / shape[-1])]
        index = np.rint(np.sqrt(sum(k**2 for k in np.meshgrid(*waves, indexing="ij")))).astype(np.int64)
        twice = np.broadcast_to(np.where((waves[-1] == 0) | (2 * waves[-1] == shape[-1]), 1.0, 2.0), index.shape)
        return torch.from_numpy(index.reshape(-1)), torch.tensor(twice.reshape(-1), dtype=dtype), int(index.max()) + 1

    def amplitudes(a: Any) -> Any:
        index, twice, count = make_shells(tuple(a.shape[2:]), a.dtype)
        modes = torch.fft.rfftn(a, dim=dims_of_cells(a), norm="forward").flatten(2)
        power = (modes.real.square() + modes.imag.square()) * twice
        return power.new_zeros(*a.shape[:2], count).index_add(2, index, power).sqrt()

    return lambda y, target: (amplitudes(y) - amplitudes(target)).square().sum(dim=2).sqrt().mean()


def crps(y: Any, target: Any) -> Any:
    """The fair score of Ferro (2014)."""
    members = y.unflatten(1, (-1, target.shape[1]))
    count = members.shape[1]
    errors = (members - target[:, None]).abs().mean(dim=1)
    apart = (members[:, None] - members[:, :, None]).abs().sum(dim=(1, 2))
    return (errors - apart / (2 * count * (count - 1))).mean()
