"""From a recipe and a world to a session: all ranks check every choice alike before any byte of data moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array import blas
from fsdpx.core.array.arena import keep_pages
from fsdpx.core.array.devices import load_device
from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.base import config, environment
from fsdpx.core.base.config import Precision, Sharding
from fsdpx.core.base.extensions import load_extension
from fsdpx.core.base.messages import say, slow
from fsdpx.core.base.name_hints import demand_match
from fsdpx.core.base.option_kinds import values_of
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.desync_check import Guarded
from fsdpx.core.comm.mesh import Axes, Mesh, connect
from fsdpx.core.compression import Codecs
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.warmup import make_ready, warm_calls
from fsdpx.core.program import Stage, StepChoices, pipeline
from fsdpx.core.state.accumulation import Accumulation, accumulation, microbatches_of
from fsdpx.core.state.allocate import allocate
from fsdpx.core.state.placement import Formats, Options, Pipe, Placement, recompute, statistics_of
from fsdpx.core.state.sample_layout import SampleLayout
from fsdpx.core.state.storage import StorageChoice
from fsdpx.core.state.sync_policy import PaceChoice
from fsdpx.core.state.tuning import Tuning, kept, tune_for
from fsdpx.core.state.units import Layout, Spread, cut_stages, deal, demand_layers, lay_out
from fsdpx.core.trainer.agreement import agree, list_choices
from fsdpx.core.trainer.batch import share_errors
from fsdpx.core.trainer.option_rules import CHUNKS, Beside, check_whole, demand_together
from fsdpx.core.trainer.recipe import Distribution, Machinery, NoOptimizer, Recipe, Training
from fsdpx.core.trainer.session import Commit, Session
from fsdpx.errors import ConfigError, install_hint, warn
from fsdpx.nn.layer import Layer, runs_of
from fsdpx.nn.linearize import Sorted, once, sort, with_numbers
from fsdpx.nn.losses import Planned
from fsdpx.optim import no_decay

__all__ = ["placement_of", "session_of"]

Watch = Callable[[Axes], Observer | None]
"""Begins to look after this rank on its axes; what its engine tells what it does. Collective."""


def session_of(
    recipe: Recipe,
    world: Communicator,
    tuning: Tuning | None = None,
    *,
    initial: bool = True,
    commit: Commit | None = None,
    watch: Watch | None = None,
) -> Session:
    """The session of this rank of `world`. Collective: ranks compare their recipes first.

    tuning: choices made before, instead of measuring or looking for them. initial: with initial parameters; else the
    caller fills them in. commit: see `Feed`."""
    place, model, microbatches = placement_of(recipe, world, tuning)
    training = recipe.training
    if place.xp is np:
        keep_pages()
    norm = training.clip_norm is not None or place.formats.precision.loss_scale == "dynamic"
    dtypes = place.formats.compute, place.formats.gradients, place.formats.master
    if place.xp is np:
        runs = *runs_of(model), *getattr(place.loss, "runs", ())
        optimizers = [] if place.optimizer is None else [place.optimizer]
        with slow(_speaks(world), "compiling kernels") as count:
            calls = warm_calls(runs, optimizers, dtypes, norm) + place.codecs.warm_calls(place.formats.gradients)
            make_ready(calls, _share(world), count)
    state = allocate(place, initial and place.device.holds_data)  # random numbers take time, and need a place
    observer = None if watch is None else watch(place.axes)
    shapes = [(page.rule, {f.name: f.shape for f in page.fields}) for page in place.layout.pages if page.trainable]
    for text in place.codecs.remarks(shapes):
        say(world, text)
    engine = Engine(state, [] if observer is None else [observer])
    session = Session(engine, _of_one_process(recipe, place), training.loss, microbatches, commit)
    session.placed()
    return session


def _of_one_process(recipe: Recipe, place: Placement) -> Sorted:
    """The model as one process has it, with its layers in order."""
    model, samples, dtype = recipe.training.model, recipe.distribution.samples, place.formats.compute
    return once(("ordered", model, samples.joined, dtype), lambda: sort(samples.join(with_numbers(model, dtype))))


def _speaks(world: Communicator) -> bool:
    """Whether this is rank 0, and exists: of the whole job, where each rank may have a trainer of its own."""
    launcher = environment.read().launcher
    return world.rank == 0 and not (launcher and launcher.rank) and not isinstance(world, FakeCommunicator)


def _share(world: Communicator) -> tuple[int, int]:
    """This process of how many ranks of the job on its host: (number, count)."""
    launcher = None if isinstance(world, FakeCommunicator) else environment.read().launcher
    if launcher is None or launcher.local_rank is None or not launcher.local_size:
        return 0, 1
    return launcher.local_rank % launcher.local_size, launcher.local_size


class TrainingRanks(NamedTuple):
    """Who trains, on what, with which measured choices, and at which pace."""

    xp: Any
    axes: Axes
    sharding: Sharding
    tuning: Tuning
    pace: PaceChoice


class RankModel(NamedTuple):
    """The model as this line of the tensor axis runs it on its part of the samples, and with its layers in order."""

    planned: Planned
    ordered: Sorted
    samples: SampleLayout


class Reducing(NamedTuple):
    """How gradients become the sums that update. microbatches: that a step was asked for. each: of this rank."""

    codecs: Codecs
    accumulation: Accumulation
    microbatches: int
    each: int


class Pages(NamedTuple):
    """Where parameters lie. pipe: the order of microbatches over stages."""

    pipe: Pipe
    layout: Layout


def placement_of(recipe: Recipe, world: Communicator, tuning: Tuning | None = None) -> tuple[Placement, Layer, int]:
    """Where everything goes on this rank, the model as this line of the tensor axis runs it, and how many microbatches
    a step was asked for. Collective.

    It is made in stages of which each needs those before it alone: ranks, formats, the model, how gradients are
    reduced, and pages. Then all ranks compare what they were asked for, before any data moves."""
    ranks = _ranks(recipe, world, tuning)
    with share_errors(world, "distribute", agree_at_end=True):
        formats = _asked(recipe.training.precision, ranks.xp)
        model = _model(recipe, ranks, formats)
        reducing = _reducing(recipe, ranks, formats)
        pages = _pages(recipe, ranks, formats, model, reducing)
        options = _options(recipe, ranks, formats, model.ordered, reducing, pages)
        optimizer = _optimizer(recipe.training, formats)
        place = Placement(
            xp=ranks.xp,
            model=model.ordered,
            layout=pages.layout,
            stages=_stages(pages.layout, reducing, ranks, optimizer, options.storage),
            axes=ranks.axes,
            sharding=ranks.sharding,
            formats=_formats(formats),
            codecs=reducing.codecs,
            optimizer=optimizer,
            loss=model.planned.loss,
            options=options,
            tuning=ranks.tuning,
            pipe=pages.pipe,
            output_dim=model.planned.output_dim,
            sample_layout=model.samples,
        )
    agree(world, list_choices(recipe, place, reducing.microbatches, _products(world, formats, ranks.xp)))
    return place, model.planned.model, reducing.microbatches


def _ranks(recipe: Recipe, world: Communicator, tuning: Tuning | None) -> TrainingRanks:
    """The device and the mesh of this rank. Collective."""
    distribution, machinery, settings = recipe.distribution, recipe.machinery, environment.read()
    xp = _namespace(machinery, world)
    guard = settings.check and not isinstance(world, Guarded) if machinery.check is None else machinery.check
    with slow(_speaks(world), "measuring", kept) as count:
        tuning = tuning or tune_for(world, settings.tune if machinery.tune is None else machinery.tune, xp, count)
    axes, sharding = _axes(recipe, world, guard)
    return TrainingRanks(xp, axes, sharding, tuning, distribution.pace)


def _namespace(machinery: Machinery, world: Communicator) -> Any:
    """Take this rank's own device, and return the namespace of its arrays. Collective."""
    device = load_device(machinery.device)
    for remark in device.take(world, machinery.device_map):
        say(world, remark)
    device.require_usable()
    return device.xp


def _axes(recipe: Recipe, world: Communicator, check: bool) -> tuple[Axes, Sharding]:
    distribution, ahead = recipe.distribution, recipe.machinery.ahead
    with share_errors(world, "distribute", agree_at_end=True):
        strategy = distribution.within(world.size)
        mesh = (distribution.mesh or Mesh()).filled(strategy, world.size)
        named = config.PRESETS.get(strategy) if isinstance(strategy, str) else strategy
        if isinstance(named, Sharding) and named.shard is not None and mesh.shard != named.shard:
            raise ConfigError(f"strategy {strategy!r} wants a shard axis of width {named.shard}, the mesh says {mesh}")
        width = mesh.width("replica") * mesh.width("shard")
        lifetimes = named if isinstance(named, Sharding) else config.sharding(strategy, width)
        ahead = lifetimes.ahead if ahead is None else ahead
        demand_together(distribution.samples.excluded, Beside(recipe, mesh=mesh), "space: ")
    samples = distribution.samples.groups(mesh, world)
    axes = connect(mesh, world, check=check, local=distribution.pace.replicas, samples=samples)
    return axes, replace(lifetimes, replica=mesh.replica, shard=mesh.shard, ahead=ahead)


def _asked(choice: str | Precision | None, xp: Any) -> Precision:
    """The formats that were asked for. "fp16" computes in 16 bits where the processor has instructions for it."""
    formats = config.precision(choice)
    if config.half_name(choice) == "float16" and xp is np and blas.halves().chosen("float16") != blas.halves().WIDENED:
        return Precision("float16", loss_scale="dynamic")
    return formats


def _model(recipe: Recipe, ranks: TrainingRanks, formats: Precision) -> RankModel:
    """The model that this rank runs."""
    training, axes = recipe.training, ranks.axes
    made, dtype = recipe.distribution, dtype_of(formats.compute)
    samples = made.samples.sample_layout(training.model, axes)
    cut = made.tensor_plan, made.sequence, made.samples
    key = "planned", training.model, training.loss, axes.tensor.size, *cut, dtype
    planned = once(key, lambda: _planned(training, axes, made, dtype, samples))
    ordered = once(("sorted", planned.model), lambda: sort(planned.model))
    for optimizer in (training.optimizer, *ranks.pace.optimizers):
        check_whole(optimizer, axes.tensor.size)
    return RankModel(planned, ordered, samples)


def _planned(
    training: Training, axes: Axes, distribution: Distribution, dtype: np.dtype, samples: SampleLayout
) -> Planned:
    """The model that this line of the tensor axis runs on its part of the samples: the model itself, if there is no
    such axis. dtype: in which it computes."""
    model, _ = distribution.samples.cut(with_numbers(training.model, dtype))
    loss, plan, sequence = samples.over(training.loss), distribution.tensor_plan, distribution.sequence
    if axes.tensor.size == 1 and plan is None and sequence is None:
        return Planned(model, loss, None, frozenset())
    from fsdpx.nn.tensor_plan import parallelise  # attention over a sequence with it

    return parallelise(model, loss, axes.tensor.size, plan, sequence)


def _reducing(recipe: Recipe, ranks: TrainingRanks, formats: Precision) -> Reducing:
    """What carries gradients, and in which tree they add up."""
    training, axes, choice = recipe.training, ranks.axes, recipe.distribution.codec
    microbatches = microbatches_of(training.microbatches, training.chunks, axes.mesh)
    sums = accumulation(training.chunks, axes)
    each = sums.microbatches(microbatches)
    return Reducing(Codecs.chosen(choice, formats, ranks.pace.carried), sums, microbatches, each)


def _pages(recipe: Recipe, ranks: TrainingRanks, formats: Precision, model: RankModel, reducing: Reducing) -> Pages:
    """Stages, units and pages."""
    axes, ordered = ranks.axes, model.ordered
    stages, dealt = deal(ordered, recipe.distribution.stages, axes.pipe.size)
    assert not isinstance(stages, Mapping), "a list of first layers by now"
    pipe = Pipe(recipe.distribution.schedule, axes.pipe.size, dealt)
    demand_layers(ordered, axes.pipe.size, "")  # before a schedule of so many ranks is made
    home = pipe.home(reducing.each)
    starts = cut_stages(ordered, len(home), stages, recipe.machinery.costs, pipe.many(home))
    bitwise = reducing.accumulation.bitwise
    spread = Spread(starts, home, axes.tensor.rank, axes.tensor.size, model.planned.partial, bitwise)
    return Pages(pipe, _layout(recipe, ranks, formats, ordered, spread, reducing))


def _layout(
    recipe: Recipe, ranks: TrainingRanks, formats: Precision, model: Sorted, spread: Spread, reducing: Reducing
) -> Layout:
    """Units and pages; ConfigError for patterns that match no parameter."""
    training = recipe.training
    wanted = recipe.machinery.group_bytes
    group = ranks.tuning.group_bytes if wanted is None else config.byte_count(wanted, "group_bytes")
    dtype = dtype_of(formats.compute)
    still = isinstance(training.optimizer, NoOptimizer) and any(node.layer.specs() for node in model.nodes)
    frozen = ("*",) if still else training.frozen
    layout = lay_out(model, dtype.itemsize, group, frozen, spread, reducing.codecs.rule_of)
    demand_match("codec", reducing.codecs.patterns, layout.names)
    for optimizer in (training.optimizer, *ranks.pace.optimizers):
        _check_patterns(optimizer, layout)
    return layout


def _check_patterns(optimizer: Any, layout: Layout) -> None:
    """ConfigError for a pattern of an optimiser that matches nothing, unless it is one of those for any model."""
    names = [name for name, spec in layout.specs.items() if not spec.state]
    for argument, common in (("groups", no_decay), ("but", getattr(type(optimizer), "but", ()))):
        given = [pattern for pattern in getattr(optimizer, argument, ()) if pattern not in common]
        demand_match(f"{type(optimizer).__name__}({argument}=)", given, names)


def _options(
    recipe: Recipe, ranks: TrainingRanks, formats: Precision, model: Sorted, reducing: Reducing, pages: Pages
) -> Options:
    """What a step is asked for beside; ConfigError for options that exclude each other."""
    training, distribution, machinery = recipe.training, recipe.distribution, recipe.machinery
    recomputing, schedule = recompute(training.recompute), distribution.schedule
    every, count = recomputing.every, len(pages.layout.units)
    if every > count:
        raise ConfigError(f"recompute={every}: the model has {count} units; take a number up to that")
    distribution.storage.check(training.optimizer, training.average)
    mesh, state, rounding = ranks.axes.mesh, pages.layout.state, reducing.codecs.rounding
    chosen = Beside(recipe, model, formats, mesh, state, ranks.xp, rounding)
    demand_together(ranks.pace.excluded, chosen, ranks.pace.prefix)
    if training.chunks is not None:
        demand_together(CHUNKS, chosen, f"chunks={training.chunks}: ")
    return Options(
        **values_of(StepChoices, training),
        check_finite=machinery.check_finite,
        schedule=schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__),
        recompute=recomputing,
        storage=distribution.storage,
        pace=ranks.pace,
        planned=distribution.planned,
    )


def _optimizer(training: Training, formats: Precision) -> Any:
    """The optimiser that updates the shard, in the format of the shard."""
    optimizer, narrow = training.optimizer, formats.updated != formats.gradients
    if narrow:
        optimizer = load_extension("half", "rounded")(optimizer, formats.rounding == "kahan")
    if training.average is not None:
        from fsdpx.optim.average import Averaged

        optimizer = Averaged(optimizer, training.average, "float32" if narrow else None)
    return optimizer


def _stages(
    layout: Layout, reducing: Reducing, ranks: TrainingRanks, optimizer: Any, storage: StorageChoice
) -> tuple[Stage, ...]:
    """The view of each rank of the pipe."""
    sizes, alone = dict.fromkeys(ranks.axes.summing, 1), ranks.axes.data.size == 1
    trained = [page for page in layout.pages if page.trainable]
    coded = [page.index for page in trained if any(reducing.codecs.route(page.rule).kept(sizes, alone))]
    pages = {page.index: page.trainable for page in layout.pages}
    return pipeline(
        [(u.pages, u.inputs, u.outputs) for u in layout.units],
        layout.trainable(),
        range(len(layout.inputs)),
        layout.outputs,
        [unit.stage for unit in layout.units],
        layout.spread.home,
        layout.twins,
        [page.index for page in layout.pages if page.partial],
        reducing.accumulation.joins and not ranks.pace.replicas,
        moving=[unit.index for unit in layout.units if statistics_of(layout, unit)],
        coded=coded,
        constant=layout.constant(),
        elsewhere=storage.elsewhere(pages, len(layout.units), bool(optimizer.slots)),
    )


def _formats(formats: Precision) -> Formats:
    p = formats
    compute, wire = dtype_of(p.compute), dtype_of(p.wire)
    master, gradients, statistics = dtype_of(p.updated), dtype_of(p.gradients), dtype_of(p.statistics)
    return Formats(master, gradients, statistics, compute, None if wire == compute else wire, formats)


def _products(world: Communicator, formats: Precision, xp: Any) -> str:
    """The library that computes products of 16-bit matrices: results depend on it. A warning, once, where it is slower
    than float32."""
    if formats.compute == formats.gradients or xp is not np:
        return ""
    name = dtype_of(formats.compute).name
    library, able = blas.halves().chosen(name), blas.halves().instructions(name)
    if library == blas.halves().WIDENED and world.rank == 0:
        why = f"oneDNN is not installed ({install_hint('onednn')})" if able else NOTHING
        warn(f"fsdpx: {formats.compute} is computed as float32, slower than float32: {why}", UserWarning)
    return library


NOTHING = "this processor has no instructions for it"
