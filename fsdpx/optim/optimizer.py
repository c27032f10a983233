"""The protocol of optimizers, the dtypes of their state arrays (slots), and the base class of elementwise updates.

An update works in place on a flat shard, and gives bit-identical results for every sharding and every implementation.
Each update is defined in the file of its optimizer, as array code and as a loop. If Numba is installed, it compiles the
loop for float32 and float64 NumPy arrays, and the elements are divided among the threads of `array.parallel`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from fsdpx.core.array.devices import get_device_of_array
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.parallel import parallel_for_rows
from fsdpx.core.base.config import convert_fields_to_python_numbers, to_python_number
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.optim.segments import NORMS, ParamGroups, ShardSegments

__all__ = [
    "AVERAGE_SLOT", "BLOCK_ELEMENTS", "FORMULAS_BY_NAME", "UNSCHEDULED", "Average", "Elementwise", "LearningRate",
    "Optimizer", "SlotFormat", "Slots", "UpdateFormula", "WrappedOptimizer", "declare_update_formula",
    "get_learning_rate", "get_scheduled_lr_and_average_weight", "get_slot_formats", "lerp_", "lerp_square_",
    "make_zero_slots", "needs_full_parameters", "no_decay", "scale_and_add_decay", "unwrap_optimizer",
    "update_parameters",
]  # fmt: skip

AVERAGE_SLOT = "average"
"""Name of the slot that holds the average of the parameters, stored as average - parameters."""


@dataclass(frozen=True)
class SlotFormat:
    """The number format of a slot (an optimizer's state array, with one element per element of the shard).

    Parameters
    ----------
    dtype : name of the slot's dtype; if None, the dtype of the shard
    """

    dtype: str | None = None

    def get_dtype(self, shard: Any) -> Any:
        """Return the dtype of the slot (state array), given the dtype of the parameter shard.

        Parameters
        ----------
        shard : dtype of the parameter shard

        Returns
        -------
        numpy.dtype
            `self.dtype`, or the dtype of the shard if `self.dtype` is None
        """
        return np.dtype(self.dtype or shard)


def get_slot_formats(optimizer: Any) -> dict[str, SlotFormat]:
    """Return the format of each slot (state array) of an optimizer, as a dict keyed by slot name. For a slot that is
    missing in the optimizer's attribute `slot_formats`, the dtype is that of the shard."""
    named: Mapping[str, SlotFormat] = getattr(optimizer, "slot_formats", {})
    return {name: named.get(name, SlotFormat()) for name in optimizer.slots}


def needs_full_parameters(optimizer: Any) -> bool:
    """Return whether an optimizer's update of a parameter needs data from the full parameter. If so, parameters cannot
    be sharded over the tensor axis."""
    return bool(getattr(optimizer, "whole", False))


def make_zero_slots(xp: Any, optimizer: Any, segments: ShardSegments, dtype: Any) -> dict[str, Any]:
    """Return an optimizer's state arrays before step 1, as a dict that maps names to arrays of zeros. `dtype` is the
    dtype of the parameter shard."""
    return {name: xp.zeros(segments.size, kept.get_dtype(dtype)) for name, kept in get_slot_formats(optimizer).items()}


class Elementwise(ABC):
    """Base class of elementwise optimizers. The class checks the options, and updates the shard one span at a time. A
    span is a range of elements that have the same hyperparameters."""

    weight_decay: float
    groups: ParamGroups

    def __post_init__(self) -> None:
        require_valid_hyperparameters(self)

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
        """Update a parameter shard in place. See `Optimizer.update`."""
        require_matching_shard(self, p, g, slots, step, segments)
        for run in segments.hyperparameter_spans(self.groups):
            span = slice(run.start, run.stop)
            rates = {"lr": lr * run.lr_scale, "weight_decay": run.get_weight_decay(self.weight_decay), "scale": scale}
            own_slots = {name: array[span] for name, array in slots.items()}
            self._update_span(xp, p[span], g[span], own_slots, step - run.missed, **rates)

    @abstractmethod
    def _update_span(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        """Update a span of parameters in place. All elements of a span have the same hyperparameters.

        `step` is the number of updates of these elements, including this one. `rates` holds `lr`, `weight_decay`, and
        `scale`, the factor by which g is multiplied."""


LearningRate = float | Callable[[int], float]
"""A learning rate: a number, or a schedule, which is a function that takes the step, counted from 1, and returns a
number."""
Slots = Mapping[str, Any]
"""State arrays of a shard by slot name."""

GROUP_OPTIONS = ("lr_scale", "weight_decay")

no_decay: ParamGroups = {pattern: {"weight_decay": 0.0} for pattern in ("*bias", NORMS)}
"""Parameter groups that switch off weight decay for biases, and for the scales and shifts of norms, regardless of their
names: `AdamW(groups=optim.no_decay)`. The parameters of your own norm layers need `ParameterSpec(..., norm=True)`.

To add your own groups: `{"embed.*": {"weight_decay": 0.0}, **optim.no_decay}`."""


class Optimizer(Protocol):
    """The protocol of optimizers, which update one flat parameter shard in place. An optimizer holds only
    hyperparameters; the caller holds the state arrays."""

    @property
    def lr(self) -> LearningRate:
        """The learning rate: a number, or a schedule, which is a function of the step."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state arrays. Each array is as large as the shard, and all zeros before step 1.

        An optimizer may also have an attribute `slot_formats`: a dict with a `SlotFormat` for the name of each slot
        whose dtype differs from the shard's dtype."""

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
        """Update a parameter shard in place.

        Parameters
        ----------
        xp : namespace of the arrays
        p : the shard's parameters, flat `(n,)`; changed in place
        g : gradient of these parameters, `(n,)`, before it is multiplied by `scale`; not changed
        slots : state arrays `(n,)` by name; changed in place
        lr : learning rate of the step, `get_learning_rate(optimizer, step)`
        step : number of the update, counted from 1. If some parameters have missed updates, see `update_parameters`
        segments : the parameters, or parts of parameters, that the shard holds
        scale : factor by which g is multiplied
        """


class Average(Protocol):
    """Protocol for rules that average the parameters over time."""

    def get_kept_share(self, step: int) -> float:
        """Return the weight, from 0 to 1, that the old average gets when the average is updated after step `step`
        (counted from 1)."""


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
    """Update a shard in place. As in `torch.optim`, a parameter's step number counts only the updates of this
    parameter. Return False if nothing was computed because the arrays are shape-only, else True.

    The arguments are the same as for `Optimizer.update`, except that `step` is the trainer's step number.

    Most optimizers are called once for each span of parameters that have the same number of updates, and get this
    number as `step`. Three kinds of optimizers are called only once on every rank, for all parameters: optimizers that
    communicate, subclasses of `Elementwise`, and subclasses of `WrappedOptimizer`. They read from the segments how many
    updates each parameter has missed (`missed`)."""
    rates = {"lr": lr, "scale": scale}

    def run() -> None:
        whole = not segments.has_missed_updates or isinstance(optimizer, Elementwise | WrappedOptimizer)
        if whole or any(hasattr(optimizer, n) for n in ("gathers", "count_sent_elements")):
            optimizer.update(xp, p, g, slots, step=step, segments=segments, **rates)
            return
        for at, missed, part in segments.spans_by_missed_updates:
            mine = {name: array[at] for name, array in slots.items()}
            optimizer.update(xp, p[at], g[at], mine, step=step - missed, segments=part, **rates)

    return get_device_of_array(p).run_shard_update(run, p, g, slots)


def get_learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of step `step`, counted from 1. Raise ConfigError unless the rate is a finite number >=
    0."""
    value = optimizer.lr(step) if callable(optimizer.lr) else optimizer.lr
    if type(value) is not float:
        value = to_python_number(value)
    if not _is_number(value) or value < 0:
        raise ConfigError(
            f"the learning rate of step {step} is {value!r}: {optimizer.lr!r} must return a finite number >= 0"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class WrappedOptimizer:
    """Base class of optimizers that add something to another optimizer, `inner`, which performs the update."""

    inner: Any

    @property
    def lr(self) -> LearningRate:
        return self.inner.lr

    @property
    def slot_formats(self) -> dict[str, SlotFormat]:
        return get_slot_formats(self.inner)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that performs the update, without the wrappers around it, such as `AveragedOptimizer`."""
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer


UNSCHEDULED = (0.0, 0.0)


def get_scheduled_lr_and_average_weight(optimizer: Any, step: int) -> tuple[float, float]:
    """Return two values for a step: the learning rate, and the weight of the old parameter average in the new average.
    The ranks compare these values, because they must be equal on all ranks.

    If the schedule is invalid, the learning rate is NaN; after the comparison, all ranks raise the error. If parameters
    are not averaged, the weight is 0."""
    share = 0.0
    try:
        lr = get_learning_rate(optimizer, step)
    except ConfigError:
        lr = math.nan
    while isinstance(optimizer, WrappedOptimizer):
        how = getattr(optimizer, "averaging", None)
        share = share if how is None else float(how.get_kept_share(step))
        optimizer = optimizer.inner
    return lr, share


def require_number_in_range(owner: object, name: str, value: object, below: float | None = None) -> None:
    """Raise ConfigError unless the option `name` of the optimizer `owner` is a finite number in [0, below). If `below`
    is None, there is no upper limit."""
    wanted = "a finite number >= 0" + ("" if below is None else f" and < {below:g}")
    if not _is_number(value) or value < 0 or (below is not None and value >= below):  # type: ignore[operator]
        raise ConfigError(f"{type(owner).__name__}({name}={value!r}): {wanted} is needed")


def require_valid_hyperparameters(owner: Any) -> None:
    """Raise ConfigError unless `lr`, `weight_decay` and `groups` of the optimizer `owner` are valid. Convert NumPy
    numbers among the options of `owner` to Python numbers."""
    convert_fields_to_python_numbers(owner)
    if not callable(owner.lr):
        require_number_in_range(owner, "lr", owner.lr)
    require_number_in_range(owner, "weight_decay", owner.weight_decay)
    _require_valid_groups(owner, owner.groups)


def require_valid_betas(owner: object, betas: object, count: int = 2) -> None:
    """Raise ConfigError unless the `betas` of the optimizer `owner` are `count` numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != count:
        wanted = "a pair of numbers is needed, like (0.9, 0.999)" if count == 2 else f"{count} numbers are needed"
        raise ConfigError(f"{type(owner).__name__}(betas={betas!r}): {wanted}")
    for i, beta in enumerate(betas):
        require_number_in_range(owner, f"betas[{i}]", beta, below=1.0)


def _require_valid_groups(owner: object, groups: object) -> None:
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
            require_number_in_range(owner, f"groups[{pattern!r}][{name!r}]", value)


def require_matching_shard(owner: object, p: Any, g: Any, slots: Slots, step: int, segments: ShardSegments) -> None:
    """Raise ShapeError unless all arrays have the shard's size, and ConfigError unless `slots` are the state arrays of
    the optimizer `owner`."""
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


BLOCK_ELEMENTS = 1 << 16  # number of elements in a block, chosen so that a block fits into the cache
# blocks of other devices are larger than those of CPUs, because launching a kernel takes longer than updating 64 Ki
# elements
DEVICE_BLOCK_ELEMENTS = 1 << 24


class UpdateFormula:
    """An elementwise update with several implementations: array code, a Numba loop, and, if the device provides one, a
    kernel.

    The array code works on blocks that fit into the cache and needs two blocks of scratch memory. It is the reference,
    and runs if no other implementation is available. The loop performs the operations of the array code in the same
    order, so the results of both are bit-identical."""

    def __init__(self, plain: Callable[..., None]) -> None:
        self.plain, self.name = plain, plain.__name__
        self.loop: Any = None

    def register_loop(self, body: Callable[..., None]) -> Callable[..., None]:
        """Compile `body(*arrays, *numbers)` with Numba as the loop of this update.

        Numba's option fastmath is off. With fastmath, the vectorized part and the scalar remainder of the loop could
        round differently, and results would depend on shard boundaries."""
        self.loop = jit(body)
        return body

    def __call__(self, xp: Any, arrays: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
        """Update flat arrays of equal size in place. `numbers` are the scalars of the formula. They are first rounded
        to the dtype of the first array."""
        dtype = arrays[0].dtype
        if arrays[0].size == 0:
            return
        values = tuple(map(dtype.type, numbers))
        compiles = choice.active_mode != "plain" and dtype.char in "fd" and all(_can_compile(a, dtype) for a in arrays)
        if compiles and choice.has_numba():
            parallel_for_rows(self.loop, arrays, *values)
        elif not get_device_of_array(arrays[0]).try_run_optimizer_kernel(self.name, arrays, values):
            self.run_in_blocks(xp, arrays, values)

    def run_in_blocks(self, xp: Any, arrays: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        """Run the array code block by block: call `plain(xp, a, b, *arrays, *values)` for each block, where a and b are
        scratch arrays with the dtype of the first array."""
        n = arrays[0].size
        size = min(n, BLOCK_ELEMENTS if xp is np else DEVICE_BLOCK_ELEMENTS)
        a, b = xp.empty(size, arrays[0].dtype), xp.empty(size, arrays[0].dtype)
        # compiled loops do not warn about overflow, so array code should not either; gradients are checked elsewhere
        with np.errstate(all="ignore"):
            for start in range(0, n, size):
                parts = [x[start : start + size] for x in arrays]
                k = parts[0].size
                self.plain(xp, a[:k], b[:k], *parts, *values)


def declare_update_formula(plain: Callable[..., None]) -> UpdateFormula:
    """Declare an elementwise update whose array code is `plain`. Decorate the Numba loop of the update with
    `@NAME.register_loop`, where NAME is the name of the declared update."""
    formula = FORMULAS_BY_NAME[plain.__name__] = UpdateFormula(plain)
    return formula


FORMULAS_BY_NAME: dict[str, UpdateFormula] = {}


def _can_compile(array: Any, dtype: Any) -> bool:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        return False
    return array.flags.c_contiguous and array.flags.aligned


def scale_and_add_decay(xp, a, b, p, g, scale, l2):
    """Set `a = scale * g + l2 * p`."""
    xp.multiply(g, scale, out=a)
    if l2 != 0:
        xp.multiply(p, l2, out=b)
        a += b


def lerp_(xp, m, a, b, share):
    """Move m toward a: add `share * (a - m)` to m."""
    xp.subtract(a, m, out=b)
    b *= share
    m += b


def lerp_square_(xp, v, a, b, keep, share):
    """Set `v = keep * v + share * a^2`."""
    xp.multiply(a, a, out=b)
    b *= share
    v *= keep
    v += b
