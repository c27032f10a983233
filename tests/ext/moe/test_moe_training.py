"""Models with experts train as one process does, wherever experts and samples are."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few
from models import part
from ranks import from_rank_0

from fsdpx import Mesh, Trainer, dry_run, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.ext.observe.report import ReportSummary
from fsdpx.ext.observe.routing import ExpertLoad
from fsdpx.testing import assert_close

SAMPLES, STEPS = 4, 2


def make(comm: Communicator, model: nn.Layer, **options: Any) -> Trainer:
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.SGD(lr=0.1), "precision": "float64", **options}
    return model.as_distributed(comm=comm, **given)


def train_experts(comm: Communicator, **options: Any) -> tuple[dict[str, np.ndarray], ReportSummary, Any]:
    """Parameters after two steps. The balancing loss is of a microbatch: data ranks share two of them."""
    model = nn.Llama(31, 8, 2, 2, 8, hidden=6, experts=5, balance=0.1)
    options = {"optimizer": optim.AdamW(lr=1e-2), "clip_norm": 0.5, "group_bytes": 600, **options}
    trainer = make(comm, model, seed=3, **options)
    mine = part(trainer.data_group, SAMPLES)
    for step in range(STEPS):
        text = np.random.default_rng(step).integers(0, 31, (SAMPLES, 9))
        trainer.step(text[mine, :-1], text[mine, 1:])
    return trainer.parameters(), trainer.inspect.gather_summary(), trainer.report()


@lru_cache
def alone(parts: int) -> tuple[dict[str, np.ndarray], ReportSummary, Any]:
    return spawn(lambda comm: train_experts(comm, microbatches=parts), 1)[0]


PLACES: dict[str, dict[str, Any]] = {
    "experts on 2": {"mesh": Mesh(tensor=2, shard=1), "microbatches": 2},
    "on 2, fsdp": {"mesh": Mesh(tensor=2, shard=2), "strategy": "fsdp"},
    "on 4, sequences in a ring": {"mesh": Mesh(tensor=4, shard=1), "sequence": "ring", "microbatches": 2},
    "on 2, pipe": {"mesh": Mesh(tensor=2, pipe=2, shard=1), "microbatches": 2, "schedule": "1f1b", "recompute": "all"},
    "on 2, replicas": {"mesh": Mesh(tensor=2, replica=2, shard=1), "strategy": "ddp", "sequence": "ulysses"},
    "on 4, samples": {"mesh": Mesh(tensor=4, shard=1), "sequence": "samples", "microbatches": 2},
    "on 2, samples, pipe": {
        "mesh": Mesh(tensor=2, pipe=2, shard=1), "sequence": "samples", "microbatches": 2, "schedule": "zb-h1",
    },
    "on 2, samples, fsdp": {"mesh": Mesh(tensor=2, shard=2), "sequence": "samples", "strategy": "fsdp"},
    "on 2, experts alone": {
        "mesh": Mesh(tensor=2, shard=1), "tensor_plan": {"blocks.*.mlp": nn.sharding.LayerDefault}, "microbatches": 2,
    },
    "on 2, zero bubbles": {
        "mesh": Mesh(tensor=2, pipe=2, shard=1), "microbatches": 2, "schedule": "zb-h1", "sequence": "parallel",
    },
    "whole, parts": {
        "mesh": Mesh(tensor=2, shard=1), "tensor_plan": {"blocks.*.attn": nn.sharding.LayerDefault},
        "sequence": "parallel", "microbatches": 2,
    },
    "whole, fsdp": {"strategy": "fsdp", "mesh": Mesh(shard=2)},
}  # fmt: skip


@pytest.mark.parametrize("place", few(PLACES, 3))
def test_every_place_of_the_experts(place: str) -> None:
    options = PLACES[place]
    want, summary, _ = alone(2)
    for got, told, _ in spawn(lambda comm: train_experts(comm, **options), options["mesh"].size):
        assert_close(got, want, 1e-10)
        for path, one in told.expert_load.items():
            assert one.chosen == summary.expert_load[path].chosen
            assert one.dropped_choices == 0
        assert told.expert_load.keys() == summary.expert_load.keys()


def test_dropout_outputs_and_gradients_of_inputs_where_samples_are_cut() -> None:
    """Three samples on two ranks: each draws the numbers of its samples, and all get whole results."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.MoE(4, 3, 3, 2, balance=0.3))
    x = np.random.default_rng(0).standard_normal((3, 5, 4))

    def run(comm: Communicator, **options: Any) -> list[np.ndarray]:
        trainer = make(comm, model, loss=nn.MSELoss(), **options)
        losses = [trainer.step(x, x + 1), trainer.evaluate(x, x)]
        y = trainer.forward(x)
        dx = trainer.backward(y - x)
        trainer.update()
        return [np.array(losses), y, dx, trainer.predict(x), *trainer.parameters().values()]

    (want,) = spawn(run, 1)
    for got in spawn(lambda comm: run(comm, mesh=Mesh(tensor=2, shard=1), sequence="samples"), 2):
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_chunks_leave_the_bits() -> None:
    """The balancing loss is that of a chunk."""

    def run(comm: Communicator, options: dict[str, Any]) -> dict[str, np.ndarray]:
        return train_experts(comm, reproducible_chunks=4, clip_norm=None, **options)[0]

    (want,) = spawn(run, 1, {})
    for options in ({"strategy": "fsdp"}, {"mesh": Mesh(pipe=2, shard=1), "schedule": "1f1b"}):
        assert_close(spawn(run, 2, options)[0], want)


def test_a_checkpoint_goes_on_wherever_experts_are(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 31, (4, 9))

    def run(comm: Communicator, goes_on: bool, **options: Any) -> dict[str, np.ndarray]:
        model = nn.Llama(31, 8, 1, 2, 8, hidden=6, experts=5)
        trainer = make(comm, model, optimizer=optim.AdamW(lr=1e-2), **options)
        mine = text[part(trainer.data_group, 4)]
        if goes_on:
            trainer.load(tmp_path / "saved")
        else:
            trainer.step(mine[:, :-1], mine[:, 1:])
            trainer.save(tmp_path / "saved")
        trainer.step(mine[:, :-1], mine[:, 1:])
        return trainer.parameters()

    want, *_ = spawn(lambda comm: run(comm, False, mesh=Mesh(tensor=2, shard=2), sequence="samples"), 4)
    got, *_ = spawn(lambda comm: run(comm, True, strategy="fsdp"), 2)
    assert_close(got, want, 1e-12)


def test_a_dry_run_supposes_even_choices() -> None:
    """16 positions of a rank, 2 choices each: 16 stay, 16 leave and 16 come, of 64 bytes and a weight of 8."""
    x = np.zeros((4, 8), np.int64)
    model, options = nn.Llama(31, 8, 2, 2, 8, hidden=6, experts=4), {"mesh": Mesh(tensor=2, shard=1)}
    options |= {"loss": nn.CrossEntropyLoss(), "precision": "float64", "sequence": "samples"}
    moved = dry_run(model, x, x, ranks=2, optimizer=optim.SGD(lr=1), **options).report.traffic
    assert moved["tensor", "all_to_all"].bytes == 2 * 2 * (16 * (64 + 8) + 16 * 64)
    assert moved["tensor", "all_gather"].bytes == 2 * 4 * 8


def test_texts_go_on_wherever_experts_are() -> None:
    model = nn.Llama(31, 8, 1, 2, 8, hidden=6, experts=5)

    def run(comm: Communicator, mesh: Mesh | None = None) -> list[int]:
        return make(comm, model, mesh=mesh).generate([3, 1, 4], 5).tolist()

    assert spawn(run, 2, Mesh(tensor=2, shard=1)) == spawn(run, 1) * 2


def test_what_samples_cannot_be_cut_for() -> None:
    norms = nn.Sequential(nn.BatchNorm(4), nn.MoE(4, 3, 3))
    outputs = nn.Graph({"a": (nn.Linear(4, 4), "x"), "b": (nn.MoE(4, 3, 3), "x")}, outputs=("a", "b"))
    options = {"loss": nn.MSELoss(), "mesh": Mesh(tensor=2, shard=1), "sequence": "samples"}
    for model, words in (
        (norms, r"'0' BatchNorm.* takes statistics over samples, which sequence='samples' cuts"),
        (outputs, "a model with several outputs must give them whole: choose another sequence"),
    ):
        with pytest.raises(ConfigError, match=words):
            spawn(lambda comm, model=model: make(comm, model, **options), 2)


def test_reports_logs_and_metrics_tell_of_the_load(tmp_path: Path) -> None:
    """A router that sends each position to the same two of four experts, which lie on the first rank."""
    model = nn.Sequential(nn.MoE(4, 3, 4, 2))
    x = 1 + np.random.default_rng(0).random((6, 5, 4))
    router = np.array([[9.0] * 4, [8.0] * 4, [-9.0] * 4, [-9.0] * 4])

    def run(comm: Communicator) -> Any:
        options = {"loss": nn.MSELoss(), "mesh": Mesh(tensor=2, shard=1), "sequence": "samples"}
        trainer = make(comm, model, optimizer=optim.SGD(lr=1e-3), **options)
        trainer.load_parameters(trainer.parameters() | {"0.router": router})
        options = {"log": tmp_path, "progress": False, "tensorboard": False}
        history = trainer.fit([(x, x)] * 2, validation=[(x, x)], every=1, **options)
        return history, trainer.inspect.gather_summary(), str(trainer.report()), trainer.inspect.gather_expert_load()

    for rank, (history, summary, text, routing) in enumerate(spawn(run, 2)):
        assert history.metrics == {"expert_imbalance": [(1, 2.0), (2, 2.0)], "expert_dropped": [(1, 0.0), (2, 0.0)]}
        assert summary.expert_load == routing == {"0": ExpertLoad((60, 60, 0, 0), (120, 0))}
        one = routing["0"]
        assert (one.imbalance, one.entropy, one.dropped_choices, one.rank_imbalance) == (2.0, 0.5, 0, 2.0)
        assert re.search(r"experts of +choices .*\n-+\n0 +120 +50.0 % +0.0 % +2.00 +0.500 +0 +2.00\n", str(summary))
        assert re.search(rf"computed here\n-+\n0 +60 +50.0 % +0.0 % +2.00 +0.500 +{(120, 0)[rank]}\n", text)
        assert summary.to_json()[0]["routing"] == {"0": {"chosen": (30, 30, 0, 0), "computed": (120,)}}
    head, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert head.endswith("validation_loss,expert_imbalance,expert_dropped")
    assert [row.endswith(",2.0,0.0") for row in rows] == [False, True, False, True]


def parameters_alone() -> dict[str, np.ndarray]:
    return alone(2)[0]


@pytest.mark.world
@pytest.mark.mpi
def test_ranks_of_mpi(world: Communicator) -> None:
    """Each with some experts, while nothing else is cut but samples."""
    want = from_rank_0(world, parameters_alone)
    options = {"sequence": "samples"} if world.size > 1 else {}
    got, summary, _ = train_experts(world, mesh=Mesh(tensor=world.size, shard=1), microbatches=2, check=True, **options)
    assert_close(got, want, 1e-10)
    assert [one.dropped_choices for one in summary.expert_load.values()] == [0, 0]
