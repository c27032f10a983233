"""16 bits: casts on the bits of every number, and products within the rounding of their formats in every layout."""

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, lay
from references import FLUSHED, Case, agree, attend, attention_slopes

from fsdpx.core.array import blas, kernels, parallel
from fsdpx.core.array.blas import products
from fsdpx.core.array.kernels.compiled import attention16
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.random import NumberRange
from fsdpx.errors import ConfigError
from fsdpx.ext.half import matmul, onednn

BF16 = parse_dtype("bf16")
LIBRARIES = list(matmul.list_16bit_matmul_libraries())
SIZES = st.one_of(st.integers(0, 5), st.sampled_from([31, 32, 33, 64, 65, 130]))


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    matmul.select_library(None)


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> None:
    matmul.select_library(request.param)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(BF16)


@pytest.mark.parametrize("wide", [True, False])
@settings(max_examples=examples(40), deadline=None)
@given(SIZES, SIZES, SIZES, st.tuples(*[st.sampled_from(LAYOUTS)] * 2), st.integers(0, 99))
def test_products_biases_and_sums(wide, m, k, n, layouts, seed) -> None:
    """Terms are exact in float32; sums are rounded k times there, and a 16-bit result once more."""
    a, b, bias = normal((m, k), seed), normal((k, n), seed + 1), normal((n,), seed + 2)
    exact = [x.astype("f8") for x in (a, b, bias)]
    want = exact[0] @ exact[1]
    size = np.abs(exact[0]) @ np.abs(exact[1]) + np.abs(exact[2]) + 1
    bound = (k + 4) * 2.0**-23 * size + (0 if wide else 2.0**-8 * (np.abs(want) + np.abs(exact[2]) + 1))
    for name in LIBRARIES:
        matmul.select_library(name)
        out = np.full((m, n), np.nan, np.float32 if wide else BF16)
        matmul.multiply_half_into(out, lay(a, layouts[0]), lay(b, layouts[1]), bias=bias)
        assert np.all(np.abs(out.astype("f8") - want - exact[2]) <= bound), name
        out[...] = 1
        matmul.multiply_half_into(out, lay(a, layouts[0]), lay(b, layouts[1]), accumulate=True)
        assert np.all(np.abs(out.astype("f8") - want - 1) <= bound), name


def test_inf_and_nan_go_where_they_belong(library: None) -> None:
    a, b = normal((6, 40), 0), normal((40, 5), 1)
    a[1, 3], b[7, 2] = np.inf, np.nan
    out = np.empty((6, 5), np.float32)
    matmul.multiply_half_into(out, a, b)
    with np.errstate(invalid="ignore"):
        want = a.astype("f8") @ b.astype("f8")
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(want))


def test_the_bits_of_a_product_are_the_same_wherever_arrays_lie(library: None) -> None:
    a, b = normal((33, 65), 0), normal((65, 31), 1)
    seen = set()
    for shift in (0, 1, 3, 17):
        x = np.empty(a.size + shift, BF16)[shift:].reshape(a.shape)
        x[...] = a
        out = np.empty((33, 31), np.float32)
        matmul.multiply_half_into(out, x, b)
        seen.add(out.tobytes())
    assert len(seen) == 1


def test_cut_among_threads(library: None) -> None:
    a, b = normal((700, 300), 0), normal((300, 400), 1)
    want, got = np.empty((700, 400), np.float32), np.zeros((700, 400), np.float32)
    matmul.multiply_half_into(want, a, b)
    blas.set_product_threads(2)
    matmul.multiply_half_into(got, a, b, accumulate=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_formats_of_one_width_do_not_share_a_product() -> None:
    """A primitive is kept for its shapes and strides, and bfloat16 and float16 have the same ones."""
    library = onednn.load_onednn()
    if library is None or not matmul.list_half_instructions("float16"):
        pytest.skip("no oneDNN here that computes float16")
    x, y = np.arange(15.0).reshape(3, 5), np.arange(10.0).reshape(5, 2)
    for kind in ("bfloat16", "float16", "bfloat16"):
        out = np.empty((3, 2), np.float32)
        library.multiply_half_into(out, x.astype(parse_dtype(kind)), y.astype(parse_dtype(kind)), False, None)
        assert out.tolist() == (x @ y).tolist(), kind


@pytest.fixture
def pretend_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A processor with these flags and instructions, and a oneDNN whose large results have an error."""

    def change(flags: str, *instructions: str, error: float = 0.0) -> None:
        def multiply(out, a, b, accumulate, bias):
            out[...] = a.astype("f4") @ b.astype("f4")
            out[-1, -1] += error * (out.size > 100)

        library = SimpleNamespace(name="oneDNN", path="lib.so", version="0", multiply_half_into=multiply)
        monkeypatch.setattr(onednn, "load_onednn", lambda: library)
        monkeypatch.setattr(matmul, "read_cpuinfo_field", lambda what: flags)
        monkeypatch.setattr(matmul, "list_half_instructions", lambda kind="bfloat16": instructions)
        matmul._choose_default_library.cache_clear()

    yield change
    matmul._choose_default_library.cache_clear()


def test_a_library_that_computes_wrongly_is_not_taken(pretend_processor: Callable[..., None]) -> None:
    pretend_processor("avx512bw", "avx512_bf16", error=0.1)
    with pytest.warns(RuntimeWarning, match=r"oneDNN in lib.so \(0\) multiplies wrongly"):
        assert matmul.get_selected_library() == matmul.WIDENED


def test_without_instructions_operands_are_widened(pretend_processor: Callable[..., None]) -> None:
    pretend_processor("avx512bw")
    assert matmul.get_selected_library() == matmul.WIDENED


@pytest.mark.parametrize(("flags", "here"), [
    ("sse2 avx2 fma", ["widened"]), ("avx2 avx512f avx512bw", ["onednn", "widened"]),
    ("avx2 avx_vnni avx_ne_convert", ["onednn", "widened"]),
])  # fmt: skip
def test_onednn_is_left_out_where_it_has_no_product_for_the_processor(pretend_processor, flags, here) -> None:
    pretend_processor(flags, "amx_bf16")
    assert list(matmul.list_16bit_matmul_libraries()) == here
    assert matmul.get_selected_library() == here[0]
    if "onednn" not in here:
        with pytest.raises(ConfigError, match=r"products by .onednn. are not available: choose one of widened"):
            matmul.select_library("onednn")


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"16-bit products by 'cublas' are not available: choose one of .*widened"):
        matmul.select_library("cublas")


WAYS = ["plain", "numba", *(["words"] if attention16.has_bf16_dot_instruction() else [])]
"""Attention as array code, widened, and by the instruction for pairs where the processor has it."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module = importlib.import_module("fsdpx.core.array.kernels.compiled.dot_product_attention")
    monkeypatch.setattr(module, "has_bf16_dot_instruction", lambda: request.param == "words")
    with kernels.use_mode("plain" if request.param == "plain" else "default"):
        yield request.param


ERROR = 2.0**-22 * (1 - 2.0**-8)
"""What float32 may lose per term: a sum has some terms. The result is rounded with it, by 2^-8 more."""


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from([1, 2, 31, 33, 64, 65, 130])),
    more=st.sampled_from([0, 1, 40]),
    width=st.sampled_from([1, 4, 7, 8, 32, 40, 64]),
    seed=st.integers(0, 99),
)
def test_attention_against_float64(way, causal, sizes, more, width, seed) -> None:
    """Ragged sizes, keys of another length, and views as a layer passes them."""
    b, h, t = sizes
    full, scale = t + (0 if causal else more), 0.7 / width**0.5
    qkv = normal((b, full, 3, h, width), seed).transpose(2, 0, 3, 1, 4)
    q, k, v, do = qkv[0, :, :, :t], qkv[1], qkv[2], normal((b, h, t, width), seed + 1)
    o, lse = kernels.attention(np, q, k, v, causal, scale)
    d = kernels.attention_backward(np, q, k, v, o, lse, do, causal, scale)
    assert {a.dtype for a in (o, *d)} == {BF16}
    q, k, v, do, held = (a.astype("f8") for a in (q, k, v, do, o))
    scores, want, sizes = attend(q, k, scale, np.tri(t, full, dtype=bool) if causal else True)
    p = np.exp(scores - want[..., None])
    np.testing.assert_allclose(lse, want, atol=ERROR * np.max(sizes, initial=0))
    results = attention_slopes(q, k, v, held, do, p, sizes, scale)
    bounds = (p @ v, (p * sizes) @ np.abs(v), p @ np.abs(v)), *zip(*results, strict=True)
    for name, got, (want, size, rounded) in zip(("o", "dq", "dk", "dv"), (o, *d), bounds, strict=True):
        agree(got, Case(name, (), want, size, rounded, FLUSHED), ERROR)
    assert way != "words" or o.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_does_not_depend_on_threads_or_on_where_arrays_lie(way: str, threads: int) -> None:
    q, k, v, do = (normal((2, 3, 70, 8), seed) for seed in range(4))
    want = kernels.attention(np, q, k, v, True, 0.3)
    slopes = kernels.attention_backward(np, q, k, v, *want, do, True, 0.3)
    moved = [np.concatenate([a, a], axis=-1)[..., :8] for a in (q, k, v)]
    parallel.set_threads(threads)
    got = kernels.attention(np, *moved, True, 0.3)
    again = kernels.attention_backward(np, *moved, *got, do, True, 0.3)
    for one, other in zip((*got, again), (*want, slopes), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("way", WAYS[1:], indirect=True)
def test_attention_ends_where_a_position_sees_no_more(way: str) -> None:
    """NaN and Inf in later blocks touch no earlier row, and stay NaN in their own."""
    q, k, v = (normal((1, 1, 200, 8), seed) for seed in range(3))
    clean, lse = kernels.attention(np, q, k, v, True, 0.3)
    for a, value in ((q, np.nan), (k, np.inf), (v, np.nan)):
        a[0, 0, 130] = value
    with np.errstate(invalid="ignore"):
        o, got = kernels.attention(np, q, k, v, True, 0.3)
    assert o[0, 0, :128].tobytes() == clean[0, 0, :128].tobytes()
    assert got[0, 0, :128].tobytes() == lse[0, 0, :128].tobytes()
    assert np.isnan(o[0, 0, 130].astype("f4")).all()


def test_words_are_for_processors_that_have_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(name, raising=False)
    for flags, has in (("fma avx512f", False), ("avx512f avx512_bf16", True)):
        monkeypatch.setattr(attention16, "read_cpuinfo_field", lambda field, flags=flags: flags)
        assert attention16.has_bf16_dot_instruction.__wrapped__() is has
    monkeypatch.setenv("NUMBA_CPU_NAME", "skylake")
    assert not attention16.has_bf16_dot_instruction.__wrapped__()


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 5, 2), (64, 32, 32), (32, 64, 32), (7, 128, 9), (0, 3, 2)])
@pytest.mark.parametrize("wide", [False, True])
def test_small_products_are_widened_multiplied_and_rounded_once(m: int, k: int, n: int, wide: bool) -> None:
    if not blas.get_gemm_address(np.dtype("f4")):
        pytest.skip("NumPy alone multiplies")
    a, b, bias = normal((m, k), 0), normal((n, k), 1).T, normal((n,), 2)
    exact, unit = a.astype("f8") @ b.astype("f8"), 0 if wide else 2.0**-8
    bound = (k + 2) * 2.0**-23 * (np.abs(a.astype("f8")) @ np.abs(b.astype("f8")) + np.abs(bias.astype("f8")))
    for x, y in ((a, b), (np.asfortranarray(a), b), (a, np.ascontiguousarray(b)), (a[::-1], b)):
        out = np.zeros((m, n), np.float32 if wide else BF16)
        flip = slice(None, None, -1) if x.strides[0] < 0 else slice(None)
        is_supported = bool(x.strides[0] >= 0 or x.flags.c_contiguous)
        assert products.try_multiply_small_bfloat16_into(out, x, y, False, bias) == is_supported
        matmul.multiply_half_into(out, x, y, bias=bias)
        want = exact[flip] + bias.astype("f8")
        assert np.all(np.abs(out.astype("f8") - want) <= bound[flip] + unit * np.abs(want))
        want = out.astype("f8") + exact[flip]
        matmul.multiply_half_into(out, x, y, accumulate=True)
        assert np.all(np.abs(out.astype("f8") - want) <= bound[flip] + (2.0**-23 + unit) * np.abs(want))


def test_what_is_large_is_no_small_product() -> None:
    a, b = normal((1024, 64), 0), normal((64, 64), 1)
    assert not products.try_multiply_small_bfloat16_into(np.empty((1024, 64), BF16), a, b, False, None)
    of_float16 = [np.ones((4, 4), np.float16) for _ in range(3)]
    assert not products.try_multiply_small_bfloat16_into(*of_float16, False, None)


SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(100))
both = pytest.mark.parametrize("half", [np.dtype(np.float16), BF16], ids=lambda d: d.name)


def every(half):
    return np.arange(1 << 16, dtype=np.uint16).view(half)


def same(got, want):
    with np.errstate(invalid="ignore"):  # signalling NaN
        nan, seen = np.isnan(want.astype(np.float64)), np.isnan(got.astype(np.float64))
    bits = np.dtype(f"u{got.itemsize}")
    assert np.array_equal(seen, nan)
    assert np.array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


def demand_rounded(x, half):
    with np.errstate(all="ignore"):
        same(kernels.cast_float_to_dtype(np, x, half), x.astype(half))


@both
def test_every_number_is_widened_exactly(mode, half):
    h = every(half)
    with np.errstate(invalid="ignore"):
        same(kernels.to_float32(np, h), h.astype(np.float32))


@both
def test_numbers_around_every_tie_and_at_the_ends_are_rounded_to_even(mode, half):
    h = every(half)
    exact = np.unique(h[np.isfinite(h.astype(np.float32))].astype(np.float64))
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)  # 1 bit more than 16-bit floats have: exact
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    demand_rounded(x, half)
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.array([0.0, -0.0, np.inf, -np.inf, tiny, -tiny, 1e-38, 65519.9, 65520, 65536, 3.4e38, -3.4e38], np.float32)
    demand_rounded(x, half)


@both
def test_nan_stays_nan_whatever_its_bits(mode, half):
    x = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0x7FFFFFFF, 0x7F80FFFF], np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert np.isnan(kernels.cast_float_to_dtype(np, x, half).astype(np.float32)).all()


@both
@SETTINGS
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=70), mode=st.sampled_from(["plain", "numba"]))
def test_any_bits_are_rounded_as_ml_dtypes_and_numpy_round(half, bits, mode):
    with kernels.use_mode(mode):
        demand_rounded(np.array(bits, np.uint32).view(np.float32), half)


@both
def test_sums_are_made_in_float32(mode, half):
    rng = np.random.default_rng(0)
    h, total = rng.normal(size=1001).astype(half), rng.normal(size=1001).astype(np.float32)
    want = total + h.astype(np.float32)
    kernels.add_widened(np, h, total)
    same(total, want)


@both
def test_strided_and_wider_arrays(mode, half):
    x = np.linspace(-3, 3, 40)
    out = np.zeros(40, half)[::2]
    kernels.store(np, x[::2], out)
    same(out.copy(), x[::2].astype(half))


def chances(start, stop):
    """The 16 bits of each place of a stream, one by one, from the definition."""
    key0, key1 = (int(key) & 0xFFFFFFFF for key in NumberRange(3, "a", 0, 1).keys)

    def mix(n):
        n = (n ^ n >> 16) * 0x7FEB352D & 0xFFFFFFFF
        n = (n ^ n >> 15) * 0x846CA68B & 0xFFFFFFFF
        return n ^ n >> 16

    return np.array([mix(mix(p & 0xFFFFFFFF ^ key0) ^ key1 ^ p >> 32) >> 16 for p in range(start, stop)], np.uint32)


@pytest.mark.parametrize(("start", "size"), [(0, 1), (1, 2), (3, 9), (5, 1000), (2, 0), (2**32 - 5, 9), (2**33, 70)])
def test_rounded_by_chance_bit_by_bit(mode, start, size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    out = np.empty(size, BF16)
    kernels.round_randomly(np, x, out, NumberRange(3, "a", start, start + size))
    want = (x.view(np.uint32) + chances(start, start + size)) >> 16
    np.testing.assert_array_equal(out.view(np.uint16), want.astype(np.uint16))


def test_rounding_by_chance_is_right_in_the_mean_and_moves_to_a_neighbor(mode):
    n = 1 << 16
    for value in (1.0 + 2.0**-10, -3.3, 1e-40, 65504.7):
        x, out = np.full(n, value, np.float32), np.empty(n, BF16)
        kernels.round_randomly(np, x, out, NumberRange(0, str(value), 0, n))
        got = out.astype(np.float64)
        low, high = np.unique(got)
        assert low < np.float32(value) < high
        assert high == np.nextafter(np.float64(low).astype(BF16), BF16.type(np.inf)).astype(np.float64)
        deviation = (high - low) / 2 / n**0.5
        assert abs(got.mean() - np.float64(np.float32(value))) < 5 * deviation


def test_what_is_exact_or_no_number_stays_when_rounded_by_chance(mode):
    h = every(BF16)
    out = np.empty_like(h)
    with np.errstate(invalid="ignore"):
        kernels.round_randomly(np, h.astype(np.float32), out, NumberRange(0, "x", 0, h.size))
        same(out, h)
