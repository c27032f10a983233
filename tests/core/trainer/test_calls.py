"""Which calls a trainer takes, in what order and with what: errors are the same on all ranks."""

import gc
import os
import re
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import alike
from present import needs
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.data import ArrayDataset, DataLoader
from fsdpx.errors import CheckpointError, ConfigError, DataError, DesyncError

X, Y = np.arange(24.0).reshape(4, 6), np.array([0, 1, 2, 0])


def trainer(comm: Communicator, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    return model.as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)


CALLS: dict[str, Callable[[Any, Path], object]] = {
    "step": lambda t, to: t.step(X, Y),
    "accumulate": lambda t, to: t.accumulate(X, Y),
    "evaluate": lambda t, to: t.evaluate(X, Y),
    "predict": lambda t, to: t.predict(X),
    "forward": lambda t, to: t.forward(X),
    "update": lambda t, to: t.update(),
    "gradients": lambda t, to: t.gradients(),
    "parameters": lambda t, to: t.parameters(),
    "load_parameters": lambda t, to: t.load_parameters(to),
    "save": lambda t, to: t.save(to / "saved"),
    "wait_for_background_save": lambda t, to: t.call_runner.wait_for_background_save(),
    "load": lambda t, to: t.load(to),
    "early stopping": lambda t, to: t.call_runner.all_reduce_max(np.zeros(2), "early stopping"),
    "many values": lambda t, to: t.call_runner.all_reduce_max(np.zeros(20), "many values"),
    "resume": lambda t, to: t.call_runner.run_on_rank0("resume", lambda: 1),
    "close": lambda t, to: t.close(),
    "backward": lambda t, to: t.backward(np.ones((4, 3))),
    "distribute": lambda t, to: trainer(t.call_runner.world),
}
DIFFERENT = "DesyncError: ranks called different methods: "


@pytest.mark.parametrize(
    ("call", "other"), [(call, other) for call in CALLS for other in ("step", "save") if call != other]
)
def test_a_rank_that_calls_something_else_is_named_on_all(tmp_path: Path, call: str, other: str) -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm, strategy="ddp")
        if "accumulate" in (call, other) or call in ("update", "gradients"):
            t.accumulate(X, Y)
        if call == "backward":
            t.forward(X)
        CALLS[call if comm.rank == 1 else other](t, tmp_path)

    said = f"{DIFFERENT}ranks 0, 2: {other}; rank 1: {call}. All ranks make the same calls, in the same order"
    assert alike(3, act) == said


@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(tensor=1, shard=2)])
def test_the_same_calls_on_other_meshes(mesh: Mesh) -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm, mesh=mesh)
        t.step(X, Y)
        t.evaluate(X, Y) if comm.rank else t.step(X, Y)

    assert alike(2, act).startswith(f"{DIFFERENT}rank 0: step; rank 1: evaluate.")


@needs("elastic")
def test_idle_ranks_of_an_elastic_trainer_are_told() -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm, mesh=Mesh(pipe=2), elastic=True)
        t.step(X, Y)
        t.step(X, Y) if t.call_runner.is_training else t.evaluate(X, Y)

    with pytest.raises(DesyncError, match="ranks called different methods: rank 0: step; rank 2: evaluate"):
        spawn(act, 3)


def test_a_good_batch_against_a_bad_one_is_still_the_error_of_the_batch() -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm)
        t.step(X, Y + 7) if comm.rank == 1 else t.save("nowhere")

    with pytest.raises(DataError, match="rank 1: CrossEntropyLoss"):
        spawn(act, 3)


@on_ranks(3)
def test_the_largest_of_few_and_of_many_values(comm: Communicator) -> None:
    largest = trainer(comm).call_runner.all_reduce_max
    few, whole = np.array([comm.rank - 5.5, -comm.rank]), np.array([2**60 + comm.rank])
    many = np.arange(20.0) * (-1) ** comm.rank
    found = [largest(values, "a call").tolist() for values in (few, whole, many)]
    assert found == [[-3.5, 0.0], [2**60 + 2], np.arange(20.0).tolist()]


MLP = nn.Sequential(
    nn.Linear(6, 8), nn.LayerNorm(8), {"bn1": nn.BatchNorm(8)}, {"normal": nn.Linear(8, 8)}, {"ln": nn.RMSNorm(8)}
)
ONE = nn.Sequential(nn.Linear(6, 8))
GROUPS = {"heads.*": {"lr_scale": 2.0}}


def made(model: Any = MLP, optimizer: Any = None, **options: Any) -> Any:
    return model.as_distributed(loss=nn.MSELoss(), optimizer=optimizer or optim.SGD(lr=0.1), **options)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: made(optimizer=optim.AdamW(groups={**optim.no_decay, "norml.*": {}})), "AdamW(groups=): 'norml.*'"),
        pytest.param(
            lambda: made(ONE, strategy=fsdpx.LocalSGD(2, optim.SGD(lr=1, groups=GROUPS))),
            "SGD(groups=): 'heads.*'",
            marks=needs("asynchronous"),
        ),
        (lambda: made(optimizer=optim.Muon(exclude=["heads.*"])), "Muon(exclude=): 'heads.*'"),
        (lambda: made(frozen=["norml.weight"]), "frozen: 'norml.weight'"),
        (lambda: made(compression={"norml.*": "bf16"}), "compression: 'norml.*'"),
        (lambda: made().freeze("norml.*"), "freeze: 'norml.*'"),
        (lambda: made().parameters(names=["norml.weight"]), "parameters(names=): 'norml.weight'"),
        (lambda: nn.Sequential(nn.Linear(2, 2), frozen=["1.*"]), "Sequential(frozen=): '1.*'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(use: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        use()
    said, _, near = str(caught.value).partition(" matches no parameter; ")
    assert said == text
    assert near.startswith("the nearest are 'normal." if "norml" in text else "there are '")


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: made(frozen=5), "frozen=5: a list of name patterns is needed"),
        (lambda: made().freeze(5), "freeze=(5,): a list of name patterns is needed"),
        (lambda: nn.Sequential(ONE, frozen={"0.*": True}), "frozen={'0.*': True}: a list of name patterns is needed"),
        (lambda: made().parameters(names=5), "parameters(names=5): a list of texts, or None is needed"),
    ],
)
def test_what_is_no_list_is_an_error(use: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        use()


def test_names_of_files_that_nothing_has_are_an_error_with_the_nearest() -> None:
    wrong = r"rename: 'encodr.\*' matches no name there; the nearest are 'encoder.w'$"
    with pytest.raises(CheckpointError, match=wrong):
        made().load_parameters({"encoder.w": np.zeros(3)}, strict=False, rename={"encodr.*": "0.*"})


def spared(trainer: Any) -> set[str]:
    """The parameters without weight decay, by the optimizer's own groups."""
    found, groups = set(), trainer.inspect.placement.optimizer.groups
    for part in trainer.inspect.placement.segments_of_own_shard_by_page.values():
        runs = zip(part.items, part.hyperparameters_per_segment(groups), strict=True)
        found |= {segment.name for segment, run in runs if run.get_weight_decay(0.1) == 0}
    return found


MODELS: dict[str, tuple[Any, str]] = {
    "chain": (MLP, "0.bias 1.weight 1.bias bn1.weight bn1.bias normal.bias ln.weight"),
    "frozen bias": (nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8, bias=False)), "1.weight"),
    "llama": (nn.Llama(31, 16, 1, 2, 8), "blocks.0.norm1.weight blocks.0.norm2.weight norm.weight"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_no_decay_is_the_list_by_hand(name: str, ranks: int) -> None:
    model, names = MODELS[name]
    found = spawn(lambda comm: spared(made(model, optim.AdamW(groups=optim.no_decay), comm=comm)), ranks)
    assert set().union(*found) == set(names.split())


@pytest.mark.parametrize("model", [nn.GPT(31, 16, 2, 2, 8), nn.Bert(31, 16, 2, 2, 8), nn.ViT(8, 4, 16, 1, 2, 5)])
def test_no_decay_of_models_whose_norms_are_called_so(model: Any) -> None:
    trainer = made(model, optim.AdamW(groups=optim.no_decay))
    by_name = {n for n in trainer.inspect.placement.layout.specs if n.endswith("bias") or "norm" in n or ".ln_" in n}
    assert spared(trainer) == by_name


@needs("interop")
def test_no_decay_knows_the_norms_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from fsdpx.ext.interop.torch import from_torch

    class OwnRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: Any) -> Any:
            return x * self.scale

    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GroupNorm(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), OwnRMSNorm()
    )
    names = {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.bias", "4.scale"}
    for model in (from_torch(net), from_torch(net, torch.zeros(4, 6))):
        assert spared(made(model, optim.AdamW(groups=optim.no_decay))) == names


KINDS: tuple[dict[str, Any], ...] = ({}, {"strategy": "async"}, {"strategy": "ddp"})


def held() -> tuple[int, int]:
    """Open files of this process, and its mappings of memory that ranks share."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/dev/shm/fsdpx-")


def dropped(comm: Communicator, kinds: tuple[dict[str, Any], ...] = KINDS) -> None:
    """Make trainers and drop them, on all ranks: after one of each kind, one more of each leaves nothing."""
    before, times = None, 2 * len(kinds) + 1
    for i in range(times):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        trainer: Any = model.as_distributed(
            loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1, momentum=0.9), comm=comm, **kinds[i % len(kinds)]
        )
        trainer.step(np.ones((2, 4)), np.ones((2, 1)))
        del trainer
        gc.collect()
        comm.barrier().wait()  # thread ranks have the files of the process in common: one of them counts
        if i == len(kinds) and comm.rank == 0:
            before = held()
        if i == times - 1 and comm.rank == 0:
            assert held() == before
        comm.barrier().wait()


def too_many(comm: Communicator) -> None:
    """All ranks get the same error, with the remedy, where one of them has no more files."""
    kept, hard = [], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held()[0] + 7, hard))
    with pytest.raises(fsdpx.errors.ConfigError, match=r"rank 1: \d+ bytes .* Too many open files; close\(\) trainers"):
        kept.extend(comm.window(8) for _ in range(8))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    comm.window(8).close()


@pytest.fixture
def settled() -> None:
    """What other tests have left is not looked through each time that a trainer is dropped: that took half a minute."""
    gc.collect()
    gc.freeze()


@needs("asynchronous")
@pytest.mark.usefixtures("settled")
def test_among_threads() -> None:
    spawn(dropped, 2, KINDS[:2])


@needs("offload")
@pytest.mark.usefixtures("settled")
def test_a_folder_of_offloaded_state_is_free_again(tmp_path: Path) -> None:
    spawn(dropped, 1, ({"offload": fsdpx.OffloadConfig(tmp_path)},))


@pytest.mark.jobs
def test_among_processes(tmp_path: Path) -> None:
    from trials import job  # ranks run this file without the folders of the tests

    folders = Path(__file__).parents[2], Path(__file__).parents[1] / "engine"
    done = job(tmp_path, Path(__file__).read_text(), ranks=2, PYTHONPATH=os.pathsep.join(map(str, folders)))
    assert done.status == 0, done.out + done.err


if __name__ == "__main__":
    dropped(fsdpx.init())
    too_many(fsdpx.init())


def said(batches: Any, size: int = 2, steps: int = 1, **options: Any) -> list[str]:
    """What `batches(data_group, step)` makes each rank warn of."""

    def run(comm: Communicator) -> None:
        trainer = made(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), **options)
        for n in range(steps):
            trainer.step(*batches(trainer.data_group, n))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        spawn(run, size)
    return [str(one.message) for one in found]


def draw(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 3)), rng.normal(size=(rows, 2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_same_batch_on_all_ranks_is_named_once_with_the_remedy(strategy: str) -> None:
    (text,) = said(lambda comm, n: draw(8, n), size=3, steps=3, strategy=strategy)
    assert text == (
        "fsdpx: all 3 data ranks train on the same samples (8 so far), so together they do what one rank would: give "
        "each its part of the global batch, as DataLoader(comm=trainer.data_group) does, or cut it by "
        "trainer.data_group.rank and trainer.data_group.size"
    )


def test_small_batches_are_named_when_chance_is_ruled_out() -> None:
    assert not said(lambda comm, n: draw(3, n), steps=2)
    assert len(said(lambda comm, n: draw(3, n), steps=3)) == 1


def test_with_a_pipe_the_data_ranks_count() -> None:
    options = {"mesh": Mesh(replica=2, pipe=2), "group_bytes": 0}
    assert not said(lambda group, n: draw(8, group.rank), 4, **options)
    assert len(said(lambda group, n: draw(8), 4, **options)) == 1


def test_constant_idle_and_different_batches_are_fine() -> None:
    assert not said(lambda comm, n: (np.ones((8, 3)), np.zeros((8, 2))), steps=3)
    assert not said(lambda comm, n: draw(8 if comm.rank == 0 else 0), steps=3)
    assert not said(lambda comm, n: draw(8, comm.rank), steps=2)
    assert not said(lambda comm, n: draw(4, comm.rank if n == 0 else 7), steps=5)  # it was right once
    assert not said(lambda comm, n: draw(8), size=1)


def test_the_loader_without_comm_needs_no_warning() -> None:
    def run(comm: Communicator) -> list[float]:
        trainer = nn.Linear(3, 2).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1))
        return [trainer.step(x, y) for x, y in DataLoader(ArrayDataset(*draw(32)), 16, shuffle=True)]

    alone = spawn(run, 1)[0]
    for losses in spawn(run, 4):
        assert losses == pytest.approx(alone, rel=1e-6)
