"""Compiled sums in shared memory have the bits of NumPy in rank order, at any length, alignment and way of storing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.comm.checks import address
from fsdpx.native import image

shared = pytest.importorskip("fsdpx.comm.shared")

DTYPES = {"float32": shared.add32, "float64": shared.add64}


def _row(sources, outs, divisor=1, stream=False):
    ranks = len(sources)
    head = [ranks, 0, sources[0].size, divisor, int(stream), len(outs)]
    unused = [0] * (shared.PLACE * ranks)
    return np.array([*head, *[0] * ranks, *map(address, sources), *unused, *map(address, outs)], np.int64)


def _wanted(sources, divisor):
    total = sources[0].copy()
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            total += source
        if divisor != 1:
            total /= divisor
    return total


@settings(derandomize=True, database=None, deadline=None, max_examples=examples(150))
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    n=st.one_of(st.integers(0, 200), st.integers(500, 3000)),
    ranks=st.integers(1, 6),
    outs=st.integers(1, 3),
    shift=st.integers(0, 17),
    average=st.booleans(),
    stream=st.booleans(),
)
def test_sums_have_the_bits_of_numpy_and_nothing_else_is_written(dtype, n, ranks, outs, shift, average, stream):
    rng = np.random.default_rng(n)
    sources = [rng.standard_normal(n + shift).astype(dtype)[shift:] for _ in range(ranks)]
    for source in sources:
        source[::7] = rng.choice(np.array([0.0, -0.0, np.inf, 1e-310 if dtype == "float64" else 1e-40], dtype))
    whole = [np.full(n + shift + 1, 7, dtype) for _ in range(1 if stream else outs)]
    divisor = ranks if average else 1
    row = _row(sources, [out[shift : shift + n] for out in whole], divisor, stream)
    DTYPES[dtype](address(row))
    want = _wanted(sources, divisor)
    for out in whole:
        assert out[shift : shift + n].tobytes() == want.tobytes()
        assert (out[:shift] == 7).all()
        assert out[-1] == 7


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_sum_may_take_the_place_of_what_is_added(dtype):
    sources = [np.random.default_rng(r).standard_normal(1001).astype(dtype) for r in range(3)]
    want = _wanted(sources, 1)
    row = _row(sources, sources)
    DTYPES[dtype](address(row))
    assert all(source.tobytes() == want.tobytes() for source in sources)


def test_streamed_sums_are_stored_past_the_caches():
    from numba import njit

    code = njit("void(int64)")(shared.add32.dispatcher().py_func).inspect_asm()
    if shared.X86:
        assert all("movntps" in text and "sfence" in text for text in code.values())


def test_code_is_kept_on_disk():
    """Compiling takes a second, loading less than a millisecond."""
    code = """
import sys
import numpy as np
from fsdpx.comm import shared
row = np.array([1, 0, 0, 1, 0, 0, *[0] * 9], np.int64)
for function in (shared.add32, shared.add64):
    function(row.__array_interface__["data"][0])
    print("numba" in sys.modules)
"""
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(2)]
    assert runs[1].stdout.split() == (["False", "False"] if image.able() else ["True", "True"])
