"""The elastic trainer beside deaths: ranks that are idle, leave and join; what it refuses; what it saves."""

import threading
from functools import cache

import numpy as np
import pytest
from amount import few, pairs
from bits import bits
from jobs_threads import BATCHES, ROWS, Kill, Killer, make, train

import fsdpx
from fsdpx import CheckpointConfig, ElasticConfig, Mesh, Precision, data, nn, optim, spawn
from fsdpx.core.comm import RankDied
from fsdpx.errors import CheckpointError, ConfigError, DataError, MeshError, NumericsError, ShapeError, StateLost


def run(ranks, body, *args):
    """Of the ranks that live."""
    return [r for r in spawn(body, ranks, *args, survive=True, timeout=30) if r is not None]


def make_steps(trainer):
    """Losses and bits."""
    return [trainer.step(x, y) for x, y in BATCHES], bits(trainer)


def step_alone(comm, options):
    """One rank, not elastic."""
    return make_steps(make(comm, elastic=False, **options))


@cache
def plain():
    return spawn(step_alone, 1, {})[0]


def test_the_same_bits_as_a_trainer_that_is_not_elastic():
    losses, wanted = plain()
    for ranks in (1, 2, 3, 5):
        for got in train(ranks):
            assert (got.losses, got.bits) == (losses, wanted)


ALONE = {"precision": Precision("bf16", master="bf16", rounding="kahan")}


@pytest.mark.parametrize("options", [{}, ALONE], ids=["float32", "16 bits alone"])
def test_ranks_leave_and_join(options):
    losses, wanted = spawn(step_alone, 1, options)[0]

    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(ranks=2, every=1), **options)
        sizes, found = [], []
        for number, (x, y) in enumerate(BATCHES):
            if number:
                trainer.call_runner.resize_to({1: 4, 2: 1, 3: 3}[number])
            found.append(trainer.step(x, y))
            sizes.append(trainer.call_runner.training_ranks)
        assert trainer.call_runner.is_training == (comm.rank < 3)
        assert trainer.global_step == len(BATCHES)
        return found, bits(trainer), sizes

    assert run(4, body) == [(losses, wanted, [2, 4, 1, 3])] * 4


def test_a_file_says_how_many_train(tmp_path):
    wanted = tmp_path / "ranks"

    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(resize=wanted))
        sizes = []
        for (x, y), text in zip(BATCHES, (None, "2\n", None, "7"), strict=True):
            comm.barrier().wait()
            if comm.rank == 0 and text:
                wanted.write_text(text)
            comm.barrier().wait()
            trainer.step(x, y)
            sizes.append(trainer.call_runner.training_ranks)
        return sizes, bits(trainer)

    for got in run(3, body):
        assert got == ([3, 2, 2, 3], plain()[1])


def test_ranks_that_the_mesh_cannot_use_follow_and_take_over():
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
    options = {
        "mesh": Mesh(pipe=2, tensor=2), "elastic": ElasticConfig(every=1, copies=2), "model": model,
        "tensor_plan": {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel},
    }  # fmt: skip
    wanted = train(4, **options)[0]
    got = train(6, [Kill(1, "NORM", before=1)], **options)
    assert sum(one.idle == [True] * len(BATCHES) for one in got) == 1  # of 5 that live 4 train
    assert np.allclose(got[0].losses, wanted.losses, rtol=1e-12)
    assert [(one.losses, one.bits) for one in got] == [(got[0].losses, got[0].bits)] * 5


def test_too_few_ranks_for_the_mesh():
    with pytest.raises(MeshError, match=r"mesh .*pipe=2.* with strategy 'ddp': 1 ranks are left, which is too few"):
        train(2, [Kill(0, "F0.0", before=1)], "ddp", mesh=Mesh(pipe=2))


def test_state_that_nobody_has():
    """Both of a pair die at once."""
    kills = [Kill(0, "UPDATE0", before=2), Kill(2, "UPDATE0", before=2)]
    message = r"cannot continue from.*of step 2: 3\.weight: elements 0\.\.1024 of 3072.*ElasticConfig\(copies=2\)"
    with pytest.raises(StateLost, match=message):
        train(4, kills, elastic=ElasticConfig(every=1))
    assert train(4, kills, elastic=ElasticConfig(every=1, copies=2))[0].bits == plain()[1]


def test_the_whole_batch_on_every_rank():
    x, y = BATCHES[0]

    def body(comm, elastic):
        trainer = make(comm, elastic=elastic)
        if elastic:
            with pytest.raises(DataError, match="whole batch"):
                trainer.step(x + comm.rank, y)
        trainer.step(x, y)
        return trainer.evaluate(x, y), trainer.predict(x)

    loss, output = spawn(body, 1, False)[0]
    for got in run(3, body, True):
        assert got[0] == loss
        np.testing.assert_allclose(got[1], output, rtol=0, atol=1e-5 * np.abs(output).max())


def test_what_it_refuses():
    def body(comm):
        trainer = make(comm)
        x, y = BATCHES[0]
        for name, arguments in {"accumulate": (x, y), "forward": (x,), "backward": (x,), "update": ()}.items():
            with pytest.raises(ConfigError, match=f"{name}: an elastic trainer makes whole steps"):
                getattr(trainer, name)(*arguments)
        with pytest.raises(ConfigError, match=r"resize\(0\): a number of ranks"):
            trainer.call_runner.resize_to(0)

    run(2, body)
    for name, value, least in (("copies", -1, 0), ("every", 0, 1), ("ranks", 1.5, 1)):
        with pytest.raises(ConfigError, match=rf"ElasticConfig\({name}={value}\): a whole number, {least} or more"):
            ElasticConfig(**{name: value})
    with pytest.raises(ConfigError, match=r"elastic='yes': True, False or fsdpx.ElasticConfig"):
        spawn(lambda comm: make(comm, elastic="yes"), 1)
    with pytest.raises(ConfigError, match="cannot die or come back"):
        make(fsdpx.FakeCommunicator(0, 2))


def test_parameters_that_are_given(tmp_path):
    """They outlive a death right after, and checkpoints are those of any trainer."""

    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(every=3))
        trainer.step(*BATCHES[0])
        values = {n: np.full_like(a, 0.25) for n, a in trainer.parameters().items()}
        assert trainer.load_parameters(values, strict=False).taken == tuple(values)
        trainer.save(tmp_path / "saved")
        trainer.inspect.engine.add_observer(Killer(comm.rank, [Kill(1, "NORM")]))
        trainer.step(*BATCHES[1])
        after = bits(trainer)
        trainer.load(tmp_path / "saved")
        trainer.step(*BATCHES[1])
        assert bits(trainer) == after
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            trainer.load(tmp_path / "nothing")
        return after, trainer.global_step

    def alone(comm):
        trainer = make(comm, elastic=False)
        trainer.load(tmp_path / "saved")
        trainer.step(*BATCHES[1])
        return bits(trainer), 2

    assert run(3, body) == spawn(alone, 1) * 2


def test_fit_goes_on(tmp_path):
    """Deaths, a change of size, checkpoints and the end of the loop."""
    rng = np.random.default_rng(1)
    source = data.ArrayDataset(rng.standard_normal((18, 6)), rng.integers(0, 3, 18))

    def body(comm, folder, kills, ranks=None, background=True):
        trainer = make(comm, elastic=ElasticConfig(every=2, ranks=ranks))
        trainer.inspect.engine.add_observer(Killer(comm.rank, kills))
        loader = data.DataLoader(source, ROWS, comm=trainer.data_group, shuffle=True, reproducible_chunks=ROWS)
        history = trainer.fit(
            loader, epochs=2, validation=[BATCHES[0]], every=4, progress=False,
            checkpoints=CheckpointConfig(tmp_path / folder, every=2, background=background),
        )  # fmt: skip
        return history.losses, history.validation, bits(trainer)

    wanted = run(3, body, "calm", [])
    kills = [Kill(0, "NORM", before=2), Kill(2, "GATHER0", before=9)]
    assert run(3, body, "idle", [], 2) == wanted
    for background in few([True, False], 2):
        assert run(3, body, f"wild-{background}", kills, None, background) == wanted[:1]
        (_, _, again), *_ = run(2, body, f"wild-{background}", [])  # goes on where the other ended
        assert again == wanted[0][2]


DEATHS = [("LAMB", "COMMIT"), ("LAMB", "UPDATE1"), ("AdamW", "UPDATE1")]


@pytest.mark.parametrize(("optimizer", "action"), few(DEATHS, 3))
def test_a_rank_dies_when_all_have_agreed(optimizer, action):
    """LAMB still speaks then, so that some ranks meet the loss in the step and others after it."""
    options = {"optimizer": getattr(optim, optimizer)(lr=0.01), "mesh": Mesh(replica=2, shard=2)}
    wanted = train(4, **options)[0]
    for rank, step in few([(0, 1), (3, 2)], 3):
        got = train(4, [Kill(rank, action, before=step)], **options)
        assert [(one.losses, one.bits) for one in got] == [(wanted.losses, wanted.bits)] * 3


def test_a_rank_dies_in_the_last_step():
    """Nobody is left waiting when the others have gone home."""

    def body(comm, kill):
        trainer = make(comm, elastic=ElasticConfig(every=1))
        trainer.inspect.engine.add_observer(Killer(comm.rank, [kill]))
        return [trainer.step(x, y) for x, y in BATCHES][-1]

    for rank, action in (*pairs(range(3), ("COMMIT", "UPDATE0")), (0, "UPDATE0")):
        assert run(3, body, Kill(rank, action, before=len(BATCHES) - 1)) == [plain()[0][-1]] * 2


def test_idle_ranks_keep_copies():
    got = train(3, [Kill(0, "NORM", before=2)], elastic=ElasticConfig(ranks=1, every=1))
    assert [one.bits for one in got] == [plain()[1]] * 2


def test_a_file_that_asks_for_too_few(tmp_path, capsys):
    wanted = tmp_path / "ranks"
    wanted.write_text("1")

    def body(comm):
        trainer = make(comm, mesh=Mesh(pipe=2), elastic=ElasticConfig(resize=wanted))
        return [trainer.step(x, y) for x, y in BATCHES], trainer.global_step, trainer.call_runner.training_ranks

    assert all(got == (plain()[0], len(BATCHES), 2) for got in run(2, body))
    assert capsys.readouterr().err.count(f"fsdpx: {wanted} asks for 1 ranks: mesh ") == 1


@pytest.mark.parametrize("ranks", [3, 2])
def test_a_step_that_is_not_finite_is_refused_on_all_ranks_alike(ranks):
    """Idle ones too; training goes on as if it had not been asked for."""
    losses, wanted = plain()

    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(ranks=ranks, every=1))
        found = []
        for number, (x, y) in enumerate(BATCHES):
            if number == 2:
                with pytest.raises(NumericsError, match=r"step 3: the loss is nan, .*: rank 0: input") as caught:
                    trainer.step(np.where(np.arange(x.size).reshape(x.shape) == 1, np.nan, x), y)
                found.append(str(caught.value))
            found.append(trainer.step(x, y))
        return found, bits(trainer)

    got = run(3, body)
    assert len({found[2] for found, _ in got}) == 1
    assert [([*found[:2], *found[3:]], last) for found, last in got] == [(losses, wanted)] * 3


def test_counts_of_updates_outlive_a_death(tmp_path):
    """Of parameters that were frozen before the run that the checkpoint is of was made elastic."""

    def before(comm):
        trainer = make(comm, elastic=False)
        trainer.freeze("0.*")
        for x, y in BATCHES[:2]:
            trainer.step(x, y)
        trainer.save(tmp_path / "a")
        trainer.unfreeze("*")
        return make_steps(trainer)[1]

    def after(comm):
        trainer = make(comm, elastic=ElasticConfig(every=1))
        trainer.load(tmp_path / "a")
        trainer.inspect.engine.add_observer(Killer(comm.rank, [Kill(1, "NORM", before=2)]))
        return make_steps(trainer)[1]

    want = spawn(before, 1)
    assert run(3, after) == want * 2


@pytest.mark.parametrize("ranks", [None, 1])
def test_a_batch_that_is_refused_is_told_to_all_and_forgotten(ranks):
    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(ranks=ranks))
        with pytest.raises(DataError, match="is a single number: dim 0 must be samples"):
            trainer.step(np.float64(3), BATCHES[0][1])
        first = trainer.step(*BATCHES[0])
        with pytest.raises(ShapeError) as caught:
            trainer.step(np.zeros((ROWS, 7)), BATCHES[0][1])
        return str(caught.value), first, trainer.step(*BATCHES[1])

    found = run(3, body)
    assert found == [(found[0][0], *plain()[0][:2])] * 3


def test_a_refusal_and_a_death_at_once():
    """An idle rank dies while the others are told that the batch is bad: they refuse it together."""

    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(ranks=2))
        trainer.step(*BATCHES[0])
        if comm.rank == 2:
            raise RankDied("idle, in the second step")
        with pytest.raises(ShapeError):
            trainer.step(np.zeros((ROWS, 7)), np.zeros(ROWS, int))
        return [trainer.step(x, y) for x, y in BATCHES[1:3]]

    assert run(3, body) == [plain()[0][1:3]] * 2


def test_idle_ranks_count_steps_after_a_load(tmp_path):
    def body(comm):
        trainer = make(comm, elastic=ElasticConfig(ranks=1))
        trainer.step(*BATCHES[0])
        trainer.save(tmp_path / "one")
        trainer.step(*BATCHES[1])
        trainer.load(tmp_path / "one")
        while trainer.global_step < len(BATCHES):
            trainer.step(*BATCHES[trainer.global_step])
        return bits(trainer)

    assert run(2, body) == [plain()[1]] * 2


def test_a_save_that_is_given_up(tmp_path, monkeypatch):
    from fsdpx.core.checkpoint import save as saving

    # nothing is written before somebody asks what became of it
    write, asked = saving.write_tensor_shards, threading.Event()
    monkeypatch.setattr(saving, "write_tensor_shards", lambda *args: asked.wait(60) and write(*args))
    for name in ("wait", "abandon"):
        ask = getattr(saving.BackgroundSave, name)
        monkeypatch.setattr(saving.BackgroundSave, name, lambda save, ask=ask: (asked.set(), ask(save)))

    def body(comm, dies):
        trainer = make(comm)
        trainer.step(*BATCHES[0])
        trainer.save(tmp_path / f"saved-{dies}", background=True)
        if dies and comm.rank == 1:
            raise RankDied("while it is written")
        trainer.step(*BATCHES[1])
        if not dies:
            trainer.call_runner.resize_to(1)
        try:
            trainer.call_runner.wait_for_background_save()
        except CheckpointError as error:
            trainer.save(tmp_path / "again", background=True)
            trainer.call_runner.wait_for_background_save()
            return str(error)
        return "whole"

    assert run(3, body, False) == ["whole"] * 3
    assert (tmp_path / "saved-False").is_dir()
    asked.clear()
    assert run(3, body, True) == ["a save in the background was given up when a rank died: save again"] * 2
    assert (tmp_path / "again").is_dir()
