"""Several datasets as one, each with its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.data.dataset import Dataset
from fsdpx.errors import ConfigError

__all__ = ["Mixture"]


class Mixture:
    """A dataset of samples of others, in the proportion of `weights`: any stretch of it has nearly that proportion.

    A dataset that is too small begins again from its first sample. Which sample comes where does not depend on ranks;
    `DataLoader(shuffle=True)` mixes the order of the whole.

    Parameters
    ----------
    datasets : whose samples have the same form
    weights : shares of samples, one for each; None: in proportion to the sizes
    size : samples in all; None: until the first dataset that is used up would begin again
    """

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float] | None = None, size: int | None = None
    ) -> None:
        self.datasets, sizes = tuple(datasets), np.array([len(one) for one in datasets], np.float64)
        shares = sizes if weights is None else np.asarray(weights, np.float64)
        if not self.datasets or shares.shape != sizes.shape or not (np.isfinite(shares) & (shares > 0)).all():
            raise ConfigError(
                f"Mixture({len(self.datasets)} datasets, weights={weights}): one positive weight for each is needed"
            )
        shares = shares / shares.sum()
        if size is None:
            size = int(np.min(sizes / shares) + 1e-9)
        if size < 1:
            raise ConfigError(f"Mixture(size={size}): 1 or more samples")
        # Sample j of a dataset has its place at (j + 1/2) / share: sorted, shares are held everywhere.
        counts = np.ceil(size * shares).astype(np.int64) + 1
        which = np.repeat(np.arange(len(sizes)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((number + 0.5) / shares[which], kind="stable")[:size]
        self.which = which[order].astype(np.int32)
        self.number = number[order] % sizes.astype(np.int64)[self.which]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> Any:
        return self.datasets[self.which[index]][int(self.number[index])]

    def __repr__(self) -> str:
        shares = np.bincount(self.which, minlength=len(self.datasets)) / len(self)
        parts = ", ".join(f"{share:.1%} {one!r}" for share, one in zip(shares, self.datasets, strict=True))
        return f"Mixture({len(self):,} samples: {parts})"
