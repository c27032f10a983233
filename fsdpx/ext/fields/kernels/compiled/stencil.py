"""Finite-difference stencils along one dim of a field, compiled with Numba and parallel over channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import as_contiguous
from fsdpx.core.array.parallel import MIN_PARALLEL_SIZE, parallel_for_range
from fsdpx.ext.fields.kernels import stencil as plain
from fsdpx.ext.fields.kernels.stencil import ShiftedRange

EXAMPLE_OPTIONS = slice(None), slice(None), 0, (ShiftedRange(0, 0, 3, 1.0, False),)


@jit
def _apply_ranges(first, last, y, x, channels, terms, weights):
    """Compute the channels `first` to `last`, counted over all samples. y and x are (samples, channels, rows, numbers
    of a row). `channels` holds the number of channels, and the first and the step for y and x. `terms` holds the start
    in y, the start in x, the length and whether to add."""
    count = channels[0]
    for number in range(first, last):
        n, c = number // count, number % count
        out, cells = y[n, channels[1] + c * channels[2]], x[n, channels[3] + c * channels[4]]
        for row in range(out.shape[0]):
            for t in range(weights.size):
                weight, size = weights[t], terms[t, 2]
                into = out[row, terms[t, 0] : terms[t, 0] + size]
                read = cells[row, terms[t, 1] : terms[t, 1] + size]
                if terms[t, 3]:
                    for i in range(size):
                        into[i] += weight * read[i]
                else:
                    for i in range(size):
                        into[i] = weight * read[i]


@lru_cache(1 << 10)
def _make_arrays(ranges: tuple[ShiftedRange, ...], inner: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the arguments `terms` and `weights` of `_apply_ranges`, for cells of `inner` numbers."""
    terms = [(one.to * inner, one.start * inner, one.length * inner, one.add) for one in ranges]
    return np.array(terms, np.int64).reshape(len(ranges), 4), np.array([one.weight for one in ranges], dtype)


@register_compiled_kernel(lambda x, w, s: (x.reshape(1, 2, 3).copy(), x.reshape(1, 2, 3), *EXAMPLE_OPTIONS))
def apply_stencil(
    xp: Any, y: np.ndarray, x: np.ndarray, given: slice, taken: slice, dim: int, ranges: Sequence[ShiftedRange]
) -> None:
    if not y.flags.carray or y.dtype != x.dtype:  # 16-bit y
        plain.apply_stencil.fallback(xp, y, x, given, taken, dim, ranges)  # type: ignore[attr-defined]
        return
    inner = math.prod(y.shape[dim + 3 :])
    arrays = y, as_contiguous(x)
    flat = [a.reshape(*a.shape[:2], math.prod(a.shape[2 : dim + 2]), a.shape[dim + 2] * inner) for a in arrays]
    written, read = (range(*part.indices(a.shape[1])) for part, a in ((given, y), (taken, x)))
    channels = np.array([len(written), written.start, written.step, read.start, read.step], np.int64)
    arguments = *flat, channels, *_make_arrays(tuple(ranges), inner, y.dtype.name)
    if y.size < MIN_PARALLEL_SIZE:
        _apply_ranges(0, y.shape[0] * len(written), *arguments)
    else:
        parallel_for_range(_apply_ranges, 0, y.shape[0] * len(written), *arguments)
