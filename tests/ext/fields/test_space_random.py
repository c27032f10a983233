"""Random models over random parts of random fields: the same as one process, whatever the windows and the cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
from grids import grid_at
from hypothesis import assume, given
from hypothesis import strategies as st
from trainings import demand_like, make_trainer

from fsdpx import nn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.halo import MODES

KINDS = ("conv", "transposed", "max", "avg", "nearest", "linear", "group", "skip", "attention")


def layer(draw: Any, kind: str, dims: int, channels: int) -> nn.Layer:
    """One layer that keeps the number of channels."""

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    def of(name: str) -> Any:
        return getattr(nn, f"{name}{dims}d")

    kernel = each(1, 4)
    if kind == "conv":
        padding = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(dims))
        modes = tuple(draw(st.sampled_from(MODES)) for _ in range(dims))
        groups = draw(st.sampled_from([1, channels]))
        return of("Conv")(channels, channels, kernel, each(1, 3), padding, each(1, 2), groups, padding_mode=modes)
    if kind == "transposed":
        stride, dilation = each(1, 3), each(1, 2)
        more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        return of("ConvTranspose")(channels, channels, kernel, stride, each(0, 1), more, 1, True, dilation)
    if kind == "max":
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        return of("MaxPool")(kernel, each(1, 3), padding, each(1, 2), ceil_mode=draw(st.booleans()))
    if kind == "avg":
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        return of("AvgPool")(kernel, each(1, 3), padding, draw(st.booleans()), draw(st.booleans()))
    if kind == "nearest":
        return nn.Upsample(size=each(1, 9), mode=draw(st.sampled_from(["nearest", "nearest-exact"])))
    if kind == "linear":
        mode = ("linear", "bilinear", "trilinear")[dims - 1]
        return nn.Upsample(size=each(1, 9), mode=mode, align_corners=draw(st.booleans()))
    if kind == "group":
        return nn.GroupNorm(draw(st.sampled_from([1, channels])), channels)
    if kind == "attention":
        heads, windows, periods = draw(st.integers(1, 2)), tuple(2 * n + 1 for n in each(0, 1)), each(0, 1)
        near = nn.NeighborhoodAttention(channels, heads, windows, tuple(map(bool, periods)))
        others = nn.GlobalAttention(channels, heads), nn.PhysicsAttention(channels, heads, 3)
        return draw(st.sampled_from([near, *others]))
    strided = nn.Sequential(of("Conv")(channels, channels, 3, 2, 1), nn.Upsample(scale_factor=2, mode="nearest"))
    return nn.Residual(strided)


def flat(parameters: dict[str, np.ndarray]) -> np.ndarray:
    """All in one array: some gradients are sums that cancel, and nothing but rounding is left of them."""
    return np.concatenate([np.zeros(1), *(a.reshape(-1) for a in parameters.values())])


@given(st.data())
def test_any_chain_over_any_parts(data: st.DataObject) -> None:
    draw, channels = data.draw, 2
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 9)) for _ in range(dims)]
    width = [draw(st.integers(1, 3 if dims < 3 else 2)) for _ in range(dims)]
    assume(1 < np.prod(width) <= 6)
    cuts = [
        [0, *sorted(draw(st.lists(st.integers(0, n), min_size=w - 1, max_size=w - 1))), n]
        for n, w in zip(shape, width, strict=True)
    ]
    layers = [layer(draw, draw(st.sampled_from(KINDS)), dims, channels) for _ in range(draw(st.integers(1, 3)))]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x, seed = rng.standard_normal((2, channels, *shape)), draw(st.integers(0, 99))

    def target(cells: tuple[int, ...]) -> np.ndarray:
        return np.cos(np.arange(2.0 * channels * np.prod(cells))).reshape(2, channels, *cells)

    def alone() -> Any:
        trainer = make_trainer(nn.Sequential(*layers), None, seed=seed)
        y = trainer.predict(x)
        if not np.isfinite(y).all():  # a window lies in the padding of a MaxPool alone
            raise ShapeError("no maximum")
        return y, trainer.step(x, target(y.shape[2:])), flat(trainer.parameters())

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut, layout="c" + "zyx"[3 - dims :])
        trainer, mine = make_trainer(nn.Sequential(*layers), grid, seed=seed), grid.take_local(x)
        outputs = trainer.output_grid
        y = outputs.all_gather(trainer.predict(mine))
        return y, trainer.step(mine, outputs.take_local(target(outputs.shape))), flat(trainer.parameters())

    try:
        want = alone()
    except (ShapeError, ConfigError):  # no output, or a field that is too small for its padding
        assume(False)
    demand_like(want, run, [(width, cuts)], 1e-10)
