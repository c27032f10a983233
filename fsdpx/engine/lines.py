"""Lines of equal small linear layers, computed in one compiled call: for them, Python costs more than the products.

The parameters of such layers lie one after the other in their page, so a line is a stack of matrices with one stride.
Every product is the one that the layers would compute, so the bits are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fsdpx.array.blas import line, line_backward
from fsdpx.nn.gradients import BLANK, WRITTEN, GradientEntry, Gradients

__all__ = ["Line", "Stacks"]

Stack = tuple[Any, Any]
"""weights (layers, width, width) and biases (layers, width)."""


FORMATS = ("float32", "float64", "bfloat16")


class Line:
    """The data that a line keeps for backward: its input, and the outputs of all layers (layers, rows, width)."""

    __slots__ = ("out", "x")

    def __init__(self, x: Any, out: Any) -> None:
        self.x, self.out = x, out

    def since(self, layer: int) -> Line:
        """The same without the first layers."""
        return Line(self.out[layer - 1], self.out[layer:]) if layer else self

    def saved(self) -> list[Any]:
        """The same data as the layers would have kept it, one by one."""
        return [(self.x,), *((y,) for y in self.out[:-1])]


class Sums(NamedTuple):
    """Where the gradients of a line are added up: a stack, and which of their buffer's flags are theirs."""

    stack: Stack
    entries: list[GradientEntry]
    flags: bytearray
    begin: int
    end: int


class Stacks:
    """Stacks by the list of views they were made of, and forward and backward through them.

    Those of a list that does not fit (tied, frozen or apart) are None: its layers run one by one."""

    def __init__(self) -> None:
        self._params: dict[tuple[int, int], tuple[Any, Stack | None]] = {}
        self._grads: dict[tuple[int, int], tuple[Any, Sums | None]] = {}

    def forward(self, params: Sequence[Mapping[str, Any]], start: int, stop: int, x: Any) -> Line | None:
        """All outputs of the layers from `start` to `stop`."""
        stack = self._of_params(params, start, stop)
        if stack is None or type(x) is not np.ndarray or x.ndim != 2 or x.dtype != stack[0].dtype:
            return None
        out = np.empty((stop - start, *x.shape), x.dtype)
        return Line(x, out) if x.flags.c_contiguous and line(out, x, *stack) else None

    def backward(
        self,
        params: Sequence[Mapping[str, Any]],
        grads: Sequence[Mapping[str, Any]],
        start: int,
        stop: int,
        held: Line,
        dy: Any,
    ) -> Any:
        """The gradient of the line's input; those of its parameters are written or added. None: nothing was done."""
        stack, sums = self._of_params(params, start, stop), self._of_grads(grads, start, stop)
        if stack is None or sums is None or not (type(dy) is np.ndarray and dy.flags.c_contiguous):
            return None
        blank = sums.flags.count(BLANK, sums.begin, sums.end)
        if 0 < blank < len(sums.entries):
            for entry in sums.entries:
                entry.open()
            blank = 0
        dx = np.empty((2, *dy.shape), dy.dtype)
        if not line_backward(dx, held.x, held.out, dy, *stack, *sums.stack, not blank):
            return None
        sums.flags[sums.begin : sums.end] = bytes((WRITTEN,)) * len(sums.entries)
        return dx[0]

    def _of_params(self, params: Sequence[Mapping[str, Any]], start: int, stop: int) -> Stack | None:
        known = self._params.get((id(params), start))
        if known is None:
            known = self._params[id(params), start] = (
                params,
                _stack([(p["weight"], p["bias"]) for p in params[start:stop]]),
            )
        return known[1]

    def _of_grads(self, grads: Sequence[Mapping[str, Any]], start: int, stop: int) -> Sums | None:
        known = self._grads.get((id(grads), start))
        if known is None:
            known = self._grads[id(grads), start] = (grads, _sums(grads[start:stop]))
        return known[1]


def _sums(grads: Sequence[Mapping[str, Any]]) -> Sums | None:
    each = [g.entries for g in grads if isinstance(g, Gradients) and {"weight", "bias"} <= set(g)]
    if len(each) < len(grads):
        return None
    entries = [e[name] for e in each for name in ("weight", "bias")]
    stack, flags, begin = _stack([(e["weight"].array, e["bias"].array) for e in each]), entries[0].flags, entries[0].at
    in_a_row = all(e.flags is flags and e.at == begin + i for i, e in enumerate(entries))
    return Sums(stack, entries, flags, begin, begin + len(entries)) if stack is not None and in_a_row else None


def _stack(pairs: list[tuple[Any, Any]]) -> Stack | None:
    """Matrices and vectors in turn, without gaps, as two arrays; None if they lie otherwise."""
    weight, bias = pairs[0]
    if any(type(w) is not np.ndarray for w, _ in pairs) or weight.dtype.name not in FORMATS:
        return None
    step = weight.nbytes + bias.nbytes
    first = _address(weight)
    at = [(_address(w) - first, _address(b) - first - weight.nbytes) for w, b in pairs]
    if at != [(i * step, i * step) for i in range(len(pairs))]:
        return None
    return (
        as_strided(weight, (len(pairs), *weight.shape), (step, *weight.strides)),
        as_strided(bias, (len(pairs), *bias.shape), (step, *bias.strides)),
    )


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
