"""Counted bytes equal the predictions and the formulas of the strategies."""

from typing import Any

import numpy as np
import pytest
from amount import in_full
from models import CASES, STRATEGIES, make, part, placed

from fsdpx import Precision, nn, optim, spawn
from fsdpx.comm import Communicator

ITEM = 8  # float64


def moved(comm: Communicator, strategy: Any, m: int = 1, **options: Any) -> Any:
    """Counts of one step, the second one: the first may differ in what is resident."""
    trainer = make(comm, "mlp", strategy, microbatches=m, group_bytes=0, clip_norm=0.5, **options)
    x, y = CASES["mlp"].batch(np.random.default_rng(0), 8)
    mine = part(comm, 8)
    trainer.step(x[mine], y[mine])
    trainer.inspect.reset()
    trainer.step(x[mine], y[mine])
    return trainer.report(), [(s.page.size, s.mine.size) for s in trainer.inspect.placement.pages.values()]


def data(report: Any) -> dict[tuple[str, str], Any]:
    """Parameters and gradients only: control messages go over the `data` axis."""
    return {key: count for key, count in report.traffic.items() if key[0] != "world"}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(("strategy", "size"), placed([2, 3, 4], [4, 6]))
def test_counted_equals_predicted(strategy: str, size: int, m: int) -> None:
    for report, _ in spawn(lambda comm: moved(comm, strategy, m), size):
        assert data(report) == report.predicted


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 3])
def test_counted_equals_the_formulas(size: int, m: int) -> None:
    """P: parameter bytes, own: this rank's share, saved: pages that stay from forward to backward to next forward."""
    for strategy, expected in {
        "ddp": lambda P, own, saved: 2 * (P - own),
        "zero1": lambda P, own, saved: 2 * (P - own),
        "zero2": lambda P, own, saved: (1 + m) * (P - own),
        "fsdp": lambda P, own, saved: 3 * m * (P - own) - saved,
    }.items():
        for rank, (report, pages) in enumerate(spawn(lambda comm, s=strategy: moved(comm, s, m), size)):
            total = sum(n for n, _ in pages)
            share = [n * (rank + 1) // size - n * rank // size for n, _ in pages]
            foreign = [n - o for (n, _), o in zip(pages, share, strict=True)]
            saved = m * sum(foreign[-2:]) + (m - 1) * sum(foreign[:2])
            bytes_moved = sum(count.bytes for count in data(report).values())
            assert bytes_moved == ITEM * expected(total, sum(share), saved), strategy


@pytest.mark.parametrize("m", [1, 3])
def test_hybrid_joins_replicas_once(m: int) -> None:
    """The FSDP bytes over the shard axis, plus 2 (P/S)(R-1)/R over the replica axis, whatever the microbatches."""
    for rank, (report, pages) in enumerate(spawn(lambda comm: moved(comm, "hybrid", m), 4)):
        shards = [n * (rank % 2 + 1) // 2 - n * (rank % 2) // 2 for n, _ in pages]
        foreign = [n - s for (n, _), s in zip(pages, shards, strict=True)]
        saved = m * sum(foreign[-2:]) + (m - 1) * sum(foreign[:2])
        own = [s * (rank // 2 + 1) // 2 - s * (rank // 2) // 2 for s in shards]
        by_axis = {
            axis: sum(c.bytes for (a, _), c in data(report).items() if a == axis) for axis in ("shard", "replica")
        }
        assert by_axis["shard"] == ITEM * (3 * m * sum(foreign) - saved)
        assert by_axis["replica"] == ITEM * 2 * (sum(shards) - sum(own))


def test_kept_gradients_move_two_m_plus_one() -> None:
    from fsdpx import Sharding

    for rank, (report, pages) in enumerate(spawn(lambda comm: moved(comm, Sharding(full_grads="step"), 3), 2)):
        foreign = [n - (n * (rank + 1) // 2 - n * rank // 2) for n, _ in pages]
        saved = 3 * sum(foreign[-2:]) + 2 * sum(foreign[:2])
        assert sum(c.bytes for c in data(report).values()) == ITEM * ((2 * 3 + 1) * sum(foreign) - saved)


def test_ddp_moves_no_parameters() -> None:
    report, _ = spawn(lambda comm: moved(comm, "ddp"), 2)[0]
    assert {verb for _, verb in data(report)} == {"all_reduce"}


def test_one_rank_moves_nothing() -> None:
    for strategy in STRATEGIES:
        report, _ = spawn(lambda comm, s=strategy: moved(comm, s), 1)[0]
        assert report.traffic == report.predicted == {}


def test_half_precision_moves_half_the_bytes() -> None:
    wide, _ = spawn(lambda comm: moved(comm, "fsdp", precision="float32"), 2)[0]
    half, _ = spawn(lambda comm: moved(comm, "fsdp", precision=Precision(param="bf16", reduce="bf16")), 2)[0]
    assert data(half) == half.predicted
    total = sum(c.bytes for c in data(wide).values())
    assert sum(c.bytes for c in data(half).values()) == total / 2


@in_full
def test_many_small_layers_become_few_collectives() -> None:
    def run(comm: Communicator) -> Any:
        model = nn.Chain(*(nn.Linear(32, 32) for _ in range(1000)))
        trainer = model.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=1e-3), strategy="fsdp", comm=comm)
        words = str(trainer.program).split()
        return sum(w.startswith("GATHER") for w in words[: words.index("LOSS.0")])

    assert spawn(run, 2) == [4, 4]  # 4.03 MiB in groups of at least 1 MiB
