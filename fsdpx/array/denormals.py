"""Denormal numbers count as 0 while a step runs: processors compute with them far slower.

Vanishing gradients, their squares in an optimiser and the far tail of a softmax are full of them (below 1.2e-38 in
float32, 2.2e-308 in float64). GPUs and TensorFlow flush them to 0 too. On processors other than x86, and without Numba,
nothing is changed."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["flush_for_good", "flushed"]


@contextmanager
def flushed() -> Iterator[None]:
    """Within the block, denormals count as 0 in this thread."""
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
    """From now on denormals count as 0 in this thread: for threads that only run kernels."""
    control = _control()
    if control is not None:
        control.flush()


@functools.cache
def _control() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdpx.array.kernels.compiled import control

    return control
