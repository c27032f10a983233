"""The protocol of datasets, and datasets in arrays."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fsdpx.errors import DataError

__all__ = ["ArrayDataset", "Dataset", "collate"]


class Dataset(Protocol):
    """Samples by number. If it also has `take(indices) -> batch`, the loader reads whole batches with it; if it has
    `__getitems__(numbers) -> samples`, as datasets of PyTorch and Hugging Face do, with that."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class ArrayDataset:
    """Arrays with one sample per row: `ArrayDataset(x, y)[3]` is `(x[3], y[3])`.

    Parameters
    ----------
    arrays : dim 0 of each is samples, 1 or more; memory-mapped arrays stay on disk
    """

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise DataError("ArrayDataset() needs at least one array")
        self.arrays = tuple(a if hasattr(a, "shape") else np.asarray(a) for a in arrays)
        if any(a.ndim == 0 for a in self.arrays):
            raise DataError("ArrayDataset: a single number has no samples: dim 0 of every array must be samples")
        counts = [a.shape[0] for a in self.arrays]
        if len(set(counts)) > 1:
            raise DataError(f"ArrayDataset: the arrays have different numbers of samples: {counts}")
        if counts[0] == 0:
            raise DataError("ArrayDataset: the arrays have no samples: the dataset is empty")

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(a[index] for a in self.arrays)

    def take(self, indices: np.ndarray) -> tuple[Any, ...]:
        """The rows at `indices` `(k,)`, one array per array; k may be 0."""
        return tuple(a[indices] for a in self.arrays)


def collate(samples: Sequence[Any]) -> Any:
    """Samples stacked along a new dim 0: arrays and numbers to an array, tuples and dicts entry by entry."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(collate(column) for column in zip(*samples, strict=True))
    arrays = [np.asarray(sample) for sample in samples]
    odd = next((a for a in arrays if a.shape != arrays[0].shape), None)
    if odd is not None:
        raise DataError(
            f"samples of shapes {arrays[0].shape} and {odd.shape} do not stack to a batch: "
            "pad them, or pass DataLoader(collate=...)"
        )
    return np.stack(arrays)


def emptied(batch: Any) -> Any:
    """A batch of the same structure with no rows."""
    if isinstance(batch, dict):
        return {key: emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(emptied(value) for value in batch)
    return batch[:0]
