"""ctypes bindings to oneDNN for products of 16-bit matrices, accumulated in float32 with the processor's 16-bit
instructions.

oneDNN compiles each matrix product as a *primitive* for certain sizes and strides. Each thread keeps its own primitives
because they contain the addresses of the operands."""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.blas.libraries import list_candidate_library_files, load_shared_library

__all__ = ["OneDNN", "load_onednn"]

CPU, IN_ORDER = 1, 1  # values of the enums in oneDNN's header dnnl.h
SOURCE, WEIGHTS, BIAS, RESULT = 1, 33, 41, 17
DTYPE_CODES = {"float32": 3, "bfloat16": 2, "float16": 1, "int8": 5}
MAX_PRIMITIVES = 512
"""Maximum number of primitives that a thread caches. When the maximum is reached, the cache is cleared."""


class DnnlArgument(ctypes.Structure):
    _fields_ = (("role", c_int), ("memory", c_void_p))


class OneDNN:
    """The oneDNN library, loaded from the file `path`. Raises OSError or AttributeError if the file is not oneDNN."""

    name = "oneDNN"

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = load_shared_library(path)
        self._openmp = ctypes.CDLL("libgomp.so.1")
        self._execute, self._point = self._library.dnnl_primitive_execute, self._library.dnnl_memory_set_data_handle
        self._point.argtypes = (c_void_p, c_void_p)
        self._engine = self._create_object("dnnl_engine_create", CPU, c_size_t(0))
        self._own = threading.local()

    @functools.cached_property
    def version(self) -> str:
        about = ctypes.cast(self._library.dnnl_version, ctypes.CFUNCTYPE(ctypes.POINTER(c_int)))()
        return ".".join(str(about[i]) for i in range(3))

    def multiply_half_into(
        self, out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool, bias: np.ndarray | None
    ) -> None:
        """Compute out = a @ b + bias, or out += a @ b.

        a `(m, k)` and b `(k, n)` are bfloat16 or float16, each with unit stride in one dim. out has contiguous rows, in
        the dtype of a and b or in float32. bias is `(n,)`. Alternatively, a and b are int8, and out is float32."""
        layouts = (a.shape, b.shape, a.strides, b.strides, out.strides)
        key = (a.dtype.char, out.dtype.char, *layouts, accumulate, bias is not None)
        known = self._get_primitives_of_thread()
        entry = known.get(key)
        if entry is None:
            if len(known) >= MAX_PRIMITIVES:
                self._destroy_primitives(known)
            entry = known[key] = self._prepare_primitive(out, a, b, accumulate, bias)
        primitive, arguments, memories = entry
        operands = (a, b, out) if bias is None else (a, b, out, bias)
        for memory, array in zip(memories, operands, strict=True):
            self._point(memory, array.__array_interface__["data"][0])
        threads = self._openmp.omp_get_max_threads()  # the previous setting, restored below
        if threads != 1:
            self._openmp.omp_set_num_threads(1)
        status = self._execute(primitive, self._own.stream, len(memories), arguments)
        if threads != 1:
            self._openmp.omp_set_num_threads(threads)
        self._require_success("dnnl_primitive_execute", status)

    def _get_primitives_of_thread(self) -> dict[Any, Any]:
        """Return this thread's cache of compiled oneDNN primitives.

        Each primitive runs on a single thread, since the caller splits products over threads."""
        own = self._own
        if not hasattr(own, "known"):
            own.stream = self._create_object("dnnl_stream_create", self._engine, IN_ORDER)
            own.known = {}
        return own.known

    def _prepare_primitive(self, out: Any, a: Any, b: Any, accumulate: bool, bias: Any) -> tuple[Any, Any, list[Any]]:
        descriptor, layouts = self._create_product_descriptor(out, a, b, accumulate, bias)
        primitive = self._create_object("dnnl_primitive_create", descriptor)
        memories = [self._create_object("dnnl_memory_create", layout, self._engine, c_void_p()) for layout in layouts]
        roles = (SOURCE, WEIGHTS, RESULT, BIAS)
        arguments = (DnnlArgument * len(memories))(*[DnnlArgument(r, m) for r, m in zip(roles, memories, strict=False)])
        self._library.dnnl_primitive_desc_destroy(descriptor)
        for layout in layouts:
            self._library.dnnl_memory_desc_destroy(layout)
        return primitive, arguments, memories

    def _create_product_descriptor(
        self, out: Any, a: Any, b: Any, accumulate: bool, bias: Any
    ) -> tuple[Any, list[Any]]:
        layouts = [self._create_memory_descriptor(array) for array in (a, b, out)]
        if bias is not None:
            layouts.append(self._create_memory_descriptor(bias[None, :]))
        attributes = self._create_object("dnnl_primitive_attr_create")
        if accumulate:
            after = self._create_object("dnnl_post_ops_create")
            self._require_success(
                "sum", self._library.dnnl_post_ops_append_sum(after, c_float(1.0), c_int(0), c_int(0))
            )
            self._library.dnnl_primitive_attr_set_post_ops(attributes, after)
            self._library.dnnl_post_ops_destroy(after)
        shift = layouts[3] if bias is not None else None
        create = "dnnl_matmul_primitive_desc_create"
        descriptor = self._create_object(create, self._engine, layouts[0], layouts[1], shift, layouts[2], attributes)
        self._library.dnnl_primitive_attr_destroy(attributes)
        return descriptor, layouts

    def _create_memory_descriptor(self, array: np.ndarray) -> c_void_p:
        size, n = array.itemsize, array.ndim
        shape, strides = (c_int64 * n)(*array.shape), (c_int64 * n)(*[stride // size for stride in array.strides])
        kind = DTYPE_CODES[array.dtype.name]
        return self._create_object("dnnl_memory_desc_create_with_strides", n, shape, kind, strides)

    def _destroy_primitives(self, known: dict[Any, Any]) -> None:
        for primitive, _, memories in known.values():
            self._library.dnnl_primitive_destroy(primitive)
            for memory in memories:
                self._library.dnnl_memory_destroy(memory)
        known.clear()

    def _create_object(self, function: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self._require_success(function, getattr(self._library, function)(byref(made), *arguments))
        return made

    def _require_success(self, what: str, status: int) -> None:
        if status:
            raise OSError(f"oneDNN in {self.path}: {what} returned {status}")


@functools.cache
def load_onednn() -> OneDNN | None:
    """Load oneDNN from the wheel that the extra `onednn` installs, or return None if that fails."""
    for path in list_candidate_library_files("onednn"):
        try:
            return OneDNN(path)
        except (OSError, AttributeError):
            continue
    return None
