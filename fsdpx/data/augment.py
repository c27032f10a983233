"""Augmentation: random changes of samples that are a function of (seed, epoch, sample), never of a rank."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fsdpx.array.random import uniform
from fsdpx.errors import ConfigError, DataError

__all__ = ["Augmentation", "Draw", "RandomCrop", "RandomFlip"]


@dataclass(frozen=True)
class Draw:
    """Random numbers for the samples of a batch.

    Parameters
    ----------
    seed, epoch : of the loader
    name : what tells the augmentations of a loader apart
    samples : their numbers in the dataset, `(k,)`
    """

    seed: int
    epoch: int
    name: str
    samples: np.ndarray

    def uniform(self, count: int) -> np.ndarray:
        """`(k, count)` float64 in [0, 1): `count` numbers of each sample."""
        stream = f"augment.{self.name}.{self.epoch}"
        rows = [uniform(self.seed, stream, i * count, (i + 1) * count) for i in self.samples.tolist()]
        return np.array(rows, np.float64).reshape(len(rows), count)


class Augmentation(Protocol):
    """A function of a batch and of random numbers, one row of them per sample."""

    def __call__(self, batch: Any, draw: Draw) -> Any: ...


@dataclass(frozen=True)
class RandomFlip:
    """Mirrors images `(k, channels, height, width)`, the first entry of a batch, left to right with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p <= 1:
            raise ConfigError(f"RandomFlip(p={self.p!r}): a number between 0 and 1 is needed")

    def __call__(self, batch: Any, draw: Draw) -> Any:
        images = _images(self, batch)
        chosen = draw.uniform(1)[:, 0] < self.p
        flipped = images.copy()
        flipped[chosen] = images[chosen][..., ::-1]
        return _with(batch, flipped)


@dataclass(frozen=True)
class RandomCrop:
    """Moves images `(k, channels, height, width)`, the first entry of a batch, by up to `padding` pixels down or up and
    right or left, each amount equally likely: a crop of their own size from images with zeros around them."""

    padding: int

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 1:
            raise ConfigError(f"RandomCrop(padding={self.padding!r}): a whole number of pixels, 1 or more, is needed")

    def __call__(self, batch: Any, draw: Draw) -> Any:
        images, edge = _images(self, batch), self.padding
        height, width = images.shape[2:]
        padded = np.pad(images, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
        corners = (draw.uniform(2) * (2 * edge + 1)).astype(np.int64)
        moved = np.empty_like(images)
        for n, (top, left) in enumerate(corners.tolist()):
            moved[n] = padded[n, :, top : top + height, left : left + width]
        return _with(batch, moved)


def _images(augmentation: Any, batch: Any) -> np.ndarray:
    images = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(images, np.ndarray) or images.ndim != 4:
        have = getattr(images, "shape", type(images).__name__)
        raise DataError(f"{augmentation} wants images (samples, channels, height, width) first in a batch, got {have}")
    return images


def _with(batch: Any, images: np.ndarray) -> Any:
    return (images, *batch[1:]) if isinstance(batch, tuple | list) else images
