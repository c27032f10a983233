"""Compiled and plain kernels give the same bits wherever an element lies, with a few blocks of scratch."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import optim
from fsdpx.errors import ConfigError
from fsdpx.optim import Segment, Segments, kernels, plain
from fsdpx.optim.average import Averaged
from fsdpx.optim.optimizer import kept_of, zeros
from fsdpx.testing import demand_close

OPTIMIZERS = {
    "sgd": optim.SGD(weight_decay=0.1),
    "momentum": optim.SGD(momentum=0.9, weight_decay=0.1),
    "nesterov": optim.SGD(momentum=0.9, nesterov=True),
    "adam": optim.Adam(weight_decay=0.1),
    "adamw": optim.AdamW(weight_decay=0.1),
    "adamw without decay": optim.AdamW(weight_decay=0.0),
    "lion": optim.Lion(weight_decay=0.1),
    "average": Averaged(optim.AdamW(weight_decay=0.1), optim.EMA(0.9)),
    "lamb": optim.LAMB(weight_decay=0.1),
}
ALL = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def train(optimizer, p, g, steps=3, version="default"):
    segments = Segments((Segment("w", 0, p.size, 0, p.size),) if p.size else ())
    slots = zeros(np, optimizer, segments, p.dtype)
    state = {"p": p.copy(), **slots}
    with kernels.use(version):
        for step in range(1, steps + 1):
            optimizer.update(np, state["p"], g / step, slots, lr=0.03 / step, step=step, segments=segments, scale=0.3)
    return state


@ALL
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 7, 1003, plain.BLOCK + 5])
def test_compiled_and_plain_give_the_same_bits(optimizer, dtype, n):
    random = np.random.default_rng(n)
    p = (random.standard_normal(n) * 10.0 ** random.integers(-6, 4, n)).astype(dtype)
    g = (random.standard_normal(n) * 10.0 ** random.integers(-12, 4, n)).astype(dtype)
    demand_close(train(optimizer, p, g, version="numba"), train(optimizer, p, g, version="plain"))


@ALL
def test_compiled_and_plain_agree_on_numbers_at_the_edge(optimizer):
    tiny, huge = np.finfo("float32").smallest_subnormal, np.finfo("float32").max
    values = np.array([0.0, -0.0, tiny, -tiny, 1e-38, huge, -huge, np.inf, -np.inf, np.nan, 1.0], "float32")
    g, p = (a.ravel() for a in np.meshgrid(values, values))
    a, b = (train(optimizer, p.copy(), g.copy(), version=v) for v in ("numba", "plain"))
    for name in a:
        assert np.array_equal(np.isnan(a[name]), np.isnan(b[name])), name
        assert np.array_equal(np.nan_to_num(a[name], nan=0.0), np.nan_to_num(b[name], nan=0.0)), name


@ALL
@pytest.mark.parametrize("version", ["plain", "numba"])
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(15))
@given(cuts=st.lists(st.integers(0, 300), max_size=6), seed=st.integers(0, 99), single=st.booleans())
def test_any_cut_gives_the_bits_of_the_whole(optimizer, version, cuts, seed, single):
    if isinstance(optimizer, optim.LAMB):
        cuts = []  # it sees whole parameters: its cuts are tested in test_contract.py and test_lamb.py
    random = np.random.default_rng(seed)
    p, g = (random.standard_normal(300).astype("float32" if single else "float64") for _ in range(2))
    whole = train(optimizer, p, g, version=version)
    bounds = [0, *sorted(cuts), 300]
    parts = [train(optimizer, p[a:b], g[a:b], version=version) for a, b in pairwise(bounds)]
    demand_close(whole, {name: np.concatenate([part[name] for part in parts]) for name in whole})


@ALL
def test_plain_blocks_do_not_show(optimizer, monkeypatch):
    random = np.random.default_rng(3)
    p, g = random.standard_normal((2, 5000))
    if isinstance(optimizer, optim.LAMB):
        monkeypatch.setattr("fsdpx.optim.lamb.BLOCK", 2048)
    whole = train(optimizer, p, g, version="plain")
    monkeypatch.setattr(plain, "BLOCK", 777)
    demand_close(whole, train(optimizer, p, g, version="plain"))


@ALL
@pytest.mark.parametrize("version", ["plain", "numba"])
def test_scratch_is_a_few_blocks(optimizer, version):
    n = 40 * plain.BLOCK
    p, g = np.ones((2, n), "float32")
    segments = Segments((Segment("w", 0, n, 0, n),))
    slots = zeros(np, optimizer, segments, p.dtype)
    with kernels.use(version):
        optimizer.update(np, p, g, slots, lr=0.1, step=1, segments=segments)
        tracemalloc.start()
        optimizer.update(np, p, g, slots, lr=0.1, step=2, segments=segments)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * plain.BLOCK * 4


def test_gradients_of_another_format_are_widened():
    p, g = np.ones(5, "float32"), np.full(5, 0.5, "float16")
    optim.SGD().update(np, p, g, {}, lr=1.0, step=1, segments=Segments((Segment("w", 0, 5, 0, 5),)), scale=1e-4)
    assert np.array_equal(p, np.full(5, np.float32(1) - np.float32(0.5) * np.float32(1e-4)))


def test_without_numba_the_plain_version_runs(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda: False)
    kernels._compiled.cache_clear()
    try:
        assert kernels._compiled() is None
        with pytest.raises(ConfigError, match="kernel version 'numba' needs Numba: pip install numba"):
            train(optim.AdamW(), np.ones(3), np.ones(3), version="numba")
        train(optim.AdamW(), np.ones(3), np.ones(3))
    finally:
        kernels._compiled.cache_clear()


def test_unknown_version():
    with (
        pytest.raises(ConfigError, match="unknown kernel version 'fast': choose one of default, plain, numba"),
        kernels.use("fast"),
    ):
        pass


def test_arrays_that_hold_no_data_cost_nothing():
    class Shapes:
        holds_no_data = True

    class Flat:
        dtype = np.dtype("float32")

        def __init__(self, size):
            self.shape, self.size = (size,), size

        def __getitem__(self, at):
            return self

    n = 10**12
    segments = Segments((Segment("w", 0, n, 0, n),))
    for optimizer in OPTIMIZERS.values():
        slots = {name: Flat(kept.count(segments.items[0])) for name, kept in kept_of(optimizer).items()}
        optimizer.update(Shapes, Flat(n), Flat(n), slots, lr=0.1, step=1, segments=segments)
