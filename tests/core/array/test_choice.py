"""Which form of a kernel runs, and which library of arrays."""

import errno
import sys
import warnings
from unittest.mock import Mock

import numpy as np
import pytest
from programs import run_program
from references import KERNELS

from fsdpx.core.array import from_host, get_namespace, kernels, parse_dtype, shapes, to_host
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels import choice
from fsdpx.errors import ConfigError


def test_compiled_code_has_the_name_of_a_kernel():
    names = {*choice.import_all_compiled_kernels()}
    assert {"gelu", "store"} < names <= {*KERNELS, "normal"}  # that one is called by `array.random`


def test_modes():
    assert kernels.get_implementation_name("gelu") == "numba"
    assert kernels.get_implementation_name("widened") == "plain"
    with kernels.use_mode("plain"):
        assert kernels.get_implementation_name("gelu") == "plain"
        with kernels.use_mode("default"):
            assert kernels.get_implementation_name("gelu") == "numba"
        assert kernels.get_implementation_name("gelu") == "plain"
    wanted = r"kernels.use_mode\('fast'\): choose one of default, plain, numba"
    with pytest.raises(ConfigError, match=wanted), kernels.use_mode("fast"):
        pass


def test_a_mode_ends_with_its_block():
    with pytest.raises(ZeroDivisionError), kernels.use_mode("plain"):
        raise ZeroDivisionError
    assert kernels.get_implementation_name("gelu") == "numba"


def test_without_numba_the_plain_code_runs_and_says_so_once():
    run_program("""
import sys, warnings
sys.modules["numba"] = None  # as if it were not there
import numpy as np
from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for n in (2, 3):
        assert kernels.gelu(np, np.zeros(n)).tolist() == [0.0] * n
        assert kernels.silu(np, np.zeros(n)).tolist() == [0.0] * n
    kernels.store(np, np.ones(2, np.float32), np.ones(2, np.float16))
assert [str(c.message).partition(",")[0] for c in caught] == ["fsdpx: Numba is not installed"], caught
assert kernels.get_implementation_name("gelu") == "plain"
try:
    with kernels.use_mode("numba"):
        pass
except ConfigError as error:
    assert "Numba is not installed: pip install numba" in str(error)
else:
    raise AssertionError
""")


def test_mixed_dtypes_take_the_plain_code():
    x, w = np.ones((2, 3), np.float32), np.ones(3)
    assert kernels.layer_norm(np, x, w, w, 1e-5)[0].dtype == np.float64


def test_compiled_code_is_looked_for_by_the_first_kernel_that_needs_it():
    run_program("""
import sys, numpy as np
from fsdpx.core.array import shapes
from fsdpx.core.array import kernels, random
kernels.gelu(shapes, shapes.zeros((2, 2)))
with kernels.use_mode("plain"):
    kernels.gelu(np, np.ones(2))
assert not {"numba", "cupy", "mpi4py", "ml_dtypes", "fsdpx.core.array.jit"} & set(sys.modules)
kernels.gelu(np, np.ones(2))
assert "fsdpx.core.array.jit" in sys.modules
""")


@pytest.fixture
def cache(monkeypatch):
    from fsdpx.ext.native import compile as module

    monkeypatch.setattr(module, "_warned", False)
    return module


def dispatcher(function):
    return jit(function).get_dispatcher()


@pytest.mark.parametrize(("local_rank", "count"), [("0", 1), ("1", 0)])
def test_only_the_first_rank_of_a_host_warns_of_it(cache, monkeypatch, local_rank, count):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", local_rank)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache._warn_cannot_cache(OSError("no folder"))
    assert len(caught) == count


def test_a_full_disk_warns_and_the_kernel_runs(cache, monkeypatch, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(cache._DigestedFile, "save", Mock(side_effect=full))
    kernel = dispatcher(_double)
    kernel._cache._cache_path = str(tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        assert kernel(2.0) == 4.0
    assert caught[0].filename == __file__  # numba stands between


def test_each_signature_and_version_has_its_own_file(cache, monkeypatch, tmp_path):
    def counted():
        kernel = dispatcher(_double)
        kernel._cache._cache_path = str(tmp_path)
        assert (kernel(2.0), kernel(2)) == (4.0, 4)
        return sum(kernel.stats.cache_hits.values())

    assert counted() == 0
    assert len(list(tmp_path.glob("*.kept"))) == 2
    assert counted() == 2
    monkeypatch.setattr(cache, "hash_function_sources", lambda function: "sources of another version")
    assert counted() == 0


def _double(x):
    return x + x


def test_cuda_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"needs CuPy, .*: pip install '\.\[cuda12\]' or pip install '\.\[cuda13\]'"):
        get_namespace("cuda")


def test_arrays_go_to_the_host_and_come_from_it():
    array, ghost = np.ones(3), shapes.ShapeArray((2, 3), "float32")
    assert to_host(array) is array
    assert from_host(np, array) is array
    np.testing.assert_array_equal(to_host(ghost), np.zeros((2, 3), np.float32), strict=True)
    assert repr(from_host(shapes, array)) == "ShapeArray((3,), float64)"


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int32", "int64", "uint8", "bool"])
def test_dtype_by_name(name):
    assert parse_dtype(name) == parse_dtype(np.dtype(name)) == np.dtype(name)


def test_bf16():
    assert parse_dtype("bf16") == parse_dtype("bfloat16")
    assert parse_dtype("bf16").itemsize == 2


@pytest.mark.parametrize(
    ("look_up", "name", "words"),
    [
        (get_namespace, "tpu", "unknown device 'tpu': choose one of cpu, cuda, shape"),
        (parse_dtype, "fp8", "unknown dtype 'fp8': choose one of float64, float32, float16, fp16, bf16"),
    ],
)
def test_what_is_unknown_lists_names(look_up, name, words):
    with pytest.raises(ConfigError, match=words):
        look_up(name)
