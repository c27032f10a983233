"""Codecs by themselves: casts, quantisation, the largest entries and low rank."""

import re
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from turns import arrived, steps

from fsdpx import Int8, PowerSGD, TopK
from fsdpx.core.array import kernels
from fsdpx.core.comm import Communicator, spawn
from fsdpx.core.compression import Cast16, Codec, NoCompression, make_gradient_codec
from fsdpx.errors import ConfigError
from fsdpx.ext.compression.powersgd import write_outer_product_into
from fsdpx.testing import CodecContract

QUANTISED = {"allowed_error": 1 / 127, "error_scale": "block"}
"""Off by half a level per rank, and one of the sum."""
KINDS: dict[str, tuple[Callable[[], Codec], dict[str, Any]]] = {
    "NoCompression": (NoCompression, {}),
    "PlainInDoublePrecision": (NoCompression, {"dtype": "float64"}),
    "Ring": (lambda: NoCompression("ring"), {}),
    "Bfloat16": (lambda: Cast16("bf16"), {"allowed_error": 2**-8}),
    "Float16": (lambda: Cast16("float16"), {"allowed_error": 2**-10}),
    "TopK": (lambda: TopK(0.1), {"allowed_error": 1}),  # what does not travel is missing
    "TopKInBlocks": (lambda: TopK(0.1, block=16), {"allowed_error": 1}),
    "AllOfTopK": (lambda: TopK(1), {}),
    "PowerSGD": (PowerSGD, {}),  # of gradients that are all vectors
    "Int8": (Int8, QUANTISED),
    "UnbiasedInt8": (lambda: Int8(unbiased=True), {**QUANTISED, "allowed_error": 2 / 127}),
    "Int8InDoublePrecision": (Int8, {**QUANTISED, "dtype": "float64"}),
}
for _name, (_make, _more) in KINDS.items():
    globals()[f"Test{_name}"] = type(f"Test{_name}", (CodecContract,), {"make": staticmethod(_make), **_more})


class Forgetful(Int8):
    """Overwrites what it keeps."""

    def add_error_feedback(self, grad: Any, memory: Any, step: int) -> Any:
        memory["error"][...] = grad
        return memory["error"]


@pytest.mark.parametrize("whole", [False, True])
def test_the_contract_finds_a_codec_that_forgets(whole: bool) -> None:
    contract = type("Contract", (CodecContract,), {"make": staticmethod(Forgetful)})()
    with pytest.raises(AssertionError, match="Mismatched elements"):
        contract.test_error_feedback_loses_nothing(whole)


def test_codecs_by_name() -> None:
    assert isinstance(make_gradient_codec(None, "float32", "float32"), NoCompression)
    assert isinstance(make_gradient_codec("plain", "float32", "float32"), NoCompression)
    assert make_gradient_codec("ring", "float32", "float32").algorithm == "ring"
    assert make_gradient_codec("fp16", "float32", "float32").dtype == np.float16
    assert make_gradient_codec(None, "bf16", "float32").dtype == ml_dtypes.bfloat16
    assert make_gradient_codec("topk", "float32", "float32").fraction == 0.01
    mine = Int8(unbiased=True)
    assert make_gradient_codec(mine, "float32", "float32") is mine
    assert dict(NoCompression().memory_sizes(3)) == {}


FRACTIONS = 0, -0.1, 1.01, float("nan"), True, "1"
OPTIONS = [("warmup", -1), ("warmup", 1.5), ("block", 0), ("block", 1 << 17)]
WRONG = [
    (partial(make_gradient_codec, "zip", "float32", "float32"), "unknown codec 'zip'"),
    (partial(make_gradient_codec, 3, "float32", "float32"), "compression=3 is no Codec"),
    (partial(NoCompression, "tree"), "ring"),
    (partial(Cast16, "float32"), "16-bit"),
    *((partial(TopK, f), f"TopK(fraction={f!r}): the share of elements that travel, in (0, 1]") for f in FRACTIONS),
    *((partial(TopK, 0.1, **{name: value}), f"TopK({name}={value}): a number") for name, value in OPTIONS),
    # of TopK once, and no option any more
    (partial(TopK, 0.1, momentum=0.9), "TopK(momentum=...): no such option: fraction, warmup, block"),
    *((partial(PowerSGD, r), f"PowerSGD(rank={r}): a number of columns, 1 or more") for r in (0, -1, 1.5, True)),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[words.partition(":")[0] for _, words in WRONG])
def test_bad_codecs_and_options_are_named(make: Callable[[], Codec], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


SHAPES = ((5,), (12, 20), (20,), (3, 2), (8, 4, 3, 3), (7,))
"""Vectors, a matrix, one that would be no smaller, and a convolution."""
N = sum(map(prod, SHAPES))


def low_rank_gradient(rank: int, step: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(N).astype(dtype)


def uneven(size: int) -> list[int]:
    cuts = [N * r * r // size**2 for r in range(size + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
def test_what_arrived_and_what_is_kept_is_what_was_given(size: int, whole: bool, rank: int) -> None:
    count, codec, moved = 4, PowerSGD(rank).for_shapes(SHAPES), dict[int, Any]()
    found = steps(codec, size, count, whole, low_rank_gradient, uneven(size), moved)
    sent = sum(arrived(found, step, whole) for step in range(count))
    kept = sum(memory["error"].astype(np.float64) for _, memory in found)
    given = sum(low_rank_gradient(r, step).astype(np.float64) for r in range(size) for step in range(count))
    np.testing.assert_allclose(sent + kept, given, atol=2e-5 * size)
    assert np.abs(sent - given).max() > 0.1
    assert len({memory["basis"].tobytes() for _, memory in found}) == 1
    if size > 1:
        for rank, traffic in moved.items():
            parts, together = codec.predict_transfers, codec.predict_all_reduce_transfers
            said = together(N, size, rank, 4) if whole else parts(uneven(size), rank, 4)
            assert traffic["all_reduce"] == (count * len(said), count * sum(nbytes for _, nbytes in said))
            assert len(said) == 2  # all P with what travels whole, then all Q


@pytest.mark.parametrize("counts", [None, uneven(3)])
def test_matrices_of_that_rank_arrive_exactly(counts: Any) -> None:
    """The limiting case: what has no more singular values than travel is found by one step of the power method."""

    def low(rank: int, step: int) -> np.ndarray:
        rng, flat = np.random.default_rng(step), []
        for shape in SHAPES:
            left, right = rng.standard_normal((shape[0], 2)), rng.standard_normal((2, prod(shape[1:])))
            flat.append((rank + 1) * (left @ right).reshape(-1))
        return np.concatenate(flat)

    found = steps(PowerSGD(2).for_shapes(SHAPES), 3, 2, counts is None, low, counts)
    for step in range(2):
        np.testing.assert_allclose(arrived(found, step, counts is None), 6 * low(0, step), atol=1e-11)


def test_warm_starts_find_the_largest_singular_values() -> None:
    """The same matrix again and again, with nothing owed: products come to be the best ones of their rank."""
    rng = np.random.default_rng(0)
    matrix, codec = rng.standard_normal((40, 30)), PowerSGD(2).for_shapes([(40, 30)])
    u, s, v = np.linalg.svd(matrix)
    best = np.linalg.norm(matrix - u[:, :2] * s[:2] @ v[:2])

    def body(comm: Communicator) -> list[float]:
        memory, off = {name: np.zeros(n) for name, n in codec.memory_sizes(1200).items()}, []
        for _ in range(60):
            memory["error"][...] = 0
            grad = matrix.reshape(-1).copy()
            codec.all_reduce(comm, grad, np.empty(0, np.uint8), memory, what="g").wait()
            off.append(float(np.linalg.norm(grad - matrix.reshape(-1))))
        return off

    (off,) = spawn(body, 1)
    assert off[0] > 1.05 * best
    assert off[-1] == pytest.approx(best, rel=1e-3)


def test_full_rank_travels_whole_and_says_so() -> None:
    codec = PowerSGD(12).for_shapes(SHAPES)
    found = steps(codec, 2, 2, True, low_rank_gradient)
    np.testing.assert_array_equal(arrived(found, 1, True), low_rank_gradient(0, 1) + low_rank_gradient(1, 1))
    assert not found[0][1]["error"].any()
    names = {"a": (12, 20), "b": (20,), "c": (3, 2), "d": (8, 4, 3, 3), "e": (50, 50)}
    assert PowerSGD(12).get_user_note(names) == (
        "PowerSGD(rank=12): no fewer bytes for a (12, 20), c (3, 2), d (8, 4, 3, 3): whole and exact"
    )
    assert PowerSGD(1).get_user_note({"a": (12, 20), "b": (20,)}) == ""


def resnet18() -> list[tuple[int, ...]]:
    """The parameters of ResNet-18 for images of 32 x 32 and ten classes."""
    convolutions = [(64, 3, 3, 3)]
    for last, width in ((64, 64), (64, 128), (128, 256), (256, 512)):
        convolutions += [(width, last, 3, 3), *[(width, width, 3, 3)] * 3]
        if last != width:
            convolutions.append((width, last, 1, 1))
    norms = [(shape[0],) for shape in convolutions for _ in ("scale", "shift")]
    return [*convolutions, *norms, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "published"), [(1, 243), (2, 136), (4, 72)])
def test_bytes_of_resnet_18_are_as_published(rank: int, published: int) -> None:
    shapes = resnet18()
    size = sum(map(prod, shapes))
    codec, plain = PowerSGD(rank).for_shapes(shapes), NoCompression()
    sent = sum(nbytes for _, nbytes in codec.predict_all_reduce_transfers(size, 16, 15, 4))
    assert round(plain.predict_all_reduce_transfers(size, 16, 15, 4)[0][1] / sent) == published


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rank", [1, 3])
def test_both_forms_of_products_give_the_same_bits(dtype: str, rank: int) -> None:
    """Of parts that begin and end within rows, also where they are taken off."""
    rng = np.random.default_rng(rank)
    p, q = (rng.standard_normal((n, rank)).astype(dtype) for n in (7, 11))
    for at, size in ((0, 77), (5, 3), (9, 24), (33, 44)):
        forms = []
        for way in ("plain", "numba"):
            out = np.arange(2 * size, dtype=dtype)
            with kernels.use_mode(way):
                write_outer_product_into(np, p, q, at, out[:size])
                write_outer_product_into(np, p, q, at, out[size:], subtract=True)
            forms.append(out)
        np.testing.assert_array_equal(*forms)
        np.testing.assert_allclose(forms[0][:size], (p @ q.T).reshape(-1)[at : at + size], rtol=1e-4, atol=1e-5)
