"""The cores of a host among its ranks: how many threads each one uses, and who cuts a product among them."""

from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from fsdpx import environment
from fsdpx.array import blas, cores, parallel

VARIABLES = "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host of two cores whose user said nothing of threads; afterwards all is as before."""
    before = parallel.threads(), blas.threads()
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cores, "cores", lambda: 2)
    with threadpool_limits(limits=1, user_api="blas"):
        yield
        cores._limits.clear()
    blas.choose(None)
    parallel.set_threads(before[0])
    blas.threads(before[1])


@pytest.mark.usefixtures("two_cores")
def test_cores_are_divided_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.read().threads is None
    assert [cores.share_cores(ranks) for ranks in (1, 2, 3)] == [2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cores.share_cores(2) == parallel.threads() == blas.threads() == 5


@pytest.mark.skipif("openblas" not in blas.available(), reason="NumPy's OpenBLAS is not here")
@pytest.mark.usefixtures("two_cores")
def test_a_library_stays_on_one_thread_when_cores_are_shared_again() -> None:
    """Each trainer shares the cores: from the second one on OpenBLAS cut its pieces of a product among threads as well,
    and their bits were others than the first one's."""
    blas.choose("openblas")
    a = np.ones((8, 8), np.float32)
    for _ in range(2):
        assert cores.share_cores(1) == 2
        blas.gemm(np.empty_like(a), a, a)
        used = [pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "openblas"]
        assert used
        assert set(used) == {1}
