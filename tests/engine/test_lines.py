"""Lines of equal small linear layers: the same bits as one by one, whatever stands between and around them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from amount import few

from fsdpx import Precision, Trainer, nn, optim, spawn
from fsdpx.array import blas
from fsdpx.layout.units import Unit, lay_out
from fsdpx.nn.sort import sort

pytestmark = pytest.mark.skipif(blas.chosen() == "numpy", reason="lines need a BLAS to call")


def square(count: int, width: int = 12, **options: Any) -> list[nn.Layer]:
    return [nn.Linear(width, width, **options) for _ in range(count)]


def tied() -> nn.Layer:
    return nn.Chain(*square(6), ties={"3.weight": "1.weight", "3.bias": "1.bias"})


def branched() -> nn.Layer:
    """A value in the middle of a line that is read twice, and one that the model gives."""
    nodes: dict[str, Any] = {"l0": (nn.Linear(12, 12), "x")}
    nodes |= {f"l{i}": (nn.Linear(12, 12), f"l{i - 1}") for i in range(1, 12)}
    nodes["sum"] = (nn.Add(), "l5", "l11")
    return nn.Graph(nodes, inputs=("x",), outputs=("sum",))


MODELS: dict[str, Callable[[], nn.Layer]] = {
    "whole": lambda: nn.Chain(*square(9)),
    "broken": lambda: nn.Chain(*square(5), nn.GELU(), *square(4), nn.Linear(12, 12, bias=False), *square(6)),
    "widths": lambda: nn.Chain(nn.Linear(12, 20), *square(5, 20), nn.Linear(20, 12), *square(2)),
    "tied": tied,
    "branched": branched,
    "frozen": lambda: nn.Chain(*square(8), frozen=["2.*", "5.weight"]),
}


def train(comm: Any, name: str, **options: Any) -> tuple[list[float], str, Trainer]:
    trainer = MODELS[name]().as_distributed(
        loss=nn.MSE(), optimizer=optim.AdamW(lr=1e-2), comm=comm, tune=False, **{"precision": "float32", **options}
    )
    rng, losses = np.random.default_rng(3), []
    for rows in (8, 8, 3):
        x, y = rng.standard_normal((2, rows, 12))
        mine = slice(rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size)
        losses.append(trainer.step(x[mine], y[mine]))
    losses.append(trainer.evaluate(x[mine], y[mine]))
    return losses, trainer.fingerprint(), trainer


def lines(name: str) -> list[dict[int, int]]:
    return [unit.lines for unit in lay_out(sort(MODELS[name]()), 4).units]


def test_where_lines_are() -> None:
    assert lines("whole") == [{0: 9}]
    assert lines("broken") == [{0: 5, 6: 10, 11: 17}]
    assert lines("widths") == [{1: 6}]
    assert lines("branched") == [{0: 6, 6: 12}]
    wide = nn.Chain(*square(5, 200))
    assert [unit.lines for unit in lay_out(sort(wide), 4).units] == [{}]
    assert [unit.lines for unit in lay_out(sort(nn.Chain(*square(5))), 4, 0).units] == [{}] * 5


@pytest.mark.parametrize("precision", ["float32", "float64", "bf16", Precision(param="bf16", reduce="bf16")])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_bits_of_one_by_one(name: str, precision: Any, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"precision": precision, "microbatches": microbatches}
    got = spawn(lambda comm: train(comm, name, **options)[:2], 1)[0]
    monkeypatch.setattr(Unit, "lines", {})
    assert spawn(lambda comm: train(comm, name, **options)[:2], 1)[0] == got


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("name", ["broken", "tied", "branched"])
@pytest.mark.parametrize(("precision", "rtol"), few([("float32", 1e-5), ("float64", 1e-12)], 2))
def test_on_several_ranks(name: str, strategy: str, precision: str, rtol: float) -> None:
    losses, _, one = spawn(lambda comm: train(comm, name, precision=precision), 1)[0]
    many = spawn(lambda comm: train(comm, name, strategy=strategy, precision=precision)[0], 3)
    for found in many:
        np.testing.assert_allclose(found, losses, rtol=rtol)
    assert one.parameters()


@pytest.mark.parametrize("precision", few(["float32", "bf16"], 2))
def test_a_line_is_one_call(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above compares nothing."""
    monkeypatch.setattr(nn.Linear, "forward", None)
    monkeypatch.setattr(nn.Linear, "backward", None)
    trainer = MODELS["whole"]().as_distributed(
        loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), tune=False, precision=precision
    )
    monkeypatch.setattr(trainer._session, "_validate", lambda *_: None)
    x = np.ones((4, 12), np.float32)
    assert trainer.step(x, x) > trainer.step(x, x)
