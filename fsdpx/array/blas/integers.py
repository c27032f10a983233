"""Products of matrices of 8-bit whole numbers: by oneDNN, where the processor has instructions for them."""

from __future__ import annotations

import functools
import warnings

import numpy as np

from fsdpx.array.blas import onednn
from fsdpx.native.processor import cpuinfo

__all__ = ["chosen", "library"]

INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni")
"""They add products in 32 bits; others let sums of two overflow."""
CHECKED = ((1, 1, 1), (3, 5, 2), (17, 70, 33), (64, 32, 96))
"""(rows, summed, columns) of the products by which the library proves itself."""


def chosen() -> str:
    """The name of the library in use, if there is one."""
    return "" if library() is None else "onednn"


@functools.cache
def library() -> onednn.OneDNN | None:
    """What multiplies int8 by int8 into float32, if there is something that computes right."""
    flags = cpuinfo("flags").split()
    found = onednn.found() if any(name in flags for name in INSTRUCTIONS) else None
    if found is None or _computes(found):
        return found
    about = f"oneDNN in {found.path} ({found.version}) multiplies int8 wrongly on this processor and is not used"
    warnings.warn(f"fsdpx: {about}: int8 computes as float32, slower", RuntimeWarning, stacklevel=2)
    return None


def _computes(found: onednn.OneDNN) -> bool:
    """Whether sums are exact, those of the largest numbers, too."""
    random = np.random.default_rng(0)
    for m, k, n in CHECKED:
        for low in (-127, 127):
            a, b = (random.integers(low, 128, shape).astype(np.int8) for shape in ((m, k), (n, k)))
            out = np.empty((m, n), np.float32)
            found.product(out, a, b.T, False, None)
            if not np.array_equal(out, a.astype(np.float64) @ b.T.astype(np.float64)):
                return False
    return True
