"""The benchmark of codecs: times follow bandwidth as fitted, a failed job has its reason, calls wait for their link."""

import time

import numpy as np
import pytest

from fsdpx import spawn
from fsdpx.comm import Communicator


def row(codec: str, gbit: float, seconds: float) -> dict[str, object]:
    return {"codec": codec, "ranks": 2, "gbit": gbit, "seconds": seconds, "bytes": 4_000_000, "precision": "bf16"}


def test_the_break_even_is_where_both_take_as_long() -> None:
    from compression import fitted, tables

    times = {"plain": (0.5, 2.0), "int8": (0.7, 0.5), "bf16": (0.4, 1.0), "topk": (0.6, 2.5)}
    rows = [row(name, g, c + k / g) for name, (c, k) in times.items() for g in (1.0, 10.0)]
    rows += [{"codec": "top", "ranks": 2, "gbit": g, "failed": "MemoryError"} for g in (1.0, 10.0)]
    for name, wanted in times.items():
        assert fitted(rows, 2, name) == pytest.approx(wanted)
    ((name, text),) = tables({"rows": rows})
    plain, int8, bf16, largest, top = text.splitlines()[1:]
    assert name == "2 ranks"
    assert plain.split()[-2:] == ["1.00", "1.00"]
    assert int8.split()[-4:] == ["2.08", "0.93", "7.5", "Gbit/s"]
    assert bf16.endswith("always")
    assert largest.endswith("never")
    assert top.endswith("MemoryError")
    assert all(" bf16 " in line for line in (plain, int8, bf16, largest))


def test_delayed_calls_take_as_long_as_their_bytes() -> None:
    from compression import Delayed

    def body(comm: Communicator) -> float:
        slow, begin = Delayed(comm, 0.01), time.perf_counter()
        handles = [slow.all_reduce(np.ones(10_000, np.float32)) for _ in range(2)]
        for handle in handles:
            handle.wait()
        return time.perf_counter() - begin

    assert min(spawn(body, 2)) >= 2 * 40_000 * 8 / 1e7
