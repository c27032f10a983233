"""Tensor, sequence and context parallelism in the engine, with Llama and experts: the result of one process."""

import itertools
from functools import cache

import numpy as np
import pytest
from amount import few, pairs
from bits import bits, demand_same
from meshes import compare, train
from models import alike, distributed, make, part
from threads import on_ranks

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.errors import ShapeError
from fsdpx.testing import assert_close

SEQUENCES = (None, "parallel", "ulysses", "ring", "samples")


@pytest.mark.parametrize(
    ("sequence", "width"), [(None, 2), (None, 3), ("parallel", 4), ("ulysses", 2), ("ring", 4), ("samples", 4)]
)
def test_every_width_equals_one_process(sequence, width):
    """No width divides heads, vocabulary and features; of a ring of two both neighbors are one rank, see below."""
    compare("wide", Mesh(shard=1, tensor=width), "ddp", delays=width, sequence=sequence)


@pytest.mark.parametrize(("sequence", "width"), pairs(SEQUENCES[1:], [2, 3]))
def test_sequences_need_not_divide(sequence, width):
    """11 positions, then 1: all ranks but one have none."""
    compare("uneven", Mesh(shard=1, tensor=width), "ddp", delays=width, sequence=sequence, check=True)


UNEVEN = [
    (Mesh(shard=1, pipe=2, tensor=3), {"strategy": "ddp", "recompute": "all"}),
    (Mesh(shard=2, pipe=2, tensor=2), {"strategy": "fsdp", "recompute": "attention", "schedule": "zb-h1"}),
    (Mesh(shard=2, tensor=2), {"strategy": "zero1", "recompute": "60KiB"}),
]


@pytest.mark.parametrize(("on", "sequence"), few(pairs(UNEVEN, SEQUENCES[1:]), 3))
def test_sequences_need_not_divide_on_any_mesh(on, sequence):
    compare("uneven", on[0], sequence=sequence, microbatches=2, **on[1])


@pytest.mark.parametrize("sequence", few(SEQUENCES[1:], 3))
def test_uneven_sequences_have_one_hash(sequence):
    def run(comm, recompute):
        options = {"sequence": sequence, "reproducible_chunks": 2, "recompute": recompute}
        return bits(train(comm, "uneven", Mesh(shard=1, tensor=2), "ddp", (6, 2), **options)[2])

    found = [spawn(run, 2, recompute, delays=seed) for seed, recompute in enumerate((None, "all", "attention"))]
    demand_same(itertools.chain(*found))


THREE = [("fsdp", "ring"), ("ddp", "parallel"), ("zero1", "ulysses"), ("ddp", None)]
"""Sequences are cut inside layers, placements hold between them: each of both, not each with each."""


@pytest.mark.parametrize(("strategy", "sequence"), few(THREE, len(THREE)))
def test_three_dimensions_equal_one_process(strategy, sequence):
    widths = {"replica": 2, "shard": 1} if strategy == "ddp" else {"shard": 2}
    compare("wide", Mesh(pipe=2, tensor=2, **widths), strategy, sequence=sequence, microbatches=2)


def test_the_order_of_the_axes_is_a_choice():
    mesh = Mesh(shard=2, pipe=2, tensor=2, order=("tensor", "shard", "replica", "pipe"))
    compare("wide", mesh, "fsdp", microbatches=2)


@pytest.mark.parametrize(("sequence", "time"), few(pairs(SEQUENCES, [12, 7, 1]), 6))
def test_predict_and_the_three_calls_see_whole_outputs(sequence, time):
    def run(comm, mesh):
        trainer = train(comm, "wide", mesh, "ddp", sizes=(), sequence=sequence if mesh.tensor > 1 else None)[2]
        x = np.random.default_rng(0).integers(0, 31, (3, time))
        out = trainer.forward(x)
        trainer.backward(np.sin(out) / 3)
        gradients = trainer.gradients()
        trainer.update()
        return out, gradients, trainer.predict(x), trainer.evaluate(x, x)

    (want,) = spawn(run, 1, Mesh(shard=1))
    for got in spawn(run, 4, Mesh(shard=1, tensor=2, pipe=2)):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-9, atol=1e-12)
        same_numbers(got[1], want[1], 1e-9, 1e-12)
        np.testing.assert_allclose(got[2], want[2], rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(got[3], want[3], rtol=1e-10)


def test_norms_of_whole_parameters_see_no_cut():
    """LAMB scales each parameter by its own norm."""
    lamb = {"optimizer": optim.LAMB(lr=0.01), "sizes": (3,)}
    (want,) = spawn(lambda comm: train(comm, "wide", Mesh(shard=1), "ddp", **lamb)[1], 1)
    for got in spawn(lambda comm: train(comm, "wide", Mesh(shard=2, tensor=2, pipe=2), "fsdp", **lamb)[1], 8):
        same_numbers(got, want, 1e-10, 1e-12)


@on_ranks(4)
def test_parameters_are_loaded_whole(comm):
    trainer = train(comm, "wide", Mesh(shard=1, tensor=2, pipe=2), "ddp", sizes=())[2]
    moved = {name: value + 1.0 for name, value in trainer.parameters().items()}
    trainer.load_parameters(moved)
    assert_close(trainer.parameters(), moved)


def test_initialization_does_not_see_the_axes():
    def run(comm, mesh):
        return bits(train(comm, "wide", mesh, "ddp" if mesh.shard == 1 else "fsdp", sizes=())[2])

    meshes = [Mesh(shard=1), Mesh(shard=1, tensor=3), Mesh(shard=2, tensor=2), Mesh(shard=1, pipe=2, tensor=2)]
    demand_same(found for mesh in meshes for found in spawn(run, mesh.size, mesh))


def test_a_plan_for_a_model_of_ones_own():
    def run(comm, mesh, plan):
        layers = {"up": nn.Linear(12, 30), "act": nn.GELU(), "down": nn.Linear(30, 12), "out": nn.Linear(12, 5)}
        options = {"optimizer": optim.AdamW(lr=1e-2, eps=1e-5), "precision": "float64", "tensor_plan": plan}
        trainer = distributed(nn.Sequential(layers), comm, strategy="ddp", mesh=mesh, **options)
        rng = np.random.default_rng(0)
        losses = [trainer.step(rng.normal(size=(6, 12)), rng.normal(size=(6, 5))) for _ in range(2)]
        return losses, trainer.report().traffic

    plan = {"up": nn.sharding.ColumnParallel, "down": nn.sharding.RowParallel}
    ((want, _),) = spawn(run, 1, Mesh(shard=1), None)
    for got, traffic in spawn(run, 4, Mesh(shard=1, tensor=4), plan):
        np.testing.assert_allclose(got, want, rtol=1e-12)
        assert ("tensor", "all_reduce") in traffic


def test_ranks_of_a_line_must_have_the_same_samples():
    def act(comm):
        x = np.random.default_rng(comm.rank).integers(0, 31, (3, 12))
        train(comm, "wide", Mesh(shard=1, tensor=2), "ddp", sizes=())[2].step(x, x)

    text = alike(2, act)
    assert text.startswith("DataError: ")
    assert "ranks of one line of the pipe or tensor axis have different samples" in text
    assert "trainer.data_group" in text


def test_sequences_that_are_too_long_are_refused_before_anything_moves():
    def run(comm):
        trainer = make(comm, "wide", "ddp", mesh=Mesh(shard=1, pipe=2, tensor=2), sequence="ring", microbatches=2)
        trainer.inspect.reset_counters()
        x = np.random.default_rng(0).integers(0, 31, (4, 13))
        with pytest.raises(ShapeError) as caught:
            trainer.step(x, x)
        assert {axis for axis, _ in trainer.report().traffic} <= {"world"}
        return str(caught.value)

    text, *others = spawn(run, 4)
    assert others == [text] * 3
    assert "wants tokens of shape (samples, time <= 12), got (4, 13)" in text


def train_llama(size, segments=True, **options):
    """Parameters after two steps."""
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(lr=1e-2), "precision": "float64", **options}

    def run(comm):
        model = nn.Llama(31, 16, 2, 4, 8, kv_heads=2, qk_norm=True, segments=segments)
        trainer = distributed(model, comm, seed=3, **given)
        mine = part(trainer.data_group, 4)
        for step in range(2):
            rng = np.random.default_rng(step)
            text = rng.integers(0, 31, (4, 9))
            x = text[mine, :-1], np.sort(rng.integers(0, 2, (4, 8)), axis=1)[mine]
            trainer.step(x if segments else x[0], text[mine, 1:])
        return trainer.parameters()

    return spawn(run, size)[0]


@cache
def llama_alone():
    return train_llama(1)


def same_numbers(got, want, rtol, atol):
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp", "recompute": "attention"},
        {"mesh": Mesh(pipe=2), "schedule": "1f1b", "microbatches": 2, "recompute": "all"},
        {"mesh": Mesh(tensor=2), "sequence": "parallel"},
    ],
    ids=["fsdp", "pipe", "tensor"],
)
def test_packed_documents_train_alike_on_two_ranks(options):
    same_numbers(train_llama(2, **options), llama_alone(), 1e-10, 1e-10)


def test_chunks_and_recompute_leave_the_bits():
    want = train_llama(1, segments=False, precision="float32", reproducible_chunks=4)
    for size, options in ((2, {"strategy": "fsdp"}), (1, {"recompute": "attention"})):
        got = train_llama(size, segments=False, precision="float32", reproducible_chunks=4, **options)
        assert all(np.array_equal(got[name], value) for name, value in want.items())


def test_16_bits_follow():
    same_numbers(train_llama(1, precision="bf16"), llama_alone(), 0.06, 0.06)
