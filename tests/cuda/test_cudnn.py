"""Attention by cuDNN: what is told to it, what it is used for, and that it is not used where it computes wrongly."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from amount import in_full
from cudnn_stand_in import Cudnn, Graph
from stand_in import Cublas, Cupy, Device, ndarray

from fsdpx import nn, optim, spawn
from fsdpx.array import kernels
from fsdpx.cuda import attention, gemm
from fsdpx.cuda.attention import AttentionCase, described
from fsdpx.cuda.kernels import on_gpu

BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3}
Make = Callable[..., Cudnn]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """CuPy, and cuDNN as one likes it."""
    for name, module in Cupy().modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    found: dict[int, Cublas] = {}  # one for each thread, as handles are
    monkeypatch.setattr(gemm, "_library", lambda: found.setdefault(threading.get_ident(), Cublas()))
    Device(0).use()

    def made(**how: Any) -> Cudnn:
        library = Cudnn(**how)
        monkeypatch.setitem(sys.modules, "cudnn", library)
        monkeypatch.setattr(attention, "_plans", {})
        vars(attention._handles).clear()
        attention.library.cache_clear()
        return library

    yield made
    attention.library.cache_clear()


def numbers(*shape: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    """(B, H, T, D) with time before heads in memory, as products give them."""
    b, h, t, d = shape
    return np.random.default_rng(seed).standard_normal((b, t, h, d)).astype(dtype).swapaxes(1, 2)


def packed(b: int, h: int, t: int, d: int, dtype: Any = ml_dtypes.bfloat16) -> list[np.ndarray]:
    """q, k and v as parts of what one product gave."""
    whole = np.random.default_rng(5).standard_normal((b, t, 3, h, d)).astype(dtype)
    return list(whole.transpose(2, 0, 3, 1, 4))


CASES: dict[str, tuple[list[np.ndarray], tuple[Any, ...]]] = {
    "packed": (packed(2, 3, 33, 16), (True, 0.25)),
    "packed float16": (packed(2, 3, 33, 16, np.float16), (True, 0.25)),
    "across": ([numbers(2, 3, 17, 8), numbers(2, 3, 40, 8, seed=1), numbers(2, 3, 40, 8, seed=2)], (False, 0.3)),
    "shared keys": ([numbers(2, 6, 31, 24), numbers(2, 2, 31, 24, seed=1), numbers(2, 2, 31, 24, seed=2)], (True, 0.2)),
    "window": ([numbers(1, 4, 50, 32), numbers(1, 1, 50, 32, seed=1), numbers(1, 1, 50, 32, seed=2)], (True, 0.2, 7)),
    "one sample, one head": (packed(1, 1, 16, 128), (True, 0.1)),
}


def close(got: Any, want: Any, bound: float) -> None:
    got, want = (np.asarray(a.get() if hasattr(a, "get") else a, float) for a in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * abs(want).max())


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_host_gives(make: Make, name: str) -> None:
    library, (arrays, how) = make(), CASES[name]
    there, bound = [ndarray(a) for a in arrays], BOUNDS[arrays[0].dtype.name]
    exact = [a.astype(np.float64) for a in arrays]
    o, lse = kernels.attention(sys.modules["cupy"], *there, *how)
    want = kernels.attention(np, *exact, *how)
    assert (o.dtype, lse.dtype, lse.shape) == (arrays[0].dtype, np.float32, arrays[0].shape[:3])
    assert o.swapaxes(1, 2).flags.c_contiguous
    close(o, want[0], bound)
    close(lse, want[1], 1e-3)
    do = numbers(*arrays[0].shape, seed=9, dtype=arrays[0].dtype)
    for given in (do, np.ascontiguousarray(do)):  # time before heads, and heads before time
        d = kernels.attention_backward(sys.modules["cupy"], *there, o, lse, ndarray(given), *how)
        like = kernels.attention_backward(np, *exact, *want, do.astype(float), *how)
        for i in range(3):
            close(d[i], like[i], 2 * bound)
        assert isinstance(d, tuple) == isinstance(like, tuple)
        if not isinstance(d, tuple):
            assert d.strides == tuple(n // 4 for n in like.strides)
    assert (library.built, library.executed) == (2, 2 + 3)  # one proof, both ways


def test_what_it_does_not_take_is_left_to_others(make: Make) -> None:
    library = make()
    q = ndarray(numbers(2, 4, 32, 16))

    def taken(q: Any, *rest: Any) -> bool:
        return attention.fused("attention", (q, q, q, *(rest or (True, 0.2)))) is not None

    assert taken(q)
    assert taken(q, True, 0.2, 3)
    assert taken(q, True, 0.2, 3, None)
    assert library.built == 4
    for other in (
        ndarray(numbers(2, 4, 32, 16, dtype=np.float32)),
        ndarray(numbers(2, 4, 32, 12)),  # channels
        ndarray(numbers(2, 4, 32, 136)),
        ndarray(numbers(2, 4, 15, 16)),  # a text that is generated
        ndarray(numbers(2, 4, 32, 32)[..., ::2]),
        ndarray(numbers(2, 4, 32, 20)[..., 4:]),  # rows that begin anywhere
        ndarray(numbers(2, 4, 32, 16)[:0]),
        ndarray(np.broadcast_to(numbers(2, 1, 32, 16), (2, 4, 32, 16))),
        numbers(2, 4, 32, 16),  # on the host
    ):
        assert not taken(other), getattr(other, "shape", other)
    assert not taken(q, True, 0.2, 0, np.zeros((2, 32), int))  # documents in one row
    k = ndarray(numbers(2, 3, 32, 16))
    assert attention.fused("attention", (q, k, k, True, 0.2)) is None  # 4 heads do not share 3
    assert library.built == 4
    with kernels.use("plain"):
        kernels.attention(sys.modules["cupy"], q, q, q, True, 0.7)
    assert library.built == 4


def test_at_most_so_many_plans_are_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make()
    monkeypatch.setattr(attention, "MOST_PLANS", 2)
    made = [ndarray(numbers(1, 1, t, 8)) for t in (16, 17, 18, 17)]
    assert [attention.fused("attention", (q, q, q, True, 0.2)) is None for q in made] == [False, False, True, False]
    assert library.built == 4


def test_without_a_library_or_a_plan_the_kernels_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    q = ndarray(numbers(1, 2, 16, 8))
    make(refuses=True)
    assert attention.fused("attention", (q, q, q, True, 0.2)) is None
    assert on_gpu("attention", (q, q, q, True, 0.2)) is not None
    make(fails="CUDNN_STATUS_BAD_PARAM")
    words = r"cuDNN 9.19.0, .* cannot plan attention of bfloat16 .* \(CUDNN_STATUS_BAD_PARAM\): it is not used for it"
    with pytest.warns(RuntimeWarning, match=words):
        assert attention.fused("attention", (q, q, q, True, 0.3)) is None
    make(error="libcudnn.so.9: cannot open shared object file")
    assert attention.fused("attention", (q, q, q, True, 0.2)) is None
    words = "cuDNN's frontend finds no cuDNN (libcudnn.so.9: cannot open shared object file): pip install"
    assert attention.library().words.startswith(words)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    attention.library.cache_clear()
    assert attention.library().words.endswith("is not installed: pip install 'fsdpx[cudnn12]' or 'fsdpx[cudnn13]'")


@in_full
def test_a_wrong_plan_is_told_once_and_not_used(make: Make) -> None:
    """One position too many in a window of 40."""
    q = ndarray(numbers(2, 2, 200, 32))
    make(off=1)
    words = r"cuDNN 9.19.0, frontend 1.26.0 computes the output and .* dv of attention wrongly for bfloat16 \(2, 2, "
    with pytest.warns(RuntimeWarning, match=words):
        assert attention.fused("attention", (q, q, q, True, 0.2, 40)) is None
    assert attention.fused("attention_backward", (q, q, q, q, q, q, True, 0.2, 40)) is None  # a warning is an error
    assert attention.fused("attention", (q, q, q, True, 0.2)) is not None


def test_strides_that_are_told_wrongly_show(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads before time where time lies before heads."""
    make()
    monkeypatch.setattr(attention, "_dense", lambda shape: (shape[1] * shape[2] * shape[3], shape[2] * shape[3],
                                                            shape[3], 1))  # fmt: skip
    q = ndarray(numbers(2, 3, 20, 8))
    with pytest.warns(RuntimeWarning, match="computes the output and dq and dk and dv of attention wrongly"):
        assert attention.fused("attention", (q, q, q, False, 0.2)) is None


def train(comm: Any, model: nn.Layer, device: str, steps: int = 3, **more: Any) -> list[float]:
    options: dict[str, Any] = {"loss": nn.CrossEntropy(), "optimizer": optim.SGD(lr=0.1), "precision": "bf16"}
    trainer = model.as_distributed(comm=comm, device=device, strategy="fsdp", **options, **more)
    text = np.random.default_rng(comm.rank).integers(0, 31, (2, 21))
    return [float(trainer.step(text[:, :-1], text[:, 1:])) for _ in range(steps)]


@in_full
def test_in_a_graph_it_has_the_same_bits(make: Make) -> None:
    library = make()
    want, got = (
        spawn(lambda comm, g=g: train(comm, nn.GPT(31, 32, 1, 2, 20), "cuda", 4, cuda_graphs=g), 1)[0]
        for g in (False, True)
    )
    assert got == want
    assert library.built == 2
    assert library.executed < 2 + 2 * (4 + 4), "the last steps were replayed"


@in_full
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_training_equals_the_host(make: Make, kind: str) -> None:
    def model() -> nn.Layer:
        if kind == "gpt":
            return nn.GPT(31, 32, 1, 2, 20)
        return nn.Llama(31, 32, 1, 4, 20, kv_heads=2, hidden=48, window=9)

    library = make()
    want = spawn(lambda comm: train(comm, model(), "cpu"), 2)[0]
    got = spawn(lambda comm: train(comm, model(), "cuda"), 2)[0]
    np.testing.assert_allclose(got, want, rtol=1e-2)
    assert library.built == 2
    assert library.executed == 2 + 2 * 2 * 3


def test_cudnn_takes_the_graphs() -> None:
    """The library itself checks sizes, strides and names of arguments; it needs no GPU for that."""
    cudnn = pytest.importorskip("cudnn", reason="no cuDNN frontend: graphs were not shown to it")
    try:
        version = cudnn.backend_version()
    except RuntimeError as error:
        pytest.skip(f"no cuDNN: {error}")
    if version < 92200:  # the frontend's backward asks for more than earlier ones have
        pytest.skip(f"cuDNN {version} is older than 9.22: graphs were not shown to it")
    for name, (arrays, (causal, scale, *window)) in CASES.items():
        strides = tuple(tuple(n // 2 for n in a.strides) for a in arrays)
        shapes = arrays[0].shape, arrays[1].shape
        case = AttentionCase(arrays[0].dtype.name, *shapes, strides, causal, scale, *(window or [0]), gpu=0)
        for backward in (False, True):
            described(cudnn, case, backward, sm_version=90).build_operation_graph()
        assert name


def test_the_stand_in_has_the_arguments_of_the_library() -> None:
    cudnn = pytest.importorskip("cudnn", reason="no cuDNN frontend: the stand-in was not compared with it")
    for name in ("sdpa", "sdpa_backward"):
        names = inspect.signature(getattr(Graph, name)).parameters
        assert all(f" {one}: " in getattr(cudnn.pygraph, name).__doc__ for one in names if one != "self"), name
