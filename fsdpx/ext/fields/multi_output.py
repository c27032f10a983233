"""Losses for models with several outputs, or with scalar outputs that every rank of a field holds in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.layer import Array, LayerContext, require_finite_arguments
from fsdpx.nn.losses import Loss, WrappedLoss, backward_pieces, sum_weighted_loss_terms_over_batch
from fsdpx.nn.shard_specs import FieldPartition, Kind

__all__ = ["MultiOutputLoss", "adapt_loss_to_output_shardings"]


def adapt_loss_to_output_shardings(loss: Loss, kinds: Sequence[Kind]) -> Loss:
    """Return `loss`, adapted to how the outputs are distributed over the ranks. For each output, `kinds` contains the
    partition of a field, or `Replicated` for scalars. If there are several outputs, any loss other than
    `MultiOutputLoss` is returned unchanged."""
    if len(kinds) > 1:
        return loss.bind_output_shardings(kinds) if isinstance(loss, MultiOutputLoss) else loss
    return kinds[0].bind_loss(loss) if isinstance(kinds[0], FieldPartition) else _ScalarLoss(loss)


class _ScalarLoss(WrappedLoss):
    """Computes `loss` for an output that every rank of a field holds in full. The total and the weight are divided by
    the number of these ranks so that each sample counts once."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.acts_on = loss.acts_on

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        ranks = env.mesh.parts.size
        total, weight, saved = self.loss.forward(self._make_context_of_one_rank(env), y, target)
        return total / ranks, weight / ranks, saved

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        return self.loss.backward(self._make_context_of_one_rank(env), saved, seed / env.mesh.parts.size)

    def _make_context_of_one_rank(self, env: LayerContext) -> LayerContext:
        """Return a context in which the field has a single part. A loss that sums over the parts of a field then counts
        the values only once."""
        return env if env.mesh.parts.size == 1 else replace(env, mesh=make_single_rank_axes())


class MultiOutputLoss(Loss):
    """Weighted sum of losses, one for each output of a model: the sum of w_i loss_i(output_i, target_i).

    The target is a tuple with one array for each output. On a grid, each rank passes its own part of the target if the
    output is a field, and the full target if the output consists of scalars (samples, n). Multiplying this loss by a
    number multiplies all `loss_weights`.

    The sum is averaged over all samples. A loss with `skipna` is first averaged within each sample, and is 0 for
    samples without a known target. If no loss has a known target for a sample, the sample does not count. Other losses
    whose weight varies from sample to sample, such as losses with `ignore_index`, are averaged over each microbatch, so
    the result depends on the number of microbatches. The sum over the parts of a field takes one all-reduce of 8 bytes
    per loss, or per sample with `skipna`.

    Parameters
    ----------
    losses : one loss for each output, in the order of the model's outputs
    loss_weights : the weight w_i of each loss; if None (default), all weights are 1
    """

    def __init__(self, *losses: Loss, loss_weights: Sequence[float] | None = None) -> None:
        if not losses or not all(isinstance(loss, Loss) for loss in losses):
            raise ConfigError(f"MultiOutputLoss: give a loss for each output, got {', '.join(map(repr, losses))}")
        self.losses = losses
        self.loss_weights = None if loss_weights is None else tuple(float(w) for w in loss_weights)
        if self.loss_weights is not None and len(self.loss_weights) != len(losses):
            raise ConfigError(f"MultiOutputLoss: {len(losses)} losses have {len(self.loss_weights)} loss_weights")
        require_finite_arguments(self, **{f"loss_weights[{i}]": w for i, w in enumerate(self.loss_weights or ())})
        self.kernel_names = tuple(dict.fromkeys(name for loss in losses for name in loss.kernel_names))
        self.skipna = any(loss.skipna for loss in losses)

    def __repr__(self) -> str:
        return f"MultiOutputLoss({', '.join(map(repr, self.losses))}, loss_weights={self.loss_weights})"

    @property
    def _terms(self) -> list[tuple[float, Loss]]:
        return list(zip(self.loss_weights or (1.0,) * len(self.losses), self.losses, strict=True))

    def _list_terms(self) -> Sequence[tuple[float, Loss]]:
        raise ConfigError(
            f"{self!r} cannot be added to a loss: add losses of one output, as in "
            "nn.MultiOutputLoss(nn.MSELoss() + nn.L1Loss(), nn.MSELoss())"
        )

    def __mul__(self, factor: float) -> Loss:
        if not isinstance(factor, Real):
            return NotImplemented
        return MultiOutputLoss(*self.losses, loss_weights=[float(factor) * weight for weight, _ in self._terms])

    __rmul__ = __mul__

    def bind_output_shardings(self, kinds: Sequence[Kind]) -> MultiOutputLoss:
        """Return a copy of this loss that is adapted to `kinds`, the distribution of each output over the ranks.

        Parameters
        ----------
        kinds : for each output, the partition of a field, or `Replicated` for scalars

        Raises
        ------
        ConfigError : if the number of outputs differs from the number of losses
        """
        self._require_output_count(len(kinds))
        bound = (adapt_loss_to_output_shardings(loss, [kind]) for loss, kind in zip(self.losses, kinds, strict=True))
        return MultiOutputLoss(*bound, loss_weights=self.loss_weights)

    def forward(self, env: LayerContext, y: Any, target: Any) -> tuple[float, float, Any]:
        by_sample = [loss.skipna and loss.counts == "unknown" for loss in self.losses]
        return sum_weighted_loss_terms_over_batch(env, self._terms, list(zip(y, target, strict=True)), by_sample)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Any:
        rows = zip(self.losses, saved, strict=True)
        return tuple(backward_pieces(env, loss, pieces, seed) for loss, pieces in rows)

    def validate(self, shape: tuple[Any, ...], target: Any) -> None:
        outputs = len(shape) if all(isinstance(one, tuple) for one in shape) else 1
        self._require_output_count(outputs)
        if not isinstance(target, tuple) or len(target) != outputs:
            raise DataError(f"{self!r}: the target must be a tuple with one array for each of {outputs} outputs")
        for loss, one, wanted in zip(self.losses, shape, target, strict=True):
            loss.validate(one, wanted)

    def _require_output_count(self, outputs: int) -> None:
        if outputs == 1:
            raise ConfigError(f"{self!r} is for several outputs, and the model has 1: give the loss of it by itself")
        if outputs != len(self.losses):
            raise ConfigError(f"{self!r} has {len(self.losses)} losses, and the model {outputs} outputs")
