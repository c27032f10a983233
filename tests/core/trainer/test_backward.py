"""Loops of one's own: forward, backward and update, and what goes into a model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import CASES, Same, make, own_part, part
from present import needs
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, Precision, nn, optim, spawn
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.init import open_world as open_world
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.errors import ConfigError, DataError, DesyncError
from fsdpx.testing import assert_close


def two_inputs() -> nn.Layer:
    """Inputs that several stages read; one also leaves the model as it came; a third is of whole numbers."""
    return nn.Graph(
        {
            "up": (nn.Linear(6, 8), "a"),
            "name": (nn.Embedding(5, 8), "i"),
            "act": (nn.Tanh(), "up"),
            "sum": (nn.Add(), "act", "name"),
            "mid": (nn.Linear(8, 6), "sum"),
            "both": (nn.Concat(), "mid", "a", "b"),
            "out": (nn.Linear(15, 4), "both"),
        },
        inputs=("a", "i", "b"),
        outputs=("out", "b"),
    )


def batch(n: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 6)), rng.integers(0, 5, n), rng.normal(size=(n, 3))
    return x, (rng.normal(size=(n, 4)), rng.normal(size=(n, 3)))


def gradients(comm: Communicator, **options: Any) -> Any:
    """The gradients of this data rank's inputs and of all parameters."""
    options = {"precision": "float64", "group_bytes": 0, "seed": 3, **options}
    trainer = two_inputs().as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)
    (x, dy), mine = batch(12), part(trainer.data_group, 12)
    trainer.forward(tuple(array[mine] for array in x))
    dx = trainer.backward(tuple(array[mine] for array in dy))
    return mine, dx, trainer.gradients(), trainer.parameters()


def test_backward_gives_what_the_model_gives() -> None:
    _, dx, _, values = spawn(gradients, 1)[0]
    model, (x, dy) = two_inputs(), batch(12)
    directions = np.random.default_rng(1).normal(size=(12, 6)), np.random.default_rng(2).normal(size=(12, 3))

    def total(step: float) -> float:
        moved = x[0] + step * directions[0], x[1], x[2] + step * directions[1]
        y, _ = model.forward(nn.LayerContext(np, make_single_rank_axes(), Random(0)), values, moved)
        return sum(float(np.sum(a * b)) for a, b in zip(y, dy, strict=True))

    assert dx[1] is None
    got = float(np.sum(dx[0] * directions[0]) + np.sum(dx[2] * directions[1]))
    assert got == pytest.approx((total(1e-6) - total(-1e-6)) / 2e-6, rel=1e-7)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"strategy": "ddp"}),
        (3, {"strategy": "fsdp"}),
        (2, {"mesh": Mesh(pipe=2), "stages": [4, 3]}),
        (4, {"mesh": Mesh(pipe=2), "stages": ["up", "both"], "strategy": "zero2"}),
        (2, {"mesh": Mesh(tensor=2), "tensor_plan": {"up": nn.sharding.ColumnParallel(gather_output=True)}}),
        (2, {"precision": Precision("float64", loss_scale=1024.0)}),
    ],
    ids=["ddp", "fsdp", "pipe", "pipe and data", "tensor", "loss scale"],
)
def test_backward_gives_the_gradient_of_the_inputs_on_every_mesh(size: int, options: dict[str, Any]) -> None:
    _, want, want_g, _ = spawn(gradients, 1)[0]
    for mine, dx, g, _ in spawn(lambda comm: gradients(comm, **options), size):
        assert dx[1] is None
        for i in (0, 2):
            np.testing.assert_allclose(dx[i], want[i][mine], rtol=1e-11, atol=1e-13)
        assert_close(g, want_g, 1e-12)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
@on_ranks(2)
def test_a_gradient_of_whole_numbers_is_one_of_numbers(comm: Communicator, dtype: Any) -> None:
    trainer, (x, _) = make(comm, "mlp"), CASES["mlp"].batch(np.random.default_rng(comm.rank), 4)
    dy = np.random.default_rng(comm.rank).integers(0, 2, trainer.forward(x).shape)
    wanted = trainer.backward(dy.astype(np.float64))
    trainer.forward(x)
    assert np.array_equal(trainer.backward(dy.astype(dtype)), wanted)


def test_zero_grad_forgets_gradients_and_nothing_else() -> None:
    def run(comm: Communicator, strategy: str, detour: str) -> Any:
        trainer = make(comm, "mlp", strategy)
        x, y = CASES["mlp"].batch(np.random.default_rng(comm.rank), 4)
        if detour == "local":
            with trainer.no_sync():
                trainer.accumulate(x, y)
        elif detour:
            trainer.backward(np.ones_like(trainer.forward(x)))
        if detour:
            trainer.zero_grad()
            with pytest.raises(ConfigError, match="update: there are no gradients"):
                trainer.update()
        output = trainer.forward(x)
        trainer.zero_grad()  # what forward keeps is still there
        trainer.backward((output - y) / (4 * comm.size))
        trainer.update()
        trainer.step(x, y)
        return trainer.parameters()

    for strategy in ("ddp", "fsdp", "zero2"):
        want = spawn(run, 2, strategy, "")[0]
        for detour in ("summed", "local"):
            assert_close(spawn(run, 2, strategy, detour)[0], want)


class Interrupted(Same):
    """Ctrl-C in the backward that it is armed for."""

    armed = False

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        if Interrupted.armed:
            Interrupted.armed = False
            raise KeyboardInterrupt
        return dy, ()


@pytest.mark.parametrize("options", [{}, {"microbatches": 3}, {"reproducible_chunks": 4}])
def test_a_step_that_ctrl_c_breaks_off_leaves_no_gradients(options: dict[str, Any]) -> None:
    def run(comm: Communicator, interrupts: bool) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), Interrupted(), nn.Linear(8, 3))
        adam = optim.AdamW(lr=1e-2)
        trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=adam, comm=comm, precision="float64", **options)
        x = np.random.default_rng(0).normal(size=(12, 4))
        if interrupts:
            Interrupted.armed = True
            with pytest.raises(KeyboardInterrupt):
                trainer.step(x, x[:, :3])
            with pytest.raises(ConfigError, match="update: there are no gradients"):
                trainer.update()
        trainer.step(x, x[:, :3])
        return trainer.inspect.compute_fingerprint()

    assert spawn(run, 1, True) == spawn(run, 1, False)


@pytest.mark.parametrize("optimizer", [optim.AdamW(lr=1e-2, eps=1e-5, weight_decay=0.1), optim.LAMB(lr=1e-2)])
@pytest.mark.parametrize(("case", "pattern"), [("mlp", "2.*"), ("gpt", "head.weight")])
def test_frozen_parameters_stay_and_the_others_do_not_notice(case: str, pattern: str, optimizer: Any) -> None:
    def run(comm: Communicator, strategy: str, frozen: bool) -> Any:
        trainer = make(comm, case, strategy, optimizer=optimizer, clip_norm=0.5, frozen=[pattern] if frozen else ())
        if not frozen:
            trainer.freeze(pattern)
        before = trainer.parameters()
        batches = [CASES[case].batch(np.random.default_rng([seed, comm.rank]), 4) for seed in range(3)]
        losses = [trainer.step(*one) for one in batches]
        return before, trainer.parameters(), losses, trainer.unfreeze(pattern), trainer.step(*batches[0])

    for strategy in ("ddp", "fsdp"):
        before, after, losses, _, _ = spawn(run, 3, strategy, False)[0]
        _, want, want_losses, _, _ = spawn(run, 3, strategy, True)[0]
        assert_close(after, want, 1e-13)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-13)
        still = [name for name in before if (before[name] == after[name]).all()]
        assert still == (["embed.weight"] if case == "gpt" else ["2.weight", "2.bias"])


@on_ranks(2)
def test_what_was_frozen_goes_on_with_its_optimizer_state(comm: Communicator) -> None:
    trainer = make(comm, "mlp", optimizer=optim.SGD(lr=0.01, momentum=0.9, weight_decay=0.1))
    x, y = CASES["mlp"].batch(np.random.default_rng(comm.rank), 4)
    trainer.step(x, y)
    trainer.freeze("0.*", "2.bias")
    held = trainer.parameters()
    trainer.step(x, y)
    there = trainer.parameters()
    trainer.unfreeze("*")
    trainer.step(x, y)
    last, names = trainer.parameters(), ["0.weight", "0.bias", "2.bias"]
    assert [name for name in held if (held[name] == there[name]).all()] == names
    assert all((there[name] != last[name]).any() for name in names)


def test_freeze_is_the_same_on_all_ranks_and_between_updates() -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm, "mlp")
        words = r"freeze: '9\.\*' matches no parameter; there are '0\.weight', '0\.bias'"
        with pytest.raises(ConfigError, match=words):
            trainer.freeze("9.*")
        trainer.accumulate(*own_part(comm, "mlp", 8))
        with pytest.raises(ConfigError, match="freeze: gradients are being added up; call update or zero_grad first"):
            trainer.freeze("0.*")
        trainer.zero_grad()
        trainer.freeze(f"{2 * comm.rank}.*")

    with pytest.raises(DesyncError, match=r"rank 0: freeze\('0\.\*'\); rank 1: freeze\('2\.\*'\)"):
        spawn(run, 2)


FORMATS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", ">u2", ">f4")
IMAGES = np.arange(4 * 3 * 4 * 4).reshape(4, 3, 4, 4) * 7 % 120


class Last(nn.Layer):
    """The last number of each row: an array of the input's format."""

    takes = "passed"

    def forward(self, env: nn.LayerContext, p: Any, x: Any) -> tuple[Any, Any]:
        return x[..., -1], (x.shape,)

    def backward_input(self, env: nn.LayerContext, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
        dx = env.xp.zeros(saved[0], dtype=dy.dtype)
        dx[..., -1] = dy
        return dx, ()


def both() -> nn.Layer:
    """One input that one layer takes as indices, and the other as numbers."""
    nodes = {"e": (nn.Sequential(nn.Flatten(), nn.Embedding(120, 4), nn.Flatten()), "x"), "n": (nn.Flatten(), "x")}
    return nn.Graph({**nodes, "join": (nn.Concat(), "e", "n"), "last": (nn.Linear(240, 2), "join")}, outputs="last")


NUMBERS: dict[str, Callable[[], nn.Layer]] = {
    "BatchNorm": lambda: nn.BatchNorm(3),
    "Residual": lambda: nn.Residual(nn.Linear(4, 4)),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "TransformerBlock": lambda: nn.Sequential(nn.Flatten(2), nn.TransformerBlock(16, 2)),
    "Linear": lambda: nn.Linear(4, 2),
    "Conv2d": lambda: nn.Conv2d(3, 2, 3),
    "MLP": lambda: nn.Sequential(nn.Flatten(), nn.MLP(48, 8)),
    "MaxPool2d": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),
    "Lambda": lambda: nn.Lambda(np.sin, np.cos),
}
INDICES: dict[str, Callable[[], nn.Layer]] = {
    "Embedding": lambda: nn.Sequential(nn.Flatten(), nn.Embedding(120, 4)),
    "TokenEmbedding": lambda: nn.Sequential(nn.Flatten(), nn.TokenEmbedding(120, 4, 48)),
    "Residual": lambda: nn.Residual(nn.Sequential(nn.Embedding(120, 4), Last())),
    "both": both,
}


def results(comm: Communicator | None, model: nn.Layer, x: Any, **options: Any) -> Any:
    if comm is not None:
        x = np.array_split(x, comm.size)[comm.rank]
    with fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, **options) as trainer:
        y = trainer.predict(x)
        target = np.zeros(y.shape)
        return y, trainer.step(x, target), trainer.evaluate(x, target), trainer.forward(x), trainer.parameters()


@pytest.mark.parametrize(("layer", "precision"), [
    *(pytest.param(n, "float32", marks=needs("fields") if "2d" in n else ()) for n in NUMBERS),
    ("BatchNorm", "float64"), ("Linear", "float64"),
])  # fmt: skip
def test_whole_numbers_give_what_floats_of_the_same_values_give(layer: str, precision: str) -> None:
    want = results(None, NUMBERS[layer](), IMAGES.astype("float64"), precision=precision)
    for kind in FORMATS:
        assert_close(results(None, NUMBERS[layer](), IMAGES.astype(kind), precision=precision), want)
    truth = results(None, NUMBERS[layer](), (IMAGES % 2).astype("float32"), precision=precision)
    assert_close(results(None, NUMBERS[layer](), IMAGES % 2 == 1, precision=precision), truth)


@pytest.mark.parametrize("layer", INDICES)
def test_indices_stay_whole_numbers_of_any_format(layer: str) -> None:
    want = results(None, INDICES[layer](), IMAGES)
    for kind in FORMATS[:-1]:
        assert_close(results(None, INDICES[layer](), IMAGES.astype(kind)), want)
    assert_close(results(None, INDICES[layer](), IMAGES % 2 == 1), results(None, INDICES[layer](), IMAGES % 2))


def test_an_input_of_indices_and_numbers_is_what_two_inputs_are() -> None:
    """The numbers are exact where a float of the model's format would not be; the indices as well."""
    x = np.array([[16_777_217 % 120, 3], [7, 119]])
    graph = {"e": (nn.Embedding(120, 2), "x"), "l": (nn.Linear(2, 2), "z"), "f": (nn.Flatten(), "e")}
    nodes = {**graph, "join": (nn.Concat(), "f", "l")}
    apart = nn.Graph(nodes, inputs=("x", "z"), outputs="join")
    one = nn.Graph({**nodes, "l": (nn.Linear(2, 2), "x")}, outputs="join")
    assert_close(results(None, one, x), results(None, apart, (x, x.astype("float32"))))


TENSOR_PLAN = {"n.last": nn.sharding.ColumnParallel, "1": nn.sharding.RowParallel}


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp"},
        {"strategy": "ddp", "recompute": "all"},
        {"mesh": Mesh(shard=1, pipe=2), "microbatches": 2},
        {"mesh": Mesh(shard=1, tensor=2), "tensor_plan": TENSOR_PLAN},
    ],
    ids=["fsdp", "recompute", "pipe", "tensor"],
)
def test_the_rule_is_the_same_on_ranks_that_share_a_model(options: Any) -> None:
    def run(comm: Communicator, kind: str) -> Any:
        x = IMAGES if "mesh" in options else np.array_split(IMAGES, 2)[comm.rank]
        inner = nn.Sequential(nn.Flatten(2), nn.Residual(nn.LayerNorm(16)), nn.Flatten(), {"last": nn.Linear(48, 2)})
        model = nn.Sequential({"n": inner}, nn.Linear(2, 2))
        with fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, **options) as trainer:
            target = np.zeros((len(x), 2))
            losses = [trainer.step(x.astype(kind), target) for _ in range(2)]
            return np.array(losses), trainer.evaluate(x.astype(kind), target), trainer.parameters()

    for kind in ("uint8", ">i4"):
        assert_close(spawn(run, 2, kind), spawn(run, 2, "float32"))


def test_tokens_of_few_bits_and_foreign_byte_order_are_generated_from() -> None:
    trainer = fsdpx.distribute(nn.GPT(vocab=50, d_model=8, n_layers=1, n_heads=2, seq_len=12), seed=3)
    want = trainer.generate(np.array([3, 4, 5]), max_new_tokens=4)
    for kind in ("uint8", "uint16", ">i4", "uint64"):
        np.testing.assert_array_equal(trainer.generate(np.array([3, 4, 5], kind), max_new_tokens=4), want)


def test_what_a_float16_cannot_hold_is_refused_by_the_name_of_the_input() -> None:
    trainer = fsdpx.distribute(nn.Linear(2, 2), precision=fsdpx.Precision("float16"))
    with pytest.raises(DataError, match=r"input 'x' is int32 but contains numbers beyond 65504, the largest of"):
        trainer.predict(np.array([[1, 70_000]], "int32"))
    assert trainer.predict(np.array([[1, 60_000]], "int32")).shape == (1, 2)


def test_whole_numbers_of_a_layer_do_not_come_to_one_that_takes_numbers() -> None:
    class Ranks(Last):
        takes = "given"

    with pytest.raises(ConfigError, match=r"layer '1' Linear\(4, 2\) takes numbers, but gets int64: a layer"):
        fsdpx.distribute(nn.Sequential(Ranks(), nn.Linear(4, 2))).predict(IMAGES)


def test_a_layer_of_the_users_says_in_one_word_that_it_takes_indices() -> None:
    class Table(nn.Layer):
        def specs(self) -> dict[str, nn.ParameterSpec]:
            return {"rows": nn.ParameterSpec((120, 2))}

        def forward(self, env: nn.LayerContext, p: Any, x: Any) -> tuple[Any, Any]:
            return p["rows"][x], (x,)

        def backward_input(self, env: nn.LayerContext, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
            return None, ()

    with pytest.raises(fsdpx.errors.FsdpxError, match='takes = "indices"'):
        fsdpx.distribute(Table()).predict(IMAGES)
    Table.takes = "indices"
    assert fsdpx.distribute(Table()).predict(IMAGES).shape == (*IMAGES.shape, 2)
    Table.takes = "indexes"
    words = "'exact', 'given', 'indices', 'numbers', 'passed'"
    with pytest.raises(ConfigError, match=f"takes = 'indexes' must be one of {words}"):
        fsdpx.distribute(Table())


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["uint8", ">i4", "bool"])
def test_under_mpi(kind: str) -> None:
    comm, x, model = open_world("node"), IMAGES.astype(kind), NUMBERS["Residual"]()
    assert_close(results(comm, model, x), results(comm, model, x.astype("float32")))


@pytest.mark.parametrize("layers", [[nn.GELU, nn.Linear], [nn.LayerNorm, nn.Tanh]])
def test_callers_may_reuse_their_arrays_between_the_passes(layers):
    """Layers keep inputs and results for the backward pass."""

    def run(change):
        sizes = {nn.Linear: (6, 6), nn.LayerNorm: (6,)}
        model = nn.Sequential(*(layer(*sizes.get(layer, ())) for layer in layers))
        trainer, x = fsdpx.distribute(model, seed=0, precision="float32"), np.arange(24, dtype="f").reshape(4, 6) / 24
        y = trainer.forward(x)
        if change:
            x[...], y[...] = 0.5, 0.25
        return [trainer.backward(np.ones_like(y)), *trainer.gradients().values()]

    for got, want in zip(run(True), run(False), strict=True):
        np.testing.assert_array_equal(got, want)
