"""Dry runs tell the memory and the traffic of a run that nobody has made."""

import numpy as np
import pytest
from amount import few, pairs
from models import CASES, distributed, make, part

from fsdpx import Mesh, Precision, nn, optim, spawn
from fsdpx.core.array.arena import ALIGN
from fsdpx.core.program import parse_actions
from fsdpx.errors import ConfigError
from fsdpx.plan.dry_run import dry_run

F32 = 4


def dry(model, x, y=None, **options):
    """A dry run of training with plain SGD; y: as x, if it isn't given."""
    return dry_run(model, x, x if y is None else y, **{"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1), **options})


def test_ahead_is_paid_in_pages():
    def run(comm, ahead):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        trainer = distributed(model, comm, group_bytes=0, prefetch=ahead, precision="float64")
        trainer.step(np.ones((2, 64)), np.ones((2, 64)))
        return trainer.report().memory["working set"]

    page = 8 * (64 * 64 + 64)
    assert [spawn(run, 2, ahead)[0] for ahead in (0, 1, 3)] == [2 * page, 4 * page, 8 * page]


HALF = Precision(param="bf16", reduce="bf16")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ddp", {"precision": HALF}), ("zero1", {"precision": HALF}), ("fsdp", {"reproducible_chunks": 4})],
)
def test_reduces_in_flight_are_bounded(strategy, options):
    """Wire memory is that of a few pages, not of the model."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    run = dry(model, ((4, 256), "float32"), ranks=4, strategy=strategy, group_bytes=0, **options)
    assert run.report.memory["working set"] <= 0.55 * 12 * 256 * 256 * F32


@pytest.mark.parametrize(("ranks", "ranks_per_host"), [(2, 1), (2, 2), (4, 4)])
def test_sums_in_16_bits_take_no_more_memory_than_in_float32(ranks, ranks_per_host):
    """What is sent and what arrives lies where the gradient was."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    options = {"ranks": ranks, "ranks_per_host": ranks_per_host, "group_bytes": 0}
    formats = [Precision("bf16", reduce=sums) for sums in ("float32", "bf16")]
    wide, half = (dry(model, ((4, 256), "float32"), precision=precision, **options) for precision in formats)
    assert (wide.report.memory, wide.peak_heap_bytes) == (half.report.memory, half.peak_heap_bytes)


def test_dry_run_takes_arrays():
    """Of which shape and dtype count."""
    model = nn.Linear(4, 2)
    arrays = dry(model, np.ones((8, 4), np.float32), np.ones((8, 2), np.float32), ranks=2)
    for dtype in ("float32", np.float32, np.dtype("f4")):
        pairs = dry(model, ((8, 4), dtype), ((8, 2), dtype), ranks=2)
        assert (arrays.report.memory, arrays.report.traffic) == (pairs.report.memory, pairs.report.traffic)
    with pytest.raises(ConfigError, match=r"a batch is an array or a pair \(\(8, 4\), 'float32'\), not 5"):
        dry(model, 5, ranks=2)


@pytest.mark.parametrize(
    "options",
    [{"strategy": "fsdp"}, {"strategy": "zero2", "microbatches": 2}, {"strategy": "fsdp", "reproducible_chunks": 8}],
)
def test_dry_run_equals_the_real_run(options):
    def real(comm):
        trainer = make(comm, "mlp", **options)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 24)
        mine = part(comm, 24, options.get("reproducible_chunks"))
        trainer.step(x[mine], y[mine])
        return trainer.report(), len(x[mine])

    given = {"ranks": 3, "optimizer": optim.AdamW(lr=1e-2), "precision": "float64", "group_bytes": 2048, **options}
    for rank, (report, rows) in enumerate(spawn(real, 3)):
        found = dry(CASES["mlp"].model(), ((rows, 12), "float64"), ((rows, 5), "float64"), rank=rank, **given)
        assert found.report.memory == report.memory
        assert {k: c for k, c in found.report.traffic.items() if k[0] != "world"} == report.predicted


def test_what_several_units_use_has_a_page_of_its_own():
    """The gradient of a tied embedding is there from the head on; that of the block beside it need not be."""
    model = nn.GPT(64, 64, 4, 4, 16)
    options = {"ranks": 2, "ranks_per_host": 2, "group_bytes": 100_000, "loss": nn.CrossEntropyLoss()}
    run = dry(model, ((2, 16), "int64"), **options)
    placement = run.trainer.inspect.placement
    pages = [[field.name for field in shard.page.fields] for shard in placement.pages.values()]
    assert [next(name for name in placement.layout.specs if "embed" in name)] in pages
    sizes = sorted(shard.size * F32 for shard in placement.pages.values())
    most = sizes[-1] + sizes[-2] + sizes[0]  # two blocks and the tied one
    assert run.report.memory["working set"] <= most + 3 * ALIGN


WIDTH, ROWS, RANKS = 64, 4, 4

VALUE = ROWS * WIDTH * 4
"""Bytes of one microbatch of activations."""


def run(rank=0, microbatches=8, **options):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * RANKS)])
    options |= {"strategy": "ddp", "mesh": Mesh(shard=1, pipe=RANKS), "microbatches": microbatches, "group_bytes": 0}
    return dry(model, ((ROWS * microbatches, WIDTH), "float32"), ranks=RANKS, rank=rank, **options)


@pytest.mark.parametrize("rank", [1, 2])
def test_activations_of_1f1b_are_bounded_by_the_depth(rank):
    """Narayanan et al. 2021: at most P - r microbatches in flight on rank r, whatever their number."""
    found = {m: run(rank, m, schedule="1f1b").activations for m in (8, 16, 32)}
    assert len(set(found.values())) == 1
    in_flight = RANKS - rank
    # of each: what two layers read; beside them one that was received a step early, and one result
    assert found[8] == (2 * in_flight + 2) * VALUE


def test_activations_of_gpipe_grow_with_the_microbatches():
    found = [run(1, m, schedule="gpipe").activations for m in (8, 16)]
    assert found[1] - found[0] == 2 * 8 * VALUE  # two layers' inputs of eight more


def test_the_pipe_moves_what_crosses_a_cut():
    """An activation forward and its gradient back per microbatch and cut; the ends have one neighbor."""
    for rank in range(RANKS):
        report = run(rank, 8).report
        neighbors = 1 if rank in (0, RANKS - 1) else 2
        for call in ("send", "recv"):
            count = report.traffic["pipe", call]
            assert (count.calls, count.bytes) == (8 * neighbors, 8 * neighbors * VALUE)
            assert report.predicted["pipe", call] == count


BLOCKS = 6


def blocks(recompute):
    model = nn.Sequential(*[nn.TransformerBlock(32, 4) for _ in range(BLOCKS)])
    return dry(model, ((2, 16, 32), "float32"), ranks=1, strategy="ddp", group_bytes=0, recompute=recompute)


def test_recompute_keeps_the_inputs_of_blocks_and_one_block():
    """Chen et al. 2016: with every block recomputed, one input per block and the inside of one block."""
    value, inside = 2 * 16 * 32 * 4, 41_984  # bytes of one input, and of what one block keeps for backward, it included
    assert blocks(None).activations == BLOCKS * inside + value
    assert blocks("all").activations == (BLOCKS - 1) * value + inside + value


def test_recompute_costs_one_more_forward():
    ops = [a.op for a in parse_actions(str(blocks("all").program))]
    assert ops.count("R") == ops.count("C") == ops.count("B") == BLOCKS
    assert ops.count("F") == 0
    ops = [a.op for a in parse_actions(str(blocks(3).program))]
    assert (ops.count("R"), ops.count("F")) == (BLOCKS // 3, BLOCKS - BLOCKS // 3)


def test_a_budget_recomputes_as_little_as_it_takes():
    programs = [blocks(budget).trainer.inspect.engine.last_program for budget in ("1GiB", "150KiB", "61KiB")]
    counts = [sum(action.op == "R" for action in program.actions) for program in programs]
    assert counts == [0, 3, 5]  # 3 x 41,984 + 3 x 4,096 bytes are less than 150 KiB, 41,984 + 5 x 4,096 are 61 KiB
    with pytest.raises(ConfigError, match="recompute: 1,024 bytes are not enough: with every unit recomputed 62,464"):
        blocks("1KiB")


@pytest.mark.parametrize(
    ("sequence", "uneven"), few(pairs(["ring", "ulysses", "parallel"], [(11, "31KB"), (12, "31KB"), (2, "6300B")]), 3)
)
def test_dry_runs_of_uneven_sequences_are_the_runs(sequence, uneven):
    """What each rank moves between ranks, and keeps, is known without data; `recompute` chooses alike on all."""
    time, budget = uneven
    options = {
        "loss": nn.CrossEntropyLoss(), "strategy": "ddp", "sequence": sequence, "mesh": Mesh(shard=1, tensor=3),
        "group_bytes": 0, "recompute": budget,
    }  # fmt: skip

    def one(comm):
        trainer = distributed(nn.GPT(13, 12, 4, 3, 12), comm, **options)
        x = np.random.default_rng(0).integers(0, 13, (4, time))
        trainer.step(x, x)
        return trainer.report(), str(trainer.inspect.engine.last_program)

    programs = set()
    for rank, (report, program) in enumerate(spawn(one, 3)):
        found = dry(nn.GPT(13, 12, 4, 3, 12), ((4, time), "int64"), ranks=3, rank=rank, **options)
        for key in {*report.traffic, *found.report.traffic}:
            assert key[0] != "tensor" or report.traffic[key] == found.report.traffic[key], key
        assert report.memory == found.report.memory
        assert str(found.program) == program
        programs.add(program)
    (ran,) = programs
    assert 0 < [action.op for action in parse_actions(ran)].count("R") < 4


@pytest.mark.parametrize("sequence", ["ulysses", "ring"])
def test_long_sequences_take_their_share_of_activations(sequence):
    """1/N of the activation memory of one process on each of N ranks, up to a block of keys and values under way."""

    held = {}
    for ranks in (1, 2, 4):
        options = {"loss": nn.CrossEntropyLoss(), "strategy": "ddp", "mesh": Mesh(shard=1, tensor=ranks)}
        options |= {"sequence": sequence} if ranks > 1 else {}
        held[ranks] = dry(nn.GPT(64, 32, 4, 4, 512), ((1, 512), "int64"), ranks=ranks, **options).activations
        assert held[ranks] < 1.15 * held[1] / ranks


def test_many_small_layers_become_few_collectives():
    def run(comm):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(1000)))
        words = str(distributed(model, comm, strategy="fsdp").program).split()
        return sum(w.startswith("GATHER") for w in words[: words.index("LOSS.0")])

    assert spawn(run, 2) == [4, 4]  # 4.03 MiB in groups of at least 1 MiB
