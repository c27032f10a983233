"""Text from a trainer: with keys and values kept it is the text without, on every mesh; what cannot be is said."""

from typing import Any

import numpy as np
import pytest
from amount import few, in_full
from bits import Bits, bits
from models import make

from fsdpx import Mesh, Trainer, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError, DataError

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
DRAWN = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3, "seed": 7}


def llama(comm: Communicator, **options: Any) -> Trainer:
    model = nn.Llama(31, 16, 2, 4, 12, kv_heads=2, window=5, qk_norm=True)
    options = {"precision": "float64", "seed": 3, **options}
    return model.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)


def loud(trainer: Trainer) -> Trainer:
    """With larger weights, so that the next token depends on all before."""
    rng = np.random.default_rng(5)
    trainer.load_parameters({name: a + rng.normal(0, 0.3, a.shape) for name, a in trainer.parameters().items()})
    return trainer


def texts(comm: Communicator, of: Any, options: dict[str, Any], cache: bool) -> list[list[int]]:
    trainer = loud(of(comm, **options))
    found = [trainer.generate(PROMPTS, 13, cache=cache), trainer.generate(PROMPTS, 9, cache=cache, **DRAWN)]
    return [tokens.tolist() for several in found for tokens in several]


def gpt(comm: Communicator, **options: Any) -> Trainer:
    return make(comm, "wide" if options.pop("wide", False) else "gpt", **options)


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
    assert [len(one) for one in want] == [13, 13, 13, 9, 9, 9]
    assert len({tuple(one[:9]) for one in want}) == 6
    for ranks, options in PLACES:
        assert spawn(lambda comm, o=options: texts(comm, of, o, True), ranks) == [want] * ranks, options


@in_full
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
        (
            [1] * 9,
            {},
            DataError,
            "generate: prompt 0 has 9 tokens, the model's context has 8: leave out",
        ),
        ([[1], []], {}, DataError, "generate: prompt 1 is empty: give it one token at least"),
        ([], {}, DataError, "generate: prompt 0 is empty"),
        ([1, 31], {}, DataError, "generate: prompt 0: token 31 is not of the vocabulary, 0 to 30"),
        ([-1], {}, DataError, "generate: prompt 0: token -1 is not of the vocabulary, 0 to 30"),
        ([0.5], {}, DataError, "generate: prompt 0 is float64[1]: it must be a list of tokens, whole numbers"),
        (
            [1],
            {"temperature": -1.0},
            ConfigError,
            "generate(temperature=-1.0): it must be 0 (the most likely",
        ),
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
    with pytest.raises(ConfigError, match=r"the model gives \(1, 5\), not logits of each"):
        nn.Chain(nn.Embedding(5, 5), nn.Flatten()).as_distributed(
            loss=nn.MSE(), optimizer=optim.SGD(0.1), comm=alone
        ).generate([1], cache=False)
    both = nn.Chain(nn.Embedding(5, 8), nn.MultiHeadAttention(8, 2, causal=False), nn.Linear(8, 5))
    trainer = both.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(0.1), comm=alone)
    with pytest.raises(ConfigError, match=r"generate: layer '1' Attention\(.*\) keeps no keys and values"):
        trainer.generate([1])


def test_ranks_that_give_other_prompts_are_told() -> None:
    def run(comm: Communicator) -> str:
        with pytest.raises(Exception, match=r"ranks called different methods: .*generate") as caught:
            gpt(comm).generate([comm.rank], 2)
        return type(caught.value).__name__

    assert spawn(run, 2) == ["DesyncError"] * 2
