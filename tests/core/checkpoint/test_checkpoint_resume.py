"""A run that stops and goes on ends with the bits of one that did not, also with codecs and from an earlier version."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few
from models import KNOWN, STRATEGIES, make, own_part, part
from savers import build, contents, everywhere, loader, steps
from threads import on_ranks

from fsdpx import CheckpointConfig, Precision, data, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError, ConfigError, DataError

OPTIONS = {"reproducible_chunks": 8, "precision": "float32", "clip_norm": 0.3}


def run(comm: Communicator, name: str, first: int, last: int, path: Path, **options: Any) -> str:
    """Steps `first` to `last`, from the checkpoint if not from the start, and a checkpoint at the end."""
    trainer = build(comm, name, **OPTIONS | options)
    if first:
        trainer.load(path)
        assert trainer.global_step == first
    steps(trainer, "wide", first, last)
    trainer.save(path, background=last % 2 == 1)
    digest = trainer.inspect.compute_fingerprint()
    trainer.close()
    return digest


@pytest.mark.parametrize(
    ("first", "second", "half"),
    few([("fsdp 5", "pipe 4", 1), ("one", "fsdp 3", 2), ("pipe 4", "ddp 2", 1), ("zero2 4", "one", 1)], 4),
)
def test_as_many_steps_again_are_all_of_them(first: str, second: str, half: int, tmp_path: Path) -> None:
    whole = everywhere("one", run, "one", 0, 2 * half, tmp_path / "whole")
    everywhere(first, run, first, 0, half, tmp_path / "a")
    assert set(everywhere(second, run, second, half, 2 * half, tmp_path / "a")) == set(whole)
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


def test_a_tensor_axis_resumes_exactly_on_itself(tmp_path: Path) -> None:
    def goes_on_by_itself(comm: Communicator) -> str:
        trainer = build(comm, "3D", **OPTIONS)
        steps(trainer, "wide", 0, 1)
        trainer.save(tmp_path / "a", background=True)
        steps(trainer, "wide", 1, 2)
        trainer.call_runner.wait_for_background_save()
        return trainer.inspect.compute_fingerprint()

    whole = everywhere("3D", goes_on_by_itself)
    assert everywhere("3D", run, "3D", 1, 2, tmp_path / "a") == whole


def test_dropout_goes_on_with_the_seed_of_the_checkpoint(tmp_path: Path) -> None:
    def go_on(comm: Communicator, name: str, call: str, seed: int, before: int = 1) -> list[float]:
        trainer = build(comm, name, reproducible_chunks=8, seed=seed)
        steps(trainer, "wide", 0, before)
        getattr(trainer, call)(tmp_path / "a")
        return steps(trainer, "wide", 3, 4)

    everywhere("one", lambda comm: run(comm, "one", 0, 3, tmp_path / "a", precision="float64", clip_norm=None))
    whole = everywhere("one", go_on, "one", "load", 3, 0)[0]
    assert everywhere("fsdp 3", go_on, "fsdp 3", "load", 77)[0] == whole
    assert everywhere("fsdp 3", go_on, "fsdp 3", "load_parameters", 77)[0] != whole


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """Overflow, then growth: the scale and its count are part of the state."""

    precision = Precision(reduce="float16", loss_scale="dynamic", initial_scale=2.0**16, growth_interval=2)

    def scales(comm: Communicator, stop: int | None) -> list[tuple[float, int]]:
        trainer, found = make(comm, "mlp", precision=precision), []
        for k in range(8):
            if k == stop:
                trainer.save(tmp_path / "a")
                trainer.close()
                trainer = make(comm, "mlp", precision=precision)
                trainer.load(tmp_path / "a")
            trainer.step(*own_part(comm, "mlp", 6, seed=k))
            found.append((trainer.inspect.engine.state.scaler.value, trainer.global_step))
        return found

    whole = spawn(scales, 2, None)[0]
    assert len({scale for scale, _ in whole}) > 2
    assert max(after / before for (before, _), (after, _) in pairwise(whole)) == 2.0, "it grows again"
    assert whole[-1][1] < 8
    for stop in (1, 4, 6):
        assert spawn(scales, 2, stop)[0] == whole


def fitted(
    comm: Communicator, name: str, folder: Path | None, seed: int = 3, background: bool = False, **options: Any
) -> tuple[str, Any]:
    trainer = build(comm, name, reproducible_chunks=4, precision="float32", seed=seed)
    options["checkpoints"] = CheckpointConfig(folder, every=2, keep=2, background=background) if folder else None
    options["validation"] = [next(iter(loader(trainer)))]
    history = trainer.fit(loader(trainer, rows=28), progress=False, every=4, **options)
    digest = trainer.inspect.compute_fingerprint()
    trainer.close()
    return digest, history


def test_fit_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """3 steps make an epoch; each part of the run is on another mesh."""
    whole, history = spawn(lambda comm: fitted(comm, "one", None, epochs=3, steps=7), 1)[0]
    parts = [("fsdp 3", 2, ["step-2"]), ("pipe 4", 5, ["step-4", "step-5"]), ("ddp 2", 7, None)]
    losses = []
    for name, stop, names in parts:
        options = {"epochs": 3, "steps": stop, "background": name == "pipe 4"}
        found, part_of = everywhere(name, lambda comm, n=name, o=options: fitted(comm, n, tmp_path, **o))[0]
        losses += part_of.losses
        assert names is None or sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    assert found == whole
    assert losses == history.losses
    assert (part_of.steps, part_of.epochs, part_of.earlier_steps) == (7, history.epochs, 5)
    assert part_of.validation[-1] == history.validation[-1]


def test_fit_of_whole_epochs_and_of_nothing_left(tmp_path: Path) -> None:
    whole = spawn(lambda comm: fitted(comm, "one", None, epochs=2), 1)[0][0]
    everywhere("fsdp 3", lambda comm: fitted(comm, "fsdp 3", tmp_path, epochs=1))
    digest, history = everywhere("ddp 2", lambda comm: fitted(comm, "ddp 2", tmp_path, epochs=2, seed=5))[0]
    assert digest == whole
    assert (history.steps, history.epochs, history.earlier_steps) == (6, 2, 3)
    again, history = everywhere("one", lambda comm: fitted(comm, "one", tmp_path, epochs=2))[0]
    assert again == whole
    assert history.losses == []


def test_a_run_can_begin_anew(tmp_path: Path) -> None:
    def begin(comm: Communicator, resume: bool) -> int:
        trainer = build(comm, "one", reproducible_chunks=4)
        kept = CheckpointConfig(tmp_path / ("one" if resume else "another"), every=2, resume=resume)
        return trainer.fit(loader(trainer), steps=3, progress=False, checkpoints=kept).earlier_steps

    assert [spawn(begin, 1, resume)[0] for resume in (True, True, False)] == [0, 3, 0]


def test_a_loader_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    """The samples of the global batches, by hand."""

    def seen(comm: Communicator, first: int, last: int) -> list[Any]:
        trainer = make(comm, "wide", reproducible_chunks=4)
        batches = loader(trainer)
        if first:
            trainer.load(tmp_path / "a", loader=batches)
        found = [x for _, (x, _) in zip(range(first, last), batches, strict=False)]
        trainer.save(tmp_path / "a", loader=batches)
        return found

    def together(ranks: int, first: int, last: int) -> list[bytes]:
        parts = spawn(seen, ranks, first, last)
        return [np.concatenate(rows).tobytes() for rows in zip(*parts, strict=True)]

    whole = together(1, 0, 8)
    begun = together(4, 0, 3)
    assert begun + together(3, 3, 8) == whole


def test_data_that_begin_anew_after_a_load_are_said_once_at_the_first_step(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        trainer = build(comm, "ddp 2", reproducible_chunks=4)
        trainer.save(tmp_path / "with", loader=loader(trainer))
        trainer.save(tmp_path / "without")

    def go_on(comm: Communicator, name: str, *takes: bool) -> None:
        trainer = build(comm, "ddp 2", reproducible_chunks=4)
        for take in takes:  # no warning without a step, as for an evaluation
            trainer.load(tmp_path / name, loader=loader(trainer) if take else None)
        steps(trainer, "wide", 0, 2)

    spawn(save, 2)
    spawn(go_on, 2, "with", True)
    spawn(go_on, 2, "without", False)
    spawn(go_on, 2, "with", False, True)
    with pytest.warns(RuntimeWarning, match=r"with has the position .*: load\(path, loader=loader\) restores") as said:
        spawn(go_on, 2, "with", False)
    assert len(said) == 1


def test_what_keeps_a_run_from_going_on(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        trainer = build(comm, "one", reproducible_chunks=4)
        with pytest.raises(ConfigError, match=r"the loader is a list without state_dict, .* use a data.DataLoader"):
            trainer.fit([], checkpoints=CheckpointConfig(tmp_path))
        trainer.save(tmp_path / "step-3")
        with pytest.raises(CheckpointError, match="saved without a loader"):
            trainer.load(tmp_path / "step-3", loader=loader(trainer))
        trainer.save(tmp_path / "step-4", loader=loader(trainer))
        with pytest.raises(CheckpointError, match="step-4 was not saved by fit: load it"):
            trainer.fit(loader(trainer), checkpoints=CheckpointConfig(tmp_path))
        other = data.DataLoader(data.ArrayDataset(np.ones((5, 2)), np.ones(5)), 2)
        before = trainer.inspect.compute_fingerprint()
        with pytest.raises((CheckpointError, DataError), match="taken with n=100, but the sampler has 5"):
            trainer.load(tmp_path / "step-4", loader=other)
        assert trainer.inspect.compute_fingerprint() == before

    spawn(body, 1)
    with pytest.raises(ConfigError, match=r"CheckpointConfig\(every=0\): a whole number, 1 or more"):
        CheckpointConfig(tmp_path, every=0)


@on_ranks(2)
def test_gradients_that_wait_are_not_lost_silently(comm: Communicator, tmp_path: Path) -> None:
    trainer = make(comm, "mlp")
    x, y = KNOWN["mlp"].batch(np.random.default_rng(0), 4)
    trainer.save(tmp_path / "a")
    trainer.accumulate(x, y)
    with pytest.raises(CheckpointError, match="gradients of accumulate or backward are waiting"):
        trainer.save(tmp_path / "a")
    trainer.load(tmp_path / "a")
    with pytest.raises(ConfigError, match="there are no gradients"):
        trainer.update()
    trainer.step(x, y)


def test_after_load_a_shared_mesh_still_trains_alike(tmp_path: Path) -> None:
    """Parameters that a strategy keeps gathered, or has gathered to evaluate, are gathered anew."""

    def body(comm: Communicator, strategy: str) -> tuple[str, float, float]:
        trainer, batch = make(comm, "wide", strategy, reproducible_chunks=8), own_part(comm, "wide", 8, seed=1)
        trainer.save(tmp_path / strategy)
        begun = trainer.evaluate(*batch)
        steps(trainer, "wide", 0, 1)
        trainer.load(tmp_path / strategy)
        steps(trainer, "wide", 0, 1)
        digest = trainer.inspect.compute_fingerprint()
        trainer.evaluate(*batch)  # leaves parameters gathered
        trainer.load_parameters(tmp_path / "ddp")
        return digest, begun, trainer.evaluate(*batch)

    found = {strategy: set(spawn(body, 2, strategy)) for strategy in STRATEGIES}
    assert len(set().union(*found.values())) == 1, found
    ((_, begun, again),) = found["ddp"]
    assert again == begun


SAVED = Path(__file__).parents[1] / "engine" / "data" / "before"
WANTED = json.loads(SAVED.with_suffix(".json").read_text())
"""Of the run that saved it: its fingerprint, the loss of batch 9 by running statistics, and of the steps afterwards."""


def part_of_before(comm: Communicator, seed: int) -> tuple[Any, Any]:
    rng, mine = np.random.default_rng(seed), part(comm, 9)
    x, y = rng.standard_normal((9, 6)).astype(np.float32), rng.integers(0, 3, 9)
    return x[mine], y[mine]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_from_before_goes_on(ranks: int) -> None:
    """The third step sees what the optimizer had in its slots."""

    def run(comm: Communicator) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm(16), nn.GELU(), nn.Linear(16, 3))
        options = {"optimizer": optim.AdamW(lr=0.01), "comm": comm, "seed": 8, "clip_norm": 1.0}
        trainer = model.as_distributed(loss=nn.CrossEntropyLoss(), **options)
        assert trainer.inspect.compute_fingerprint() != WANTED["fingerprint"]
        trainer.load(SAVED)
        return {
            "steps": trainer.global_step,
            "fingerprint": trainer.inspect.compute_fingerprint(),
            "evaluated": trainer.evaluate(*part_of_before(comm, 9)),
            "losses": [trainer.step(*part_of_before(comm, seed)) for seed in (4, 5, 6)],
        }

    for found in spawn(run, ranks):
        assert (found["steps"], found["fingerprint"]) == (WANTED["steps"], WANTED["fingerprint"])
        assert found["evaluated"] == pytest.approx(WANTED["evaluated"], rel=1e-6)
        assert found["losses"] == pytest.approx(WANTED["losses"], rel=1e-6)
