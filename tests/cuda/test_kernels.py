"""The CUDA C of kernels: compiled for the host it gives what NumPy gives; NVRTC compiles it for GPUs."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from amount import few, in_full
from stand_in import Cupy, Device

from fsdpx.array import kernels
from fsdpx.array.kernels.correlation import Strides
from fsdpx.array.random import Stretch
from fsdpx.cuda import gemm
from fsdpx.cuda import kernels as cuda
from fsdpx.cuda.devices import is_on_gpu
from fsdpx.cuda.kernels import FORMS, OPTIONS, UPDATES, on_gpu
from fsdpx.optim.optimizer import BY_NAME

SOURCE, ATTENTION = (Path(cuda.__file__).with_name(name) for name in ("kernels.cu", "attention.cu"))
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: CUDA C was not tried on the host")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cupy]:
    made = Cupy()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    caches = cuda.module, cuda.flash, cuda._function, gemm._cublas
    for cache in caches:
        cache.cache_clear()
    Device(0).use()
    yield made
    for cache in caches:
        cache.cache_clear()


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


ROWS, N = 70, 45  # more rows than a part of a sum has, and columns that no block divides
X, DY, W, B = noise(ROWS, N), noise(ROWS, N, seed=1), noise(N, seed=2), noise(N, seed=3)
TARGET = np.random.default_rng(4).integers(0, N, ROWS)
TARGET[::7] = -100
INDEX = np.random.default_rng(5).integers(0, 9, ROWS)
MEAN, RSTD = X.mean(1), 1 / np.sqrt(X.var(1) + 1e-5)
LSE = np.log(np.exp(X).sum(1))
Y = np.exp(X - LSE[:, None])

Q, K, V, DO = (noise(2, 3, 5, 4, seed=n) for n in range(4))
K2, V2 = noise(2, 3, 7, 4, seed=5), noise(2, 3, 7, 4, seed=6)  # another length
ATTENDED = kernels.attention(np, Q, K, V, True, 0.4)
ACROSS = kernels.attention(np, Q, K2, V2, False, 0.4)
Q4, DO4 = noise(2, 6, 5, 4, seed=7), noise(2, 6, 5, 4, seed=8)  # pairs of queries share the heads of K and V
SEGMENTS = np.array([[3, 3, 0, 0, 0], [1, 2, 2, 2, 5]])
SHARED = kernels.attention(np, Q4, K, V, True, 0.4, 3, SEGMENTS)
ACROSS4 = kernels.attention(np, Q4, K2, V2, False, 0.4)
APART = kernels.attention(np, Q, K, V, False, 0.4, 0, SEGMENTS)



def window(groups: int, outputs: int, cells: tuple[int, ...], s: Strides, samples: int = 2, bias: bool = True) -> Any:
    """x, weight, bias, the window, cells of the result, and its gradient."""
    sizes = tuple(  # those of a field with as much padding behind as before
        (n - 2 * first - d * (k - 1) - 1) // step + 1
        for n, k, step, d, first in zip(cells, *s[:4], strict=True)
    )
    x, w = noise(samples, 2 * groups, *cells), noise(outputs, 2, *s.kernel, seed=1)
    return x, w, noise(outputs, seed=2) if bias else None, s, sizes, noise(samples, outputs, *sizes, seed=3)


WINDOWS = [
    window(1, 5, (11,), Strides((3,), (1,), (1,), (-1,), 1)),
    window(1, 3, (9, 7), Strides((3, 2), (2, 1), (1, 3), (-2, 0), 1), bias=False),
    window(3, 6, (8, 5), Strides((2, 3), (1, 2), (2, 1), (0, -1), 3), 1),
    window(1, 4, (5, 6, 4), Strides((3, 3, 3), (1, 1, 1), (1, 1, 1), (-1, -1, -1), 1)),
    window(2, 6, (9, 3), Strides((1, 1), (1, 1), (1, 1), (0, 0), 2)),
    window(1, 3, (8200,), Strides((1,), (1,), (1,), (0,), 1)),
    window(2, 2, (7, 4, 5), Strides((3, 2, 1), (3, 2, 1), (2, 1, 1), (-3, -1, 0), 2)),
]
POOLS = [
    (noise(2, 3, *cells), Strides(*s, 1), sizes, noise(2, 3, *sizes, seed=1))
    for cells, s, sizes in (
        ((9,), ((3,), (2,), (1,), (-1,)), (5,)), ((6, 7), ((2, 3), (2, 1), (1, 2), (0, -1)), (3, 5)),
        ((4, 6, 5), ((2, 2, 3), (2, 2, 3), (1, 1, 1), (-1, 0, -1)), (3, 3, 2)),
    )
]  # fmt: skip
CHANNELS = [(noise(n, c, *cells), noise(n, c, *cells, seed=1), noise(c, seed=2)) for n, c, *cells in (
    (5, 3), (2, 4, 7), (3, 2, 90, 70),
)]  # fmt: skip

CALLS: dict[str, list[tuple[Any, ...]]] = {
    "layer_norm": [(X, W, B, 1e-5), (X, None, None, 0.1)],
    "layer_norm_backward_input": [(X, W, MEAN, RSTD, DY), (X, None, MEAN, RSTD, DY)],
    "layer_norm_backward_params": [(X, MEAN, RSTD, DY, W, B), (X, MEAN, RSTD, DY, None, B)],
    "rms_norm": [(X, W, 1e-5), (X, None, 0.1)],
    "rms_norm_backward_input": [(X, W, RSTD, DY)],
    "rms_norm_backward_params": [(X, RSTD, DY, W)],
    "gelu": [(3 * X, "none"), (3 * X, "tanh")],
    "gelu_backward": [(3 * X, DY, "none"), (3 * X, DY, "tanh")],
    "gelu_recompute": [(X, DY, "none")],
    "bias_gelu": [(X, B, "tanh"), (X, None, "none")],
    "add": [(X, DY)],
    "add_bias": [(X, B)],
    "sum_rows": [(X, B, True), (X, B, False)],
    "embedding_backward": [(noise(9, N), INDEX, DY)],
    "softmax": [(5 * X,)],
    "softmax_backward": [(Y, DY)],
    "cross_entropy": [(X, TARGET), (X, TARGET, -100, 0.1)],
    "cross_entropy_backward": [(X, TARGET, LSE, 0.3), (X, TARGET, LSE, 0.3, -100, 0.1)],
    "attention": [
        (Q, K, V, True, 0.4),
        (Q, K2, V2, False, 0.4),
        (Q4, K2, V2, False, 0.4),
        (Q4, K, V, True, 0.4, 3, SEGMENTS),
        (Q, K, V, False, 0.4, 0, SEGMENTS),
    ],
    "attention_backward": [
        (Q, K, V, *ATTENDED, DO, True, 0.4),
        (Q, K2, V2, *ACROSS, DO, False, 0.4),
        (Q4, K2, V2, *ACROSS4, DO4, False, 0.4),
        (Q4, K, V, *SHARED, DO4, True, 0.4, 3, SEGMENTS),
        (Q, K, V, *APART, DO, False, 0.4, 0, SEGMENTS),
    ],
    "square_sums": [(X.reshape(-1), 100)],
    "square_sum": [(noise(40_000),)],
    "drop": [(X, Stretch(1, "a@0", 5, 5 + X.size), 0.3), (X, Stretch(1, "a@0", 8, 8 + X.size), 0.0)],
    "drop_backward": [(DY, X > 0, 0.3)],
    "relu": [(X,), (np.where(X > 1, np.nan, X),)],
    "relu_backward": [(Y - 0.01, DY)],
    "squared_error": [(X, DY)],
    "max_pool": [(x, s, sizes) for x, s, sizes, _ in POOLS],
    "max_pool_backward": [(dy, kernels.max_pool(np, x, s, sizes)[1], s, x.shape) for x, s, sizes, dy in POOLS],
    "avg_pool": [(x, s, sizes, 5) for x, s, sizes, _ in POOLS],
    "avg_pool_backward": [(dy, s, x.shape, 5) for x, s, _, dy in POOLS],
    "channel_sums": [(x,) for x, _, _ in CHANNELS],
    "channel_squares": [(x, c) for x, _, c in CHANNELS],
    "channel_affine": [(x, c, 2 * c, c + 1) for x, _, c in CHANNELS],
    "channel_sums_with": [(dy, x, c, c * c) for x, dy, c in CHANNELS],
    "channel_norm_backward": [(dy, x, c, c + 1, c - 1, c * c) for x, dy, c in CHANNELS],
    "correlate": [(x, w, bias, s, sizes) for x, w, bias, s, sizes, _ in WINDOWS]
    + [(x, w, None, s, sizes, dy) for x, w, _, s, sizes, dy in WINDOWS],
    "correlate_backward_input": [
        case for x, w, bias, s, _, dy in WINDOWS
        for case in ((w, dy, s, x.shape), (w, dy, s, x.shape, noise(x.shape[1])))
    ],
    "correlate_backward_params": [
        (x, dy, s, (w, add), None if bias is None else (bias, add)) for x, w, bias, s, _, dy in WINDOWS
        for add in (True, False)
    ],
}  # fmt: skip
DOUBLE = {"channel_squares": (1,), "channel_affine": (1, 2, 3), "channel_sums_with": (2, 3),
          "channel_norm_backward": (2, 3, 4, 5)}  # fmt: skip
WIDE = {"layer_norm_backward_input": (2, 3), "layer_norm_backward_params": (1, 2), "rms_norm_backward_input": (2,),
        "rms_norm_backward_params": (1,), "cross_entropy_backward": (2,), "attention_backward": (4,)}  # fmt: skip
"""Arguments that are of the format of sums."""


def each(change: Any, value: Any) -> Any:
    """An array, or those of a tuple that says where a gradient goes."""
    if type(value) is tuple:
        return tuple(each(change, one) for one in value)
    return change(value) if isinstance(value, np.ndarray) else value


def copied(array: np.ndarray) -> np.ndarray:
    return array.copy()


def cast(value: Any, dtype: Any) -> Any:
    if type(value) is tuple:
        return tuple(cast(one, dtype) for one in value)
    return value.astype(dtype) if isinstance(value, np.ndarray) and value.dtype == np.float64 else value


def close(got: Any, want: Any, bound: float) -> None:
    if isinstance(want, tuple):
        for one, other in zip(got, want, strict=True):
            close(one, other, bound)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got.get(), float), np.asarray(want, float), rtol=bound, atol=3 * bound)
    else:
        assert want is got is None or got == pytest.approx(want, rel=bound)


def compare(cupy: Any, name: str, arguments: tuple[Any, ...], dtype: str) -> None:
    """One call on the stand-in and the same, plain, on NumPy: results, and what is changed in place."""
    if name == "correlate" and len(arguments) == 6 and dtype == "bfloat16":
        return  # plain code rounds after each place of the window, and no layer adds to 16 bits
    wide = "float64" if dtype == "float64" else "float32"
    places = range(len(arguments))
    format_of = [wide if place in WIDE.get(name, ()) else dtype for place in places]
    format_of = ["float64" if n in DOUBLE.get(name, ()) else kind for n, kind in zip(places, format_of, strict=True)]
    host = [each(copied, cast(a, np.dtype(kind))) for a, kind in zip(arguments, format_of, strict=True)]
    there = [each(cupy.asarray, a) for a in host]
    assert on_gpu(name, tuple(there)) is not None
    with kernels.use("plain"):
        want = getattr(kernels, name)(np, *host)
    got = getattr(kernels, name)(cupy, *there)
    close(got, want, BOUNDS[dtype])
    close(
        tuple(a for one in there for a in (one if type(one) is tuple else [one]) if is_on_gpu(a)),
        tuple(a for one in host for a in (one if type(one) is tuple else [one]) if isinstance(a, np.ndarray)),
        BOUNDS[dtype],
    )


@in_full
@needs_compiler
@pytest.mark.parametrize("dtype", few(BOUNDS, 3))
def test_kernels_give_what_numpy_gives(cupy: Cupy, dtype: str) -> None:
    assert {*CALLS} | {"store", "add_widened"} == {*FORMS}
    for name, calls in CALLS.items():
        for arguments in calls:
            compare(cupy, name, arguments, dtype)


@needs_compiler
@pytest.mark.parametrize("most", [1, 40, 400])
def test_windows_are_taken_in_pieces_where_they_are_many(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(cuda, "COLUMNS", most)
    for name in CALLS:
        for arguments in CALLS[name] if name.startswith("correlate") else ():
            compare(cupy, name, arguments, "float64")


@needs_compiler
def test_dropout_has_the_numbers_of_the_host(cupy: Cupy) -> None:
    for start in (0, 1, 2, 3, 2**33 + 1):
        numbers = Stretch(7, "a.b@3", start, start + X.size)
        y, keep = kernels.drop(cupy, cupy.asarray(X), numbers, 0.4)
        want, kept = kernels.drop(np, X, numbers, 0.4)
        assert (keep.get() == kept).all()
        assert (y.get() == want).all()


@needs_compiler
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


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_have_the_bits_of_the_host(cupy: Cupy, dtype: Any) -> None:
    shapes = {"sgd": (2, 3), "momentum": (3, 5), "adam": (4, 9), "lion": (3, 5),
              "moments": (3, 4), "direction": (4, 4), "follow": (3, 5)}  # fmt: skip
    assert {*shapes} == {*UPDATES} <= {*BY_NAME}  # others are left to array code
    for name, (arrays, numbers) in shapes.items():
        host = [abs(noise(1000, seed=n)).astype(dtype) for n in range(arrays)]
        there = [cupy.asarray(a) for a in host]
        values = tuple(dtype(v) for v in np.linspace(0.1, 0.9, numbers))
        BY_NAME[name].in_blocks(np, tuple(host), values)
        BY_NAME[name](cupy, tuple(there), values)
        for got, want in zip(there, host, strict=True):
            np.testing.assert_array_equal(got.get(), want, err_msg=name)


def test_what_no_kernel_takes_is_left_to_array_code(cupy: Cupy) -> None:
    x, half = cupy.asarray(X), cupy.asarray(X.astype(np.float16))
    w32 = cupy.asarray(W.astype(np.float32))
    q = cupy.asarray(Q)
    assert on_gpu("layer_norm", (x, cupy.asarray(W), None, 1e-5)) is not None
    assert on_gpu("attention", (q, q, q, True, 0.4, 0, None)) is not None
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
        assert on_gpu(name, arguments) is None, name
    assert not cuda.update("sgd", (half, half), (np.float16(1),) * 3)


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
    import ml_dtypes

    samples, heads, shared, t, n, d = shape
    sizes = (heads, t), (shared, n), (shared, n), (heads, t)
    half = [noise(samples, *size, d, seed=i).astype(ml_dtypes.bfloat16) for i, size in enumerate(sizes)]
    named = np.sort(np.random.default_rng(9).integers(0, documents, (samples, t)), axis=1) if documents else None
    rest = causal, d**-0.5, window
    q, k, v, do = (a.astype(float) for a in half)
    with kernels.use("plain"):
        o, lse = kernels.attention(np, q, k, v, *rest, named)
        want = (o, lse, *kernels.attention_backward(np, q, k, v, o, lse, do, *rest, named))
    q, k, v, do = map(cupy.asarray, half)
    there = None if named is None else cupy.asarray(named)
    o, lse = kernels.attention(cupy, q, k, v, *rest, there)
    got = (o, lse, *kernels.attention_backward(cupy, q, k, v, o, lse, do, *rest, there))
    for name, one, other in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        distance = np.linalg.norm(one.get().astype(float) - other) / np.linalg.norm(other)
        assert distance < (1e-6 if name == "lse" else 4e-3), f"{name} of {shape}: {distance:.1e}"


@needs_compiler
@pytest.mark.parametrize(("shape", "causal", "window", "documents"), TILES)
def test_attention_in_tiles(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch, shape: Shape, causal: bool, window: int, documents: int
) -> None:
    called, run = list[str](), cuda._flash
    monkeypatch.setattr(cuda, "_flash", lambda name, *given: (called.append(name), run(name, *given)))
    in_tiles(cupy, shape, causal, window, documents)
    assert called == ["flash", "flash_sums", "flash_queries", "flash_keys"]


@needs_compiler
def test_a_gpu_without_units_for_bfloat16_computes_whole_matrices(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_flash", lambda *_: pytest.fail("it has none"))
    monkeypatch.setattr(Device, "compute_capability", "75")
    in_tiles(cupy, *TILES[1])


@needs_compiler
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
