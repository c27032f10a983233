"""The common part of optimisers whose update of an element depends on no other element."""

from abc import ABC, abstractmethod
from typing import Any

from fsdpx.optim.optimizer import Slots, check_options, check_shard
from fsdpx.optim.segments import Groups, Segments

__all__ = ["Elementwise"]


class Elementwise(ABC):
    """The base of these optimisers: checks its options, and updates a shard run by run of equal hyperparameters."""

    weight_decay: float
    groups: Groups

    def __post_init__(self) -> None:
        check_options(self)

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0
    ) -> None:
        """One step in place, see `Optimizer.update`."""
        check_shard(self, p, g, slots, step, segments)
        for run in segments.runs(self.groups):
            at = slice(run.start, run.stop)
            rates = {"lr": lr * run.lr_scale, "weight_decay": run.decay(self.weight_decay), "scale": scale}
            self._apply(xp, p[at], g[at], {name: array[at] for name, array in slots.items()}, step, **rates)

    @abstractmethod
    def _apply(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        """Update the elements of one run. rates: its lr, weight_decay and the scale of g."""
