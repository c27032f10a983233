"""Weights under the names of others: renamed, partly there, from files or from arrays, on any mesh."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import savers
from threads import on_ranks

from fsdpx import Mesh, Trainer, WeightsReport, nn, optim, spawn
from fsdpx.core.checkpoint.load import LEAVE_OUT_HINT, RENAME_HINT
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError

MESHES = {
    "one": (1, {}),
    "fsdp 3": (3, {"strategy": "fsdp"}),
    "tensor 2 shard 2": (4, {"mesh": Mesh(shard=2, tensor=2), "strategy": "zero1"}),
    "pipe 2": (2, {"mesh": Mesh(shard=1, pipe=2), "strategy": "ddp"}),
}


class Swap(nn.Layer):
    """(samples, time, features) to (samples, features, time), which is where BatchNorm has its channels."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        return x.swapaxes(1, 2), ()

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        return dy.swapaxes(1, 2), ()


def trainer(comm: Communicator, seed: int = 0, **options: Any) -> Trainer:
    attention = nn.MultiHeadAttention(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), attention, Swap(), nn.BatchNorm(4), Swap(), nn.Linear(4, 2))
    return model.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, seed=seed, **options)


def pytorch() -> dict[str, np.ndarray]:
    """As the `state_dict` of the same modules."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return {
        "0.weight": some(4, 3), "0.bias": some(4),
        "1.in_proj_weight": some(12, 4), "1.in_proj_bias": some(12),
        "1.out_proj.weight": some(4, 4), "1.out_proj.bias": some(4),
        "3.weight": some(4), "3.bias": some(4), "3.running_mean": some(4), "3.running_var": some(4) ** 2,
        "3.num_batches_tracked": np.array(7),
        "5.weight": some(2, 4), "5.bias": some(2),
    }  # fmt: skip


OURS = {
    "1.in_proj_weight": "1.qkv.weight", "1.in_proj_bias": "1.qkv.bias",
    "1.out_proj.weight": "1.out.weight", "1.out_proj.bias": "1.out.bias",
}  # fmt: skip


def expected() -> dict[str, np.ndarray]:
    return {OURS.get(name, name): value for name, value in pytorch().items() if "tracked" not in name}


def same(found: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> None:
    assert found.keys() == values.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], values[name], name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["file", "arrays"])
def test_names_of_pytorch_are_known(mesh: str, kind: str, tmp_path: Path) -> None:
    ranks, options = MESHES[mesh]
    file = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(pytorch(), file)

    def body(comm: Communicator) -> Any:
        t = trainer(comm, **options)
        return t.load_parameters(file if kind == "file" else pytorch()), t.parameters()

    for report, found in spawn(body, ranks):
        same(found, expected())
        if report:
            assert report == WeightsReport(tuple(found), renamed=OURS, unused=("3.num_batches_tracked",))
            text = str(report).splitlines()
            assert text[0] == "12 tensors taken"
            assert "1.in_proj_bias -> 1.qkv.bias" in text[1]
            assert text[2] == "needed for nothing: 3.num_batches_tracked"


@on_ranks(2)
def test_layers_inside_of_a_unit_are_known_too(comm: Communicator) -> None:
    model = nn.Sequential(nn.TransformerBlock(4, 2))
    t = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm)
    values = {name.replace("attn.qkv.", "attn.in_proj_"): value + 1 for name, value in t.parameters().items()}
    report = t.load_parameters(values)
    assert dict(report.renamed) == {f"0.attn.in_proj_{x}": f"0.attn.qkv.{x}" for x in ("weight", "bias")}
    same(t.parameters(), {name.replace("attn.in_proj_", "attn.qkv."): v for name, v in values.items()})


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_there_is_taken_and_the_rest_said(mesh: str) -> None:
    """A body under other names and another head: fine-tuning."""
    ranks, options = MESHES[mesh]
    theirs = {f"body.{name}": value for name, value in pytorch().items() if name[0] in "01"}
    theirs |= {"norm.gamma": np.full(4, 3.0, np.float32), "head.weight": np.ones((9, 4))}
    rename = {"body.*.in_proj_*": "*.qkv.*", "body.*": "*", "norm.gamma": "3.weight"}

    def body(comm: Communicator) -> Any:
        t = trainer(comm, seed=4, **options)
        before = t.parameters()
        return before, t.load_parameters(theirs, strict=False, rename=rename), t.parameters()

    for before, report, after in spawn(body, ranks):
        new = {n: v for n, v in expected().items() if n[0] in "01"} | {"3.weight": theirs["norm.gamma"]}
        same(after, before | new)
        assert set(report.taken) == set(new)
        assert report.missing == ("3.bias", "3.running_mean", "3.running_var", "5.weight", "5.bias")
        assert report.extra == ("head.weight",)
        assert report.renamed["body.1.in_proj_weight"] == "1.qkv.weight"
        assert report.renamed["body.1.out_proj.bias"] == "1.out.bias"
        assert "missing, as they were: 3.bias, " in str(report)
        assert "extra, not used: head.weight" in str(report)


def refused(source: Any, **options: Any) -> str:
    """The text of the error that all ranks raise; nothing has changed."""

    def body(comm: Communicator) -> None:
        t = trainer(comm)
        before = t.inspect.compute_fingerprint()
        try:
            t.load_parameters(source(comm.rank) if callable(source) else source, **options)
        finally:
            assert t.inspect.compute_fingerprint() == before

    return savers.refused(2, body)


class Linear:
    """A module of PyTorch, as far as that is looked at."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_what_does_not_fit_is_said_alike() -> None:
    good = pytorch()
    some = {name: value for name, value in good.items() if name != "5.bias"}
    assert refused(some | {"x": np.ones(1)}) == f"load_parameters: missing: 5.bias; not in the model: x ({RENAME_HINT})"
    for strict, hint in ((False, LEAVE_OUT_HINT), (True, "")):
        text = refused(good | {"5.bias": np.ones(3, np.float32)}, strict=strict)
        assert text == f"load_parameters: of the wrong shape: 5.bias is (3,) instead of (2,){hint}"
    text = refused(good | {"5.bias": np.ones(2)}, convert=False)
    assert text.startswith("load_parameters: 5.bias is float64 there and float32 in the trainer: say convert=True")
    text = refused(good | {"5.bias": "none"})
    assert text.startswith("load_parameters: rank 0: '5.bias' is a str that cannot be read as an array of numbers")
    text = refused(lambda rank: good if rank else some)
    assert text.startswith("load_parameters: ranks differ in arrays: rank 0 has 12, digest ")
    text = refused(lambda rank: good | {"5.bias": np.full(2, rank, np.float32)})
    assert text.startswith("load_parameters: ranks differ in values: rank 0 has digest ")
    assert refused({1: np.ones(2)}) == "load_parameters: rank 0: 1 is no name of an array: names are text"
    text = refused(lambda rank: good if rank else "nothing")
    assert text == "load_parameters: ranks differ in path: rank 0 has nothing, rank 1 has none"
    text = refused(lambda rank: good if rank else 5)
    assert "rank 0: 5 is neither a path nor a dict of full arrays, which every rank passes" in text
    assert refused(Linear()) == "load_parameters: rank 0: Linear is a module, not its weights: give module.state_dict()"


def test_a_tensor_of_another_shape_is_left_out_as_the_message_says() -> None:
    given = pytorch() | {"5.bias": np.ones(3, np.float32)}
    assert LEAVE_OUT_HINT == ' (rename={"theirs": "unused.theirs"} leaves a tensor out)'

    def body(comm: Communicator) -> WeightsReport:
        return trainer(comm).load_parameters(given, strict=False, rename={"5.bias": "unused.5.bias"})

    report = spawn(body, 2)[0]
    assert (report.missing, report.extra) == (("5.bias",), ("5.bias",))


def test_what_one_rank_alone_has_read_is_not_enough() -> None:
    text = savers.refused(3, lambda comm: trainer(comm).load_parameters(None if comm.rank else pytorch()))
    assert text == "load_parameters: rank 1: None is neither a path nor a dict of full arrays, which every rank passes"


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"body.*": "*"}, f"'body.*' matches no name there; there are {', '.join(map(repr, [*pytorch()][:6]))} ..."),
        ({"0.*": "*.*"}, "'0.*' and '*.*' must be texts with equally many *"),
        ({"0.*": 1}, "'0.*' and 1 must be texts with equally many *"),
        ({"0.bias": "5.bias"}, "0.bias and 5.bias would both be 5.bias"),
    ],
)
def test_patterns_that_cannot_be(rename: Any, message: str) -> None:
    assert refused(pytorch(), rename=rename, strict=False) == f"load_parameters: rank 0: rename: {message}"


@on_ranks(2)
def test_the_first_pattern_that_fits_counts(comm: Communicator) -> None:
    t = trainer(comm)
    theirs = {"a.b.weight": np.ones((4, 3), np.float32), "a.c.weight": np.zeros((2, 4), np.float32)}
    report = t.load_parameters(theirs, strict=False, rename={"a.b.*": "0.*", "*.*.weight": "nowhere.*.*"})
    assert (report.taken, report.extra) == (("0.weight",), ("a.c.weight",))


def test_encoder_layers_of_pytorch_give_the_same_output() -> None:
    """From its own `state_dict`: renamed, and what is known of attention besides."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    options = {"dim_feedforward": 32, "dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    layer = torch.nn.TransformerEncoderLayer(8, 2, **options)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    rename = {"layers.*.self_attn.*": "*.attn.*", "layers.*.norm*": "*.norm*"}
    rename |= {"layers.*.linear1.*": "*.mlp.up.*", "layers.*.linear2.*": "*.mlp.down.*"}
    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        want = module.eval()(x, mask=torch.nn.Transformer.generate_square_subsequent_mask(5), is_causal=True).numpy()

    def body(comm: Communicator) -> Any:
        model = nn.Sequential(*(nn.TransformerBlock(8, 2, d_hidden=32) for _ in range(2)))
        t = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm)
        report = t.load_parameters(module.state_dict(), rename=rename)
        assert report.renamed["layers.1.self_attn.in_proj_weight"] == "1.attn.qkv.weight"
        return t.predict(x.numpy())

    for found in spawn(body, 2):
        np.testing.assert_allclose(found, want, atol=2e-6)


def test_files_of_other_formats_are_named_with_a_way_to_convert_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = {name: torch.from_numpy(value) for name, value in expected().items()}
    torch.save(values, tmp_path / "new.pt")
    torch.save(values, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "keras.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    safetensors.numpy.save_file(pytorch(), tmp_path / "right.safetensors")
    shown = {
        "new.pt": "a zip file, as torch.save and numpy.savez write: safetensors.torch.save_file",
        "old.pt": "a pickle, as torch.save writes: safetensors.torch.save_file",
        "keras.h5": "an HDF5 file: read its arrays with h5py",
    }

    @on_ranks(2)
    def body(comm: Communicator) -> None:
        t = trainer(comm)
        for name, text in shown.items():
            for call in (t.load, t.load_parameters):
                with pytest.raises(CheckpointError, match=f"{name}: this is no safetensors file, but {text}"):
                    call(tmp_path / name)
        with pytest.raises(CheckpointError, match="a checkpoint is a folder; use load_parameters"):
            t.load(tmp_path / "right.safetensors")
        with pytest.raises(CheckpointError, match=r"in it, but keras.h5, new.pt.*; keras.h5 is an HDF5 file"):
            t.load_parameters(tmp_path)
        t.load_parameters(torch.load(tmp_path / "new.pt", weights_only=True))
        same(t.parameters(), expected())

    body()
