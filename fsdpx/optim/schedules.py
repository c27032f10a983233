"""Learning-rate schedules: callables that take the number of a step, counted from 1, and return the learning rate.

They can be nested: `WarmUp(100, Cosine(3e-4, 900))` rises to 3e-4 at step 100 and is 0 after step 1000."""

import math
from collections.abc import Callable

from fsdpx.core.base.config import convert_fields_to_python_numbers
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.name_hints import make_attribute_error, wrap_constructor_with_option_check
from fsdpx.errors import ConfigError
from fsdpx.optim.optimizer import require_number_in_range

__all__ = ["Constant", "Cosine", "InverseSquareRoot", "Linear", "Step", "WarmUp"]


def __getattr__(name: str) -> object:
    raise make_attribute_error(__name__, name, __all__)


class Schedule:
    """Base class of the schedules in this module. It raises ConfigError unless rates are finite numbers >= 0 and
    numbers of steps are at least 1."""

    _compute_rate: Callable[[int], float]

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        for name, value in vars(self).items():
            if name not in ("steps", "every"):
                if not callable(value):
                    require_number_in_range(self, name, value)
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                given = f"{type(self).__name__}({name}={value!r})"
                raise ConfigError(f"{given}: a whole number of steps, 1 or more, is needed")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step.

        Parameters
        ----------
        step : number of the update, counted from 1

        Raises
        ------
        ConfigError : if `step` is less than 1
        """
        if step < 1:
            raise ConfigError(f"{self!r}: there is no step {step}; pass the number of the update, which starts at 1")
        return self._compute_rate(step)


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Constant(Schedule):
    """Constant learning rate.

    Parameters
    ----------
    lr : the rate
    """

    lr: float

    def _compute_rate(self, step: int) -> float:
        return self.lr


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Linear(Schedule):
    """Linear interpolation from lr at step 1 to `final` at step `steps` + 1, and `final` after that.

    Parameters
    ----------
    lr : the rate of step 1
    steps : number of steps of the interpolation
    final : the rate after the interpolation
    """

    lr: float
    steps: int
    final: float = 0.0

    def _compute_rate(self, step: int) -> float:
        done = min((step - 1) / self.steps, 1.0)
        return self.lr + (self.final - self.lr) * done


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Cosine(Schedule):
    """Cosine decay from lr at step 1 to `final` at step `steps` + 1, and `final` after that (Loshchilov & Hutter 2017,
    without restarts).

    Parameters
    ----------
    lr, steps, final : as in `Linear`
    """

    lr: float
    steps: int
    final: float = 0.0

    def _compute_rate(self, step: int) -> float:
        done = min((step - 1) / self.steps, 1.0)
        return self.final + (self.lr - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """Inverse square root decay: the rate is `lr * sqrt(steps / (steps + step - 1))`.

    In `WarmUp(steps, InverseSquareRoot(lr, steps))`, the rate of step t is
    `lr * min(t / steps, sqrt(steps / (t - 1)))`. This is the schedule of Vaswani et al. (2017), except that the peak
    lasts two steps.

    Parameters
    ----------
    lr : the rate of step 1
    steps : time scale: the rate is `lr / 2` at step `3 * steps + 1`
    """

    lr: float
    steps: int

    def _compute_rate(self, step: int) -> float:
        return self.lr * math.sqrt(self.steps / (self.steps + step - 1))


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Step(Schedule):
    """Step decay: the rate starts at lr, and is multiplied by `factor` after every `every` steps.

    Parameters
    ----------
    lr : the rate of step 1
    every : number of consecutive steps with the same rate
    factor : factor that the rate is multiplied by after every `every` steps
    """

    lr: float
    every: int
    factor: float = 0.1

    def _compute_rate(self, step: int) -> float:
        return self.lr * self.factor ** ((step - 1) // self.every)


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class WarmUp(Schedule):
    """Linear warm-up from 0 (before step 1) to the first rate of `schedule` at step `steps` (Goyal et al. 2017). Then
    `schedule` begins, as in PyTorch's `SequentialLR`.

    Parameters
    ----------
    steps : number of steps of the warm-up
    schedule : the schedule that follows, or a number for a constant rate
    """

    steps: int
    schedule: Callable[[int], float] | float

    def _compute_rate(self, step: int) -> float:
        after = max(step - self.steps, 1)
        rate = self.schedule(after) if callable(self.schedule) else self.schedule
        return rate * min(step / self.steps, 1.0)
