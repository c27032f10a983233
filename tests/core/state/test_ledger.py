"""The ledger of all arrays of a rank, and the memory it foresees."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from models import distributed, part
from present import needs
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.array.shapes.array import ShapeArray, call_without_metering_temporaries, measuring_shape_only_memory
from fsdpx.core.base.messages import format_bytes
from fsdpx.core.checkpoint.local_shards import iterate_local_state_shards, iterate_shards_to_write
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.state import footprint
from fsdpx.core.state.flat_parameters import ElementRange
from fsdpx.core.state.footprint import Footprint, ProcessBytes
from fsdpx.core.state.ledger import LEDGER_KINDS, Ledger, LedgerKey, LedgerRow
from fsdpx.errors import ConfigError

F32 = np.dtype(np.float32)


def model():
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm(10), nn.ReLU(), nn.Linear(10, 3))


def make(comm, strategy="fsdp", **options):
    options = {"optimizer": optim.AdamW(lr=1e-2), "group_bytes": 0, **options}
    return distributed(model(), comm, strategy=strategy, **options)


def step(trainer, seed=0):
    rng, mine = np.random.default_rng(seed), part(trainer.data_group, 12)
    x, y = rng.standard_normal((12, 6), np.float32), rng.standard_normal((12, 3), np.float32)
    return float(trainer.step(x[mine], y[mine]))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_rows_follow_the_placement(comm, strategy):
    """Lifetimes and owners are those of the strategy; every row that is kept has an array of its size."""
    state = make(comm, strategy).inspect.engine.state
    whole = state.placement.axes.shard.size == 1
    for row in state.ledger:
        array = state.ledger.arrays.get(row.key)
        assert (array is not None) == (row.is_kept and not row.is_freed_by_update)
        assert array is None or (array.size, array.dtype) == (row.elements, row.dtype)
    kept = {kind: {row.is_kept for row in state.ledger if row.key.kind == kind} for kind in ("full", "grad")}
    assert kept["full"] == {whole or strategy in ("zero1", "zero2")}
    assert kept["grad"] == {whole or strategy in ("ddp", "zero1")}
    spans = {row.span.size for row in state.ledger if row.key == LedgerKey("slot", 0, "m")}
    assert spans == {state.placement.pages[0].own_range.size}
    assert {row.owner for row in state.ledger if row.key.kind == "grad"} == {"private"}
    assert {row.owner for row in state.ledger if row.key.kind == "statistic"} == {"all"}


@on_ranks(2)
def test_sums_of_gradients_take_memory_from_their_reduce_to_the_update(comm):
    """Activations are gone by then, and so is their memory when the next ones are made."""
    trainer = make(comm, "fsdp")
    ledger, seen = trainer.inspect.engine.state.ledger, dict[str, int]()
    parts = [row.key for row in ledger if row.key.kind == "part"]

    def held():
        return sum(key in ledger.arrays for key in parts)

    trainer.inspect.engine.add_observer(lambda action: seen.update({str(action): held()}))
    before = trainer.report().memory
    step(trainer, 0)
    first = len(parts) - 1
    assert seen[f"B{first}.0"] == 0
    assert [seen[f"REDUCE{p}"] for p in range(first, -1, -1)] == list(range(1, len(parts) + 1))
    assert seen["SCALE"] == len(parts)
    assert held() == 0
    assert trainer.report().memory["gradients"] == before["gradients"] == sum(ledger.rows[k].nbytes for k in parts)


@on_ranks(2)
def test_a_row_inside_another_has_no_memory_of_its_own(comm):
    state = make(comm, "zero1").inspect.engine.state
    for p, page in state.placement.pages.items():
        master, full = state.ledger.get_array("master", p), state.ledger.get_array("full", p)
        assert np.shares_memory(master, full)
        assert master.size == page.own_range.size
        if page.page.trainable:
            assert np.shares_memory(state.ledger.get_array("part", p), state.ledger.get_array("grad", p))
    parameters = sum(page.size for page in state.placement.pages.values()) * F32.itemsize
    assert state.count_bytes_by_kind()["parameters"] == parameters


def test_the_bytes_of_the_ledger_are_those_of_the_arena():
    for strategy in ("ddp", "zero2", "fsdp"):
        state = spawn(lambda comm, s=strategy: make(comm, s), 1)[0].inspect.engine.state
        held = sum(array.nbytes for array in state.arena.kept.values())
        assert sum(state.ledger.count_bytes_by_kind().values()) == held


@needs("asynchronous", "compression", "elastic")
def test_every_kind_has_a_row_somewhere():
    def run(comm):
        trainer = make(comm, elastic=fsdpx.ElasticConfig(every=1), compression=Keeps(), average=fsdpx.EMA())
        step(trainer)
        step(trainer)
        return {row.key.kind for row in trainer.inspect.engine.state.ledger}

    def apart(comm):
        strategies = fsdpx.LocalSGD(compression="int8", delay=2), fsdpx.AsyncSGD(staleness=0)
        trainers = [distributed(nn.Sequential(nn.Linear(6, 3)), comm, strategy=strategy) for strategy in strategies]
        return {row.key.kind for trainer in trainers for row in trainer.inspect.engine.state.ledger}

    assert set.union(*spawn(run, 2, survive=True), *spawn(apart, 2)) == set(LEDGER_KINDS)


def test_a_key_is_there_once():
    known = Ledger()
    row = LedgerRow(LedgerKey("copy", None, "a"), F32, ElementRange(0, 3), "private", level="host")
    known.add_row(row, np.zeros(3, F32))
    with pytest.raises(AssertionError, match="is there already"):
        known.add_row(row, np.zeros(3, F32))
    assert known.count_bytes_by_kind() == {"copies for recovery": 12}
    known.drop_row(row.key)
    assert (list(known), known.arrays) == ([], {})


class Keeps(fsdpx.NoCompression):
    """A codec with memory that it counts steps in, and some that has no name in `reshard_rules`."""

    reshard_rules: ClassVar[Any] = {"seen": "same"}

    def memory_sizes(self, size):
        return {"seen": size, "more": 2}

    def reduce_scatter(self, comm, grad, out, counts, scratch, memory, *, what):
        memory["seen"] += 1
        return super().reduce_scatter(comm, grad, out, counts, scratch, memory, what=what)


def test_a_new_row_is_allocated_reported_saved_and_cut_anew(tmp_path):
    def save(comm):
        trainer = make(comm, average=fsdpx.EMA())
        step(trainer)
        for one in iterate_local_state_shards(trainer.inspect.engine.state):
            if one.name.startswith("average/"):
                one.array[...] = np.arange(one.start, one.start + one.array.size)
        assert {one.name for one in iterate_shards_to_write(trainer.inspect.engine.state)} >= {"average/0.weight"}
        trainer.save(tmp_path / "a")
        return int(trainer.report().memory["averages"])

    assert sum(spawn(save, 3)) == (6 * 10 + 10 + 20 + 10 * 3 + 3) * F32.itemsize

    def load(comm):
        trainer = make(comm, mesh=Mesh(shard=2), average=fsdpx.EMA())
        trainer.load(tmp_path / "a")
        shards = iterate_local_state_shards(trainer.inspect.engine.state)
        found = [one for one in shards if one.name.startswith("average/")]
        assert found
        for one in found:
            np.testing.assert_array_equal(one.array, np.arange(one.start, one.start + one.array.size))

    spawn(load, 2)


@needs("elastic")
def test_averages_survive_the_death_of_a_rank():
    from fsdpx.core.comm.local import RankDied

    def run(comm, dies):
        options = {"elastic": fsdpx.ElasticConfig(every=1), "reproducible_chunks": 6, "average": fsdpx.EMA(0.5)}
        plain = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
        trainer = distributed(plain, comm, optimizer=optim.AdamW(lr=1e-2), **options)

        def die(action):
            if dies and comm.rank == 1 and trainer.global_step == 3 and getattr(action, "op", "") == "NORM":
                raise RankDied

        trainer.inspect.engine.add_observer(die)
        for seed in range(5):
            step(trainer, seed)
        loss = trainer.evaluate(np.ones((4, 6), "f4"), np.ones((4, 3), "f4"), weights="average")
        bits = [array.tobytes() for array in trainer.parameters(weights="average").values()]
        return b"".join(bits), f"{loss:.6f} {trainer.inspect.compute_fingerprint()}"

    (whole,) = spawn(lambda comm: run(comm, False), 1, survive=True)
    found = spawn(lambda comm: run(comm, True), 3, survive=True)
    assert found[1] is None
    assert [found[0], found[2]] == [whole, whole]


def test_kinds_are_counted_under_words():
    assert all(kind.memory for kind in LEDGER_KINDS.values())
    saved = {"master", "slot", "memory", "statistic", "average", "outer", "velocity", "sum"}
    assert {name for name, kind in LEDGER_KINDS.items() if kind.saved} == saved


MIB = 1 << 20


def test_a_footprint_is_the_sum_of_its_parts_and_keeps_a_budget_by_its_share():
    parts = {"arena": ProcessBytes(3 * MIB, 3 * MIB), "shared windows": ProcessBytes(8 * MIB, 2 * MIB)}
    made = Footprint(parts, 4)
    assert (made.rss, made.pss, made.host_bytes) == (11 * MIB, 5 * MIB, 20 * MIB)
    assert made.is_within("5MiB")
    assert made.is_within(5 * MIB)
    assert not made.is_within("4.9MiB")
    assert str(made).splitlines() == [
        "memory of the process         RSS        PSS",
        "--------------------------------------------",
        "arena                    3.00 MiB   3.00 MiB",
        "shared windows           8.00 MiB   2.00 MiB",
        "in all                  11.00 MiB   5.00 MiB",
        "4 such ranks on a host             20.00 MiB",
    ]
    with pytest.raises(ConfigError, match=r"memory='much': a number of bytes is needed, such as 1048576, '1MiB'"):
        made.is_within("much")


def test_a_kernel_counts_by_what_it_leaves():
    def kernel():
        a = ShapeArray(1000, np.uint8) + ShapeArray(1000, np.uint8)
        return ShapeArray(10, np.uint8), a.sum()

    with measuring_shape_only_memory() as plain:
        kernel()
    with measuring_shape_only_memory() as compiled:
        kept = call_without_metering_temporaries(kernel)
    assert plain.peak > 2000
    assert kept[0].nbytes == 10
    assert compiled.peak < 100
    assert plain.live == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_a_report_tells_what_the_process_holds():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(), comm=make_single_rank_communicator())
    x = np.ones((4, 1024), np.float32)
    trainer.step(x, x)
    report = trainer.report()
    assert report.footprint is not None
    assert report.footprint.parts["arena"].rss == sum(report.memory.values())
    lines = Path("/proc/self/status").read_text().splitlines()
    now = int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
    assert report.footprint.rss == pytest.approx(now, rel=0.02)
    assert 0.98 * now <= report.peak_rss  # the system counts peaks now and then
    for word in ("memory of the process", "RSS", "PSS", "code of libraries", "arena: large buffers", "in all"):
        assert word in str(report), word


def test_memory_is_read_when_somebody_asks_in_the_process_that_the_report_is_about(monkeypatch):
    trainer, read = make(make_single_rank_communicator()), []
    monkeypatch.setattr(footprint, "_parse_kilobyte_lines", lambda file: read.append(file.name) or {"RssAnon": 0})
    report = trainer.report()
    assert "smaps_rollup" not in read
    sent = pickle.dumps(report)
    assert read.count("smaps_rollup") == 1
    assert "footprint" in pickle.loads(sent).__dict__
    str(report)
    assert read.count("smaps_rollup") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    large = np.ones(192 * MIB, np.uint8)
    code = "from fsdpx.core.state.footprint import get_peak_rss; print(get_peak_rss())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < large.nbytes


def test_the_peak_is_never_below_what_is_held_now():
    """Both are read at moments of their own."""
    parts = {"arena": ProcessBytes(3000, 3000), "code of libraries": ProcessBytes(4000, 2000)}
    report = replace(make(make_single_rank_communicator()).report(), peak_rss=1, read_footprint=Footprint(parts))
    assert f"peak of the process (RSS): {format_bytes(7000)}" in report.memory_text
