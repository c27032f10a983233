"""Denormal numbers count as 0 while a step runs: processors compute with them far slower.

Vanishing gradients, their squares in an optimiser and the far tail of a softmax are full of them (below 1.2e-38 in
float32, 2.2e-308 in float64). GPUs and TensorFlow flush them to 0 too. On processors other than x86, and without Numba,
nothing is changed."""

import functools
import importlib.util
from typing import Any

__all__ = ["flush_for_good", "flushed"]


class flushed:  # noqa: N801
    """Within the block, denormals count as 0 in this thread."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        control = _control()
        self._before = None if control is None else control.flush()

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _control().restore(self._before)


def flush_for_good() -> None:
    """From now on denormals count as 0 in this thread: for threads that only run kernels."""
    control = _control()
    if control is not None:
        control.flush()


@functools.cache
def _control() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdpx.array.kernels.compiled import scalar as register

    return register
