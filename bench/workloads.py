"""The models of the benchmarks, the same in fsdpx and in PyTorch, and their batches."""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MODELS", "VOCAB", "Model", "batch", "gpt_in_torch", "in_fsdpx", "in_torch"]

VOCAB, TIME = 256, 256
CLASSES = 10


@dataclass(frozen=True)
class Model:
    """rows: samples per step over all ranks. heads: of a GPT. side: of square images in three colors, for a residual
    net with `layers` stages of two blocks, the first of `width` channels (He et al. 2015; ResNet-18: four, of 64).
    dims: of fields of three channels with `side` cells along each, for a U-Net, or an FNO that keeps `modes`. None of
    these: a chain of square linear layers."""

    width: int
    layers: int
    rows: int
    heads: int = 0
    gelu: bool = False
    side: int = 0
    dims: int = 0
    modes: int = 0

    @property
    def per_step(self) -> int:
        """What a step gets through: tokens of a GPT, samples of a chain."""
        return self.rows * TIME if self.heads else self.rows

    @property
    def unit(self) -> str:
        return "tokens/s" if self.heads else "samples/s"


MODELS = {
    "tiny": Model(256, 4, rows=8, heads=4),
    "small": Model(512, 8, rows=8, heads=8),
    "mlp": Model(1024, 24, rows=256, gelu=True),
    "many": Model(32, 1000, rows=64),
    "cnn": Model(64, 4, rows=64, side=32),
    "unet3d": Model(8, 3, rows=1, side=64, dims=3),
    "unet2d": Model(32, 4, rows=1, side=256, dims=2),
    "fno2d": Model(32, 4, rows=1, side=256, dims=2, modes=24),
}


def batch(model: Model, rank: int = 0, size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows of the global batch."""
    rng = np.random.default_rng(0)
    mine = slice(model.rows * rank // size, model.rows * (rank + 1) // size)
    if model.heads:
        text = rng.integers(0, VOCAB, (model.rows, TIME + 1))[mine]
        return text[:, :-1].copy(), text[:, 1:].copy()
    if model.dims:
        whole = rng.normal(size=(model.rows, 3, *(model.side,) * model.dims)).astype(np.float32)
        part = np.ascontiguousarray(whole[:, :, model.side * rank // size : model.side * (rank + 1) // size])
        return part, part
    if model.side:
        images = rng.normal(size=(model.rows, 3, model.side, model.side)).astype(np.float32)
        return images[mine], rng.integers(0, CLASSES, model.rows)[mine]
    x, y = (rng.normal(size=(model.rows, model.width)).astype(np.float32)[mine] for _ in range(2))
    return x, y


def in_fsdpx(model: Model) -> tuple[Any, Any]:
    """The model and its loss."""
    from fsdpx import nn

    if model.heads:
        return nn.GPT(VOCAB, model.width, model.layers, model.heads, TIME), nn.CrossEntropyLoss()
    if model.modes:
        return nn.FNO(3, 3, (model.modes,) * model.dims, model.width, model.layers), nn.MSELoss()
    if model.dims:
        return nn.UNet(3, 3, model.dims, model.width, model.layers), nn.MSELoss()
    if model.side:
        blocks = [part for shape in _blocks(model) for part in (_block(*shape), nn.ReLU())]
        pool, channels = nn.AvgPool2d(model.side >> model.layers - 1), model.width << model.layers - 1
        stem = nn.Conv2d(3, model.width, 3, 1, 1, bias=False), nn.BatchNorm(model.width), nn.ReLU()
        return nn.Sequential(*stem, *blocks, pool, nn.Flatten(), nn.Linear(channels, CLASSES)), nn.CrossEntropyLoss()
    linear = [nn.Linear(model.width, model.width) for _ in range(model.layers)]
    return nn.Sequential(
        *(part for one in linear for part in ([one, nn.GELU()] if model.gelu else [one]))
    ), nn.MSELoss()


def _blocks(model: Model) -> list[tuple[int, int, int]]:
    """(channels in, channels out, stride) of each block."""
    widths = [model.width << n for n in range(model.layers)]
    firsts = [(width // 2 if n else width, width, 2 if n else 1) for n, width in enumerate(widths)]
    return [shape for first in firsts for shape in (first, (first[1], first[1], 1))]


def _block(inner: int, outer: int, stride: int) -> Any:
    """What is before the last ReLU of a block."""
    from fsdpx import nn

    first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm(outer), nn.ReLU()
    body = nn.Sequential(*first, nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm(outer))
    if (inner, stride) == (outer, 1):
        return nn.Residual(body)
    short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm(outer))
    nodes = {"body": (body, "x"), "short": (short, "x"), "sum": (nn.Add(), "body", "short")}
    return nn.Graph(nodes, outputs=("sum",))


def in_torch(model: Model) -> tuple[Any, Any, list[Any]]:
    """The model, its loss, and the parts that `fully_shard` is told of one by one: blocks of a GPT, linear layers."""
    from torch import nn

    if model.heads:
        gpt = gpt_in_torch(VOCAB, model.width, model.layers, model.heads, TIME)
        return (
            gpt,
            lambda y, target: nn.functional.cross_entropy(y.reshape(-1, VOCAB), target.reshape(-1)),
            [*gpt.blocks],
        )
    if model.dims:
        net = fno_in_torch(model) if model.modes else unet_in_torch(model)
        return net, nn.functional.mse_loss, []
    if model.side:
        net, blocks = _resnet(model)
        return net, nn.functional.cross_entropy, blocks
    linear = [nn.Linear(model.width, model.width) for _ in range(model.layers)]
    chain = nn.Sequential(*(part for one in linear for part in ([one, nn.GELU()] if model.gelu else [one])))
    return chain, nn.functional.mse_loss, linear


def _resnet(model: Model) -> tuple[Any, list[Any]]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inner: int, outer: int, stride: int) -> None:
            super().__init__()
            first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()
            self.body = nn.Sequential(*first, nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer))
            self.short = nn.Sequential()
            if (inner, stride) != (outer, 1):
                self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.short(x))

    blocks = [Block(*shape) for shape in _blocks(model)]
    stem = nn.Conv2d(3, model.width, 3, 1, 1, bias=False), nn.BatchNorm2d(model.width), nn.ReLU()
    head = nn.Linear(model.width << model.layers - 1, CLASSES)
    pool = nn.AvgPool2d(model.side >> model.layers - 1)
    return nn.Sequential(*stem, *blocks, pool, nn.Flatten(), head), blocks


def gpt_in_torch(vocabulary: int, width: int, layers: int, heads: int, time: int) -> Any:
    """A GPT with tied embeddings as PyTorch's users write it; its blocks are in `blocks`."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, t, _ = x.shape
            q, k, v = (a.view(n, t, heads, -1).transpose(1, 2) for a in self.qkv(self.norm1(x)).split(width, 2))
            o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(o.transpose(1, 2).reshape(n, t, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)

        def forward(self, x: Any) -> Any:
            h = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks:
                h = block(h)
            return nn.functional.linear(self.norm(h), self.embed.weight)

    return Gpt()


def unet_in_torch(model: Model) -> Any:
    """A U-Net as PyTorch's users write it."""
    import torch
    from torch import nn

    conv, rising, pool, norm = (
        getattr(nn, f"{kind}{model.dims}d") for kind in ("Conv", "ConvTranspose", "MaxPool", "BatchNorm")
    )

    def block(inner: int, outer: int) -> Any:
        one, two = (conv(channels, outer, 3, padding=1, bias=False) for channels in (inner, outer))
        return nn.Sequential(one, norm(outer), nn.ReLU(True), two, norm(outer), nn.ReLU(True))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [model.width << level for level in range(model.layers + 1)]
            pairs = list(zip(widths[1:], widths, strict=False))[::-1]
            self.down = nn.ModuleList(map(block, [3, *widths], widths))
            self.up = nn.ModuleList(rising(below, above, 2, 2) for below, above in pairs)
            self.back = nn.ModuleList(block(below, above) for below, above in pairs)
            self.pool, self.last = pool(2), conv(model.width, 3, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for level in self.down:
                x = level(self.pool(x) if kept else x)
                kept.append(x)
            for n, (up, back) in enumerate(zip(self.up, self.back, strict=True)):
                x = back(torch.cat([up(x), kept[-2 - n]], 1))
            return self.last(x)

    return UNet()


def fno_in_torch(model: Model) -> Any:
    """The layers of `nn.FNO` in two dims, with the FFT of PyTorch as neuraloperator uses it."""
    import torch
    from torch import fft, nn

    width, k, side, half = model.width, model.modes, model.side, model.modes // 2 + 1

    def mlp(inner: int, hidden: int, outer: int) -> Any:
        return nn.Sequential(nn.Conv2d(inner, hidden, 1), nn.GELU(), nn.Conv2d(hidden, outer, 1))

    class Block(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width, k, half, 2) * (2 * width) ** -0.5)
            self.bias, self.gate = nn.Parameter(torch.zeros(width, 1, 1)), nn.Parameter(torch.ones(width, 1, 1))
            self.skip, self.mlp = nn.Conv2d(width, width, 1, bias=False), mlp(width, width // 2, width)
            self.act = nn.Identity() if last else nn.GELU()

        def forward(self, x: Any) -> Any:
            rows = slice(side // 2 - k // 2, side // 2 + k - k // 2)
            modes = fft.fftshift(fft.rfft2(x, norm="forward"), dim=-2)
            found = torch.zeros_like(modes)
            weight = torch.view_as_complex(self.weight)
            found[:, :, rows, :half] = torch.einsum("bixy,ioxy->boxy", modes[:, :, rows, :half], weight)
            smooth = fft.irfft2(fft.ifftshift(found, dim=-2), s=(side, side), norm="forward") + self.bias
            return self.act(self.mlp(self.act(smooth + self.skip(x))) + self.gate * x)

    class FNO(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            at = torch.arange(side) / side
            self.register_buffer("places", torch.stack(torch.meshgrid(at, at, indexing="ij"))[None])
            blocks = [Block(n == model.layers - 1) for n in range(model.layers)]
            self.all = nn.Sequential(mlp(5, 2 * width, width), *blocks, mlp(width, 2 * width, 3))

        def forward(self, x: Any) -> Any:
            return self.all(torch.cat([x, self.places], 1))

    return FNO()
