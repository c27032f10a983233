"""Matrix products of 16-bit matrices on CPUs, accumulated in float32.

If possible, oneDNN computes the products with the processor's 16-bit instructions. Otherwise, operands are converted to
float32 and multiplied with the float32 matrix library."""

from __future__ import annotations

import functools

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.array.blas import libraries
from fsdpx.core.array.blas.products import (
    add_bias_and_round_total_into,
    gemm,
    list_product_parts_per_thread,
    try_multiply_small_bfloat16_into,
)
from fsdpx.core.array.kernels.half import to_float32
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.processor import read_cpuinfo_field
from fsdpx.errors import ConfigError, warn
from fsdpx.ext.half import onednn

__all__ = [
    "get_selected_library",
    "list_16bit_matmul_libraries",
    "list_half_instructions",
    "multiply_half_into",
    "select_library",
]

WIDENED = "widened"
"""Name of the "library" that converts operands to float32 and multiplies them with the float32 library. It is always
available, and its results are the reference."""
INSTRUCTIONS = {"bfloat16": ("amx_bf16", "avx512_bf16"), "float16": ("amx_fp16", "avx512_fp16")}
NEEDED = ("avx512bw", "avx_ne_convert")
"""Processor instruction sets. oneDNN needs at least one of them to multiply bfloat16."""
CHECKED = ((1, 1, 1), (3, 5, 2), (17, 70, 33), (64, 32, 96))
"""Sizes (rows, inner dim, columns) of the matrix products used to check a library."""

requested_library: str | None = None  # set by `select_library`


def list_16bit_matmul_libraries() -> dict[str, str]:
    """Return the path and version of each library that can multiply 16-bit matrices, as a dict keyed by name.
    `select_library` accepts these names."""
    here = {WIDENED: "float32 products of widened operands"}
    library = onednn.load_onednn() if _has_bfloat16_instructions() else None
    return here if library is None else {"onednn": f"{library.path} ({library.version})", **here}


def select_library(name: str | None) -> None:
    """Select the library that multiplies bfloat16 matrices from now on, or the default if `name` is None. All ranks of
    a job must select the same library."""
    global requested_library
    if name is not None and name not in list_16bit_matmul_libraries():
        raise ConfigError(
            f"16-bit products by {name!r} are not available: choose one of {', '.join(list_16bit_matmul_libraries())}"
        )
    requested_library = name


def get_selected_library(dtype_name: str = "bfloat16") -> str:
    """Return the name of the library that multiplies matrices of a 16-bit dtype.

    The default is oneDNN if the processor has 16-bit matrix instructions and a test finds oneDNN's results correct.
    `select_library` applies only to bfloat16."""
    return requested_library if requested_library and dtype_name == "bfloat16" else _choose_default_library(dtype_name)


def _has_bfloat16_instructions() -> bool:
    return not set(NEEDED).isdisjoint(read_cpuinfo_field("flags").split())


@functools.cache
def list_half_instructions(dtype_name: str = "bfloat16") -> tuple[str, ...]:
    """Return the names of this processor's matrix instructions for a 16-bit dtype, fastest first."""
    flags = read_cpuinfo_field("flags").split()
    return tuple(name for name in INSTRUCTIONS[dtype_name] if name in flags)


def multiply_half_into(
    out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool = False, bias: np.ndarray | None = None
) -> None:
    """Compute out = a @ b + bias, or out += a @ b if `accumulate`, for 16-bit a `(m, k)` and b `(k, n)`.

    `out` is `(m, n)`, in the dtype of a and b or in float32. `bias` is `(n,)`, in the dtype of a and b, and cannot be
    combined with `accumulate`."""
    if try_multiply_small_bfloat16_into(out, a, b, accumulate, bias):
        return
    if libraries.product_threads > 1 and bias is None and (cut := list_product_parts_per_thread(out, a, b)):
        parallel.run_tasks(_multiply_piece_into, [(*piece, accumulate, None) for piece in cut])
    else:
        _multiply_piece_into(out, a, b, accumulate, bias)


def _multiply_piece_into(
    out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool, bias: np.ndarray | None
) -> None:
    sixteen = a.dtype == b.dtype and a.dtype.name in INSTRUCTIONS
    name = get_selected_library(a.dtype.name) if sixteen else WIDENED
    library = None if name == WIDENED else onednn.load_onednn()
    if (
        library is not None
        and a.size
        and b.size
        and _has_supported_strides(a)
        and _has_supported_strides(b)
        and out.strides[1] == out.itemsize
    ):
        library.multiply_half_into(out, a, b, accumulate, bias)
    else:
        _multiply_widened_into(out, a, b, accumulate, bias)


def _multiply_widened_into(
    out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool, bias: np.ndarray | None
) -> None:
    total = np.empty(out.shape, np.float32)
    gemm(total, to_float32(np, a), to_float32(np, b))
    add_bias_and_round_total_into(out, total, accumulate, bias)


def _has_supported_strides(a: np.ndarray) -> bool:
    """Return whether an array has unit stride in one dim, and in the other dim a positive stride that is large enough
    to prevent overlap."""
    (m, n), (down, across), size = a.shape, a.strides, a.itemsize
    rows, columns = across == size and down >= n * size, down == size and across >= m * size
    return rows or columns


@functools.cache
def _choose_default_library(dtype_name: str) -> str:
    """Return "onednn" if oneDNN is installed and its results are correct, else "widened". If oneDNN's results are
    wrong, warn once."""
    library = (
        onednn.load_onednn()
        if list_half_instructions(dtype_name) and (dtype_name != "bfloat16" or _has_bfloat16_instructions())
        else None
    )
    if library is None or _multiplies_correctly(library, dtype_name):
        return WIDENED if library is None else "onednn"
    about = f"{library.name} in {library.path} ({library.version}) multiplies wrongly on this processor and is not used"
    warn(f"fsdpx: {about}: {dtype_name} computes without it")
    return WIDENED


def _multiplies_correctly(library: onednn.OneDNN, dtype_name: str) -> bool:
    """Return whether a library's test product equals the reference, except for rounding in the sums.

    Every product of two 16-bit numbers is exact in float32, so only the sums are rounded."""
    numbers, half = np.random.default_rng(0), parse_dtype(dtype_name)
    for m, k, n in CHECKED:
        a, b = (numbers.standard_normal(shape, np.float32).astype(half) for shape in ((m, k), (n, k)))
        for x, y in ((a, b.T), (np.asfortranarray(a), np.ascontiguousarray(b.T))):
            out = np.empty((m, n), np.float32)
            library.multiply_half_into(out, x, y, False, None)
            exact = [v.astype(np.float64) for v in (x, y)]
            bound = (k + 1) * 2.0**-23 * (np.abs(exact[0]) @ np.abs(exact[1]))
            if not np.all(np.abs(out - exact[0] @ exact[1]) <= bound):
                return False
    return True
