"""What an optimiser is: its slots, the format that they are kept in, and updates element by element.

An update is flat, in place, and gives the same bits whatever the cut and the version. It is declared once, in the file
of its optimiser: as array code, and as a loop that runs on NumPy's float32 and float64 if Numba is installed. Threads
(`array.parallel`) cut the elements among them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fsdpx.core.array.devices import device_of
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.parallel import parallel_for_rows
from fsdpx.core.base.config import convert_fields_to_python, to_python_number
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.optim.segments import NORMS, ParamGroups, ShardSegments

__all__ = [
    "AVERAGE_SLOT",
    "BLOCK_ELEMENTS",
    "BY_NAME",
    "UNSCHEDULED",
    "Elementwise",
    "LearningRate",
    "Optimizer",
    "SlotFormat",
    "Slots",
    "UpdateFormula",
    "WrappedOptimizer",
    "add_decay",
    "get_learning_rate",
    "get_scheduled_values",
    "get_slot_formats",
    "lerp_",
    "lerp_square_",
    "make_zero_slots",
    "needs_full_parameters",
    "no_decay",
    "unwrap",
    "update",
    "update_parameters",
]  # fmt: skip

AVERAGE_SLOT = "average"
"""The slot in which an average is kept, as its distance from the parameters."""


@dataclass(frozen=True)
class SlotFormat:
    """The format of a slot, whose elements are those of the shard.

    dtype: its name; None: that of the shard."""

    dtype: str | None = None

    def format_for(self, shard: Any) -> Any:
        """The format of the slot beside a shard of format `shard`."""
        return np.dtype(self.dtype or shard)


def get_slot_formats(optimizer: Any) -> dict[str, SlotFormat]:
    """By slot. An optimiser names those that differ in `slot_formats`."""
    named: Mapping[str, SlotFormat] = getattr(optimizer, "slot_formats", {})
    return {name: named.get(name, SlotFormat()) for name in optimizer.slots}


def needs_full_parameters(optimizer: Any) -> bool:
    """Whether an optimiser must see whole parameters, so that no tensor axis may cut them."""
    return bool(getattr(optimizer, "whole", False))


def make_zero_slots(xp: Any, optimizer: Any, segments: ShardSegments, dtype: Any) -> dict[str, Any]:
    """The slots of a shard of format `dtype` before step 1."""
    return {name: xp.zeros(segments.size, kept.format_for(dtype)) for name, kept in get_slot_formats(optimizer).items()}


class Elementwise(ABC):
    """The base of these optimisers: checks its options, and updates a shard run by run of equal hyperparameters."""

    weight_decay: float
    groups: ParamGroups

    def __post_init__(self) -> None:
        check_options(self)

    def update(
        self,
        xp: Any,
        p: Any,
        g: Any,
        slots: Slots,
        *,
        lr: float,
        step: int,
        segments: ShardSegments,
        scale: float = 1.0,
    ) -> None:
        """One step in place, see `Optimizer.update`."""
        check_shard(self, p, g, slots, step, segments)
        for run in segments.hyperparameter_spans(self.groups):
            span = slice(run.start, run.stop)
            rates = {"lr": lr * run.lr_scale, "weight_decay": run.decay_or(self.weight_decay), "scale": scale}
            own_slots = {name: array[span] for name, array in slots.items()}
            self._update_span(xp, p[span], g[span], own_slots, step - run.missed, **rates)

    @abstractmethod
    def _update_span(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        """Update the elements of one run. step: how many updates they have had, this one included. rates: the lr and
        weight_decay of the run, and the scale of g."""


LearningRate = float | Callable[[int], float]
"""A learning rate: a number, or a schedule from 1-based step to number."""
Slots = Mapping[str, Any]
"""Name -> state array of a shard."""

GROUP_OPTIONS = ("lr_scale", "weight_decay")

no_decay: ParamGroups = {pattern: {"weight_decay": 0.0} for pattern in ("*bias", NORMS)}
"""Groups for biases, and for what norms scale and shift by, whatever they are called: `AdamW(groups=optim.no_decay)`. A
norm of your own says so in its `ParameterSpec(..., norm=True)`.

To add groups of your own: `{"embed.*": {"weight_decay": 0.0}, **optim.no_decay}`."""


class Optimizer(Protocol):
    """Updates one flat shard in place. Holds hyperparameters only; the caller owns its state."""

    @property
    def lr(self) -> LearningRate:
        """The learning rate, a number or a schedule."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state arrays, each as large as the shard and zero before step 1. `slot_formats`, if there is
        one, says by name which have another format: see `SlotFormat`."""

    def update(
        self,
        xp: Any,
        p: Any,
        g: Any,
        slots: Slots,
        *,
        lr: float,
        step: int,
        segments: ShardSegments,
        scale: float = 1.0,
    ) -> None:
        """One step on a shard, in place.

        Parameters
        ----------
        xp : namespace of the arrays
        p : the shard's parameters, flat `(n,)`; changed in place
        g : their gradient `(n,)` before `scale`; not changed
        slots : name -> state array `(n,)`; changed in place
        lr : `rate(optimizer, step)`
        step : 1 for the first update. Where some parameters have missed updates, see `update_parameters`
        segments : which parameters the shard holds
        scale : factor on g
        """


def update_parameters(
    optimizer: Optimizer,
    xp: Any,
    p: Any,
    g: Any,
    slots: Slots,
    *,
    lr: float,
    step: int,
    segments: ShardSegments,
    scale: float = 1.0,
) -> bool:
    """Update a shard, every parameter by its own count of updates, as `torch.optim` does. Arguments as of
    `Optimizer.update`, with the step of the trainer. False: nothing ran, since the device has no values to change.

    An optimiser that works element by element is called for each stretch of parameters with equal counts, and its
    `step` is that count. One that communicates is called once on every rank, and so are `Elementwise` and
    `WrappedOptimizer` ones: these read `missed` of segments."""
    rates = {"lr": lr, "scale": scale}
    whole = isinstance(optimizer, Elementwise | WrappedOptimizer) or any(
        hasattr(optimizer, n) for n in ("gathers", "count_sent_elements")
    )

    def run() -> None:
        if whole or not any(s.missed for s in segments.items):
            optimizer.update(xp, p, g, slots, step=step, segments=segments, **rates)
            return
        for at, missed, part in segments.stretches_by_missed:
            mine = {name: array[at] for name, array in slots.items()}
            optimizer.update(xp, p[at], g[at], mine, step=step - missed, segments=part, **rates)

    return device_of(p).run_update(run, p, g, slots)


def get_learning_rate(optimizer: Optimizer, step: int) -> float:
    """The learning rate of 1-based `step`; ConfigError if a schedule returns no finite number >= 0."""
    value = optimizer.lr(step) if callable(optimizer.lr) else optimizer.lr
    if type(value) is not float:
        value = to_python_number(value)
    if not _is_number(value) or value < 0:
        raise ConfigError(
            f"the learning rate of step {step} is {value!r}: {optimizer.lr!r} must give a finite number >= 0"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class WrappedOptimizer:
    """The base of optimisers around another one, `inner`, which makes the update."""

    inner: Any

    @property
    def lr(self) -> LearningRate:
        return self.inner.lr

    @property
    def slot_formats(self) -> dict[str, SlotFormat]:
        return get_slot_formats(self.inner)


def unwrap(optimizer: Any) -> Any:
    """The optimiser that makes the update, whether its state is rounded, parameters are averaged, both or neither."""
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer


UNSCHEDULED = (0.0, 0.0)


def get_scheduled_values(optimizer: Any, step: int) -> tuple[float, float]:
    """What schedules say of a step, for ranks to compare: the learning rate, nan where it is an error, which is raised
    once all ranks know of it; and the share of the old average in the new one, 0 without an average."""
    share = 0.0
    try:
        lr = get_learning_rate(optimizer, step)
    except ConfigError:
        lr = math.nan
    while isinstance(optimizer, WrappedOptimizer):
        how = getattr(optimizer, "how", None)
        share = share if how is None else float(how.keep(step))
        optimizer = optimizer.inner
    return lr, share


def check_number(owner: object, name: str, value: object, below: float | None = None) -> None:
    """ConfigError unless `value` is a finite number in [0, below)."""
    wanted = "a finite number >= 0" + ("" if below is None else f" and < {below:g}")
    if not _is_number(value) or value < 0 or (below is not None and value >= below):  # type: ignore[operator]
        raise ConfigError(f"{type(owner).__name__}({name}={value!r}): {wanted} is needed")


def check_options(owner: Any) -> None:
    """ConfigError unless lr, weight_decay and groups of `owner` are valid. Its other options are its own to check."""
    convert_fields_to_python(owner)
    if not callable(owner.lr):
        check_number(owner, "lr", owner.lr)
    check_number(owner, "weight_decay", owner.weight_decay)
    _check_groups(owner, owner.groups)


def check_betas(owner: object, betas: object) -> None:
    """ConfigError unless the `betas` of `owner` are a pair of numbers in [0, 1)."""
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
            if name not in GROUP_OPTIONS:
                raise ConfigError(
                    f"{kind}: group {pattern!r} sets {name!r}; a group can set {' and '.join(GROUP_OPTIONS)}"
                )
            check_number(owner, f"groups[{pattern!r}][{name!r}]", value)


def check_shard(owner: object, p: Any, g: Any, slots: Slots, step: int, segments: ShardSegments) -> None:
    """ShapeError unless all arrays have the shard's size; ConfigError unless the slots are those of `owner`."""
    kind = type(owner).__name__
    names = tuple(owner.slots)  # type: ignore[attr-defined]
    if sorted(slots) != sorted(names):
        raise ConfigError(f"{kind}: needs the slots {list(names)}, got {sorted(slots)}")
    for name, array in (("p", p), ("g", g), *slots.items()):
        if array.shape != (segments.size,):
            held = f"({segments.size},)"
            raise ShapeError(f"{kind}: {name} has shape {array.shape}, but its segments hold {held} elements")
    if step < 1:
        raise ConfigError(f"{kind}: step {step} is below 1, the first")


BLOCK_ELEMENTS = 1 << 16  # elements
DEVICE_BLOCK_ELEMENTS = 1 << 24  # a launch costs more than a pass over 64 Ki elements


class UpdateFormula:
    """One update by its name: as array code, as a loop in Numba, and where a device has code of its own, as that.

    Array code works through the arrays in blocks that stay in cache, with two blocks of scratch; it is the reference,
    and what runs where there is nothing else. The loop has its operations in the same order and so gives the same
    bits."""

    def __init__(self, plain: Callable[..., None]) -> None:
        self.plain, self.name = plain, plain.__name__
        self.loop: Any = None

    def register_loop(self, body: Callable[..., None]) -> Callable[..., None]:
        """Take `body(*arrays, *numbers)` as the loop. Without fastmath: with it the result of an element could depend
        on whether it falls into the vector body or the tail of the loop, and so on where a parameter was cut."""
        self.loop = jit(body)
        return body

    def __call__(self, xp: Any, arrays: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
        """Change flat arrays of one size in place. numbers: rounded to the format of the arrays once."""
        dtype = arrays[0].dtype
        if arrays[0].size == 0:
            return
        values = tuple(map(dtype.type, numbers))
        compiles = choice.active_mode != "plain" and dtype.char in "fd" and all(_can_compile(a, dtype) for a in arrays)
        if compiles and choice.has_numba():
            parallel_for_rows(self.loop, arrays, *values)
        elif not device_of(arrays[0]).update(self.name, arrays, values):
            self.run_in_blocks(xp, arrays, values)

    def run_in_blocks(self, xp: Any, arrays: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        """The array code: plain(xp, a, b, *arrays, *values) on every block; a and b are scratch of their format."""
        n = arrays[0].size
        size = min(n, BLOCK_ELEMENTS if xp is np else DEVICE_BLOCK_ELEMENTS)
        a, b = xp.empty(size, arrays[0].dtype), xp.empty(size, arrays[0].dtype)
        with np.errstate(all="ignore"):  # as compiled; gradients are checked for finite values elsewhere
            for start in range(0, n, size):
                parts = [x[start : start + size] for x in arrays]
                k = parts[0].size
                self.plain(xp, a[:k], b[:k], *parts, *values)


def update(plain: Callable[..., None]) -> UpdateFormula:
    """Declare an update by its array code; its loop follows under `@NAME.compiled`."""
    formula = BY_NAME[plain.__name__] = UpdateFormula(plain)
    return formula


BY_NAME: dict[str, UpdateFormula] = {}


def _can_compile(array: Any, dtype: Any) -> bool:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        return False
    return array.flags.c_contiguous and array.flags.aligned


def add_decay(xp, a, b, p, g, scale, l2):
    """a = scale g + l2 p"""
    xp.multiply(g, scale, out=a)
    if l2 != 0:
        xp.multiply(p, l2, out=b)
        a += b


def lerp_(xp, m, a, b, share):
    """m += share (a - m)"""
    xp.subtract(a, m, out=b)
    b *= share
    m += b


def lerp_square_(xp, v, a, b, keep, share):
    """v = keep v + share a^2"""
    xp.multiply(a, a, out=b)
    b *= share
    v *= keep
    v += b
