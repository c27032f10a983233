"""What happened in a training loop."""

import math
from dataclasses import dataclass, field

__all__ = ["History"]


@dataclass
class History:
    """What happened. losses: one per step. validation: (step, loss) pairs. reason: why training ended. before: steps
    that earlier runs made, if this one goes on from a checkpoint."""

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    epochs: int = 0
    reason: str = "all epochs done"
    seconds: float = 0.0  # in training steps and their data, validation left out
    before: int = 0

    @property
    def steps(self) -> int:
        """Steps made since the very start."""
        return self.before + len(self.losses)

    @property
    def best(self) -> float:
        """Lowest validation loss, inf without validation."""
        return min((loss for _, loss in self.validation), default=math.inf)
