"""Activations on disk: a value taken apart into the memory of its arrays and what is made again from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fsdpx.array.arena import address
from fsdpx.shapes.array import Root, ShapeArray

__all__ = ["Spilled", "root_of", "spill"]

LEAST = 1 << 14
"""Bytes of an array that is worth a read and a write."""


class ArrayAddress(NamedTuple):
    """Where an array lies in memory of number `root`. strides: None for arrays without data."""

    root: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: Any


@dataclass
class Spilled:
    """A value without its large arrays. roots: the memory that these lay in, until it is written; sizes: its bytes."""

    tree: Any = None
    roots: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def value(self, memory: list[Any]) -> Any:
        """The value, with the arrays in other memory that holds the same."""
        return _mapped(
            self.tree, lambda leaf: _array(memory[leaf.root], leaf) if isinstance(leaf, ArrayAddress) else leaf
        )


def spill(value: Any, stays: Callable[[Any], bool]) -> Spilled:
    """Take apart tuples, lists and dicts down to their arrays. Memory that `stays` wants to keep, that is small, or of
    which they use less than half, stays."""
    made, numbers = Spilled(), dict[int, int]()

    def apart(leaf: Any) -> Any:
        root = root_of(leaf)
        if root is None or not _worth(leaf, root) or stays(root):
            return leaf
        if id(root) not in numbers:
            numbers[id(root)] = len(made.roots)
            made.roots.append(root)
            made.sizes.append(int(root.nbytes))
        if isinstance(root, Root):
            return ArrayAddress(numbers[id(root)], 0, leaf.shape, None, leaf.dtype)
        return ArrayAddress(numbers[id(root)], address(leaf) - address(root), leaf.shape, leaf.strides, leaf.dtype)

    made.tree = _mapped(value, apart)
    return made


def root_of(array: Any) -> Any:
    """The array in whose memory this one lies, None if it is no array; of arrays without data their `Root`."""
    if isinstance(array, ShapeArray):
        return array.root
    if not isinstance(array, np.ndarray):
        return None
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _worth(array: Any, root: Any) -> bool:
    own = array.size * array.dtype.itemsize
    whole = isinstance(root, Root) or root.flags.c_contiguous or root.flags.f_contiguous
    return bool(whole and root.nbytes >= LEAST and 2 * own >= root.nbytes)


def _array(memory: Any, place: ArrayAddress) -> Any:
    if place.strides is None:
        return ShapeArray(place.shape, place.dtype, memory)
    return np.ndarray(place.shape, place.dtype, memory, place.offset, place.strides)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with other leaves."""
    if isinstance(value, dict):
        return {name: _mapped(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    if type(value) is tuple:
        return tuple(_mapped(one, change) for one in value)
    if isinstance(value, tuple) and not isinstance(value, ArrayAddress):  # with named fields
        return type(value)(*(_mapped(one, change) for one in value))
    return change(value)
