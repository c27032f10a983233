"""Memory by the arena: the ZeRO formulas, initialisation included, and a working set that is what the plan says."""

from typing import Any

import numpy as np
import pytest
from amount import examples, in_full
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import Precision, nn, optim, spawn
from fsdpx.array.arena import ALIGN, Arena, Life, place
from fsdpx.comm import Communicator

N = 4
F32 = 4


def held(comm: Communicator, strategy: str, steps: int) -> Any:
    model = nn.Chain(*(layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.GELU())))
    trainer = model.as_distributed(
        loss=nn.MSE(), optimizer=optim.Adam(lr=1e-3), strategy=strategy, comm=comm, group_bytes=0
    )
    x = np.ones((2, 128), np.float32)
    before = trainer.report().memory
    for _ in range(steps):
        trainer.step(x, x)
    return before, trainer.report().memory, trainer


@pytest.mark.parametrize(
    ("strategy", "params", "grads"),
    [("ddp", 1, 1), ("zero1", 1, 1), ("zero2", 1, 1 / N), ("fsdp", 1 / N, 1 / N)],
)
def test_model_states_follow_the_formulas(strategy: str, params: float, grads: float) -> None:
    """Rajbhandari et al. 2020 in fp32: parameters, gradients and two Adam moments, each whole or 1/N."""
    slots = 1 if strategy == "ddp" else 1 / N
    for before, after, trainer in spawn(lambda comm: held(comm, strategy, 2), N):
        P = trainer.inspect.placement.layout.size * F32
        assert before.get("working set", 0) == 0, "initialisation needs no more than what stays"
        states = sum(n for kind, n in after.items() if kind != "working set")
        assert states == pytest.approx(P * (params + grads + 2 * slots), rel=0.01)
        assert sum(before.values()) == states
        page = max(s.page.size for s in trainer.inspect.placement.pages.values()) * F32
        full_pages, full_grads = 2 * (params < 1), 2 * (grads < 1)
        assert after.get("working set", 0) == (full_pages + full_grads) * page, (
            "two pages ahead, two gradients on their way"
        )


def test_ahead_is_paid_in_pages() -> None:
    def run(comm: Communicator, ahead: int) -> int:
        model = nn.Chain(*(nn.Linear(64, 64) for _ in range(8)))
        trainer = model.as_distributed(
            loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm, group_bytes=0, ahead=ahead, precision="float64"
        )
        trainer.step(np.ones((2, 64)), np.ones((2, 64)))
        return trainer.report().memory["working set"]

    page = 8 * (64 * 64 + 64)
    assert [spawn(lambda comm, a=a: run(comm, a), 2)[0] for a in (0, 1, 3)] == [2 * page, 4 * page, 8 * page]


HALF = Precision(param="bf16", reduce="bf16")


@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", {"precision": HALF}), ("zero1", {"precision": HALF}), ("fsdp", {"chunks": 4})]
)
def test_reduces_in_flight_are_bounded(strategy: str, options: dict[str, Any]) -> None:
    """Wire memory is that of a few pages, not of the model."""
    from fsdpx import dry_run

    model = nn.Chain(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    batch = ((4, 256), "float32")
    run = dry_run(
        model,
        batch,
        batch,
        ranks=4,
        loss=nn.MSE(),
        optimizer=optim.SGD(lr=0.1),
        strategy=strategy,
        group_bytes=0,
        **options,
    )
    assert run.report.memory["working set"] <= 0.55 * 12 * 256 * 256 * F32


@pytest.mark.parametrize(("ranks", "ranks_per_host"), [(2, 1), (2, 2), (4, 4)])
def test_sums_in_16_bits_take_no_more_memory_than_in_float32(ranks: int, ranks_per_host: int) -> None:
    """What is sent and what arrives lies where the gradient was."""
    from fsdpx import dry_run

    model = nn.Chain(*(nn.Linear(256, 256) for _ in range(6)))
    batch = ((4, 256), "float32")
    options = {"loss": nn.MSE(), "optimizer": optim.SGD(lr=0.1), "group_bytes": 0, "ranks_per_host": ranks_per_host}
    found = [
        dry_run(model, batch, batch, ranks=ranks, precision=Precision("bf16", reduce=sums), **options)
        for sums in ("float32", "bf16")
    ]
    assert found[0].report.memory == found[1].report.memory
    assert found[0].passing == found[1].passing


def test_dry_run_takes_arrays() -> None:
    """Of which shape and dtype count."""
    from fsdpx import dry_run
    from fsdpx.errors import ConfigError

    model, options = nn.Linear(4, 2), {"loss": nn.MSE(), "optimizer": optim.SGD(lr=0.1), "ranks": 2}
    arrays = dry_run(model, np.ones((8, 4), np.float32), np.ones((8, 2), np.float32), **options)
    pairs = dry_run(model, ((8, 4), "float32"), ((8, 2), "float32"), **options)
    assert (arrays.report.memory, arrays.report.traffic) == (pairs.report.memory, pairs.report.traffic)
    with pytest.raises(ConfigError, match=r"a batch is an array or a pair \(\(8, 4\), 'float32'\), not 5"):
        dry_run(model, 5, 5, **options)


def test_dry_run_equals_the_real_run() -> None:
    from models import CASES, make, part

    from fsdpx import dry_run

    for options in ({"strategy": "fsdp"}, {"strategy": "zero2", "microbatches": 2}, {"strategy": "fsdp", "chunks": 8}):

        def real(comm: Communicator, options: dict[str, Any] = options) -> Any:
            trainer = make(comm, "mlp", **options)
            x, y = CASES["mlp"].batch(np.random.default_rng(0), 24)
            mine = part(comm, 24, options.get("chunks"))
            trainer.step(x[mine], y[mine])
            return trainer.report(), len(x[mine])

        for rank, (report, rows) in enumerate(spawn(real, 3)):
            dry = dry_run(
                CASES["mlp"].model(),
                ((rows, 12), "float64"),
                ((rows, 5), "float64"),
                ranks=3,
                rank=rank,
                loss=nn.MSE(),
                optimizer=optim.AdamW(lr=1e-2),
                precision="float64",
                group_bytes=2048,
                **options,
            )
            assert dry.report.memory == report.memory
            assert {k: c for k, c in dry.report.traffic.items() if k[0] != "world"} == report.predicted


def test_buffers_do_not_move_once_training() -> None:
    def run(comm: Communicator) -> Any:
        trainer = held(comm, "fsdp", 1)[2]
        generation, memory = trainer.inspect.engine.state.arena.generation, trainer.report().memory
        for _ in range(3):
            trainer.step(np.ones((2, 128), np.float32), np.ones((2, 128), np.float32))
        return generation == trainer.inspect.engine.state.arena.generation and memory == trainer.report().memory

    assert spawn(run, 2) == [True, True]


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    made = []
    for i in range(draw(st.integers(1, 12))):
        start = draw(st.integers(0, 20))
        made.append(Life(f"b{i}", start, start + draw(st.integers(0, 6)), draw(st.integers(1, 1000))))
    return made


@given(lives())
@settings(max_examples=examples(200), derandomize=True, database=None, deadline=None)
def test_buffers_alive_together_never_overlap(wanted: list[Life]) -> None:
    plan = place(wanted)
    assert plan.peak <= plan.nbytes
    for a in wanted:
        assert plan.offsets[a.name] % ALIGN == 0
        assert plan.offsets[a.name] + a.nbytes <= plan.nbytes
        for b in wanted:
            if a.name != b.name and a.start <= b.stop and b.start <= a.stop:
                x, y = plan.offsets[a.name], plan.offsets[b.name]
                assert x + a.nbytes <= y or y + b.nbytes <= x


def test_a_chain_needs_two_places() -> None:
    chain = [Life(f"p{i}", i, i + 1, 640) for i in range(10)]
    assert place(chain).nbytes == place(chain).peak == 2 * 640


def test_a_chain_that_ends_with_the_largest_needs_no_third_place() -> None:
    """Gradients of blocks, the last one with an embedding beside it; one of a tied parameter is there all the time."""
    chain = [Life(f"p{i}", 2 * i, 2 * i + 3, 640) for i in range(7)]
    plan = place([*chain, Life("tied", 0, 17, 64), Life("last", 14, 17, 704)])
    assert plan.nbytes == plan.peak == 640 + 64 + 704


def test_what_several_units_use_has_a_page_of_its_own() -> None:
    """The gradient of a tied embedding is there from the head on; that of the block beside it need not be."""
    from fsdpx import dry_run

    model = nn.GPT(64, 64, 4, 4, 16)
    batch, options = ((2, 16), "int64"), {"loss": nn.CrossEntropy(), "optimizer": optim.SGD(lr=0.1), "ranks": 2}
    run = dry_run(model, batch, batch, group_bytes=100_000, ranks_per_host=2, **options)
    pages = [[field.name for field in shard.page.fields] for shard in run.trainer.inspect.placement.pages.values()]
    assert [next(name for name in run.trainer.inspect.placement.layout.specs if "embed" in name)] in pages
    sizes = sorted(shard.size * F32 for shard in run.trainer.inspect.placement.pages.values())
    assert run.report.memory["working set"] <= sizes[-1] + sizes[-2] + sizes[0] + 3 * ALIGN, (
        "two blocks and the tied one"
    )


def test_the_arena_keeps_by_name() -> None:
    arena = Arena(np)
    first = arena.keep("a", 10, np.float32)
    assert arena.keep("a", 10, np.float32) is first
    assert not first.any()
    arena.lend(place([Life("t", 0, 1, 100)]))
    assert arena.slab_nbytes == 128
    assert arena.view(0, 25, np.float32).ctypes.data % ALIGN == 0
    generation = arena.generation
    arena.drop("a")
    assert arena.keep("a", 10, np.float32) is not first
    assert arena.generation > generation, "views of what is gone are stale"


@in_full
def test_no_sync_gives_its_memory_back() -> None:
    """Whole gradients are held while they are local, and by nobody after the update."""
    import gc
    import weakref

    from models import CASES, make

    def run(comm: Communicator) -> None:
        trainer = make(comm, "mlp", "fsdp", group_bytes=0)
        batch = CASES["mlp"].batch(np.random.default_rng(0), 4)
        trainer.step(*batch)
        before = trainer.report().memory["gradients"]
        for _ in range(2):
            with trainer.no_sync():
                trainer.accumulate(*batch)
            held = weakref.ref(trainer.inspect.engine.state.ledger.array("grad", 0, "local"))
            assert trainer.report().memory["gradients"] > before
            trainer.update()
            gc.collect()
            assert held() is None
            assert trainer.report().memory["gradients"] == before

    spawn(run, 2)
