"""The recipes of CONTRIBUTING, each done once: what is added is all that stands here, and whole trainings use it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from models import part

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.comm import Communicator, Handle
from fsdpx.core.program import VERBS, Action, Program, Verb, check, compiler
from fsdpx.errors import DataError, ProgramError
from fsdpx.nn.layer import LayerContext, ParameterSpec
from fsdpx.optim.optimizer import Elementwise
from fsdpx.testing import LayerContract, LossContract, OptimizerContract, assert_close

PIPE = {"mesh": Mesh(pipe=2), "microbatches": 2}


def trained(comm: Communicator, steps: int = 4, model: Callable[[], nn.Layer] | None = None, **options: Any) -> Any:
    """A trainer after some steps on the same global batches, and its losses."""
    layers = model() if model else nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    options = {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.05), **options}
    trainer = layers.as_distributed(comm=comm, precision="float64", group_bytes=0, **options)
    losses, mine = [], part(trainer.data_group, 12)
    for seed in range(steps):
        rng = np.random.default_rng(seed)
        x, y = rng.standard_normal((12, 8)), rng.standard_normal((12, 4))
        losses.append(trainer.step(x[mine], y[mine]))
    return trainer, losses


# -- an optimizer: one class -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignDescent:
    """p <- p - lr sign(m), m <- beta m + g: signSGD with momentum (Bernstein et al., 2018)."""

    lr: float = 1e-3
    beta: float = 0.9
    slots: ClassVar[tuple[str, ...]] = ("m",)

    def update(
        self, xp: Any, p: Any, g: Any, slots: Mapping[str, Any], *, lr: float, step: int, segments: Any,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        slots["m"][...] = self.beta * slots["m"] + scale * g
        p -= lr * xp.sign(slots["m"])


class TestSignDescent(OptimizerContract):
    takes_groups = False
    make = SignDescent


@dataclass(frozen=True)
class Adan(Elementwise):
    """Nesterov's momentum with three means (Xie et al. 2022), whose options are called as in other optimizers but are
    more, and of other kinds: they are its own to check."""

    lr: optim.LearningRate = 1e-3
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99)
    eps: str = "inside"
    weight_decay: float = 0.0
    groups: optim.ParamGroups = field(default_factory=dict)
    momentum: None = None
    slots: ClassVar[tuple[str, ...]] = ("m", "d", "v", "last")

    def _update_span(self, xp: Any, p: Any, g: Any, slots: Mapping[str, Any], step: int, **rates: float) -> None:
        (b1, b2, b3), (m, d, v, last) = self.betas, (slots[name] for name in self.slots)
        g = rates["scale"] * g
        change = g - last if step > 1 else 0 * g
        m += (1 - b1) * (g - m)
        d += (1 - b2) * (change - d)
        v += (1 - b3) * ((g + b2 * change) ** 2 - v)
        last[...] = g
        steps = m / (1 - b1**step) + b2 * d / (1 - b2**step)
        p -= rates["lr"] * steps / (xp.sqrt(v / (1 - b3**step)) + 1e-8)
        p /= 1 + rates["lr"] * rates["weight_decay"]


class TestAdan(OptimizerContract):
    make = Adan


def test_an_optimizer_is_one_class(tmp_path: Path) -> None:
    """Its slots are rows of the ledger: they are saved, and go on at another number of ranks."""

    def save(comm: Communicator) -> dict[str, np.ndarray]:
        trainer, _ = trained(comm, optimizer=SignDescent())
        trainer.save(tmp_path / "a")
        return trainer.parameters()

    def load(comm: Communicator) -> tuple[dict[str, np.ndarray], float]:
        trainer, _ = trained(comm, 0, optimizer=SignDescent(), strategy="zero1")
        trainer.load(tmp_path / "a")
        return trainer.parameters(), float(np.abs(trainer.inspect.engine.state.ledger.get_array("slot", 0, "m")).sum())

    alone, many = spawn(save, 1)[0], spawn(save, 3)[0]
    for name, values in alone.items():
        np.testing.assert_allclose(many[name], values, rtol=0, atol=1e-12)
    again, moments = spawn(load, 2)[0]
    assert_close(again, many)
    assert moments > 0


# -- a layer: one class ------------------------------------------------------------------------------------------------


class Scale(nn.Layer):
    """y = x * weight, one weight per feature."""

    def __init__(self, features: int) -> None:
        self.features = features

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec((self.features,), nn.init.ones)}

    def forward(self, env: LayerContext, p: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
        return x * p["weight"], x

    def backward_input(self, env: LayerContext, p: Mapping[str, Any], saved: Any, dy: Any) -> tuple[Any, Any]:
        return dy * p["weight"], (saved, dy)

    def backward_params(self, env: LayerContext, g: Mapping[str, Any], kept: Any) -> None:
        x, dy = kept
        g["weight"] += (x * dy).reshape(-1, self.features).sum(0)


class TestScale(LayerContract):
    def make(self) -> nn.Layer:
        return Scale(6)

    def inputs(self) -> Any:
        return self.draw_normal(4, 6)


def test_a_layer_is_one_class() -> None:
    def model() -> nn.Layer:
        return nn.Sequential(nn.Linear(8, 6), Scale(6), nn.Tanh(), nn.Linear(6, 4))

    def run(comm: Communicator, options: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
        trainer, losses = trained(comm, model=model, **options)
        return losses, trainer.parameters()

    losses, alone = spawn(run, 1, {})[0]
    assert not (alone["1.weight"] == 1).all()
    for options in ({}, PIPE):
        got, many = spawn(run, 4, options)[0]
        np.testing.assert_allclose(got, losses, rtol=1e-12)
        for name, values in alone.items():
            np.testing.assert_allclose(many[name], values, rtol=1e-11, atol=1e-12)


# -- a loss: one class -------------------------------------------------------------------------------------------------


class LogCosh(nn.Loss):
    """log cosh(y - target), summed; weight: the elements."""

    acts_on = "position"

    def forward(self, env: LayerContext, y: Any, target: Any) -> tuple[float, float, Any]:
        difference = y - target.astype(y.dtype, copy=False)
        total = env.xp.sum(env.xp.log(env.xp.cosh(difference)), dtype=np.float64)
        return float(total), float(y.size), difference

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Any:
        return (seed * env.xp.tanh(saved)).astype(saved.dtype)

    def validate(self, shape: tuple[int, ...], target: Any) -> None:
        if tuple(target.shape) != tuple(shape):
            raise DataError(f"LogCosh: the target has shape {tuple(target.shape)}, the output {tuple(shape)}")


class TestLogCosh(LossContract):
    make = LogCosh

    def outputs(self) -> Any:
        return self.draw_normal(4, 3, 6)

    def target(self) -> Any:
        return self.draw_normal(4, 3, 6, seed=1)


def test_a_loss_is_one_class() -> None:
    losses, whole, piped = (
        spawn(lambda comm, o=options: trained(comm, loss=LogCosh(), **o)[1], ranks)[0]
        for ranks, options in ((1, {}), (4, {}), (4, PIPE))
    )
    assert losses[-1] < losses[0]
    np.testing.assert_allclose([whole, piped], [losses] * 2, rtol=1e-12)


# -- a codec with state: one class -------------------------------------------------------------------------------------


class Rounded(fsdpx.NoCompression):
    """Gradients rounded to multiples of `grain`. With `feedback` what rounding took away is added next time."""

    def __init__(self, grain: float, feedback: bool) -> None:
        super().__init__()
        self.grain, self.feedback = grain, feedback

    def memory_sizes(self, size: int) -> dict[str, int]:
        return {"error": size} if self.feedback else {}

    def _round(self, grad: Any, memory: Mapping[str, Any]) -> None:
        wanted = grad + memory["error"] if self.feedback else grad.copy()
        grad[...] = np.round(wanted / self.grain) * self.grain
        if self.feedback:
            memory["error"][...] = wanted - grad

    def reduce_scatter(
        self, comm: Any, grad: Any, out: Any, counts: Any, scratch: Any, memory: Mapping[str, Any], *, what: str
    ) -> Handle:
        self._round(grad, memory)
        return super().reduce_scatter(comm, grad, out, counts, scratch, memory, what=what)

    def all_reduce(self, comm: Any, grad: Any, scratch: Any, memory: Mapping[str, Any], *, what: str) -> Handle:
        self._round(grad, memory)
        return super().all_reduce(comm, grad, scratch, memory, what=what)


@pytest.mark.parametrize(
    ("strategy", "ranks", "rows"),
    [("fsdp", 2, {"shard/error"}), ("ddp", 2, {"replica/error"}), ("hybrid", 4, {"shard/error", "replica/error"})],
)
def test_a_codec_with_state_is_one_class(strategy: str, ranks: int, rows: set[str]) -> None:
    """Its memory has rows of its own, and brings training nearer to the plain sum than rounding alone does."""

    def run(comm: Communicator, codec: Any) -> tuple[dict[str, np.ndarray], set[str], int]:
        trainer, _ = trained(comm, 12, strategy=strategy, compression=codec)
        state = trainer.inspect.engine.state
        kept = {row.key.name for row in state.ledger if row.key.kind == "memory"}
        assert all(np.abs(a).any() for key, a in state.ledger.arrays.items() if key[::2] == ("memory", "shard/error"))
        return trainer.parameters(), kept, trainer.report().memory.get("codec memory", 0)

    plain, _, none = spawn(run, ranks, "plain")[0]
    alone, nothing, _ = spawn(run, ranks, Rounded(4.0, False))[0]
    fed, kept, nbytes = spawn(run, ranks, Rounded(4.0, True))[0]
    assert (none, nothing, kept) == (0, set(), rows)
    elements = 8 * 16 + 16 + 16 * 4 + 4
    assert nbytes == 8 * elements * (1.5 if strategy == "hybrid" else 1)

    def apart(one: dict[str, np.ndarray]) -> float:
        return float(sum(np.square(one[name] - plain[name]).sum() for name in plain))

    assert 0 < apart(fed) < 0.5 * apart(alone)


# -- a verb: a row of the table, an operation, a line that places it ---------------------------------------------------


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Programs made before a test changes the compiler do not serve it, and those made then nobody later."""
    yield compiler._compile_cached.cache_clear
    compiler._compile_cached.cache_clear()


def test_a_verb_is_a_row_and_an_operation(monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
    """PULL adds a constant to every gradient right before the update that takes it."""
    from fsdpx.core.engine import operations

    def pull(run: Any, action: Action, taken: Any, read: Any, added: Any) -> Any:
        (gradient,) = added
        gradient += 0.5 / read[0].factor
        return (gradient,)

    def placed(actions: list[Action], request: Any) -> list[Action]:
        tail = before(actions, request)
        return [b for a in tail for b in ([Action("PULL", a.unit), a] if a.op == "UPDATE" else [a])]

    before = compiler._make_update_actions
    plain = spawn(lambda comm: trained(comm, 1)[0].parameters(), 2)[0]
    monkeypatch.setitem(VERBS, "PULL", Verb(reads=("scale",), adds=("final:page",), about="page"))
    monkeypatch.setitem(operations.OPERATIONS, "PULL", pull)
    monkeypatch.setattr(compiler, "_make_update_actions", placed)
    forget()

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], Program]:
        trainer, _ = trained(comm, 1)
        return trainer.parameters(), trainer.program

    for got, program in spawn(run, 2):
        assert str(program).split()[-3:] == ["UPDATE1", "PULL0", "UPDATE0"]
        for name, values in plain.items():
            np.testing.assert_allclose(got[name], values - 0.05 * 0.5, rtol=1e-12, atol=1e-12)
        wrong = tuple(a for a in program.actions if str(a) != "UPDATE0")
        with pytest.raises(ProgramError, match="leaves part0 behind"):
            check(Program(program.kind, wrong, program.stage, 1, program.begins, program.ends, program.results))


# -- a communicator: one class; a schedule: one function ---------------------------------------------------------------
# A backend and a wrapper stand in tests/core/comm/test_recipes.py; here a whole training runs on a wrapper. A schedule
# stands in tests/core/program/test_recipes.py, and tests/core/engine/test_pipe.py trains with one.


def test_a_wrapper_is_one_class() -> None:
    from fsdpx.core.comm.communicator import Call, CommunicatorWrapper

    class Traced(CommunicatorWrapper):
        calls: ClassVar[list[str]] = []

        def issue(self, call: Call) -> Handle:
            self.calls.append(call.verb)
            return super().issue(call)

    losses = spawn(lambda comm: trained(comm)[1], 2)[0]
    assert spawn(lambda comm: trained(Traced(comm))[1], 2)[0] == losses
    assert {"all_gather", "reduce_scatter"} <= set(Traced.calls)
