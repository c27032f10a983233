"""Every codec keeps the contract; one with error feedback is a file of its own, and worth it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from amount import in_full

from fsdpx.codecs import Cast, Codec, Int8, Plain, PowerSGD, TopK, codec
from fsdpx.comm import Communicator, Handle, spawn, split_evenly
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
