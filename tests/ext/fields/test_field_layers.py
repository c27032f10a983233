"""Layers and losses of fields: what they refuse, 16 bits, where they begin and how they are shown."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from amount import few
from layer_cases import check_16_bits, check_refusal
from setting import env, gradients, normal, parameters
from trainings import demand_error

from fsdpx import nn
from fsdpx.core.array.kernels.memory_order import channels_last as to_channels_last
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.errors import ConfigError, ShapeError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(1, 1, 0), "Conv2d: kernel_size must be whole numbers >= 1, got 0"),
        (lambda: nn.Conv2d(1, 1, (1, 2, 3)), "Conv2d: kernel_size must be one whole number or two"),
        (lambda: nn.Conv2d(1, 1, 3, padding=-1), "Conv2d: padding must be whole numbers >= 0, got -1"),
        (lambda: nn.MaxPool2d(3, padding=2), "MaxPool2d: padding 2 must be at most half of kernel_size 3"),
        (lambda: nn.Conv1d(2, 3, 3, padding="some"), "Conv1d: padding='some': give cells, or 'same' or 'valid'"),
        (lambda: nn.Conv1d(2, 3, 3, 2, "same"), "Conv1d: padding='same' needs stride 1, got (2,)"),
        (lambda: nn.Conv2d(2, 3, 3, groups=2), "out_channels=3 must be multiples of groups=2"),
        (lambda: nn.Conv3d(2, 2, 3, padding_mode="wrap"), "padding_mode='wrap': choose one of zeros, circular"),
        (lambda: nn.Conv2d(2, 2, 3, padding=((1, 2),)), "Conv2d: padding must be 2 pairs, got"),
        (lambda: nn.ConvTranspose1d(2, 2, 3, 1, 0, 1), "output_padding 1 must be smaller than stride 1 or dilation 1"),
        (lambda: nn.MaxPool1d(2, padding=2), "MaxPool1d: padding 2 must be at most half of kernel_size 2"),
        (lambda: nn.AvgPool2d(2, divisor_override=0), "divisor_override=0 must be a whole number"),
        (lambda: nn.Upsample(), "Upsample: give size or scale_factor, one of them"),
        (lambda: nn.Upsample((4, 0)), "Upsample: size=(4, 0): give a number above 0, or one for each dim"),
        (lambda: nn.Upsample(2.5), "Upsample: size=2.5: give a number above 0, or one for each dim"),
        (lambda: nn.Upsample(scale_factor=-2), "Upsample: scale_factor=-2: give a number above 0, or one for each dim"),
        (lambda: nn.Conv2d(2, 2, 3, padding_mode=None), "Conv2d: padding_mode=None: choose one of zeros, circular"),
        (lambda: nn.SpectralConv(1, 1, None), "SpectralConv: n_modes must be whole numbers >= 1, got (None,)"),
        (lambda: nn.FNO(1, 1, None), "SpectralConv: n_modes must be whole numbers >= 1, got (None,)"),
        (lambda: nn.Upsample(2, mode="area"), "Upsample: mode='area': choose one of nearest"),
        (lambda: nn.Upsample(2, align_corners=True), "align_corners is of modes other than 'nearest'"),
        (lambda: nn.GroupNorm(4, 6), "GroupNorm: num_channels=6 must be a multiple of num_groups=4"),
        (lambda: nn.SpectralConv(1, 1, (4, 4, 4, 4)), "give one number for each of 1 to 3 dims"),
        (lambda: nn.Rollout(nn.Add(), 2), "Rollout: the model must have an input for each output, got "),
        (lambda: nn.UNet(1, 1, dims=4), "UNet: dims=4: a field has 1 to 3 dims of cells"),
        (lambda: nn.UNet(1, 1, norm="layer"), "UNet: norm='layer': choose 'batch', 'group' or None"),
        (lambda: nn.UNet(1, 1, activation="swish"), "UNet: activation='swish': choose one of relu, tanh, gelu, silu"),
        (lambda: nn.FieldGradient(order=3), "Gradient: order=3: choose 2 or 4"),
        (lambda: nn.FieldLaplacian(0.0), "Laplacian: spacing: 0.0 is not a number above 0, for all dims or for each"),
        (lambda: nn.FieldLaplacian("a"), "Laplacian: spacing: 'a' is not a number above 0, for all dims or for each"),
        (lambda: nn.FieldGradient([np.ones(3), 0.1]), "must be positions that increase or decrease, one for each"),
        (lambda: nn.FieldGradient([np.ones(9), 0.1]), "spacing: the array of 9 along a dim must be positions"),
        (lambda: nn.FieldGradient(([0.0, 1.0, np.inf],)), "spacing: [0.0, 1.0, inf] must be positions that"),
        (lambda: nn.FieldGradient(([0.0, "1"],)), "spacing: [0.0, '1'] must be positions that increase"),
        (lambda: nn.FieldGradient(np.ones((2, 2))), "Gradient: spacing: array([1., 1.]) must be positions"),
        (lambda: nn.FieldGradient(np.array(-1.0)), "Gradient: spacing: an array of () is not a number above 0"),
        (
            lambda: nn.FieldGradient(periodic=[np.ones(3), True]),
            "Gradient: periodic: an array of (3,) is not True or False",
        ),
        (lambda: nn.FieldCurl(along=[np.ones(2), 1]), "name each dim of cells once, as (1, 0)"),
        (lambda: nn.FieldLaplacian(np.array([1.0, 0.0])), "np.float64(0.0) is not a number above 0"),
        (lambda: nn.FieldCurl(along=1), "Curl: along=1: name each dim of cells once"),
        (lambda: nn.FieldCurl(along=(0, 0)), "Curl: along=(0, 0): name each dim of cells once"),
        (lambda: nn.FieldDerivative(3), "FieldDerivative: coordinate=3 is 0 to 2, and derivative=1 1 or 2"),
        (lambda: nn.PhysicsLoss(nn.MSELoss(), nn.Conv1d(1, 1, 1)), "must have one input, one output and no parameters"),
        (lambda: nn.PhysicsLoss(nn.MSELoss(), nn.MatchMean()), "MatchMean() must have one input"),
        (lambda: nn.PhysicsLoss(nn.ReLU(), nn.MSELoss()), "PhysicsLoss: a loss and a layer are needed, got ReLU()"),
        (lambda: nn.CellsToFaces(3), "CellsToFaces: dim=3: give the number of a cell dim, 0 to 2"),
        (lambda: nn.CellsToFaces(0, 2), "derivative=2: choose 0, the mean, or 1, the difference"),
        (lambda: nn.FacesToCells(0, faces="right"), "faces='right': choose one of all, low, high"),
        (lambda: nn.FacesToCells(0, padding_mode="circular"), "as many faces as cells: choose faces='low' or 'high'"),
        (lambda: nn.FacesToCells(0, spacing=0.0), "spacing=0.0 is not a number above 0, or the bounds of the cells"),
        (lambda: nn.CellsToFaces(0, spacing=np.inf), "spacing=inf is not a number above 0, or the bounds of the cells"),
        (lambda: nn.CellsToFaces(0, spacing=np.array("a")), "is not a number above 0, or the bounds of the cells"),
        (lambda: nn.FieldGradient(np.inf), "spacing: inf is not a number above 0, for all dims or for each"),
        (lambda: nn.FacesToCells(0, spacing=[0.0, 1.0, 0.5]), "must be positions that increase or decrease"),
        (lambda: nn.FaceDivergence(2, along=(1, 1)), "along=(1, 1): name each dim of cells once"),
        (lambda: nn.FaceDivergence(2, (1.0,)), "spacing has 1 entries, but dims=2"),
        (lambda: nn.FaceDivergence(4), "dims=4: a field has 1 to 3 dims of cells"),
        (lambda: nn.RMSE(weights=[-1.0]), "RMSE: weights must be numbers >= 0, or bools"),
        (lambda: nn.MSELoss(weights=[np.nan]), "MSELoss: weights must be numbers >= 0, or bools"),
        (lambda: nn.BandRMSE(4, 4), "BandRMSE: a band of wavenumbers is from low >= 0 to a larger one, got 4, 4"),
        (lambda: nn.BandRMSE(-1), "got -1, None"),
        (lambda: nn.SpectrumRMSE(3, 2), "SpectrumRMSE: wavenumbers are from low >= 0 to a larger one, got 3, 2"),
        (lambda: nn.SpectrumRMSE(log=True, eps=0.0), "SpectrumRMSE: eps must be above 0, got 0.0"),
        (lambda: nn.RelativeH1(-1.0), "RelativeH1: gradient_weight must be a finite number >= 0, got -1.0"),
        (lambda: nn.CRPS(1), "CRPS: the fair score needs 2 members or more, got 1: give fair=False"),
        (lambda: nn.CRPS(2, fair=2), "CRPS: fair must be between 0 and 1, got 2"),
        (lambda: nn.HuberLoss(np.inf), "HuberLoss: delta must be a finite number, got inf"),
        (lambda: nn.SmoothL1Loss(np.inf), "SmoothL1Loss: beta must be a finite number, got inf"),
        (lambda: nn.PhysicsLoss(nn.L1Loss(), nn.Tanh(), np.nan), "PhysicsLoss: weight must be a finite number"),
        (lambda: nn.VRMSE(np.nan), "VRMSE: eps must be a finite number, got nan"),
        (lambda: nn.BandRMSE(0, np.nan), "BandRMSE: high must be a finite number, got nan"),
        (lambda: nn.HuberLoss(0), "HuberLoss: delta must be above 0, got 0"),
        (lambda: nn.SmoothL1Loss(-1), "SmoothL1Loss: beta must be at least 0, got -1"),
        (lambda: nn.Pad(()), "Pad: padding=(): give (before, after) for each of 1 to 3 dims"),
        (lambda: nn.Pad((1, 1)), "Pad: padding=(1, 1): give (before, after) for each of 1 to 3 dims"),
        (lambda: nn.Pad(((1, 0.5),)), "Pad: padding=((1, 0.5),): give (before, after) for each of 1 to 3 dims"),
        (lambda: nn.Pad(((1, 1),), "wrap"), "Pad: mode='wrap': choose one of zeros, circular"),
        (lambda: nn.Pad(((1, 1),), True), "Pad: mode=True: choose one of zeros"),
        (lambda: nn.UNet(1, 1, padding=(("zeros",), "zeros")), "padding_mode=(('zeros',), 'zeros'): "),
        (lambda: nn.Conv2d(1, 1, 3, 1, 1, padding_mode="wall"), "Conv2d: padding_mode='wall': choose one of zeros, "),
        (lambda: nn.Conv2d(1, 1, 3, 1, 1, padding_mode=float("nan")), "Conv2d: padding_mode=nan: "),
        (
            lambda: nn.Conv1d(1, 1, 3, 1, 1, padding_mode=("reflect", "zeros")),
            "or give a number, for all dims, or 1 of them, each of which may be a pair",
        ),
        (
            lambda: nn.Conv2d(1, 1, 3, 1, 1, padding_mode=(("circular", 1.0), "zeros")),
            "Conv2d: padding_mode: ('circular', 1.0): set 'circular' at both ends of a dim",
        ),
    ],
)
def test_arguments_that_do_not_fit(make, message):
    demand_error(ConfigError, make, message)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Conv1d(2, 3, 5), (1, 2, 4), "the window does not fit along dim 2 into a field of shape (4,)"),
        (nn.Conv1d(2, 3, 3), (1, 3, 9), "wants an input of shape (samples, 2, width), got (1, 3, 9)"),
        (nn.Conv3d(2, 3, 3), (1, 2, 9, 9), "wants an input of shape (samples, 2, depth, height, width)"),
        (nn.Conv1d(1, 1, 9, padding=4, padding_mode="reflect"), (1, 1, 4), "needs fields of at least 5 cells, got 4"),
        (nn.Conv1d(1, 1, 9, padding=4, padding_mode="circular"), (1, 1, 3), "needs fields of at least 4 cells, got 3"),
        (nn.PointwiseConv(2, 3), (1, 3, 6), "wants (samples, 2, *cells), got (1, 3, 6)"),
        (nn.Rollout(nn.Conv1d(2, 2, 3), 2), (1, 2, 6), "a step returns (1, 2, 4) for (1, 2, 6): it must keep"),
        (nn.GroupNorm(1, 4), (2, 3, 5), "wants an input of shape (samples, 4, ...)"),
        (nn.Upsample((2, 2)), (1, 1, 4), "Upsample(size=(2, 2)) is of 2 dims, and the field has 1"),
        (nn.Upsample(scale_factor=0.1), (1, 1, 4), "Upsample(scale_factor=0.1) leaves nothing of a field of shape"),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 1, 4), "wants (samples, channels, *cells)"),
        (nn.FieldDivergence(), (1, 3, 4, 5), "wants (samples, a multiple of 2, *cells), got (1, 3, 4, 5)"),
        (nn.FieldCurl(), (1, 3, 9), "wants (samples, vectors x dims, *cells) of 2 or 3 dims, got"),
        (nn.FieldDerivative(1), (1, 3, 9), "wants (samples, channels, *cells) of 2 dims or more, got (1, 3, 9)"),
        (nn.FieldGradient(), (1, 1, 3), "between walls dim 2 must have at least 4 cells, got 3"),
        (nn.FieldLaplacian(order=4), (1, 1, 5), "between walls dim 2 must have at least 6 cells, got 5"),
        (nn.FieldGradient(periodic=True, order=4), (1, 1, 1), "needs fields of at least 2 cells, got 1"),
        (nn.FieldGradient((1.0, 2.0)), (1, 1, 9), "spacing is of 2 dims, and the field has 1"),
        (nn.FieldGradient(([0, 1, 3],)), (1, 1, 4), "dim 2 has 4 cells: spacing needs 4 positions of values, or the 5"),
        (nn.FieldGradient((range(4),), True), (1, 1, 4), "periodic dim 2 has 4 cells: spacing needs the 5 bounds"),
        (nn.CellsToFaces(1), (1, 1, 5), "wants (samples, channels, *cells) of 2 to 3 dims, got (1, 1, 5)"),
        (nn.FacesToCells(0), (1, 1, 1), "dim 2 has 1 faces, and no cell between them"),
        (nn.CellsToFaces(0, spacing=[0, 1, 3]), (1, 1, 5), "dim 2 has 5 cells: spacing needs their 6 bounds, got 3"),
        (nn.FaceDivergence(2, faces="low"), (1, 3, 4, 4), "FaceDivergence wants (samples, a multiple of 2, *cells)"),
        (nn.Pad(((-3, -2),)), (1, 1, 5), "nothing is left of a field of shape (5,)"),
        (nn.Pad(((0, 5),), "reflect"), (1, 1, 5), "needs fields of at least 6 cells, got 5"),
        (
            nn.Pad(((0, 5),), ((0.0, "reflect"),)),
            (1, 1, 5),
            "padding 5 of mode 'reflect' along dim 2 needs fields of at least 6 cells, got 5",
        ),
        (nn.Pad(((1, 1),) * 2), (1, 1, 5), "wants an input of shape (samples, channels, height, width), got (1, 1, 5)"),
    ],
)
def test_inputs_that_do_not_fit(layer, shape, message):
    demand_error(ShapeError, lambda: layer.forward(env(), parameters(layer), normal(*shape)), message)


@pytest.mark.parametrize("half", ["float16", "bf16"])
@pytest.mark.parametrize("wide_gradients", [True, False])
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 3, 3, padding=1), nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2))], ids=repr
)
def test_16_bits(layer, half, wide_gradients):
    check_16_bits(layer, normal(3, 2, 5, 5), half, wide_gradients)


NORMS = [
    (lambda: nn.GroupNorm(3, 3), "GroupNorm", (3, 3), [(1, 3), (2, 3), (1, 3, 2)]),
    (lambda: nn.GroupNorm(1, 3), "GroupNorm", (1, 3), [(1, 3)]),
    (lambda: nn.InstanceNorm(3), "InstanceNorm1d", (3,), [(1, 3, 1)]),
    (lambda: nn.InstanceNorm(3), "InstanceNorm2d", (3,), [(2, 3, 1, 1), (2, 3, 1, 2)]),
]


@pytest.mark.parametrize(("make", "name", "given", "shapes"), NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_norms_of_one_value_are_refused_where_pytorch_refuses_them(make, name, given, shapes, training):
    torch = pytest.importorskip("torch")
    for shape in shapes:
        check_refusal(make(), getattr(torch.nn, name)(*given), np.ones(shape), training)


def test_max_pool_shows_nan_and_takes_the_first_of_equals():
    x = np.zeros((1, 1, 2, 4))
    x[0, 0, 0, 3] = np.nan
    y, saved = nn.MaxPool2d(2).forward(env(), {}, x)
    np.testing.assert_array_equal(y, [[[[0.0, np.nan]]]])
    dx, _ = nn.MaxPool2d(2).backward_input(env(), {}, saved, np.ones_like(y))
    np.testing.assert_array_equal(dx, [[[[1, 0, 0, 1], [0, 0, 0, 0]]]])
    y, _ = nn.MaxPool1d(2).forward(env(), {}, np.array([[[1.0, 2.0, np.nan, 3.0, 4.0, 5.0]]]))
    np.testing.assert_array_equal(y, [[[2.0, np.nan, 5.0]]])


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Conv2d(4, 2, 3), (8, 3, 6, 6), r"'a' .* shape \(samples, 4, height, width\), got \(8, 3, 6, 6\)"),
        (nn.MaxPool2d(9), (8, 3, 6, 6), r"MaxPool2d\(9\): the window does not fit along dim 2, dim 3"),
        (nn.AvgPool2d(2), (8, 64), r"wants an input of shape \(samples, channels, height, width\), got \(8, 64\)"),
    ],
)
def test_a_layer_that_does_not_fit_is_named(layer, shape, message):
    with pytest.raises(ShapeError, match=message):
        nn.sharding.output_shapes(nn.sharding.linearize(nn.Sequential({"a": layer})), [ShapeArray(shape, np.float32)])


def test_a_convolution_shows_the_arguments_that_were_given():
    assert repr(nn.Conv2d(3, 8, 3, padding=1)) == "Conv2d(3, 8, 3, padding=1)"


channels_last = partial(to_channels_last, np)
ANY_ORDER = [
    nn.GroupNorm(4, 16), nn.InstanceNorm(16), nn.GroupNorm(4, 16, weights=np.arange(256.0).reshape(16, 16)),
    nn.ChannelLayerNorm(16), nn.BatchNorm(16), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16),
    nn.Conv2d(16, 8, 1), nn.Conv2d(16, 9, 5, stride=2), nn.Conv2d(16, 8, 3, padding=1, padding_mode="circular"),
    nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AvgPool2d(3, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2),
    nn.ConvTranspose2d(16, 8, 3), nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(),
]  # fmt: skip


@pytest.mark.parametrize("dtype", few(["float32", "float64", "float16"], 2))
@pytest.mark.parametrize("layer", ANY_ORDER, ids=repr)
def test_no_bit_depends_on_the_memory_order_where_it_is_ignored(layer, dtype):
    """A stage of a pipeline may get with channels first what the layer before gives with channels last."""
    x, dys, context = normal(4, 16, 16, 16).astype(dtype), [], replace(env(), ignores_memory_order=True)

    def run(turn_x, turn_dy):
        p = parameters(layer, dtype)
        y, saved = layer.forward(context, p, turn_x(x))
        dys.append(normal(*y.shape).astype(dtype))
        g = gradients(layer, p)
        return [y, layer.backward(context, p, g, saved, turn_dy(dys[0])), *g.values()]

    want = run(np.asarray, np.asarray)
    for orders in ((np.asarray, channels_last), (channels_last, np.asarray), (channels_last, channels_last)):
        for got, wanted in zip(run(*orders), want, strict=True):
            np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda a: nn.GroupNorm(2, 4, weights=a), np.float64), (lambda a: nn.GlobalMean(weights=a), np.float64),
        (nn.Mask, np.bool_), (nn.StaticChannels, np.float64),
    ],
)  # fmt: skip
def test_a_layer_keeps_a_copy_of_the_array_it_is_given(make, dtype):
    """Sums and casts of these arrays are cached."""
    given = np.arange(16).reshape(4, 4).astype(dtype)
    layer, context, x = make(given), env(), normal(2, 4, 4, 4)
    want = layer.forward(context, parameters(layer), x)[0]
    given[...] = given[::-1].copy() + 1
    for one in (context, env()):
        np.testing.assert_array_equal(layer.forward(one, parameters(layer), x)[0], want)
