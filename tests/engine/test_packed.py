"""Frozen matrices in 8 and 4 bits: near what they were by the bound of the format, few bytes, alike anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import in_full
from bits import bits
from models import part

import fsdpx
from fsdpx import Mesh, Precision, nn, optim
from fsdpx.comm import Communicator
from fsdpx.comm.opening import world as open_world
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.program import traffic
from fsdpx.trainer.report import sizes_of

INT8 = Precision(frozen="int8")
NF4 = Precision(frozen="nf4")
FORMATS = [INT8, Precision(frozen="int8", block=16), Precision(compute="bf16", frozen="int8"), NF4]
TOKENS = np.random.default_rng(3).integers(0, 61, (2, 12, 16))
ALL: Any = ["*"]


def gpt() -> nn.Layer:
    return nn.GPT(vocab=61, d_model=32, n_layers=2, n_heads=4, seq_len=16)


def distributed(comm: Communicator, model: nn.Layer, precision: Any = INT8, frozen: Any = ALL, **options: Any) -> Any:
    known: dict[str, Any] = {"loss": nn.CrossEntropy(), "optimizer": optim.SGD(lr=0.1), "group_bytes": 2048}
    return model.as_distributed(comm=comm, precision=precision, frozen=frozen, **(known | options))


def ranks(size: int, precision: Any, **options: Any) -> list[Any]:
    return fsdpx.spawn(lambda comm: evaluated(comm, precision, **options), size)


def evaluated(comm: Communicator, precision: Any, **options: Any) -> Any:
    trainer = distributed(comm, gpt(), precision, **options)
    mine = part(trainer.data, TOKENS.shape[1])
    return trainer.evaluate(*TOKENS[:, mine]), bits(trainer), trainer.predict(TOKENS[0, mine])


@in_full
@pytest.mark.parametrize("precision", FORMATS, ids=str)
def test_evaluation_and_parameters_are_the_same_on_any_number_of_ranks(precision: Precision) -> None:
    loss, digest, outputs = ranks(1, precision)[0]
    wide, other, _ = ranks(1, "float32")[0]
    assert abs(loss - wide) < (1e-2 if precision is NF4 else 1e-3)
    assert digest != other
    for size, options in ((2, {}), (3, {}), (4, {"strategy": "hybrid"}), (2, {"strategy": "ddp"})):
        found = ranks(size, precision, **options)
        assert {one[1] for one in found} == {digest}
        assert {one[0] for one in found} == {found[0][0]}
        assert found[0][0] == pytest.approx(loss, rel=1e-3 if precision.compute == "bf16" else 1e-6)
        if precision.compute == "float32":
            np.testing.assert_allclose(np.concatenate([one[2] for one in found]), outputs, atol=1e-5)


@in_full
def test_one_loss_to_the_last_bit_with_chunks() -> None:
    found = {ranks(size, INT8, chunks=12)[0][:2] for size in (1, 2, 3, 4)}
    assert len(found) == 1


@pytest.mark.parametrize("mesh", [Mesh(shard=1, tensor=2), Mesh(shard=1, pipe=2), Mesh(shard=2, pipe=2), Mesh(2, 2)])
def test_other_axes(mesh: Mesh) -> None:
    want = ranks(1, INT8)[0][0]
    for loss, _, _ in ranks(mesh.size, INT8, mesh=mesh):
        assert loss == pytest.approx(want, rel=1e-4 if mesh.tensor == 2 else 1e-6)  # rows of a part have other scales


@pytest.mark.parametrize("block", [None, 8, 64])
@pytest.mark.parametrize("size", [1, 3])
def test_a_layer_is_within_half_a_scale_of_float32(size: int, block: int | None) -> None:
    x = np.random.default_rng(0).normal(size=(30, 50)).astype("f4")

    def run(comm: Communicator, precision: Any) -> Any:
        trainer = distributed(comm, nn.Linear(50, 20), precision, loss=nn.MSE())
        return trainer.predict(x), trainer.parameters()["weight"].astype("f8")

    (want, weight), (got, kept) = (
        fsdpx.spawn(run, size, p)[0] for p in ("float32", Precision(frozen="int8", block=block))
    )
    width = block or 50
    top = np.stack([np.abs(weight[:, i : i + width]).max(axis=1) for i in range(0, 50, width)], axis=1)
    scale = (top / 127 * (1 + 2.0**-15))[:, np.arange(50) // width]
    assert np.all(np.abs(kept - weight) <= scale / 2)
    noise = 54 * 2.0**-22 * (np.abs(x) @ np.abs(weight).T)
    noise += 2.0**-22 * np.abs(x).max(axis=1, keepdims=True) * np.abs(weight).sum(axis=1)
    assert np.all(np.abs(got - want) <= np.abs(x) @ (scale / 2).T + noise)


def nbytes(shape: tuple[int, ...], precision: Precision) -> int:
    """Codes, filled up to 4 bytes, and scales; of what is no matrix float32."""
    if len(shape) == 1:
        return 4 * shape[0]
    rows, columns = shape
    if precision is NF4:  # half a byte each, a byte for 64 of them, two float32 for 256 of those
        return rows * (-(-(-(-columns // 2) + -(-columns // 64)) // 4) * 4 + 8 * -(-columns // (64 * 256)))
    block = precision.block
    return rows * (-(-columns // 4) * 4 + 4 * (1 if block is None else -(-columns // block)))


@pytest.mark.parametrize("precision", [INT8, FORMATS[1], NF4], ids=str)
def test_memory_and_bytes_on_the_wire_are_the_formula(precision: Precision) -> None:
    """One rank keeps all of it; the ranks of two send each other what they have."""
    model = nn.Chain(nn.Linear(37, 64), nn.GELU(), nn.Linear(64, 11))
    x, y = np.ones((8, 37), "f4"), np.zeros((8, 11), "f4")

    def run(comm: Communicator) -> Any:
        trainer = distributed(comm, model, precision, loss=nn.MSE())
        trainer.reset()
        trainer.evaluate(x, y)
        report, engine = trainer.report(), trainer.engine
        return report.memory, report.traffic, traffic(engine.ran, sizes_of(engine))

    whole = sum(nbytes(shape, precision) for shape in ((64, 37), (11, 64), (64,), (11,)))
    assert fsdpx.spawn(run, 1)[0][0] == {"parameters": whole}
    found = fsdpx.spawn(run, 2)
    assert sum(memory["parameters"] for memory, *_ in found) == whole
    key = ("shard", "all_gather")
    assert sum(counted[key].bytes for _, counted, _ in found) == whole
    for _, counted, predicted in found:
        assert predicted == {key: counted[key]}


def test_a_trunk_in_4_bits_is_half_a_byte_per_weight_and_its_scales() -> None:
    """Adapters train on top; of the trunk's matrices a weight takes 1/2 byte, and 1/64 and 8 for each row beside it."""
    x = np.random.default_rng(0).normal(size=(12, 512)).astype("f4")
    model = nn.lora(nn.Chain(nn.Linear(512, 64, bias=False), nn.GELU(), nn.Linear(64, 512, bias=False)), 2, targets="*")

    def run(comm: Communicator) -> Any:
        trainer = distributed(comm, model, NF4, (), loss=nn.MSE())
        mine = part(comm, 12)
        before = trainer.parameters()
        losses = [trainer.step(x[mine], x[mine]) for _ in range(4)]
        after = trainer.parameters()
        changed = {name for name in after if not np.array_equal(before[name], after[name])}
        return losses, changed, trainer.report().memory["parameters"]

    found = fsdpx.spawn(run, 2)
    losses, changed, _ = found[0]
    assert losses[3] < losses[0]
    assert changed == {f"{i}.lora_{low}.weight" for i in (0, 2) for low in "AB"}
    weights, adapters, rows = 2 * 512 * 64, 2 * 2 * (512 + 64), 512 + 64
    trunk = sum(memory for *_, memory in found) - 4 * adapters
    scales = weights / 64 + 8 * rows
    assert abs(trunk - weights / 2 - scales) < 0.05 * (weights / 2 + scales)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_the_plan_is_what_is_used(strategy: str) -> None:
    def run(comm: Communicator) -> Any:
        trainer = distributed(comm, gpt(), frozen=["blocks.*"], strategy=strategy)
        trainer.step(*TOKENS[:, part(comm, 12)])
        return trainer.report().memory

    batch = ((6, 16), "int64")
    dry = fsdpx.dry_run(
        gpt(), batch, batch, ranks=2, loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), precision=INT8,
        strategy=strategy, group_bytes=2048, frozen=["blocks.*"],
    )  # fmt: skip
    assert fsdpx.spawn(run, 2)[0] == dry.report.memory


@pytest.mark.parametrize("precision", [*FORMATS[:2], NF4], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_trained_around_it_trains_as_around_the_same_numbers_in_float32(size: int, precision: Any) -> None:
    """The same losses and gradients as of a float32 trainer that was given the values of the matrices."""

    def run(comm: Communicator) -> Any:
        some = ["*.weight"]
        kept = distributed(comm, gpt(), precision, some)
        wide = distributed(comm, gpt(), "float32", some)
        wide.load_parameters(kept.parameters())
        mine = part(comm, 12)
        losses = [[t.step(*TOKENS[:, mine]) for _ in range(3)] for t in (kept, wide)]
        return losses, kept.parameters(), wide.parameters()

    losses, kept, wide = fsdpx.spawn(run, size)[0]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]
    for name, array in kept.items():
        np.testing.assert_allclose(array, wide[name], rtol=1e-4, atol=1e-6, err_msg=name)


@in_full
@pytest.mark.parametrize("kept", [INT8, NF4], ids=str)
def test_checkpoints_hold_float32_and_come_back_to_the_bit(kept: Precision, tmp_path: Path) -> None:
    def save(comm: Communicator) -> Any:
        trainer = distributed(comm, gpt(), kept, seed=7)
        trainer.save(tmp_path / "a", background=comm.size == 3)
        trainer.wait_saved()
        return bits(trainer)

    def load(comm: Communicator, precision: Any, way: str) -> Any:
        trainer = distributed(comm, gpt(), precision)
        getattr(trainer, way)(tmp_path / "a")
        return bits(trainer)

    for writers in (2, 3):
        digest = fsdpx.spawn(save, writers)[0]
        for precision, way, size in ((kept, "load", 1), (kept, "load_weights", 4), ("float32", "load_weights", 2)):
            assert set(fsdpx.spawn(load, size, precision, way)) == {digest}


def test_weights_of_a_trained_model_are_stored_as_they_are_loaded() -> None:
    def run(comm: Communicator) -> Any:
        trained = distributed(comm, gpt(), "float32", ())
        mine = part(comm, 12)
        for _ in range(3):
            trained.step(*TOKENS[:, mine])
        kept = distributed(comm, gpt())
        kept.load_parameters(trained.parameters())
        again = bits(kept)
        restore = kept.remember()
        kept.load_parameters({name: array * 2 for name, array in trained.parameters().items()})
        restore()
        assert bits(kept) == again
        return trained.evaluate(*TOKENS[:, mine]), kept.evaluate(*TOKENS[:, mine])

    for trained, kept in fsdpx.spawn(run, 2):
        assert kept == pytest.approx(trained, rel=1e-3)


def test_nan_is_refused_by_name_on_all_ranks() -> None:
    def run(comm: Communicator) -> str:
        trainer = distributed(comm, nn.Chain(nn.Linear(6, 4), nn.Linear(4, 4)), loss=nn.MSE())
        values = trainer.parameters()
        values["1.weight"][3, 2] = np.nan
        with pytest.raises(CheckpointError) as caught:
            trainer.load_parameters(values)
        return str(caught.value)

    found = fsdpx.spawn(run, 2)
    assert found[0] == found[1]
    assert "1.weight cannot be stored as int8: NaN or Inf among the elements" in found[0]


def test_layers_that_cannot_say_so_by_name(capsys: Any) -> None:
    model = nn.Chain(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 5))
    fsdpx.spawn(lambda comm: distributed(comm, model).report(), 2)
    said = [line for line in capsys.readouterr().err.splitlines() if "int8" in line]
    assert said == ["fsdpx: int8 is not for 0.weight of Conv2d: kept in float32"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frozen": "int4"}, r"Precision\(frozen='int4', compute='float32'\): choose None or int8 or nf4"),
        ({"frozen": "nf4", "block": 64}, r"Precision\(block=64, frozen='nf4'\): blocks are of frozen='int8'"),
        ({"compute": "float64", "frozen": "nf4"}, "nf4 goes with float32 or bf16"),
        ({"compute": "float64", "frozen": "int8"}, "int8 goes with float32 or bf16"),
        ({"compute": "bf16", "master": "bf16", "frozen": "int8"}, "beside int8 a master is float32"),
        ({"block": 64}, r"Precision\(block=64\): blocks are of frozen='int8'"),
        ({"frozen": "int8", "block": 4}, r"Precision\(block=4\): a whole number of elements, 8 or more"),
        ({"frozen": "int8", "block": 64.0}, r"Precision\(block=64.0\): a whole number of elements, 8 or more"),
    ],
)
def test_formats_that_there_are_not(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Precision(**options)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (nn.Linear(4, 4), {"frozen": ()}, r"no parameter is frozen for good; say distribute\(frozen=\['\*'\]\)"),
        (nn.Linear(4, 4), {"frozen": ["bias"]}, r"nothing of what is frozen .* \(there is no matrix among them\)"),
        (nn.Conv2d(3, 4, 3), {}, r"can be kept in 8 or 4 bits \(weight of Conv2d\); Linear and Embedding layers can"),
        (nn.Linear(4, 4), {"elastic": True}, "elastic ranks do not hand on packed matrices"),
    ],
)
def test_trainers_that_there_are_not(model: nn.Layer, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fsdpx.spawn(lambda comm: distributed(comm, model, **({"loss": nn.MSE()} | options)), 1)


def test_matrices_that_share_a_parameter_with_a_layer_that_cannot_stay_wide() -> None:
    class Other(nn.Linear):
        def specs(self) -> dict[str, nn.Spec]:
            return {name: nn.Spec(spec.shape, spec.init) for name, spec in super().specs().items()}

    def run(comm: Communicator, second: nn.Layer) -> Any:
        model = nn.Chain(nn.Linear(6, 6), second, nn.Linear(6, 6), ties={"1.weight": "0.weight"})
        pages = distributed(comm, model, loss=nn.MSE()).placement.layout.pages
        return {field.name for page in pages for field in page.fields if page.packing is not None}

    assert fsdpx.spawn(run, 1, Other(6, 6)) == [{"2.weight"}]
    assert fsdpx.spawn(run, 1, nn.Linear(6, 6)) == [{"0.weight", "2.weight"}]


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_under_mpi(backend: str, strategy: str) -> None:
    """In windows, where gathers move nothing, and by messages."""
    want = ranks(1, INT8, chunks=12)[0][:2]
    with open_world(backend) as comm:
        assert evaluated(comm, INT8, strategy=strategy, chunks=12)[:2] == want
