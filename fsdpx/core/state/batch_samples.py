"""Which samples of a dataset the arrays of a batch hold, so that ranks that must have the same samples can compare
them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["find_samples", "record_samples"]

_known: dict[int, tuple[weakref.ref[Any], int]] = {}
"""For each array of a batch that a loader has returned, by its id: a weak reference to it, and a digest of the indices
of its samples."""


def record_samples(batch: Any, digest: int) -> None:
    """Record that all arrays of a batch hold the samples whose indices have this digest."""
    for array in _iterate_arrays(batch):
        owner, key = _find_owner(array), id(_find_owner(array))
        if owner.nbytes == array.nbytes:  # otherwise it is a view of a larger array, such as the dataset
            with suppress(TypeError):  # arrays of other libraries may allow no weak references
                _known[key] = weakref.ref(owner, lambda _, key=key: _known.pop(key, None)), digest  # type: ignore[misc]


def find_samples(batch: Any) -> int | None:
    """Return the digest that was recorded for an array of a batch or for an array of which it is a view, or None."""
    for array in _iterate_arrays(batch):
        reference, digest = _known.get(id(owner := _find_owner(array)), (None, 0))
        if reference is not None and reference() is owner:
            return digest
    return None


def _iterate_arrays(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            yield from _iterate_arrays(part)
    elif hasattr(batch, "nbytes"):
        yield batch


def _find_owner(array: Any) -> Any:
    """Return the array whose memory an array, or a tensor of PyTorch, is a view of."""
    while hasattr(base := getattr(array, "base", getattr(array, "_base", None)), "nbytes"):
        array = base
    return array
