"""Branches that nobody reads, and parameters that get no gradient: zero gradient, one note, nothing else changes."""

from typing import Any

import numpy as np
import pytest

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.testing import LayerContract, demand_close


class Stop(nn.Layer):
    """x, without a gradient."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        return x, ()

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        return None, ()


class Unread(nn.Composite):
    """A unit with a branch that nobody reads."""

    unit = True

    def __init__(self) -> None:
        self.inner, self.unread = nn.Linear(6, 6), nn.Linear(6, 3)

    def compose(self, x: Any, z: Any) -> Any:
        y = self.inner(x)
        self.unread(nn.Tanh()(y))
        return y


class TestUnread(LayerContract):
    def make(self) -> nn.Layer:
        return nn.Graph({"u": (Unread(), "x", "x"), "v": (nn.Tanh(), "u"), "w": (nn.Tanh(), "x")}, outputs="v")

    def inputs(self) -> Any:
        return self.normal(4, 6)


class Idle(nn.Composite):
    """A unit with a branch that nobody reads, and one without a gradient."""

    unit = True

    def __init__(self) -> None:
        self.inner, self.unread, self.held = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)
        self.stop = Stop()

    def compose(self, x: Any) -> Any:
        y = self.inner(x)
        self.unread(nn.Tanh()(y))
        return y + self.stop(self.held(x))


def model(idle: bool) -> nn.Layer:
    nodes: dict[str, Any] = {"up": (nn.Linear(6, 6), "x"), "act": (nn.Tanh(), "up"), "out": (nn.Linear(6, 4), "act")}
    if idle:
        branch = {"side": (nn.Linear(6, 5), "up"), "end": (nn.Linear(5, 5), "side"), "z": (nn.Linear(6, 2), "x")}
        nodes = {"up": nodes["up"], **branch, "act": nodes["act"], "out": nodes["out"]}
    return nn.Graph(nodes, inputs=("x", "w") if idle else ("x",), outputs=("out",))


IDLE = ["side.weight", "side.bias", "end.weight", "end.bias", "z.weight", "z.bias"]


def train(comm: Communicator, idle: bool, **options: Any) -> Any:
    options = {"precision": "float64", "group_bytes": 0, "seed": 3, **options}
    trainer = model(idle).as_distributed(loss=nn.MSE(), optimizer=optim.Adam(lr=1e-2), comm=comm, **options)
    rng, data = np.random.default_rng(0), trainer.data
    mine = slice(12 * data.rank // data.size, 12 * (data.rank + 1) // data.size)
    x, y = rng.normal(size=(12, 6))[mine], rng.normal(size=(12, 4))[mine]
    begin = trainer.parameters()
    losses = [trainer.step((x, x) if idle else x, y) for _ in range(3)]
    return losses, begin, trainer.parameters()


@pytest.mark.filterwarnings("ignore:no gradient reaches")
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"strategy": "ddp"}),
        (3, {"strategy": "fsdp", "microbatches": 2}),
        (2, {"group_bytes": 1 << 20, "clip_norm": 0.1}),
        (2, {"mesh": Mesh(pipe=2), "stages": [3, 3], "microbatches": 3}),
        (3, {"mesh": Mesh(pipe=3), "stages": ["up", "end", "act"], "schedule": "zb-h1", "microbatches": 3}),
        (2, {"recompute": "all"}),
        (2, {"chunks": 4}),
    ],
    ids=["alone", "ddp", "fsdp", "one unit", "pipe", "split backward", "recompute", "chunks"],
)
def test_what_nobody_reads_changes_nothing(size: int, options: dict[str, Any]) -> None:
    few = {name: value for name, value in options.items() if name in ("clip_norm",)}
    losses, _, want = spawn(lambda comm: train(comm, False, **few), 1)[0]
    for got, begin, end in spawn(lambda comm: train(comm, True, **options), size):
        np.testing.assert_allclose(got, losses, rtol=1e-11)
        assert sorted(end) == sorted([*want, *IDLE])
        demand_close({name: end[name] for name in want}, want, 1e-11)
        assert all((begin[name] == end[name]).all() for name in IDLE)


@pytest.mark.parametrize("unit", [False, True])
def test_one_note_names_them(unit: bool) -> None:
    def run(comm: Communicator) -> Any:
        chain = nn.Chain({"a": nn.Linear(6, 6), "b": Idle() if unit else Stop(), "c": nn.Linear(6, 2)})
        trainer = chain.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm)
        for _ in range(3):
            trainer.step(np.ones((4, 6)), np.ones((4, 2)))
        trainer.accumulate(np.ones((4, 6)), np.ones((4, 2)))
        return trainer.gradients()

    names = ["b.unread.weight", "b.unread.bias", "b.held.weight", "b.held.bias"] if unit else ["a.weight", "a.bias"]
    with pytest.warns(RuntimeWarning) as seen:
        found = spawn(run, 2)[0]
    (text,) = [str(w.message) for w in seen]
    assert text == (
        f"no gradient reaches {', '.join(names)}: the loss does not depend on them, so they are trained with a "
        "gradient of zero: weight decay and momentum still move them, where PyTorch leaves them alone; leave their "
        "layers out, or freeze them (frozen=[...])"
    )
    assert [name for name, g in found.items() if not g.any()] == names


def test_frozen_ones_are_not_named() -> None:
    def run(comm: Communicator) -> None:
        chain = nn.Chain({"a": nn.Linear(6, 6), "b": Stop(), "c": nn.Linear(6, 2)})
        trainer = chain.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm, frozen=["a.weight"])
        trainer.freeze("a.bias")
        trainer.step(np.ones((4, 6)), np.ones((4, 2)))

    spawn(run, 2)  # a warning would be an error
