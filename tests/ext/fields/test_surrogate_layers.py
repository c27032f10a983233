"""Layers for surrogate models: results on parts of any sizes equal those on the whole field and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from grids import cuts_of, env_of, grid_at, noise
from layers_on_parts import demand_layer_of_whole, draw_gradient, run_alone
from setting import parameters
from trainings import demand_like_alone, make_trainer, train_on_parts

from fsdpx import nn, optim
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.testing import assert_close

GRIDS = {
    1: [(1,), (3,), (5,)],
    2: [(1, 1), (2, 1), (1, 3), (2, 2), (1, 5), (4, 2)],
    3: [(1, 1, 1), (1, 2, 2), (5, 1, 1)],
}
"""Ranks along each dim of cells, by the number of dims."""
LAYERS: dict[str, tuple[Callable[[], nn.Layer], tuple[int, ...]]] = {
    "leaky": (lambda: nn.LeakyReLU(0.2), (2, 5, 7)),
    "elu": (nn.ELU, (2, 9)),
    "softplus": (nn.Softplus, (2, 9)),
    "norm": (lambda: nn.ChannelLayerNorm(3), (3, 7, 5)),
    "convnext": (lambda: nn.ConvNeXtBlock(3, layer_scale=0.5, padding=("reflect", "circular")), (3, 7, 8)),
    "convnext of lines": (lambda: nn.ConvNeXtBlock(4, 1, 5, 2, None), (4, 9)),
    "convnext of volumes": (lambda: nn.ConvNeXtBlock(4, 3, 3, 2, 0.5), (4, 3, 5, 4)),
    "shuffle": (lambda: nn.PixelShuffle(2), (8, 5, 3)),
    "shuffle of lines": (lambda: nn.PixelShuffle(3), (6, 7)),
    "unshuffle": (lambda: nn.PixelUnshuffle(3), (2, 9, 12)),
    "unshuffle of volumes": (lambda: nn.PixelUnshuffle(2), (2, 6, 4, 8)),
    "dropout1": (lambda: nn.Dropout1d(0.4), (6, 9)),
    "dropout2": (lambda: nn.Dropout2d(0.4), (6, 5, 4)),
    "dropout3": (lambda: nn.Dropout3d(0.4), (6, 5, 2, 3)),
    "neighbors": (lambda: nn.NeighborhoodAttention(6, 2, (3, 5), (True, False)), (6, 5, 7)),
    "neighbors of lines": (lambda: nn.NeighborhoodAttention(4, 4, 5, bias=False), (4, 9)),
    "neighbors of volumes": (lambda: nn.NeighborhoodAttention(4, 2, (3, 1, 5), True), (4, 3, 2, 6)),
    "ring": (lambda: nn.GlobalAttention(6, 2), (6, 5, 7)),
    "ring of lines": (lambda: nn.GlobalAttention(4, 4, False), (4, 9)),
    "slices": (lambda: nn.PhysicsAttention(6, 2, 5), (6, 9)),
    "slices of windows": (lambda: nn.PhysicsAttention(6, 3, 4, 3, padding_mode="circular"), (6, 5, 7)),
}


def shaken(layer: nn.Layer) -> dict[str, np.ndarray]:
    """Return the layer's parameters, moved away from zeros and ones."""
    return {name: a + 0.3 * noise(*a.shape, seed=5) for name, a in parameters(layer).items()}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_over_parts_are_those_of_the_whole(name: str) -> None:
    """Compare results and all gradients for even, uneven and empty parts on 1 to 8 ranks."""
    make, (channels, *cells) = LAYERS[name]
    layer, x = make(), noise(2, channels, *cells)
    for k, dims in enumerate(GRIDS[len(cells)]):
        demand_layer_of_whole(layer, shaken(layer), x, dims, k if k % 2 else 0)


def network() -> nn.Layer:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ConvNeXtBlock(8, layer_scale=0.1),
        nn.ChannelLayerNorm(8), nn.LeakyReLU(), nn.PixelUnshuffle(2), nn.Dropout2d(0.2),
        nn.Conv2d(32, 8, 1), nn.ELU(), nn.PixelShuffle(2), nn.Conv2d(2, 2, 3, padding=1), nn.Softplus(),
    )  # fmt: skip


def attentions() -> nn.Layer:
    """Each kind of attention, among patches."""
    kinds = nn.PhysicsAttention(6, 2, 4, 3), nn.NeighborhoodAttention(6, 2, 3, (True, False)), nn.GlobalAttention(6, 2)
    blocks = (nn.Residual(nn.Sequential(nn.ChannelLayerNorm(6), kind)) for kind in kinds)
    return nn.Sequential(nn.Conv2d(2, 6, 3, 2, 1), *blocks, nn.ConvTranspose2d(6, 2, 2, 2))


NETWORKS: dict[str, Callable[[], nn.Layer]] = {
    "elements, norms and blocks of cells": network,
    "vision transformer": lambda: nn.VisionTransformer(2, 2, 2, 2, 6, 2, 3, "neighborhood", 3, hidden=5, periodic=True),
    "attentions": attentions,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_parts_train_as_the_whole_does(name: str) -> None:
    """Two microbatches with a sum of losses. Parts compute attention again in the backward pass."""
    loss, x = 0.5 * nn.MSELoss() + nn.L1Loss() + nn.RelativeL2(), noise(2, 2, 8, 12)

    def run(comm: Communicator, *cut: Any) -> Any:
        grid, again = grid_at(comm, *cut, layout="cyx"), "attention" if comm.size > 1 else None
        more = {"microbatches": 2, "recompute": again, "optimizer": optim.SGD(lr=0.01)}
        trainer = make_trainer(NETWORKS[name](), grid, loss=loss, **more)
        return train_on_parts(trainer, grid.take_local(x), x * x, 1)

    grids = [(dims, cuts_of((8, 12), dims, seed).cuts) for dims, seed in (((2, 2), 3), ((1, 5), 4))]
    demand_like_alone(run, (8, 12), grids)


def test_a_channel_is_dropped_in_all_cells_or_in_none() -> None:
    y, _ = nn.Dropout2d(0.5).forward(env_of(None), {}, np.ones((40, 50, 2, 3)))
    assert ((y == 0).all((2, 3)) | (y == 2).all((2, 3))).all()
    assert 0.45 < (y == 0).mean() < 0.55
    assert (nn.Dropout1d(1.0).forward(env_of(None), {}, np.ones((2, 3, 4)))[0] == 0).all()
    x = np.ones((2, 3, 4))
    assert nn.Dropout1d(0.5).forward(env_of(None, training=False), {}, x)[0] is x


def theirs(name: str) -> Any:
    """Return a class of `torch_attention`, which needs PyTorch."""
    return getattr(import_module("torch_attention"), name)


THEIRS: dict[str, tuple[Callable[[Any], Any], Callable[[], nn.Layer], tuple[int, ...]]] = {
    "norm": (lambda torch: theirs("ChannelLayerNorm")(3, eps=1e-6), lambda: nn.ChannelLayerNorm(3), (3, 4, 5)),
    "convnext": (lambda torch: theirs("ConvNeXtBlock")(3), lambda: nn.ConvNeXtBlock(3, layer_scale=0.5), (3, 5, 8)),
    "shuffle": (lambda torch: torch.nn.PixelShuffle(3), lambda: nn.PixelShuffle(3), (18, 4, 5)),
    "unshuffle": (lambda torch: torch.nn.PixelUnshuffle(3), lambda: nn.PixelUnshuffle(3), (2, 6, 9)),
    "neighbors": (
        lambda torch: theirs("NeighborhoodAttention")(6, 2, (3, 5), (True, False)),
        lambda: nn.NeighborhoodAttention(6, 2, (3, 5), (True, False)),
        (6, 4, 12),
    ),
    "ring": (lambda torch: theirs("GlobalAttention")(6, 2), lambda: nn.GlobalAttention(6, 2), (6, 3, 4)),
    "slices": (lambda torch: theirs("PhysicsAttention")(6, 2, 5), lambda: nn.PhysicsAttention(6, 2, 5), (6, 9)),
    "slices of windows": (
        lambda torch: theirs("PhysicsAttention")(6, 3, 4, 3, 0.0),
        lambda: nn.PhysicsAttention(6, 3, 4, 3),
        (6, 5, 4),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_layers_are_those_of_pytorch(name: str) -> None:
    """Compare results, gradients, and names and shapes of parameters."""
    torch = pytest.importorskip("torch")
    module_of, make, shape = THEIRS[name]
    module, layer, x = module_of(torch).double(), make(), torch.tensor(noise(2, *shape), requires_grad=True)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor += 0.3 * torch.tensor(noise(*tensor.shape, seed=5))
    y = module(x)
    y.backward(torch.tensor(draw_gradient(y)))
    trainer = layer.as_distributed(optimizer=optim.SGD(lr=0.1), precision="float64")
    trainer.load_parameters(module.state_dict())
    p = trainer.parameters()
    ran = run_alone(layer, p, x.detach().numpy())
    rename = {alias: name for alias, name in type(layer).aliases.items() if name}
    want = {"y": y.detach().numpy(), "dx": x.grad.numpy()}
    want |= {rename.get(n, n): t.grad.numpy().reshape(p[rename.get(n, n)].shape) for n, t in module.named_parameters()}
    assert_close({"y": ran.y, "dx": ran.dx, **ran.g}, {n: want[n] for n in ("y", "dx", *ran.g)}, 1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.PixelShuffle(0), ConfigError, "PixelShuffle: upscale_factor must be a whole number >= 1, got 0"),
        (lambda: nn.Dropout2d(2), ConfigError, "Dropout2d: p must be between 0 and 1, got 2"),
        (lambda: nn.ConvNeXtBlock(4, 2, 4), ConfigError, "ConvNeXtBlock: kernel_size must be odd, got 4"),
        (lambda: nn.ConvNeXtBlock(4, 4), ConfigError, "ConvNeXtBlock: dims=4: a field has 1 to 3 dims of cells"),
        (lambda: nn.Softplus(0.0), ConfigError, "Softplus: beta must be above 0, got 0.0"),
        (lambda: nn.VisionTransformer(1, 1, 4), ConfigError, "dims=4: a field has 1 to 3 dims of cells"),
        (lambda: nn.VisionTransformer(1, 1, attention="axial"), ConfigError, "choose one of global, neighborhood, phy"),
        (lambda: run(nn.VisionTransformer(1, 1), 1, 8, 6), ShapeError, "has 6 cells along dim 3, .* patch size 4"),
        (lambda: nn.NeighborhoodAttention(6, 2, 4), ConfigError, "kernel_size=4: windows must have odd sizes"),
        (lambda: run(nn.NeighborhoodAttention(4, 2, 5), 4, 6, 4), ShapeError, "has 4 cells along dim 3, fewer than"),
        (lambda: run(nn.NeighborhoodAttention(4, 2, 3, (True,)), 4, 6, 4), ShapeError, "periodic has 1 entries"),
        (lambda: nn.NeighborhoodAttention(6, 2, [3, 4]), ConfigError, r"kernel_size=\(3, 4\): windows must have odd"),
        (lambda: nn.NeighborhoodAttention(6, 2, 3.0), ConfigError, "kernel_size=3.0: windows must have odd sizes"),
        (lambda: run(nn.NeighborhoodAttention(4, 2, 1), 4, 1, 1, 1, 1), ConfigError, "has 4 dims of cells: .* 1 to 3"),
        (lambda: nn.VisionTransformer(1, 1, hidden=0), ConfigError, "hidden must be a whole number >= 1, got 0"),
        (lambda: nn.VisionTransformer(1, 1, periodic=True), ConfigError, "periodic=True .* attention='neighborhood'"),
        (lambda: nn.VisionTransformer(1, 1, attention="physics", kernel_size=3), ConfigError, "kernel_size=3 .*'nei"),
        (lambda: nn.VisionTransformer(1, 1, n_slices=8), ConfigError, "n_slices=8 is .*'physics', got .*'global'"),
        (lambda: nn.PhysicsAttention(6, 4), ConfigError, "channels=6 must be a multiple of n_heads=4"),
        (lambda: nn.PhysicsAttention(6, 2, 4, 2), ConfigError, "kernel_size must be odd, so that cells stay, got 2"),
        (lambda: nn.PhysicsAttention(6, 2, 4, 3, 4), ConfigError, "dims=4: a field has 1 to 3 dims of cells"),
        (lambda: run(nn.PhysicsAttention(4, 2), 3, 5), ShapeError, r"wants \(samples, 4, \*cells\), got \(2, 3, 5\)"),
        (lambda: run(nn.PixelShuffle(2), 3, 4, 4), ShapeError, r"with a multiple of 4 channels .* got \(2, 3, 4, 4\)"),
        (lambda: run(nn.PixelUnshuffle(2), 3, 4, 5), ShapeError, "the field has 5 cells along dim 3, .* multiple of 2"),
        (lambda: run(nn.PixelUnshuffle(2), 3), ShapeError, "with 1 to 3 dims of cells"),
        (lambda: run(nn.ChannelLayerNorm(4), 3, 2), ShapeError, r"wants \(samples, 4, \*cells\), got \(2, 3, 2\)"),
        (lambda: run(nn.Dropout2d(), 3, 2), ShapeError, r"\(samples, channels, height, width\), got \(2, 3, 2\)"),
    ],
)  # fmt: skip
def test_what_cannot_be(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        lambda of: nn.NeighborhoodAttention(4, 2, of((3, 5)), of((True, False))),
        lambda of: nn.VisionTransformer(4, 4, 2, 1, 4, 1, 2, "neighborhood", of((3, 5)), periodic=of((True, False))),
    ],
    ids=["neighborhood attention", "vision transformer"],
)
def test_lists_are_read_as_tuples(make: Callable[[Any], nn.Layer]) -> None:
    x, (lists, tuples) = noise(2, 4, 6, 7), (make(list), make(tuple))
    y, want = (layer.forward(env_of(None), shaken(layer), x)[0] for layer in (lists, tuples))
    np.testing.assert_array_equal(y, want)
    assert repr(lists) == repr(tuples)


def run(layer: nn.Layer, *shape: int) -> None:
    layer.forward(env_of(None), parameters(layer), noise(2, *shape))
