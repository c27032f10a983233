"""`distribute`: make a trainer from a model and its options. All ranks compare their options before they exchange any
other data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from inspect import signature
from os import PathLike
from typing import Any, Unpack

from fsdpx.core.array.devices import load_device
from fsdpx.core.base import environment, hooks
from fsdpx.core.base.arguments import require_arguments_match_type_hints, wrap_with_type_hint_check
from fsdpx.core.base.config import PRESETS, Precision, Sharding
from fsdpx.core.base.extensions import import_declared_extension, import_extension_if_declared
from fsdpx.core.base.name_hints import require_known_options
from fsdpx.core.base.option_names import ForeignModule, PrecisionName, RuntimeArgs, ScheduleName, SequenceMode, Strategy
from fsdpx.core.comm import default_communicator as defaults
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import comparing_arguments, record_script_rank_and_size
from fsdpx.core.comm.init import open_world as open_world
from fsdpx.core.comm.init import require_backend_for_device, unwrap_message_backend
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.comm.watched import report_call_to_watchdog, start_watching_axes
from fsdpx.core.compression import Choice, list_codec_names
from fsdpx.core.engine.engine import Engine
from fsdpx.core.program import SCHEDULES
from fsdpx.core.state.sample_layout import Domain
from fsdpx.core.state.storage import StorageLevelChoice
from fsdpx.core.state.sync_policy import SyncChoice
from fsdpx.core.state.tuning import Tuning
from fsdpx.core.state.units import Stages
from fsdpx.core.trainer.assemble import assemble_session
from fsdpx.core.trainer.batch import agree_on_call, raising_errors_on_all_ranks
from fsdpx.core.trainer.call_runner import CallRunnerChoice, FixedRanks
from fsdpx.core.trainer.given_values import broadcast_foreign_values, release_foreign_library_arrays
from fsdpx.core.trainer.initialize import default_communicator
from fsdpx.core.trainer.option_rules import ChoiceContext, require_compatible_options
from fsdpx.core.trainer.recipe import (
    DistributionChoices,
    Recipe,
    RuntimeOptions,
    TrainingChoices,
    adapt_foreign_model_and_loss,
)
from fsdpx.core.trainer.session import Session
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError, OutOfMemory
from fsdpx.nn.layer import Layer
from fsdpx.nn.losses import Loss
from fsdpx.optim.optimizer import Average, Optimizer

__all__ = ["OPTIONS", "distribute", "make_session"]


@hooks.releasing_hooks_after_block()
@partial(wrap_with_type_hint_check, when="failed")
def distribute(
    model: Layer | ForeignModule,
    *,
    loss: Loss | ForeignModule | None = None,
    optimizer: Optimizer | None = None,
    strategy: Strategy | Sharding | SyncChoice = "fsdp",
    mesh: Mesh | None = None,
    comm: Any = None,
    microbatches: int | None = None,
    seed: int = 0,
    precision: PrecisionName | Precision | None = None,
    clip_norm: float | None = None,
    compression: Choice = None,
    reproducible_chunks: int | None = None,
    frozen: Sequence[str] = (),
    schedule: ScheduleName | PathLike[str] | Callable[..., Any] = "1f1b",
    stages: Stages | None = None,
    recompute: int | str | None = None,
    tensor_plan: Mapping[str, Any] | None = None,
    sequence: SequenceMode | None = None,
    elastic: bool | CallRunnerChoice = False,
    average: Average | None = None,
    offload: StorageLevelChoice | None = None,
    domain: Domain | None = None,
    runtime: RuntimeOptions | None = None,
    **rarely: Unpack[RuntimeArgs],
) -> Trainer:
    """Distribute `model` over the ranks of `comm` and return its `Trainer`. Collective.

    Parameters
    ----------
    model : a layer, such as `nn.Sequential(...)`, or a `torch.nn.Module` (docs: pytorch)
    loss, optimizer : objects from `fsdpx.nn` and `fsdpx.optim`; the loss may also come from `torch.nn`. Without an
        optimizer, the trainer holds only parameters, for `predict`, `generate` and, with a loss, `evaluate`
    strategy : {strategies} or `fsdpx.Sharding(...)`; for replicas that train independently and synchronize from time to
        time: "local_sgd", "diloco" or `fsdpx.LocalSGD(...)` (docs: local); for ranks that step at their own speed:
        "async" or `fsdpx.AsyncSGD(...)`, "gossip" or `fsdpx.GossipSGD(...)` (docs: asynchronous); or "auto", the
        fastest strategy that a plan finds ("auto" needs `batch` and also takes `memory` and `machine`; docs: planning)
    mesh : `fsdpx.Mesh(...)`; its axis widths override the widths implied by the strategy
    comm : an mpi4py communicator, which is duplicated, or a `Communicator` (default: the one that `fsdpx.init()`
        opened)
    microbatches : number of parts into which each rank's batch is split (default: 1, or 4 per pipeline rank in a
        pipeline, as in Huang et al. 2019)
    seed : seed for initialization and dropout; the random numbers do not depend on mesh or strategy
    precision : "float64", "float32", "bf16" or "bfloat16" (16-bit layers, float32 parameter shards), "bf16-true"
        (everything 16-bit except gradient sums), "fp16" ("float16") or `fsdpx.Precision(...)`
    clip_norm : maximum global gradient norm; larger gradients are scaled down to it (default: no clipping)
    compression : how gradients are sent: {codecs} or a `Codec`, such as `fsdpx.Int8(unbiased=True)`;
        `fsdpx.HierarchicalCompression(codec)`, to compress only between replicas; or a dict that maps name patterns to
        any of these, where the first matching pattern applies (docs: compression)
    reproducible_chunks : split the global batch into this many equal parts, so that results are bit-identical on any
        number of ranks
    frozen : name patterns of parameters that are not trained
    schedule : pipeline schedule: {schedules}, a function, or the path of a text file
    stages : how the pipeline splits the model: the path of the first layer of each stage, or the number of layers of
        each stage; or a dict that maps path patterns to pipeline ranks, `{"0": 0, "blocks.*": 1}` (docs: schedules)
    recompute : units (groups of layers) whose forward pass is recomputed in the backward pass (activation
        checkpointing): "all"; a number k, for every k-th unit; a limit on activation memory such as "512MiB", for as
        many units as the limit requires; or "attention", for attention only
    tensor_plan : dict that maps path patterns to marks such as `nn.sharding.ColumnParallel`, which say how a layer is
        sharded over the tensor axis (default: the model's own plan)
    sequence : what the tensor axis shards in addition to weights. "parallel": the sequence in norms and dropout.
        "ulysses" or "ring": the sequence in all layers. "samples": the samples; in this case, only the weights of
        experts are sharded (docs: tensor)
    elastic : True or `fsdpx.ElasticConfig(...)`: training continues when ranks die, leave or join (docs: elastic)
    average : how to average the parameters over time, for `evaluate(weights="average")`: `fsdpx.EMA(0.999)` or
        `fsdpx.SWA(...)`
    offload : what to keep on disk instead of in memory, such as `fsdpx.OffloadConfig("/local/disk", what="optimizer")`
        (docs: offload)
    domain : a `fsdpx.Grid`, or a `fsdpx.Partition` of a mesh: each rank holds a part of every field, as in a solver;
        batches and predictions consist of these parts (docs: fields, meshes)
    runtime : `fsdpx.RuntimeOptions(...)`, with rarely set options: device, checks, traces, and values to use instead
        of measured ones
    rarely : fields of `fsdpx.RuntimeOptions` by name, such as `device="cuda"`; they override the same fields of
        `runtime`. strategy="auto" also takes `batch`, the inputs and targets of a full global batch, or only their
        shapes and dtypes; `memory`, the amount of memory that a rank may use, such as "16GiB"; and `machine`, as for
        `fsdpx.plan`

    Returns
    -------
    Trainer : this rank's trainer; with `elastic`, every rank must pass it the full global batch

    Raises
    ------
    ConfigError : on all ranks, if options are invalid, cannot be combined, or differ between ranks
    """
    options, others = dict(locals()), dict[str, Any](rarely)
    comm = getattr(domain, "comm", None) if comm is None else comm
    defaults.require_valid_intracomm(comm)
    before = _find_communicator_to_compare_arguments(comm)
    with nullcontext() if before is None else raising_errors_on_all_ranks(before, "distribute"):
        choice, plan = _parse_elastic_into_runner_choice(elastic), _find_planner(strategy)
        chosen = _override_runtime_options(runtime, others)
    asked = {name: value for name in PLAN_OPTIONS if (value := others.pop(name, None)) is not None}
    given = {name: chosen[name] for name in ("backend", "check", "tune")}
    given |= {} if plan is None else {f"strategy={strategy!r}": True}
    with comparing_arguments(comm=defaults.describe_comm_for_comparison(comm), elastic=elastic, **given) as words:
        world: Any = _open_world_and_agree_on_arguments(comm, before, chosen, choice, words)
    with nullcontext() if choice is not None else raising_errors_on_all_ranks(world, "distribute", agree_at_end=True):
        require_known_options("distribute", others, OPTIONS)
        options["model"], options["loss"] = adapt_foreign_model_and_loss(model, loss, domain)
        training = TrainingChoices(**_select_options(TrainingChoices, options))
        distribution = DistributionChoices(**_select_options(DistributionChoices, options))
        recipe = Recipe(training, distribution, RuntimeOptions(**chosen))
    recipe = _fill_in_planned_options(recipe, world, plan, asked)
    return _make_trainer(recipe, world, choice)


for _name, _values in (("strategies", PRESETS), ("codecs", list_codec_names()), ("schedules", SCHEDULES)):
    _text = ", ".join(f'"{value}"' for value in _values)
    # filled in here, so that the docstring always lists all existing names
    distribute.__doc__ = (distribute.__doc__ or "").replace(f"{{{_name}}}", _text)

PLAN_OPTIONS = ("batch", "memory", "machine")
OPTIONS = [*signature(distribute).parameters][:-1] + [field.name for field in fields(RuntimeOptions)] + [*PLAN_OPTIONS]
"""Names of all arguments of `distribute`. The arguments in PLAN_OPTIONS are valid only with strategy="auto"."""


def _select_options(recipe_part: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `options` that are fields of `recipe_part`, a dataclass such as `TrainingChoices`."""
    return {field.name: options[field.name] for field in fields(recipe_part) if field.name in options}


def _parse_elastic_into_runner_choice(value: Any) -> CallRunnerChoice | None:
    """Return the parsed value of the option `elastic`, or None if the option is not used."""
    if isinstance(value, CallRunnerChoice):
        return value
    if isinstance(value, bool) or value is None:
        return import_declared_extension("ranks", "elastic")() if value else None
    raise ConfigError(f"elastic={value!r}: True, False or fsdpx.ElasticConfig(...)")


def _find_planner(strategy: Any) -> Callable[..., Recipe] | None:
    """Return the function that chooses the options if `strategy` names a planner, such as "auto"; otherwise None."""
    by_name = isinstance(strategy, str) and strategy not in PRESETS
    planner: Callable[..., Recipe] | None = import_extension_if_declared("planner", strategy) if by_name else None
    return planner


def _fill_in_planned_options(
    recipe: Recipe, world: Communicator, plan: Callable[..., Recipe] | None, plan_options: Mapping[str, Any]
) -> Recipe:
    """Return the recipe with the options that the planner chose. Without a planner, return it unchanged, but raise
    ConfigError if planner options were given. Collective."""
    if plan is not None:
        return plan(recipe, world, **plan_options)
    for name, value in plan_options.items():
        raise ConfigError(f"{name}={value!r}: a plan needs it, and nothing is planned; say strategy='auto'")
    return recipe


def _make_trainer(recipe: Recipe, world: Any, choice: CallRunnerChoice | None) -> Trainer:
    """Return the trainer for a recipe. If `choice` is None, the trainer's ranks stay the same during the whole run.
    Collective."""
    if choice is not None:
        require_compatible_options(choice.excluded, ChoiceContext(recipe))
        return _install_ending_all_ranks_on_exception(Trainer(choice.make_call_runner(recipe, world)), world)
    has_values = load_device(recipe.runtime.device).holds_data
    if has_values:
        broadcast_foreign_values(recipe.training.model, world)
    session = make_session(recipe, world, watch=start_watching_axes)
    if has_values:
        _add_observers(session.engine, recipe.runtime)
        release_foreign_library_arrays(recipe.training.model, world)
    return _install_ending_all_ranks_on_exception(Trainer(FixedRanks(session)), world)


def make_session(recipe: Recipe, world: Communicator, tuning: Tuning | None = None, **options: Any) -> Session:
    """Return the session that runs a recipe on this rank. If memory runs out, now or in a later step, raise
    OutOfMemory with a list of options that need less memory. Collective.

    Parameters
    ----------
    recipe : the model and all options
    world : communicator of all ranks of the trainer
    tuning : machine-dependent choices made earlier (default: measure them, or read them from disk)
    options : further arguments of `assemble_session`
    """
    try:
        session = assemble_session(recipe, world, tuning, **options)
    except MemoryError as error:
        raise _explain_memory_error(recipe, world, None, error, None) from error

    session.make_out_of_memory_error = partial(_explain_memory_error, recipe, world, session)
    return session


def _explain_memory_error(recipe: Recipe, world: Communicator, *about: Any) -> OutOfMemory:
    """Import `make_out_of_memory_error`, which is needed only after an error. Call it, and return its result."""
    from fsdpx.core.trainer.out_of_memory import make_out_of_memory_error

    return make_out_of_memory_error(recipe, world, *about)


def _add_observers(engine: Engine, runtime: RuntimeOptions) -> None:
    """Add the observers, such as a trace, that the options and environment variables ask for. Collective."""
    if (trace := runtime.get_trace_choice()) is not None:
        import_declared_extension("observer", "trace")(engine, trace)
    if (wanted := environment.get_value_record_folder_and_step_count()) is not None:
        import_declared_extension("observer", "values")(engine, wanted[1], wanted[0])
    if runtime.replay:
        import_declared_extension("observer", "replay")(engine)


def _install_ending_all_ranks_on_exception(trainer: Trainer, world: Any) -> Trainer:
    """If ranks are processes, make any uncaught exception on this rank end all ranks, as long as the trainer exists.
    Return the trainer."""
    if (carrier := unwrap_message_backend(world)) is not None:
        hooks.install_process_hooks_while_alive(trainer, carrier, beyond_scope=True)
    return trainer


def _open_world_and_agree_on_arguments(
    comm: Any,
    open_comm: Communicator | None,
    runtime_options: Mapping[str, Any],
    choice: CallRunnerChoice | None,
    arguments: Mapping[str, str],
) -> Any:
    """Return the communicator of the trainer's ranks, once all of them have called `distribute` with the same
    arguments.

    Ranks compare the arguments over `open_comm` if there is one, and otherwise in the first message on the new
    communicator. In both cases, ranks compare the arguments before validating them, so that an error that occurs on all
    ranks is printed only once."""
    device = runtime_options["device"]
    words = "distribute" if device == "cpu" else f"distribute(device={device!r})"
    if open_comm is not None:
        report_call_to_watchdog(open_comm, "distribute")
        agree_on_call(open_comm, words, arguments)
    world: Any = choice.open_world(comm) if choice else _adopt_or_open_comm(comm, runtime_options)
    if (carrier := unwrap_message_backend(world)) is not None:
        hooks.install_process_hooks_while_alive(carrier, carrier)
    if choice is None and world is not open_comm:
        report_call_to_watchdog(world, "distribute")
        agree_on_call(world, words)
    return world


def _override_runtime_options(runtime: Any, rarely: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `runtime` as a dict, overridden by the options in `rarely`. Raise ConfigError if a value has
    the wrong type."""
    if not isinstance(runtime, RuntimeOptions | None):
        raise ConfigError(f"runtime={runtime!r}: say fsdpx.RuntimeOptions(...)")
    runtime_options = {
        name: rarely[name] for name in ("backend", "device", "device_map") if name in rarely
    }  # these options are checked now, because they are needed to open the communicator
    require_arguments_match_type_hints(RuntimeOptions.__init__, (None,), runtime_options, "distribute")
    return vars(runtime or RuntimeOptions()) | {k: v for k, v in rarely.items() if k not in PLAN_OPTIONS}


def _find_communicator_to_compare_arguments(comm: Any) -> Communicator | None:
    """Return an open communicator that ranks can use to compare their arguments. Return None if there is none, or if
    some of its ranks may have died.

    If the size of `comm` equals the number of ranks that were started, `comm` has the same ranks as the default
    communicator. In that case, return the default communicator. Ranks can then compare their arguments even if some of
    them pass `comm` and others pass nothing.
    """
    if isinstance(comm, FakeCommunicator):  # a fake communicator has no other processes to compare with
        return None
    opened, size = defaults.get_default(), None if comm is None else getattr(comm, "size", None)
    if opened is not None and (
        comm is None or size == opened.comm.size == environment.read_environment().expected_size
    ):
        comm = opened.comm
    known = hasattr(comm, "all_gather") and hasattr(comm, "reduce_scatter")
    return comm if known and not environment.read_environment().ulfm else None


def _adopt_or_open_comm(comm: Any, runtime_options: Mapping[str, Any]) -> Communicator:
    """Return the communicator of the trainer's ranks. This is `comm` itself if the caller passed one, and otherwise a
    new communicator. Collective."""
    backend = runtime_options["backend"]
    require_backend_for_device(backend, runtime_options["device"])
    if comm is None and backend is None:
        return default_communicator()
    world = open_world(backend, comm, device_map=runtime_options["device_map"])
    if comm is not None:
        record_script_rank_and_size(world)
    return world
