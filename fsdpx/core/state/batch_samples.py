"""Remember which samples of the dataset are in the arrays of a batch. If ranks must have the same samples, they can
then check this."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["get_digest_of_first_recorded_array", "record_sample_digest"]

_known: dict[int, tuple[weakref.ref[Any], int]] = {}
"""For the arrays of batches that come from a loader, maps the id of an array to a pair: a weak reference to the array,
and a digest of the indices of the array's samples."""


def record_sample_digest(batch: Any, digest: int) -> None:
    """Record `digest`, the digest of the sample indices of a batch, for each array of the batch."""
    for array in _iterate_arrays(batch):
        owner, key = _find_owner(array), id(_find_owner(array))
        if owner.nbytes == array.nbytes:  # do not record a view of a part of a larger array, such as the dataset
            with suppress(TypeError):  # arrays of other libraries may allow no weak references
                _known[key] = weakref.ref(owner, lambda _, key=key: _known.pop(key, None)), digest  # type: ignore[misc]


def get_digest_of_first_recorded_array(batch: Any) -> int | None:
    """Find the first array of a batch for which a digest has been recorded, and return this digest. Return None if
    there is no such array. If an array is a view, use the digest of the viewed array."""
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
    """Return the array that owns the memory of `array`, which may be a view. PyTorch tensors are supported too."""
    while hasattr(base := getattr(array, "base", getattr(array, "_base", None)), "nbytes"):
        array = base
    return array
