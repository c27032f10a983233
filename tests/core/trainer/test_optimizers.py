"""Optimizers and averages of parameters in whole trainings."""

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from bits import Bits, bits
from models import part
from present import needs
from ranks import from_rank_0
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.array.sums import EXPANSION_PARTS
from fsdpx.core.comm import Communicator
from fsdpx.core.program import Traffic
from fsdpx.errors import CheckpointError, ConfigError

X, Y = (np.random.default_rng(7).standard_normal((12, n)).astype(np.float32) for n in (6, 3))
OPTIMIZERS = {"LAMB": optim.LAMB(lr=1e-2), "Muon": optim.Muon(lr=1e-2)}
ALL = pytest.mark.parametrize("name", OPTIMIZERS)


def make(comm: Communicator, name: str, **options: Any) -> fsdpx.Trainer:
    model = nn.Sequential(nn.Linear(6, 70), nn.GELU(), nn.Linear(70, 50), nn.GELU(), nn.Linear(50, 3))
    options = {"optimizer": OPTIMIZERS[name], "reproducible_chunks": 12, **options}
    return model.as_distributed(loss=nn.MSELoss(), comm=comm, **options)


def own_rows(trainer: fsdpx.Trainer) -> tuple[np.ndarray, np.ndarray]:
    mine = part(trainer.data_group, 12)
    return X[mine], Y[mine]


def train(trainer: fsdpx.Trainer, steps: int) -> Bits:
    for _ in range(steps):
        trainer.step(*own_rows(trainer))
    return bits(trainer)


@pytest.mark.parametrize(("name", "precision"), [*product(OPTIMIZERS, ["float32", "bf16-true"]), ("Muon", "bf16")])
def test_with_chunks_the_bits_are_the_same_at_any_world_size(name: str, precision: str) -> None:
    meshes = [(1, {}), (3, {}), (4, {"mesh": Mesh(replica=2)}), (5, {}), (2, {"strategy": "zero1", "group_bytes": 0})]
    seen = [spawn(lambda c, o=o: train(make(c, name, precision=precision, **o), 4), n) for n, o in meshes]
    assert len({one for ranks in seen for one in ranks}) == 1


@needs("plan")
@pytest.mark.parametrize(("optimizer", "nbytes"), [(optim.Muon(), 4 * 32), (optim.AdamW(), 0)])
def test_ranks_send_parts_of_matrices_as_arrays(optimizer: Any, nbytes: int) -> None:
    """One message per page and update, of the bytes that are predicted; each of two ranks has half of a matrix."""
    options: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": optimizer, "tune": False, "strategy": "fsdp"}
    x = np.ones((2, 8), np.float32)

    def run(comm: Communicator) -> Any:
        trainer = nn.Linear(8, 8, bias=False).as_distributed(comm=comm, **options)
        trainer.inspect.placement.axes.shard.all_gather_bytes = None  # no objects are sent
        trainer.step(x, x)
        return trainer.report()

    reports = [*spawn(run, 2), fsdpx.dry_run(nn.Linear(8, 8, bias=False), x, x, ranks=2, **options).report]
    wanted = Traffic(1, nbytes) if nbytes else None
    for report in reports:
        assert report.traffic.get(("shard", "all_to_all")) == report.predicted.get(("shard", "all_to_all")) == wanted


@pytest.mark.parametrize("mesh", [Mesh(shard=2), Mesh(shard=2, tensor=2)])
def test_lamb_sends_its_norms_as_arrays(mesh: Mesh) -> None:
    """Two sums of each of four parameters go to the other rank of the shard axis, and those of both over the tensor
    axis."""
    width = mesh.width_of("tensor")
    plan = {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel} if width > 1 else None
    options: dict[str, Any] = {"loss": nn.MSELoss(), "tune": False, "mesh": mesh, "tensor_plan": plan}

    def run(comm: Communicator) -> None:
        found = []
        for optimizer in (optim.LAMB(), optim.AdamW()):
            model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
            trainer = model.as_distributed(comm=comm, optimizer=optimizer, **options)
            for axis in (trainer.inspect.placement.axes.shard, trainer.inspect.placement.axes.tensor):
                axis.all_gather_bytes = None  # no objects are sent
            trainer.step(X, Y)
            report = trainer.report()
            assert {key: report.traffic[key] for key in report.predicted} == report.predicted
            found.append({axis: report.predicted.get((axis, "all_gather")) for axis in ("shard", "tensor")})
        lamb, adamw = found
        assert lamb["shard"] == Traffic(adamw["shard"].calls + 1, adamw["shard"].bytes + one)
        tensor = adamw["tensor"] or Traffic()
        assert lamb["tensor"] == (Traffic(tensor.calls + 1, tensor.bytes + 2 * one) if width > 1 else None)

    one = 8 * 2 * EXPANSION_PARTS * 4
    spawn(run, 2 * width)


@ALL
def test_a_checkpoint_goes_on_at_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    def run(comm: Communicator, saves: bool) -> Bits:
        trainer = make(comm, name)
        if saves:
            train(trainer, 2)
            trainer.save(tmp_path / "a")
        else:
            trainer.load(tmp_path / "a")
        return train(trainer, 2)

    assert set(spawn(run, 3, True)) == set(spawn(run, 2, False))


@needs("elastic")
@ALL
def test_a_state_is_re_cut_in_memory(name: str) -> None:
    def run(comm: Communicator) -> Bits:
        trainer = make(comm, name, elastic=fsdpx.ElasticConfig(ranks=3, every=1))
        for ranks in (3, 3, 2, 2):
            trainer.call_runner.resize_to(ranks)
            trainer.step(X, Y)
            assert trainer.call_runner.training_ranks == ranks
        return bits(trainer)

    assert spawn(run, 3, survive=True) == spawn(lambda c: train(make(c, name), 4), 1) * 3


@on_ranks(2)
def test_what_does_not_fit_is_named(comm: Communicator, tmp_path: Path) -> None:
    plan = {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel}
    with pytest.raises(ConfigError, match="Muon needs full parameters, the tensor axis of 2 ranks shards t"):
        make(comm, "Muon", mesh=Mesh(tensor=2), reproducible_chunks=None, tensor_plan=plan)
    make(comm, "LAMB").save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="LAMB with slots m, v in the checkpoint"):
        make(comm, "LAMB", optimizer=optim.SGD()).load(tmp_path / "a")


def trained_alone(name: str) -> Bits:
    return spawn(lambda comm: train(make(comm, name), 2), 1)[0]


@pytest.mark.world
@pytest.mark.mpi
@ALL
def test_processes_find_the_bits_of_one(world: Communicator, name: str) -> None:
    with make(world, name, group_bytes=0) as trainer:
        found = train(trainer, 2)
    assert found == from_rank_0(world, trained_alone, name)


def make_averaging(comm: Communicator, **options: Any) -> fsdpx.Trainer:
    options = {"optimizer": optim.AdamW(lr=1e-2), "group_bytes": 0, "average": fsdpx.EMA(0.8), **options}
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))
    return model.as_distributed(loss=nn.MSELoss(), comm=comm, **options)


def averages(trainer: fsdpx.Trainer) -> Bits:
    return Bits(trainer.parameters(weights="average"))


def train_averaging(trainer: fsdpx.Trainer, steps: int = 5) -> list[dict[str, np.ndarray]]:
    """The parameters before the first step and after each."""
    found = [trainer.parameters()]
    for _ in range(steps):
        trainer.step(*own_rows(trainer))
        found.append(trainer.parameters())
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("average", [fsdpx.EMA(0.8), fsdpx.SWA(start=2, every=2)])
@on_ranks(2)
def test_they_are_the_means_of_what_training_went_through(comm: Communicator, strategy: str, average: Any) -> None:
    trainer = make_averaging(comm, strategy=strategy, average=average)
    path = train_averaging(trainer)
    mine, last = trainer.parameters(weights="average"), trainer.parameters()
    for name, array in mine.items():
        if isinstance(average, fsdpx.SWA):
            want = (path[2][name] + path[4][name]) / 2
        else:
            want = path[1][name]
            for now in path[2:]:
                want = 0.8 * want + 0.2 * now[name]
        np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(last[name], path[-1][name])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_exponential_mean_is_that_of_pytorch(strategy: str) -> None:
    """It begins with the parameters after the first step; those before it, drawn or loaded, do not count."""
    swa = pytest.importorskip("torch.optim.swa_utils")
    torch = pytest.importorskip("torch")

    def run(comm: Communicator) -> tuple[list[Any], Any]:
        trainer = make_averaging(comm, strategy=strategy, precision="float64")
        trainer.load_parameters({name: array + 1 for name, array in trainer.parameters().items()})
        return train_averaging(trainer), trainer.parameters(weights="average")

    path, found = spawn(run, 2)[0]
    there = torch.nn.ParameterDict({name.replace(".", "_"): torch.tensor(a) for name, a in path[0].items()})
    mean = swa.AveragedModel(there, multi_avg_fn=swa.get_ema_multi_avg_fn(0.8))
    for now in path[1:]:
        for name, array in now.items():
            there[name.replace(".", "_")].data = torch.tensor(array)
        mean.update_parameters(there)
    for name, array in found.items():
        want = mean.module[name.replace(".", "_")].detach().numpy()
        np.testing.assert_allclose(array, want, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_evaluation_and_prediction_with_them(comm: Communicator) -> None:
    """As of a trainer that has them for parameters; training goes on as if nobody had looked."""
    trainer, other, again = (make_averaging(comm) for _ in range(3))
    train_averaging(trainer)
    x, y = own_rows(trainer)
    before = bits(trainer)
    loss, output = trainer.evaluate(x, y, weights="average"), trainer.predict(x, weights="average")
    other.load_parameters(trainer.parameters(weights="average"))
    assert loss == other.evaluate(x, y) != trainer.evaluate(x, y)
    np.testing.assert_array_equal(output, other.predict(x))
    assert bits(trainer) == before
    train_averaging(again)
    assert trainer.step(x, y) == again.step(x, y)
    assert bits(trainer) == bits(again)


@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16-true"])
def test_with_chunks_they_have_the_same_bits_at_any_world_size(precision: str) -> None:
    def run(comm: Communicator, mesh: Mesh | None) -> Bits:
        trainer = make_averaging(comm, reproducible_chunks=12, precision=precision, mesh=mesh)
        train_averaging(trainer, 3)
        return averages(trainer)

    first, *others = (spawn(run, n, mesh)[0] for n, mesh in ((1, None), (3, None), (4, Mesh(replica=2))))
    assert others == [first] * 2


@needs("plan")
def test_memory_is_that_of_one_more_slot() -> None:
    def run(comm: Communicator) -> int:
        trainer = make_averaging(comm)
        own = sum(page.own_range.size for page in trainer.inspect.placement.pages.values())
        assert trainer.report().memory["averages"] == 4 * own
        assert trainer.report().memory["optimizer"] == 8 * own
        return own

    whole = sum(spawn(run, 2))
    model, given = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)), {"average": fsdpx.SWA()}
    dry = fsdpx.dry_run(model, X, Y, ranks=1, loss=nn.MSELoss(), optimizer=optim.AdamW(), **given)
    assert dry.report.memory["averages"] == 4 * whole


def test_both_can_be_saved(tmp_path: Path) -> None:
    """A checkpoint has what is needed to go on, averages included; one of averages has weights alone."""

    def save(comm: Communicator) -> tuple[Bits, Bits]:
        trainer = make_averaging(comm)
        train_averaging(trainer)
        trainer.save(tmp_path / "all")
        trainer.save(tmp_path / "average", weights="average")
        trainer.save(tmp_path / "behind", weights="average", background=True)
        trainer.call_runner.wait_for_background_save()
        return averages(trainer), train(trainer, 1)

    def load(comm: Communicator) -> Bits:
        trainer = make_averaging(comm, strategy="zero1")
        trainer.load(tmp_path / "all")
        assert averages(trainer) == means
        for name in ("average", "behind"):
            other = make_averaging(comm, average=None)
            other.load_parameters(tmp_path / name)
            assert bits(other) == means
            with pytest.raises(CheckpointError, match="it holds only weights; use load_parameters"):
                other.load(tmp_path / name)
        with pytest.raises(CheckpointError, match="AdamW with slots m, v, average in the checkpoint, AdamW with slots"):
            make_averaging(comm, average=None).load(tmp_path / "all")
        return train(trainer, 1)

    (means, after), *_ = spawn(save, 2)
    assert not (tmp_path / "average" / "state.safetensors").exists()
    assert set(spawn(load, 2)) == {after}


@on_ranks(2)
def test_parameters_that_are_frozen_for_a_while_keep_their_average(comm: Communicator) -> None:
    trainer = make_averaging(comm)
    trainer.freeze("0.*")
    first = train_averaging(trainer, 2)[0]
    found = trainer.parameters(weights="average")
    np.testing.assert_array_equal(found["0.weight"], first["0.weight"])
    assert not np.array_equal(found["2.weight"], first["2.weight"])


@on_ranks(1)
def test_an_error_puts_the_parameters_back(comm: Communicator) -> None:
    trainer = make_averaging(comm)
    train_averaging(trainer)
    before = bits(trainer)
    trainer.inspect.engine.add_observer(Mock(side_effect=RuntimeError("on purpose")))
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.evaluate(*own_rows(trainer), weights="average")
    trainer.inspect.engine.remove_observers(*trainer.inspect.engine.added_observers)
    assert bits(trainer) == before


@on_ranks(2)
def test_what_cannot_be_is_refused(comm: Communicator) -> None:
    trainer = make_averaging(comm, average=None)
    with pytest.raises(ConfigError, match=r"no average is kept; say distribute\(..., average=fsdpx.EMA\(0.999\)\)"):
        trainer.evaluate(*own_rows(trainer), weights="average")
    with pytest.raises(ConfigError, match="weights='ema': choose parameters or average"):
        trainer.predict(X, weights="ema")
    with pytest.raises(ConfigError, match="weights alone have no position in the data; leave loader out"):
        trainer.save("nowhere", loader=object(), weights="average")
    with pytest.raises(ConfigError, match=r"average=0.9: fsdpx.EMA\(...\) or fsdpx.SWA\(...\) is needed"):
        make_averaging(comm, average=0.9)
    differs = r"ranks differ in average: rank 0 has EMA\(decay=0\), rank 1 has EMA\(decay=0.1\)"
    with pytest.raises(ConfigError, match=differs):
        make_averaging(comm, average=fsdpx.EMA(comm.rank / 10 if comm.rank else 0))
