"""The results of a program: the mean loss of a batch, the scale of an update, a replica's share of a round."""

from dataclasses import dataclass

from fsdpx.state.scaler import Scaler

__all__ = ["GradientScale", "Mean", "RoundShare"]


@dataclass(frozen=True)
class Mean:
    """The loss of the global batch: total / weight, nan in a program without one. shared: the weight of all gradients
    that were added up, 0 where no sample came. rate: the learning rate, on which ranks agreed in the same message; 0
    in a program without an update."""

    total: float
    weight: float
    shared: float
    rate: float = 0.0

    @property
    def each(self) -> float:
        """The divisor of gradients."""
        return self.shared or 1.0

    @property
    def value(self) -> float:
        return self.total / (self.weight or 1.0)


@dataclass(frozen=True)
class GradientScale:
    """The factor of every gradient in the update. norm: global gradient norm before clipping, nan if it was
    not asked for. skip: gradients overflowed, nothing is updated. rate: this step's learning rate. scaler: the loss
    scale from the next step on."""

    factor: float
    norm: float
    skip: bool
    rate: float
    scaler: Scaler


@dataclass(frozen=True)
class RoundShare:
    """own: of what all replicas have trained on in a round, this one's part. loss: mean over the batches of all of them
    in its last step."""

    own: float
    loss: float
