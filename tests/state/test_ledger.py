"""The ledger: rows say what a rank holds, and whoever allocates, saves, moves or reports it iterates them."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.checkpoint.pieces import held, owned
from fsdpx.comm import Communicator
from fsdpx.layout.pages import Range
from fsdpx.state import ledger
from fsdpx.state.ledger import KINDS, Key, Ledger, LedgerRow

F32 = np.dtype(np.float32)


def model() -> nn.Layer:
    return nn.Chain(nn.Linear(6, 10), nn.BatchNorm(10), nn.ReLU(), nn.Linear(10, 3))


def make(comm: Communicator, strategy: str = "fsdp", **options: Any) -> Any:
    options = {"optimizer": optim.AdamW(lr=1e-2), "group_bytes": 0, **options}
    return model().as_distributed(loss=nn.MSE(), comm=comm, strategy=strategy, **options)


def step(trainer: Any, seed: int = 0) -> float:
    rng, size = np.random.default_rng(seed), trainer.data.size
    x, y = rng.standard_normal((12, 6), np.float32), rng.standard_normal((12, 3), np.float32)
    mine = slice(12 * trainer.data.rank // size, 12 * (trainer.data.rank + 1) // size)
    return float(trainer.step(x[mine], y[mine]))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_rows_follow_the_placement(strategy: str) -> None:
    """Lifetimes and owners are those of the strategy; every row that is kept has an array of its size."""

    def run(comm: Communicator) -> None:
        state = make(comm, strategy).inspect.engine.state
        whole = state.placement.axes.shard.size == 1
        for row in state.ledger:
            array = state.ledger.arrays.get(row.key)
            assert (array is not None) == (row.kept and not row.passing)
            assert array is None or (array.size, array.dtype) == (row.elements, row.dtype)
        kept = {kind: {row.kept for row in state.ledger if row.key.kind == kind} for kind in ("full", "grad")}
        assert kept["full"] == {whole or strategy in ("zero1", "zero2")}
        assert kept["grad"] == {whole or strategy in ("ddp", "zero1")}
        spans = {row.span.size for row in state.ledger if row.key == Key("slot", 0, "m")}
        assert spans == {state.placement.pages[0].mine.size}
        assert {row.owner for row in state.ledger if row.key.kind == "grad"} == {"private"}
        assert {row.owner for row in state.ledger if row.key.kind == "statistic"} == {"all"}

    spawn(run, 2)


def test_sums_of_gradients_take_memory_from_their_reduce_to_the_update() -> None:
    """Activations are gone by then, and so is their memory when the next ones are made."""

    def run(comm: Communicator) -> None:
        trainer = make(comm, "fsdp")
        ledger, seen = trainer.inspect.engine.state.ledger, dict[str, int]()
        parts = [row.key for row in ledger if row.key.kind == "part"]

        def held() -> int:
            return sum(key in ledger.arrays for key in parts)

        trainer.inspect.engine.observers.append(lambda action: seen.update({str(action): held()}))
        before = trainer.report().memory
        step(trainer, 0)
        first = len(parts) - 1
        assert seen[f"B{first}.0"] == 0
        assert [seen[f"REDUCE{p}"] for p in range(first, -1, -1)] == list(range(1, len(parts) + 1))
        assert seen["SCALE"] == len(parts)
        assert held() == 0
        assert trainer.report().memory["gradients"] == before["gradients"] == sum(ledger.rows[k].nbytes for k in parts)

    spawn(run, 2)


def test_a_row_inside_another_has_no_memory_of_its_own() -> None:
    def run(comm: Communicator) -> None:
        state = make(comm, "zero1").inspect.engine.state
        for p, page in state.placement.pages.items():
            master, full = state.ledger.array("master", p), state.ledger.array("full", p)
            assert np.shares_memory(master, full)
            assert master.size == page.mine.size
            if page.page.trainable:
                assert np.shares_memory(state.ledger.array("part", p), state.ledger.array("grad", p))
        parameters = sum(page.size for page in state.placement.pages.values()) * F32.itemsize
        assert state.nbytes()["parameters"] == parameters

    spawn(run, 2)


def test_the_bytes_of_the_ledger_are_those_of_the_arena() -> None:
    for strategy in ("ddp", "zero2", "fsdp"):
        state = spawn(lambda comm, s=strategy: make(comm, s), 1)[0].inspect.engine.state
        assert sum(state.ledger.nbytes().values()) == sum(array.nbytes for array in state.arena.kept.values())


def test_every_kind_has_a_row_somewhere() -> None:
    def run(comm: Communicator) -> set[str]:
        trainer = make(comm, elastic=fsdpx.Elastic(every=1), codec=Keeps(), average=fsdpx.EMA())
        step(trainer)
        step(trainer)
        return {row.key.kind for row in trainer.inspect.engine.state.ledger}

    def apart(comm: Communicator) -> set[str]:
        plain = nn.Chain(nn.Linear(6, 3))
        strategies = fsdpx.Local(codec="int8", delay=2), fsdpx.Async(staleness=0)
        options: Any = {"loss": nn.MSE(), "optimizer": optim.SGD(), "comm": comm}
        trainers = [plain.as_distributed(strategy=strategy, **options) for strategy in strategies]
        return {row.key.kind for trainer in trainers for row in trainer.inspect.engine.state.ledger}

    assert set.union(*spawn(run, 2, survive=True), *spawn(apart, 2)) == set(KINDS)


def test_a_key_is_there_once() -> None:
    known = Ledger()
    row = LedgerRow(Key("copy", None, "a"), F32, Range(0, 3), "private", level="host")
    known.add(row, np.zeros(3, F32))
    with pytest.raises(AssertionError, match="is there already"):
        known.add(row, np.zeros(3, F32))
    assert known.nbytes() == {"copies for recovery": 12}
    known.drop(row.key)
    assert (list(known), known.arrays) == ([], {})


class Keeps(fsdpx.Plain):
    """A codec with memory that it counts steps in, and some that has no name in `recut`."""

    recut: ClassVar[Any] = {"seen": "same"}

    def memory(self, size: int) -> dict[str, int]:
        return {"seen": size, "more": 2}

    def reduce(self, comm: Any, grad: Any, out: Any, counts: Any, scratch: Any, memory: Any, *, what: str) -> Any:
        memory["seen"] += 1
        return super().reduce(comm, grad, out, counts, scratch, memory, what=what)


def test_a_new_row_is_allocated_reported_saved_and_cut_anew(tmp_path: Path) -> None:
    def save(comm: Communicator) -> int:
        trainer = make(comm, average=fsdpx.EMA())
        step(trainer)
        for part in held(trainer.inspect.engine.state):
            if part.name.startswith("average/"):
                part.array[...] = np.arange(part.start, part.start + part.array.size)
        assert {part.name for part in owned(trainer.inspect.engine.state)} >= {"average/0.weight"}
        trainer.save(tmp_path / "a")
        return int(trainer.report().memory["averages"])

    assert sum(spawn(save, 3)) == (6 * 10 + 10 + 20 + 10 * 3 + 3) * F32.itemsize

    def load(comm: Communicator) -> None:
        trainer = make(comm, mesh=Mesh(shard=2), average=fsdpx.EMA())
        trainer.load(tmp_path / "a")
        found = [part for part in held(trainer.inspect.engine.state) if part.name.startswith("average/")]
        assert found
        for part in found:
            np.testing.assert_array_equal(part.array, np.arange(part.start, part.start + part.array.size))

    spawn(load, 2)


def test_averages_survive_the_death_of_a_rank() -> None:
    from fsdpx.comm.local import Died

    def run(comm: Communicator, dies: bool) -> tuple[bytes, str]:
        trainer = nn.Chain(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).as_distributed(
            loss=nn.MSE(), comm=comm, optimizer=optim.AdamW(lr=1e-2), elastic=fsdpx.Elastic(every=1), chunks=6,
            average=fsdpx.EMA(0.5),
        )  # fmt: skip

        def die(action: Any) -> None:
            if dies and comm.rank == 1 and trainer.steps == 3 and getattr(action, "op", "") == "SCALE":
                raise Died

        trainer.inspect.engine.observers.append(die)
        for seed in range(5):
            step(trainer, seed)
        loss = trainer.evaluate(np.ones((4, 6), "f4"), np.ones((4, 3), "f4"), with_="average")
        bits = [array.tobytes() for array in trainer.parameters(with_="average").values()]
        return b"".join(bits), f"{loss:.6f} {trainer.inspect.fingerprint()}"

    (whole,) = spawn(lambda comm: run(comm, False), 1, survive=True)
    found = spawn(lambda comm: run(comm, True), 3, survive=True)
    assert found[1] is None
    assert [found[0], found[2]] == [whole, whole]


def test_kinds_are_counted_under_words() -> None:
    assert all(kind.memory for kind in ledger.KINDS.values())
    saved = {"master", "slot", "memory", "statistic", "average", "outer", "velocity", "sum"}
    assert {name for name, kind in KINDS.items() if kind.saved} == saved
