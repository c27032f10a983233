"""Global batches are the same at any world size, and each sample comes once."""

import subprocess
import sys

import numpy as np
import pytest
from amount import examples, in_full
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.data import DistributedSampler
from fsdpx.errors import ConfigError, DataError

quick = settings(derandomize=True, database=None, deadline=None, max_examples=examples(80))


def ranks(n, size, **options):
    return [DistributedSampler(n, r, size, **options) for r in range(size)]


def global_batches(n, size, **options):
    """What the ranks' shares of each step make together."""
    shares = [list(sampler.plan(0)) for sampler in ranks(n, size, **options)]
    assert len({len(s) for s in shares}) == 1
    return [np.concatenate([share.indices for share in step]).tolist() for step in zip(*shares, strict=True)]


@quick
@given(n=st.integers(1, 60), size=st.integers(1, 6), batch=st.integers(1, 25), shuffle=st.booleans())
def test_each_sample_once_and_the_same_batches_at_any_world_size(n, size, batch, shuffle):
    batches = global_batches(n, size, batch=batch, shuffle=shuffle)
    assert batches == global_batches(n, 1, batch=batch, shuffle=shuffle)
    assert sorted(i for b in batches for i in b) == list(range(n))
    assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1)


@quick
@given(n=st.integers(1, 60), size=st.integers(1, 6), batch=st.integers(1, 25), drop=st.booleans())
def test_lengths(n, size, batch, drop):
    if drop and n < batch:
        return
    for sampler in ranks(n, size, batch=batch, drop_last=drop):
        shares = list(sampler.plan(0))
        assert sampler.steps == len(shares) == (n // batch if drop else -(-n // batch))
        assert len(sampler) == len(list(sampler)) == sum(s.indices.size for s in shares)
        assert [s.after for s in shares] == [min((k + 1) * batch, n) for k in range(len(shares))]
        assert [s.rows for s in shares] == [min(batch, n - k * batch) for k in range(len(shares))]


@quick
@given(
    length=st.integers(1, 5),
    chunks=st.integers(1, 8),
    size=st.integers(1, 9),
    n=st.integers(1, 99),
    drop=st.booleans(),
)
def test_chunks_are_never_cut(length, chunks, size, n, drop):
    batch = length * chunks
    if n < (batch if drop else chunks):
        return
    order = DistributedSampler(n, batch=batch).order(0)
    shares = [list(s.plan(0)) for s in ranks(n, size, batch=batch, chunks=chunks, drop_last=drop)]
    for k, step in enumerate(zip(*shares, strict=True)):
        rows = min(batch, n - k * batch) // chunks * chunks
        whole = order[k * batch : k * batch + rows]
        pieces = whole.reshape(chunks, -1)
        for r, share in enumerate(step):
            mine = pieces[chunks * r // size : chunks * (r + 1) // size]
            assert share.indices.tolist() == mine.ravel().tolist()
            assert share.rows == rows
        assert np.array_equal(np.concatenate([s.indices for s in step]), whole)
    assert len(shares[0]) == n // batch + (not drop and n % batch >= chunks)


def test_the_slices_of_a_short_batch():
    shares = [list(s.plan(0))[1].indices.tolist() for s in ranks(7, 3, batch=5, shuffle=False)]
    assert shares == [[], [5], [6]]


def test_without_a_batch_it_deals_like_pytorch():
    order = DistributedSampler(10, 0, 1).order(0).tolist()
    for r, sampler in enumerate(ranks(9, 3, shuffle=False)):
        assert list(sampler) == list(range(9))[r::3]
    assert sorted(i for sampler in ranks(10, 3) for i in sampler) == sorted(order)


def test_epochs_and_seeds_shuffle_differently():
    sampler = DistributedSampler(50)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert first != list(DistributedSampler(50, seed=1))
    sampler.set_epoch(1)
    assert list(sampler) == second
    assert list(DistributedSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


@in_full
def test_the_order_is_the_same_in_every_process():
    code = "from fsdpx.data import DistributedSampler as D; print(list(D(30, seed=3)))"
    orders = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert orders == {f"{list(DistributedSampler(30, seed=3))}\n"}


@quick
@given(done=st.integers(0, 6), before=st.integers(1, 4), after=st.integers(1, 4), batch=st.integers(1, 9))
def test_resume_at_another_world_size_and_batch(done, before, after, batch):
    samplers = ranks(23, before, batch=4, seed=9)
    seen = []
    for _, *parts in zip(range(done), *(s.batches() for s in samplers), strict=False):
        seen += np.concatenate(parts).tolist()
    states = [s.state_dict() for s in samplers]
    assert all(state == states[0] for state in states)
    others = ranks(23, after, batch=batch, seed=9)
    for sampler in others:
        sampler.load_state_dict(states[0])
    rest = [i for step in zip(*(s.batches() for s in others), strict=True) for i in np.concatenate(step)]
    order = samplers[0].order(0).tolist()
    assert seen == order[: 4 * done]
    if done < 6:
        assert rest == order[4 * done :]
    else:
        assert states[0]["epoch"] == 1
        assert rest == samplers[0].order(1).tolist()


def test_set_epoch_keeps_a_resumed_position_of_the_same_epoch():
    sampler = DistributedSampler(10, batch=2, shuffle=False)
    sampler.load_state_dict({"epoch": 3, "position": 6})
    sampler.set_epoch(3)
    assert sampler.state_dict()["position"] == 6
    assert list(sampler) == [6, 7, 8, 9]
    sampler.load_state_dict({"epoch": 3, "position": 6})
    sampler.set_epoch(4)
    assert list(sampler) == list(range(10))


def test_a_loop_left_early_starts_again():
    sampler = DistributedSampler(10, batch=2, shuffle=False)
    for _ in sampler:
        break
    assert list(sampler) == list(range(10))


@pytest.mark.parametrize(
    ("error", "text", "args", "options"),
    [
        (DataError, r"DistributedSampler\(n=0\): the dataset is empty", (0,), {}),
        (ConfigError, r"\(rank=2, size=2\): ranks count from 0 to size - 1", (5, 2, 2), {}),
        (ConfigError, r"\(size=0\): a whole number, 1 or more, is needed", (5, 0, 0), {}),
        (ConfigError, r"\(n=2.5\): a whole number, 0 or more", (2.5,), {}),
        (ConfigError, r"\(batch=0\): a whole number, 1 or more", (5,), {"batch": 0}),
        (ConfigError, r"\(seed=-1\)", (5,), {"seed": -1}),
        (ConfigError, r"\(chunks=True\)", (5,), {"chunks": True}),
        (
            ConfigError,
            "a global batch of 10 does not cut into 4 equal chunks; the next that does is 12",
            (50,),
            {"batch": 10, "chunks": 4},
        ),
        (
            DataError,
            r"3 samples do not give one global batch of 4 \(drop_last=True, chunks=None\)",
            (3,),
            {"batch": 4, "drop_last": True},
        ),
        (DataError, "3 samples do not give one global batch of 4", (3,), {"batch": 4, "chunks": 4}),
    ],
)
def test_bad_options(error, text, args, options):
    with pytest.raises(error, match=text):
        DistributedSampler(*args, **options)


def test_states_that_do_not_fit():
    sampler = DistributedSampler(10, seed=2)
    with pytest.raises(DataError, match=r"taken with n=9, but the sampler has 10: its position means other samples"):
        sampler.load_state_dict({**sampler.state_dict(), "n": 9})
    with pytest.raises(DataError, match=r"taken with seed=3"):
        sampler.load_state_dict({**sampler.state_dict(), "seed": 3})
    with pytest.raises(DataError, match=r"no state of a sampler: position missing, got \['epoch'\]"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(DataError, match="position 11 lies behind the 10 samples of an epoch"):
        sampler.load_state_dict({"epoch": 1, "position": 11})
