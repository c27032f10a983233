"""Make a session from a recipe and a communicator. All ranks compare their options before they exchange any other
data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.arena import make_malloc_keep_freed_memory
from fsdpx.core.array.devices import load_device
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base import config, environment
from fsdpx.core.base.config import Precision, Sharding
from fsdpx.core.base.extensions import import_declared_extension
from fsdpx.core.base.messages import log_on_rank0, reporting_if_slow
from fsdpx.core.base.name_hints import require_pattern_matches
from fsdpx.core.base.option_kinds import get_field_values
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.desync_check import CheckedCommunicator
from fsdpx.core.comm.mesh import Mesh, MeshAxes, connect_axes
from fsdpx.core.compression import CodecRules
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.warmup import list_warm_up_calls, run_warm_up_calls_in_rotated_order
from fsdpx.core.program import Stage, StepChoices, make_stages
from fsdpx.core.state.accumulation import Accumulation, get_microbatch_count_or_default, make_accumulation
from fsdpx.core.state.allocate import allocate_state
from fsdpx.core.state.placement import (
    NumberFormats,
    PipelineChoice,
    Placement,
    StepOptions,
    list_unit_statistics,
    parse_recompute,
)
from fsdpx.core.state.sample_layout import SampleLayout
from fsdpx.core.state.storage import StorageLevelChoice
from fsdpx.core.state.sync_policy import SyncChoice
from fsdpx.core.state.tuning import Tuning, agree_on_tuning, describe_cache_location
from fsdpx.core.state.units import (
    ModelLayout,
    ModelSpread,
    lay_out_model,
    parse_stages_option,
    require_enough_layers,
    split_into_stages,
)
from fsdpx.core.trainer.agreement import agree_on_choices, list_choices_to_compare
from fsdpx.core.trainer.batch import raising_errors_on_all_ranks
from fsdpx.core.trainer.option_rules import (
    CHUNKS,
    ChoiceContext,
    require_compatible_options,
    require_optimizer_supports_tensor_axis,
)  # fmt: skip
from fsdpx.core.trainer.recipe import DistributionChoices, NoOptimizer, Recipe, RuntimeOptions, TrainingChoices
from fsdpx.core.trainer.session import Commit, Session
from fsdpx.errors import ConfigError, warn
from fsdpx.nn.layer import Layer, list_kernels
from fsdpx.nn.layer_list import LayerList, insert_integer_casts, linearize
from fsdpx.nn.losses import TensorParallelModel
from fsdpx.nn.shape_inference import get_or_memoize
from fsdpx.optim import no_decay

__all__ = ["assemble_placement_and_model", "assemble_session"]

Watch = Callable[[MeshAxes], Observer | None]
"""Function that starts the watchdog of this rank on its mesh axes. It returns the observer that the engine notifies, or
None if there is no watchdog. Collective."""


def assemble_session(
    recipe: Recipe,
    world: Communicator,
    tuning: Tuning | None = None,
    *,
    initial: bool = True,
    commit: Commit | None = None,
    watch: Watch | None = None,
) -> Session:
    """Return this rank's session, which runs the training programs of the model. Ranks first compare their recipes.
    Collective.

    Parameters
    ----------
    recipe : the model and all options
    world : communicator of all ranks of the trainer
    tuning : machine-dependent choices made earlier (default: measure them, or read them from disk)
    initial : whether to initialize the parameters; if False, the caller sets them
    commit : function called before each update with the step's mean loss and update scale, or None
    watch : function that starts the watchdog of this rank and returns its observer (default: no watchdog)
    """
    place, model, microbatches = assemble_placement_and_model(recipe, world, tuning)
    training = recipe.training
    if place.xp is np:
        make_malloc_keep_freed_memory()
    norm = training.clip_norm is not None or place.formats.precision.loss_scale == "dynamic"
    dtypes = place.formats.compute, place.formats.gradients, place.formats.master
    if place.xp is np:
        runs = *list_kernels(model), *getattr(place.loss, "kernel_names", ())
        optimizers = [] if place.optimizer is None else [place.optimizer]
        with reporting_if_slow(_is_printing_rank(world), "compiling kernels") as count:
            calls = list_warm_up_calls(runs, optimizers, dtypes, norm) + place.codecs.make_warm_up_calls(
                place.formats.gradients
            )
            run_warm_up_calls_in_rotated_order(calls, _get_local_rank_and_size(world), count)
    # in a dry run, arrays have no data, so nothing needs to be initialized
    state = allocate_state(place, initial and place.device.holds_data)
    observer = None if watch is None else watch(place.axes)
    shapes = [(page.rule, {f.name: f.shape for f in page.fields}) for page in place.layout.pages if page.trainable]
    for text in place.codecs.iterate_user_notes(shapes):
        log_on_rank0(world, text)
    engine = Engine(state, [] if observer is None else [observer])
    session = Session(engine, _make_unsharded_layer_list(recipe, place), training.loss, microbatches, commit)
    session.tell_sync_policy_parameters_are_set()
    return session


def _make_unsharded_layer_list(recipe: Recipe, placement: Placement) -> LayerList:
    """Return the layers of the unsharded model (as it would run on a single process), in execution order."""
    model, samples, dtype = recipe.training.model, recipe.distribution.sample_partition, placement.formats.compute
    return get_or_memoize(
        ("ordered", model, samples.joined_partition, dtype),
        lambda: linearize(samples.make_unsharded_model(insert_integer_casts(model, dtype))),
    )


def _is_printing_rank(world: Communicator) -> bool:
    """Return whether this rank prints messages. Only rank 0 of the job prints, even if each rank has its own trainer;
    ranks of the "fake" backend never print."""
    launcher = environment.read_environment().launcher
    return world.rank == 0 and not (launcher and launcher.rank) and not isinstance(world, FakeCommunicator)


def _get_local_rank_and_size(world: Communicator) -> tuple[int, int]:
    """Return the local rank of this process on its host, and the number of ranks on the host."""
    launcher = None if isinstance(world, FakeCommunicator) else environment.read_environment().launcher
    if launcher is None or launcher.local_rank is None or not launcher.local_size:
        return 0, 1
    return launcher.local_rank % launcher.local_size, launcher.local_size


class TrainingRanks(NamedTuple):
    """The ranks that train, and everything that depends on them: array namespace, mesh axes, sharding,
    machine-dependent choices, and synchronization policy."""

    xp: Any
    axes: MeshAxes
    sharding: Sharding
    tuning: Tuning
    sync_choice: SyncChoice


class RankModel(NamedTuple):
    """This rank's model after tensor parallelism has been applied (`planned`), its layers in execution order
    (`ordered`), and the layout of samples."""

    planned: TensorParallelModel
    ordered: LayerList
    samples: SampleLayout


class ReductionChoices(NamedTuple):
    """How gradients are reduced for an update.

    Attributes
    ----------
    codecs : the codec that compresses each gradient
    accumulation : order in which gradients are added up
    microbatches : configured number of microbatches per step
    microbatches_per_rank : number of microbatches that each rank runs
    """

    codecs: CodecRules
    accumulation: Accumulation
    microbatches: int
    microbatches_per_rank: int


class LaidOutModel(NamedTuple):
    """The pipeline schedule, and the layout of the parameters: their pipeline stages, FSDP units and flat buffers
    (pages)."""

    pipe: PipelineChoice
    layout: ModelLayout


def assemble_placement_and_model(
    recipe: Recipe, world: Communicator, tuning: Tuning | None = None
) -> tuple[Placement, Layer, int]:
    """Return this rank's placement, the model that this tensor rank runs, and the configured number of microbatches
    per step. Collective.

    The parts of the placement are determined in this order: ranks, number formats, model, gradient reduction, flat
    parameter buffers (pages). Then all ranks compare their choices before they exchange any other data."""
    ranks = _set_up_device_tuning_and_mesh(recipe, world, tuning)
    with raising_errors_on_all_ranks(world, "distribute", agree_at_end=True):
        formats = _resolve_precision(recipe.training.precision, ranks.xp)
        model = _shard_and_linearize_model(recipe, ranks, formats)
        reducing = _choose_codecs_and_accumulation(recipe, ranks, formats)
        pages = _lay_out_stages_and_pages(recipe, ranks, formats, model, reducing)
        options = _make_step_options(recipe, ranks, formats, model.ordered, reducing, pages)
        optimizer = _wrap_optimizer_to_round_and_average(recipe.training, formats)
        place = Placement(
            xp=ranks.xp,
            model=model.ordered,
            layout=pages.layout,
            stages=_make_stages_of_all_pipeline_ranks(pages.layout, reducing, ranks, optimizer, options.storage),
            axes=ranks.axes,
            sharding=ranks.sharding,
            formats=_make_dtypes_by_array_kind(formats),
            codecs=reducing.codecs,
            optimizer=optimizer,
            loss=model.planned.loss,
            options=options,
            tuning=ranks.tuning,
            pipe=pages.pipe,
            output_dim=model.planned.output_dim,
            sample_layout=model.samples,
        )
    choices = list_choices_to_compare(recipe, place, reducing.microbatches)
    # added last, so that a difference in precision or device is reported first
    if formats.compute != formats.gradient_dtype and ranks.xp is np:
        choices |= import_declared_extension("half", "library")(formats, model.ordered, world.rank == 0)
    agree_on_choices(world, choices)
    return place, model.planned.model, reducing.microbatches


def _set_up_device_tuning_and_mesh(recipe: Recipe, world: Communicator, tuning: Tuning | None) -> TrainingRanks:
    """Select this rank's device, measure or load the machine-dependent tuning, and set up the communicators of the
    mesh axes. Collective."""
    distribution, runtime, settings = recipe.distribution, recipe.runtime, environment.read_environment()
    xp = _select_device_and_get_namespace(runtime, world)
    guard = settings.check and not isinstance(world, CheckedCommunicator) if runtime.check is None else runtime.check
    with reporting_if_slow(_is_printing_rank(world), "measuring", describe_cache_location) as count:
        tuning = tuning or agree_on_tuning(world, settings.tune if runtime.tune is None else runtime.tune, xp, count)
    axes, sharding = _create_axis_comms_and_get_sharding(recipe, world, guard)
    return TrainingRanks(xp, axes, sharding, tuning, distribution.sync_choice)


def _select_device_and_get_namespace(runtime: RuntimeOptions, world: Communicator) -> Any:
    """Select this rank's device and return the array module for it, such as `numpy`. Collective."""
    device = load_device(runtime.device)
    for remark in device.select_for_rank(world, runtime.device_map):
        log_on_rank0(world, remark)
    device.require_usable()
    return device.xp


def _create_axis_comms_and_get_sharding(recipe: Recipe, world: Communicator, check: bool) -> tuple[MeshAxes, Sharding]:
    """Create the communicators of this rank's mesh axes; return the axes and the sharding. Collective."""
    distribution, ahead = recipe.distribution, recipe.runtime.prefetch
    with raising_errors_on_all_ranks(world, "distribute", agree_at_end=True):
        strategy = distribution.strategy_within_replica(world.size)
        mesh = (distribution.mesh or Mesh()).fill_from_strategy(strategy, world.size)
        named = config.PRESETS.get(strategy) if isinstance(strategy, str) else strategy
        if isinstance(named, Sharding) and named.shard is not None and mesh.shard != named.shard:
            raise ConfigError(f"strategy {strategy!r} wants a shard axis of width {named.shard}, the mesh says {mesh}")
        width = mesh.width_of("replica") * mesh.width_of("shard")
        lifetimes = named if isinstance(named, Sharding) else config.resolve_sharding(strategy, width)
        ahead = lifetimes.prefetch if ahead is None else ahead
        require_compatible_options(distribution.sample_partition.excluded, ChoiceContext(recipe, mesh=mesh), "domain: ")
    samples = distribution.sample_partition.all_gather_rank_groups_by_sample(mesh, world)
    axes = connect_axes(mesh, world, check=check, local=distribution.sync_choice.replicas, samples=samples)
    return axes, replace(lifetimes, replica=mesh.replica, shard=mesh.shard, prefetch=ahead)


def _resolve_precision(choice: str | Precision | None, xp: Any) -> Precision:
    """Return the number formats selected by the option `precision`. For "fp16", they depend on the processor."""
    if xp is np and config.normalize_half_name(choice) == "float16":
        found: Precision = import_declared_extension("half", "precision")()
        return found
    return config.resolve_precision(choice)


def _shard_and_linearize_model(recipe: Recipe, ranks: TrainingRanks, formats: Precision) -> RankModel:
    """Return the model that this rank runs, sharded over the tensor axis, together with its layers in execution
    order."""
    training, axes = recipe.training, ranks.axes
    distribution, dtype = recipe.distribution, parse_dtype(formats.compute)
    samples = distribution.sample_partition.make_sample_layout(training.model, axes)
    cut = distribution.tensor_plan, distribution.sequence, distribution.sample_partition
    key = "planned", training.model, training.loss, axes.tensor.size, *cut, dtype
    planned = get_or_memoize(key, lambda: _shard_model(training, axes, distribution, dtype, samples))
    ordered = get_or_memoize(("sorted", planned.model), lambda: linearize(planned.model))
    for optimizer in (training.optimizer, *ranks.sync_choice.optimizers):
        require_optimizer_supports_tensor_axis(optimizer, axes.tensor.size)
    return RankModel(planned, ordered, samples)


def _shard_model(
    training: TrainingChoices, axes: MeshAxes, distribution: DistributionChoices, dtype: np.dtype, samples: SampleLayout
) -> TensorParallelModel:
    """Return the model that this rank runs, sharded over the tensor axis if there is one, with casts to the compute
    dtype `dtype`."""
    model, _ = distribution.sample_partition.shard_model(insert_integer_casts(training.model, dtype))
    loss, plan, sequence = samples.bind_loss(training.loss), distribution.tensor_plan, distribution.sequence
    if axes.tensor.size == 1 and plan is None and sequence is None:
        return TensorParallelModel(model, loss, None, frozenset())
    # imported only when needed, because this also imports sequence-parallel attention, which is slow to import
    from fsdpx.nn.tensor_plan import parallelize

    return parallelize(model, loss, axes.tensor.size, plan, sequence)


def _choose_codecs_and_accumulation(recipe: Recipe, ranks: TrainingRanks, formats: Precision) -> ReductionChoices:
    """Return how gradients are reduced for an update."""
    training, axes, choice = recipe.training, ranks.axes, recipe.distribution.compression
    microbatches = get_microbatch_count_or_default(training.microbatches, training.reproducible_chunks, axes.mesh)
    sums = make_accumulation(training.reproducible_chunks, axes)
    each = sums.count_microbatches(microbatches)
    return ReductionChoices(
        CodecRules.from_user_choice(choice, formats, ranks.sync_choice.outer_codec), sums, microbatches, each
    )


def _lay_out_stages_and_pages(
    recipe: Recipe, ranks: TrainingRanks, formats: Precision, model: RankModel, reducing: ReductionChoices
) -> LaidOutModel:
    """Return the pipeline schedule, and the layout of the parameters: their pipeline stages, FSDP units and flat
    buffers (pages)."""
    axes, ordered = ranks.axes, model.ordered
    stages, homes = parse_stages_option(ordered, recipe.distribution.stages, axes.pipe.size)
    assert not isinstance(stages, Mapping), "a list of first layers by now"
    pipe = PipelineChoice(recipe.distribution.schedule, axes.pipe.size, homes)  # type: ignore[arg-type]  # no PathLike here
    # check before building the schedule, because no schedule exists for a model with too few layers
    require_enough_layers(ordered, axes.pipe.size, "")
    home = pipe.get_stage_ranks(reducing.microbatches_per_rank)
    starts = split_into_stages(ordered, len(home), stages, recipe.runtime.costs, pipe.describe_stages_per_rank(home))
    bitwise = reducing.accumulation.bitwise
    spread = ModelSpread(starts, home, axes.tensor.rank, axes.tensor.size, model.planned.partial, bitwise)
    return LaidOutModel(pipe, _make_model_layout(recipe, ranks, formats, ordered, spread, reducing))


def _make_model_layout(
    recipe: Recipe,
    ranks: TrainingRanks,
    formats: Precision,
    model: LayerList,
    spread: ModelSpread,
    reducing: ReductionChoices,
) -> ModelLayout:
    """Return the layout of the parameters in FSDP units and flat buffers (pages). Raise ConfigError for a name pattern
    that matches no parameter."""
    training = recipe.training
    wanted = recipe.runtime.group_bytes
    group = ranks.tuning.group_bytes if wanted is None else config.parse_byte_count(wanted, "group_bytes")
    dtype = parse_dtype(formats.compute)
    still = isinstance(training.optimizer, NoOptimizer) and any(node.layer.specs() for node in model.nodes)
    frozen = ("*",) if still else training.frozen
    layout = lay_out_model(model, dtype.itemsize, group, frozen, spread, reducing.codecs.find_rule)
    require_pattern_matches("compression", reducing.codecs.patterns, layout.names)
    for optimizer in (training.optimizer, *ranks.sync_choice.optimizers):
        _require_optimizer_patterns_match(optimizer, layout)
    gathers_parts = ranks.sharding.full_params == "use" and ranks.axes.mesh.shard != 1
    hint = getattr(training.model, "split_hint", "")
    if hint and gathers_parts and ranks.axes.world.rank == 0 and layout.size * dtype.itemsize > group:
        warn(hint)
    return layout


def _require_optimizer_patterns_match(optimizer: Any, layout: ModelLayout) -> None:
    """Raise ConfigError if a name pattern that the user gave to an optimizer matches no parameter. Default patterns,
    which are meant for any model, need not match any."""
    names = [name for name, spec in layout.specs.items() if not spec.state]
    for argument, common in (("groups", no_decay), ("exclude", getattr(type(optimizer), "exclude", ()))):
        given = [pattern for pattern in getattr(optimizer, argument, ()) if pattern not in common]
        require_pattern_matches(f"{type(optimizer).__name__}({argument}=)", given, names)


def _make_step_options(
    recipe: Recipe,
    ranks: TrainingRanks,
    formats: Precision,
    model: LayerList,
    reducing: ReductionChoices,
    pages: LaidOutModel,
) -> StepOptions:
    """Return the options that a training step depends on. Raise ConfigError if two of them cannot be combined."""
    training, distribution, runtime = recipe.training, recipe.distribution, recipe.runtime
    recomputing, schedule = parse_recompute(training.recompute), distribution.schedule
    every, count = recomputing.every, len(pages.layout.units)
    if every > count:
        raise ConfigError(f"recompute={every}: the model has {count} units; take a number up to that")
    distribution.storage_choice.require_something_to_store(training.optimizer, training.average)
    mesh, state, rounding = ranks.axes.mesh, pages.layout.statistic_specs, reducing.codecs.rounding_codec_description
    chosen = ChoiceContext(recipe, model, formats, mesh, state, ranks.xp, rounding)
    require_compatible_options(ranks.sync_choice.excluded, chosen, ranks.sync_choice.message_prefix)
    if training.reproducible_chunks is not None:
        require_compatible_options(CHUNKS, chosen, f"reproducible_chunks={training.reproducible_chunks}: ")
    return StepOptions(
        **get_field_values(StepChoices, training),
        check_finite=runtime.check_finite,
        schedule=schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__),
        recompute=recomputing,
        storage=distribution.storage_choice,
        sync_choice=ranks.sync_choice,
        planned=distribution.planned,
    )


def _wrap_optimizer_to_round_and_average(training: TrainingChoices, formats: Precision) -> Any:
    """Return the optimizer. If parameters have a narrow dtype, wrap it so that updates are rounded to this dtype. If
    `average` is set, wrap it so that it averages the parameters over time."""
    optimizer, narrow = training.optimizer, formats.master_dtype != formats.gradient_dtype
    if narrow:
        optimizer = import_declared_extension("half", "optimizer")(optimizer, formats.rounding == "kahan")
    if training.average is not None:
        from fsdpx.optim.average import AveragedOptimizer

        optimizer = AveragedOptimizer(optimizer, training.average, "float32" if narrow else None)
    return optimizer


def _make_stages_of_all_pipeline_ranks(
    layout: ModelLayout, reducing: ReductionChoices, ranks: TrainingRanks, optimizer: Any, storage: StorageLevelChoice
) -> tuple[Stage, ...]:
    """Return the pipeline stages of all pipeline ranks, in rank order."""
    sizes, alone = dict.fromkeys(ranks.axes.reduction_axes, 1), ranks.axes.data.size == 1
    trained = [page for page in layout.pages if page.trainable]
    coded = [
        page.index for page in trained if any(reducing.codecs.get_codec_route(page.rule).iterate_memory(sizes, alone))
    ]
    pages = {page.index: page.trainable for page in layout.pages}
    return make_stages(
        [(u.pages, u.inputs, u.outputs) for u in layout.units],
        layout.list_trainable_page_flags(),
        range(len(layout.inputs)),
        layout.outputs,
        [unit.stage for unit in layout.units],
        layout.spread.home,
        layout.twins,
        [page.index for page in layout.pages if page.partial],
        reducing.accumulation.needs_join and not ranks.sync_choice.replicas,
        units_with_statistics=[unit.index for unit in layout.units if list_unit_statistics(layout, unit)],
        pages_with_codec_memory=coded,
        constant=layout.find_values_without_gradient(),
        stored_slots=storage.pair_offloaded_slots_with_placeholders(pages, len(layout.units), bool(optimizer.slots)),
    )


def _make_dtypes_by_array_kind(formats: Precision) -> NumberFormats:
    """Return the dtype of each kind of array, such as gradients or running statistics."""
    p = formats
    compute, wire = parse_dtype(p.compute), parse_dtype(p.parameter_wire_dtype)
    master, gradients, statistics = map(parse_dtype, (p.master_dtype, p.gradient_dtype, p.statistics_dtype))
    return NumberFormats(master, gradients, statistics, compute, None if wire == compute else wire, formats)
