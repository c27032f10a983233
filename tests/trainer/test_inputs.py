"""What becomes of an input's format before the first layer: as if it had come in floats, or as indices."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import Mesh, nn, optim
from fsdpx.comm import Communicator
from fsdpx.comm.opening import world as open_world
from fsdpx.errors import ConfigError, DataError
from fsdpx.testing import demand_close

FORMATS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", ">u2", ">f4")
IMAGES = np.arange(4 * 3 * 4 * 4).reshape(4, 3, 4, 4) * 7 % 120


class Last(nn.Layer):
    """The last number of each row: an array of the input's format."""

    takes = "passed"

    def forward(self, env: nn.Env, p: Any, x: Any) -> tuple[Any, Any]:
        return x[..., -1], (x.shape,)

    def backward_input(self, env: nn.Env, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
        dx = env.xp.zeros(saved[0], dtype=dy.dtype)
        dx[..., -1] = dy
        return dx, ()


def both() -> nn.Layer:
    """One input that one layer takes as indices, and the other as numbers."""
    nodes = {"e": (nn.Chain(nn.Flatten(), nn.Embedding(120, 4), nn.Flatten()), "x"), "n": (nn.Flatten(), "x")}
    return nn.Graph({**nodes, "join": (nn.Concat(), "e", "n"), "last": (nn.Linear(240, 2), "join")}, outputs="last")


NUMBERS: dict[str, Callable[[], nn.Layer]] = {
    "BatchNorm": lambda: nn.BatchNorm(3),
    "Residual": lambda: nn.Residual(nn.Linear(4, 4)),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "TransformerBlock": lambda: nn.Chain(nn.Flatten(2), nn.TransformerBlock(16, 2)),
    "Linear": lambda: nn.Linear(4, 2),
    "Conv2d": lambda: nn.Conv2d(3, 2, 3),
    "MLP": lambda: nn.Chain(nn.Flatten(), nn.MLP(48, 8)),
    "MaxPool2d": lambda: nn.Chain(nn.MaxPool2d(2), nn.Flatten()),
    "Lambda": lambda: nn.Lambda(np.sin, np.cos),
}
INDICES: dict[str, Callable[[], nn.Layer]] = {
    "Embedding": lambda: nn.Chain(nn.Flatten(), nn.Embedding(120, 4)),
    "TokenEmbedding": lambda: nn.Chain(nn.Flatten(), nn.TokenEmbedding(120, 4, 48)),
    "Residual": lambda: nn.Residual(nn.Chain(nn.Embedding(120, 4), Last())),
    "both": both,
}


def results(comm: Communicator | None, model: nn.Layer, x: Any, **options: Any) -> Any:
    if comm is not None:
        x = np.array_split(x, comm.size)[comm.rank]
    with fsdpx.distribute(model, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm, **options) as trainer:
        y = trainer.predict(x)
        target = np.zeros(y.shape)
        return y, trainer.step(x, target), trainer.evaluate(x, target), trainer.forward(x), trainer.parameters()


def same(a: Any, b: Any) -> None:
    demand_close(a, b)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("layer", NUMBERS)
def test_whole_numbers_give_what_floats_of_the_same_values_give(layer: str, precision: str) -> None:
    want = results(None, NUMBERS[layer](), IMAGES.astype("float64"), precision=precision)
    for kind in FORMATS:
        same(results(None, NUMBERS[layer](), IMAGES.astype(kind), precision=precision), want)
    truth = results(None, NUMBERS[layer](), (IMAGES % 2).astype("float32"), precision=precision)
    same(results(None, NUMBERS[layer](), IMAGES % 2 == 1, precision=precision), truth)


@pytest.mark.parametrize("layer", INDICES)
def test_indices_stay_whole_numbers_of_any_format(layer: str) -> None:
    want = results(None, INDICES[layer](), IMAGES)
    for kind in FORMATS[:-1]:
        same(results(None, INDICES[layer](), IMAGES.astype(kind)), want)
    same(results(None, INDICES[layer](), IMAGES % 2 == 1), results(None, INDICES[layer](), IMAGES % 2))


def test_an_input_of_indices_and_numbers_is_what_two_inputs_are() -> None:
    """The numbers are exact where a float of the model's format would not be; the indices as well."""
    x = np.array([[16_777_217 % 120, 3], [7, 119]])
    graph = {"e": (nn.Embedding(120, 2), "x"), "l": (nn.Linear(2, 2), "z"), "f": (nn.Flatten(), "e")}
    nodes = {**graph, "join": (nn.Concat(), "f", "l")}
    apart = nn.Graph(nodes, inputs=("x", "z"), outputs="join")
    one = nn.Graph({**nodes, "l": (nn.Linear(2, 2), "x")}, outputs="join")
    target = np.zeros((2, 6))

    def run(model: nn.Layer, batch: Any) -> Any:
        with fsdpx.distribute(model, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1)) as trainer:
            return trainer.predict(batch), trainer.step(batch, target), trainer.parameters()

    same(run(one, x), run(apart, (x, x.astype("float32"))))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp"},
        {"strategy": "ddp", "recompute": "all"},
        {"mesh": Mesh(shard=1, pipe=2), "microbatches": 2},
        {"mesh": Mesh(shard=1, tensor=2), "tensor_plan": {"n.last": nn.Column, "1": nn.Row}},
    ],
    ids=["fsdp", "recompute", "pipe", "tensor"],
)
def test_the_rule_is_the_same_on_ranks_that_share_a_model(options: Any) -> None:
    def model() -> nn.Layer:
        first = {"n": nn.Chain(nn.Flatten(2), nn.Residual(nn.LayerNorm(16)), nn.Flatten(), {"last": nn.Linear(48, 2)})}
        return nn.Chain(first, nn.Linear(2, 2))

    def run(comm: Communicator, kind: str) -> Any:
        x = IMAGES if "mesh" in options else np.array_split(IMAGES, 2)[comm.rank]
        with fsdpx.distribute(model(), loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm, **options) as trainer:
            target = np.zeros((len(x), 2))
            losses = [trainer.step(x.astype(kind), target) for _ in range(2)]
            return np.array(losses), trainer.evaluate(x.astype(kind), target), trainer.parameters()

    for kind in ("uint8", ">i4"):
        for one, other in zip(fsdpx.spawn(run, 2, kind), fsdpx.spawn(run, 2, "float32"), strict=True):
            same(one, other)


def test_tokens_of_few_bits_and_foreign_byte_order_are_generated_from() -> None:
    model = nn.GPT(vocab=50, d_model=8, n_layers=1, n_heads=2, seq_len=12)
    trainer = fsdpx.distribute(model, seed=3)
    want = trainer.generate(np.array([3, 4, 5]), max_new_tokens=4)
    for kind in ("uint8", "uint16", ">i4", "uint64"):
        np.testing.assert_array_equal(trainer.generate(np.array([3, 4, 5], kind), max_new_tokens=4), want)


def test_what_a_float16_cannot_hold_is_refused_by_the_name_of_the_input() -> None:
    trainer = fsdpx.distribute(nn.Linear(2, 2), precision=fsdpx.Precision("float16"))
    with pytest.raises(DataError, match=r"input 'x' is int32 and holds numbers beyond 65504, the largest of float16"):
        trainer.predict(np.array([[1, 70_000]], "int32"))
    assert trainer.predict(np.array([[1, 60_000]], "int32")).shape == (1, 2)


def test_whole_numbers_of_a_layer_do_not_come_to_one_that_takes_numbers() -> None:
    class Ranks(Last):
        takes = "given"

    with pytest.raises(ConfigError, match=r"layer '1' Linear\(4, 2\) takes numbers, but gets int64: a layer"):
        fsdpx.distribute(nn.Chain(Ranks(), nn.Linear(4, 2))).predict(IMAGES)


def test_a_layer_of_the_users_says_in_one_word_that_it_takes_indices() -> None:
    class Table(nn.Layer):
        def specs(self) -> dict[str, nn.Spec]:
            return {"rows": nn.Spec((120, 2))}

        def forward(self, env: nn.Env, p: Any, x: Any) -> tuple[Any, Any]:
            return p["rows"][x], (x,)

        def backward_input(self, env: nn.Env, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
            return None, ()

    with pytest.raises(fsdpx.errors.FsdpxError, match='takes = "indices"'):
        fsdpx.distribute(Table()).predict(IMAGES)
    Table.takes = "indices"
    assert fsdpx.distribute(Table()).predict(IMAGES).shape == (*IMAGES.shape, 2)
    Table.takes = "indexes"
    with pytest.raises(ConfigError, match=r"takes = 'indexes' must be one of 'given', 'indices', 'numbers', 'passed'"):
        fsdpx.distribute(Table())


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["uint8", ">i4", "bool"])
def test_under_mpi(kind: str) -> None:
    comm, x = open_world("node"), IMAGES.astype(kind)
    make = NUMBERS["Residual"]
    same(results(comm, make(), x), results(comm, make(), x.astype("float32")))
