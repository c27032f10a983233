"""Layers of fields give what PyTorch's layers of the same names and arguments give, and so do their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from amount import THOROUGH
from grids import env_of, noise
from layers_on_parts import draw_gradient, run_alone

from fsdpx import nn
from fsdpx.ext.fields.halo import MODES, make_halo_spec_per_dim
from fsdpx.ext.fields.halo_slabs import RepartitionField
from fsdpx.nn.shard_specs import FieldPartition
from fsdpx.testing import assert_close

ENV = env_of(None)
SIZES = 7, 8, 9


def compare(torch: Any, ours: Any, theirs: Any, x: np.ndarray) -> None:
    """Outputs, the gradient of the input and those of all parameters."""
    theirs = theirs.double()
    there = torch.tensor(x, requires_grad=True)
    want, p = theirs(there), {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    assert {name: spec.shape for name, spec in ours.specs().items()} == {n: a.shape for n, a in p.items()}
    ran = run_alone(ours, p, x)
    want.backward(torch.tensor(draw_gradient(ran.y)))
    wanted = {"y": want, "dx": there.grad} | {n: value.grad for n, value in theirs.named_parameters()}
    got = {"y": ran.y, "dx": ran.dx, **ran.g}
    assert_close(got, {name: value.detach().numpy() for name, value in wanted.items()}, 1e-11)


def pair_up(cases: Iterable[tuple[Any, ...]], together: int = 2) -> list[tuple[Any, ...]]:
    """Cases in random order without those whose arguments, so many at a time, have all met before; all for `make
    thorough`."""
    shuffled, met = list(cases), set[Any]()
    assert len(shuffled) > 20
    if THOROUGH:
        return shuffled
    np.random.default_rng(0).shuffle(shuffled)
    chosen = []
    for case in shuffled:
        groups = {*combinations(enumerate(map(repr, case)), together)}
        if groups - met:
            chosen.append(case)
            met |= groups
    return chosen


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_are_those_of_pytorch(dims: int) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = getattr(nn, f"Conv{dims}d"), getattr(torch.nn, f"Conv{dims}d")
    kernels, strides = ((1, 2, 3, 4), (1, 2, 3)) if dims < 3 else ((2, 3), (1, 2))
    for k, s, p, d, g, mode in pair_up(
        case
        for case in product(kernels, strides, (0, 1, 2, "same"), (1, 2), (1, 2), MODES)
        if case[2] != "same" or case[1] == 1
    ):
        arguments = 4, 6, k, s, p, d, g, mode != "reflect", mode
        compare(torch, ours(*arguments), theirs(*arguments), noise(2, 4, *SIZES[:dims]))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_are_those_of_pytorch(dims: int) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = getattr(nn, f"ConvTranspose{dims}d"), getattr(torch.nn, f"ConvTranspose{dims}d")
    x, groups = noise(2, 4, *(4, 5, 6)[:dims]), (1, 2) if dims < 3 else (1,)
    cases = product((1, 2, 3), (1, 2, 3), (0, 1), (0, 1), groups, (1, 2))
    for k, s, p, m, g, d in pair_up((case for case in cases if case[3] < max(case[1], case[5])), together=3):
        compare(torch, ours(4, 6, k, s, p, m, g, True, d), theirs(4, 6, k, s, p, m, g, True, d), x)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["MaxPool", "AvgPool"])
def test_pools_are_those_of_pytorch(kind: str, dims: int) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = getattr(nn, f"{kind}{dims}d"), getattr(torch.nn, f"{kind}{dims}d")
    more: list[dict[str, Any]] = [{"dilation": 2}] if kind == "MaxPool" else [{"count_include_pad": False}]
    more += [{"divisor_override": 3}] if kind == "AvgPool" and dims > 1 else []
    for k, s, p, ceil, extra in pair_up(
        case
        for case in product((1, 2, 3), (None, 1, 2, 3), (0, 1), (False, True), [{}, *more])
        if 2 * case[2] <= case[0]
    ):
        arguments: dict[str, Any] = {"ceil_mode": ceil, **extra}
        compare(torch, ours(k, s, p, **arguments), theirs(k, s, p, **arguments), noise(2, 3, *SIZES[:dims]))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear"])
def test_upsampling_is_that_of_pytorch(mode: str) -> None:
    torch = pytest.importorskip("torch")
    for dims in {"linear": [1], "bilinear": [2], "bicubic": [2], "trilinear": [3]}.get(mode, [1, 2, 3]):
        sizes = [{"scale_factor": f} for f in (2, 1.7, 0.6)] + [{"size": s[:dims]} for s in ((8, 9, 11), (3, 4, 2))]
        for size, corners in product(sizes, [None] if "nearest" in mode else [False, True]):
            given: dict[str, Any] = {**size, "mode": mode, "align_corners": corners}
            compare(torch, nn.Upsample(**given), torch.nn.Upsample(**given), noise(2, 3, *(5, 6, 7)[:dims]))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_cells_are_those_of_pytorch_at_all_sizes(mode: str) -> None:
    """In float64, in which PyTorch rounds nothing; the same in float32, in which it does. To all sizes from few cells,
    and from more to one in seven, others for each number of cells."""
    torch = pytest.importorskip("torch")
    for n in range(1, 129):
        x = np.arange(n, dtype=np.float64)[None, None]
        cells = torch.tensor(x)
        for total in range(1, 257) if n < 9 else range(1 + n % 7, 257, 7):
            layer = nn.Upsample(size=total, mode=mode)
            y, _ = layer.forward(ENV, {}, x)
            want = torch.nn.functional.interpolate(cells, size=total, mode=mode).numpy()
            assert (y == want).all(), (n, total)
    for n, total, o, cell in ((30, 22, 11, 15), (2, 82, 41, 1), (61, 122, 61, 30)):
        x = np.broadcast_to(np.arange(n, dtype=np.float32), (1, 1, 2, n))
        y, _ = nn.Upsample(size=(3, total), mode="nearest").forward(ENV, {}, x)
        assert (y[..., o] == cell).all(), (n, total)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dims", [1, 3])
def test_nearest_cells_of_any_factor_are_those_of_pytorch(mode: str, dims: int) -> None:
    torch = pytest.importorskip("torch")
    factors = [k / 20 for k in range(5, 80)] + [1 / 3, 2 / 3, 22 / 30, math.pi, 100 / 7]
    for n, factor in product((1, 3, 10, 30, 100), factors):
        if int(n * factor):
            x = np.broadcast_to(np.arange(n, dtype=np.float64), (1, 1, *(1,) * (dims - 1), n))
            given = {"scale_factor": (*(1,) * (dims - 1), factor), "mode": mode}
            want = torch.nn.functional.interpolate(torch.tensor(np.array(x)), **given).numpy()
            y, _ = nn.Upsample(**given).forward(ENV, {}, x)
            np.testing.assert_array_equal(y, want, f"{n} x {factor}")


@pytest.mark.parametrize(
    ("mode", "dims"),
    [("nearest", 1), ("nearest", 2), ("nearest-exact", 2), ("linear", 1), ("bilinear", 2), ("bicubic", 2)],
)
def test_sizes_that_hardly_change_are_those_of_pytorch(mode: str, dims: int) -> None:
    """Where as many cells come out as go in, or twice as many, though the factor is another."""
    torch = pytest.importorskip("torch")
    for n, factor in product((1, 2, 3, 4, 7), (1.0, 1.05, 1.2, 1.3, 2.05, 2.1, 0.9)):
        if (factors := (factor, *(1.0,) * (dims - 1))) and int(n * factor):
            x, given = noise(1, 2, n, *(3,) * (dims - 1)), {"scale_factor": factors, "mode": mode}
            want = torch.nn.Upsample(**given)(torch.tensor(x)).numpy()
            y, _ = nn.Upsample(**given).forward(ENV, {}, x)
            assert_close({f"{n} x {factor}": y}, {f"{n} x {factor}": want}, 1e-12)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_adaptive_pools_are_those_of_pytorch(dims: int) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = getattr(nn, f"AdaptiveAvgPool{dims}d"), getattr(torch.nn, f"AdaptiveAvgPool{dims}d")
    for many in (1, 2, 5, (3, 4, 11)[:dims]):
        compare(torch, ours(many), theirs(many), noise(2, 3, *SIZES[:dims]))


def test_norms_over_groups_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    for groups in (1, 2, 6):
        compare(torch, nn.GroupNorm(groups, 6), torch.nn.GroupNorm(groups, 6), noise(3, 6, 4, 5))
    compare(torch, nn.InstanceNorm(6), torch.nn.InstanceNorm2d(6), noise(3, 6, 4, 5))
    compare(torch, nn.InstanceNorm(6, affine=True), torch.nn.InstanceNorm1d(6, affine=True), noise(3, 6, 4))


def by_fft(torch: Any, x: Any, weight: Any, modes: tuple[int, ...]) -> Any:
    """neuraloperator's SpectralConv: mode w is the frequency w - K // 2, in the last dim w; means over the cells."""
    dims, sizes = tuple(range(2, x.ndim)), x.shape[2:]
    whole = torch.fft.rfftn(x, norm="forward", dim=dims)
    at = [torch.tensor([(w - k // 2) % n for w in range(k)]) for k, n in zip(modes[:-1], sizes[:-1], strict=True)]
    at.append(torch.arange(modes[-1]))
    places = slice(None), slice(None), *torch.meshgrid(*at, indexing="ij")
    letters = "xyz"[: len(sizes)]
    kept = torch.einsum(f"bi{letters},io{letters}->bo{letters}", whole[places], torch.view_as_complex(weight))
    full = torch.zeros(*kept.shape[:2], *whole.shape[2:], dtype=whole.dtype)
    full[places] = kept
    return torch.fft.irfftn(full, s=sizes, norm="forward", dim=dims)


@pytest.mark.parametrize("cells", [(5, 8), (6, 5), (1, 2), (8, 7)])
def test_fields_of_fewer_cells_have_fewer_modes(cells: tuple[int, int]) -> None:
    """Weights of frequencies that they do not have count nothing."""
    wide, (y, x) = nn.SpectralConv(2, 3, (9, 12), bias=False), cells
    narrow = nn.SpectralConv(2, 3, (y, 2 * (x // 2) or 1), bias=False)
    weight, field = noise(*wide.specs()["weight"].shape, seed=1), noise(2, 2, *cells)
    first = 9 // 2 - y // 2
    kept = weight[:, :, first : first + y, : narrow.modes[1]]
    found, want = (run_alone(layer, {"weight": w}, field) for layer, w in ((wide, weight), (narrow, kept)))
    inside = np.zeros_like(weight)
    inside[:, :, first : first + y, : narrow.modes[1]] = want.g["weight"]
    assert_close({"y": found.y, "dx": found.dx, **found.g}, {"y": want.y, "dx": want.dx, "weight": inside}, 1e-12)


@pytest.mark.parametrize(
    ("sizes", "n_modes"),
    [((16,), (8,)), ((9,), (6,)), ((12, 10), (6, 8)), ((12, 10), (7, 10)), ((8, 6, 10), (4, 3, 6))],
)
def test_modes_are_those_of_an_fft(sizes: tuple[int, ...], n_modes: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    layer = nn.SpectralConv(3, 4, n_modes, bias=False)
    x, weight = noise(2, 3, *sizes), noise(*layer.specs()["weight"].shape, seed=1)
    there, theirs = (torch.tensor(a, requires_grad=True) for a in (x, weight))
    want = by_fft(torch, there, theirs, layer.modes)
    ran = run_alone(layer, {"weight": weight}, x)
    want.backward(torch.tensor(draw_gradient(ran.y)))
    wanted = {"y": want.detach().numpy(), "dx": there.grad.numpy(), "weight": theirs.grad.numpy()}
    assert_close({"y": ran.y, "dx": ran.dx, **ran.g}, wanted, 1e-12)


def test_nothing_cancels_in_a_variance() -> None:
    """300 +- 0.01 in float32: the mean of squares less the square of the mean would have no digit."""
    x = (300 + 0.01 * noise(1, 2, 20_000)).astype(np.float32)
    p = {"weight": np.ones(2, np.float32), "bias": np.zeros(2, np.float32)}
    y, _ = nn.GroupNorm(1, 2).forward(ENV, p, x)
    want = (x - x.mean(dtype=np.float64)) / np.sqrt(x.var(dtype=np.float64) + 1e-5)
    assert_close({"y": y}, {"y": want.astype(np.float32)}, 1e-3)


def test_a_shift_of_a_whole_field_leaves_it_where_it_is() -> None:
    whole = FieldPartition.on_one_rank((4, 3))
    x = noise(1, 2, 4, 3)
    assert RepartitionField(whole, whole).forward(ENV, {}, x)[0] is x


def test_windows_need_what_their_outputs_ask_for() -> None:
    parts, outputs = FieldPartition(((0, 5, 5, 9),)), FieldPartition(((0, 3, 3, 5),))
    (reach,) = make_halo_spec_per_dim(parts, [(2, -1, 3)], outputs, ["circular"])
    assert reach.needs == ((-1, 6), (5, 5), (5, 10))
    found = [(piece.receiver, piece.sender, piece.length) for piece in reach.list_halo_transfers()]
    assert found == [(0, 0, 5), (0, 2, 2), (2, 0, 1), (2, 2, 4)]
