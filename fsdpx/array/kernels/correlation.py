"""Convolutions of any dims, as products over the places of the window: strides, dilation, groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Strides", "correlate", "correlate_backward_input", "correlate_backward_params"]


class Strides(NamedTuple):
    """A window that moves over cells. padding: of zeros, on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int

    def places(self, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each place of the window, and the cells of the padded field that it meets for outputs of these sizes."""
        for place in product(*map(range, self.kernel)):
            rows = zip(place, self.dilation, self.stride, sizes, strict=True)
            yield place, (slice(None), slice(None), *(slice(i * d, i * d + s * (n - 1) + 1, s) for i, d, s, n in rows))


def correlate(xp: Any, x: Any, weight: Any, bias: Any | None, strides: Strides, sizes: Sequence[int]) -> Any:
    """y[b, o] = sum over c and places of weight[o, c, place] x[b, c, window at place] + bias[o].

    x: (samples, channels, *cells); weight: (outputs, channels / groups, *kernel); y: (samples, outputs, *sizes), added
    in the order of places."""
    padded, (samples, outputs, groups) = _padded(xp, x, strides), (x.shape[0], weight.shape[0], strides.groups)
    y = xp.zeros((samples, groups, outputs // groups, int(np.prod(sizes))), dtype=x.dtype)
    if y.size:
        for place, cells in strides.places(sizes):
            y += xp.matmul(_of_place(weight, place, groups), _patch(padded, cells, groups))
    y = y.reshape(samples, outputs, *sizes)
    if bias is not None:
        y += bias.reshape(-1, *(1,) * len(sizes))
    return y


def correlate_backward_input(xp: Any, weight: Any, dy: Any, strides: Strides, shape: Sequence[int]) -> Any:
    """The gradient of x, of `shape`."""
    sizes, groups = dy.shape[2:], strides.groups
    inner = [n + 2 * p for n, p in zip(shape[2:], strides.padding, strict=True)]
    dx, grouped = xp.zeros((*shape[:2], *inner), dtype=dy.dtype), _grouped(dy, groups)
    if dy.size:
        for place, cells in strides.places(sizes):
            into = dx[cells]
            into += xp.matmul(_of_place(weight, place, groups).swapaxes(1, 2), grouped).reshape(into.shape)
    bounds = (slice(p, p + n) for n, p in zip(shape[2:], strides.padding, strict=True))
    return dx[(slice(None), slice(None), *bounds)]


def correlate_backward_params(xp: Any, x: Any, dy: Any, strides: Strides, weight: Any, bias: Any) -> None:
    """The gradients of weight and bias, each into (array, whether to add), or None."""
    padded, sizes, groups = _padded(xp, x, strides), dy.shape[2:], strides.groups
    if weight is not None:
        out, add = weight
        if not add:
            out[...] = 0
        grouped = _grouped(dy, groups)
        for place, cells in strides.places(sizes) if dy.size else ():
            products = xp.matmul(grouped, _patch(padded, cells, groups).swapaxes(2, 3))
            into = out[(slice(None), slice(None), *place)]
            into += products.sum(axis=0).reshape(into.shape)
    if bias is not None:
        out, add = bias
        total = dy.sum(axis=(0, *range(2, dy.ndim)))
        out[...] = out + total if add else total


def _padded(xp: Any, x: Any, strides: Strides) -> Any:
    if not any(strides.padding):
        return x
    y = xp.zeros((*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], strides.padding, strict=True))), dtype=x.dtype)
    y[(slice(None), slice(None), *(slice(p, p + n) for n, p in zip(x.shape[2:], strides.padding, strict=True)))] = x
    return y


def _of_place(weight: Any, place: tuple[int, ...], groups: int) -> Any:
    """(groups, outputs / groups, channels / groups)."""
    return weight[(slice(None), slice(None), *place)].reshape(groups, -1, weight.shape[1])


def _patch(x: Any, cells: tuple[slice, ...], groups: int) -> Any:
    """(samples, groups, channels / groups, outputs)."""
    return _grouped(x[cells], groups)


def _grouped(x: Any, groups: int) -> Any:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, int(np.prod(x.shape[2:])))
