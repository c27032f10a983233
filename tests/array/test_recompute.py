"""GELU recomputed while it is differentiated: the same as the two kernels that it replaces."""

import numpy as np
import pytest

from fsdpx.array import kernels


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_same_as_gelu_and_its_gradient(mode: str, dtype: np.dtype, rows: int, approximate: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(0, 3, (rows, 37)).astype(dtype) for _ in range(2))
    want = kernels.gelu_backward(np, x, dy, approximate)
    changed = dy.copy()
    y = kernels.gelu_recompute(np, x, changed, approximate)
    assert (y.dtype, changed.dtype) == (dtype, dtype)
    np.testing.assert_array_equal(y, kernels.gelu(np, x, approximate))
    np.testing.assert_array_equal(changed, want)


def test_a_gradient_with_other_strides(mode: str) -> None:
    x, dy = np.random.default_rng(0).normal(size=(2, 5, 6))
    changed = np.empty((6, 5)).T
    changed[...] = dy
    kernels.gelu_recompute(np, x, changed)
    np.testing.assert_array_equal(changed, kernels.gelu_backward(np, x, dy))
