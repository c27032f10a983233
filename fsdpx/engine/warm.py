"""What a trainer computes with, made ready before its first step: compiled, or loaded from the cache on disk."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.array.denormals import flushed
from fsdpx.array.kernels.warm import warm as warm_kernels
from fsdpx.nn.layer import Layer
from fsdpx.optim.segments import Segment, Segments

__all__ = ["warm"]


def warm(
    xp: Any, model: Layer, loss: Any, optimizer: Any, dtype: Any, master: Any, norm: bool, also: Sequence[str] = ()
) -> None:
    """Run each kernel once on a few numbers. dtype: of what is computed; master: of what is updated, by an optimizer if
    there is one; norm: the gradient's norm is wanted; also: names of kernels that no layer runs. On the CPU only."""
    if xp is not np:
        return
    with flushed():
        warm_kernels([*_kernels(model), *getattr(loss, "runs", ()), "add", *also], dtype)
        if norm:
            warm_kernels(["square_sum", "square_sums"], master)
        if optimizer is not None:
            _warm_optimizer(optimizer, np.dtype(master))


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


def _warm_optimizer(optimizer: Any, dtype: np.dtype) -> None:
    """One update of one number, of a parameter without a name."""
    p = np.zeros(1, dtype)
    slots = {name: np.zeros(1, dtype) for name in optimizer.slots}
    segments = Segments((Segment("", 0, 1, 0, 1),))
    optimizer.update(np, p, p.copy(), slots, lr=0.0, step=1, segments=segments, scale=1.0)
