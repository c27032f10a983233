"""Both versions of a kernel."""

from collections.abc import Iterator

import pytest

from fsdpx.core.array import kernels


@pytest.fixture(params=["plain", "numba"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs with both versions of a kernel."""
    with kernels.use_mode(request.param):
        yield request.param
