"""The recipe of a trainer: the model and all options of `distribute`. A session can be made from a recipe on any
communicator, and a new session is made from it when the set of ranks changes.

If the loss or the optimizer is missing, a stand-in takes its place. Such a trainer can predict but not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, NoReturn

from fsdpx.core.array.devices import DeviceMap, load_device
from fsdpx.core.base import environment
from fsdpx.core.base.config import Precision, Sharding, TraceConfig, convert_fields_to_python_numbers, parse_byte_count
from fsdpx.core.base.dataclass import dataclass, field, fields, replace
from fsdpx.core.base.extensions import import_extension_if_declared
from fsdpx.core.base.name_hints import parse_patterns, wrap_constructor_with_option_check
from fsdpx.core.base.option_kinds import (
    is_bool,
    make_min_int_predicate,
    make_option_field,
    make_type_predicate,
    require_valid_options,
)
from fsdpx.core.base.option_names import Backend, Device, PrecisionName, ScheduleName, SequenceMode, Strategy
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.compression import Choice
from fsdpx.core.program import StepChoices
from fsdpx.core.state.accumulation import MAX_MICROBATCHES, require_valid_chunks
from fsdpx.core.state.sample_layout import UNSHARDED, Domain
from fsdpx.core.state.storage import IN_MEMORY, StorageLevelChoice
from fsdpx.core.state.sync_policy import SyncChoice, get_sync_choice
from fsdpx.core.state.units import Stages
from fsdpx.core.trainer.option_rules import (
    STAGES,
    ChoiceContext,
    require_compatible_options,
    require_mesh_for_options,
    require_valid_model_loss_and_optimizer,
)
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer
from fsdpx.nn.losses import Loss
from fsdpx.optim.optimizer import Average, unwrap_optimizer

__all__ = [
    "OPTIONS", "DistributionChoices", "NoLoss", "NoOptimizer", "Recipe", "RuntimeOptions", "TrainingChoices",
    "adapt_foreign_model_and_loss", "is_loss_or_optimizer_missing", "require_loss_and_optimizer",
]  # fmt: skip


class NoLoss(Loss):
    """The loss of a trainer that was made without a loss. It accepts any output and target."""

    acts_on = "position"  # the least restrictive value for a loss: without a loss, the output may be sharded in any way

    def forward(self, env: Any, y: Any, target: Any) -> NoReturn:
        raise AssertionError("there is no loss")

    def backward(self, env: Any, saved: Any, seed: float) -> NoReturn:
        raise AssertionError("there is no loss")

    def validate(self, shape: tuple[int, ...], target: Any) -> None:
        """Accept any output and target, because no loss is computed."""

    def __repr__(self) -> str:
        return "no loss"


@dataclass(frozen=True, repr=False)
class NoOptimizer:
    """Stand-in for the optimizer of a trainer that was created without one. All parameters are frozen, and there is no
    optimizer state."""

    lr: float = 0.0
    slots: tuple[str, ...] = ()

    def update(self, *_: Any, **__: Any) -> None:
        """Do nothing: no parameter is trained."""

    def __repr__(self) -> str:
        return "no optimizer"


REMEDY = {"loss": "loss=nn.MSELoss()", "optimizer": "optimizer=optim.AdamW(lr=1e-3)"}


def is_loss_or_optimizer_missing(loss: Any, optimizer: Any) -> bool:
    """Return whether `distribute` was called without a loss or without an optimizer."""
    return isinstance(loss, NoLoss) or isinstance(unwrap_optimizer(optimizer), NoOptimizer)


def require_loss_and_optimizer(call: str, loss: Any = None, optimizer: Any = None) -> None:
    """Raise ConfigError if the trainer was made without a loss or an optimizer that `call` needs. Pass only what
    `call` needs: the loss, the optimizer, or both."""
    without = ["loss"] if isinstance(loss, NoLoss) else []
    without += ["optimizer"] if isinstance(unwrap_optimizer(optimizer), NoOptimizer) else []
    if without:
        raise ConfigError(
            f"{call}: this trainer was made without {' and '.join(without)}, for prediction only; say "
            f"distribute({', '.join(REMEDY[name] for name in without)}, ...)"
        )


@dataclass(frozen=True)
class TrainingChoices(StepChoices):
    """The options that define what is trained and how a step is computed. They are explained in `fsdpx.distribute`."""

    model: Layer
    loss: Any = None  # a Loss; NoLoss if none was given
    optimizer: Any = None  # an Optimizer; NoOptimizer if none was given
    frozen: Sequence[str] = ()
    microbatches: int | None = make_option_field(None, make_min_int_predicate(1), "a whole number, 1 or more")
    recompute: int | str | None = None
    average: Average | None = None
    precision: PrecisionName | Precision | None = None

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        parse_patterns("frozen", self.frozen)
        require_valid_options(self)
        if (self.microbatches or 0) > MAX_MICROBATCHES:
            raise ConfigError(f"microbatches={self.microbatches}: {MAX_MICROBATCHES:,} at most")
        object.__setattr__(self, "loss", NoLoss() if self.loss is None else self.loss)
        object.__setattr__(self, "optimizer", NoOptimizer() if self.optimizer is None else self.optimizer)
        require_valid_chunks(self.reproducible_chunks, self.microbatches)


@dataclass(frozen=True)
class DistributionChoices:
    """The options that define how the model and its state are distributed over the ranks, and what ranks send to each
    other. With strategy="auto", the field `planned` explains what the planner chose and why."""

    strategy: Strategy | Sharding | SyncChoice = "fsdp"
    mesh: Mesh | None = None
    compression: Choice = None
    schedule: ScheduleName | PathLike[str] | Callable[..., Any] = "1f1b"
    stages: Stages | None = None
    tensor_plan: Mapping[str, Any] | None = None
    sequence: SequenceMode | None = None
    offload: StorageLevelChoice | None = make_option_field(
        None,
        make_type_predicate(StorageLevelChoice),
        "say where, fsdpx.OffloadConfig('/local/disk', what='optimizer')",
    )
    domain: Domain | None = make_option_field(
        None, make_type_predicate(Domain), "give a fsdpx.Grid, as fsdpx.Grid(cart, u.shape[:2]), or a fsdpx.Partition"
    )
    planned: str = ""

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        if isinstance(self.schedule, PathLike):
            object.__setattr__(self, "schedule", fspath(self.schedule))
        if not (isinstance(self.schedule, str) or callable(self.schedule)):
            raise ConfigError(f"schedule={self.schedule!r}: a name, a function or the path of a text file is needed")
        require_valid_options(self)

    @property
    def sync_choice(self) -> SyncChoice:
        """The synchronization policy selected by the option `strategy`."""
        return get_sync_choice(self.strategy)

    @property
    def sample_partition(self) -> Domain:
        """How samples are partitioned over ranks: the option `domain`. By default samples are not partitioned, so each
        rank has complete samples."""
        return self.domain or UNSHARDED

    @property
    def storage_choice(self) -> StorageLevelChoice:
        """Which state is kept in slower storage instead of in memory. By default, all state is kept in memory."""
        return self.offload or IN_MEMORY

    def strategy_within_replica(self, ranks: int) -> str | Sharding:
        """Return the sharding strategy for the ranks that train synchronously: with local SGD, the ranks of one
        replica; otherwise, all ranks. `ranks` is the total number of ranks."""
        return self.sync_choice.strategy_within_replica(self.mesh, ranks) or self.strategy  # type: ignore[return-value]


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class RuntimeOptions:
    """Rarely set options: where a trainer computes, what it checks and records, and values to use instead of measured
    ones.

    Parameters
    ----------
    device : "cpu"; "cuda" (one GPU per rank; docs: gpu); or "shape", to count bytes and operations without computing
    device_map : GPU of each local rank, as a list or a dict, such as `[0, 2]` (default: GPUs in the order of local
        ranks)
    backend : backend to use for a new communicator: "node", "mpi", "nccl", "gloo" or "local" (default: use the
        communicator that is already open)
    group_bytes : minimum size, such as "1MiB", of a unit (layers gathered together); small layers are grouped until the
        unit has this size (default: 4 MiB; 1 MiB on a single rank or if `tune` is off)
    prefetch : number of flat parameter buffers (pages) to gather ahead of their use (default: set by the strategy)
    costs : dict that maps path patterns to the cost of each matching layer. The costs are used to split the model into
        pipeline stages automatically
    check : if True, ranks compare their calls before each collective runs (default: as set by FSDPX_CHECK)
    check_finite : if True, check the results of every unit for NaN and Inf
    tune : if True, spend about 100 ms on measurements to find good values for options that were not given, and store
        them on disk (default: True unless FSDPX_TUNE=0)
    replay : if True, record the kernels of forward and backward passes in the second step, and from then on launch each
        recording at once instead of single kernels (CUDA graphs; docs: gpu). Experimental
    trace : folder into which a timeline of the last steps is written, or `fsdpx.TraceConfig(...)` (docs: observe;
        default: FSDPX_TRACE)
    """

    device: Device = "cpu"
    device_map: DeviceMap = None
    backend: Backend | None = None
    group_bytes: int | str | None = None
    prefetch: int | None = make_option_field(None, make_min_int_predicate(0), "a number of pages, 0 or more")
    costs: Mapping[str, float] | None = None
    check: bool | None = make_option_field(None, is_bool, "True, False, or None for what FSDPX_CHECK says")
    check_finite: bool = make_option_field(False, is_bool, "True or False")
    tune: bool | None = make_option_field(None, is_bool, "True, False, or None for what FSDPX_TUNE says")
    replay: bool = make_option_field(False, is_bool, "True or False")
    trace: str | PathLike[str] | TraceConfig | None = None

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        require_valid_options(self)
        if self.group_bytes is not None:
            parse_byte_count(self.group_bytes, "group_bytes")
        self.get_trace_choice()
        load_device(self.device).require_valid_map(self.device_map)

    def get_trace_choice(self) -> TraceConfig | None:
        """Return the trace settings from the option `trace` or from FSDPX_TRACE; None if no trace is requested."""
        wanted = environment.get_trace_folder() if self.trace is None else self.trace
        return None if wanted is None else TraceConfig.from_argument(wanted)


OPTIONS = [
    one.name
    for kind in (TrainingChoices, DistributionChoices, RuntimeOptions)
    for one in fields(kind)
    if one.name != "model"
]
"""Names of all options in a recipe."""


def adapt_foreign_model_and_loss(model: Any, loss: Any, domain: Any = None) -> tuple[Any, Any]:
    """Convert a model and a loss from another library, such as PyTorch, to fsdpx. A model or loss that is already from
    fsdpx is returned unchanged. `domain` is the domain on which the model will run."""
    foreign = [one for one in (model, loss) if not isinstance(one, Layer | Loss | None)]
    for library in dict.fromkeys(kind.__module__.partition(".")[0] for one in foreign for kind in type(one).__mro__):
        if (adapt := import_extension_if_declared("library", library)) is not None:
            model, loss = adapt(model, loss) if domain is None else adapt(model, loss, domain)
    return model, loss


@dataclass(frozen=True)
class Recipe:
    """The arguments of `fsdpx.distribute`, validated as far as possible without communication."""

    training: TrainingChoices
    distribution: DistributionChoices = field(default_factory=DistributionChoices)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)

    def __post_init__(self) -> None:
        t, d = self.training, self.distribution
        require_mesh_for_options(d.mesh, d.stages, self.runtime.costs, d.tensor_plan, d.sequence)
        if d.stages is not None:
            require_compatible_options(STAGES, ChoiceContext(self))
        if isinstance(t.optimizer, NoOptimizer):
            for name, value in (("average", t.average), ("clip_norm", t.clip_norm), ("compression", d.compression)):
                if value is not None:
                    raise ConfigError(f"{name}={value!r}: without an optimizer nothing moves; leave {name} out")
        require_valid_model_loss_and_optimizer(t.model, t.loss, t.optimizer, d.mesh, t.frozen)

    def with_options(self, changes: Mapping[str, Any]) -> Recipe:
        """Return a copy of the recipe in which the options in `changes` have new values."""

        def replace_fields(of: Any) -> Any:
            return replace(of, **{field.name: changes[field.name] for field in fields(of) if field.name in changes})

        return Recipe(*map(replace_fields, (self.training, self.distribution, self.runtime)))

    def with_mesh(self, mesh: Mesh) -> Recipe:
        """Return a copy of the recipe with another mesh."""
        return replace(self, distribution=replace(self.distribution, mesh=mesh))

    def without_data(self) -> Recipe:
        """Return a copy of the recipe for a dry run, in which arrays have shapes but no data."""
        return replace(self, runtime=replace(self.runtime, device="shape"))
