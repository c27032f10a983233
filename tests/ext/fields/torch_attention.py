"""PyTorch modules of attention over fields, and of blocks around it, written from the papers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over channels, as in torchvision."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ConvNeXtBlock(nn.Module):
    """The block of ConvNeXt's authors, with convolutions of one cell instead of Linear."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = ChannelLayerNorm(channels, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)
        self.gamma = nn.Module()
        self.gamma.weight = nn.Parameter(torch.full((1, channels, 1, 1), 0.5))

    def forward(self, x: Any) -> Any:
        y = self.pwconv1(self.norm(self.dwconv(x)))
        return x + self.gamma.weight * self.pwconv2(nn.functional.gelu(y))


class PhysicsAttention(nn.Module):
    """Wu et al. (2024), with the names of Transolver."""

    def __init__(self, channels: int, heads: int, slices: int, kernel: int = 0, temperature: float = 0.5) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        features = channels // heads
        self.temperature = nn.Parameter(torch.full((1, heads, 1, 1), temperature))
        make = (lambda: nn.Conv2d(channels, channels, kernel, padding=kernel // 2)) if kernel else (
            lambda: nn.Linear(channels, channels)
        )  # fmt: skip
        self.in_project_x, self.in_project_fx = make(), make()
        self.in_project_slice = nn.Linear(features, slices)
        self.to_q, self.to_k, self.to_v = (nn.Linear(features, features, bias=False) for _ in "qkv")
        self.to_out = nn.Sequential(nn.Linear(channels, channels))

    def forward(self, x: Any) -> Any:
        here, there = (1, -1) if not self.kernel else (1, 1)
        x_mid, fx_mid = (
            self._split(project(x.movedim(here, there)).movedim(there, 1))
            for project in (self.in_project_x, self.in_project_fx)
        )
        weights = torch.softmax(self.in_project_slice(x_mid) / self.temperature.clamp(0.1, 5), -1)
        tokens = torch.einsum("bhnc,bhng->bhgc", fx_mid, weights) / (weights.sum(2) + 1e-5)[..., None]
        tokens = nn.functional.scaled_dot_product_attention(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens))
        y = torch.einsum("bhgc,bhng->bnhc", tokens, weights).flatten(2)
        return self.to_out(y).swapaxes(1, 2).reshape(x.shape)

    def _split(self, x: Any) -> Any:
        return x.reshape(x.shape[0], self.heads, x.shape[1] // self.heads, -1).swapaxes(2, 3)


class GlobalAttention(nn.MultiheadAttention):
    """PyTorch's attention over the sequence of cells."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__(channels, heads, batch_first=True)

    def forward(self, x: Any) -> Any:
        rows = x.flatten(2).swapaxes(1, 2)
        return super().forward(rows, rows, rows, need_weights=False)[0].swapaxes(1, 2).reshape(x.shape)


class NeighborhoodAttention(nn.Module):
    """Hassani et al. (2023), by gathering the keys and values of each cell's window."""

    def __init__(self, channels: int, heads: int, window: tuple[int, ...], periodic: tuple[bool, ...]) -> None:
        super().__init__()
        self.heads, self.window, self.periodic = heads, window, periodic
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Any) -> Any:
        rows = self.qkv(x.flatten(2).swapaxes(1, 2))
        q, k, v = rows.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        near = self._find_windows(x.shape[2:])
        scores = torch.einsum("bhnc,bhnkc->bhnk", q, k[:, :, near]) / q.shape[-1] ** 0.5
        y = torch.einsum("bhnk,bhnkc->bnhc", scores.softmax(-1), v[:, :, near]).flatten(2)
        return self.out(y).swapaxes(1, 2).reshape(x.shape)

    def _find_windows(self, cells: Any) -> Any:
        """Return the numbers of the cells in the window of each cell, (cells, cells of a window)."""
        near = torch.zeros((1, 1), dtype=torch.long)
        for n, k, periodic in zip(cells, self.window, self.periodic, strict=True):
            start = torch.arange(n) - k // 2
            start = start if periodic else start.clamp(0, n - k)
            here = (start[:, None] + torch.arange(k)) % n
            near = (n * near[:, None, :, None] + here[None, :, None, :]).flatten(0, 1).flatten(1)
        return near
