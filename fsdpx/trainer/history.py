"""The history of a training loop."""

import math
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["History"]

Values = list[tuple[int, float]]


@dataclass
class History:
    """The history of a run. losses: one per step. validation: (step, loss) pairs. metrics: by name, (step, value)
    pairs. epochs: whole ones since the very start. reason: why training ended, empty before. seconds: in training steps
    and their data, validation left out. seen: samples (or what `count` counts) of all ranks in this run. before: steps
    that earlier runs made, if this one goes on from a checkpoint. checkpoint: the last one that was saved or
    resumed."""

    losses: list[float] = field(default_factory=list)
    validation: Values = field(default_factory=list)
    metrics: dict[str, Values] = field(default_factory=dict)
    epochs: int = 0
    reason: str = ""
    seconds: float = 0.0
    seen: int = 0
    before: int = 0
    checkpoint: Path | None = None

    @property
    def steps(self) -> int:
        """Steps made since the very start."""
        return self.before + len(self.losses)

    @property
    def best(self) -> float:
        """Lowest validation loss, inf without validation."""
        return min((_or_inf(loss) for _, loss in self.validation), default=math.inf)

    @property
    def best_step(self) -> int | None:
        """The first step with the lowest validation loss."""
        return next((step for step, loss in self.validation if loss == self.best), None)

    @property
    def since_best(self) -> int:
        """Validations after the best one."""
        losses = [_or_inf(loss) for _, loss in self.validation]
        return len(losses) - 1 - losses.index(self.best) if losses else 0


def _or_inf(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss
