"""The stand-ins for a loss and an optimiser that were not given: a trainer of them predicts, and trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from fsdpx.errors import ConfigError
from fsdpx.nn.losses import Loss
from fsdpx.optim.rounded import inside

__all__ = ["NoLoss", "NoOptimizer", "demand", "lacks"]


class NoLoss(Loss):
    """Where no loss was given."""

    acts_on = "position"  # suits every cut: it compares nothing

    def forward(self, env: Any, y: Any, target: Any) -> NoReturn:
        raise AssertionError("there is no loss")

    def backward(self, env: Any, saved: Any, seed: float) -> NoReturn:
        raise AssertionError("there is no loss")

    def validate(self, shape: tuple[int, ...], target: Any) -> None:
        """Nothing is compared."""

    def __repr__(self) -> str:
        return "no loss"


@dataclass(frozen=True, repr=False)
class NoOptimizer:
    """Where no optimiser was given: all parameters are frozen, and it keeps nothing."""

    lr: float = 0.0
    slots: tuple[str, ...] = ()

    def update(self, *_: Any, **__: Any) -> None:
        """No parameter is trained."""

    def __repr__(self) -> str:
        return "no optimizer"


REMEDY = {"loss": "loss=nn.MSE()", "optimizer": "optimizer=optim.AdamW(lr=1e-3)"}


def lacks(loss: Any, optimizer: Any) -> bool:
    """Whether the loss or the optimiser was not given to `distribute`."""
    return isinstance(loss, NoLoss) or isinstance(inside(optimizer), NoOptimizer)


def demand(call: str, loss: Any = None, optimizer: Any = None) -> None:
    """ConfigError where a call needs the loss or the optimiser given here, and it was not given to `distribute`."""
    without = ["loss"] if isinstance(loss, NoLoss) else []
    without += ["optimizer"] if isinstance(inside(optimizer), NoOptimizer) else []
    if without:
        raise ConfigError(
            f"{call}: this trainer was made without {' and '.join(without)}, to predict alone; say "
            f"distribute({', '.join(REMEDY[name] for name in without)}, ...)"
        )
