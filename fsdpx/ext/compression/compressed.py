"""Base class of lossy gradient codecs with error feedback. Each rank compresses its gradient in parts, and sends every
part to the rank that owns it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.array.random import NumberRange
from fsdpx.core.comm.calls import Array, Handle, HandleWithCallback, split_evenly
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.compression.codec import Codec, Memory, ReshardRule, Transfers
from fsdpx.errors import ConfigError

__all__ = [
    "MAX_REDUCES", "SIZE_MULTIPLE_BYTES", "CompressedCodec", "require_float_dtype", "split_by_counts",
    "zero_non_finite",
]  # fmt: skip

SIZE_MULTIPLE_BYTES = 8
"""Packed parts are padded to a multiple of this many bytes, so that each part is aligned for every dtype."""
MAX_REDUCES = 1 << 24
"""Number of reductions after which random numbers repeat. Random numbers depend on a counter of reductions. The counter
may be stored as a float32, which is exact only for integers up to this number."""


class CompressedCodec(Codec):
    """Base class of lossy codecs that compress element by element or block by block, such as `Int8` and `TopK`.

    Each rank owns one part of the sum of all gradients. Each rank packs (compresses) its own gradient part by part, an
    all-to-all sends each part to its owner, and the owners unpack the parts and add them in rank order. Subclasses
    define how a part is packed.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019): each rank keeps its packing error and adds it to its
    next gradient. The sum of everything sent plus the error kept therefore equals the sum of all gradients. In
    `all_reduce`, owners also pack their sums, and add the resulting error to the error that they keep.

    Inf or NaN in a gradient leads to NaN in the sum, so that loss scaling detects it. Inf and NaN are not kept in the
    error."""

    feedback = True
    """True if the packing error is kept and added to the next gradient."""
    random = False
    """True if packing uses random numbers."""
    warmup: int = 0
    """Number of reductions at the start of training that send more data than later ones."""
    reshard_rules: Mapping[str, ReshardRule] = {"error": "sum", "turn": "same"}

    @abstractmethod
    def packed_bytes(self, size: int, step: int = MAX_REDUCES) -> int:
        """Return the size in bytes of a compressed part of `size` elements. It is a multiple of `SIZE_MULTIPLE_BYTES`.

        `step` is the index of the reduction. If the size depends on `step`, it is largest in the first reduction."""

    @abstractmethod
    def pack_part(
        self, xp: Any, x: Array, wire: Array, residual: Array | None, step: int, numbers: NumberRange
    ) -> None:
        """Compress the elements of `x` into the byte buffer `wire`.

        Parameters
        ----------
        x : flat, float32 or float64; its contents may be overwritten
        wire : buffer of `packed_bytes(x.size)` bytes
        residual : receives the packing error of `x`, and may be `x` itself; None if the error is not kept
        step : index of the reduction, at most `MAX_REDUCES`; `unpack_part` must get the same index
        numbers : random stream for this part in this reduction
        """

    @abstractmethod
    def unpack_part(self, xp: Any, wire: Array, out: Array, add: bool, step: int) -> None:
        """Decompress `wire`, as filled by `pack_part`, and write the result to `out`. If `add` is true, add the result
        to `out` instead."""

    def add_error_feedback(self, grad: Array, memory: Memory, step: int) -> Array:
        """Add `grad` to the array that holds the error from earlier reductions, and return this array for packing. If
        no error is kept, return `grad`."""
        if "error" not in memory:
            return grad
        error = memory["error"]
        error += grad
        return error

    def add_and_clear_kept_error(self, grad: Array, memory: Memory) -> None:
        grad[...] = self.add_error_feedback(grad, memory, self.get_and_advance_reduce_number(memory))
        for name, kept in memory.items():
            if name == "error":
                kept[...] = 0
            zero_non_finite(kept)

    def check(self, dtype: Any) -> None:
        require_float_dtype(self, dtype)

    def warm_up(self, dtype: Any) -> None:
        x, wire, step = np.zeros(3, dtype), np.zeros(self.packed_bytes(3), np.uint8), self.warmup
        self.pack_part(np, x, wire, x.copy() if self.feedback else None, step, _make_random_stream(step, 0, 0, 3))
        self.unpack_part(np, wire, x, True, step)

    def memory_sizes(self, size: int) -> Mapping[str, int]:
        return ({"error": size} if self.feedback else {}) | ({"turn": 1} if self._has_reduce_counter else {})

    def scratch_bytes(self, size: int, width: int) -> int:
        """Return the size in bytes of the send and receive buffers for reducing `size` elements that are split evenly
        over `width` ranks.

        A reduction whose parts need larger buffers allocates its own."""
        return 2 * sum(self.packed_bytes(n, 0) for n in split_evenly(size, width)) + 2 * width * self.packed_bytes(1, 0)

    def predict_transfers(self, counts: Sequence[int], rank: int, itemsize: int) -> Transfers:
        return (("all_to_all", self._count_sent_bytes(counts, rank)),)

    def predict_all_reduce_transfers(self, size: int, width: int, rank: int, itemsize: int) -> Transfers:
        foreign = self._count_sent_bytes(split_evenly(size, width), rank)
        return (("all_to_all", foreign), ("all_gather", foreign))

    def reduce_scatter(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        require_float_dtype(self, grad.dtype, what)
        return self._start_reduce(
            comm, grad, out, counts, scratch, memory, self.get_and_advance_reduce_number(memory), what
        )

    def all_reduce(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        require_float_dtype(self, grad.dtype, what)
        counts, xp = split_evenly(grad.size, comm.size), namespace_of(grad)
        step, error = self.get_and_advance_reduce_number(memory), memory.get("error")
        sizes = [self.packed_bytes(n, step) for n in counts]
        first, own = sum(counts[: comm.rank]), counts[comm.rank]
        total, mine = xp.empty((own,), dtype=grad.dtype), slice(first, first + own)
        self._start_reduce(comm, grad, total, counts, scratch, memory, step, what).wait()
        wire = scratch[: sum(sizes)]
        pieces = split_by_counts(wire, sizes)
        if _has_data(xp):
            residual = None if error is None else grad[mine]
            self.pack_part(
                xp, total, pieces[comm.rank], residual, step, _make_random_stream(step, comm.rank, "all", own)
            )
            if error is not None:
                error[mine] += residual
        handle = comm.all_gather(pieces[comm.rank], wire, sizes, what=what)

        def unpack_sums() -> None:
            for piece, part in zip(pieces, split_by_counts(grad, counts), strict=True):
                self.unpack_part(xp, piece, part, False, step)

        return HandleWithCallback(handle, unpack_sums) if _has_data(xp) else handle

    def _start_reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        step: int, what: str,
    ) -> Handle:  # fmt: skip
        xp, sizes, width = namespace_of(grad), [self.packed_bytes(n, step) for n in counts], comm.size
        own, sent = sizes[comm.rank], sum(sizes)
        arriving = own * width
        wire = scratch[:sent] if sent <= scratch.size else xp.empty((sent,), dtype="uint8")
        fits = sent + arriving <= scratch.size
        parts = scratch[sent : sent + arriving] if fits else xp.empty((arriving,), dtype="uint8")
        if _has_data(xp):
            self.pack_all_parts(comm.rank, grad, counts, split_by_counts(wire, sizes), memory, step)
        handle = comm.all_to_all(wire, parts, sizes, [own] * width, what=what)

        def unpack_and_add() -> None:
            for r, piece in enumerate(split_by_counts(parts, [own] * width)):
                self.unpack_part(xp, piece, out, r > 0, step)

        return HandleWithCallback(handle, unpack_and_add) if _has_data(xp) else handle

    def pack_all_parts(
        self, rank: int, grad: Array, counts: Sequence[int], wires: Sequence[Array], memory: Memory, step: int
    ) -> None:
        """Compress the gradient of `rank`, part by part. The result for part i, which has counts[i]
        elements, is written into the send buffer wires[i].

        Overwrites `grad`. `step` is the index of this reduction."""
        xp, error = namespace_of(grad), memory.get("error")
        whole = self.add_error_feedback(grad, memory, step)
        kept = [None] * len(counts) if error is None else split_by_counts(error, counts)
        for r, (x, wire, residual) in enumerate(zip(split_by_counts(whole, counts), wires, kept, strict=True)):
            self.pack_part(xp, x, wire, residual, step, _make_random_stream(step, rank, r, x.size))

    def _count_sent_bytes(self, counts: Sequence[int], rank: int) -> int:
        return sum(self.packed_bytes(n) for r, n in enumerate(counts) if r != rank)

    def get_and_advance_reduce_number(self, memory: Memory) -> int:
        """Return the index of this reduction, which is the same on all ranks, and advance the counter.

        The first reduction has index 0. The index after MAX_REDUCES - 1 is `warmup`, not 0, because the first `warmup`
        reductions may send more data than later ones. A dry run always uses the index `warmup`."""
        if not self._has_reduce_counter or not _has_data(namespace_of(memory["turn"])):
            return self.warmup
        step = int(memory["turn"][0])
        memory["turn"][0] = step + 1 if step + 1 < MAX_REDUCES else self.warmup
        return step

    @property
    def _has_reduce_counter(self) -> bool:
        return self.random or self.warmup > 0


def _make_random_stream(step: int, sender: int, owner: int | str, size: int) -> NumberRange:
    """Return the random numbers with which rank `sender` rounds a part in the reduction with index `step`. `owner` is
    the rank that the part is packed for, or "all" if it is packed for all ranks."""
    return NumberRange(step, f"codec {sender} to {owner}", 0, size)


def require_float_dtype(codec: Codec, dtype: Any, what: str = "") -> None:
    """Raise ConfigError if a gradient is neither float32 nor float64. `what` is the name of the gradient in the
    message."""
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise ConfigError(
            f"{what}{': ' if what else ''}codec {type(codec).__name__} carries gradients of float32 or float64, not "
            f"{np.dtype(dtype)}: leave compression out, or choose another precision"
        )


def zero_non_finite(kept: Array) -> None:
    """Replace Inf and NaN with zero, in place."""
    finite = namespace_of(kept).isfinite(kept)
    if not finite.all():
        kept[~finite] = 0


def split_by_counts(array: Array, counts: Sequence[int]) -> list[Array]:
    """Split a flat array into consecutive views; view i has counts[i] elements."""
    ends = list(accumulate(counts))
    return [array[stop - n : stop] for n, stop in zip(counts, ends, strict=True)]


def _has_data(xp: Any) -> bool:
    """Return whether arrays of the module `xp` hold data. The shape-only arrays of a dry run do not."""
    return not getattr(xp, "holds_no_data", False)
