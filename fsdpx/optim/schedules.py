"""Schedules: a learning rate as a function of the step. Values; callable with the 1-based step.

They nest: `WarmUp(100, Cosine(3e-4, 900))` climbs to 3e-4 at step 100 and is back at 0 from step 1000 on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fsdpx.errors import ConfigError
from fsdpx.optim.optimizer import demand_number

__all__ = ["Constant", "Cosine", "InverseSquareRoot", "Linear", "Step", "WarmUp"]


def _demand_steps(owner: object, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{type(owner).__name__}({name}={value!r}): a whole number of steps, 1 or more, is needed")


@dataclass(frozen=True)
class Constant:
    """lr at every step."""

    lr: float

    def __post_init__(self) -> None:
        demand_number(self, "lr", self.lr)

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Linear:
    """From lr at step 1 in a straight line to `final` at step `steps` + 1 and after."""

    lr: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        demand_number(self, "lr", self.lr)
        demand_number(self, "final", self.final)
        _demand_steps(self, "steps", self.steps)

    def __call__(self, step: int) -> float:
        done = min((step - 1) / self.steps, 1.0)
        return self.lr + (self.final - self.lr) * done


@dataclass(frozen=True)
class Cosine:
    """From lr at step 1 along half a cosine to `final` at step `steps` + 1 and after
    (Loshchilov & Hutter 2017, without restarts)."""

    lr: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        demand_number(self, "lr", self.lr)
        demand_number(self, "final", self.final)
        _demand_steps(self, "steps", self.steps)

    def __call__(self, step: int) -> float:
        done = min((step - 1) / self.steps, 1.0)
        return self.final + (self.lr - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True)
class InverseSquareRoot:
    """lr sqrt(steps / (steps + step - 1)). With `WarmUp(steps, ...)` before it: lr min(t / steps, sqrt(steps
    / t)), the schedule of Vaswani et al. 2017."""

    lr: float
    steps: int

    def __post_init__(self) -> None:
        demand_number(self, "lr", self.lr)
        _demand_steps(self, "steps", self.steps)

    def __call__(self, step: int) -> float:
        return self.lr * math.sqrt(self.steps / (self.steps + step - 1))


@dataclass(frozen=True)
class Step:
    """lr, multiplied by `factor` after every `every` steps."""

    lr: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        demand_number(self, "lr", self.lr)
        demand_number(self, "factor", self.factor)
        _demand_steps(self, "every", self.every)

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** ((step - 1) // self.every)


@dataclass(frozen=True)
class WarmUp:
    """A straight line from 0 (before step 1) to the first rate of `then` at step `steps`, which is the first
    step of `then`.

    then: a schedule, or a number for a constant rate (Goyal et al. 2017).
    """

    steps: int
    then: Callable[[int], float] | float

    def __post_init__(self) -> None:
        _demand_steps(self, "steps", self.steps)
        if not callable(self.then):
            demand_number(self, "then", self.then)

    def __call__(self, step: int) -> float:
        after = max(step - self.steps + 1, 1)
        rate = self.then(after) if callable(self.then) else self.then
        return rate * min(step / self.steps, 1.0)
