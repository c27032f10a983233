"""Data ranks that train on the same samples by mistake: noticed in the first steps, and named once."""

import warnings
from collections.abc import Sequence
from typing import Any

from fsdpx.comm.mesh import Axes

__all__ = ["Twins"]

ENOUGH = 8
"""Samples in a row that are the same on all data ranks before anything is said: a few may be so by chance."""


class Twins:
    """Doubts that data ranks have samples of their own, until two of them differ once or it has been said.

    Samples that are all equal tell nothing, and neither do empty batches: they may be meant, or be what an idle rank
    has."""

    def __init__(self, axes: Axes) -> None:
        self._size, self._speaks = axes.data.size, axes.world.rank == 0
        self.doubted, self._same = self._size > 1, 0

    def see(self, alike: bool, arrays: Sequence[Any]) -> None:
        """The next batch. alike: it is the same on all data ranks, which therefore all decide alike."""
        if not alike:
            self.doubted = False
        elif any(bool((a != a[:1]).any()) for a in arrays):
            self._same += arrays[0].shape[0]
            self.doubted = self._same < ENOUGH
            if not self.doubted and self._speaks:
                self._warn()

    def _warn(self) -> None:
        warnings.warn(
            f"fsdpx: all {self._size} data ranks train on the same samples ({self._same} so far), so together they do "
            "what one rank would: give each its part of the global batch, as DataLoader(comm=trainer.data) does, or "
            "cut it by trainer.data.rank and trainer.data.size",
            RuntimeWarning,
            stacklevel=2,
        )
