"""Trainers that only predict, and texts that go on."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from amount import few
from bits import Bits, bits
from models import alike, make, mlp
from threads import on_ranks

from fsdpx import EMA, Mesh, Trainer, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.engine.engine import DirectPrediction, Engine
from fsdpx.errors import ConfigError, DataError, FsdpxError

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_predicts_as_a_trainer_that_trains(comm: Communicator, strategy: str) -> None:
    whole = mlp().as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(), comm=comm, strategy=strategy)
    alone = mlp().as_distributed(comm=comm, strategy=strategy)
    np.testing.assert_array_equal(alone.predict(X), whole.predict(X))
    assert set(alone.report().memory) <= {"parameters", "working set"}  # no gradients, no state of an optimizer


@pytest.mark.parametrize(
    ("call", "use", "without"),
    [
        ("step", lambda t: t.step(X, X), "loss and optimizer"),
        ("accumulate", lambda t: t.accumulate(X, X), "loss and optimizer"),
        ("fit", lambda t: t.fit([]), "loss and optimizer"),
        ("evaluate", lambda t: t.evaluate(X, X), "loss"),
        ("update", lambda t: t.update(), "optimizer"),
    ],
)
def test_calls_that_need_more_say_what_is_missing(call: str, use: Callable[[Trainer], Any], without: str) -> None:
    with pytest.raises(ConfigError, match=rf"{call}: this trainer was made without {without}, .*distribute\("):
        use(nn.Linear(12, 12).as_distributed())


def test_evaluates_with_a_loss_and_goes_back_to_the_inputs() -> None:
    model = nn.Linear(12, 12)
    want = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1))
    alone = model.as_distributed(loss=nn.MSELoss())
    assert alone.evaluate(X, X) == want.evaluate(X, X)
    alone.forward(X), want.forward(X)
    np.testing.assert_array_equal(alone.backward(X), want.backward(X))
    with pytest.raises(ConfigError, match="step: this trainer was made without optimizer"):
        alone.step(X, X)


def test_a_model_without_parameters_and_an_average_of_nothing() -> None:
    np.testing.assert_array_equal(nn.ReLU().as_distributed().predict(X), np.maximum(X, 0))
    for name, value in (("average", EMA(0.9)), ("clip_norm", 1.0), ("compression", "bf16")):
        with pytest.raises(ConfigError, match=f"{name}=.*: without an optimizer nothing moves; leave {name} out"):
            nn.Linear(12, 12).as_distributed(**{name: value})


def test_one_rank_exchanges_nothing_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What repeated predictions of one shape must not do again."""
    trainer = nn.Linear(12, 12).as_distributed()
    trainer.predict(X)
    before = trainer.predict(X)  # as every later one: memory that programs share is planned for those that have run
    for name in ("session.output_shapes", "session.ProgramRequest", "batch.all_gather_four_integers"):
        monkeypatch.setattr(f"fsdpx.core.trainer.{name}", None)
    np.testing.assert_array_equal(trainer.predict(X), before)


def test_an_error_of_one_rank_names_it_and_freezing_is_seen() -> None:
    trainer = nn.Linear(12, 12).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1))
    before = trainer.predict(X)
    with pytest.raises(DataError, match="rank 0: "):
        trainer.predict(np.float32(1))
    trainer.step(X, X)
    assert (trainer.predict(X) != before).any()


def test_small_batches_run_their_layers_alone_and_give_the_bits_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on; what changes parameters in any way is seen, and where more than layers has to run, the
    program does."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    rng, runs = np.random.default_rng(1), []
    x, y = rng.standard_normal((4, 6), np.float32), rng.standard_normal((4, 2), np.float32)
    run = Engine.run_program
    monkeypatch.setattr(Engine, "run_program", lambda self, *rest: (runs.append(1), run(self, *rest))[1])
    trainer = net.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), average=EMA(0.5))

    def program(x: np.ndarray) -> np.ndarray:
        trainer._session.engine.direct.clear()
        return trainer.predict(x)

    def alike(batch: np.ndarray) -> None:
        whole = program(batch)
        runs.clear()
        np.testing.assert_array_equal(trainer.predict(batch), whole)
        assert not runs

    alike(x)
    trainer.step(x, y)
    alike(x)
    values = {name: value + 1 for name, value in trainer.parameters().items()}
    before = trainer.predict(x)
    trainer.load_parameters(values)
    assert (trainer.predict(x) != before).any()
    alike(x)
    trainer.accumulate(x, y)
    alike(x)
    trainer.update()
    alike(x[:1])
    alike(x[1:])
    alike(x[:, ::-1])
    alike(np.repeat(x, 20_000, axis=0))
    with monkeypatch.context() as patch:  # the program tells users what to do
        patch.setattr(DirectPrediction, "__call__", Mock(side_effect=MemoryError))
        want, _ = trainer.predict(x), runs.clear()
        np.testing.assert_array_equal(trainer.predict(x), want)
        assert runs
    assert (trainer.predict(x) != trainer.predict(x, weights="average")).any()
    assert trainer.predict(x.astype("f8")).dtype == np.float32
    bad = nn.Sequential(nn.Embedding(3, 2)).as_distributed()
    bad.predict(np.array([[1]]))
    for _ in range(2):
        with pytest.raises(FsdpxError, match="3"):
            bad.predict(np.array([[3]]))
    trainer.close()
    with pytest.raises(ConfigError, match="closed"):
        trainer.predict(x)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"check_finite": True}])
def test_where_more_than_layers_has_to_run_the_program_does(options: dict[str, Any]) -> None:
    trainer = nn.Linear(3, 2).as_distributed(**options)
    x = np.ones((1, 3), np.float32)
    first = trainer.predict(x)
    assert set(trainer._session.engine.direct.values()) <= {None}
    np.testing.assert_array_equal(trainer.predict(x), first)


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
DRAWN = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3, "seed": 7}


def llama(comm: Communicator, **options: Any) -> Trainer:
    model = nn.Llama(31, 16, 2, 4, 12, kv_heads=2, window=5, qk_norm=True)
    options = {"precision": "float64", "seed": 3, **options}
    return model.as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)


def loud(trainer: Trainer) -> Trainer:
    """With larger weights, so that the next token depends on all before."""
    rng = np.random.default_rng(5)
    trainer.load_parameters({name: a + rng.normal(0, 0.3, a.shape) for name, a in trainer.parameters().items()})
    return trainer


def texts(comm: Communicator, of: Any, options: dict[str, Any], cache: bool) -> list[list[int]]:
    trainer = loud(of(comm, **options))
    found = [trainer.generate(PROMPTS, 13, cache=cache), trainer.generate(PROMPTS, 5, cache=cache, **DRAWN)]
    return [tokens.tolist() for several in found for tokens in several]


def gpt(comm: Communicator, **options: Any) -> Trainer:
    return make(comm, "gpt", **options)


PLACES = [
    (1, {}),
    (2, {"strategy": "fsdp"}),
    (4, {"strategy": "ddp"}),
    (2, {"mesh": Mesh(tensor=2)}),
    (2, {"mesh": Mesh(pipe=2)}),
    (4, {"mesh": Mesh(pipe=2, tensor=2)}),
]


@pytest.mark.parametrize("of", few([llama, gpt], 2))
def test_the_text_with_a_cache_is_the_text_without_on_every_mesh(of: Any) -> None:
    (want,) = spawn(lambda comm: texts(comm, of, {}, False), 1)
    assert [len(one) for one in want] == [13, 13, 13, 5, 5, 5]
    assert len({tuple(one[:5]) for one in want}) == 6
    for ranks, options in PLACES:
        assert spawn(lambda comm, o=options: texts(comm, of, o, True), ranks) == [want] * ranks, options


def test_several_prompts_give_what_each_gives_alone() -> None:
    trainer = loud(gpt(spawn(lambda comm: comm, 1)[0]))
    together = trainer.generate(PROMPTS, 20)
    for prompt, found in zip(PROMPTS, together, strict=True):
        np.testing.assert_array_equal(trainer.generate(prompt, 20), found)
    seen: list[tuple[int, int]] = []
    stop = int(together[1][4])
    stopped = trainer.generate(PROMPTS, 20, stop=stop, stream=lambda i, token: seen.append((i, token)))
    for i, (short, whole) in enumerate(zip(stopped, together, strict=True)):
        end = [*whole.tolist(), stop].index(stop) + 1
        assert short.tolist() == whole[:end].tolist() == [token for row, token in seen if row == i]


def test_training_goes_on_as_if_nothing_had_been_written() -> None:
    def run(comm: Communicator, write: bool) -> Bits:
        trainer = gpt(comm)
        x = np.random.default_rng(comm.rank).integers(0, 31, (3, 8))
        trainer.accumulate(x, x)
        if write:
            trainer.generate([1, 2], 4)
        trainer.step(x, x)
        return bits(trainer)

    assert spawn(lambda comm: run(comm, True), 2) == spawn(lambda comm: run(comm, False), 2)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        ([1] * 9, {}, DataError, "generate: prompt 0 has 9 tokens, the model's context has 8: leave out"),
        ([[1], []], {}, DataError, "generate: prompt 1 is empty: give it one token at least"),
        ([], {}, DataError, "generate: prompt 0 is empty"),
        (None, {}, DataError, "generate: prompt 0 is object[]: it must be a list of tokens, whole numbers"),
        ([1, 31], {}, DataError, "generate: prompt 0: token 31 is not of the vocabulary, 0 to 30"),
        ([-1], {}, DataError, "generate: prompt 0: token -1 is not of the vocabulary, 0 to 30"),
        ([0.5], {}, DataError, "generate: prompt 0 is float64[1]: it must be a list of tokens, whole numbers"),
        ([1], {"temperature": -1.0}, ConfigError, "generate(temperature=-1.0): it must be 0 (the most likely"),
        ([1], {"top_p": 0.0}, ConfigError, "generate(top_p=0.0): it must be in (0, 1]"),
        ([1], {"top_p": 1.5}, ConfigError, "generate(top_p=1.5): it must be in (0, 1]"),
        ([1], {"top_k": 0}, ConfigError, "generate(top_k=0): it must be a whole number >= 1"),
        ([1], {"repetition_penalty": 0}, ConfigError, "generate(repetition_penalty=0): it must be > 0; 1 is none"),
        ([1], {"stop": 31}, ConfigError, "generate(stop=...): token 31 is not of the vocabulary, 0 to 30"),
        ([1], {"max_new_tokens": 0}, ConfigError, "generate(max_new_tokens=0): it must be a whole number >= 1"),
    ],
)
def test_what_cannot_be_is_said(prompt: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    trainer = gpt(spawn(lambda comm: comm, 1)[0])
    with pytest.raises(error) as caught:
        trainer.generate(prompt, **options)
    assert str(caught.value).startswith(text)


def test_a_model_that_cannot_write_says_why() -> None:
    alone = spawn(lambda comm: comm, 1)[0]
    flat = nn.Sequential(nn.Embedding(5, 5), nn.Flatten())
    with pytest.raises(ConfigError, match=r"the model gives \(1, 5\), not logits of each"):
        flat.as_distributed(comm=alone).generate([1], cache=False)
    both = nn.Sequential(nn.Embedding(5, 8), nn.MultiHeadAttention(8, 2, causal=False), nn.Linear(8, 5))
    with pytest.raises(ConfigError, match=r"generate: layer '1' Attention\(.*\) keeps no keys and values"):
        both.as_distributed(comm=alone).generate([1])


def test_ranks_that_give_other_prompts_are_told() -> None:
    text = alike(2, lambda comm: gpt(comm).generate([comm.rank], 2))
    assert re.match("DesyncError: ranks called different methods: .*generate", text)
