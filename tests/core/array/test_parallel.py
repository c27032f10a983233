"""Pieces of a call on several threads: the bits of one thread, errors, many callers, forks."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.core.array import kernels, parallel
from fsdpx.core.array.random import NumberRange
from fsdpx.core.array.sums import sum_block_squares
from fsdpx.errors import ConfigError

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(25))


@pytest.fixture
def many(monkeypatch):
    """Every call is worth cutting, even into single rows."""
    monkeypatch.setattr(parallel, "MIN_PARALLEL_SIZE", 1)
    monkeypatch.setattr(parallel, "MIN_PIECE_ELEMENTS", 1)
    return parallel.set_threads


@SETTINGS
@given(st.integers(0, 5000), st.integers(0, 300), st.sampled_from([1, 8, 64]), st.integers(1, 5))
def test_cuts_cover_everything_once(size, grain, line, n):
    parallel.set_threads(n)
    pieces = parallel.split_range(size, grain, line)
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(size))
    assert all(start % line == 0 for start, _ in pieces)
    assert len(pieces) <= max(n * parallel.PER_THREAD, 1)


def results(rows, columns):
    """What every kernel that uses threads gives."""
    rng = np.random.default_rng(rows)
    x, dy = rng.normal(size=(2, rows, columns)).astype(np.float32)
    w, r = rng.normal(size=columns).astype(np.float32), rng.normal(size=rows).astype(np.float32)
    target, table = rng.integers(0, columns, rows), np.zeros((5, columns), np.float32)
    gw, gb, total, wide = w.copy(), w.copy(), w.copy(), x.copy()
    half = kernels.cast_float_to_dtype(np, x, np.dtype(np.float16))
    kernels.layer_norm_backward_params(np, x, r, r, dy, gw, gb)
    kernels.embedding_backward(np, table, target % 5, dy)
    kernels.sum_rows(np, x, total)
    kernels.add_widened(np, half, wide)
    h = x.copy()
    return [
        kernels.gelu(np, x), kernels.gelu_backward(np, x, dy), kernels.softmax(np, x), kernels.add(np, x, dy),
        *kernels.layer_norm(np, x, w, w, 1e-5), kernels.layer_norm_backward_input(np, x, w, r, r, dy),
        kernels.bias_gelu(np, h, w), h, *kernels.cross_entropy(np, x, target),
        kernels.cross_entropy_backward(np, x, target, r, 0.5), kernels.drop_backward(np, x, x > 0, 0.4),
        *kernels.drop(np, x, NumberRange(1, "a", 7, 7 + x.size), 0.4), kernels.square_sum(np, x.reshape(-1)),
        sum_block_squares(np, x.reshape(-1)), gw, gb, table, total, half, wide,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 300), (65, 130), (700, 200), (0, 8)])
def test_threads_do_not_show(many, shape):
    alone = results(*shape)
    for n in (2, 3):
        many(n)
        for one, several in zip(alone, results(*shape), strict=True):
            np.testing.assert_array_equal(one, several, strict=isinstance(one, np.ndarray))
        many(1)


def test_many_callers_at_once(many):
    many(3)

    def caller(seed):
        x = np.random.default_rng(seed).normal(size=(50, 40)).astype(np.float32)
        want = kernels.softmax(np, x.copy())
        return all(np.array_equal(kernels.softmax(np, x), want) for _ in range(50))

    with ThreadPoolExecutor(6) as callers:
        assert list(callers.map(caller, range(6))) == [True] * 6


def test_all_pieces_run_and_the_first_error_is_raised(many):
    many(2)
    done = []

    def work(n):
        if n % 3 == 1:
            raise ValueError(f"piece {n}")
        done.append(n)

    with pytest.raises(ValueError, match="piece"):
        parallel.run_tasks(work, [(n,) for n in range(10)])
    assert sorted(done) == [0, 2, 3, 5, 6, 8, 9]


def test_a_piece_may_call_again(many):
    many(2)
    done = []
    pieces = range(5)
    parallel.run_tasks(lambda a: parallel.run_tasks(done.append, [((a, b),) for b in pieces]), [(a,) for a in pieces])
    assert sorted(done) == [(a, b) for a in range(5) for b in range(5)]


def test_one_thread_cuts_nothing(many):
    many(1)
    calls = []
    parallel.parallel_for_rows(lambda *a: calls.append(a), (np.zeros((1000, 1000)),), 7)
    assert [(a.shape, n) for a, n in calls] == [((1000, 1000), 7)]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork")
def test_a_forked_child_starts_its_own_threads():
    code = """
import os, threading
from fsdpx.core.array import parallel
parallel.set_threads(2)
def both():
    parallel.run_tasks(threading.Barrier(2, timeout=20).wait, [(), ()])  # needs two threads at once
both()
child = os.fork()
both()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_bad_number_of_threads(n):
    with pytest.raises(ConfigError, match="a number of threads, 1 or more, is needed"):
        parallel.set_threads(n)
