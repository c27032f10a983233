"""The CUDA C of kernels: compiled for the host it gives what NumPy gives; NVRTC compiles it for GPUs."""

import ctypes
import importlib
import itertools
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from amount import few
from calls import CALLS, ROWS, SEGMENTS, N, Q, W, X, arguments_of, each, kernel_of, noise
from on_gpu import PLACES
from stand_in import Cupy, Device

from fsdpx import optim
from fsdpx.core.array import kernels
from fsdpx.core.array.random import NumberRange
from fsdpx.ext.gpu import gemm
from fsdpx.ext.gpu import kernels as cuda
from fsdpx.ext.gpu.cupy_devices import is_on_gpu
from fsdpx.ext.gpu.kernels import GPU_KERNELS, OPTIONS, UPDATES, find_gpu_kernel
from fsdpx.optim import ShardSegment, ShardSegments
from fsdpx.optim.optimizer import FORMULAS_BY_NAME, update_parameters

SOURCE, ATTENTION = (Path(cuda.__file__).with_name(name) for name in ("kernels.cu", "attention.cu"))
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
everywhere = pytest.mark.parametrize("cupy", PLACES, indirect=True)
"""Also on a GPU, if there is one."""


@pytest.fixture
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if getattr(request, "param", "stand-in") == "gpu":
        yield importlib.import_module("cupy")
        return
    if shutil.which("g++") is None:
        pytest.skip("no g++: CUDA C was not tried on the host")
    caches = cuda.load_kernel_module, cuda.load_attention_module, cuda._load_kernel_function, gemm._import_cublas
    for cache in caches:
        cache.cache_clear()
    yield Cupy().install(monkeypatch)
    for cache in caches:
        cache.cache_clear()


def close(got: Any, want: Any, bound: float, name: str) -> None:
    if isinstance(want, tuple):
        for one, other in zip(got, want, strict=True):
            close(one, other, bound, name)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype, name
        found, wanted = np.asarray(got.get(), float), np.asarray(want, float)
        np.testing.assert_allclose(found, wanted, rtol=bound, atol=3 * bound, err_msg=name)
    else:
        assert want is got is None or got == pytest.approx(want, rel=bound), name


OF_HOSTS = {
    "apply_stencil", "fourier_along_dim", "group_norm", "group_norm_backward_input", "neighborhood_attention",
    "neighborhood_attention_backward", "sum_squares_by_index",
}  # fmt: skip
"""Kernels that only the host has: on a GPU, GroupNorm runs the kernels of fields that are split over ranks, and
attention over neighborhoods and Fourier transforms run array code."""


def compare(cupy: Any, name: str, arguments: tuple[Any, ...], dtype: str) -> None:
    """One call on CuPy and the same, plain, on NumPy: results, and what is changed in place."""
    if name == "correlate" and len(arguments) == 6 and dtype == "bfloat16":
        return  # plain code rounds after each place of the window, and no layer adds to 16 bits
    kernel = kernel_of(name)
    host = arguments_of(name, arguments, dtype)
    there = [each(cupy.asarray, a) for a in host]
    assert find_gpu_kernel(name, tuple(there)) is not None, name
    with kernels.use_mode("plain"):
        want = kernel(np, *host)
    got = kernel(cupy, *there)
    close(got, want, BOUNDS[dtype], name)
    changed = tuple(a for one in there for a in (one if type(one) is tuple else [one]) if is_on_gpu(a))
    wanted = tuple(a for one in host for a in (one if type(one) is tuple else [one]) if isinstance(a, np.ndarray))
    close(changed, wanted, BOUNDS[dtype], name)


@everywhere
@pytest.mark.parametrize("dtype", few(BOUNDS, 3))
def test_kernels_give_what_numpy_gives(cupy: Any, dtype: str) -> None:
    assert {*CALLS} - OF_HOSTS | {"store", "add_widened"} == {*GPU_KERNELS}
    for name in sorted({*CALLS} - OF_HOSTS):
        for arguments in CALLS[name]:
            compare(cupy, name, arguments, dtype)


@pytest.mark.parametrize("most", [1, 40, 400])
def test_windows_are_taken_in_pieces_where_they_are_many(cupy: Cupy, monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(cuda, "MAX_COLUMN_ELEMENTS", most)
    for name in filter(lambda name: name.startswith("correlate"), CALLS):
        for arguments in CALLS[name]:
            compare(cupy, name, arguments, "float64")


@everywhere
def test_dropout_has_the_numbers_of_the_host(cupy: Any) -> None:
    for start in (0, 1, 2, 3, 2**33 + 1):
        x, numbers = noise(10_000), NumberRange(7, "a.b@3", start, start + 10_000)
        y, keep = kernels.drop(cupy, cupy.asarray(x), numbers, 0.4)
        want, kept = kernels.drop(np, x, numbers, 0.4)
        assert (keep.get() == kept).all()
        assert (y.get() == want).all()


def test_16_bits_are_rounded_to_the_nearest_and_added_in_float32(cupy: Cupy) -> None:
    x = np.concatenate([noise(999).astype(np.float32), np.array([np.inf, -np.inf, np.nan, 3.4e38, 1e-40], np.float32)])
    x[:2] = 1 + np.array([1, 3]) / 256  # ties
    out, back = cupy.zeros(x.size, ml_dtypes.bfloat16), cupy.asarray(np.ones(x.size, np.float32))
    kernels.store(cupy, cupy.asarray(x), out)
    want = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out.get().astype(float), want.astype(float))
    kernels.add_widened(cupy, out, back)
    np.testing.assert_array_equal(back.get(), 1 + want.astype(np.float32))
    kernels.store(cupy, out, back)
    np.testing.assert_array_equal(back.get(), want.astype(np.float32))
    sums = cupy.zeros(N, np.float32)  # gradients of bfloat16 rows may be kept in float32
    rows = X.astype(ml_dtypes.bfloat16)
    kernels.sum_rows(cupy, cupy.asarray(rows), sums)
    np.testing.assert_allclose(sums.get(), rows.astype(np.float64).sum(0), rtol=1e-5)


@everywhere
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_have_the_bits_of_the_host(cupy: Any, dtype: Any) -> None:
    shapes = {"sgd": (2, 3), "momentum": (3, 5), "adam": (4, 9), "lion": (3, 5),
              "update_moments": (3, 4), "compute_direction": (4, 4), "step_along_direction": (3, 5)}  # fmt: skip
    assert all(getattr(optim, name) for name in optim.__all__)  # imports them
    assert {*shapes} == {*UPDATES} <= {*FORMULAS_BY_NAME}  # others are left to array code
    for name, (arrays, numbers) in shapes.items():
        host = [abs(noise(100_000, seed=n)).astype(dtype) for n in range(arrays)]
        there = [cupy.asarray(a) for a in host]
        values = tuple(dtype(v) for v in np.linspace(0.1, 0.9, numbers))
        FORMULAS_BY_NAME[name].run_in_blocks(np, tuple(host), values)
        FORMULAS_BY_NAME[name](cupy, tuple(there), values)
        for got, want in zip(there, host, strict=True):
            np.testing.assert_array_equal(got.get(), want, err_msg=name)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_sums_of_squares_have_the_bits_of_the_host(cupy: Cupy, dtype: str) -> None:
    x = (noise(40_000, seed=3) * 10.0 ** (np.arange(40_000) % 9 - 4.0)).astype(dtype)
    for size in (1, 63, 1003, x.size):
        there = cupy.asarray(x[:size])
        for grain in (100, 1024):
            got, want = (kernels.sum_squares_of_blocks(*given, grain) for given in ((cupy, there), (np, x[:size])))
            np.testing.assert_array_equal(got.get(), want, err_msg=f"{size} elements in blocks of {grain}")
        assert kernels.square_sum(cupy, there) == kernels.square_sum(np, x[:size]), size


@pytest.mark.parametrize("optimizer", [optim.AdamW(lr=0.1), optim.LAMB(lr=0.1)], ids=["adamw", "lamb"])
def test_parameters_with_other_counts_have_the_bits_of_the_host(cupy: Cupy, optimizer: Any) -> None:
    """A launch for each stretch of equal counts, wherever it begins."""
    cuts = (0, 7, 100, 101, 1000)
    whole = ShardSegments(tuple(ShardSegment(str(a), a, b, 0, b - a) for a, b in pairwise(cuts)))
    held = whole.with_missed_update_counts({"7": 3, "100": 5})
    host = [abs(noise(1000, seed=n)) for n in range(4)]
    there = [cupy.asarray(a) for a in host]
    for xp, (p, g, m, v) in ((np, host), (cupy, there)):
        update_parameters(optimizer, xp, p, g, {"m": m, "v": v}, lr=0.1, step=6, segments=held)
    for got, want in zip(there, host, strict=True):
        np.testing.assert_array_equal(got.get(), want)


def test_what_no_kernel_takes_is_left_to_array_code(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = Cupy().install(monkeypatch)
    x, half = cupy.asarray(X), cupy.asarray(X.astype(np.float16))
    w32 = cupy.asarray(W.astype(np.float32))
    q = cupy.asarray(Q)
    assert find_gpu_kernel("layer_norm", (x, cupy.asarray(W), None, 1e-5)) is not None
    assert find_gpu_kernel("attention", (q, q, q, True, 0.4, 0, None)) is not None
    for name, arguments in (
        ("sigmoid", (x,)),  # there is no form
        ("gelu", (half,)),
        ("gelu", (x[:, ::2],)),
        ("gelu", (x[:0],)),
        ("layer_norm", (x, w32, None, 1e-5)),  # formats that are mixed
        ("drop_backward", (x, x, 0.1)),  # the mask is none
        ("softmax", (X,)),  # on the host
        ("attention", (q, q, q, False, 0.4, 0, cupy.asarray(SEGMENTS)[:, ::2])),
    ):
        assert find_gpu_kernel(name, arguments) is None, name
    assert not cuda.try_run_optimizer_kernel("sgd", (half, half), (np.float16(1),) * 3)


Shape = tuple[int, int, int, int, int, int]
TILES: list[tuple[Shape, bool, int, int]] = [
    ((1, 2, 2, 64, 64, 64), True, 0, 0),  # one tile
    ((2, 2, 1, 70, 70, 16), True, 0, 0),  # the second is in part; queries share keys
    ((1, 4, 2, 150, 150, 32), True, 40, 0),  # a window that leaves out tiles
    ((1, 2, 2, 33, 170, 80), False, 0, 0),  # another length
    ((1, 2, 1, 100, 100, 128), True, 0, 0),  # narrower tiles
    ((2, 2, 2, 70, 70, 16), True, 0, 3),  # documents
    ((1, 2, 2, 70, 70, 48), False, 0, 3),
]
"""Samples, heads, heads of keys, queries, keys, features; causal; window; documents."""


def in_tiles(cupy: Any, shape: Shape, causal: bool, window: int, documents: int) -> None:
    """Attention in bfloat16 and its gradients against float64, of numbers that are the same."""
    samples, heads, shared, t, n, d = shape
    sizes = (heads, t), (shared, n), (shared, n), (heads, t)
    half = [noise(samples, *size, d, seed=i).astype(ml_dtypes.bfloat16) for i, size in enumerate(sizes)]
    named = np.sort(np.random.default_rng(9).integers(0, documents, (samples, t)), axis=1) if documents else None
    rest = causal, d**-0.5, window
    q, k, v, do = (a.astype(float) for a in half)
    with kernels.use_mode("plain"):
        o, lse = kernels.attention(np, q, k, v, *rest, named)
        want = (o, lse, *kernels.attention_backward(np, q, k, v, o, lse, do, *rest, named))
    q, k, v, do = map(cupy.asarray, half)
    there = None if named is None else cupy.asarray(named)
    o, lse = kernels.attention(cupy, q, k, v, *rest, there)
    got = (o, lse, *kernels.attention_backward(cupy, q, k, v, o, lse, do, *rest, there))
    for name, one, other in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        distance = np.linalg.norm(one.get().astype(float) - other) / np.linalg.norm(other)
        assert distance < (1e-6 if name == "lse" else 4e-3), f"{name} of {shape}: {distance:.1e}"


@everywhere
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_attention_in_tiles(cupy: Any, monkeypatch: pytest.MonkeyPatch, tiles: Any) -> None:
    launch = Mock(wraps=cuda._launch_attention_kernel)
    monkeypatch.setattr(cuda, "_launch_attention_kernel", launch)
    in_tiles(cupy, *tiles)
    has_units = int(cupy.cuda.Device().compute_capability) >= cuda.AMPERE
    wanted = ["flash", "flash_sums", "flash_queries", "flash_keys"] if has_units else []
    assert [call.args[0] for call in launch.call_args_list] == wanted


def test_a_gpu_without_units_for_bfloat16_computes_whole_matrices(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_launch_attention_kernel", lambda *_: pytest.fail("it has none"))
    monkeypatch.setattr(Device, "compute_capability", "75")
    in_tiles(cupy, *TILES[1])


def test_targets_that_are_no_classes_give_nan(cupy: Cupy) -> None:
    total, _, _ = kernels.cross_entropy(cupy, cupy.asarray(X), cupy.asarray(np.full(ROWS, N)))
    assert np.isnan(total)


def nvrtc() -> Any:
    """NVIDIA's compiler as a library, which needs no GPU."""
    for path in (*map(Path, sys.path), Path("/usr/local/cuda/lib64")):
        for found in itertools.chain(path.glob("nvidia/*/lib/libnvrtc.so.*"), path.glob("libnvrtc.so.1?")):
            return ctypes.CDLL(str(found))
    return None


@pytest.mark.parametrize(
    ("source", "define", "name"),
    [
        *((SOURCE, f"-DKIND={kind}", b"fsdpx_cross_entropy") for kind in (16, 32, 64)),
        *((ATTENTION, f"-DHEAD={d}", b"fsdpx_flash_keys") for d in (16, 64, 128)),
    ],
)
def test_nvrtc_compiles_them(source: Path, define: str, name: bytes) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("no NVRTC (pip install nvidia-cuda-nvrtc): CUDA C was not compiled for GPUs")
    for architecture in ("sm_80", "sm_90"):
        program = ctypes.c_void_p()
        assert library.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), b"kernels.cu", 0, None, None) == 0
        options = [*OPTIONS, define, f"-arch={architecture}"]
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = library.nvrtcCompileProgram(program, len(options), words)
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        assert status == 0, log.value.decode()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        assert name in code.raw
