"""Averages of the parameters over time (EMA, SWA), stored in an additional state array of the optimizer."""

from typing import Any

import numpy as np

from fsdpx.core.array.kernels.half import add_widened
from fsdpx.core.base.config import convert_fields_to_python_numbers
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.errors import ConfigError
from fsdpx.optim.optimizer import (
    AVERAGE_SLOT,
    Average,
    Optimizer,
    SlotFormat,
    Slots,
    WrappedOptimizer,
    get_slot_formats,
    require_matching_shard,
    require_number_in_range,
    update_parameters,
)
from fsdpx.optim.segments import ShardSegments

__all__ = ["EMA", "SWA", "AveragedOptimizer"]


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class EMA:
    """Exponential moving average: after each step, `average = decay * average + (1 - decay) * parameters`. The first
    average equals the parameters after the first step, as in `torch.optim.swa_utils.AveragedModel`.

    Parameters
    ----------
    decay : weight of the old average, in [0, 1)
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        require_number_in_range(self, "decay", self.decay, below=1.0)

    def get_kept_share(self, step: int) -> float:
        return self.decay if step > 1 else 0.0


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class SWA:
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the parameters after steps `start`,
    `start + every`, `start + 2 * every`, and so on. Before step `start`, the average equals the parameters.

    Parameters
    ----------
    start : the first step whose parameters are averaged, 1 or more
    every : number of steps from one averaged step to the next, 1 or more
    """

    start: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"SWA({name}={value!r}): a whole number of steps, 1 or more, is needed")

    def get_kept_share(self, step: int) -> float:
        before, rest = divmod(step - self.start, self.every)
        return before / (before + 1) if rest == 0 and before >= 0 else float(before >= 0)


@dataclass(frozen=True)
class AveragedOptimizer(WrappedOptimizer):
    """An optimizer that keeps an average of the parameters in addition to its own state.

    The stored value is the average minus the parameters. Before the first step, this difference is 0 for any initial
    values. It stays correct if parameters are frozen or loaded, and no copy of the old parameters is needed to update
    it.

    Parameters
    ----------
    inner : the optimizer that makes the update
    averaging : an `EMA`, an `SWA`, or any other object with a method `get_kept_share(step)`
    dtype : dtype of the average; if None, the dtype of the shard. A 16-bit shard needs a float32 average, because the
        change in one step is too small for 16 bits, and because the rounding errors of the parameters must not
        accumulate in the average
    """

    inner: Optimizer
    averaging: Average
    dtype: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.averaging, type) or not callable(getattr(self.averaging, "get_kept_share", None)):
            raise ConfigError(f"average={self.averaging!r}: fsdpx.EMA(...) or fsdpx.SWA(...) is needed")
        if AVERAGE_SLOT in self.inner.slots:
            raise ConfigError(
                f"average={self.averaging!r}: {type(self.inner).__name__} keeps an average itself; leave it out"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.inner.slots, AVERAGE_SLOT)

    @property
    def slot_formats(self) -> dict[str, SlotFormat]:
        return {**get_slot_formats(self.inner), AVERAGE_SLOT: SlotFormat(self.dtype)}

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: ShardSegments,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Update the parameters in place with the inner optimizer, and then update their average. See
        `Optimizer.update`."""
        require_matching_shard(self, p, g, slots, step, segments)
        inner_slots, distance = {name: slots[name] for name in self.inner.slots}, slots[AVERAGE_SLOT]
        # do not warn about overflow in updates; gradients are checked for NaN and Inf elsewhere
        with np.errstate(all="ignore"):
            _add_parameters(xp, distance, p)
            update_parameters(self.inner, xp, p, g, inner_slots, lr=lr, step=step, segments=segments, scale=scale)
            xp.negative(distance, out=distance)
            _add_parameters(xp, distance, p)
            distance *= distance.dtype.type(-self.averaging.get_kept_share(step))


def _add_parameters(xp: Any, total: Any, p: Any) -> None:
    """Add the parameters `p` to `total` in place. The dtype of `p` may have fewer bits than the dtype of `total`."""
    if total.dtype == p.dtype:
        total += p
    else:
        add_widened(xp, p, total)
