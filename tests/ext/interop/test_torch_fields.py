"""PyTorch modules over grids of ranks: the same as PyTorch on the whole field, or refused by name."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from grids import env_of, grid_at, random_cuts, whole  # noqa: E402
from torch_training import train_in_torch  # noqa: E402

import fsdpx  # noqa: E402
from fsdpx import nn, optim, spawn  # noqa: E402
from fsdpx.errors import ConfigError  # noqa: E402
from fsdpx.ext.interop.channel_layers import ChannelLinear, ChannelParameter, FixedBatchNorm  # noqa: E402
from fsdpx.ext.interop.torch import from_torch  # noqa: E402

tnn, functional = torch.nn, torch.nn.functional
STEPS = 5


class LayerNorm2d(tnn.LayerNorm):
    """The layer norm of torchvision's ConvNeXt."""

    def forward(self, x):
        y = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class Block(tnn.Module):
    """Residual, with a scale that is a parameter of its own, and a block of ConvNeXt with the channels last."""

    def __init__(self, channels):
        super().__init__()
        self.conv = tnn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular", groups=channels)
        self.norm, self.norm2d = tnn.LayerNorm(channels), LayerNorm2d(channels)
        self.wide = tnn.Linear(channels, 2 * channels)
        self.narrow, self.act = tnn.Linear(2 * channels, channels, bias=False), tnn.ReLU(inplace=True)
        self.gamma = tnn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(functional.gelu(self.wide(y)))
        return self.act(self.norm2d(x + y.permute(0, 3, 1, 2)))


class Residual(tnn.Module):
    """A CNN that calls one of its layers twice, and has one in evaluation mode and a frozen one."""

    def __init__(self):
        super().__init__()
        self.lift, self.blocks = tnn.Conv2d(2, 4, (1, 2)), tnn.Sequential(Block(4), tnn.Identity(), Block(4))
        self.norm, self.still = tnn.BatchNorm2d(4), tnn.BatchNorm2d(4)
        self.still.running_var += 1.0
        self.still.eval()
        self.twice, self.head = tnn.Conv2d(4, 4, 3, padding="same", padding_mode="replicate"), tnn.Conv2d(4, 2, 1)
        self.lift.bias.requires_grad = False

    def forward(self, x):
        y = self.blocks(self.lift(functional.pad(x, (2, 0))[..., 1:]))
        y = torch.tanh(self.twice(self.twice(self.still(self.norm(y))))) / 2
        return x - self.head(1 - y * y + y**2 * 3)


def two_convs(before, after):
    return tnn.Sequential(
        tnn.Conv2d(before, after, 3, padding=1, bias=False), tnn.BatchNorm2d(after), tnn.SiLU(inplace=True),
        tnn.Conv2d(after, after, 3, padding=1, padding_mode="reflect"), tnn.InstanceNorm2d(after, affine=True),
        tnn.LeakyReLU(0.2),
    )  # fmt: skip


class UNet(tnn.Module):
    """A U-Net for fields of any size: it pads what does not fit, or interpolates to the size of the skip."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = two_convs(2, 4), two_convs(4, 8), two_convs(8, 8)
        self.pool, self.up = tnn.MaxPool2d(2, ceil_mode=True), tnn.ConvTranspose2d(8, 8, 2, stride=2)
        self.back_two, self.back_one, self.head = two_convs(16, 4), two_convs(8, 4), tnn.Conv2d(4, 1, 1)
        self.norm = tnn.GroupNorm(2, 4)

    def forward(self, x):
        a = self.one(x)
        b = self.two(self.pool(a))
        y = self.up(self.three(functional.avg_pool2d(b, 2)))
        rows, columns = b.shape[2] - y.shape[2], b.shape[3] - y.shape[3]
        y = functional.pad(y, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        y = self.back_two(torch.cat([b, y], dim=1))
        y = functional.interpolate(y, size=a.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.norm(self.back_one(torch.cat([a, y], 1))))


class Scores(tnn.Module):
    """A network of one or three dims that ends in scalars."""

    def __init__(self, dims):
        super().__init__()
        conv, pool = getattr(tnn, f"Conv{dims}d"), getattr(tnn, f"AdaptiveAvgPool{dims}d")
        self.body = tnn.Sequential(
            conv(2, 4, 3, padding=1), tnn.ELU(), tnn.Upsample(scale_factor=2), conv(4, 4, 2, stride=2), tnn.Softplus()
        )
        self.mean, self.norm, self.head = pool(1), tnn.LayerNorm(4), tnn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(torch.sigmoid(torch.flatten(self.mean(self.body(x)), 1))))


class Gated(tnn.Module):
    """Channels that are normalized by buffers and parameters, weighted by their means, and shifted by their maxima."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.3, -0.1]).reshape(2, 1, 1))
        self.std, self.gain = tnn.Parameter(torch.tensor([[[2.0]]])), tnn.Parameter(torch.tensor([0.4]))
        self.gates = tnn.Sequential(tnn.AdaptiveAvgPool2d(1), tnn.Conv2d(2, 3, 1), tnn.BatchNorm2d(3))
        self.gates.extend([tnn.ReLU(), tnn.Conv2d(3, 2, 1)])
        self.shifts, self.weights = tnn.Linear(2, 2), tnn.Linear(2, 2)

    def forward(self, x):
        x = self.gain - (x - self.mean) / self.std
        y = torch.sigmoid(self.gates(x)) * x + self.shifts(x.amax((2, 3)))[:, :, None, None]
        weights = self.weights(torch.flatten(y.mean((-2, -1), keepdim=True), 1)).view(-1, 2, 1, 1).expand_as(y)
        a, b = torch.cat([y, y[:, 1:].clamp(-0.3, 0.3), y[:, :1]], 1).split([3, 1], 1)
        y = torch.cat([b * a[:, :1], a[:, 1:2]], 1)
        y = y - y.mean((2, 3), keepdim=True)
        return y * (1 + weights) * x.mean((2, 3), keepdim=True).expand(-1, -1, *x.shape[2:])


MODULES = {
    "gated": (Gated, (5, 4)),
    "residual": (Residual, (7, 9)),
    "unet": (UNet, (13, 11)),
    "scores1": (lambda: Scores(1), (11,)),
    "scores3": (lambda: Scores(3), (5, 4, 3)),
}
"""Modules, and the cells of their inputs."""


@cache
def trained_by_torch(name):
    """A module before training, its batch, and what PyTorch makes of them: losses, output and parameters."""
    torch.manual_seed(0)
    make, cells = MODULES[name]
    module, x = make().double(), torch.randn(2, 2, *cells, dtype=torch.float64)
    x, target = x.numpy(), torch.randn_like(copy.deepcopy(module)(x)).numpy()
    losses, trained = train_in_torch(module, x, target, STEPS, "SGD", functional.mse_loss, lr=0.05, momentum=0.9)
    y = trained.eval()(torch.tensor(x)).detach().numpy()
    return module, x, target, losses, y, trained


def train_on_grid(comm, name, dims):
    module, x, target, *_ = trained_by_torch(name)
    grid = grid_at(comm, dims, random_cuts(x.shape[2:], dims), layout="c" + "zyx"[-len(dims) :])
    options = {"loss": tnn.MSELoss(), "optimizer": optim.SGD(0.05, momentum=0.9), "precision": "float64"}
    trainer = fsdpx.distribute(module, domain=grid, **options)
    x, target = grid.take_local(x), target if target.ndim == 2 else grid.take_local(target)
    losses = [trainer.step(x, target) for _ in range(STEPS)]
    outputs = trainer.output_grid if target.ndim > 2 else grid
    return losses, trainer.predict(x), outputs, trainer.parameters()


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("residual", (1, 1)), ("residual", (2, 2)), ("gated", (3, 1)), ("unet", (1, 3)), ("unet", (5, 1)),
        ("scores1", (2,)), ("scores3", (1, 2, 2)),
    ],
)  # fmt: skip
def test_a_module_trains_over_a_grid_as_in_pytorch(name, dims):
    module, *_, losses, y, trained = trained_by_torch(name)
    found = spawn(train_on_grid, int(np.prod(dims)), name, dims)
    got, _, outputs, parameters = found[0]
    np.testing.assert_allclose(got, losses, rtol=1e-12)
    parts = [one[1] for one in found]
    np.testing.assert_allclose(
        parts[0] if y.ndim == 2 else whole(parts, outputs.parts, dims), y, rtol=1e-12, atol=1e-12
    )
    back = copy.deepcopy(module)
    missing, unknown = back.load_state_dict({n: torch.from_numpy(a) for n, a in parameters.items()}, strict=False)
    assert not unknown
    assert all(n.endswith("num_batches_tracked") for n in missing)
    for n, tensor in trained.state_dict().items():
        if not n.endswith("num_batches_tracked"):
            np.testing.assert_allclose(back.state_dict()[n], tensor, rtol=1e-12, atol=1e-12, err_msg=n)


class Refused(tnn.Module):
    """A convolution, and what `last` makes of its result."""

    def __init__(self, last):
        super().__init__()
        self.body, self.table, self.last = tnn.Conv2d(2, 4, 1), tnn.Parameter(torch.ones(4, 4, 8)), last
        self.last_conv = tnn.Conv2d(4, 4, 1)
        self.register_buffer("gain", torch.ones(1, 4, 1, 1))

    def forward(self, x):
        y = self.body(x)
        y.std()  # nothing reads this
        return self.last(y) if isinstance(self.last, tnn.Module) else self.last(self, y)


def write(target, value, result):
    """Write into a tensor, and return another."""
    target.mul_(value)
    return result


def set_item(y):
    y[:, :1] = 0.0
    return y


GRID = fsdpx.Grid.from_shape((4, 8), (1, 1), layout="cyx")
AFTER_A_WRITE, SAMPLES = r"(Refused|'last_conv').*reads .*after a write.*torch.cat", "number of samples"


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (tnn.SELU(), "'last' \\(SELU\\) calls selu.*use SiLU"),
        (tnn.Sequential(tnn.Tanh(), tnn.LayerNorm([4, 4, 8])), "'last.1' \\(LayerNorm\\).*GroupNorm\\(1"),
        (tnn.Linear(8, 8), "'last' \\(Linear\\).*kernel_size=1"),
        (tnn.MaxPool2d(2, return_indices=True), "'last' \\(MaxPool2d\\).*ConvTranspose"),
        (tnn.LSTM(8, 8), "'last' \\(LSTM\\): forward fails.*Rollout"),
        (tnn.BatchNorm2d(4, momentum=None), "'last' \\(BatchNorm2d\\).*momentum"),
        (tnn.utils.parametrizations.weight_norm(tnn.Conv2d(4, 1, 1)), "'last' \\(.*Conv2d\\).*parametrization"),
        (lambda own, y: y + own.table, "Refused calls add.*'table'.*StaticChannels"),
        (lambda own, y: y.softmax(-1), "Refused calls softmax"),
        (lambda own, y: torch.fft.rfft2(y), "Refused calls fft_rfft2.*from_state_dict"),
        (lambda own, y: y[:, :, ::2], "Refused calls getitem.*AvgPool"),
        (lambda own, y: y.chunk(2, 2)[0], "Refused calls chunk.*only channels"),
        (lambda own, y: y - y[..., :1], "Refused calls sub.*equal shape"),
        (lambda own, y: own.last_conv(y.amax((2, 3))[..., None, None]), "'last_conv' .*use Linear"),
        (lambda own, y: torch.cat([y, y], 2), "Refused calls cat.*channels"),
        (lambda own, y: y.reshape(1, -1), "Refused calls reshape"),
        (lambda own, y: y.permute(0, 2, 3, 1), "channels in dim 1"),
        (lambda own, y: torch.zeros(1), "Refused: an output reads"),
        (lambda own, y: {"y": y}, "returns dict"),
        (lambda own, y: y if y.sum() > 0 else -y, "Refused: forward fails"),
        (lambda own, y: set_item(y), AFTER_A_WRITE),
        (lambda own, y: own.last_conv(set_item(y)), AFTER_A_WRITE),
        (lambda own, y: set_item(y) * 2, AFTER_A_WRITE),
        (lambda own, y: write(y[:, :1], 2.0, y), AFTER_A_WRITE),
        (lambda own, y: write(y.permute(0, 2, 3, 1), 2.0, y) + 1, AFTER_A_WRITE),
        (lambda own, y: write(own.gain, 2.0, y) * own.gain, AFTER_A_WRITE),
        (lambda own, y: write(own.gain, 2.0, y * own.gain), AFTER_A_WRITE),
        (lambda own, y: own.last_conv(write(own.last_conv.weight, 2.0, y)), AFTER_A_WRITE),
        (lambda own, y: own.last_conv(write(own.last_conv.weight.data, 2.0, y)), AFTER_A_WRITE),
        (lambda own, y: (set_item(y.data), y)[1], AFTER_A_WRITE),
        (lambda own, y: y / y.shape[0], SAMPLES),
        (lambda own, y: y + y.shape[0] // 2, SAMPLES),
        (lambda own, y: y.clamp(0, len(y)), SAMPLES),
        (lambda own, y: y if len(y) == 2 else -y, SAMPLES),
    ],
)
def test_what_no_layer_computes_is_refused_by_its_name(last, says):
    with pytest.raises(ConfigError, match=says):
        from_torch(Refused(last), domain=GRID)


def test_a_write_into_a_tensor_that_alone_is_read_is_a_step():
    module = Refused(lambda own, y: write(z := y.permute(0, 2, 3, 1), 2.0, z).permute(0, 3, 1, 2).add_(1.0)).double()
    layer, x = from_torch(module, domain=fsdpx.Grid.from_shape((4, 8), (1, 1))), torch.randn(2, 2, 4, 8).double()
    p = {n: t.numpy() for n, t in module.state_dict().items()}
    y, _ = layer.forward(env_of(None, training=False), p, x.numpy())
    np.testing.assert_allclose(y, module(x).detach(), rtol=1e-12, atol=1e-12)


def test_a_domain_that_is_no_grid_is_refused():
    with pytest.raises(ConfigError, match=r"takes a fsdpx\.Grid, not"):
        from_torch(tnn.Conv2d(2, 2, 1), domain=GRID.input_partitions[0])


def test_inputs_are_counted_by_examples_and_named_as_in_forward():
    class Two(tnn.Module):
        def forward(self, u, s):
            return torch.cat([u, u * 2], 1), s

    layer = from_torch(Two(), torch.zeros(1, 3, 1, 1), torch.zeros(1, 2), domain=GRID)
    assert (layer.inputs, layer.n_outputs) == (("u", "s"), 2)
    for example in (torch.zeros(2), torch.zeros(1, 2)):
        with pytest.raises(ConfigError, match="give one per input"):
            from_torch(Two(), example, domain=GRID)
    with pytest.raises(ConfigError, match="units="):
        from_torch(Two(), domain=GRID, units=["Two"])


def test_a_rollout_of_a_module_is_one_of_its_layers():
    torch.manual_seed(0)
    module = tnn.Conv2d(1, 1, 3, padding=1).double()

    def run(comm):
        grid = fsdpx.Grid(comm, (4 + comm.rank, 6), dims=(2, 1), layout="yxc")
        model = nn.Rollout(from_torch(module, domain=grid), 2)
        trainer = model.as_distributed(domain=grid, precision="float64")
        return trainer.output_grid.all_gather(trainer.predict(np.ones((4 + comm.rank, 6, 1))))

    first = module(torch.ones(1, 1, 9, 6, dtype=torch.float64))
    want = torch.cat([first, module(first)], 1)[0].detach().numpy()
    np.testing.assert_allclose(spawn(run, 2)[0], want.transpose(1, 2, 0), rtol=1e-12)


torch.manual_seed(0)
ARGUMENTS = [
    tnn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False),
    tnn.Conv2d(2, 2, 4, padding="same", padding_mode="replicate"),
    tnn.Conv3d(2, 1, 2, padding="valid"),
    tnn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=(1, 0), groups=2, dilation=(1, 2)),
    tnn.ConvTranspose1d(2, 1, 4, stride=3, bias=False),
    tnn.MaxPool2d((3, 2), stride=1, padding=1, dilation=(2, 1), ceil_mode=True),
    tnn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
    tnn.AvgPool3d(2, divisor_override=3),
    tnn.AdaptiveAvgPool2d((3, 2)),
    tnn.Upsample(size=(9, 13), mode="bicubic", align_corners=True),
    tnn.Upsample(scale_factor=(1.5, 2.0), mode="bilinear", recompute_scale_factor=True),
    tnn.UpsamplingBilinear2d(scale_factor=2),
    tnn.Upsample(scale_factor=3, mode="nearest-exact"),
    tnn.GroupNorm(1, 2, eps=0.1, affine=False),
    tnn.InstanceNorm2d(2, eps=0.1),
    tnn.Sequential(tnn.ZeroPad2d((1, 2, 0, 3)), tnn.ConstantPad2d(1, 0.7), tnn.ReflectionPad2d((2, 1, 0, 1))),
    tnn.Sequential(tnn.ReplicationPad3d(1), tnn.CircularPad3d((1, 0, 1, 1, 0, 2))),
    tnn.Sequential(tnn.Conv2d(2, 8, 1), tnn.PixelShuffle(2), tnn.PixelUnshuffle(2), tnn.Dropout2d(), tnn.Dropout()),
    tnn.Sequential(tnn.GELU("tanh"), tnn.ELU(0.5), tnn.Softplus(2.0, 0.5), tnn.LeakyReLU(0.3), tnn.ReLU6()),
    tnn.Sequential(tnn.Mish(), tnn.Hardswish(), tnn.Hardsigmoid(), tnn.Softsign(), tnn.Hardtanh(-0.5, 0.2)),
]


@pytest.mark.parametrize("module", ARGUMENTS, ids=str)
def test_arguments_of_layers_are_those_of_pytorch(module):
    cells = {"3d": (4, 3, 5), "1d": (7,)}.get(next((d for d in ("3d", "1d") if d in str(module)), ""), (6, 8))
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 2, *cells)))
    module = copy.deepcopy(module).double().eval()
    layer = from_torch(module, x, domain=fsdpx.Grid.from_shape(cells, (1,) * len(cells)))
    p = {n: t.numpy() for n, t in module.state_dict().items()}
    y, _ = layer.forward(env_of(None, training=False), p, x.numpy())
    np.testing.assert_allclose(y, module(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 1, 1), (1,), ()])
@pytest.mark.parametrize(("operation", "sign"), [("add", 1), ("sub", -1), ("mul", 1), ("div", -1)])
def test_gradients_of_parameters_of_channels_are_summed_precisely_in_bf16(shape, operation, sign):
    """A sum of ones in bf16 would stop at 256."""
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    layer, x, env = ChannelParameter(shape, operation), np.ones((2, 2, 64, 64), bf16), env_of(None)
    p, g = {"": np.ones(shape, bf16)}, {"": np.zeros(shape, np.float32)}
    _, saved = layer.forward(env, p, x)
    _, kept = layer.backward_input(env, p, saved, x)
    layer.backward_params(env, g, kept)
    np.testing.assert_array_equal(g[""], sign * x.size / max(g[""].size, 1))


def test_a_fixed_batch_norm_keeps_the_rest_of_its_context(monkeypatch):
    env, seen = replace(env_of(None), recompute=frozenset({"attention"})), []
    monkeypatch.setattr(nn.BatchNorm, "forward", lambda self, env, p, x: (x, seen.append(env)))
    FixedBatchNorm(2).forward(env, {}, np.ones((1, 2, 3)))
    assert (seen[0].training, seen[0].recompute) == (False, env.recompute)
    assert seen[0].constants is env.constants


def test_a_linear_on_channels_keeps_ghost_cells():
    """A convolution after it reads them."""
    u = np.random.default_rng(1).standard_normal((1, 8, 6, 3))
    model = nn.Sequential(ChannelLinear(3, 3), nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"))
    want = model.as_distributed(precision="float64").predict(np.moveaxis(u, -1, 1))
    trainer = model.as_distributed(precision="float64", domain=fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=1))
    ghosts = np.pad(u, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="wrap")
    found = trainer.predict(ghosts)
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), want, rtol=1e-12)
    ghosts[:, 0] += 1.0
    changed = trainer.predict(ghosts)
    assert (changed[:, 0] != found[:, 0]).all()
    np.testing.assert_array_equal(changed[:, 1:], found[:, 1:])
