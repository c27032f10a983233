"""Two models, one step: backward gives the gradient of the inputs; gradients can be forgotten, parameters frozen."""

from typing import Any

import numpy as np
import pytest
from amount import in_full
from models import CASES, make

from fsdpx import Mesh, Precision, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError, DesyncError
from fsdpx.testing import demand_close


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
    trainer = two_inputs().as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)
    x, dy = batch(12)
    mine = slice(12 * trainer.data.rank // trainer.data.size, 12 * (trainer.data.rank + 1) // trainer.data.size)
    trainer.forward(tuple(part[mine] for part in x))
    dx = trainer.backward(tuple(part[mine] for part in dy))
    return mine, dx, trainer.gradients(), trainer.parameters()


def test_backward_gives_what_the_model_gives() -> None:
    _, dx, _, values = spawn(gradients, 1)[0]
    model, (x, dy) = two_inputs(), batch(12)
    directions = np.random.default_rng(1).normal(size=(12, 6)), np.random.default_rng(2).normal(size=(12, 3))

    def total(step: float) -> float:
        from fsdpx.array.random import Random
        from fsdpx.comm.mesh import alone
        from fsdpx.nn import Env

        moved = x[0] + step * directions[0], x[1], x[2] + step * directions[1]
        y, _ = model.forward(Env(np, alone(), Random(0)), values, moved)
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
        (2, {"mesh": Mesh(tensor=2), "tensor_plan": {"up": nn.Column(gather_output=True)}}),
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
        demand_close(g, want_g, 1e-12)


@in_full
def test_zero_grad_forgets_gradients_and_nothing_else() -> None:
    def run(comm: Communicator, strategy: str, detour: bool, local: bool) -> Any:
        trainer = make(comm, "mlp", strategy)
        x, y = CASES["mlp"].batch(np.random.default_rng(comm.rank), 4)
        if detour and local:
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
        want = spawn(lambda comm, s=strategy: run(comm, s, False, False), 2)[0]
        for local in (False, True):
            got = spawn(lambda comm, s=strategy, k=local: run(comm, s, True, k), 2)[0]
            demand_close(got, want)  # (strategy, local)


@in_full
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
        return before, trainer.parameters(), losses, trainer.freeze(pattern, undo=True), trainer.step(*batches[0])

    for strategy in ("ddp", "fsdp"):
        before, after, losses, _, _ = spawn(lambda comm, s=strategy: run(comm, s, False), 3)[0]
        _, want, want_losses, _, _ = spawn(lambda comm, s=strategy: run(comm, s, True), 3)[0]
        demand_close(after, want, 1e-13)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-13)
        still = [name for name in before if (before[name] == after[name]).all()]
        assert still == (["embed.weight"] if case == "gpt" else ["2.weight", "2.bias"])


def test_what_was_frozen_goes_on_with_its_optimiser_state() -> None:
    def run(comm: Communicator) -> Any:
        trainer = make(comm, "mlp", optimizer=optim.SGD(lr=0.01, momentum=0.9, weight_decay=0.1))
        x, y = CASES["mlp"].batch(np.random.default_rng(comm.rank), 4)
        trainer.step(x, y)
        trainer.freeze("0.*", "2.bias")
        held = trainer.parameters()
        trainer.step(x, y)
        there = trainer.parameters()
        trainer.freeze("*", undo=True)
        trainer.step(x, y)
        return held, there, trainer.parameters()

    for held, there, last in spawn(run, 2):
        names = ["0.weight", "0.bias", "2.bias"]
        assert [name for name in held if (held[name] == there[name]).all()] == ["0.weight", "0.bias", "2.bias"]
        assert all((there[name] != last[name]).any() for name in names)


def test_freeze_is_the_same_on_all_ranks_and_between_updates() -> None:
    def run(comm: Communicator, what: str) -> None:
        trainer = make(comm, "mlp")
        if what == "adding":
            trainer.accumulate(*CASES["mlp"].batch(np.random.default_rng(0), 4))
        trainer.freeze("9.*" if what == "unknown" else f"{2 * comm.rank}.*")

    with pytest.raises(ConfigError, match=r"freeze: '9\.\*' matches no parameter; there are '0\.weight', '0\.bias'"):
        spawn(lambda comm: run(comm, "unknown"), 2)
    with pytest.raises(ConfigError, match="freeze: gradients are being added up; call update or zero_grad first"):
        spawn(lambda comm: run(comm, "adding"), 2)
    with pytest.raises(DesyncError, match=r"rank 0: freeze\('0\.\*'\); rank 1: freeze\('2\.\*'\)"):
        spawn(lambda comm: run(comm, "differ"), 2)
