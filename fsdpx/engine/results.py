"""What a program gives its caller: the mean loss of a batch, and the scale of an update."""

from dataclasses import dataclass

from fsdpx.state.scaler import Scaler

__all__ = ["Mean", "Scale"]


@dataclass(frozen=True)
class Mean:
    """The loss of the global batch: total / weight, nan in a program without one. shared: the weight of all gradients
    that were added up."""

    total: float
    weight: float
    shared: float

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(frozen=True)
class Scale:
    """What every gradient is multiplied with in the update. norm: global gradient norm before clipping, nan if it was
    not asked for. skip: gradients overflowed, nothing is updated. rate: this step's learning rate. scaler: the loss
    scale from the next step on."""

    factor: float
    norm: float
    skip: bool
    rate: float
    scaler: Scaler
