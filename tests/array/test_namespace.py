"""Namespaces of array libraries, and dtypes by name."""

import sys

import numpy as np
import pytest

from fsdpx import shapes
from fsdpx.array import dtype, from_host, namespace, namespace_of, to_host
from fsdpx.errors import ConfigError


def test_devices():
    assert namespace("cpu") is np
    assert namespace("shape") is shapes
    with pytest.raises(ConfigError, match=r"unknown device 'tpu': choose one of cpu, cuda, shape"):
        namespace("tpu")


def test_cuda_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"needs CuPy: pip install 'fsdpx\[cuda12\]' or 'fsdpx\[cuda13\]'"):
        namespace("cuda")


def test_namespace_of_and_host():
    array, ghost = np.ones(3), shapes.ShapeArray((2, 3), "float32")
    assert namespace_of(array) is np
    assert namespace_of(ghost) is shapes
    assert to_host(array) is array
    assert from_host(np, array) is array
    np.testing.assert_array_equal(to_host(ghost), np.zeros((2, 3), np.float32), strict=True)
    assert repr(from_host(shapes, array)) == "ShapeArray((3,), float64)"


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int32", "int64", "uint8", "bool"])
def test_dtype_by_name(name):
    assert dtype(name) == np.dtype(name)
    assert dtype(np.dtype(name)) == np.dtype(name)


def test_bf16():
    assert dtype("bf16") == dtype("bfloat16")
    assert dtype("bf16").itemsize == 2


def test_unknown_dtype_lists_names():
    with pytest.raises(ConfigError, match=r"unknown dtype 'fp8': choose one of float64, float32, float16, fp16, bf16"):
        dtype("fp8")
