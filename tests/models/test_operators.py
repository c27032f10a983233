"""Weights of other projects' models of fields give the outputs that they give there."""

import re

import numpy as np
import pytest
from models import alike
from setting import normal

import fsdpx
from fsdpx import models, nn, optim, spawn
from fsdpx.errors import CheckpointError, ConfigError, ShapeError
from fsdpx.testing import assert_close

SIZES = {1: (16,), 2: (8, 12), 3: (8, 12, 8)}


@pytest.fixture(name="torch")
def import_torch():
    return pytest.importorskip("torch")


def usual_unet(torch, dims, width, depth, act, transposed, outputs):
    """The usual U-Net, as PDEBench has it, of any depth; the last layer of The Well's is transposed."""
    t = torch.nn
    conv, rise, pool, norm = (getattr(t, f"{k}{dims}d") for k in ("Conv", "ConvTranspose", "MaxPool", "BatchNorm"))

    class UNet(t.Module):
        def __init__(self):
            super().__init__()
            last = 3
            for i in range(1, depth + 1):
                many = width << (i - 1)
                setattr(self, f"encoder{i}", self.block(last, many, f"enc{i}"))
                last = many
                setattr(self, f"upconv{i}", rise(2 * many, many, 2, 2))
                setattr(self, f"decoder{i}", self.block(2 * many, many, f"dec{i}"))
            self.bottleneck = self.block(last, 2 * last, "bottleneck")
            self.conv = (rise if transposed else conv)(width, outputs, 1)

        def block(self, before, many, name):
            made = t.Sequential()
            for turn, channels in ((1, before), (2, many)):
                made.add_module(f"{name}conv{turn}", conv(channels, many, 3, padding=1, bias=False))
                made.add_module(f"{name}norm{turn}", norm(many))
                made.add_module(f"{name}{act}{turn}", {"relu": t.ReLU, "tanh": t.Tanh}[act]())
            return made

        def forward(self, x):
            found = []
            for i in range(1, depth + 1):
                x = getattr(self, f"encoder{i}")(x)
                found.append(x)
                x = pool(2, 2)(x)
            x = self.bottleneck(x)
            for i in range(depth, 0, -1):
                x = torch.cat((getattr(self, f"upconv{i}")(x), found[i - 1]), 1)
                x = getattr(self, f"decoder{i}")(x)
            return self.conv(x)

    torch.manual_seed(dims)
    made = UNet().double()
    x = torch.tensor(normal(4, 3, *SIZES[dims], seed=3))
    for _ in range(3):
        made(x)  # running statistics
    return made.eval()


def predicted(model, x):
    return model.as_distributed(precision="float64").predict(x)


@pytest.mark.parametrize(
    ("dims", "width", "depth", "act", "transposed", "outputs"),
    [(1, 4, 3, "tanh", False, 2), (2, 4, 2, "relu", False, 4), (2, 4, 2, "tanh", True, 2), (3, 2, 1, "tanh", True, 2)],
)
def test_the_usual_unet(torch, dims, width, depth, act, transposed, outputs):
    theirs = usual_unet(torch, dims, width, depth, act, transposed, outputs)
    given = {"activation": act} | ({"transposed": True} if transposed and outputs == width else {})
    x = normal(2, 3, *SIZES[dims])
    model = models.from_state_dict(theirs.state_dict(), **given)
    assert (model.width, model.depth, model.dims) == (width, depth, dims)
    want = theirs(torch.tensor(x)).detach().numpy()
    assert_close({"y": predicted(model, x)}, {"y": want}, 1e-12)
    wrapped = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    assert_close({"y": predicted(models.from_state_dict(wrapped, **given), x)}, {"y": want}, 1e-12)


def test_weights_of_a_unet_go_back(torch):
    """Names are the same, so that PyTorch's module takes what was trained here."""
    theirs = usual_unet(torch, 2, 4, 2, "tanh", False, 3)
    trainer = nn.UNet(3, 3, 2, 4, 2, activation="tanh").as_distributed(precision="float64", seed=1)
    theirs.load_state_dict({name: torch.tensor(a) for name, a in trainer.parameters().items()})
    x = normal(2, 3, *SIZES[2])
    assert_close({"y": theirs(torch.tensor(x)).detach().numpy()}, {"y": trainer.predict(x)}, 1e-12)


def test_a_unet_names_the_sizes_that_it_takes():
    trainer = nn.UNet(1, 1, 2, 4, 3).as_distributed(precision="float64")
    assert trainer.predict(normal(1, 1, 16, 24)).shape == (1, 1, 16, 24)
    sizes = r"the input has 20 x 24 cells, .* a multiple of 8 .*: along dim 2, level 3 has 5 cells, which cannot be hal"
    with pytest.raises(ShapeError, match=sizes):
        trainer.predict(normal(1, 1, 20, 24))
    with pytest.raises(ShapeError, match=r"the input has 16 x 4 cells, .* along dim 3, level 3 has 1 cells"):
        trainer.predict(normal(1, 1, 16, 4))


def complex_noise(torch, *shape):
    return torch.complex(*(torch.tensor(normal(*shape, seed=s)) for s in (1, 2))) / np.sqrt(shape[0])


def modes_of(torch, x, weight):
    """neuraloperator's convention, by FFT: index w of a mode is the frequency w - K // 2, in the last dim w."""
    dims, sizes = tuple(range(2, x.ndim)), x.shape[2:]
    whole = torch.fft.rfftn(x, norm="forward", dim=dims)
    at = [[(w - k // 2) % n for w in range(k)] for k, n in zip(weight.shape[2:-1], sizes[:-1], strict=True)]
    index = (slice(None), slice(None), *(torch.tensor(p) for p in np.ix_(*at, np.arange(weight.shape[-1]))))
    letters = "xyz"[: len(sizes)]
    full = torch.zeros(x.shape[0], weight.shape[1], *whole.shape[2:], dtype=whole.dtype)
    full[index] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", whole[index], weight)
    return torch.fft.irfftn(full, s=sizes, norm="forward", dim=dims)


def neuraloperator(torch, dims, ratio, positions, modes=()):
    """Tensors under the names of neuralop.models.FNO 2.0, and what it computes with them."""
    width, layers, modes = 6, 2, modes or ((4,), (4, 4), (2, 4, 3))[dims - 1]
    shapes = {"lifting.fcs.0": (ratio * width, 2 + dims * positions), "lifting.fcs.1": (width, ratio * width)}
    shapes |= {"projection.fcs.0": (ratio * width, width), "projection.fcs.1": (3, ratio * width)}
    for i in range(layers):
        shapes |= {f"fno_blocks.channel_mlp.{i}.fcs.0": (3, width), f"fno_blocks.channel_mlp.{i}.fcs.1": (width, 3)}
    state = {"_metadata": {}}
    for seed, (name, shape) in enumerate(shapes.items()):
        state[f"{name}.weight"] = torch.tensor(normal(*shape, 1, seed=seed)) / np.sqrt(shape[1])
        state[f"{name}.bias"] = torch.tensor(normal(shape[0], seed=seed))
    for i in range(layers):
        state[f"fno_blocks.convs.{i}.weight.tensor"] = complex_noise(torch, width, width, *modes)
        state[f"fno_blocks.convs.{i}.bias"] = torch.tensor(normal(width, *(1,) * dims, seed=i))
        state[f"fno_blocks.fno_skips.{i}.conv.weight"] = torch.tensor(normal(width, width, 1, seed=i))
        state[f"fno_blocks.channel_mlp_skips.{i}.weight"] = torch.tensor(normal(1, width, *(1,) * dims, seed=i))

    def cells(name, x):
        y = torch.einsum("oi,bi...->bo...", state[f"{name}.weight"][:, :, 0], x)
        return y + state[f"{name}.bias"].view(-1, *(1,) * dims) if f"{name}.bias" in state else y

    def network(name, x):
        return cells(f"{name}.fcs.1", torch.nn.functional.gelu(cells(f"{name}.fcs.0", x)))

    def forward(x):
        if positions:
            at = torch.meshgrid(*[torch.arange(n, dtype=x.dtype) / n for n in x.shape[2:]], indexing="ij")
            x = torch.cat([x, torch.stack(at).expand(len(x), *[-1] * (dims + 1))], 1)
        x = network("lifting", x)
        for i in range(layers):
            end = torch.nn.functional.gelu if i < layers - 1 else (lambda a: a)
            block = "fno_blocks"
            gate = state[f"{block}.channel_mlp_skips.{i}.weight"] * x
            y = modes_of(torch, x, state[f"{block}.convs.{i}.weight.tensor"]) + state[f"{block}.convs.{i}.bias"]
            y = end(y + cells(f"{block}.fno_skips.{i}.conv", x))
            x = end(network(f"{block}.channel_mlp.{i}", y) + gate)
        return network("projection", x)

    return state, forward


@pytest.mark.parametrize(
    ("dims", "ratio", "positions", "modes"),
    [(1, 2, True, ()), (2, 2, True, ()), (2, 4, False, ()), (3, 1, True, ()), (1, 1, True, (1,)), (2, 1, True, (2, 1))],
)
def test_neuraloperator(torch, dims, ratio, positions, modes):
    """Also with one mode in the last dim: means."""
    state, forward = neuraloperator(torch, dims, ratio, positions, modes)
    x = normal(2, 2, *SIZES[dims])
    model = models.from_state_dict(state, **({} if positions else {"positions": False}))
    assert_close({"y": predicted(model, x)}, {"y": forward(torch.tensor(x)).numpy()}, 1e-11)


def pdebench(torch, dims, modes=()):
    """Tensors under the names of PDEBench's FNO1d to FNO3d, and what these compute; two layers."""
    width, modes, layers, hidden = 5, modes or ((4,), (3, 4), (2, 3, 4))[dims - 1], 2, 9
    state = {}
    for i, (outputs, inputs) in enumerate(((width, 2 + dims), (hidden, width), (3, hidden))):
        state[f"fc{i}.weight"] = torch.tensor(normal(outputs, inputs, seed=i))
        state[f"fc{i}.bias"] = torch.tensor(normal(outputs, seed=i))
    for i in range(layers):
        for corner in range(2 ** (dims - 1)):
            state[f"conv{i}.weights{corner + 1}"] = complex_noise(torch, width, width, *modes) * (1 + corner + i)
        state[f"w{i}.weight"] = torch.tensor(normal(width, width, *(1,) * dims, seed=i))
        state[f"w{i}.bias"] = torch.tensor(normal(width, seed=i))
        state[f"bn{i}.weight"] = torch.ones(width)
    pad = (0, 6) if dims == 3 else (0, 2) * dims

    def spectral(i, x):
        axes, letters = tuple(range(2, x.ndim)), "xyz"[:dims]
        whole = torch.fft.rfftn(x, dim=axes)
        full = torch.zeros_like(whole)
        for corner in range(2 ** (dims - 1)):
            ends = [slice(-m, None) if corner >> d & 1 else slice(m) for d, m in enumerate(modes[:-1])]
            at = (slice(None), slice(None), *ends, slice(modes[-1]))
            weight = state[f"conv{i}.weights{corner + 1}"]
            full[at] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", whole[at], weight)
        return torch.fft.irfftn(full, s=x.shape[2:], dim=axes)

    def forward(x):
        linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
        x = linear(x.movedim(1, -1), state["fc0.weight"], state["fc0.bias"]).movedim(-1, 1)
        x = torch.nn.functional.pad(x, pad)
        for i in range(layers):
            w = torch.einsum("oi,bi...->bo...", state[f"w{i}.weight"].flatten(1), x)
            x = spectral(i, x) + w + state[f"w{i}.bias"].view(-1, *(1,) * dims)
            x = gelu(x) if i < layers - 1 else x
        x = torch.nn.functional.pad(x, tuple(-n for n in pad)).movedim(1, -1)
        x = gelu(linear(x, state["fc1.weight"], state["fc1.bias"]))
        return linear(x, state["fc2.weight"], state["fc2.bias"]).movedim(-1, 1)

    return state, forward


@pytest.mark.parametrize(("dims", "modes"), [(1, ()), (2, ()), (3, ()), (1, (1,)), (2, (2, 1))])
def test_pdebench(torch, dims, modes):
    state, forward = pdebench(torch, dims, modes)
    x = normal(2, 2 + dims, *SIZES[dims])
    assert_close({"y": predicted(models.from_state_dict(state), x)}, {"y": forward(torch.tensor(x)).numpy()}, 1e-11)


def test_weights_go_back_where_they_came_from(torch):
    """To the bit, and what was trained here is what the other project computes with it."""
    unet = usual_unet(torch, 2, 4, 2, "tanh", True, 2)
    cases = [(*pdebench(torch, d), 2 + d, d) for d in (1, 2, 3)] + [(*neuraloperator(torch, 2, 4, True), 2, 2)]
    cases += [({f"net.{n}": v for n, v in unet.state_dict().items()}, None, 3, 2)]
    for state, forward, channels, dims in cases:
        model = models.from_state_dict(state)
        trainer = model.as_distributed(precision="float64", loss=nn.MSELoss(), optimizer=optim.SGD(0.1))
        back = models.to_state_dict(trainer.parameters(), state)
        for name, value in state.items():
            if hasattr(value, "shape"):
                np.testing.assert_array_equal(back[name], value.numpy(), err_msg=name)
                assert back[name].dtype == value.numpy().dtype
        if forward is None:
            continue
        x = normal(2, channels, *SIZES[dims])
        trainer.step(x, normal(2, 3, *SIZES[dims], seed=1))
        for name, array in models.to_state_dict(trainer.parameters(), state).items():
            state[name].copy_(torch.tensor(array))
        assert_close({"y": trainer.predict(x)}, {"y": forward(torch.tensor(x)).numpy()}, 1e-11)


def test_parameters_that_do_not_go_back():
    values = plain()
    short = {name: a for name, a in values.items() if name != "conv.bias"}
    for given, shape in ((short, r"\(0,\)"), (short | {"conv.bias": np.ones(2)}, r"\(2,\)")):
        with pytest.raises(CheckpointError, match=rf"to_state_dict: conv.bias is {shape}, and \(1,\) is needed"):
            models.to_state_dict(given, values)


def test_weights_over_a_grid(torch):
    """Each rank has a part of the field, and shards of the weights."""
    for state, forward in (pdebench(torch, 2), neuraloperator(torch, 2, 2, True)):
        x = normal(1, 4 if "fc0.weight" in state else 2, *SIZES[2])
        want = forward(torch.tensor(x)).numpy()

        def run(comm, state=state, x=x):
            grid = fsdpx.Grid(comm, ((5, 3)[comm.rank // 2], (0, 12)[comm.rank % 2]), dims=(2, 2), layout="cyx")
            model = models.from_state_dict(state)
            trainer = model.as_distributed(precision="float64", strategy="fsdp", comm=comm, domain=grid)
            return grid.all_gather(trainer.predict(grid.take_local(x[0])))

        assert_close(spawn(run, 4), [want[0]] * 4, 1e-11)


def test_a_file_of_weights(tmp_path):
    """Of safetensors, as The Well has them."""
    trainer = nn.UNet(2, 1, 1, 2, 1, activation="tanh").as_distributed(precision="float64")
    trainer.save(tmp_path / "saved")
    x = normal(1, 2, 8)
    model = models.from_state_dict(tmp_path / "saved", activation="tanh")
    np.testing.assert_array_equal(predicted(model, x), trainer.predict(x))


def plain():
    """Weights of a small U-Net."""
    return {name: normal(*spec.shape) for name, spec in nn.UNet(2, 1, 1, 2, 1).specs().items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv.weight": None}, "from_state_dict: missing: conv.weight"),
        ({"bottleneck.bottleneckconv2.weight": None}, "from_state_dict: missing: bottleneck.bottleneckconv2.weight"),
        ({"more.weight": np.ones(2)}, "from_state_dict: not in the model: more.weight"),
        ({"decoder1.dec1conv1.weight": np.ones((2, 2, 3))}, "dec1conv1.weight is (2, 2, 3), and (2, 4, 3) is needed"),
        ({"encoder1.enc1conv1.weight": None}, "no model is known that has these tensors; known are those with enc"),
    ],
)
def test_weights_that_do_not_fit(change, message):
    values = {name: a for name, a in (plain() | change).items() if a is not None}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        models.from_state_dict(values)


def test_sources_that_are_none():
    with pytest.raises(CheckpointError, match=r"give module.state_dict\(\) or a path, got a UNet"):
        models.from_state_dict(nn.UNet(1, 1))
    with pytest.raises(CheckpointError, match=r"other.weight does not begin with 'net\.', as others do"):
        models.from_state_dict({f"net.{n}": a for n, a in plain().items()} | {"other.weight": np.ones(1)})
    state = {"conv0.weights1": np.ones((2, 2, 2, 2)), "fc0.weight": np.ones((2, 3)), "conv0.weights2": np.ones(1)}
    with pytest.raises(ConfigError, match=r"padding=\(1,\) must be of 2 dims"):
        models.from_state_dict(state, padding=(1,))
    real = {"fno_blocks.convs.0.weight.tensor": np.ones((2, 2, 2, 2)), "lifting.fcs.0.weight": np.ones((2, 3, 1))}
    with pytest.raises(CheckpointError, match="weights of SpectralConv must be complex"):
        models.from_state_dict(real)


def test_other_weights_on_some_rank_are_refused_on_all():
    def run(comm):
        values = plain()
        values["conv.bias"] += comm.rank
        models.from_state_dict(values).as_distributed(comm=comm)

    assert re.match("ConfigError: .*ranks differ in model: rank 0 has a model of 185 parameters, digest", alike(2, run))


def test_modules_of_pytorch_both_ways(torch):
    """Names and shapes are PyTorch's, for all layers that it has as well."""
    t, x = torch.nn, normal(2, 2, 8, 9)
    theirs = t.Sequential(
        t.Conv2d(2, 6, 3, padding=1, padding_mode="circular"), t.GroupNorm(2, 6), t.MaxPool2d(2), t.BatchNorm2d(6),
        t.ConvTranspose2d(6, 4, 2, 2), t.InstanceNorm2d(4, affine=True), t.Upsample(scale_factor=2, mode="bilinear"),
        t.Conv2d(4, 3, 1),
    ).double()  # fmt: skip
    ours = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 6), nn.MaxPool2d(2), nn.BatchNorm(6),
        nn.ConvTranspose2d(6, 4, 2, 2), nn.InstanceNorm(4, affine=True), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 3, 1),
    )  # fmt: skip
    theirs(torch.tensor(x))
    trainer = ours.as_distributed(precision="float64")
    assert trainer.load_parameters(theirs.eval().state_dict()).unused == ("3.num_batches_tracked",)
    assert_close({"y": trainer.predict(x)}, {"y": theirs(torch.tensor(x)).detach().numpy()}, 1e-12)
    theirs.load_state_dict({name: torch.tensor(2 * a) for name, a in trainer.parameters().items()})
    trainer.load_parameters({name: 2 * a for name, a in trainer.parameters().items()})
    assert_close({"y": trainer.predict(x)}, {"y": theirs(torch.tensor(x)).detach().numpy()}, 1e-12)
