"""The protocol of optimisers, and the checks that all of them share."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fsdpx.config import python_fields, python_number
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.optim.kept import kept_of
from fsdpx.optim.segments import NORMS, Groups, Segments

__all__ = ["Optimizer", "Rate", "Slots", "no_decay", "rate"]

Rate = float | Callable[[int], float]
"""A learning rate: a number, or a schedule from 1-based step to number."""
Slots = Mapping[str, Any]
"""Name -> state array of a shard."""

OVERRIDES = ("lr_scale", "weight_decay")

no_decay: Groups = {pattern: {"weight_decay": 0.0} for pattern in ("*bias", NORMS)}
"""Groups for biases, and for what norms scale and shift by, whatever they are called: `AdamW(groups=optim.no_decay)`. A
norm of your own says so in its `Spec(..., norm=True)`.

To add groups of your own: `{"embed.*": {"weight_decay": 0.0}, **optim.no_decay}`."""


class Optimizer(Protocol):
    """Updates one flat shard in place. Holds hyperparameters only; the caller owns its state."""

    @property
    def lr(self) -> Rate:
        """The learning rate, a number or a schedule."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state arrays, each as large as the shard and zero before step 1. `kept`, if there is one,
        says by name which of them are not: see `Kept`."""

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0
    ) -> None:
        """One step on a shard, in place.

        Parameters
        ----------
        xp : namespace of the arrays
        p : the shard's parameters, flat `(n,)`; changed in place
        g : their gradient `(n,)` before `scale`; not changed
        slots : name -> state array `(n,)`; changed in place
        lr : `rate(optimizer, step)`
        step : 1 for the first update
        segments : which parameters the shard holds
        scale : factor on g
        """


def rate(optimizer: Optimizer, step: int) -> float:
    """The learning rate of 1-based `step`; ConfigError if a schedule returns no finite number >= 0."""
    value = python_number(optimizer.lr(step) if callable(optimizer.lr) else optimizer.lr)
    if not _is_number(value) or value < 0:
        raise ConfigError(
            f"the learning rate of step {step} is {value!r}: {optimizer.lr!r} must give a finite number >= 0"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_number(owner: object, name: str, value: object, low: float = 0.0, below: float | None = None) -> None:
    """ConfigError unless `value` is a finite number in [low, below)."""
    wanted = f"a finite number >= {low:g}" + ("" if below is None else f" and < {below:g}")
    if not _is_number(value) or value < low or (below is not None and value >= below):  # type: ignore[operator]
        raise ConfigError(f"{type(owner).__name__}({name}={value!r}): {wanted} is needed")


def check_options(owner: Any, but: str = "") -> None:
    """ConfigError unless those of lr, betas, momentum, eps, weight_decay and groups that `owner` has are valid.
    but: the name of one that is of another kind there."""
    python_fields(owner)
    if not callable(owner.lr):
        check_number(owner, "lr", owner.lr)
    if hasattr(owner, "betas"):
        _check_betas(owner, owner.betas)
    for name, below in (("momentum", 1.0), ("eps", None), ("weight_decay", None)):
        if hasattr(owner, name) and name != but:
            check_number(owner, name, getattr(owner, name), below=below)
    _check_groups(owner, owner.groups)


def _check_betas(owner: object, betas: object) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"{type(owner).__name__}(betas={betas!r}): a pair of numbers is needed, like (0.9, 0.999)")
    for i, beta in enumerate(betas):
        check_number(owner, f"betas[{i}]", beta, below=1.0)


def _check_groups(owner: object, groups: object) -> None:
    kind = type(owner).__name__
    if not isinstance(groups, Mapping):
        raise ConfigError(f"{kind}(groups={groups!r}): a dict from name pattern to overrides is needed")
    for pattern, values in groups.items():
        if not isinstance(pattern, str) or not isinstance(values, Mapping):
            raise ConfigError(f"{kind}: group {pattern!r}: {values!r} is no name pattern with a dict of overrides")
        for name, value in values.items():
            if name not in OVERRIDES:
                raise ConfigError(f"{kind}: group {pattern!r} sets {name!r}; a group can set {' and '.join(OVERRIDES)}")
            check_number(owner, f"groups[{pattern!r}][{name!r}]", value)


def check_shard(owner: object, p: Any, g: Any, slots: Slots, step: int, segments: Segments) -> None:
    """ShapeError unless all arrays have the shard's size; ConfigError unless the slots are those of `owner`."""
    kind = type(owner).__name__
    names = tuple(owner.slots)  # type: ignore[attr-defined]
    if sorted(slots) != sorted(names):
        raise ConfigError(f"{kind}: needs the slots {list(names)}, got {sorted(slots)}")
    kept = kept_of(owner)
    for name, array in (("p", p), ("g", g), *slots.items()):
        plain = name not in kept or kept[name].plain
        size = segments.size if plain else sum(kept[name].count(s) for s in segments.items)
        if array.shape != (size,):
            held = f"({size},)"
            raise ShapeError(f"{kind}: {name} has shape {array.shape}, but its segments hold {held} elements")
    if step < 1:
        raise ConfigError(f"{kind}: step {step} is below 1, the first")


def has_data(owner: object, xp: Any, p: Any, g: Any, slots: Slots, step: int, segments: Segments) -> bool:
    """Whether there are numbers to update: not in a dry run, which only checks. Errors as of `check_shard`."""
    check_shard(owner, p, g, slots, step, segments)
    return not getattr(xp, "holds_no_data", False)
