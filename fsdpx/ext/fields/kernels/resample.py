"""Weighted sums of cells along one dim, in plain array code. Layers use these sums to change the resolution of a
field."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["CellMatrix", "multiply_along_dim"]


class CellMatrix(NamedTuple):
    """A sparse matrix that maps input cells along a dim to output cells.

    Attributes
    ----------
    starts : (outputs + 1,) int64; output o is the weighted sum over the entries from starts[o] to starts[o + 1] - 1
    sources : (entries,) int64, the input cell of each entry
    weights : (entries,) float64, the weight of each entry
    cells : number of input cells
    """

    starts: np.ndarray
    sources: np.ndarray
    weights: np.ndarray
    cells: int

    @classmethod
    def from_entries(cls, outputs: np.ndarray, sources: np.ndarray, weights: np.ndarray, shape: Any) -> CellMatrix:
        """Return the matrix with the given entries, which may be in any order. `shape` is (number of outputs, number of
        input cells)."""
        order = np.argsort(outputs, kind="stable")
        starts = np.searchsorted(outputs[order], np.arange(shape[0] + 1))
        return cls(
            starts.astype(np.int64), sources[order].astype(np.int64), weights[order].astype(np.float64), shape[1]
        )

    @property
    def output_count(self) -> int:
        """Number of output cells, which is the number of rows of the matrix."""
        return len(self.starts) - 1

    def list_nth_entries_of_all_outputs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return one pair of arrays (sources, weights) for the first entry of each output, one for the second entry of
        each output, and so on. If an output has fewer entries, its last entry is repeated with weight 0."""
        counts = np.diff(self.starts)
        terms = []
        for n in range(int(counts.max(initial=0))):
            entries = np.clip(np.minimum(self.starts[:-1] + n, self.starts[1:] - 1), 0, None)
            terms.append((self.sources[entries], np.where(counts > n, self.weights[entries], 0.0)))
        return terms

    def transpose(self) -> CellMatrix:
        """Return the transposed matrix, which maps gradients of outputs to gradients of input cells."""
        rows = np.repeat(np.arange(self.output_count), np.diff(self.starts))
        return CellMatrix.from_entries(self.sources, rows, self.weights, (self.cells, self.output_count))


@kernel(bits=False)
def multiply_along_dim(xp: Any, x: Any, dim: int, matrix: CellMatrix) -> Any:
    """Apply `matrix` along dim `dim` (2 or more) of x (samples, channels, *cells): each output cell is a weighted sum
    of input cells."""
    shape = -1, *(1,) * (x.ndim - dim - 1)
    y = xp.zeros((*x.shape[:dim], matrix.output_count, *x.shape[dim + 1 :]), dtype=x.dtype)
    for sources, weights in matrix.list_nth_entries_of_all_outputs():
        y = y + xp.take(x, xp.asarray(sources), axis=dim) * xp.asarray(weights.astype(x.dtype)).reshape(shape)
    return y
