"""Numbers too small for full precision count as 0 while a step runs: processors compute with them far slower.

Vanishing gradients, their squares in an optimiser and the far tail of a softmax are full of them (below 1.2e-38 in
float32, 2.2e-308 in float64). GPUs and TensorFlow do the same. Processors other than x86, and machines without Numba,
compute with them.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["flush_for_good", "flushed"]


@contextmanager
def flushed() -> Iterator[None]:
    """Inside the block denormals count as 0 in this thread."""
    control = _control()
    if control is None:
        yield
        return
    before = control.flush()
    try:
        yield
    finally:
        control.restore(before)


def flush_for_good() -> None:
    """The same from now on: for threads that do nothing else."""
    control = _control()
    if control is not None:
        control.flush()


@functools.cache
def _control() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdpx.array.kernels.compiled import control

    return control
