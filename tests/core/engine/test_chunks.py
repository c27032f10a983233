"""chunks: one hash at any world size and placement."""

import numpy as np
import pytest
from amount import few
from bits import bits, demand_same
from models import CASES, make, own_part, placed, train
from present import needs
from threads import on_ranks

import fsdpx
from fsdpx import optim, spawn
from fsdpx.errors import ConfigError, DataError


def run(comm, case, strategy, **options):
    options = {"sizes": (8,) * 2, "clip_norm": 0.2, "precision": "float32", **options}
    losses, _, trainer = train(comm, case, strategy, reproducible_chunks=8, **options)
    assert np.isfinite(losses).all()
    return losses, bits(trainer)


PLACES = {
    "mlp": [("fsdp", 1), *(placed([2, 3], [4, 6])), ("fsdp", 5), ("zero2", 8)],
    "gpt": [("ddp", 1), ("zero2", 2), ("zero1", 3), ("hybrid", 4), ("fsdp", 5)],
}
"""Each strategy runs with numbers of ranks that do and do not divide 8 chunks."""


@pytest.mark.parametrize("case", PLACES)
def test_one_hash_at_any_world_size_and_strategy(case):
    """In one step where the optimizer keeps all bits of gradients, else in two."""
    more = {"sizes": (8,), "optimizer": optim.SGD(lr=0.5)} if case == "mlp" else {}
    seen = {
        (tuple(losses), digest)
        for strategy, size in few(PLACES[case], 6)
        for losses, digest in spawn(lambda comm, s=strategy: run(comm, case, s, **more), size, delays=size)
    }
    assert len(seen) == 1


def test_groups_and_prefetch_do_not_change_bits():
    demand_same(
        spawn(lambda comm, g=g, a=a: run(comm, "mlp", "fsdp", group_bytes=g, prefetch=a), 3)[0][1]
        for g, a in ((0, 0), (0, 2), (1 << 20, 2))
    )


def test_lamb_sees_whole_parameters_in_one_order():
    lamb = optim.LAMB(lr=1e-2)
    demand_same(spawn(lambda comm: run(comm, "mlp", "fsdp", optimizer=lamb), size)[0][1] for size in (1, 2, 5))


def test_other_chunks_are_other_bits():
    def of(comm, chunks):
        return bits(train(comm, "mlp", sizes=(16,), reproducible_chunks=chunks, precision="float32")[2])

    assert spawn(of, 1, 8) != spawn(of, 1, 2)


def test_batch_must_divide():
    text = "a global batch of 15 samples cannot be split into reproducible_chunks=8 equal parts"
    with pytest.raises(DataError, match=text):
        spawn(lambda comm: train(comm, "mlp", sizes=(15,), reproducible_chunks=8), 2)


def test_parts_must_hold_whole_chunks():
    def uneven(comm):
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 8)
        mine = slice(0, 3) if comm.rank == 0 else slice(3, 8)
        make(comm, "mlp", reproducible_chunks=4).step(x[mine], y[mine])

    with pytest.raises(DataError, match=r"reproducible_chunks=4 needs \[4, 4\] samples on ranks 0 to 1, not \[3, 5\]"):
        spawn(uneven, 2)


def test_batch_statistics_are_refused():
    with pytest.raises(ConfigError, match="layer '1' takes statistics over the global batch"):
        spawn(lambda comm: train(comm, "norms", reproducible_chunks=4), 1)


def test_accumulate_is_refused():
    with pytest.raises(ConfigError, match="with chunks the whole global batch goes into one step"):
        spawn(lambda comm: make(comm, "mlp", reproducible_chunks=4).accumulate(None, None), 1)


@on_ranks(2)
def test_memory_does_not_grow_with_steps(comm):
    trainer = make(comm, "mlp", reproducible_chunks=8, group_bytes=0)
    seen = []
    for _ in range(4):
        trainer.step(*own_part(comm, "mlp", 8, chunks=8))
        views = trainer.inspect.engine._views
        seen.append(sum(map(len, (views._pages, views._entries, views._params, views._grads, views._leaves))))
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("strategy", "size", "chunks"), [("ddp", 2, 3), ("ddp", 5, 8), ("fsdp", 3, 8), ("fsdp", 4, 7), ("hybrid", 4, 7)]
)
def test_counted_equals_predicted(strategy, size, chunks):
    def go(comm):
        trainer = make(comm, "mlp", strategy, reproducible_chunks=chunks)
        trainer.step(*own_part(comm, "mlp", 2 * chunks, chunks=chunks))
        return trainer.report()

    for report in spawn(go, size):
        assert {k: c for k, c in report.traffic.items() if k[0] != "world"} == report.predicted


@on_ranks(2)
def test_predict_and_evaluate_take_any_batch(comm):
    trainer, (x, y) = make(comm, "mlp", reproducible_chunks=4), CASES["mlp"].batch(np.random.default_rng(0), 5)
    assert trainer.predict(x).shape == (5, 5)
    assert trainer.evaluate(x, y) == pytest.approx(make(comm, "mlp").evaluate(x, y))


@needs("plan")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_dry_run_of_chunks_makes_the_norm_without_numbers(strategy):
    x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
    options = {"strategy": strategy, "reproducible_chunks": 4, "clip_norm": 1.0, "group_bytes": 2048, "seed": 3}

    def real(comm):
        trainer = make(comm, "mlp", **options)
        trainer.step(*own_part(comm, "mlp", 4))
        return str(trainer.program), trainer.report().memory

    case = CASES["mlp"]
    more = {"loss": case.loss, "optimizer": optim.AdamW(lr=1e-2, eps=1e-5), "precision": "float64"}
    dry = fsdpx.dry_run(case.model(), x[:2], y[:2], ranks=2, **more, **options)
    assert "NORM" in str(dry.program)
    assert spawn(real, 2)[0] == (str(dry.program), dry.report.memory)


def test_plain_codecs_are_not():
    plain = {"reproducible_chunks": 4, "compression": {"*": "plain"}}
    assert spawn(lambda comm: make(comm, "mlp", **plain).global_step, 2) == [0, 0]
