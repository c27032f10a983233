"""PowerSGD: low-rank compression, which sends the gradient of a matrix as two thin factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.array.random import normal
from fsdpx.core.comm.calls import Array, Handle, HandleWithCallback, ReduceOp, split_evenly
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.compression.codec import Codec, Memory, ReshardRule, Transfers
from fsdpx.errors import ConfigError
from fsdpx.ext.compression.compressed import require_float_dtype, zero_non_finite
from fsdpx.ext.compression.implementations import can_run_compiled_kernels

__all__ = ["PowerSGD"]

CACHED_ELEMENTS = 1 << 14
"""Number of elements of a matrix product to compute at a time, small enough that the elements stay in the cache."""


class ThinFactors(NamedTuple):
    """A matrix (rows, columns) at offset `start` of the gradient. The matrix is sent as the factors P and Q.

    `left` and `right` are the offsets of P and Q in the buffers that hold the factors of all matrices."""

    start: int
    rows: int
    columns: int
    left: int
    right: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class PowerSGD(Codec):
    """Low-rank gradient compression (Vogels et al. 2019), which sends two thin factors P and Q instead of a matrix M.

    For M (n, m), the codec computes P = M Q, sums P over ranks and orthonormalizes it, then computes Q = M^T P and
    sums Q over ranks. This is one step of the power method for the `rank` largest singular values of M, starting from
    the Q of the previous step. The all-reduces sum `rank` x (n + m) elements instead of n x m. The error M - P Q^T is
    added to the next gradient.

    All dims of a tensor but the first are flattened into columns. Vectors, and matrices whose factors would not be
    smaller, are sent uncompressed. Every rank gets P and Q of the full gradient, and computes its part of their
    product.

    Parameters
    ----------
    rank : rank of the product P Q^T, at least 1
    """

    feedback = True
    reshard_rules: Mapping[str, ReshardRule] = {"error": "sum", "basis": "same"}

    def __init__(self, rank: int = 2) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ConfigError(f"PowerSGD(rank={rank!r}): a number of columns, 1 or more")
        self.rank = rank
        self.shapes: tuple[tuple[int, ...], ...] = ()

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> PowerSGD:
        made = PowerSGD(self.rank)
        made.shapes = tuple(tuple(shape) for shape in shapes)
        return made

    def get_user_note(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        whole = [f"{name} {shape}" for name, shape in shapes.items() if len(shape) > 1 and not self._saves_bytes(shape)]
        if not whole:
            return ""
        some = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
        return f"PowerSGD(rank={self.rank}): no fewer bytes for {some}: whole and exact"

    def check(self, dtype: Any) -> None:
        require_float_dtype(self, dtype)

    def warm_up(self, dtype: Any) -> None:
        thin, out = np.zeros((2, self.rank), dtype), np.zeros(4, dtype)
        write_outer_product_into(np, thin, thin, 0, out)

    def memory_sizes(self, size: int) -> Mapping[str, int]:
        return {"error": size, "basis": self._count_all_reduce_elements(size)[1]}

    def scratch_bytes(self, size: int, width: int) -> int:
        """Return the size in bytes of the memory for P, Q and the uncompressed tensors in float32.

        For float64 gradients, the reduction allocates its own buffers.

        Parameters
        ----------
        size : number of elements of the gradient
        width : number of ranks that reduce together; not used

        Returns
        -------
        int : size in bytes
        """
        return 4 * sum(self._count_all_reduce_elements(size))

    def predict_transfers(self, counts: Sequence[int], rank: int, itemsize: int) -> Transfers:
        return self.predict_all_reduce_transfers(sum(counts), len(counts), rank, itemsize)

    def predict_all_reduce_transfers(self, size: int, width: int, rank: int, itemsize: int) -> Transfers:
        return tuple(
            ("all_reduce", 2 * (n - split_evenly(n, width)[rank]) * itemsize)
            for i, n in enumerate(self._count_all_reduce_elements(size))
            if n or i == 0
        )

    def reduce_scatter(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return self._start_reduce(comm, grad, out, sum(counts[: comm.rank]), scratch, memory, what)

    def all_reduce(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return self._start_reduce(comm, grad, grad, 0, scratch, memory, what)

    def _start_reduce(
        self, comm: Communicator, grad: Array, out: Array, first: int, scratch: Array, memory: Memory, what: str
    ) -> Handle:
        """Start a reduction of `grad` that writes the elements [first, first + out.size) of the sum to `out`, which may
        be a view of `grad`. `what` names the gradient for the watchdog and error messages."""
        require_float_dtype(self, grad.dtype, what)
        xp, thin = namespace_of(grad), self._list_matrices_sent_as_factors(grad.size)
        left_sums, right_sums = self._get_scratch_buffers(xp, grad, scratch)
        real = not getattr(xp, "holds_no_data", False)
        if real:
            self._compute_left_factor_and_copy_rest(xp, grad, thin, left_sums, memory)
        handle = comm.all_reduce(left_sums, ReduceOp.SUM, what=what)
        if right_sums.size:
            handle.wait()  # wait for the sum of P over all ranks, because Q is computed from it
            if real:
                self._compute_right_factor_and_residual(xp, thin, left_sums, right_sums, memory["error"])
            handle = comm.all_reduce(right_sums, ReduceOp.SUM, what=what)

        def multiply_factors() -> None:
            for t in thin:
                self._multiply_factors_into(xp, t, left_sums, right_sums, out, first)
                zero_non_finite(self._view_factor(right_sums, t.right, t.columns))
            for at, start, stop in self._list_uncompressed_ranges(grad.size, thin):
                low, high = max(start, first), min(stop, first + out.size)
                if low < high:
                    out[low - first : high - first] = left_sums[at + low - start : at + high - start]
            memory["basis"][...] = right_sums

        return HandleWithCallback(handle, multiply_factors) if real else handle

    def _compute_left_factor_and_copy_rest(
        self, xp: Any, grad: Array, thin: Sequence[ThinFactors], left_sums: Array, memory: Memory
    ) -> None:
        """For every matrix M of the gradient, add the error kept from earlier steps and compute P = M Q. Copy the
        tensors that are sent uncompressed.

        P and the copies go to `left_sums`. Each matrix is multiplied right after its error is added, while it is still
        in the cache."""
        whole = memory["error"]
        for t in thin:
            whole[t.start : t.stop] += grad[t.start : t.stop]
            q = self._view_factor(memory["basis"], t.right, t.columns)
            if not q.any():
                numbers = normal(0, f"PowerSGD {t.start}", 0, q.size).astype(grad.dtype)
                q[...] = xp.asarray(numbers).reshape(q.shape)
            with np.errstate(invalid="ignore", over="ignore"):
                self._view_factor(left_sums, t.left, t.rows)[...] = (
                    whole[t.start : t.stop].reshape(t.rows, t.columns) @ q
                )
        for at, start, stop in self._list_uncompressed_ranges(grad.size, thin):
            xp.add(whole[start:stop], grad[start:stop], out=left_sums[at : at + stop - start])
            whole[start:stop] = 0

    def _compute_right_factor_and_residual(
        self, xp: Any, thin: Sequence[ThinFactors], left_sums: Array, right_sums: Array, error: Array
    ) -> None:
        """Orthonormalize the summed P, compute this rank's Q = M^T P, and replace M by its error M - P Q^T.

        If P is not finite, the error is set to zero. Since P is the same on all ranks, all ranks make the same
        decision."""
        for t in thin:
            p, q = self._view_factor(left_sums, t.left, t.rows), self._view_factor(right_sums, t.right, t.columns)
            kept = error[t.start : t.stop].reshape(t.rows, t.columns)
            _orthonormalize_columns(xp, p)
            with np.errstate(invalid="ignore", over="ignore"):
                q[...] = kept.T @ p
            write_outer_product_into(xp, p, q, 0, error[t.start : t.stop], subtract=True)
            if not xp.isfinite(p).all():
                kept[...] = 0

    def _multiply_factors_into(
        self, xp: Any, t: ThinFactors, left_sums: Array, right_sums: Array, out: Array, first: int
    ) -> None:
        """Write the elements of P Q^T that lie in the range [first, first + out.size) of the gradient to `out`."""
        p, q = self._view_factor(left_sums, t.left, t.rows), self._view_factor(right_sums, t.right, t.columns)
        low, high = max(t.start, first), min(t.stop, first + out.size)
        if low < high:
            write_outer_product_into(xp, p, q, low - t.start, out[low - first : high - first])

    def _view_factor(self, flat: Array, offset: int, rows: int) -> Array:
        return flat[offset : offset + rows * self.rank].reshape(rows, self.rank)

    def _saves_bytes(self, shape: tuple[int, ...]) -> bool:
        rows, columns = shape[0], prod(shape[1:])
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns

    def _list_matrices_sent_as_factors(self, size: int) -> list[ThinFactors]:
        """Return the matrices that are sent as thin factors, for a gradient of `size` elements."""
        shapes = self.shapes or ((size,),)
        ends = list(accumulate(map(prod, shapes)))
        assert ends[-1] == size, (shapes, size)
        found, left, right = [], 0, 0
        for stop, shape in zip(ends, shapes, strict=True):
            if self._saves_bytes(shape):
                rows, columns = shape[0], prod(shape[1:])
                found.append(ThinFactors(stop - rows * columns, rows, columns, left, right))
                left, right = left + rows * self.rank, right + columns * self.rank
        return found

    def _count_all_reduce_elements(self, size: int) -> tuple[int, int]:
        """Return the numbers of elements that the two all-reduces sum, as a pair. The first all-reduce sums P and all
        uncompressed tensors, and the second sums Q."""
        thin = self._list_matrices_sent_as_factors(size)
        whole = size - sum(t.rows * t.columns for t in thin)
        return whole + self.rank * sum(t.rows for t in thin), self.rank * sum(t.columns for t in thin)

    def _list_uncompressed_ranges(self, size: int, thin: Sequence[ThinFactors]) -> list[tuple[int, int, int]]:
        """Return the ranges [start, stop) of the gradient that are sent uncompressed, as (offset, start, stop). In the
        buffer of the first all-reduce, the elements of a range are stored from index `offset` on."""
        at, start, found = self.rank * sum(t.rows for t in thin), 0, []
        for stop, after in [*((t.start, t.stop) for t in thin), (size, size)]:
            if start < stop:
                found.append((at, start, stop))
            at, start = at + stop - start, after
        return found

    def _get_scratch_buffers(self, xp: Any, grad: Array, scratch: Array) -> tuple[Array, Array]:
        left_sums, right_sums = self._count_all_reduce_elements(grad.size)
        needed = (left_sums + right_sums) * grad.dtype.itemsize
        flat = (
            scratch[:needed].view(grad.dtype)
            if needed <= scratch.size
            else xp.empty((left_sums + right_sums,), dtype=grad.dtype)
        )
        return flat[:left_sums], flat[left_sums:]


def write_outer_product_into(xp: Any, p: Array, q: Array, start: int, out: Array, subtract: bool = False) -> None:
    """Write `out.size` elements of P Q^T to `out`, in row-major order, starting at element `start`. If `subtract` is
    true, subtract them from `out` instead.

    The outer products of columns are added one by one. A matmul is not used, because every rank must get the same
    result, and the last bits of a matmul may depend on how its operands are aligned in memory."""
    if can_run_compiled_kernels(xp):
        from fsdpx.ext.compression.compiled import write_outer_product_into as body

        body(p, q, start, out, subtract)
        return
    columns = len(q)
    step = max(CACHED_ELEMENTS // columns, 1)
    for top in range(start // columns, -(-(start + out.size) // columns), step):
        rows = p[top : top + step]
        with np.errstate(invalid="ignore", over="ignore"):
            block = rows[:, :1] * q[:, 0]
            for k in range(1, q.shape[1]):
                block += rows[:, k : k + 1] * q[:, k]
        begin = top * columns
        a, b = max(begin, start), min(begin + block.size, start + out.size)
        part, found = out[a - start : b - start], block.reshape(-1)[a - begin : b - begin]
        if subtract:
            part -= found
        else:
            part[...] = found


def _orthonormalize_columns(xp: Any, p: Array) -> None:
    """Orthonormalize the columns of `p` in place, by Gram-Schmidt in float64. A linearly dependent column becomes
    zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = p.astype(np.float64)
        for k in range(p.shape[1]):
            column = wide[:, k]
            for j in range(k):
                column -= (column * wide[:, j]).sum() * wide[:, j]
            size = xp.sqrt((column * column).sum())
            column *= xp.where(size == 0, 0.0, 1.0 / xp.where(size == 0, 1.0, size))
        p[...] = wide
