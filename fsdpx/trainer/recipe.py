"""The recipe of a trainer: a model and every choice about it. Its engine can be made on any world, and made again on
another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fsdpx import config, environment
from fsdpx.array.arena import Arena
from fsdpx.array.heap import keep_pages
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.namespace import namespace
from fsdpx.comm.codecs import Codec, Plain
from fsdpx.comm.codecs import codec as codec_of
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.guarded import Guarded
from fsdpx.comm.mesh import Axes, Mesh, connect
from fsdpx.comm.poker import Poker
from fsdpx.config import Precision, Sharding
from fsdpx.engine.engine import Engine, Options
from fsdpx.engine.warm import warm
from fsdpx.errors import ConfigError
from fsdpx.layout.pages import Page
from fsdpx.layout.stages import cut_stages
from fsdpx.layout.units import Layout, Spread, lay_out
from fsdpx.nn.layer import Layer
from fsdpx.nn.plan import Planned, parallelise
from fsdpx.nn.sort import Sorted, sort
from fsdpx.optim import Segment, Segments
from fsdpx.program import Stage, pipeline
from fsdpx.state.pages import Holding, PageState, hold, initialise, state_arrays
from fsdpx.state.pipe import Pipe
from fsdpx.state.scaler import Scaler
from fsdpx.state.ties import connect_ties
from fsdpx.state.tuning import Tuning, tune_for
from fsdpx.state.windows import memory_of, share_gradients, share_parameters
from fsdpx.trainer.batch import check_chunks, most_chunks
from fsdpx.trainer.choices import agree, check_model, check_numbers, check_options, check_parts, is_collective
from fsdpx.trainer.recompute import Recompute
from fsdpx.trainer.recompute import recompute as recomputed

__all__ = ["Recipe", "begin"]


@dataclass(frozen=True)
class Recipe:
    """The arguments of `fsdpx.distribute`, which says what they mean; checked as far as one rank can."""

    model: Layer
    loss: Any
    optimizer: Any
    strategy: str | Sharding
    mesh: Mesh | None
    microbatches: int | None
    seed: int
    precision: str | Precision | None
    clip_norm: float | None
    group_bytes: int | None
    codec: str | Codec | None
    chunks: int | None
    ahead: int | None
    frozen: Sequence[str]
    device: str
    check: bool | None
    check_finite: bool
    tune: bool | None
    progress: str | None
    schedule: str | Callable[..., Any]
    stages: Sequence[str | int] | None
    costs: Mapping[str, float] | None
    recompute: Any
    tensor_plan: Mapping[str, Any] | None
    sequence: str | None

    def __post_init__(self) -> None:
        check_chunks(self.chunks, self.microbatches)
        check_numbers(
            microbatches=self.microbatches, clip_norm=self.clip_norm, seed=self.seed, group_bytes=self.group_bytes,
            ahead=self.ahead,
        )  # fmt: skip
        check_parts(self.model, self.loss, self.optimizer, self.mesh, self.frozen)
        check_options(self.mesh, self.stages, self.costs, self.tensor_plan, self.sequence)

    def engine(self, world: Communicator, tuning: Tuning | None = None, initial: bool = True) -> Engine:
        """The engine of this rank of `world`. Collective: ranks compare their recipes first.

        tuning: choices made before, instead of measuring or looking for them. initial: with initial parameters; else
        whoever calls this fills them in, or calls `begin`.
        """
        formats, xp, again = config.precision(self.precision), namespace(self.device), recomputed(self.recompute)
        dtype, wire = dtype_of(formats.compute), dtype_of(formats.wire)
        settings, chunks = environment.read(), self.chunks
        guard = settings.check and not isinstance(world, Guarded) if self.check is None else self.check
        tuning = tuning or tune_for(world, settings.tune if self.tune is None else self.tune, xp)
        axes, placement = _axes(self.strategy, self.mesh, world, guard, self.ahead)
        planned = _planned(self.model, self.loss, axes, self.tensor_plan, self.sequence)
        ordered = sort(planned.model)
        check_model(ordered, chunks)
        microbatches = self.microbatches_on(axes.mesh)
        pipe = Pipe(self.schedule, axes.pipe.size, _per_rank(self.stages, axes.pipe.size))
        each_rank = microbatches if chunks is None else most_chunks(chunks, axes.data.size)
        home = pipe.home(each_rank)
        starts = cut_stages(ordered, len(home), self.stages, self.costs)
        tensor, apart = axes.tensor, chunks is not None
        spread = Spread(starts, home, tensor.rank, tensor.size, planned.partial, apart)
        group = tuning.group_bytes if self.group_bytes is None else self.group_bytes
        layout = lay_out(ordered, dtype.itemsize, group, self.frozen, spread)
        _check_recompute(again, layout)
        carried = _carried(self.codec, formats, tuning, chunks)
        options = Options(
            self.seed, self.clip_norm, chunks, self.check_finite, _words(self.schedule), repr(self.recompute)
        )
        agree(
            world, axes.mesh, placement, formats, options, layout, ordered, spread.starts,
            pipe.words(each_rank), (self.sequence, sorted(spread.partial)), self.optimizer, self.loss,
            type(carried).__name__, microbatches, self.device,
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
            optimizer=self.optimizer,
            loss=planned.loss,
            options=options,
            pages={},
            state={},
            scaler=Scaler.of(formats),
            tuning=tuning,
            pipe=pipe,
            recompute=again,
            output_dim=planned.output_dim,
            poker=_poker(tuning.progress if self.progress is None else self.progress, ordered, axes),
        )
        if xp is np:
            keep_pages()
        norm, lines = self.clip_norm is not None or engine.scaler.dynamic, any(unit.lines for unit in layout.units)
        warm(xp, planned.model, planned.loss, self.optimizer, dtype, dtype, norm, lines)
        _allocate(engine)
        if initial:
            begin(engine)
        engine.ties = connect_ties(engine)
        return engine

    def microbatches_on(self, mesh: Mesh) -> int:
        """What was said, else 1, or 4 for each rank of a pipe."""
        if self.microbatches is not None:
            return self.microbatches
        pipe = mesh.width("pipe")
        return 1 if pipe == 1 or self.chunks is not None else 4 * pipe


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


def begin(engine: Engine) -> None:
    """Give this rank's shards their initial values."""
    for state in engine.pages.values():
        initialise(state, engine.layout, engine.options.seed, engine.xp)


def _allocate(engine: Engine) -> None:
    """Buffers of this rank's shards: nothing whole unless the placement keeps it whole."""
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
