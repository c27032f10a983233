"""Replay buffers over ranks: which samples they keep, draw and save."""

import json

import numpy as np
import pytest
from coupled import SHAPE, cut
from threads import on_ranks

import fsdpx
from fsdpx import data, spawn
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import CheckpointError, ConfigError, DataError
from fsdpx.ext.coupling.messages import parse_number_dtype

U = np.random.default_rng(0).standard_normal((40, *SHAPE, 2)) * 3 + 5
V = (U[..., 0] * 7).astype(np.float32)
ALONE = fsdpx.Grid(make_single_rank_communicator(), (3,), layout="x")


def rows(comm):
    """Make a grid of rows. With 3 ranks, the last one has no cells."""
    own = cut(SHAPE[0], comm.size, 3)[comm.rank]
    return fsdpx.Grid(comm, (own, SHAPE[1]), dims=(comm.size, 1), layout="yxc")


def columns(comm):
    return fsdpx.Grid(comm, (SHAPE[0], cut(SHAPE[1], comm.size, 1)[comm.rank]), dims=(1, comm.size), layout="yxc")


def filled(grid, policy, count):
    buffer = data.ReplayBuffer(6, grid, policy, seed=4)
    for u, v in zip(U[:count], V[:count], strict=True):
        buffer.add(grid.take_local(u), grid.take_local(v))
    return buffer


def check_batch(grid, batch):
    """Check that each sample has the fields of its number."""
    for k, u, v in zip(batch.ids, *batch.fields, strict=True):
        np.testing.assert_array_equal(u, grid.take_local(U[k]))
        np.testing.assert_array_equal(v, grid.take_local(V[k]))
    assert [a.dtype for a in batch.fields] == [np.float64, np.float32]


def draw(buffer, grid, times=3):
    numbers = []
    for _ in range(times):
        batch = buffer.sample(8)
        check_batch(grid, batch)
        numbers += batch.ids.tolist()
    return numbers


@pytest.mark.parametrize("policy", ["fifo", "reservoir", "priority"])
def test_a_buffer_that_is_saved_goes_on_at_another_number_of_ranks(policy, tmp_path):
    def save(comm):
        grid = rows(comm)
        for count in (3, 20):  # the second one replaces the first one
            buffer = filled(grid, policy, count)
            draw(buffer, grid)
            if policy == "priority":
                buffer.update_priorities([count - 1, count - 2, 0], [9.0, 0.1, 1.0])
            buffer.save(tmp_path / "buffer")
        return go_on(buffer, grid)

    def load(comm):
        grid = columns(comm)
        buffer = data.ReplayBuffer(6, grid, policy, seed=99)
        buffer.load(tmp_path / "buffer")
        return go_on(buffer, grid)

    def go_on(buffer, grid):
        assert len(buffer) == 6
        seen, before = draw(buffer, grid), buffer.gather_statistics()
        for u, v in zip(U[20:30], V[20:30], strict=True):
            buffer.add(grid.take_local(u), grid.take_local(v))
        return seen, draw(buffer, grid), buffer.sample(5).weights.tolist(), before, buffer.gather_statistics()

    first, *others = [*spawn(save, 3), *spawn(load, 2), *spawn(load, 1)]
    seen, later, weights, before, after = first
    assert (set(seen) <= set(range(14, 20))) == (policy != "reservoir")
    assert max(later) >= 20
    for found in others:
        assert found[:3] == (seen, later, weights)
        for one, other in zip((*before, *after), (*found[3], *found[4]), strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-12)
    for count, found in ((20, before), (30, after)):
        np.testing.assert_allclose(found[0].mean, U[:count].mean((0, 1, 2)), rtol=1e-12)
        np.testing.assert_allclose(found[0].std, U[:count].std((0, 1, 2)), rtol=1e-12)
        np.testing.assert_allclose(found[1].std, [V[:count].std(dtype=np.float64)], rtol=1e-12)
    assert len(list((tmp_path / "buffer").iterdir())) == 2 * 3 + 1


def test_a_reservoir_keeps_each_sample_with_the_same_chance():
    found = np.zeros(12)
    for seed in range(600):
        buffer = data.ReplayBuffer(4, ALONE, "reservoir", seed=seed)
        for k in range(12):
            buffer.add(np.full(3, k))
        found[np.unique(buffer._ids)] += 1
    np.testing.assert_allclose(found / 600, 1 / 3, atol=0.07)


def test_priorities_say_how_often_a_sample_is_drawn_and_what_it_weighs():
    buffer = data.ReplayBuffer(3, ALONE, "priority")
    for k in range(4):
        buffer.add(np.full(3, k))  # 3 replaces 0
    buffer.update_priorities([0, 1, 2, 3], [50.0, 1.0, 2.0, 4.0])
    batch = buffer.sample(4000)
    chances = np.array([1.0, 2.0, 4.0]) ** 0.6
    chances /= chances.sum()
    np.testing.assert_allclose(np.bincount(batch.ids, minlength=4)[1:] / 4000, chances, atol=0.03)
    np.testing.assert_allclose(batch.weights, chances[0] / chances[batch.ids - 1], rtol=1e-12)
    buffer.add(np.full(3, 4))  # replaces 1, with the highest priority
    assert buffer._priorities[buffer._ids.tolist().index(4)] == 4.0


@on_ranks(3)
def test_wrong_samples_and_folders_are_refused(comm, tmp_path):
    grid = rows(comm)
    for match, given in {
        "capacity=0": (0, grid), "policy='lifo'": (3, grid, "lifo"), "grid=3": (3, 3),
        "without ghost cells": (3, fsdpx.Grid(comm, (2,), ghosts=1)),
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            data.ReplayBuffer(*given)
    for seed in (None, -1, "a"):
        with pytest.raises(ConfigError, match=f"seed={seed!r}"):
            data.ReplayBuffer(3, grid, seed=seed)
    buffer, ranked = data.ReplayBuffer(3, grid), data.ReplayBuffer(3, grid, "priority")
    (tmp_path / "file").write_text("")

    def refuse(*cases):
        for error, match, call, *given in cases:
            with pytest.raises(error, match=match):
                call(*given)

    refuse(
        (DataError, "buffer is empty", buffer.sample, 1),
        (DataError, "no sample was added", buffer.gather_statistics),
        (DataError, "field 0 has shape", buffer.add, np.zeros((99, *SHAPE))),
        (DataError, "give at least one field", buffer.add),
        (ConfigError, "policy='fifo' has none", buffer.update_priorities, [0], [1.0]),
        (DataError, "1 priorities for 2 samples", ranked.update_priorities, [0, 1], [1.0]),
        (CheckpointError, "No such file", buffer.load, tmp_path / "nothing"),
    )
    buffer.add(grid.take_local(U[0]))
    buffer.save(tmp_path / "good")
    other_fields = r"sample has fields \[\('float32', .* earlier samples have \[\('float64'"
    other_buffer = r"\[3, 'fifo', 'yxc', \[9, 7\]\], but this buffer has \[3, 'prio"
    refuse(
        (DataError, other_fields, buffer.add, grid.take_local(V[0])),
        (CheckpointError, r"ReplayBuffer\.save.*file", buffer.save, tmp_path / "file"),
        (CheckpointError, other_buffer, ranked.load, tmp_path / "good"),
    )
    data.ReplayBuffer(3, grid).save(tmp_path / "empty")
    buffer.load(tmp_path / "empty")
    assert len(buffer) == 0


def test_a_sample_that_one_rank_cannot_take_is_left_out_on_all():
    def run(comm):
        buffer = data.ReplayBuffer(2, fsdpx.Grid(comm, (3,), layout="x"), "reservoir", seed=1)
        u, wrong = np.ones(3), [np.full(3, np.nan), np.full(3, "a"), np.full(3, 1j), np.ones(2), np.ones(3, np.float32)]
        for k in range(6):
            buffer.add(u * k)
            with pytest.raises(DataError, match=r"ReplayBuffer\.add: rank 1: (field|channel|this sample)"):
                buffer.add(wrong[k % 5] if comm.rank == 1 else u)
        with pytest.raises(DataError, match="give at least one field"):
            buffer.add(*([u] * (comm.rank != 1)))
        batch = buffer.sample(8)
        np.testing.assert_array_equal(batch.fields[0][:, 0], batch.ids)
        return batch.ids.tolist()

    first, second = spawn(run, 2)
    assert first == second


def test_a_first_sample_that_is_refused_leaves_no_trace():
    buffer = data.ReplayBuffer(2, ALONE)
    with pytest.raises(DataError, match="not finite"):
        buffer.add(np.ones(3), np.full(3, np.inf))
    buffer.add(np.ones(3))
    for size in (0, -1, 2.5, True, None):
        with pytest.raises(DataError, match="at least 1"):
            buffer.sample(size)


@pytest.mark.parametrize("dtype", [">f8", ">i2", "bfloat16", "bool"])
def test_values_keep_their_dtype_and_lose_the_byte_order_of_other_machines(dtype, tmp_path):
    values = np.array([1, 0, 1]).astype(parse_number_dtype(dtype))
    buffer, other = (data.ReplayBuffer(2, ALONE) for _ in range(2))
    buffer.add(values)
    buffer.save(tmp_path)
    other.load(tmp_path)
    for each in (buffer, other):
        found = each.sample(1).fields[0]
        assert found.dtype == values.dtype.newbyteorder("=")
        assert found.dtype.isnative
        assert found[0].tolist() == values.tolist()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("parts", [], "damaged"), ("random", {}, "damaged|state"), ("moments", None, "damaged"),
        ("count", None, "damaged"), ("priorities", [1.0], "differ in length"), ("ids", [1], "bytes"),
        ("kinds", [["float32", -1]], "bytes"), ("kinds", [["object", -1]], "bytes|dtype"),
        ("moments", [None, None], "differ in length"), ("token", "../x", "No such"),
    ],
)  # fmt: skip
def test_a_damaged_buffer_is_refused_before_anything_is_replaced(name, value, match, tmp_path):
    buffer, other = (data.ReplayBuffer(2, ALONE) for _ in range(2))
    for k in range(2):
        buffer.add(np.full(3, k))
    buffer.save(tmp_path)
    facts = json.loads((tmp_path / "buffer.json").read_text())
    (tmp_path / "buffer.json").write_text(json.dumps({**facts, name: value}))
    other.add(np.full(3, 7.0))
    with pytest.raises(CheckpointError, match=match):
        other.load(tmp_path)
    assert other.sample(1).fields[0].tolist() == [[7.0] * 3]
