"""What the pipe and tensor axes move and keep, against the published formulas."""

from typing import Any

import numpy as np
import pytest
from amount import few, in_full, pairs
from meshes import train

import fsdpx
from fsdpx import Mesh, nn, optim
from fsdpx.comm import Communicator, FakeCommunicator
from fsdpx.engine.workspace import roots
from fsdpx.errors import ConfigError
from fsdpx.facade.dryrun import DryRun, dry_run
from fsdpx.program import parse
from fsdpx.shapes import ShapeArray

WIDTH, ROWS, RANKS = 64, 4, 4
VALUE = ROWS * WIDTH * 4
"""Bytes of one microbatch of activations."""


def run(rank: int = 0, microbatches: int = 8, **options: Any) -> DryRun:
    model = nn.Chain(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * RANKS)])
    batch = ((ROWS * microbatches, WIDTH), "float32")
    return dry_run(
        model, batch, batch, ranks=RANKS, rank=rank, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), strategy="ddp",
        mesh=Mesh(shard=1, pipe=RANKS), microbatches=microbatches, group_bytes=0, **options,
    )  # fmt: skip


@in_full
@pytest.mark.parametrize("rank", [1, 2])
def test_activations_of_1f1b_are_bounded_by_the_depth(rank: int) -> None:
    """Narayanan et al. 2021: at most P - r microbatches in flight on rank r, whatever their number."""
    found = {m: run(rank, m, schedule="1f1b").activations for m in (8, 16, 32)}
    assert len(set(found.values())) == 1
    in_flight = RANKS - rank
    # of each: what two layers read; beside them one that was received a step early, and one result
    assert found[8] == (2 * in_flight + 2) * VALUE


def test_activations_of_gpipe_grow_with_the_microbatches() -> None:
    found = [run(1, m, schedule="gpipe").activations for m in (8, 16)]
    assert found[1] - found[0] == 2 * 8 * VALUE  # two layers' inputs of eight more


def test_the_pipe_moves_what_crosses_a_cut() -> None:
    """An activation forward and its gradient back per microbatch and cut; the ends have one neighbour."""
    for rank in range(RANKS):
        report = run(rank, 8).report
        neighbours = 1 if rank in (0, RANKS - 1) else 2
        for call in ("send", "recv"):
            count = report.traffic["pipe", call]
            assert (count.calls, count.bytes) == (8 * neighbours, 8 * neighbours * VALUE)
            assert report.predicted["pipe", call] == count


@in_full
@pytest.mark.parametrize(("sequence", "time"), few(pairs(["parallel", None, "ulysses", "ring"], [12, 7, 1]), 2))
def test_counted_bytes_equal_predicted_bytes(sequence: str | None, time: int) -> None:
    """Along the axes that the program moves data over; layers' own messages over tensor are counted alone."""

    def one(comm: Communicator) -> Any:
        trainer = train(
            comm, "wide", Mesh(shard=2, pipe=2, tensor=2), "fsdp", sizes=(), sequence=sequence, microbatches=3
        )[2]
        x = np.random.default_rng(0).integers(0, 31, (5, time))
        trainer.inspect.reset()
        trainer.step(x, x)
        report = trainer.report()
        return report.traffic, report.predicted

    for traffic, predicted in fsdpx.spawn(one, 8):
        assert {key for key in predicted if key[0] in ("pipe", "peers", "shard")} <= set(traffic)
        assert any(axis == "peers" for axis, _ in predicted), "the tied embedding is on both stages"
        for key, count in predicted.items():
            if key[0] != "tensor":
                assert traffic[key] == count, key
            else:
                assert traffic[key].bytes >= count.bytes


BLOCKS = 6


def blocks(recompute: Any, **options: Any) -> DryRun:
    model = nn.Chain(*[nn.TransformerBlock(32, 4) for _ in range(BLOCKS)])
    return dry_run(
        model, ((2, 16, 32), "float32"), ((2, 16, 32), "float32"), ranks=1, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1),
        strategy="ddp", group_bytes=0, recompute=recompute, **options,
    )  # fmt: skip


def test_recompute_keeps_the_inputs_of_blocks_and_one_block() -> None:
    """Chen et al. 2016: with every block recomputed, one input per block and the inside of one block."""
    value, inside = 2 * 16 * 32 * 4, 41_984  # bytes of one input, and of what one block keeps for backward, it included
    assert blocks(None).activations == BLOCKS * inside + value
    assert blocks("all").activations == (BLOCKS - 1) * value + inside + value


def test_recompute_costs_one_more_forward() -> None:
    ops = [a.op for a in parse(str(blocks("all").program))]
    assert ops.count("R") == ops.count("C") == ops.count("B") == BLOCKS
    assert ops.count("F") == 0
    ops = [a.op for a in parse(str(blocks(3).program))]
    assert (ops.count("R"), ops.count("F")) == (BLOCKS // 3, BLOCKS - BLOCKS // 3)


@in_full
def test_a_budget_recomputes_as_little_as_it_takes() -> None:
    counts = []
    for budget in ("1GiB", "150KiB", "61KiB"):
        found = blocks(budget)
        counts.append(sum(a.op == "R" for a in found.trainer.inspect.engine.ran.actions))
    assert counts == [0, 3, 5]  # 3 x 41,984 + 3 x 4,096 bytes are less than 150 KiB, 41,984 + 5 x 4,096 are 61 KiB
    with pytest.raises(ConfigError, match="recompute: 1,024 bytes are not enough: with every unit recomputed 62,464"):
        blocks("1KiB")


@in_full
@pytest.mark.parametrize("schedule", few(["1f1b", "zb-h1", "zb-h2"], 2))
def test_a_budget_holds_with_every_schedule(schedule: str) -> None:
    """Counted in slots, between all actions: also what waits for the second half of backward."""
    for rank in range(RANKS):
        for budget in (60, 48, 40):
            model = nn.Chain(*[one for _ in range(2 * RANKS) for one in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
            found = _budgeted(model, schedule, rank, budget * VALUE)
            assert found is None or found <= budget * VALUE


def _budgeted(model: nn.Layer, schedule: str, rank: int, budget: int) -> int | None:
    """The most bytes in saved, held and kept slots; None if the budget was refused."""
    most: list[int] = []

    def look(trainer: Any) -> None:
        slots = {s: v for s, v in trainer.inspect.engine.state.store.items() if s.kind in ("saved", "held", "kept")}
        most.append(sum(dict(pair for value in slots.values() for pair in roots(value)).values()))

    def one(comm: Communicator) -> None:
        trainer = model.as_distributed(
            loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), strategy="ddp", comm=comm, device="shape", group_bytes=0,
            mesh=Mesh(shard=1, pipe=RANKS), microbatches=8, schedule=schedule, recompute=f"{budget}B",
        )  # fmt: skip
        trainer.inspect.engine.observers.append(lambda action: look(trainer))
        trainer.step(*[ShapeArray((8 * ROWS, WIDTH), np.dtype("float32"))] * 2)

    try:
        one(FakeCommunicator(rank, RANKS))
    except ConfigError as error:
        if "are not enough on rank" not in str(error):
            raise
        return None
    return max(most)


def test_ranks_of_an_uneven_tensor_axis_recompute_the_same() -> None:
    """Three heads on two ranks: a block keeps 6,624 or 8,256 bytes."""

    def one(comm: Communicator) -> str:
        trainer = nn.GPT(13, 12, 4, 3, 6).as_distributed(
            loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), comm=comm, mesh=Mesh(shard=1, tensor=2),
            group_bytes=0, recompute="34000B",
        )  # fmt: skip
        x = np.random.default_rng(0).integers(0, 13, (4, 6))
        trainer.step(x, x)
        return str(trainer.inspect.engine.ran)

    programs = fsdpx.spawn(one, 2)
    assert programs[0] == programs[1]
    assert " R" in programs[0].replace("REDUCE", "").replace("RECV", "")


@in_full
@pytest.mark.parametrize(
    ("sequence", "uneven"), few(pairs(["ring", "ulysses", "parallel"], [(11, "31KB"), (12, "31KB"), (2, "6300B")]), 3)
)
def test_dry_runs_of_uneven_sequences_are_the_runs(sequence: str, uneven: tuple[int, str]) -> None:
    """What each rank moves between ranks, and keeps, is known without data; `recompute` chooses alike on all."""
    time, budget = uneven
    options: dict[str, Any] = {
        "loss": nn.CrossEntropy(), "optimizer": optim.SGD(lr=0.1), "strategy": "ddp", "sequence": sequence,
        "mesh": Mesh(shard=1, tensor=3), "group_bytes": 0, "recompute": budget,
    }  # fmt: skip

    def one(comm: Communicator) -> Any:
        trainer = nn.GPT(13, 12, 4, 3, 12).as_distributed(comm=comm, **options)
        x = np.random.default_rng(0).integers(0, 13, (4, time))
        trainer.step(x, x)
        return trainer.report(), str(trainer.inspect.engine.ran)

    programs: set[str] = set()
    for rank, (report, program) in enumerate(fsdpx.spawn(one, 3)):
        batch = ((4, time), "int64")
        found = dry_run(nn.GPT(13, 12, 4, 3, 12), batch, batch, ranks=3, rank=rank, **options)
        for key in {*report.traffic, *found.report.traffic}:
            assert key[0] != "tensor" or report.traffic[key] == found.report.traffic[key], key
        assert report.memory == found.report.memory
        assert str(found.program) == program
        programs.add(program)
    (ran,) = programs
    assert 0 < [action.op for action in parse(ran)].count("R") < 4


@pytest.mark.parametrize("sequence", ["ulysses", "ring"])
def test_long_sequences_take_their_share_of_activations(sequence: str) -> None:
    """1/N of the activation memory of one process on each of N ranks, up to a block of keys and values under way."""

    def of(ranks: int) -> int:
        more = {"sequence": sequence} if ranks > 1 else {}
        model = nn.GPT(64, 32, 4, 4, 512)
        return dry_run(
            model, ((1, 512), "int64"), ((1, 512), "int64"), ranks=ranks, loss=nn.CrossEntropy(),
            optimizer=optim.SGD(lr=0.1), strategy="ddp", mesh=Mesh(shard=1, tensor=ranks), **more,
        ).activations  # fmt: skip

    one = of(1)
    for ranks in (2, 4):
        assert of(ranks) < 1.15 * one / ranks
