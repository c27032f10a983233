"""Averages of the parameters over time: kept on shards, evaluated and saved in place of the parameters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import in_full
from bits import Bits, bits

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import CheckpointError, ConfigError

X, Y = (np.random.default_rng(7).standard_normal((12, n)).astype(np.float32) for n in (6, 3))


def make(comm: Communicator, **options: Any) -> fsdpx.Trainer:
    options = {"optimizer": optim.AdamW(lr=1e-2), "group_bytes": 0, "average": fsdpx.EMA(0.8), **options}
    model = nn.Chain(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))
    return model.as_distributed(loss=nn.MSE(), comm=comm, **options)


def part(trainer: fsdpx.Trainer) -> tuple[Any, Any]:
    size, rank = trainer.data.size, trainer.data.rank
    mine = slice(12 * rank // size, 12 * (rank + 1) // size)
    return X[mine], Y[mine]


def train(trainer: fsdpx.Trainer, steps: int = 5) -> list[dict[str, np.ndarray]]:
    """The parameters before the first step and after each."""
    found = [trainer.parameters()]
    for _ in range(steps):
        trainer.step(*part(trainer))
        found.append(trainer.parameters())
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("average", [fsdpx.EMA(0.8), fsdpx.SWA(start=2, every=2)])
def test_they_are_the_means_of_what_training_went_through(strategy: str, average: Any) -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm, strategy=strategy, average=average)
        path = train(trainer)
        mine, last = trainer.parameters(with_="average"), trainer.parameters()
        for name, array in mine.items():
            if isinstance(average, fsdpx.SWA):
                want = (path[2][name] + path[4][name]) / 2
            else:
                want = path[1][name]
                for now in path[2:]:
                    want = 0.8 * want + 0.2 * now[name]
            np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(last[name], path[-1][name])

    spawn(run, 2)


def test_evaluation_and_prediction_with_them() -> None:
    """As of a trainer that has them for parameters; training goes on as if nobody had looked."""
    optimizer, average = optim.AdamW(lr=1e-2), fsdpx.EMA(0.8)

    def run(comm: Communicator) -> None:
        trainer, other = (make(comm, optimizer=optimizer, average=average) for _ in range(2))
        train(trainer)
        x, y = part(trainer)
        before = bits(trainer)
        loss, output = trainer.evaluate(x, y, with_="average"), trainer.predict(x, with_="average")
        other.load_parameters(trainer.parameters(with_="average"))
        assert loss == other.evaluate(x, y) != trainer.evaluate(x, y)
        np.testing.assert_array_equal(output, other.predict(x))
        assert bits(trainer) == before
        again = make(comm, optimizer=optimizer, average=average)
        train(again)
        assert trainer.step(x, y) == again.step(x, y)
        assert bits(trainer) == bits(again)

    spawn(run, 2)


@in_full
@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16-true"])
def test_with_chunks_they_have_the_same_bits_at_any_world_size(precision: str) -> None:
    optimizer, average = optim.AdamW(lr=1e-2), fsdpx.EMA(0.8)

    def run(comm: Communicator, mesh: Mesh | None) -> list[bytes]:
        trainer = make(comm, optimizer=optimizer, average=average, chunks=12, precision=precision, mesh=mesh)
        train(trainer, 3)
        return [array.tobytes() for array in trainer.parameters(with_="average").values()]

    found = [spawn(lambda comm, m=mesh: run(comm, m), n)[0] for n, mesh in ((1, None), (3, None), (4, Mesh(replica=2)))]
    assert found[0] == found[1] == found[2]


def test_memory_is_that_of_one_more_slot() -> None:
    def run(comm: Communicator) -> int:
        trainer = make(comm)
        own = sum(page.mine.size for page in trainer.inspect.placement.pages.values())
        assert trainer.report().memory["averages"] == 4 * own
        assert trainer.report().memory["optimiser"] == 8 * own
        return own

    whole = sum(spawn(run, 2))
    dry = fsdpx.dry_run(
        nn.Chain(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)), X, Y, ranks=1, loss=nn.MSE(), optimizer=optim.AdamW(),
        average=fsdpx.SWA(),
    )  # fmt: skip
    assert dry.report.memory["averages"] == 4 * whole


def test_both_can_be_saved(tmp_path: Path) -> None:
    """A checkpoint has what is needed to go on, averages included; one of averages has weights alone."""

    def save(comm: Communicator) -> tuple[list[bytes], Bits]:
        trainer = make(comm)
        train(trainer)
        trainer.save(tmp_path / "all")
        trainer.save(tmp_path / "average", with_="average")
        trainer.save(tmp_path / "behind", with_="average", background=True)
        trainer.host.wait_saved()
        found = [array.tobytes() for array in trainer.parameters(with_="average").values()]
        trainer.step(*part(trainer))
        return found, bits(trainer)

    def load(comm: Communicator) -> Bits:
        trainer = make(comm, strategy="zero1")
        trainer.load(tmp_path / "all")
        assert [a.tobytes() for a in trainer.parameters(with_="average").values()] == averages
        trainer.step(*part(trainer))
        for name in ("average", "behind"):
            other = make(comm, average=None)
            other.load_weights(tmp_path / name)
            assert [a.tobytes() for a in other.parameters().values()] == averages
            with pytest.raises(CheckpointError, match="it holds weights alone; use load_weights"):
                other.load(tmp_path / name)
        with pytest.raises(CheckpointError, match="AdamW with slots m, v, average in the checkpoint, AdamW with slots"):
            make(comm, average=None).load(tmp_path / "all")
        return bits(trainer)

    (averages, after), *_ = spawn(save, 2)
    assert not (tmp_path / "average" / "state.safetensors").exists()
    assert set(spawn(load, 2)) == {after}


def test_parameters_that_are_frozen_for_a_while_keep_their_average() -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm)
        trainer.freeze("0.*")
        first = train(trainer, 2)[0]
        found = trainer.parameters(with_="average")
        np.testing.assert_array_equal(found["0.weight"], first["0.weight"])
        assert not np.array_equal(found["2.weight"], first["2.weight"])

    spawn(run, 2)


def test_an_error_puts_the_parameters_back() -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm)
        train(trainer)
        before = bits(trainer)

        def fail(action: Any) -> None:
            raise RuntimeError("on purpose")

        trainer.inspect.engine.observers.append(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.evaluate(*part(trainer), with_="average")
        trainer.inspect.engine.observers.clear()
        assert bits(trainer) == before

    spawn(run, 1)


def test_what_cannot_be_is_refused() -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm, average=None)
        with pytest.raises(ConfigError, match=r"no average is kept; say distribute\(..., average=fsdpx.EMA\(0.999\)\)"):
            trainer.evaluate(*part(trainer), with_="average")
        with pytest.raises(ConfigError, match="with_='ema': choose parameters or average"):
            trainer.predict(X, with_="ema")
        with pytest.raises(ConfigError, match="weights alone have no place in the data; leave loader out"):
            trainer.save("nowhere", loader=object(), with_="average")
        with pytest.raises(ConfigError, match=r"average=0.9: fsdpx.EMA\(...\) or fsdpx.SWA\(...\) is needed"):
            make(comm, average=0.9)
        differs = r"ranks differ in average: rank 0 has EMA\(decay=0\), rank 1 has EMA\(decay=0.1\)"
        with pytest.raises(ConfigError, match=differs):
            make(comm, average=fsdpx.EMA(comm.rank / 10 if comm.rank else 0))

    spawn(run, 2)
