"""`CodecContract`, a base class with tests that every compression codec must pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from fsdpx.core.comm.calls import split_evenly
from fsdpx.core.comm.communicator import Communicator, CountingCommunicator, TrafficCounters
from fsdpx.core.comm.init import spawn
from fsdpx.core.compression import Codec
from fsdpx.testing.threads import switching_at_every_bytecode

__all__ = ["CodecContract"]

REDUCE_CASES = (
    (1, (61,), "elsewhere"), (2, (0, 0), "start"), (2, (1, 4), "own part"), (3, (20, 20, 20), "own part"),
    (3, (1, 4, 2), "start"), (4, (0, 0, 0, 1), "elsewhere"), (5, (1, 4, 2, 0, 3), "elsewhere"),
    (5, (12, 12, 12, 12, 13), "start"),
)  # fmt: skip
"""Test cases for reduce-scatters: (number of ranks, number of elements in each part of the sum, where a rank writes its
part). A part is written to a separate array ("elsewhere"), or into the gradient, at its beginning ("start") or at the
position of the part ("own part"). The cases contain every number of ranks from 1 to 5."""
SHARED_CASES = ((1, 60), (2, 61), (3, 0), (4, 1), (5, 60))
"""Pairs (number of ranks, number of elements) for tests of an all-reduce."""


class CodecContract:
    """Tests for a compression codec. Inherit from this class and define `make`, which returns the codec to test."""

    allowed_error: float = 0.0
    """Allowed error of a sum in the first step, relative to `error_scale`. For `all_reduce`, twice this error is
    allowed. In addition, the rounding error of a sum in `dtype` is allowed."""
    error_scale: Literal["element", "block"] = "element"
    """The quantity that `allowed_error` is relative to. "element" (default): the absolute values of the element itself,
    summed over the ranks. "block": the largest absolute value in each rank's gradient, summed over the ranks; this is
    for codecs that use one scale for several elements."""
    dtype: str = "float32"
    """Dtype of the gradients."""

    def make(self) -> Codec:
        """Return a new codec to test. Must be overridden."""
        raise TypeError(f"{type(self).__name__} must define make()")

    @pytest.mark.parametrize(("size", "counts", "into"), REDUCE_CASES)
    def test_each_rank_gets_its_part_of_the_sum(self, size: int, counts: tuple[int, ...], into: str) -> None:
        self._assert_reduce_is_close(size, counts, into)

    @pytest.mark.parametrize(("size", "n"), SHARED_CASES)
    def test_all_ranks_get_the_same_sum(self, size: int, n: int) -> None:
        def body(comm: Communicator) -> np.ndarray:
            codec, grad = self.make(), self._draw_gradient(n, comm.rank)
            codec.all_reduce(comm, grad, *self._allocate_buffers(codec, n, size), what="g").wait()
            return grad

        found = spawn(body, size, timeout=60)
        assert len({grad.tobytes() for grad in found}) == 1
        self._assert_close(found[0], size, slice(0, n), n, 2 * self.allowed_error)

    @pytest.mark.parametrize("whole", [False, True])
    def test_error_feedback_loses_nothing(self, whole: bool) -> None:
        """For a codec with error feedback, check that the sum of all sent values plus the values kept for later equals
        the sum of all gradients. The kept values are in the memory arrays that have the rule "sum" in
        `reshard_rules`.

        Parameters
        ----------
        whole : whether to test `all_reduce`; if false, test `reduce_scatter`
        """
        size, n, steps = 3, 61, 3

        def body(comm: Communicator) -> np.ndarray:
            codec, counts = self.make(), split_evenly(n, size)
            scratch, memory = self._allocate_buffers(codec, n, size)
            found, mine = np.zeros(n), slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
            for step in range(steps):
                grad = self._draw_gradient(n, comm.rank + size * step)
                if whole:
                    codec.all_reduce(comm, grad, scratch, memory, what="g").wait()
                else:
                    codec.reduce_scatter(comm, grad, grad[mine], counts, scratch, memory, what="g").wait()
                found[mine] += grad[mine]
            for name, kept in memory.items():
                found += kept if codec.reshard_rules.get(name) == "sum" else 0
            return found

        if self.make().feedback:
            found = np.sum(spawn(body, size, timeout=60), axis=0)
            given = np.array([self._draw_gradient(n, seed) for seed in range(size * steps)], np.float64)
            allowed = 4 * size * steps * float(np.finfo(self.dtype).eps) * np.abs(given).sum(0).max()
            np.testing.assert_allclose(found, given.sum(0), rtol=0, atol=allowed)

    @pytest.mark.parametrize("size", [1, 3, 5])
    def test_calls_and_bytes_are_as_declared(self, size: int) -> None:
        n = 60 * size + 1

        def body(comm: Communicator) -> tuple[TrafficCounters, TrafficCounters]:
            codec, kept = self.make(), (TrafficCounters(), TrafficCounters())
            scratch, memory = self._allocate_buffers(codec, n, size)
            grad, counts = self._draw_gradient(n, comm.rank), split_evenly(n, size)
            part, all_of_it = (CountingCommunicator(comm, "x", counters) for counters in kept)
            out = np.empty(counts[comm.rank], grad.dtype)
            codec.reduce_scatter(part, grad, out, counts, scratch, memory, what="g").wait()
            codec.all_reduce(all_of_it, self._draw_gradient(n, comm.rank), scratch, memory, what="g").wait()
            return kept

        codec, itemsize = self.make(), np.dtype(self.dtype).itemsize
        for rank, found in enumerate(spawn(body, size, timeout=60)):
            declaration = (
                codec.predict_transfers(split_evenly(n, size), rank, itemsize),
                codec.predict_all_reduce_transfers(n, size, rank, itemsize),
            )
            for counters, declared in zip(found, declaration, strict=True):
                moved: dict[str, list[int]] = {}
                for verb, nbytes in declared if size > 1 else ():
                    moved.setdefault(verb, []).append(nbytes)
                wanted = {verb: (len(each), sum(each)) for verb, each in moved.items()}
                assert {verb: (calls, nbytes) for _, verb, calls, nbytes in counters} == wanted

    @pytest.mark.parametrize(("size", "n"), [(2, 1), (3, 61), (5, 61)])
    def test_nothing_is_written_beyond_what_was_declared(self, size: int, n: int) -> None:
        def body(comm: Communicator) -> None:
            codec, counts = self.make(), split_evenly(n, size)
            declared = codec.scratch_bytes(n, size)
            scratch = np.full(declared + 64, 77, np.uint8)
            _, memory = self._allocate_buffers(codec, n, size)
            out = np.full(counts[comm.rank] + 8, 77, self.dtype)
            mine = out[: counts[comm.rank]]
            codec.reduce_scatter(
                comm, self._draw_gradient(n, comm.rank), mine, counts, scratch[:declared], memory, what="g"
            ).wait()
            codec.all_reduce(comm, self._draw_gradient(n, comm.rank), scratch[:declared], memory, what="g").wait()
            assert np.all(scratch[declared:] == 77)
            assert np.all(out[counts[comm.rank] :] == 77)
            assert {name: array.size for name, array in memory.items()} == dict(codec.memory_sizes(n))

        spawn(body, size, timeout=60)

    def test_codec_keeps_no_state_outside_memory(self) -> None:
        """Check that two codecs that take turns on the same memory arrays give results that are bitwise equal to those
        of a single codec. This shows that a codec stores no state elsewhere."""

        def body(comm: Communicator, codecs: Sequence[Codec]) -> list[bytes]:
            n, counts = 61, split_evenly(61, comm.size)
            scratch, memory = self._allocate_buffers(codecs[0], n, comm.size)
            found = []
            for step in range(4):
                out = np.empty(counts[comm.rank], self.dtype)
                grad = self._draw_gradient(n, comm.rank + 10 * step)
                codecs[step % len(codecs)].reduce_scatter(comm, grad, out, counts, scratch, memory, what="g").wait()
                found.append(out.tobytes())
            return found

        one = spawn(lambda comm: body(comm, [self.make()]), 3, timeout=60)
        assert one == spawn(lambda comm: body(comm, [self.make(), self.make()]), 3, timeout=60)

    def test_thread_ranks_may_share_one_instance(self) -> None:
        def body(comm: Communicator, codec: Codec) -> list[bytes]:
            n, counts = 61, split_evenly(61, comm.size)
            scratch, memory = self._allocate_buffers(codec, n, comm.size)
            found = []
            for step in range(2):
                out, grad = np.empty(counts[comm.rank], self.dtype), self._draw_gradient(n, comm.rank + 10 * step)
                codec.reduce_scatter(comm, grad, out, counts, scratch, memory, what="g").wait()
                found.append(out.tobytes())
            return found

        def switched(comm: Communicator) -> list[bytes]:
            with switching_at_every_bytecode():
                return body(comm, shared)

        shared = self.make()
        assert spawn(switched, 2, timeout=60) == spawn(lambda comm: body(comm, self.make()), 2, timeout=60)

    def _assert_reduce_is_close(self, size: int, counts: Sequence[int], into: str) -> None:
        n = sum(counts)

        def body(comm: Communicator) -> np.ndarray:
            codec, grad, own = self.make(), self._draw_gradient(n, comm.rank), counts[comm.rank]
            start = sum(counts[: comm.rank]) if into == "own part" else 0
            out = np.full(own, np.nan, grad.dtype) if into == "elsewhere" else grad[start : start + own]
            codec.reduce_scatter(comm, grad, out, counts, *self._allocate_buffers(codec, n, size), what="g").wait()
            return out

        for rank, out in enumerate(spawn(body, size, timeout=60)):
            start = sum(counts[:rank])
            self._assert_close(out, size, slice(start, start + counts[rank]), n, self.allowed_error)

    def _assert_close(self, got: np.ndarray, size: int, part: slice, n: int, error: float) -> None:
        terms = np.array([self._draw_gradient(n, rank) for rank in range(size)], np.float64)
        eps, scale = float(np.finfo(self.dtype).eps), np.abs(terms[:, part])
        assert got.shape == scale.shape[1:]
        if self.error_scale == "block":
            scale = np.abs(terms).max(1, initial=0, keepdims=True)
        assert np.all(np.abs(got - terms[:, part].sum(0)) <= (error + size * eps) * scale.sum(0))

    def _draw_gradient(self, n: int, seed: int) -> np.ndarray:
        return np.random.default_rng([n, seed]).standard_normal(n).astype(self.dtype)

    def _allocate_buffers(self, codec: Codec, n: int, size: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Allocate the scratch buffer and the zeroed memory arrays that a codec needs for `n` elements on `size`
        ranks."""
        memory = {name: np.zeros(elements, self.dtype) for name, elements in codec.memory_sizes(n).items()}
        return np.full(codec.scratch_bytes(n, size), 77, np.uint8), memory
