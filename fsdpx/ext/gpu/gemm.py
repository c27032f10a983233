"""Matrix products with cuBLAS, written to existing arrays. Products of 16-bit matrices are accumulated in float32.

cuBLAS is column-major, so it sees a row-major matrix as its transpose. Therefore out = a b is computed as out^T = b^T
a^T: the operands are swapped, and column-major operands are marked as transposed."""

from __future__ import annotations

import functools
from ctypes import CDLL, addressof, c_double, c_float, c_int, c_longlong, c_void_p
from typing import Any, NamedTuple

import numpy as np

from fsdpx.ext.gpu.capture import get_active_capture
from fsdpx.ext.gpu.cupy_devices import import_cupy, is_on_gpu

__all__ = ["GemmCall", "can_cublas_multiply", "plan_cublas_gemm", "run_batched_gemm_into", "run_gemm_into"]

CUBLAS_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""Dtype name -> value of the enum cudaDataType."""
COMPUTE_FLOAT32, COMPUTE_FLOAT64 = 68, 70
"""The values CUBLAS_COMPUTE_32F and CUBLAS_COMPUTE_64F of the enum cublasComputeType_t."""
DEFAULT_ALGORITHM = -1


class GemmCall(NamedTuple):
    """The arguments of cuBLAS for out = a b, in cuBLAS's order.

    `turned` states whether out is column-major. If it is, the operands are a and b, in this order. Otherwise, they are
    b and a. `first` and `second` state whether the first and the second operand are transposed."""

    turned: bool
    first: bool
    second: bool
    m: int
    n: int
    k: int
    ld_first: int
    ld_second: int
    ld_out: int


@functools.lru_cache(1 << 12)
def plan_cublas_gemm(out: tuple[Any, Any], a: tuple[Any, Any], b: tuple[Any, Any]) -> GemmCall | None:
    """Return the cuBLAS call for out (m, n) = a (m, k) b (k, n), given the (shape, strides in elements) of each array.

    Returns None if a matrix is neither row-major nor column-major."""
    found = _find_gemm_layout(*out)
    if found is None:
        return None
    if found[0]:  # out is column-major: plan the product out^T = b^T a^T instead, because out^T is row-major
        turned = plan_cublas_gemm(_transpose_layout(out), _transpose_layout(b), _transpose_layout(a))
        return None if turned is None else turned._replace(turned=True)
    first, second = _find_gemm_layout(*b), _find_gemm_layout(*a)
    if first is None or second is None:
        return None
    (m, k), n = a[0], b[0][1]
    return GemmCall(False, first[0], second[0], n, m, k, first[1], second[1], found[1])


def _find_gemm_layout(shape: tuple[int, int], strides: tuple[int, int]) -> tuple[bool, int] | None:
    """Return (whether a matrix is column-major, its leading dimension). The leading dimension is the stride between
    columns or rows. Return None if the matrix is neither row-major nor column-major."""
    (rows, columns), (down, along) = shape, strides
    if columns == 1 or along == 1:
        step = down if rows > 1 else max(columns, 1)
        if step >= columns:
            return False, max(step, 1)
    if rows == 1 or down == 1:
        step = along if columns > 1 else max(rows, 1)
        if step >= rows:
            return True, max(step, 1)
    return None


def _transpose_layout(layout: tuple[Any, Any]) -> tuple[Any, Any]:
    return layout[0][::-1], layout[1][::-1]


def can_cublas_multiply(*arrays: Any) -> bool:
    """Return whether cuBLAS can multiply these arrays: non-empty matrices of one dtype on a GPU."""
    if not all(is_on_gpu(a) and a.ndim == 2 and a.size for a in arrays):
        return False
    formats = {a.dtype for a in arrays}
    return len(formats) == 1 and formats.pop().name in CUBLAS_TYPES


def run_gemm_into(out: Any, a: Any, b: Any, accumulate: bool = False) -> None:
    """Compute out = a @ b, or out += a @ b if `accumulate`, for a (m, k), b (k, n) and out (m, n) of one dtype.

    For 16-bit operands, out may be float32. An array that is neither row-major nor column-major is copied."""
    run_batched_gemm_into(out[None], a[None], b[None], accumulate=accumulate)


def run_batched_gemm_into(out: Any, a: Any, b: Any, scale: float = 1.0, accumulate: bool = False) -> None:
    """Compute out[i] = scale * a[i] @ b[i] for 3-D arrays, or add the product to out[i] if `accumulate`. The same
    dtypes as in `run_gemm_into` are supported."""
    wanted = plan_cublas_gemm(*(_get_shape_and_strides(x) for x in (out, a, b)))
    if wanted is None and _find_gemm_layout(*_get_shape_and_strides(out)) is None:
        made = import_cupy().zeros(out.shape, dtype=out.dtype)
        run_batched_gemm_into(made, a, b, scale)
        out[...] = out + made if accumulate else made
        return
    if wanted is None:
        a, b = (
            x if _find_gemm_layout(*_get_shape_and_strides(x)) else import_cupy().ascontiguousarray(x) for x in (a, b)
        )
        wanted = plan_cublas_gemm(*(_get_shape_and_strides(x) for x in (out, a, b)))
        assert wanted is not None
    _call_cublas(wanted, out, a, b, scale, accumulate)


def _get_shape_and_strides(x: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shape of one matrix of the batch `x`, and its strides in elements."""
    down, along = (stride // x.dtype.itemsize for stride in x.strides[1:])
    return x.shape[1:], (down, along)


def _call_cublas(gemm_call: GemmCall, out: Any, a: Any, b: Any, scale: float, accumulate: bool) -> None:
    first, second = (a, b) if gemm_call.turned else (b, a)
    double = a.dtype == np.float64
    # cuBLAS reads alpha and beta through pointers to host memory, so they must be C numbers
    alpha, beta = ((c_double if double else c_float)(factor) for factor in (scale, accumulate))
    matrices = [
        [x.data.ptr, _get_cublas_type(x.dtype), ld]
        for x, ld in ((first, gemm_call.ld_first), (second, gemm_call.ld_second), (out, gemm_call.ld_out))
    ]
    count = out.shape[0]
    if count > 1:
        for matrix, x in zip(matrices, (first, second, out), strict=True):
            matrix.append(x.strides[0] // x.dtype.itemsize)
    one, two, three = matrices
    handle = import_cupy().cuda.device.get_cublas_handle()
    cublas = _import_cublas() if get_active_capture() is None else _use_library_on_current_stream(handle)
    shape = int(gemm_call.first), int(gemm_call.second), gemm_call.m, gemm_call.n, gemm_call.k
    rest = (*([count] if count > 1 else []), COMPUTE_FLOAT64 if double else COMPUTE_FLOAT32, DEFAULT_ALGORITHM)
    call = cublas.gemmStridedBatchedEx if count > 1 else cublas.gemmEx
    call(handle, *shape, addressof(alpha), *one, *two, addressof(beta), *three, *rest)


@functools.cache
def _import_cublas() -> Any:
    from cupy_backends.cuda.libs import cublas

    return cublas


class CublasLibrary:
    """The cuBLAS functions that CuPy wraps, without CuPy's check that rejects them while a CUDA graph is recorded.
    cuBLAS itself supports these functions during recording."""

    def __init__(self, library: Any) -> None:
        self._library = library
        matrix, strided = [c_void_p, c_int, c_int], [c_void_p, c_int, c_int, c_longlong]
        head = [c_void_p, *[c_int] * 5, c_void_p]
        library.cublasSetStream_v2.argtypes = [c_void_p, c_void_p]
        library.cublasGemmEx.argtypes = [*head, *matrix * 2, c_void_p, *matrix, c_int, c_int]
        library.cublasGemmStridedBatchedEx.argtypes = [*head, *strided * 2, c_void_p, *strided, *[c_int] * 3]

    def set_stream(self, handle: int, stream: int) -> None:
        """Make `handle` issue work on a stream. The previous stream need not be restored, because CuPy's own wrappers
        set the stream before each call."""
        self._check_status(self._library.cublasSetStream_v2(handle, stream))

    def gemmEx(self, *given: int) -> None:
        self._check_status(self._library.cublasGemmEx(*given))

    def gemmStridedBatchedEx(self, *given: int) -> None:
        self._check_status(self._library.cublasGemmStridedBatchedEx(*given))

    @staticmethod
    def _check_status(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS returned status {status} while a graph was recorded")


def _use_library_on_current_stream(handle: int) -> CublasLibrary:
    """Return the cuBLAS library that CuPy has loaded, and make `handle` issue work on the current stream. `handle` is
    CuPy's own handle, so cuBLAS chooses the same algorithms as outside of graphs."""
    library = _load_cublas_library()
    library.set_stream(handle, import_cupy().cuda.get_current_stream().ptr)
    return library


@functools.cache
def _load_cublas_library() -> CublasLibrary:
    major = import_cupy().cuda.runtime.runtimeGetVersion() // 1000
    return CublasLibrary(CDLL(f"libcublas.so.{major}"))


@functools.cache
def _get_cublas_type(dtype: np.dtype[Any]) -> int:
    return CUBLAS_TYPES[dtype.name]
