"""A trainer's kernels, made ready before its first step: compiled, or loaded from the cache on disk."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.array.denormals import flushed
from fsdpx.array.kernels.warm import warm as warm_kernels
from fsdpx.nn.layer import Layer
from fsdpx.optim.optimizer import zeros
from fsdpx.optim.segments import Segment, Segments

__all__ = ["warm"]


def warm(
    xp: Any, model: Layer, loss: Any, optimizer: Any, dtypes: tuple[Any, Any, Any], norm: bool, also: Sequence[str] = ()
) -> None:
    """Run each kernel once on a few numbers. dtypes: of what is computed, of gradients, and of what is updated, by an
    optimizer if there is one. norm: the gradient's norm is wanted. also: names of kernels that no layer runs. On the
    CPU only."""
    dtype, gradients, master = map(np.dtype, dtypes)
    if xp is not np:
        return
    with flushed():
        warm_kernels([*_kernels(model), *getattr(loss, "runs", ()), "add", *also], dtype)
        if norm:
            warm_kernels(["square_sum", "square_sums"], gradients)
        if optimizer is not None:
            _warm_optimizer(optimizer, master, gradients)


def _kernels(layer: Layer) -> dict[str, None]:
    """Names of what a layer and those inside it run, each once, in a fixed order."""
    names: dict[str, None] = {}
    seen: set[int] = set()

    def visit(one: Layer) -> None:
        if id(one) not in seen:
            seen.add(id(one))
            names.update(dict.fromkeys(one.runs))
            for child in one.children().values():
                visit(child)

    visit(layer)
    return names


def _warm_optimizer(optimizer: Any, dtype: np.dtype, gradients: np.dtype) -> None:
    """One update of one number, of a parameter without a name."""
    p, g = np.zeros(1, dtype), np.zeros(1, gradients)
    segments = Segments((Segment("", 0, 1, 0, 1, (1,)),))
    slots = zeros(np, optimizer, segments, dtype)
    optimizer.update(np, p, g, slots, lr=0.0, step=1, segments=segments, scale=1.0)
