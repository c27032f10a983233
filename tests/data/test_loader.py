"""Loaders and samplers: which rank sees which sample, and threads that read ahead."""

import gc
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import spawn
from fsdpx.data import ArrayDataset, DataLoader, DistributedSampler
from fsdpx.errors import ConfigError, DataError

DEPTHS = pytest.mark.parametrize("prefetch", [0, 1, 3])


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_for_threads()


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fsdpx loader")]


def wait_for_threads(seconds=5.0):
    end = time.monotonic() + seconds
    while loader_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not loader_threads()


def numbers(n=10):
    return ArrayDataset(np.arange(n), np.arange(n) * 10)


class Single:
    """A dataset without `take`, of dicts or tuples or arrays."""

    def __init__(self, samples, fail=None):
        self.samples, self.fail, self.read = samples, fail, []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        self.read.append(i)
        if i == self.fail:
            raise OSError(f"sample {i} is unreadable")
        return self.samples[i]


@DEPTHS
def test_batches_in_order_and_a_short_one_last(prefetch):
    loader = DataLoader(numbers(), 4, prefetch=prefetch)
    assert len(loader) == 3
    for _ in range(2):
        batches = list(loader)
        assert [x.tolist() for x, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(np.array_equal(y, 10 * x) for x, y in batches)
    assert loader.epoch == 2


def test_ranks_share_every_global_batch():
    loaders = [DataLoader(numbers(), 4, comm=SimpleNamespace(rank=r, size=3), shuffle=True) for r in range(3)]
    for *parts, full in zip(*loaders, DataLoader(numbers(), 4, shuffle=True), strict=True):
        assert np.array_equal(np.concatenate([x for x, _ in parts]), full[0])


def test_rank_and_size_and_chunks():
    loader = DataLoader(numbers(), 4, rank=1, size=3, reproducible_chunks=2, drop_last=True)
    assert [x.tolist() for x, _ in loader] == [[0, 1], [4, 5]]


@DEPTHS
def test_shuffled_epochs_differ_and_repeat_by_seed(prefetch):
    a, b = (DataLoader(numbers(), 5, shuffle=True, seed=4, prefetch=prefetch) for _ in range(2))
    first, second = ([x.tolist() for x, _ in a] for _ in range(2))
    assert first != second
    b.set_epoch(1)
    assert [x.tolist() for x, _ in b] == second


@DEPTHS
def test_state_counts_what_was_received(prefetch):
    loader = DataLoader(numbers(20), 3, shuffle=True, seed=1, prefetch=prefetch)
    seen = []
    for k, (x, _) in enumerate(loader, 1):
        seen += x.tolist()
        time.sleep(0.002)  # time to read ahead
        state = loader.state_dict()
        rest = [i for r, _ in resumed(state, prefetch) for i in r.tolist()]
        assert (state["epoch"], state["position"]) == ((0, 3 * k) if k < 7 else (1, 0))
        assert k == 7 or sorted(seen + rest) == list(range(20))
    assert k == 7


def resumed(state, prefetch):
    loader = DataLoader(numbers(20), 3, shuffle=True, seed=1, prefetch=prefetch)
    loader.load_state_dict(state)
    return loader


def test_a_resumed_epoch_is_followed_by_a_whole_one():
    loader = resumed({"epoch": 2, "position": 15}, 2)
    assert loader.epoch == 2
    assert [len(x) for x, _ in loader] == [3, 2]
    assert loader.epoch == 3
    assert sum(len(x) for x, _ in loader) == 20


@DEPTHS
def test_an_error_of_the_dataset_comes_with_its_traceback_at_its_batch(prefetch):
    loader = DataLoader(Single(list(range(10)), fail=7), 3, prefetch=prefetch)
    received = []
    with pytest.raises(OSError, match="sample 7 is unreadable") as caught:
        received.extend(loader)
    assert [b.tolist() for b in received] == [[0, 1, 2], [3, 4, 5]]
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert caught.value.__notes__ == ["[loader of rank 0] while reading the global batch of samples 6 to 9 of epoch 0"]
    assert loader.state_dict()["position"] == 6


def test_a_broken_iteration_stays_ended():
    running = iter(DataLoader(Single([1, 2], fail=0), 1))
    with pytest.raises(OSError, match="unreadable"):
        next(running)
    with pytest.raises(StopIteration):
        next(running)


def test_it_reads_ahead_only_so_far():
    data = Single(list(range(100)))
    running = iter(DataLoader(data, 1, prefetch=3))
    next(running)
    while len(data.read) < 5:  # one received, three waiting, one in hand
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(data.read) == 5
    running.close()


def test_leaving_a_loop_ends_its_thread():
    loader = DataLoader(numbers(100), 1)
    for _ in loader:
        break
    gc.collect()
    wait_for_threads()
    assert next(iter(loader))[0] == [0]


def test_close_and_with_end_the_thread_at_once():
    with DataLoader(numbers(100), 1) as loader:
        running = iter(loader)
        next(running)
        assert len(loader_threads()) == 1
    assert not loader_threads()
    assert list(running) == []
    assert loader.epoch == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loops_at_once_have_batches_of_their_own(prefetch):
    """As in PyTorch. The place in the data is that of the loop that began first."""
    loader = DataLoader(numbers(), 2, prefetch=prefetch)
    first = iter(loader)
    before = [next(first)[0].tolist(), next(first)[0].tolist()]
    assert [x.tolist() for x, _ in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert loader.state_dict()["position"] == 4
    assert [*before, *(x.tolist() for x, _ in first)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
    assert [a.tolist() == b.tolist() for (a, _), (b, _) in zip(loader, loader, strict=True)] == [True] * 5
    assert loader.epoch == 2


def test_a_loop_aside_moves_nothing():
    loader = DataLoader(numbers(), 2)
    assert [x.tolist() for x, _ in loader.iterate_independently()] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (loader.epoch, loader.state_dict()["position"]) == (0, 0)


def test_passes_of_a_sampler_at_once():
    sampler = DistributedSampler(6, 0, 1, shuffle=False, batch=2)
    passes = zip(sampler.iterate_batches(), sampler.iterate_batches(), strict=True)
    assert np.stack([*passes]).tolist() == [[[0, 1]] * 2, [[2, 3]] * 2, [[4, 5]] * 2]
    assert (sampler.epoch, sampler.position) == (1, 0)


def test_another_place_ends_the_passes_before():
    loader = DataLoader(numbers(), 2)
    running = iter(loader)
    next(running)
    loader.load_state_dict({"epoch": 3, "position": 4})
    assert list(running) == []
    assert [x.tolist() for x, _ in loader] == [[4, 5], [6, 7], [8, 9]]
    assert loader.epoch == 4


def test_samples_are_stacked_by_their_kind():
    ((x, y),) = list(DataLoader(Single([(np.full(3, i), i) for i in range(4)]), 4))
    assert x.shape == (4, 3)
    assert y.tolist() == [0, 1, 2, 3]
    (batch,) = list(DataLoader(Single([{"a": i, "b": [i, i]} for i in range(2)]), 2))
    assert batch["a"].tolist() == [0, 1]
    assert [b.tolist() for b in batch["b"]] == [[0, 1], [0, 1]]


def test_collate_and_transform():
    loader = DataLoader(numbers(4), 2, collate=list, transform=lambda rows: [int(x + y) for x, y in rows])
    assert list(loader) == [[0, 11], [22, 33]]


@pytest.mark.parametrize("dataset", [numbers(1), Single([(0, 0)])], ids=["take", "samples"])
def test_a_rank_without_samples_gets_no_rows_of_the_right_kind(dataset):
    sizes = [[(x.shape, y.shape) for x, y in DataLoader(dataset, 4, rank=r, size=2)] for r in range(2)]
    assert sizes == [[((0,), (0,))], [((1,), (1,))]]


def test_a_sampler_of_ones_own():
    loader = DataLoader(numbers(), sampler=DistributedSampler(10, 1, 2, batch=4, shuffle=False))
    assert loader.batch_size == 4
    assert [x.tolist() for x, _ in loader] == [[2, 3], [6, 7], [9]]
    assert "DistributedSampler(10, rank=1, size=2, batch=4)" in repr(loader)


ARRAY, PLACE, MASKED = np.zeros(2), SimpleNamespace(rank=0, size=1), np.ma.masked_equal([1.0, 2.0], 2.0)
PAIR, DICT, START = (np.ones((2, 3)), ARRAY), {"x": ARRAY}, {"epoch": 0, "position": 0}
load, SAMPLER = partial(DataLoader, [1]), DistributedSampler(1)


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (DataError, r"DataLoader: the dataset \(list\) is empty", lambda: DataLoader([], 1)),
        (ConfigError, r"DataLoader\(tuple\): .*by data\.ArrayDataset\(x, y\)", lambda: DataLoader(PAIR, 1)),
        (ConfigError, r"DataLoader\(dict\): a dataset with len\(\) and samples \[i\]", lambda: DataLoader(DICT, 1)),
        (ConfigError, r"DataLoader\(list_iterator\): a dataset", lambda: DataLoader(iter([1]), 1)),
        (ConfigError, r"DistributedSampler\(comm='all'\): a communicator is needed", lambda: load(1, comm="all")),
        (ConfigError, r"DataLoader\(batch_size=0\): the size of the global batch, 1 or more", lambda: load(0)),
        (ConfigError, r"DataLoader\(batch_size=None\)", lambda: load()),
        (ConfigError, r"DataLoader\(prefetch=-1\): a number of batches, 0 to", lambda: load(1, prefetch=-1)),
        (ConfigError, r"DistributedSampler\(rank=0, size=None\): give both, or neither", lambda: load(1, rank=0)),
        (ConfigError, "pass comm, or rank and size, not both", lambda: load(1, comm=PLACE, rank=0)),
        (ConfigError, "determines batch_size, shuffle: pass them to the sampler",
         lambda: load(1, sampler=SAMPLER, shuffle=True)),
        (ConfigError, "the sampler is of 2 samples, the dataset has 1", lambda: load(sampler=DistributedSampler(2))),
        (DataError, r"shapes \(2,\) and \(3,\) do not stack to a batch: pad .* data\.ArrayDataset",
         lambda: list(DataLoader(Single([np.zeros(2), np.zeros(3)]), 2))),
        (DataError, r"^1 of 2 elements are masked: give them values, as x\.filled\(0\.0\) does",
         lambda: list(DataLoader(Single([MASKED]), 1))),
        (DataError, "needs at least one array", lambda: ArrayDataset()),
        (DataError, r"different numbers of samples: \[2, 3\]", lambda: ArrayDataset(ARRAY, np.zeros(3))),
        (DataError, "the dataset is empty", lambda: ArrayDataset(np.zeros((0, 4)))),
        (DataError, "dim 0 of every array must be samples", lambda: ArrayDataset(np.float64(3))),
        (ConfigError, r"one by one, ArrayDataset\(x, y\)", lambda: ArrayDataset((ARRAY, ARRAY))),
        (DataError, "^ArrayDataset: setting an array element", lambda: ArrayDataset([[1], [1, 2]])),
        (DataError, r"DistributedSampler\(n=0\): the dataset is empty", lambda: DistributedSampler(0)),
        (ConfigError, r"\(rank=2, size=2\): ranks count from 0 to size - 1", lambda: DistributedSampler(5, 2, 2)),
        (ConfigError, r"\(size=0\): a whole number, 1 or more, is needed", lambda: DistributedSampler(5, 0, 0)),
        (ConfigError, r"\(n=2.5\): a whole number, 0 or more", lambda: DistributedSampler(2.5)),
        (ConfigError, r"\(batch=0\): a whole number, 1 or more", lambda: DistributedSampler(5, batch=0)),
        (ConfigError, r"\(seed=-1\)", lambda: DistributedSampler(5, seed=-1)),
        (ConfigError, r"\(reproducible_chunks=True\)", lambda: DistributedSampler(5, reproducible_chunks=True)),
        (ConfigError, "a global batch of 10 cannot be divided into 4 equal chunks; the next that can is 12",
         lambda: DistributedSampler(50, batch=10, reproducible_chunks=4)),
        (DataError, r"3 samples do not give one global batch of 4 \(drop_last=True, reproducible_chunks=None\)",
         lambda: DistributedSampler(3, batch=4, drop_last=True)),
        (DataError, "3 samples do not give one global batch of 4",
         lambda: DistributedSampler(3, batch=4, reproducible_chunks=4)),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(error, text, make):
    with pytest.raises(error, match=text):
        make()


def test_a_tuple_of_two_samples_is_a_dataset():
    assert [len(batch) for batch in DataLoader((ARRAY, ARRAY), 2)] == [2]


def test_array_dataset_by_number():
    data = ArrayDataset([[1, 2], [3, 4]], np.array([5, 6]))
    assert len(data) == 2
    assert data[1][0].tolist() == [3, 4]
    assert data[1][1] == 6


def test_without_comm_a_rank_takes_its_part():
    def parts(comm):
        loader = DataLoader(numbers(), 4, shuffle=True)
        return loader.sampler.rank, loader.sampler.size, [x.tolist() for x, _ in loader]

    found = spawn(parts, 3)
    assert [(rank, size) for rank, size, _ in found] == [(0, 3), (1, 3), (2, 3)]
    assert sorted(n for *_, batches in found for batch in batches for n in batch) == list(range(10))
    assert spawn(lambda comm: DistributedSampler(10).rank, 2) == [0, 1]
    assert spawn(lambda comm: DistributedSampler(10, comm=SimpleNamespace(rank=1, size=4)).size, 2) == [4, 4]


quick = settings(derandomize=True, database=None, deadline=None, max_examples=examples(80))


def ranks(n, size, **options):
    return [DistributedSampler(n, r, size, **options) for r in range(size)]


def global_batches(n, size, **options):
    """What the ranks' shares of each step make together."""
    shares = [list(sampler.iterate_shards(0)) for sampler in ranks(n, size, **options)]
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
        shares = list(sampler.iterate_shards(0))
        assert sampler.step_count == len(shares) == (n // batch if drop else -(-n // batch))
        assert len(sampler) == len(list(sampler)) == sum(s.indices.size for s in shares)
        assert [s.position_after for s in shares] == [min((k + 1) * batch, n) for k in range(len(shares))]
        assert [s.global_rows for s in shares] == [min(batch, n - k * batch) for k in range(len(shares))]


@quick
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 9), st.integers(1, 99), st.booleans())
def test_chunks_are_never_cut(length, chunks, size, n, drop):
    batch = length * chunks
    if n < (batch if drop else chunks):
        return
    order = DistributedSampler(n, batch=batch).get_global_order(0)
    samplers = ranks(n, size, batch=batch, reproducible_chunks=chunks, drop_last=drop)
    shares = [list(s.iterate_shards(0)) for s in samplers]
    for k, step in enumerate(zip(*shares, strict=True)):
        rows = min(batch, n - k * batch) // chunks * chunks
        whole = order[k * batch : k * batch + rows]
        for r, share in enumerate(step):
            mine = whole.reshape(chunks, -1)[chunks * r // size : chunks * (r + 1) // size]
            assert share.indices.tolist() == mine.ravel().tolist()
            assert share.global_rows == rows
        assert np.array_equal(np.concatenate([s.indices for s in step]), whole)
    assert len(shares[0]) == n // batch + (not drop and n % batch >= chunks)


def test_the_slices_of_a_short_batch():
    shares = [list(s.iterate_shards(0))[1].indices.tolist() for s in ranks(7, 3, batch=5, shuffle=False)]
    assert shares == [[], [5], [6]]


def test_without_a_batch_it_deals_like_pytorch():
    order = DistributedSampler(10, 0, 1).get_global_order(0).tolist()
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


def test_the_order_is_the_same_in_every_process():
    code = "from fsdpx.data import DistributedSampler as D; print(list(D(30, seed=3)))"
    found = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": "1"}, text=True)
    assert found == f"{list(DistributedSampler(30, seed=3))}\n"


@quick
@given(done=st.integers(0, 6), before=st.integers(1, 4), after=st.integers(1, 4), batch=st.integers(1, 9))
def test_resume_at_another_world_size_and_batch(done, before, after, batch):
    samplers = ranks(23, before, batch=4, seed=9)
    seen = []
    for _, *parts in zip(range(done), *(s.iterate_batches() for s in samplers), strict=False):
        seen += np.concatenate(parts).tolist()
    states = [s.state_dict() for s in samplers]
    assert all(state == states[0] for state in states)
    others = ranks(23, after, batch=batch, seed=9)
    for sampler in others:
        sampler.load_state_dict(states[0])
    rest = [i for step in zip(*(s.iterate_batches() for s in others), strict=True) for i in np.concatenate(step)]
    order = samplers[0].get_global_order(0).tolist()
    assert seen == order[: 4 * done]
    assert states[0]["epoch"] == int(done == 6)
    assert rest == (order[4 * done :] if done < 6 else samplers[0].get_global_order(1).tolist())


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
    ("state", "text"),
    [
        (START | {"n": 9}, "taken with n=9, but the sampler has 10: its position means other samples"),
        (START | {"seed": 3}, "taken with seed=3"),
        ({"epoch": 1}, r"not the state of a sampler: position missing, got \['epoch'\]"),
        ({"epoch": 1, "position": 11}, "position 11 lies behind the 10 samples of an epoch"),
    ],
)
def test_states_that_do_not_fit(state, text):
    with pytest.raises(DataError, match=text):
        DistributedSampler(10, seed=2).load_state_dict(state)
