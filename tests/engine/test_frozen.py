"""What nobody trains has no backward: below the first trained layer nothing is made, sent, kept or run again for it."""

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from models import KNOWN, make, part

from fsdpx import Mesh, dry_run, nn, optim, spawn
from fsdpx.array import blas
from fsdpx.comm import Communicator
from fsdpx.program import Slot

TRUNKS: dict[str, tuple[str, list[str]]] = {
    "mlp": ("mlp", ["0.*"]),
    "norms": ("norms", ["0.*", "1.*"]),
    "graph": ("graph", ["up.*"]),
    "gpt": ("gpt", ["embed.position", "blocks.*"]),  # the tied embedding is trained
    "untied": ("untied", ["embed.*", "*blocks.0*"]),
    "bodies": ("untied", ["*attn*"]),
}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp", "microbatches": 2}),
    "recompute": (2, {"strategy": "fsdp", "recompute": "all"}),
    "chunks": (2, {"strategy": "fsdp", "chunks": 4}),
    "tensor": (2, {"mesh": Mesh(tensor=2)}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2}),
    "zero-bubble": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "schedule": "zb-h1", "recompute": 2}),
    "zbv": (2, {"mesh": Mesh(pipe=2), "microbatches": 4, "schedule": "zbv"}),
}


def gradients(comm: Communicator, case: str, frozen: list[str], later: bool = False, **options: Any) -> dict[str, Any]:
    """Of one batch. later: frozen by `freeze`."""
    trainer = make(comm, case, **{"group_bytes": 0, **options}, frozen=() if later else frozen)
    if later:
        trainer.freeze(*frozen)
    x, y = KNOWN[case].batch(np.random.default_rng(0), 8)
    mine = slice(None) if "mesh" in options else part(comm, 8)
    if "chunks" in options:  # whole steps only
        trainer.step(x[mine], y[mine])
        return trainer.parameters()
    trainer.accumulate(x[mine], y[mine])
    return trainer.gradients()


@lru_cache
def of_all(case: str, place: str) -> dict[str, Any]:
    """The gradients of a trainer that makes them all."""
    ranks, options = PLACES[place]
    return spawn(lambda comm: gradients(comm, case, [], **options), ranks)[0]


# `freeze` and `distribute(frozen=...)` run the same program: test_freezing_changes_the_program
@pytest.mark.parametrize(
    ("trunk", "place", "later"), [(*both, n % 2 == 0) for n, both in enumerate(itertools.product(TRUNKS, PLACES))]
)
def test_the_others_have_the_same_gradients(trunk: str, place: str, later: bool) -> None:
    """To the bit: those of a trainer that makes them all."""
    case, frozen = TRUNKS[trunk]
    ranks, options = PLACES[place]
    if place == "chunks" and case == "norms":
        pytest.skip("BatchNorm works on whole batches, not on chunks")
    if place == "tensor" and case not in ("gpt", "untied"):
        pytest.skip("nothing to cut")
    want = of_all(case, place)
    for got in spawn(lambda comm: gradients(comm, case, frozen, later, **options), ranks):
        moved = [name for name in got if not later or np.any(got[name])]
        assert moved
        if "chunks" in options:
            before = spawn(lambda comm: make(comm, case, group_bytes=0, **options).parameters(), ranks)[0]
            moved = [name for name in got if not np.array_equal(got[name], before[name])]
        assert all(np.array_equal(got[name], want[name]) for name in moved)
        assert len(moved) < len(want)


def chain(layers: int, frozen: int, **options: Any) -> Any:
    """A dry run of so many equal layers, the first of which are frozen."""
    batch = ((16, 64), "float32")
    return dry_run(
        nn.Chain(*(nn.Linear(64, 64) for _ in range(layers))), batch, batch, loss=nn.MSE(),
        optimizer=optim.SGD(lr=0.1), frozen=[f"{i}.*" for i in range(frozen)],
        **{"ranks": 2, "strategy": "fsdp", "group_bytes": 0, **options},
    )  # fmt: skip


@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
@pytest.mark.parametrize("recompute", [None, "all"])
def test_a_deeper_trunk_keeps_nothing_more(recompute: str | None, group_bytes: int) -> None:
    options = {"recompute": recompute, "group_bytes": group_bytes}
    assert chain(6, 4, **options).activations == chain(12, 10, **options).activations
    if recompute is None:
        assert chain(12, 10, **options).activations < chain(12, 0, **options).activations / 2


def test_a_trunk_is_gathered_once_and_its_stage_hears_nothing() -> None:
    whole, spared = chain(6, 0).report.traffic, chain(6, 4).report.traffic
    assert spared["shard", "all_gather"].calls < whole["shard", "all_gather"].calls
    assert spared["shard", "reduce_scatter"].calls == 2
    for schedule in ("1f1b", "zb-h1"):
        options = {"mesh": Mesh(pipe=2), "microbatches": 4, "schedule": schedule}
        first, last = (chain(6, 4, rank=rank, **options) for rank in (0, 1))
        assert ("pipe", "recv") not in first.report.traffic
        assert ("pipe", "send") not in last.report.traffic
        assert not {"B", "I", "W"} & {a.op for a in first.program.actions}
        for run in (first, last):
            assert {k: v.calls for k, v in run.report.traffic.items() if k[0] == "pipe"} == {
                k: v.calls for k, v in run.report.predicted.items() if k[0] == "pipe"
            }


@pytest.mark.parametrize("how", ["frozen", "freeze", "container"])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_products_of_a_frozen_trunk(monkeypatch: pytest.MonkeyPatch, how: str, group_bytes: int) -> None:
    """Four layers, of which the third one is trained: forward makes 4 products, backward one gradient of an input, of
    the last layer, and one of parameters."""
    calls: list[str] = []
    counted = {
        "affine": blas.affine,
        "linear_gradients": blas.linear_gradients,
        "linear_backward": blas.linear_backward,
    }
    names = ["0.*", "1.*", "3.*"]

    def run(comm: Communicator) -> None:
        model = nn.Chain(*(nn.Linear(6, 6) for _ in range(4)), frozen=names if how == "container" else ())
        if group_bytes:
            model = nn.Chain(nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 7), nn.Linear(7, 6), **(
                {"frozen": names} if how == "container" else {}
            ))  # fmt: skip
        trainer = model.as_distributed(
            comm=comm, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), precision="float64", group_bytes=group_bytes,
            frozen=names if how == "frozen" else (),
        )  # fmt: skip
        if how == "freeze":
            trainer.freeze(*names)
        for name, product in counted.items():
            monkeypatch.setattr(blas, name, lambda *a, name=name, product=product: (calls.append(name), product(*a))[1])
        trainer.step(np.ones((4, 6)), np.ones((4, 6)))

    spawn(run, 1)
    assert calls == ["affine"] * 4 + ["linear_backward", "linear_gradients"]


def test_freezing_changes_the_program() -> None:
    """`freeze` and `distribute(frozen=...)` run the same step; after `unfreeze` it is the first one again."""

    def run(comm: Communicator) -> None:
        names = ["0.*", "2.bias"]
        trainer = make(comm, "mlp", "fsdp", group_bytes=0)
        x, y = KNOWN["mlp"].batch(np.random.default_rng(0), 8)
        batch = x[part(comm, 8)], y[part(comm, 8)]
        first = str(trainer.program)
        trainer.step(*batch)
        trainer.freeze("0.*")
        assert str(trainer.program) == str(make(comm, "mlp", "fsdp", group_bytes=0, frozen=["0.*"]).program) != first
        trainer.step(*batch)
        trainer.freeze(*names)
        trainer.accumulate(*batch)
        assert not trainer.inspect.engine.state.holding("saved")
        found = trainer.gradients()
        assert not np.any(found["0.weight"])
        assert not np.any(found["2.bias"])
        assert np.any(found["2.weight"])
        trainer.update()
        trainer.freeze("*", undo=True)
        assert str(trainer.program) == first
        before = trainer.parameters()
        trainer.step(*batch)
        assert all(np.any(trainer.parameters()[name] != before[name]) for name in before)

    spawn(run, 2)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_model_without_anything_to_train(strategy: str) -> None:
    def run(comm: Communicator) -> bool:
        trainer = make(comm, "untied", strategy, frozen=["*"])
        x, y = KNOWN["untied"].batch(np.random.default_rng(0), 8)
        mine = part(comm, 8)
        before = trainer.parameters()
        losses = [trainer.step(x[mine], y[mine]) for _ in range(2)]
        assert Slot("part", 0) not in trainer.inspect.engine.state.store
        assert not [a for a in trainer.program.actions if a.op in ("B", "REDUCE", "UPDATE")]
        return losses[0] == losses[1] and all(np.array_equal(before[n], p) for n, p in trainer.parameters().items())

    assert all(spawn(run, 2))


def test_the_gradient_of_the_inputs_passes_through_what_is_frozen() -> None:
    def run(comm: Communicator, frozen: list[str]) -> Any:
        trainer = make(comm, "mlp", "fsdp", group_bytes=0, frozen=frozen)
        x, _ = KNOWN["mlp"].batch(np.random.default_rng(0), 8)
        y = trainer.forward(x[part(comm, 8)])
        return trainer.backward(np.ones_like(y))

    want, got = (spawn(lambda comm: run(comm, frozen), 2) for frozen in ([], ["*"]))  # noqa: B023
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))
