"""Codecs by themselves: casts, quantisation, the largest entries and low rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from amount import in_full

from fsdpx.array import kernels
from fsdpx.codecs import Cast, Codec, Int8, Plain, PowerSGD, TopK, codec
from fsdpx.codecs.powersgd import outer
from fsdpx.comm import Communicator, Handle, spawn, split_evenly
from fsdpx.comm.communicator import Counted, Counters
from fsdpx.errors import ConfigError
from fsdpx.testing import CodecContract


class TestPlain(CodecContract):
    def make(self) -> Codec:
        return Plain()


class TestPlainInDoublePrecision(TestPlain):
    dtype = "float64"


class TestRing(CodecContract):
    def make(self) -> Codec:
        return Plain("ring")


class TestBfloat16(CodecContract):
    error = 2**-8

    def make(self) -> Codec:
        return Cast("bf16")


class TestFloat16(CodecContract):
    error = 2**-10

    def make(self) -> Codec:
        return Cast("float16")


class TestInt8(CodecContract):
    error = 1 / 127

    def make(self) -> Codec:
        return Int8()

    def _close(self, got: np.ndarray, size: int, part: slice, n: int, error: float) -> None:
        """Off by a share of the largest of a block, not of each number: half a level per rank, and one of the sum."""
        terms = np.array([self._gradient(n, rank) for rank in range(size)], np.float64)
        assert got.shape == terms.sum(0)[part].shape
        allowed = error * np.abs(terms).max(1, initial=0).sum()
        assert np.all(np.abs(got - terms.sum(0)[part]) <= allowed)


class TestUnbiasedInt8(TestInt8):
    error = 2 / 127

    def make(self) -> Codec:
        return Int8(unbiased=True)


class TestInt8InDoublePrecision(TestInt8):
    dtype = "float64"


class TestTopK(CodecContract):
    error = 1  # what does not travel is missing

    def make(self) -> Codec:
        return TopK(0.1, momentum=0.9)


class TestTopKInBlocks(TestTopK):
    def make(self) -> Codec:
        return TopK(0.1, momentum=0.9, block=16)


class TestAllOfTopK(CodecContract):
    def make(self) -> Codec:
        return TopK(1)


class TestPowerSGD(CodecContract):
    """Of gradients that are all vectors."""

    def make(self) -> Codec:
        return PowerSGD()


class Feedback(Cast):
    """What rounding takes from a gradient is kept, and added to the next one (Seide et al. 2014)."""

    def memory(self, size: int) -> Mapping[str, int]:
        return {"error": size}

    def reduce(
        self,
        comm: Communicator,
        grad: Any,
        out: Any,
        counts: Sequence[int],
        scratch: Any,
        memory: Mapping[str, Any],
        *,
        what: str,
    ) -> Handle:
        error = memory["error"]
        grad += error
        error[...] = grad - grad.astype(self.dtype).astype(grad.dtype)
        return super().reduce(comm, grad, out, counts, scratch, memory, what=what)


class TestFeedback(CodecContract):
    error = 2**-8

    def make(self) -> Codec:
        return Feedback("bf16")


def total_of_steps(codec: Codec, steps: int, size: int = 3, n: int = 7) -> np.ndarray:
    """The sum over ranks and steps of the same gradients, of numbers that bfloat16 does not have."""

    def body(comm: Communicator) -> np.ndarray:
        counts = split_evenly(n, size)
        scratch, total = np.empty(codec.scratch(n, size), np.uint8), np.zeros(counts[comm.rank], np.float64)
        memory = {name: np.zeros(elements, np.float32) for name, elements in codec.memory(n).items()}
        out = np.empty(counts[comm.rank], np.float32)
        for _ in range(steps):
            codec.reduce(comm, gradient(n, comm.rank), out, counts, scratch, memory, what="g").wait()
            total += out
        return total

    return np.concatenate(spawn(body, size, timeout=60))


def gradient(n: int, rank: int) -> np.ndarray:
    return (1 + np.arange(n) / 7 + rank / 3 + 1e-3).astype(np.float32)


@in_full
def test_a_codec_with_state_is_one_file() -> None:
    exact = sum(gradient(7, rank).astype(np.float64) for rank in range(3))
    off = {}
    for name, made in {"feedback": Feedback("bf16"), "cast": Cast("bf16")}.items():
        off[name] = [np.abs(total_of_steps(made, steps) / steps - exact).max() for steps in (1, 10, 200)]
    assert off["feedback"][1] < off["feedback"][0] / 3
    assert off["feedback"][2] < off["feedback"][0] / 30
    assert off["cast"][2] == pytest.approx(off["cast"][0], rel=1e-3)


def test_codecs_by_name() -> None:
    assert isinstance(codec(None, "float32", "float32"), Plain)
    assert isinstance(codec("plain", "float32", "float32"), Plain)
    assert codec("ring", "float32", "float32").algorithm == "ring"
    assert codec("fp16", "float32", "float32").dtype == np.float16
    assert codec(None, "bf16", "float32").dtype == ml_dtypes.bfloat16
    assert codec("topk", "float32", "float32").fraction == 0.01
    mine = Feedback("bf16")
    assert codec(mine, "float32", "float32") is mine
    assert dict(Plain().memory(3)) == {}
    for bad, words in {"zip": "unknown codec 'zip'", 3: "codec=3 is no Codec"}.items():
        with pytest.raises(ConfigError, match=words):
            codec(bad, "float32", "float32")


@pytest.mark.parametrize("make", [lambda: Plain("tree"), lambda: Cast("float32")])
def test_bad_codecs_are_named(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"ring|16-bit"):
        make()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), True, "1"])
def test_a_share_outside_of_0_to_1_is_named(fraction: Any) -> None:
    words = f"TopK(fraction={fraction!r}): the share of elements that travel, in (0, 1]"
    with pytest.raises(ConfigError, match=re.escape(words)):
        TopK(fraction)


@pytest.mark.parametrize(
    "options", [{"momentum": 1.0}, {"momentum": -1}, {"warmup": -1}, {"warmup": 1.5}, {"block": 0}, {"block": 1 << 17}]
)
def test_bad_options_of_top_k_are_named(options: Any) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"TopK\({name}={options[name]}\): a number"):
        TopK(0.1, **options)


SHAPES = ((5,), (12, 20), (20,), (3, 2), (8, 4, 3, 3), (7,))
"""Vectors, a matrix, one that would be no smaller, and a convolution."""
N = sum(map(prod, SHAPES))


def low_rank_gradient(rank: int, step: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(N).astype(dtype)


def steps(codec: Any, size: int, count: int, counts: Sequence[int] | None, make: Any = low_rank_gradient) -> list[Any]:
    """What arrived in each step, what each rank keeps in the end, its traffic. counts: of a reduce; None: for all."""

    def body(comm: Communicator) -> Any:
        counters, dtype = Counters(), make(0, 0).dtype
        counted = Counted(comm, "x", counters)
        scratch, found = np.empty(codec.scratch(N, size), np.uint8), []
        memory = {name: np.zeros(n, dtype) for name, n in codec.memory(N).items()}
        for step in range(count):
            grad = make(comm.rank, step)
            out = grad if counts is None else grad[: counts[comm.rank]]
            if counts is None:
                codec.reduce_all(counted, grad, scratch, memory, what="g").wait()
            else:
                codec.reduce(counted, grad, out, counts, scratch, memory, what="g").wait()
            found.append(out.copy())
        return found, memory, {verb: (calls, nbytes) for _, verb, calls, nbytes in counters}

    return spawn(body, size, timeout=60)


def arrived(found: list[Any], step: int, counts: Any) -> np.ndarray:
    parts = [outs[step] for outs, _, _ in found]
    if counts is not None:
        return np.concatenate(parts).astype(np.float64)
    assert len({part.tobytes() for part in parts}) == 1
    return parts[0].astype(np.float64)


def uneven(size: int) -> list[int]:
    cuts = [N * r * r // size**2 for r in range(size + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
def test_what_arrived_and_what_is_kept_is_what_was_given(size: int, whole: bool, rank: int) -> None:
    count, codec, counts = 4, PowerSGD(rank).shaped(SHAPES), None if whole else uneven(size)
    found = steps(codec, size, count, counts)
    sent = sum(arrived(found, step, counts) for step in range(count))
    kept = sum(memory["error"].astype(np.float64) for _, memory, _ in found)
    given = sum(low_rank_gradient(r, step).astype(np.float64) for r in range(size) for step in range(count))
    np.testing.assert_allclose(sent + kept, given, atol=2e-5 * size)
    assert np.abs(sent - given).max() > 0.1
    assert len({memory["basis"].tobytes() for _, memory, _ in found}) == 1
    if size > 1:
        for rank, (_, _, moved) in enumerate(found):
            said = codec.moves_all(N, size, rank, 4) if whole else codec.moves(uneven(size), rank, 4)
            assert moved["all_reduce"] == (count * len(said), count * sum(nbytes for _, nbytes in said))
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

    found = steps(PowerSGD(2).shaped(SHAPES), 3, 2, counts, low)
    for step in range(2):
        np.testing.assert_allclose(arrived(found, step, counts), 6 * low(0, step), atol=1e-11)


def test_warm_starts_find_the_largest_singular_values() -> None:
    """The same matrix again and again, with nothing owed: products come to be the best ones of their rank."""
    rng = np.random.default_rng(0)
    matrix, codec = rng.standard_normal((40, 30)), PowerSGD(2).shaped([(40, 30)])
    u, s, v = np.linalg.svd(matrix)
    best = np.linalg.norm(matrix - u[:, :2] * s[:2] @ v[:2])

    def body(comm: Communicator) -> list[float]:
        memory, off = {name: np.zeros(n) for name, n in codec.memory(1200).items()}, []
        for _ in range(60):
            memory["error"][...] = 0
            grad = matrix.reshape(-1).copy()
            codec.reduce_all(comm, grad, np.empty(0, np.uint8), memory, what="g").wait()
            off.append(float(np.linalg.norm(grad - matrix.reshape(-1))))
        return off

    (off,) = spawn(body, 1)
    assert off[0] > 1.05 * best
    assert off[-1] == pytest.approx(best, rel=1e-3)


def test_full_rank_travels_whole_and_says_so() -> None:
    codec = PowerSGD(12).shaped(SHAPES)
    found = steps(codec, 2, 2, None)
    np.testing.assert_array_equal(arrived(found, 1, None), low_rank_gradient(0, 1) + low_rank_gradient(1, 1))
    assert not found[0][1]["error"].any()
    names = {"a": (12, 20), "b": (20,), "c": (3, 2), "d": (8, 4, 3, 3), "e": (50, 50)}
    assert PowerSGD(12).remark(names) == (
        "PowerSGD(rank=12): no fewer bytes for a (12, 20), c (3, 2), d (8, 4, 3, 3): whole and exact"
    )
    assert PowerSGD(1).remark({"a": (12, 20), "b": (20,)}) == ""


def resnet18() -> list[tuple[int, ...]]:
    """The parameters of ResNet-18 for images of 32 x 32 and ten classes."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    last = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            for channels in (last, width):
                shapes += [(width, channels, 3, 3), (width,), (width,)]
            if stage and not block:
                shapes += [(width, last, 1, 1), (width,), (width,)]
            last = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "published"), [(1, 243), (2, 136), (4, 72)])
def test_bytes_of_resnet_18_are_as_published(rank: int, published: int) -> None:
    shapes = resnet18()
    size = sum(map(prod, shapes))
    codec, plain = PowerSGD(rank).shaped(shapes), Plain()
    sent = sum(nbytes for _, nbytes in codec.moves_all(size, 16, 15, 4))
    assert round(plain.moves_all(size, 16, 15, 4)[0][1] / sent) == published


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [2, 17])
def test_what_is_no_number_arrives_and_is_not_kept(bad: float, at: int) -> None:
    def spoilt(rank: int, step: int) -> np.ndarray:
        grad = low_rank_gradient(rank, step)
        grad[at] = bad if (rank, step) == (1, 0) else grad[at]
        return grad

    found = steps(PowerSGD(2).shaped(SHAPES), 2, 2, None, spoilt)
    assert not np.isfinite(found[0][0][0]).all()
    assert np.isfinite(found[0][0][1]).all()
    assert all(np.isfinite(array).all() for _, memory, _ in found for array in memory.values())


def test_zeros_stay_zeros_and_other_numbers_are_refused() -> None:
    codec = PowerSGD(2).shaped(SHAPES)
    found = steps(codec, 2, 3, None, lambda rank, step: np.zeros(N, np.float32))
    assert not arrived(found, 2, None).any()
    words = r"g: codec PowerSGD carries gradients of float32 or float64, not int32"
    with pytest.raises(ConfigError, match=words):
        steps(codec, 1, 1, None, lambda rank, step: np.zeros(N, np.int32))


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_bad_ranks_are_named(rank: Any) -> None:
    with pytest.raises(ConfigError, match=rf"PowerSGD\(rank={rank}\): a number of columns, 1 or more"):
        PowerSGD(rank)


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
            with kernels.use(way):
                outer(np, p, q, at, out[:size])
                outer(np, p, q, at, out[size:], take=True)
            forms.append(out)
        np.testing.assert_array_equal(*forms)
        np.testing.assert_allclose(forms[0][:size], (p @ q.T).reshape(-1)[at : at + size], rtol=1e-4, atol=1e-5)
