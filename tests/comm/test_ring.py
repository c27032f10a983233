"""The ring needs nothing but send and recv, moves 2n(N-1)/N and ends in the same bits on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.comm import Counted, Counters, ReduceOp, spawn
from fsdpx.comm.messages import ring


@given(st.integers(1, 5), st.integers(0, 23), st.sampled_from(list(ReduceOp)))
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(40))
def test_any_size_and_length(size, n, op):
    values = [np.random.default_rng(rank).uniform(0.5, 2, n) for rank in range(size)]
    whole = np.stack(values)
    want = {
        ReduceOp.SUM: whole.sum(0),
        ReduceOp.AVG: whole.mean(0),
        ReduceOp.MAX: whole.max(0),
        ReduceOp.MIN: whole.min(0),
        ReduceOp.PROD: whole.prod(0),
    }[op]

    def body(comm):
        buf = values[comm.rank].copy()
        ring(comm, buf, op).wait()
        return buf

    found = spawn(body, size)
    np.testing.assert_allclose(found[0], want, rtol=1e-14)
    assert len({buf.tobytes() for buf in found}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_and_messages(size):
    def body(comm):
        counters = Counters()
        ring(Counted(comm, "x", counters), np.ones(12 * size)).wait()
        return counters

    for counters in spawn(body, size):
        assert counters.of("x", "send").calls == 2 * (size - 1)
        assert counters.of("x", "send").bytes == 2 * (size - 1) * 12 * 8


def test_rings_under_way_at_once_are_told_apart_by_tag():
    def body(comm):
        bufs = [np.full(7, float(10**i * (comm.rank + 1))) for i in range(3)]
        handles = [ring(comm, buf, tag=i, what=f"buf {i}") for i, buf in enumerate(bufs)]
        for i in np.random.default_rng(comm.rank).permutation(3):
            handles[i].wait()
        return [buf.tolist() for buf in bufs]

    for found in spawn(body, 3, delays=3):
        assert found == [[6.0] * 7, [60.0] * 7, [600.0] * 7]
