"""distribute: from a model and its choices to a trainer; all ranks check every choice alike before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fsdpx import config
from fsdpx.array.arena import Arena
from fsdpx.array.heap import keep_pages
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.namespace import namespace
from fsdpx.comm.codecs import Codec, Plain
from fsdpx.comm.codecs import codec as codec_of
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.functional import default
from fsdpx.comm.guarded import Guarded
from fsdpx.comm.mesh import Axes, Mesh, connect
from fsdpx.comm.opening import adopt
from fsdpx.comm.opening import world as open_world
from fsdpx.config import Precision, Sharding
from fsdpx.engine.batch import check_chunks, most_chunks
from fsdpx.engine.choices import agree, check_model, check_numbers, check_options, check_parts, is_collective
from fsdpx.engine.engine import Engine, Options
from fsdpx.engine.pipe import Pipe
from fsdpx.engine.poker import Poker
from fsdpx.engine.recompute import Recompute
from fsdpx.engine.recompute import recompute as recomputed
from fsdpx.engine.scaler import Scaler
from fsdpx.engine.ties import connect_ties
from fsdpx.engine.trainer import Trainer
from fsdpx.engine.tuning import Tuning, tune_for
from fsdpx.engine.warm import warm
from fsdpx.engine.windows import memory_of, share_gradients, share_parameters
from fsdpx.errors import ConfigError
from fsdpx.launch import environment
from fsdpx.layout.pages import Page
from fsdpx.layout.stages import cut_stages
from fsdpx.layout.state import Holding, PageState, hold, initialise, state_arrays
from fsdpx.layout.units import Layout, Spread, lay_out
from fsdpx.nn.layer import Layer
from fsdpx.nn.plan import Planned, parallelise
from fsdpx.nn.sort import Sorted, sort
from fsdpx.optim import Segment, Segments
from fsdpx.program import Stage, pipeline

__all__ = ["distribute"]


def distribute(
    model: Layer,
    *,
    loss: Any,
    optimizer: Any,
    strategy: str | Sharding = "fsdp",
    mesh: Mesh | None = None,
    comm: Any = None,
    backend: str | None = None,
    microbatches: int | None = None,
    seed: int = 0,
    precision: str | Precision | None = None,
    clip_norm: float | None = None,
    group_bytes: int | None = None,
    codec: str | Codec | None = None,
    chunks: int | None = None,
    ahead: int | None = None,
    frozen: Sequence[str] = (),
    device: str = "cpu",
    check: bool | None = None,
    check_finite: bool = False,
    tune: bool | None = None,
    progress: str | None = None,
    schedule: str | Callable[..., Any] = "1f1b",
    stages: Sequence[str | int] | None = None,
    costs: Mapping[str, float] | None = None,
    recompute: Any = None,
    tensor_plan: Mapping[str, Any] | None = None,
    sequence: str | None = None,
) -> Trainer:
    """Spread `model` over the ranks of `comm` and return its `Trainer`. Collective.

    loss, optimizer: from `fsdpx.nn` and `fsdpx.optim`. strategy: "ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid" or
    `fsdpx.Sharding(...)`. mesh: widths of the axes; they replace those of the strategy. comm: an mpi4py communicator
    (duplicated) or a `Communicator`, by default that of `fsdpx.init()`; backend: "mpi" or "local" opens one anew.
    microbatches: how many pieces each rank's batch runs in (default 1; in a pipe 4 for each of its ranks, which leaves
    little of the bubble: Huang et al. 2019). seed: of initialisation and dropout, independent of the layout. precision:
    "float64", "float32", "bf16", "fp16" or `fsdpx.Precision(...)`. clip_norm: largest global
    gradient norm. group_bytes: smaller layers are grouped until a unit holds that many bytes of parameters (default:
    measured, 1 MiB without tuning).
    codec: how gradients travel ("plain", "ring", "bf16", "fp16" or a `Codec`). chunks: cut the global batch into that
    many equal parts whose gradients are added in one fixed tree: bit-identical results at any number of ranks.
    ahead: pages gathered ahead of use. frozen: name patterns of parameters that are not trained. device: "cpu",
    "cuda", or "shape" to count without computing. check: compare every collective between ranks before it runs
    (default: FSDPX_CHECK). check_finite: look for NaN and Inf in every unit. tune: choose what was not said by a
    measurement of some 100 ms that is kept on disk (default: yes, unless FSDPX_TUNE=0). progress: "loop" moves
    transfers on between actions, "thread" also during them (default: measured, "loop" without tuning).

    With a pipe axis: schedule is "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", a function or a text file
    (docs/schedules.md); stages: where the model is cut, as the paths of the first layers or the numbers of layers of
    all stages; costs: path pattern -> cost of a layer, for the automatic cut. With a tensor axis: tensor_plan says how
    layers are cut, by path pattern (default: the model's own); sequence: "parallel" for norms and dropout on parts of
    the sequence, "ulysses" or "ring" for whole parameters and sequences cut from end to end (docs/tensor.md).
    recompute: units that run forward again instead of keeping what backward needs: "all", every k-th, as many as it
    takes to stay within "512MiB", or "attention" alone.
    """
    check_chunks(chunks, microbatches)
    check_numbers(
        microbatches=microbatches, clip_norm=clip_norm, seed=seed, group_bytes=group_bytes, ahead=ahead
    )
    check_parts(model, loss, optimizer, mesh, frozen)
    check_options(mesh, stages, costs, tensor_plan, sequence)
    formats, xp, again = config.precision(precision), namespace(device), recomputed(recompute)
    dtype, wire = dtype_of(formats.compute), dtype_of(formats.wire)
    world = _world(comm, backend)
    guard = environment.read().check and not isinstance(world, Guarded) if check is None else check
    tuning = tune_for(world, environment.read().tune if tune is None else tune, xp)
    axes, placement = _axes(strategy, mesh, world, guard, ahead)
    planned = _planned(model, loss, axes, tensor_plan, sequence)
    ordered = sort(planned.model)
    check_model(ordered, chunks)
    if microbatches is None:
        microbatches = 1 if axes.pipe.size == 1 or chunks is not None else 4 * axes.pipe.size
    pipe = Pipe(schedule, axes.pipe.size, _per_rank(stages, axes.pipe.size))
    each_rank = microbatches if chunks is None else most_chunks(chunks, axes.data.size)
    home = pipe.home(each_rank)
    starts = cut_stages(ordered, len(home), stages, costs)
    tensor, apart = axes.tensor, chunks is not None
    spread = Spread(starts, home, tensor.rank, tensor.size, planned.partial, apart)
    group = tuning.group_bytes if group_bytes is None else group_bytes
    layout = lay_out(ordered, dtype.itemsize, group, frozen, spread)
    _check_recompute(again, layout)
    carried = _carried(codec, formats, tuning, chunks)
    options = Options(seed, clip_norm, chunks, check_finite, _words(schedule), repr(recompute))
    agree(
        world, axes.mesh, placement, formats, options, layout, ordered, spread.starts,
        pipe.words(each_rank), (sequence, sorted(spread.partial)), optimizer, loss, type(carried).__name__,
        microbatches, device,
    )  # fmt: skip
    engine = Engine(
        xp=xp,
        model=ordered,
        layout=layout,
        stages=_stages(layout),
        axes=axes,
        counters=axes.counters,
        arena=Arena(xp, memory_of(world, xp) if tuning.windows else None),
        sharding=placement,
        precision=formats,
        dtype=dtype,
        wire=None if wire.itemsize >= dtype.itemsize else wire,
        codec=carried,
        optimizer=optimizer,
        loss=planned.loss,
        options=options,
        pages={},
        state={},
        scaler=Scaler.of(formats),
        tuning=tuning,
        pipe=pipe,
        recompute=again,
        output_dim=planned.output_dim,
        poker=_poker(tuning.progress if progress is None else progress, ordered, axes),
    )
    if xp is np:
        keep_pages()
    norm, lines = clip_norm is not None or engine.scaler.dynamic, any(unit.lines for unit in layout.units)
    warm(xp, planned.model, planned.loss, optimizer, dtype, dtype, norm, lines)
    _allocate(engine)
    engine.ties = connect_ties(engine)
    return Trainer(engine, sort(model), loss, microbatches)


def _planned(model: Layer, loss: Any, axes: Axes, plan: Any, sequence: str | None) -> Planned:
    """What this line of the tensor axis runs: the model itself, if there is no such axis."""
    if axes.tensor.size == 1 and plan is None and sequence is None:
        return Planned(model, loss, None, frozenset())
    return parallelise(model, loss, axes.tensor.size, plan, sequence)


def _check_recompute(again: Recompute, layout: Layout) -> None:
    if again.every > len(layout.units):
        raise ConfigError(
            f"recompute={again.every}: every {again.every}th unit of {len(layout.units)} is none; take a smaller number"
        )


def _carried(codec: str | Codec | None, formats: Precision, tuning: Tuning, chunks: int | None) -> Codec:
    carried = codec_of(codec, formats.sums, formats.compute, "library" if tuning.windows else tuning.algorithm)
    if chunks is not None and not isinstance(carried, Plain):
        raise ConfigError(
            f"chunks={chunks}: chunks travel and are added in {formats.compute}; leave codec out, and for 16-bit "
            "parameters say precision=fsdpx.Precision(params='bf16')"
        )
    return carried


def _per_rank(stages: Any, ranks: int) -> int | None:
    """How many stages each rank gets, if it was said."""
    if stages is None:
        return None
    if not isinstance(stages, list | tuple):
        raise ConfigError(f"stages={stages!r}: a list is needed, of the first layers of all stages or of their sizes")
    if len(stages) == 0 or len(stages) % ranks:
        raise ConfigError(
            f"stages={list(stages)}: {len(stages)} stages cannot be dealt out to {ranks} ranks of the pipe"
        )
    return len(stages) // ranks


def _words(schedule: Any) -> str:
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__)


def _world(comm: Any, backend: str | None) -> Communicator:
    if comm is not None:
        return adopt(comm, backend)
    return default() if backend is None else open_world(backend)


def _axes(
    strategy: str | Sharding, mesh: Mesh | None, world: Communicator, check: bool, ahead: int | None
) -> tuple[Axes, Sharding]:
    mesh = (mesh or Mesh()).filled(strategy, world.size)
    named = config.PRESETS.get(strategy) if isinstance(strategy, str) else strategy
    if isinstance(named, Sharding) and named.shard is not None and mesh.shard != named.shard:
        raise ConfigError(f"strategy {strategy!r} wants a shard axis of width {named.shard}, the mesh says {mesh}")
    width = mesh.width("replica") * mesh.width("shard")
    lifetimes = named if isinstance(named, Sharding) else config.sharding(strategy, width)
    placement = replace(
        lifetimes, replica=mesh.replica, shard=mesh.shard, ahead=lifetimes.ahead if ahead is None else ahead
    )
    return connect(mesh, world, check=check), placement


def _poker(progress: str, model: Sorted, axes: Axes) -> Poker | None:
    """Layers that call collectives themselves leave no action to a thread."""
    if progress not in ("loop", "thread"):
        raise ConfigError(f"progress={progress!r}: choose loop or thread")
    busy = axes.tensor.size > 1 or any(is_collective(node.layer) for node in model.nodes)
    return Poker() if progress == "thread" and not busy else None


def _stages(layout: Layout) -> tuple[Stage, ...]:
    return pipeline(
        [(u.pages, u.inputs, u.outputs) for u in layout.units],
        [page.trainable for page in layout.pages],
        range(len(layout.inputs)),
        layout.outputs,
        [unit.stage for unit in layout.units],
        layout.spread.home,
        layout.twins,
        [page.index for page in layout.pages if page.partial],
    )


def _allocate(engine: Engine) -> None:
    """Buffers and initial values of this rank's shards: nothing whole unless the placement keeps it whole."""
    xp, layout, arena = engine.xp, engine.layout, engine.arena
    shared = share_parameters(engine)
    share_gradients(engine)
    holding = Holding(
        width=engine.axes.shard.size,
        rank=engine.axes.shard.rank,
        params="shard" if not (shared or engine.keep_full) else "whole" if engine.wire is None else "apart",
        whole_grads=engine.whole_grads,
        copies=engine.copies,
        snap=engine.options.chunks is not None,
        at_home=arena.memory is not None,
    )
    for page in (layout.pages[p] for p in engine.stage.pages):
        state = hold(page, holding, arena, engine.dtype, engine.optimizer.slots)
        initialise(state, layout, engine.options.seed, xp)
        engine.pages[page.index] = state
        engine.store[f"shard{page.index}"] = state
        if page.trainable:
            engine.segments[page.index] = _segments(engine, page, state)
    engine.state = state_arrays(layout, arena, engine.dtype, engine.options.seed, xp)


def _segments(engine: Engine, page: Page, state: PageState) -> Segments:
    """What this rank's shard of a page holds, in the optimiser's terms."""
    items = []
    for piece in page.pieces(state.mine):
        f, start = page.fields[piece.have], state.mine.start
        items.append(Segment(f.source, piece.start - start, piece.stop - start, piece.start - f.offset, f.size))
    alone = engine.axes.shard.size == engine.axes.tensor.size == 1
    return Segments(tuple(items), None if alone else partial(_exchange, engine))


def _exchange(engine: Engine, mine: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Sums over parameters of all ranks that hold a part of them; what the tensor axis holds twice counts once."""
    layout, tensor = engine.layout, engine.axes.tensor
    counted = [entry for entry in mine if tensor.rank == 0 or layout.specs[entry[0]].cut is not None]
    rows = engine.axes.shard.all_gather_object(counted)
    return [row for line in tensor.all_gather_object(rows) for row in line] if tensor.size > 1 else rows
