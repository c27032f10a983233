"""How much processor time does each layer of fields take, beside the same layer of PyTorch with one thread?

    python bench/field_layers.py [--only GroupNorm] [--rounds 5] [--quick]

A model is a layer, several times in a row where its result has the shape of its input, after a convolution of one cell
if it has no parameters. Both libraries train it by SGD on a squared error, and predict with it, in turns. The last rows
are losses of fields: a model of one convolution of one cell is trained by them, and they are evaluated instead of
predicting. The ratio is PyTorch's processor time over that of fsdpx, the median over rounds: 2 means that fsdpx takes
half the time.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from records import arguments, folder_of, lines, save

__all__ = ["ROWS", "measure_layers", "tables"]


class Row(NamedTuple):
    """A layer in both libraries. repeat: how often the model contains it. trains: whether it has parameters. layout:
    layout of the arrays if it is not PyTorch's; fsdpx then gets one sample on a grid, and PyTorch a view. loss: the
    loss. members: number of ensemble members in the channels of the output."""

    name: str
    shape: tuple[int, ...]
    repeat: int
    make: Callable[[Any], Any]
    trains: bool = True
    layout: str = ""
    loss: Callable[[Any], Any] = lambda nn: nn.MSELoss()
    members: int = 1


def get_norm(nn: Any, name: str) -> Any:
    """Return a norm of PyTorch, which has one for each number of dims, or of fsdpx."""
    return getattr(nn, f"{name}2d", None) or getattr(nn, name)


def make_channel_norm(nn: Any) -> Any:
    """Return layer norm over the channels of each cell, which PyTorch users write as three modules."""
    if hasattr(nn, "ChannelLayerNorm"):
        return nn.ChannelLayerNorm(32)

    class ChannelLayerNorm(nn.LayerNorm):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return ChannelLayerNorm(32, eps=1e-6)


def make_convnext(nn: Any) -> Any:
    """Return a block of ConvNeXt, for PyTorch as its authors write it."""
    if hasattr(nn, "ConvNeXtBlock"):
        return nn.ConvNeXtBlock(32)
    import torch

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.dwconv, self.norm = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32, eps=1e-6)
            self.pwconv1, self.pwconv2 = nn.Linear(32, 128), nn.Linear(128, 32)
            self.gamma = nn.Parameter(torch.full((32,), 1e-6))

        def forward(self, x: Any) -> Any:
            y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
            y = self.gamma * self.pwconv2(nn.functional.gelu(self.pwconv1(y)))
            return x + y.permute(0, 3, 1, 2)

    return Block()


def make_attention(nn: Any, name: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> Any:
    """Return a layer of attention, for which PyTorch users write a module."""
    if hasattr(nn, name):
        return getattr(nn, name)(*ours)
    return getattr(import_from_tests("torch_attention"), name)(*theirs)


def import_from_tests(name: str) -> Any:
    """Return a file with layers or losses as PyTorch users write them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ext" / "fields"))
    return import_module(name)


def make_loss_row(name: str, torch_name: str = "", members: int = 1) -> Row:
    """Return a row for a loss. `torch_name` is that of a function in torch_losses.py, or of one that makes it, or ""
    for a loss that PyTorch has by the same name."""

    def make(nn: Any) -> Any:
        if not torch_name or hasattr(nn, name):
            return getattr(nn, name)(*([members] if members > 1 else []))
        found = getattr(import_from_tests("torch_losses"), torch_name)
        return found() if torch_name.startswith("make_") else found

    return Row(name, IMAGES, 0, lambda nn: nn.Identity(), False, loss=make, members=members)


def make_unet(nn: Any) -> Any:
    """Return a U-Net of two levels with attention below them, as in diffusion models."""
    if hasattr(nn, "UNet"):
        return nn.UNet(2, 2, width=32, depth=2, norm="group", activation="silu", attention=4)
    import torch

    def block(before: int, channels: int) -> list[Any]:
        pairs = (before, channels), (channels, channels)
        return [
            layer
            for pair in pairs
            for layer in (nn.Conv2d(*pair, 3, padding=1, bias=False), nn.GroupNorm(channels // 8, channels), nn.SiLU())
        ]

    class UNet(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Sequential(*block(*pair)) for pair in ((2, 32), (32, 64)))
            self.low, self.norm = nn.Sequential(*block(64, 128)), nn.GroupNorm(16, 128)
            self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
            self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in (64, 32))
            self.up = nn.ModuleList(nn.Sequential(*block(2 * n, n)) for n in (64, 32))
            self.last = nn.Conv2d(32, 2, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for layer in self.down:
                kept.append(layer(x))
                x = nn.functional.max_pool2d(kept[-1], 2)
            x = self.low(x)
            rows = self.norm(x).flatten(2).mT
            x = x + self.attention(rows, rows, rows, need_weights=False)[0].mT.reshape(x.shape)
            for rise, layer in zip(self.rise, self.up, strict=True):
                x = layer(torch.cat([rise(x), kept.pop()], dim=1))
            return self.last(x)

    return UNet()


def make_chain(nn: Any, channels: tuple[int, ...], stride: int) -> Any:
    """Return 2-D convolutions of 3 x 3 cells with GELU between them."""
    layers = []
    for n, pair in enumerate(zip(channels, channels[1:], strict=False)):
        layers += [nn.GELU()] * (n > 0) + [nn.Conv2d(*pair, 3, stride=stride, padding=1)]
    return nn.Sequential(*layers)


IMAGES, CUBES, LINES = (4, 32, 64, 64), (2, 32, 16, 16, 16), (8, 32, 1024)
ROWS = (
    Row("Conv1d depthwise", LINES, 4, lambda nn: nn.Conv1d(32, 32, 3, padding=1, groups=32)),
    Row("Conv2d depthwise", IMAGES, 4, lambda nn: nn.Conv2d(32, 32, 3, padding=1, groups=32)),
    Row("Conv2d depthwise 7x7", IMAGES, 4, lambda nn: nn.Conv2d(32, 32, 7, padding=3, groups=32)),
    Row("Conv3d depthwise", CUBES, 4, lambda nn: nn.Conv3d(32, 32, 3, padding=1, groups=32)),
    Row("Conv1d 8 groups", LINES, 4, lambda nn: nn.Conv1d(32, 32, 3, padding=1, groups=8)),
    Row("Conv2d 8 groups", IMAGES, 4, lambda nn: nn.Conv2d(32, 32, 3, padding=1, groups=8)),
    Row("Conv3d 8 groups", CUBES, 4, lambda nn: nn.Conv3d(32, 32, 3, padding=1, groups=8)),
    Row("Conv2d 1x1", IMAGES, 4, lambda nn: nn.Conv2d(32, 32, 1)),
    Row("Conv1d", LINES, 4, lambda nn: nn.Conv1d(32, 32, 3, padding=1)),
    Row("Conv2d", IMAGES, 4, lambda nn: nn.Conv2d(32, 32, 3, padding=1)),
    Row("Conv3d", CUBES, 4, lambda nn: nn.Conv3d(32, 32, 3, padding=1)),
    Row("Conv2d stride 2", IMAGES, 1, lambda nn: nn.Conv2d(32, 64, 3, stride=2, padding=1)),
    Row("encoder, 3 strides of 2", (4, 3, 64, 64), 1, lambda nn: make_chain(nn, (3, 32, 64, 128), 2)),
    Row("net of 1, 8, 1 channels", (1, 1, 24, 24), 1, lambda nn: make_chain(nn, (1, 8, 1), 1)),
    Row("ConvTranspose2d", IMAGES, 1, lambda nn: nn.ConvTranspose2d(32, 16, 2, stride=2)),
    Row("Conv1d layout xc", (1, 32, 8192), 4, lambda nn: nn.Conv1d(32, 32, 3, padding=1), layout="xc"),
    Row("GELU layout xc", (1, 32, 8192), 4, lambda nn: nn.GELU(), False, "xc"),
    Row("GroupNorm", IMAGES, 4, lambda nn: nn.GroupNorm(8, 32)),
    Row("InstanceNorm2d", IMAGES, 4, lambda nn: get_norm(nn, "InstanceNorm")(32), False),
    Row("BatchNorm2d", IMAGES, 4, lambda nn: get_norm(nn, "BatchNorm")(32)),
    Row("ChannelLayerNorm", IMAGES, 4, make_channel_norm),
    Row("ConvNeXtBlock", IMAGES, 2, make_convnext),
    Row("GlobalAttention", (4, 64, 16, 16), 4, lambda nn: make_attention(nn, "GlobalAttention", (64, 4), (64, 4))),
    Row(
        "NeighborhoodAttention 7x7",
        (4, 32, 32, 32),
        2,
        lambda nn: make_attention(nn, "NeighborhoodAttention", (32, 2, 7), (32, 2, (7, 7), (False, False))),
    ),
    Row("PhysicsAttention", IMAGES, 2, lambda nn: make_attention(nn, "PhysicsAttention", (32, 4, 32), (32, 4, 32))),
    Row("UNet with attention", (4, 2, 64, 64), 1, make_unet),
    Row("ReLU", IMAGES, 4, lambda nn: nn.ReLU(), False),
    Row("LeakyReLU", IMAGES, 4, lambda nn: nn.LeakyReLU(), False),
    Row("ELU", IMAGES, 4, lambda nn: nn.ELU(), False),
    Row("Softplus", IMAGES, 4, lambda nn: nn.Softplus(), False),
    Row("GELU", IMAGES, 4, lambda nn: nn.GELU(), False),
    Row("SiLU", IMAGES, 4, lambda nn: nn.SiLU(), False),
    Row("Tanh", IMAGES, 4, lambda nn: nn.Tanh(), False),
    Row("Sigmoid", IMAGES, 4, lambda nn: nn.Sigmoid(), False),
    Row("MaxPool2d", IMAGES, 1, lambda nn: nn.MaxPool2d(2), False),
    Row("AvgPool2d", IMAGES, 1, lambda nn: nn.AvgPool2d(2), False),
    Row("AdaptiveAvgPool1d", LINES, 1, lambda nn: nn.AdaptiveAvgPool1d(16), False),
    Row("AdaptiveAvgPool2d", IMAGES, 1, lambda nn: nn.AdaptiveAvgPool2d(4), False),
    Row("AdaptiveAvgPool3d", CUBES, 1, lambda nn: nn.AdaptiveAvgPool3d(4), False),
    Row("Upsample linear", LINES, 1, lambda nn: nn.Upsample(scale_factor=2, mode="linear"), False),
    Row("Upsample nearest", IMAGES, 1, lambda nn: nn.Upsample(scale_factor=2), False),
    Row("Upsample bilinear", IMAGES, 1, lambda nn: nn.Upsample(scale_factor=2, mode="bilinear"), False),
    Row("Upsample trilinear", CUBES, 1, lambda nn: nn.Upsample(scale_factor=2, mode="trilinear"), False),
    *map(make_loss_row, ("MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss")),
    make_loss_row("RelativeL2", "relative_l2"),
    make_loss_row("RMSE", "rmse"),
    make_loss_row("VRMSE", "vrmse"),
    make_loss_row("RelativeH1", "relative_h1"),
    make_loss_row("SpectrumRMSE", "make_spectrum_rmse"),
    make_loss_row("CRPS", "crps", members=8),
)


def measure_layers(rounds: int, seconds: float = 0.08, only: str = "") -> list[dict[str, Any]]:
    """Return the name, milliseconds of processor time and ratios of each layer."""
    import torch

    torch.set_num_threads(1)
    measured = []
    for row in ROWS:
        if only.lower() not in row.name.lower():
            continue
        ours, theirs = make_ours(row), make_theirs(row)
        entry: dict[str, Any] = {"layer": row.name, "shape": list(row.shape), "repeat": row.repeat}
        for what, a, b in (("step", ours[0], theirs[0]), ("predict", ours[1], theirs[1])):
            pairs = [(time_calls(a, seconds), time_calls(b, seconds)) for _ in range(rounds)]
            entry[f"{what} ms"] = min(first for first, _ in pairs) * 1e3
            entry[f"{what} ratio"] = median(second / first for first, second in pairs)
        measured.append(entry)
        print(f"{row.name}: training {entry['step ratio']:.2f}, predict {entry['predict ratio']:.2f}", flush=True)
    return measured


def make_ours(row: Row) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from mpi4py import MPI

    from fsdpx import Grid, distribute, nn, optim

    model, (x, y), options = nn.Sequential(*make_layers(nn, row)), make_data(row), {}
    if row.layout:
        x, y = (np.ascontiguousarray(a[0].T) for a in (x, y))
        options["domain"] = Grid(MPI.COMM_SELF, x.shape[:-1], layout=row.layout)
    trainer = distribute(model, loss=row.loss(nn), optimizer=optim.SGD(lr=1e-3), strategy="ddp", seed=0, **options)
    return lambda: trainer.step(x, y), lambda: trainer.predict(x) if row.repeat else trainer.evaluate(x, y)


def make_theirs(row: Row) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    model = torch.nn.Sequential(*make_layers(torch.nn, row))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = make_data(row)
    if row.layout:
        x, y = (np.ascontiguousarray(a[0].T).T[None] for a in (x, y))
    x, y = map(torch.from_numpy, (x, y))
    loss = row.loss(torch.nn)

    def step() -> None:
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def predict() -> None:
        with torch.inference_mode():
            y_found = model(x)
            if not row.repeat:
                loss(y_found, y)

    return step, predict


def make_layers(nn: Any, row: Row) -> list[Any]:
    """Return the layers of a model in `nn`, that of PyTorch or of fsdpx."""
    dims = len(row.shape) - 2
    first = [] if row.trains else [getattr(nn, f"Conv{dims}d")(row.shape[1], row.shape[1], 1)]
    return first + [row.make(nn) for _ in range(row.repeat)]


def make_data(row: Row) -> tuple[np.ndarray, np.ndarray]:
    import torch

    rng = np.random.default_rng(0)
    x = rng.standard_normal(row.shape, np.float32)
    with torch.inference_mode():
        shape = torch.nn.Sequential(row.make(torch.nn))(torch.from_numpy(x)).shape
    return x, rng.standard_normal((shape[0], shape[1] // row.members, *shape[2:]), np.float32)


def time_calls(call: Callable[[], Any], seconds: float) -> float:
    """Return the processor seconds of a call, over as many calls as last about `seconds`."""
    call()
    begin, clock, calls = time.process_time(), time.perf_counter(), 0
    while not calls or time.perf_counter() - clock < seconds:
        call()
        calls += 1
    return (time.process_time() - begin) / calls


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ["layer", "input", "training ms", "ratio", "predict ms", "ratio"]
    rows = []
    for entry in found["layers"]:
        times = (entry["step ms"], entry["step ratio"], entry["predict ms"], entry["predict ratio"])
        shape = "x".join(map(str, entry["shape"]))
        name = f"{entry['repeat']} {entry['layer']}" if entry["repeat"] else entry["layer"]
        rows.append([name, shape, *(f"{value:.2f}" for value in times)])
    return [("layers", lines(head, rows))]


def main() -> int:
    p = arguments(__doc__, rounds=9)
    p.add_argument("--only", default="", help="layers whose name contains this")
    options = p.parse_args()
    measured = measure_layers(2 if options.quick else options.rounds, 0.05 if options.quick else 0.08, options.only)
    found = {"rounds": options.rounds, "layers": measured}
    print(f"\n{dict(tables(found))['layers']}")
    if not options.only:
        save("field_layers", options, found)
        print(f"\nwritten to {folder_of(options) / 'field_layers'}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
