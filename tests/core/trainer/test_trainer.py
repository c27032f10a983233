"""What a trainer offers beside the step: parameters, evaluation, prediction, fit, reports, precision, frozen ones."""

import inspect
import pydoc
from functools import partial
from typing import Any

import numpy as np
import pytest
from bits import Bits, bits
from models import CASES, alike, make, mlp, own_part, part, placed, train
from threads import on_ranks

from fsdpx import FakeCommunicator, Precision, Sharding, Trainer, data, distribute, nn, optim, spawn
from fsdpx.core.comm import Communicator, Handle
from fsdpx.core.comm.communicator import Call, CommunicatorWrapper
from fsdpx.errors import ConfigError, DataError, NumericsError
from fsdpx.testing import assert_close, find_difference


def test_parameters_load_at_another_world_size_and_strategy() -> None:
    _, want, _ = spawn(lambda comm: train(comm, "norms", "fsdp"), 3)[0]

    def load(comm: Communicator) -> None:
        trainer = make(comm, "norms", "zero1", seed=99)
        changed = find_difference(trainer.parameters(), want)
        assert changed is not None
        assert changed.relative > 0.1
        trainer.load_parameters(want)
        after = trainer.parameters()
        assert_close(after, want)
        assert "1.running_mean" in after
        trainer.evaluate(*CASES["norms"].batch(np.random.default_rng(2), 4))

    spawn(load, 2)


def test_tied_names_load_too() -> None:
    trainer = make(spawn(lambda comm: comm, 1)[0], "gpt")
    full = trainer.parameters()
    assert "head.weight" not in full
    alias = {("head.weight" if k == "embed.weight" else k): v + 1 for k, v in full.items()}
    trainer.load_parameters(alias)
    np.testing.assert_array_equal(trainer.parameters()["embed.weight"], full["embed.weight"] + 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_evaluate_and_predict_change_nothing(strategy: str) -> None:
    def run(comm: Communicator, look: bool) -> Bits:
        trainer = make(comm, "gpt", strategy)
        x, y = own_part(comm, "gpt", 6)
        trainer.accumulate(x, y)
        if look:
            assert trainer.evaluate(x, y) == trainer.evaluate(x, y)
            assert trainer.predict(x).shape == (3, 8, 31)
        trainer.step(x, y)
        return bits(trainer)

    assert spawn(run, 2, True) == spawn(run, 2, False)


def test_evaluate_is_the_mean_over_all_ranks_and_drops_nothing() -> None:
    one, *others = (spawn(lambda comm: make(comm, "gpt").evaluate(*own_part(comm, "gpt", 7)), n) for n in (1, 2, 3))
    for several in others:
        np.testing.assert_allclose(several, one[0], rtol=1e-13)


def test_several_inputs_and_outputs() -> None:
    class Both(nn.Loss):
        """Sum of two mean squared errors over the same samples."""

        def forward(self, env: Any, y: Any, target: Any) -> Any:
            a, b = y
            total = float(((a - target) ** 2).sum() + (b**2).sum())
            return total, float(a.size), (a, b, target)

        def backward(self, env: Any, saved: Any, seed: float) -> Any:
            a, b, target = saved
            return 2 * seed * (a - target), 2 * seed * b

        def validate(self, shape: Any, target: Any) -> None:
            assert shape[0] == tuple(target.shape)

    def run(comm: Communicator, strategy: str) -> Any:
        sides = {"l": (nn.Linear(3, 4), "left"), "r": (nn.Linear(5, 4), "right")}
        nodes = {**sides, "s": (nn.Add(), "l", "r"), "t": (nn.Tanh(), "s")}
        model = nn.Graph(nodes, inputs=("left", "right"), outputs=("s", "t"))
        options = {"strategy": strategy, "precision": "float64", "group_bytes": 0}
        trainer = model.as_distributed(loss=Both(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)
        rng, mine = np.random.default_rng(0), part(comm, 6)
        x = {"left": rng.normal(size=(6, 3))[mine], "right": rng.normal(size=(6, 5))[mine]}
        y = rng.normal(size=(6, 4))[mine]
        loss = [trainer.step(x, y) for _ in range(3)]
        assert len(trainer.predict(x)) == 2
        return loss, trainer.parameters()

    losses, want = spawn(run, 1, "ddp")[0]
    assert losses[2] < losses[0]
    for got_losses, got in spawn(run, 3, "fsdp"):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("strategy", "size"), [("zero1", 3), ("hybrid", 4)])
def test_half_precision_is_near_and_alike(precision: str, strategy: str, size: int) -> None:
    sgd = optim.SGD(lr=0.05)
    _, want, _ = spawn(lambda comm: train(comm, "mlp", "ddp", precision="float32", optimizer=sgd), 1)[0]
    results = spawn(lambda comm: train(comm, "mlp", strategy, precision=precision, optimizer=sgd), size)
    for _, got, _ in results:
        assert_close(got, results[0][1])  # "every rank has the same bits"
        assert_close(got, want, 0.02)
        assert find_difference(got, want) is not None


def test_clipping_counts_each_element_once() -> None:
    def run(comm: Communicator, strategy: str) -> float:
        trainer = make(comm, "gpt", strategy, clip_norm=1e9)
        trainer.step(*own_part(comm, "gpt", 6))
        return trainer.inspect.last_update.norm

    def by_hand(comm: Communicator) -> float:
        trainer = make(comm, "gpt")
        trainer.accumulate(*own_part(comm, "gpt", 6))
        return float(np.sqrt(sum((g**2).sum() for g in trainer.gradients().values())))

    want = spawn(by_hand, 1)[0]
    for strategy, size in placed([1, 2, 4], [4]):
        np.testing.assert_allclose(spawn(run, size, strategy), want, rtol=1e-12)


def loader(comm: Communicator) -> data.DataLoader:
    dataset = data.ArrayDataset(*CASES["mlp"].batch(np.random.default_rng(0), 24))
    return data.DataLoader(dataset, 8, comm=comm, shuffle=True)


def test_fit_stops_at_steps_and_for_patience_and_on_any_ranks_wish() -> None:
    def run(comm: Communicator, **options: Any) -> tuple[int, str]:
        trainer = make(comm, "mlp", optimizer=optim.SGD(lr=0.0))
        history = trainer.fit(loader(comm), epochs=50, progress=False, **options)
        return len(history.losses), history.reason

    assert spawn(lambda comm: run(comm, steps=5), 2) == [(5, "5 steps done")] * 2
    held = CASES["mlp"].batch(np.random.default_rng(1), 4)
    tired = spawn(lambda comm: run(comm, validation=[held], every=2, patience=3), 2)
    assert tired == [(8, "no better validation loss in 3 validations")] * 2
    asked = spawn(lambda comm: run(comm, every=2, stop=lambda h: comm.rank == 1 and len(h.losses) >= 4), 3)
    assert asked == [(4, "stop() said so")] * 3


def test_help_shows_the_options_of_fit() -> None:
    assert "epochs: 'int | None' = 1" in pydoc.render_doc(Trainer.fit, renderer=pydoc.plaintext)
    assert "patience : end training after this many validations" in (Trainer.fit.__doc__ or "")
    made = make(spawn(lambda comm: comm, 1)[0], "mlp")
    assert list(inspect.signature(made.fit).parameters)[:3] == ["loader", "epochs", "steps"]
    kinds = {parameter.kind for parameter in inspect.signature(Trainer.fit).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("validation", [False, True])
def test_fit_refuses_a_loader_of_other_ranks(validation: bool) -> None:
    """Half of the ranks train; a loader without `comm` cuts for all of them. One rank alone is enough."""

    def run(comm: Communicator, wrong: tuple[int, ...]) -> None:
        half = comm.split(comm.rank // 2)
        trainer = make(half, "mlp")
        dataset = data.ArrayDataset(*CASES["mlp"].batch(np.random.default_rng(0), 8))
        bad = data.DataLoader(dataset, 4, comm=None if half.rank in wrong else half)
        good = data.DataLoader(dataset, 4, comm=trainer.data_group)
        assert len(trainer.fit(good, progress=False).losses) == 2
        trainer.fit(good if validation else bad, validation=bad if validation else None, progress=False)

    for wrong in ((0, 1), (0,)):
        assert alike(4, partial(run, wrong=wrong)) == (
            f"ConfigError: fit: the DataLoader of rank {wrong[-1]} shares each batch among 4 ranks, which are not the "
            "2 data ranks of the trainer: DataLoader(..., comm=trainer.data_group)"
        )


def test_none_is_no_batch() -> None:
    x, _ = CASES["mlp"].batch(np.random.default_rng(0), 4)

    def run(comm: Communicator, call: str, *given: Any) -> None:
        trainer = make(comm, "mlp")
        if call == "backward":
            trainer.forward(x)
        getattr(trainer, call)(*given)

    for call in (("step", None, None), ("step", x, None), ("predict", None), ("backward", None)):
        with pytest.raises(DataError, match="got None where an array is needed"):
            spawn(run, 2, *call)


def test_masked_elements_are_no_numbers() -> None:
    """netCDF4 reads a field with fill values as such an array; what lies below the mask is the fill value."""

    def run(comm: Communicator) -> None:
        trainer, (x, y) = make(comm, "mlp"), CASES["mlp"].batch(np.random.default_rng(0), 4)
        trainer.step(np.ma.masked_array(x), y)  # nothing is masked
        trainer.step(np.ma.masked_less(x, x.mean()) if comm.rank else x, y)

    with pytest.raises(DataError, match=r"^rank 1: input 'x': \d+ of \d+ elements are masked: give them values"):
        spawn(run, 2)


def test_fit_refuses_nonsense_and_nan() -> None:
    def run(comm: Communicator, **options: Any) -> None:
        with np.errstate(all="ignore"):
            make(comm, "mlp", optimizer=optim.SGD(lr=1e200)).fit(loader(comm), progress=False, **options)

    for options, text in (
        ({"patience": 1}, r"fit\(patience=1\): patience needs validation=..., and none is given"),
        ({"patience": 0}, r"fit\(patience=0\): a whole number, at least 1\n"),
        ({"every": 0}, r"fit\(every=0\): a whole number, at least 1\n"),
        ({"epochs": 1.5}, r"fit\(epochs=1.5\): a whole number, at least 1\n"),
        ({"steps": "3"}, r"fit\(steps='3'\): a whole number, at least 1, or None for whole epochs\n"),
        ({"stop": 3}, r"fit\(stop=3\): a function of the history, true where training is to end\n"),
        ({"epochs": 0}, r"fit\(epochs=0\): a whole number, at least 1\n"),
        ({"epoch": 1}, r"fit\(epoch=\.\.\.\): no such option; did you mean 'epochs'\?\n"),
        ({"xyz": 1}, r"fit\(xyz=\.\.\.\): no such option: loader, epochs, steps, validation, "),
        ({"checkpoints": 5}, r"fit\(checkpoints=5\): a folder, or fsdpx.CheckpointConfig\(folder, every=\.\.\.\)"),
    ):
        with pytest.raises(ConfigError, match=text):
            spawn(lambda c, options=options: run(c, **options), 1)
    with pytest.raises(NumericsError, match=r"check_finite=True\) names its origin"):
        spawn(lambda c: run(c, epochs=4), 2)


def test_fit_takes_one_callback_and_no_loader_that_is_none() -> None:
    called: list[int] = []
    comm = spawn(lambda comm: comm, 1)[0]
    trainer = make(comm, "mlp")
    trainer.fit(loader(comm), progress=False, callbacks=lambda _, history: called.append(history.steps))
    assert called == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"^fit: a loader of \(x, y\) batches is needed, .*, not 3"):
        trainer.fit(3, progress=False)


def test_a_loss_that_overflows_is_said_to_be_skipped() -> None:
    def run(comm: Communicator) -> float:
        trainer = make(comm, "mlp", precision=Precision(loss_scale="dynamic"), optimizer=optim.SGD(lr=1e-3))
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
        with np.errstate(all="ignore"):
            trainer.step(x, y * np.inf)
        return trainer.step(x, y)

    with pytest.warns(RuntimeWarning, match="the loss of step 1 is inf, and the update was skipped: distribute"):
        assert np.isfinite(spawn(run, 2)).all()


@on_ranks(2)
def test_lr_is_the_rate_of_the_next_update(comm: Communicator) -> None:
    trainer = make(comm, "mlp", optimizer=optim.SGD(lr=lambda step: 0.5 / step))
    assert trainer.inspect.lr == 0.5
    trainer.step(*CASES["mlp"].batch(np.random.default_rng(comm.rank), 4))
    assert trainer.inspect.last_update is not None
    assert (trainer.inspect.last_update.lr, trainer.inspect.lr) == (0.5, 0.25)


def test_a_trainer_has_few_names_and_takes_no_others() -> None:
    trainer = make(spawn(lambda comm: comm, 1)[0], "mlp")
    few = 27  # with the ranks that have parts of the same fields, and the grid of results
    assert len([name for name in dir(trainer) if not name.startswith("_")]) <= few
    assert not hasattr(trainer, "learning_rate")
    for name in ("learning_rate", "step", "clip_norm", "steps", "lr"):
        with pytest.raises(AttributeError, match=name):
            setattr(trainer, name, 1)


def report(comm: Communicator, strategy: str, group_bytes: int) -> Any:
    """After a step."""
    trainer = make(comm, "mlp", strategy, group_bytes=group_bytes)
    trainer.step(*CASES["mlp"].batch(np.random.default_rng(0), 4))
    return trainer.report()


def test_report_says_what_was_moved_held_and_spent() -> None:
    found = spawn(report, 2, "fsdp", 0)[0]
    moved = ["all-gather over shard", "reduce-scatter over shard", "bytes in total", "predicted per step"]
    assert [words for words in (*moved, "optimizer", "GATHER", "UPDATE") if words not in str(found)] == []
    assert found.times["F"][2] == 3
    assert found.memory["optimizer"] > 0


@pytest.mark.parametrize(
    ("strategy", "group_bytes", "told"), [("fsdp", 1 << 20, True), ("fsdp", 0, False), ("ddp", 1 << 20, False)]
)
def test_report_says_that_one_unit_is_gathered_at_once(strategy: str, group_bytes: int, told: bool) -> None:
    text = str(spawn(report, 2, strategy, group_bytes)[0])
    assert ("one unit: all layers are gathered and reduced at once" in text) == told
    assert (" parameters in 1 unit, 1 step\n" in text) == (group_bytes > 0)


def test_program_is_the_step_in_words() -> None:
    trainer = make(spawn(lambda comm: comm, 1)[0], "mlp", Sharding(prefetch=0), group_bytes=1 << 20)
    assert str(trainer.program) == "LOAD.0 GATHER0 F0.0 LOSS.0 MEAN B0.0 REDUCE0 SETTLE0 SCALE FREE0 UPDATE0"


def test_functional_default_is_used_inside_spawn() -> None:
    assert spawn(lambda comm: mlp().as_distributed().inspect.placement.axes.world.size, 3) == [3, 3, 3]


@pytest.mark.parametrize("strategy", ["ddp", "hybrid", "fsdp"])
def test_the_ring_is_another_way_to_the_same_sum(strategy: str) -> None:
    _, want, _ = spawn(lambda comm: train(comm, "mlp", strategy), 4)[0]
    for _, got, trainer in spawn(lambda comm: train(comm, "mlp", strategy, compression="ring"), 4):
        assert_close(got, want, 1e-12)
        assert trainer.inspect.placement.get_codec_route(0).replica.algorithm == "ring"


def test_ring_is_really_used() -> None:
    seen: list[str] = []

    def run(comm: Communicator) -> None:
        class Spy(CommunicatorWrapper):
            def issue(self, call: Call) -> Handle:
                if call.verb == "all_reduce":
                    seen.append(call.algorithm)
                return super().issue(call)

        make(Spy(comm), "mlp", "ddp", compression="ring").step(*CASES["mlp"].batch(np.random.default_rng(0), 4))

    spawn(run, 2)
    assert set(seen) == {"ring"}


def test_samples_that_are_dealt_out_without_chunks_are_told_how() -> None:
    def run(comm: Communicator) -> None:
        batch = CASES["mlp"].batch(np.random.default_rng(0), 3 if comm.rank else 5)
        make(comm, "mlp", reproducible_chunks=4).step(*batch)

    words = r"not \[5, 3\]: DataLoader\(\.\.\., reproducible_chunks=4\) splits batches this way"
    with pytest.raises(DataError, match=words):
        spawn(run, 2)


def test_a_rank_whose_others_do_not_exist_trains_on_numbers_and_names_itself_in_errors() -> None:
    model, x = nn.Linear(4, 3), np.ones((8, 4), np.float32)
    trainer = distribute(model, loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), comm=FakeCommunicator(1, 4))
    assert isinstance(trainer.step(x, np.ones(8, np.int64)), float)  # of parameters that no other rank has sent
    with pytest.raises(DataError, match=r"^rank 1: the target has 7 samples"):
        trainer.step(x, np.ones(7, np.int64))
