"""User options as dataclasses: sharding strategies, precision, and traces.

A sharding strategy specifies the widths of two mesh axes, and how long full parameters and full gradients are kept. The
familiar strategy names are presets for these values (ZeRO: Rajbhandari et al., SC'20; FSDP: Zhao et al., VLDB'23).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from typing import Any, Literal, TypeVar, get_args

from fsdpx.core.base.dataclass import dataclass, fields, replace
from fsdpx.core.base.extensions import list_extensions
from fsdpx.core.base.name_hints import did_you_mean, suggest_number_format, wrap_constructor_with_option_check
from fsdpx.core.base.option_kinds import is_positive_number
from fsdpx.core.base.option_names import DtypeName
from fsdpx.errors import ConfigError

__all__ = [
    "PRESETS", "PRESETS_BY_MEMORY", "Lifetime", "Precision", "Sharding", "TraceConfig",
    "convert_fields_to_python_numbers", "convert_folder_path_to_config", "normalize_half_name", "parse_byte_count",
    "resolve_precision", "resolve_sharding", "to_python_number",
]  # fmt: skip

T = TypeVar("T")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)
_POWER = {"K": 1, "M": 2, "G": 3, "T": 4}
_HALVES = {"float16": "float16", "fp16": "float16", "bfloat16": "bf16", "bf16": "bf16"}


def to_python_number(value: Any) -> Any:
    """Convert a NumPy scalar, or a 0-d array or tensor, to a Python number, because Python numbers do not affect dtype
    promotion.

    Numbers inside a list, tuple or dict are converted as well. Any other value is returned unchanged."""
    if value.__class__ in _PYTHON:
        return value
    if isinstance(value, dict):
        return {name: to_python_number(one) for name, one in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(to_python_number(one) for one in value)
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def convert_fields_to_python_numbers(owner: Any) -> None:
    """Apply `to_python_number` to all fields of a dataclass in place, before the fields are checked."""
    for field in fields(owner):
        object.__setattr__(owner, field.name, to_python_number(getattr(owner, field.name)))


def convert_folder_path_to_config(config_class: Callable[..., T], value: Any, prefix: str, other_field: str) -> T:
    """Return `value` itself if it is an instance of `config_class`. If `value` is a folder, return
    `config_class(value)`. Otherwise raise ConfigError.

    The error message begins with `prefix`, such as "trace={}", and ends with an example call that sets `other_field`,
    another field of the class.
    """
    if isinstance(value, str | PathLike):
        return config_class(value)
    if not isinstance(value, config_class):  # type: ignore[arg-type]
        name = config_class.__name__
        raise ConfigError(f"{prefix.format(repr(value))}: a folder, or fsdpx.{name}(folder, {other_field}=...)")
    return value


_PYTHON = (int, float, bool, str, type(None))


def parse_byte_count(value: Any, what: str) -> int:
    """Convert an integer, or text such as "1MiB" (2**20), "1MB" (10**6), "512K" or "4096", to a number of bytes.

    Raise ConfigError for anything else. `what` is the name of the option in the error message.
    """
    with suppress(TypeError):  # raised if the value is not an integer, or is an array of several numbers
        if not isinstance(value, bool) and operator.index(value) >= 0:
            return operator.index(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{what}={value!r}: a number of bytes is needed, such as 1048576, '1MiB' or '2GB'")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWER[unit.upper()]) if unit else int(float(number))


def normalize_half_name(name: Any) -> Any:
    """Return "float16" or "bf16" for any name of these 16-bit dtypes. Return any other value unchanged."""
    return _HALVES.get(name, name) if isinstance(name, str) else name


Lifetime = Literal["step", "use"]
LIFETIMES = get_args(Lifetime)


@dataclass(frozen=True)
class Sharding:
    """Sharding strategy: how many ranks the model is replicated and sharded over, and how long full parameters and full
    gradients are kept. Raises ConfigError for invalid values.

    Parameters
    ----------
    replica, shard : widths of the two data-parallel mesh axes, whose product is the number of data-parallel ranks. A
        width of None is computed from the other width
    full_params : "use" frees gathered parameters as soon as their layers have run, "step" keeps them until the update
    full_grads : "use" reduces gradients after each microbatch, "step" reduces only the sum of the gradients of all
        microbatches
    prefetch : maximum number of units (groups of layers) whose parameters are gathered ahead of use, and maximum number
        of gradient reductions in flight
    """

    replica: int | None = 1
    shard: int | None = None
    full_params: Lifetime = "use"
    full_grads: Lifetime = "use"
    prefetch: int = 1

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        for name in ("replica", "shard"):
            width = getattr(self, name)
            if width is not None and (not isinstance(width, int) or width < 1):
                given = f"Sharding({name}={width!r})"
                raise ConfigError(f"{given}: a mesh axis is at least 1 wide, or None to fill the world")
        for name in ("full_params", "full_grads"):
            if getattr(self, name) not in LIFETIMES:
                raise ConfigError(f"Sharding({name}={getattr(self, name)!r}): choose one of {', '.join(LIFETIMES)}")
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ConfigError(f"Sharding(prefetch={self.prefetch!r}): a number of units, 0 or more")


PRESETS: dict[str, Sharding] = {
    "ddp": Sharding(replica=None, shard=1, full_params="step", full_grads="step"),
    "zero1": Sharding(full_params="step", full_grads="step"),
    "zero2": Sharding(full_params="step", full_grads="use"),
    "zero3": Sharding(full_params="use", full_grads="use"),
    "fsdp": Sharding(full_params="use", full_grads="use"),
    "hybrid": Sharding(replica=None, shard=None, full_params="use", full_grads="use"),
}


PRESETS_BY_MEMORY = tuple({one: name for name, one in PRESETS.items() if one.replica or one.shard}.values())
"""Names of the presets that put all data-parallel ranks on a single mesh axis (replica or shard), in order of
decreasing memory per rank. If several presets are identical, only the last name is listed."""


def resolve_sharding(strategy: str | Sharding, ranks: int) -> Sharding:
    """Convert a strategy name or a `Sharding` to a `Sharding` in which both widths are set, so that replica * shard ==
    ranks.

    For "hybrid" without widths, the shard width is the smallest divisor of `ranks` that is at least sqrt(ranks).
    """
    if isinstance(strategy, str) and strategy in PRESETS:
        strategy = PRESETS[strategy]
    if not isinstance(strategy, Sharding):
        known = *PRESETS, *list_extensions("strategy")
        names = ", ".join(known)
        if isinstance(strategy, str):
            unknown = f"unknown strategy {strategy!r}: choose one of {names}, or pass fsdpx.Sharding(...)"
            raise ConfigError(unknown + did_you_mean(strategy, known))
        # if `strategy` is an enum member of another library, such as PyTorch, suggest by its name
        hint = did_you_mean(getattr(strategy, "name", type(strategy).__name__), ())
        raise ConfigError(f"strategy is {type(strategy).__name__}: pass a name ({names}) or fsdpx.Sharding(...){hint}")
    replica, shard = strategy.replica, strategy.shard
    if replica is None and shard is None:
        shard = next(d for d in range(1, ranks + 1) if ranks % d == 0 and d * d >= ranks)
    if shard is None:
        shard = max(ranks // (replica or 1), 1)
    if replica is None:
        replica = max(ranks // shard, 1)
    if replica * shard != ranks:
        product = f"replica {replica} x shard {shard} = {replica * shard}"
        raise ConfigError(f"{product}, but {ranks} ranks are to share the data")
    return replace(strategy, replica=replica, shard=shard)


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class TraceConfig:
    """Options for a trace of training, passed as `distribute(trace=TraceConfig("runs/x/trace", steps=20))`.

    Parameters
    ----------
    folder : folder for the files rank-00000.json.gz and so on, one per rank
    steps : number of most recent programs to keep in the trace. Each training step, and each call of `accumulate`, is
        one program
    """

    folder: str | PathLike[str]
    steps: int = 100

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ConfigError(f"TraceConfig(steps={self.steps!r}): a whole number, 1 or more")

    @classmethod
    def from_argument(cls, given: Any) -> TraceConfig:
        """Convert the argument `trace=` to a `TraceConfig`.

        Parameters
        ----------
        given : a `TraceConfig`, or a folder; if it is a folder, all other fields keep their defaults

        Returns
        -------
        TraceConfig

        Raises
        ------
        ConfigError : `given` is neither a `TraceConfig` nor a folder
        """
        return convert_folder_path_to_config(cls, given, "trace={}", "steps")


@dataclass(frozen=True, repr=False)
class Precision:
    """The dtypes used for computation, parameters, gradients, statistics and optimizer state. Raises ConfigError for
    invalid values.

    Gradients of parameters are accumulated in float32 (float64 if `compute` is float64). They are sums over the batch,
    not means, so a smaller loss scale than in other libraries suffices.

    Parameters
    ----------
    compute : dtype of computation, and of the outputs and saved activations of layers: "float32", "float64", "bf16" (or
        "bfloat16"), "fp16" (or "float16")
    param : dtype in which the all-gather sends parameters. If None, the same as `compute`. If `compute` is a 16-bit
        dtype, the only other choice is "float32". If `compute` is "float32" or "float64", the other choices are "bf16"
        and "fp16"
    reduce : dtype to which gradients are rounded before the reduction, which adds them in float32: "bf16" or "fp16", or
        None for no rounding
    buffers : dtype of running statistics, "float32" or "float64"; if None, float32 (float64 if `compute` is float64).
        16-bit dtypes are rejected, because the change in a single step is smaller than the last bit of a 16-bit number
    master : dtype of the parameter shard that the optimizer updates, and of the optimizer's state; if None, float32
        (float64 if `compute` is float64). "bf16" with compute="bf16" trains in 16 bits throughout
    rounding : how updates smaller than the last bit of a 16-bit master are applied. None or "stochastic": the result is
        rounded up or down at random, without bias (Gupta et al. 2015); "kahan": the rounding error is kept as part of
        the optimizer's state (Kahan 1965; Zamirai et al. 2020)
    loss_scale : factor by which the loss is multiplied before backward, or "dynamic" (Micikevicius et al. 2018)
    initial_scale : initial value of the dynamic loss scale, which is halved on overflow
    growth_interval : number of steps without overflow after which the dynamic loss scale is doubled
    """

    compute: DtypeName = "float32"
    param: DtypeName | None = None
    reduce: DtypeName | None = None
    buffers: DtypeName | None = None
    master: DtypeName | None = None
    rounding: Literal["stochastic", "kahan"] | None = None
    loss_scale: float | Literal["dynamic"] = 1.0
    initial_scale: float = 256.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        for name in ("compute", "param", "reduce", "buffers", "master"):
            object.__setattr__(self, name, normalize_half_name(getattr(self, name)))
        self._require_field_choice("compute", "float32", "float64", "bf16", "float16")
        full = "float64" if self.compute == "float64" else "float32"
        self._require_field_choice(
            "param", None, self.compute, full, *(("bf16", "float16") if self.compute == full else ())
        )
        self._require_field_choice("reduce", None, full, "bf16", "float16")
        self._require_field_choice("buffers", None, full, "float64")
        self._require_field_choice("master", None, full, *(("bf16",) if self.compute == "bf16" else ()))
        self._require_field_choice("rounding", None, *(("stochastic", "kahan") if self.master == "bf16" else ()))
        for name in ("loss_scale", "initial_scale", "growth_interval"):
            value = getattr(self, name)
            if not (name == "loss_scale" and value == "dynamic") and not is_positive_number(value):
                raise ConfigError(f"Precision({name}={value!r}): a positive number is needed")

    def _require_field_choice(self, role: str, *choices: str | None) -> None:
        value = getattr(self, role)
        if value not in choices:
            beside = f", compute={self.compute!r}" * (role != "compute")
            beside += f", master={self.master!r}" * (role == "rounding")
            names = " or ".join(str(choice) for choice in dict.fromkeys(choices))
            hint = suggest_number_format(value, choices)
            raise ConfigError(f"Precision({role}={value!r}{beside}): choose {names}{hint}")

    def __repr__(self) -> str:
        """Return a repr with only those fields that differ from their defaults."""
        chosen = [f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return f"Precision({', '.join(chosen)})"

    @property
    def gradient_dtype(self) -> str:
        """Name of the dtype in which gradients of parameters are accumulated."""
        return "float64" if self.compute == "float64" else "float32"

    @property
    def master_dtype(self) -> str:
        """Name of the dtype of the parameters that the optimizer updates, and of the optimizer's state."""
        return self.master or self.gradient_dtype

    @property
    def statistics_dtype(self) -> str:
        """Name of the dtype of running statistics."""
        return self.buffers or self.gradient_dtype

    @property
    def parameter_wire_dtype(self) -> str:
        """Name of the dtype in which the all-gather sends parameters."""
        return self.param or self.compute

    @property
    def reduce_dtype(self) -> str:
        """Name of the dtype in which gradients are sent for the reduction."""
        return self.reduce or self.gradient_dtype


PRECISIONS: dict[str, Precision] = {
    "float64": Precision("float64"),
    "float32": Precision(),
    "bf16": Precision("bf16"),
    "bf16-true": Precision("bf16", master="bf16"),
    "float16": Precision(param="float16", reduce="float16", loss_scale="dynamic"),
}


def resolve_precision(choice: str | Precision | None) -> Precision:
    """Convert the name of a precision to a `Precision`. A `Precision` is returned unchanged, and None means float32.
    Raise ConfigError for an unknown name."""
    if choice is None:
        return PRECISIONS["float32"]
    if isinstance(choice, Precision):
        return choice
    name = normalize_half_name(choice)
    if not isinstance(name, str) or name not in PRECISIONS:
        hint = suggest_number_format(choice, PRECISIONS).replace("'", "precision='", 1)
        names = f": choose one of {', '.join(PRECISIONS)}, or pass fsdpx.Precision(...)"
        raise ConfigError(f"unknown precision {choice!r}{hint or names}")
    return PRECISIONS[name]


for _kind in (Precision, Sharding):
    wrap_constructor_with_option_check(_kind)
