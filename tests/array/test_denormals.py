"""Inside the block denormals count as 0, outside they are numbers like others; each thread for itself."""

import platform

import numpy as np
import pytest

from fsdpx.array import kernels, parallel
from fsdpx.array.parallel import flushed

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
TINY = np.full(100, 1e-40, np.float32)


def survive() -> bool:
    return bool((TINY * np.float32(0.5)).any())


def test_inside_only() -> None:
    assert survive()
    with flushed():
        assert not survive()
        with flushed():
            assert not survive()
        assert not survive()
    assert survive()


def test_after_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), flushed():
        raise ZeroDivisionError
    assert survive()


def test_threads_of_kernels_do_as_the_step_does() -> None:
    """Whichever thread works on a piece, the bits are the same."""
    x = np.full(1 << 20, 1e-40, np.float32)
    before = parallel.threads()
    try:
        parallel.set_threads(2)
        with flushed():
            assert not kernels.add(np, x, x).any()
    finally:
        parallel.set_threads(before)
