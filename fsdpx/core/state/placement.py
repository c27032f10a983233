"""The placement of one rank: everything that stays the same until the set of ranks changes (model, parameter layout,
mesh, dtypes, options, synchronization policy)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from fsdpx.core.array.devices import Device, get_device_of_namespace
from fsdpx.core.base.config import Precision, Sharding, parse_byte_count
from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.base.option_kinds import get_field_values
from fsdpx.core.comm.backend import USER_TAG_LIMIT
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import COMPLETED, Communicator, split_evenly
from fsdpx.core.comm.mesh import MeshAxes
from fsdpx.core.compression import CodecRoute, CodecRules
from fsdpx.core.program import (
    Action,
    PipelineSchedule,
    ProgramRequest,
    Stage,
    StepChoices,
    compile_and_check_pipe,
    make_placed_schedule,
    make_schedule,
)
from fsdpx.core.state.accumulation import Accumulation, make_accumulation
from fsdpx.core.state.flat_parameters import ElementRange, Page, ShardedPage, split_page_into_shard_ranges
from fsdpx.core.state.sample_layout import CompleteSamples, SampleLayout
from fsdpx.core.state.step_inputs import Microbatch, ValueShapes
from fsdpx.core.state.storage import IN_MEMORY, StorageLevelChoice
from fsdpx.core.state.sync_policy import SYNCHRONOUS, SyncChoice, SyncPolicy
from fsdpx.core.state.tuning import Tuning
from fsdpx.core.state.units import ModelLayout, Unit
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import ParameterSpec, join_path
from fsdpx.nn.layer_list import LayerList
from fsdpx.nn.shard_specs import shard_bounds
from fsdpx.optim import ShardSegment, ShardSegments
from fsdpx.optim.optimizer import SlotFormat, get_slot_formats, unwrap_optimizer
from fsdpx.optim.segments import ShardPeers

__all__ = [
    "NumberFormats",
    "PipelineChoice",
    "Placement",
    "RecomputeChoice",
    "StepOptions",
    "list_unit_statistics",
    "make_optimizer_segments",
    "parse_recompute",
]


@dataclass
class PipelineChoice:
    """The user's choice of a pipeline schedule, and the schedules made from it for different numbers of microbatches.

    Attributes
    ----------
    choice : name of a schedule, a function that makes a schedule, or the path of a file that contains a schedule
    width : number of pipeline ranks
    stages : number of stages, or the pipeline rank of each stage; None if the schedule decides
    """

    choice: str | Callable[..., Any]
    width: int = 1
    stages: int | tuple[int, ...] | None = None
    _schedules: dict[int, PipelineSchedule] = field(default_factory=dict)
    _proved: set[ProgramRequest] = field(default_factory=set)

    def get_schedule(self, microbatches: int) -> PipelineSchedule:
        """Return the schedule for this number of microbatches. Raise ConfigError if there are too few microbatches for
        the schedule."""
        if microbatches not in self._schedules:
            numbers = self.choice, self.width, microbatches
            pipeline_schedule = (
                make_schedule(*numbers) if self.stages is None else make_placed_schedule(*numbers, self.stages)
            )
            self._schedules[microbatches] = pipeline_schedule
        return self._schedules[microbatches]

    def get_stage_ranks(self, microbatches: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage. If there is only one pipeline rank, the model is a single stage."""
        home = self.get_schedule(microbatches).home if self.width > 1 or isinstance(self.choice, str) else ()
        return home if self.width > 1 else (0,)

    def describe_stages_per_rank(self, home: tuple[int, ...]) -> str:
        """Return a phrase for error messages with the number of stages per pipeline rank. If the user chose the stages,
        or if there are no more stages than pipeline ranks, return "". `home` is the pipeline rank of each stage."""
        if self.stages is not None or len(home) <= self.width:
            return ""
        name = self.choice if isinstance(self.choice, str) else getattr(self.choice, "__name__", "of your own")
        return f" (schedule {name!r} puts {len(home) // self.width} on each of {self.width} ranks)"

    def format_schedule(self, microbatches: int) -> str:
        """Return the schedule as text, with one line per rank, or "" without a pipeline."""
        return str(self.get_schedule(microbatches)) if self.width > 1 else ""

    def get_actions_of_rank(self, microbatches: int, rank: int) -> tuple[Action, ...] | None:
        """Return the forward and backward actions of a pipeline rank, in the order in which it runs them. Without a
        pipeline, return None, because microbatches then run one after another."""
        return None if self.width == 1 else self.get_schedule(microbatches).ranks[rank]

    def require_no_deadlock(self, request: ProgramRequest, stages: tuple[Stage, ...]) -> None:
        """Compile the programs that all pipeline ranks would run for a request, and raise ProgramError if they would
        deadlock. Raise ConfigError if they need more message tags than are available."""
        bare = replace(request, resident=frozenset(), grads=frozenset(), parts=frozenset(), has_loss_weight=False)
        if self.width == 1 or bare in self._proved:
            return
        self._proved.add(bare)
        requests = []
        for rank, stage in enumerate(stages):
            order = None if request.order is None else self.get_actions_of_rank(request.microbatches, rank)
            seen = replace(stage, trainable=request.stage.trainable, constant=request.stage.constant)
            requests.append(replace(bare, stage=seen, order=order))
        compile_and_check_pipe(tuple(requests))
        last = request.microbatches - 1
        if any(stages[0].get_message_tag(e, last, request.microbatches) >= USER_TAG_LIMIT for e in stages[0].edges):
            raise ConfigError(
                f"{request.microbatches} microbatches and {len(stages[0].edges)} values between stages need more than "
                f"{USER_TAG_LIMIT} different messages between two ranks: use fewer microbatches"
            )


@dataclass(frozen=True)
class RecomputeChoice:
    """The option `recompute` (activation checkpointing).

    Attributes
    ----------
    every : interval k: every k-th unit (group of layers) is recomputed; if 0, no unit is recomputed
    budget : maximum number of bytes of activations that a rank saves for the backward pass; None for no limit
    cores : kinds of layers, such as "attention", that recompute some of their own activations in the backward pass
    """

    every: int = 0
    budget: int | None = None
    cores: frozenset[str] = frozenset()


def parse_recompute(choice: Any) -> RecomputeChoice:
    """Parse the option `recompute`: None, "all", "attention", a number k for every k-th unit (group of layers), or a
    memory budget such as "512MiB"."""
    if choice is None:
        return RecomputeChoice()
    if isinstance(choice, str) and choice == "all":
        return RecomputeChoice(every=1)
    if isinstance(choice, str) and choice == "attention":
        return RecomputeChoice(cores=frozenset({"attention"}))
    if isinstance(choice, int) and not isinstance(choice, bool) and choice > 0:
        return RecomputeChoice(every=choice)
    if not isinstance(choice, str) or not choice.strip().endswith("B"):
        raise ConfigError(
            f"recompute={choice!r}: choose 'all', 'attention', a number k for every k-th unit, or the bytes that may "
            "be kept for backward, such as '512MiB'"
        )
    return RecomputeChoice(budget=parse_byte_count(choice, "recompute"))


@dataclass(frozen=True)
class StepOptions(StepChoices):
    """All options of a step: the options of `StepChoices`, which affect compiled programs, and the options below.

    Attributes
    ----------
    check_finite : whether to check the results of each unit (group of layers) for NaN and Inf
    schedule : the pipeline schedule as text
    recompute : units that repeat their forward pass before their backward pass
    storage : state that is offloaded between uses, for example to disk
    sync_choice : how and when ranks synchronize (with some strategies, such as local SGD, not in every step)
    planned : text that describes what strategy="auto" chose, and why
    """

    check_finite: bool = False
    schedule: str | None = None
    recompute: RecomputeChoice = field(default_factory=RecomputeChoice)
    storage: StorageLevelChoice = IN_MEMORY
    sync_choice: SyncChoice = SYNCHRONOUS
    planned: str = ""


@dataclass(frozen=True)
class NumberFormats:
    """The dtypes that are used for parameters, gradients, statistics, computation and communication.

    Attributes
    ----------
    master : dtype of sharded parameters and optimizer state
    gradients : dtype in which gradients are summed
    statistics : dtype of running statistics
    compute : dtype in which layers compute, which is also the dtype of gathered parameters and of activations
    wire : dtype in which parameters are sent between ranks; None for the same dtype as `compute`
    precision : the option that determines these dtypes
    """

    master: np.dtype
    gradients: np.dtype
    statistics: np.dtype
    compute: np.dtype
    wire: np.dtype | None
    precision: Precision


@dataclass(frozen=True, eq=False)
class Placement:
    """Everything about one rank that stays fixed: model, layout, mesh, dtypes and options.

    Attributes
    ----------
    xp : array module, such as `numpy`
    model : layers in execution order, as this tensor rank runs them
    layout : layout of the parameters in units (layers gathered together) and pages (flat buffers)
    stages : the part of the model that each pipeline rank runs
    pipe : the pipeline schedule that the user chose
    output_dim : dimension of the model's output that is sharded over the tensor axis; None if it is not sharded
    """

    xp: Any
    model: LayerList
    layout: ModelLayout
    stages: tuple[Stage, ...]
    axes: MeshAxes
    sharding: Sharding
    formats: NumberFormats
    codecs: CodecRules
    optimizer: Any
    loss: Any
    options: StepOptions
    tuning: Tuning
    pipe: PipelineChoice
    output_dim: int | None = None
    sample_layout: SampleLayout = field(default_factory=CompleteSamples)

    def list_sample_counts_of_earlier_groups(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the number of samples of each group of data ranks that comes before this rank's group. The ranks of a
        group work on the same samples. The sum of the returned numbers is the index of the first sample of this rank's
        group. `rows` holds the number of samples of each data rank."""
        return self.sample_layout.count_samples_per_group(rows)[: self.axes.samples.rank]

    @cached_property
    def stage(self) -> Stage:
        return self.stages[self.axes.pipe.rank]

    @cached_property
    def device(self) -> Device:
        """The device that stores arrays and computes with them."""
        return get_device_of_namespace(self.xp)

    @cached_property
    def pages(self) -> dict[int, ShardedPage]:
        """All pages (flat parameter buffers) of this pipeline rank, with their shards, keyed by page index."""
        shard, snap = self.axes.shard, self.accumulation.bitwise
        pages = (self.layout.pages[p] for p in self.stage.pages)
        return {
            page.index: ShardedPage(page, split_page_into_shard_ranges(page, shard.size, snap), shard.rank)
            for page in pages
        }

    @cached_property
    def accumulation(self) -> Accumulation:
        """The object that decides how the gradients of microbatches and ranks are summed."""
        return make_accumulation(self.options.reproducible_chunks, self.axes)

    @cached_property
    def has_resident_shards(self) -> bool:
        """True if parameter shards stay in memory between programs, and False if they are offloaded."""
        return all(slot.kind != "shard" for slot, _ in self.stage.stored_slots)

    @cached_property
    def step_choices(self) -> StepChoices:
        """The options on which compiled programs depend."""
        return StepChoices(**get_field_values(StepChoices, self.options))

    @cached_property
    def sync_policy(self) -> SyncPolicy:
        """The policy that decides how and when ranks synchronize."""
        return self.options.sync_choice.make_policy(self)

    @property
    def keeps_full_parameters(self) -> bool:
        """True if gathered parameters are kept until the update. There are two conditions: shards are not offloaded,
        and either there is only one shard or the sharding keeps full parameters for the whole step."""
        kept = self.sharding.full_params == "step" or self.axes.shard.size == 1
        return kept and self.has_resident_shards

    @property
    def keeps_full_gradients(self) -> bool:
        """True if unsharded gradients are kept until the update, in memory that is used for nothing else."""
        return self.sharding.full_grads == "step" or self.axes.shard.size == 1

    @property
    def reduces_each_microbatch(self) -> bool:
        """True if gradients are reduced after each microbatch. With the option `reproducible_chunks`, the value is
        False, because a single reduction of all partial sums sends fewer bytes."""
        return self.sharding.full_grads == "use" and self.axes.shard.size > 1 and not self.accumulation.bitwise

    @property
    def product_threads(self) -> int:
        """The number of threads for matrix products. If results must be bitwise reproducible, this is 1, because
        rounding depends on the number of threads."""
        return 1 if self.accumulation.bitwise else self.tuning.threads

    @property
    def counts_loss(self) -> bool:
        """True if this rank's loss is part of the global mean. If all tensor ranks compute the same loss, this is True
        only on the first tensor rank."""
        return getattr(self.loss, "partial", False) or self.axes.tensor.rank == 0

    def get_sample_offset_on_tensor_axis(self, batch: Microbatch) -> int:
        """Return the index of this tensor rank's first sample within a microbatch. It is 0 unless samples are sharded
        over the tensor axis."""
        tensor = self.axes.tensor
        return shard_bounds(batch.inputs[0].shape[0], tensor.rank, tensor.size)[0] if self.output_dim == 0 else 0

    @cached_property
    def running_statistics_names_by_unit(self) -> dict[int, tuple[str, ...]]:
        """Names of the running statistics that the layers in each unit (group of layers) update, keyed by unit index.
        Only units that run on this rank and have running statistics are included."""
        units = (self.layout.units[u] for u in self.stage.own_units)
        statistics_by_unit = {unit.index: list_unit_statistics(self.layout, unit) for unit in units}
        return {unit: names for unit, names in statistics_by_unit.items() if names}

    @cached_property
    def pipe_rank_by_statistic(self) -> dict[str, int]:
        """The pipeline rank that updates each running statistic, keyed by the statistic's name."""
        spread, layout = self.layout.spread, self.layout
        users = ((join_path(n.path, local), i) for i, n in enumerate(self.model.nodes) for local in n.layer.specs())
        names = ((layout.canonical_name(name), i) for name, i in users)
        return {name: spread.rank_of(i) for name, i in names if name in layout.statistic_specs}

    def get_codec_route(self, page: int) -> CodecRoute:
        """Return the compression codecs for the gradient of a page (flat parameter buffer). If replicas train
        independently, the codecs between replicas compress parameter changes instead of gradients."""
        return self._codec_routes[page]

    @cached_property
    def _codec_routes(self) -> dict[int, CodecRoute]:
        """Dict from page index to the codec route that `get_codec_route` returns for this page (flat parameter buffer).
        Each route is bound to the shapes of the page's tensors."""
        routes = {}
        for p, page in self.pages.items():
            whole, own_shapes = (
                page.page.list_tensor_shapes_in_range(ElementRange(0, page.size)),
                page.page.list_tensor_shapes_in_range(page.own_range),
            )
            routes[p] = self.codecs.get_codec_route(page.page.rule).bind_shapes(whole, own_shapes)
        return routes

    @cached_property
    def segments_of_own_shard_by_page(self) -> dict[int, ShardSegments]:
        """The segments that the optimizer updates in each page (flat parameter buffer), keyed by page index. There is
        one segment for each parameter in this rank's shard. Only trained pages are included."""
        alone = self.axes.shard.size == self.axes.tensor.size == 1
        return {
            p: self.make_local_optimizer_segments(p, self.axes.shard, self.pages[p].shards, alone)
            for p in self.stage.trained_pages
        }

    def make_local_optimizer_segments(
        self, page: int, comm: Communicator, parts: Sequence[ElementRange], alone: bool
    ) -> ShardSegments:
        """Return the segments that the optimizer updates, one for each parameter in this rank's part of a page (flat
        parameter buffer). `parts` holds the part of each rank of `comm`, in rank order, as a range of elements. `alone`
        is True if this rank holds all these parameters in full."""
        of, specs = self.pages[page].page, self.layout.specs
        exchange = None if alone else partial(_all_gather_numbers_per_parameter, self, page, comm)

        def all_to_all(send: Any, recv: Any, outgoing: Sequence[int], incoming: Sequence[int]) -> None:
            comm.all_to_all(send, recv, outgoing, incoming, what=f"UPDATE{page} ({self.format_page_name(page)})").wait()

        peers = ShardPeers(lambda: [make_optimizer_segments(of, part, specs) for part in parts], comm.rank, all_to_all)
        return ShardSegments(
            make_optimizer_segments(of, parts[comm.rank], specs), exchange, None if comm.size == 1 else peers
        )

    def list_optimizer_collectives(self, page: int) -> tuple[tuple[str, str, int], ...]:
        """Return the collectives that the optimizer needs to update this rank's shard of a page (flat parameter
        buffer), as tuples (axis, collective, number of bytes that this rank sends). Most optimizers need none."""
        optimizer = unwrap_optimizer(self.optimizer)
        if gathers := getattr(optimizer, "gathers", 0):
            nbytes, shard, tensor = (
                8 * gathers * len(self.list_parameters_of_page(page)),
                self.axes.shard.size,
                self.axes.tensor.size,
            )
            sent = {"shard": nbytes * (shard - 1), "tensor": nbytes * shard * (tensor - 1)}
            return tuple((axis, "all_gather", moved) for axis, moved in sent.items() if moved)
        sends = getattr(optimizer, "count_sent_elements", None)
        count = None if sends is None else self.segments_of_own_shard_by_page[page].count_sent_elements(sends)
        return () if count is None else (("shard", "all_to_all", count * self.formats.gradients.itemsize),)

    @cached_property
    def slot_formats(self) -> dict[str, SlotFormat]:
        """The number format of each optimizer slot (state array such as Adam's "m"), keyed by slot name."""
        return get_slot_formats(self.optimizer)

    def get_slot_dtype(self, slot: str) -> np.dtype:
        """Return the dtype of an optimizer slot (state array such as Adam's "m")."""
        slot_dtype: np.dtype = self.slot_formats[slot].get_dtype(self.formats.master)
        return slot_dtype

    def format_page_name(self, page: int) -> str:
        """Return a name for a page (flat parameter buffer) for use in error messages. It consists of the names of the
        first and the last parameter in the page, as in "0.weight..2.bias"."""
        return self._page_names[page]

    def list_parameters_of_page(self, page: int) -> list[str]:
        """Return the names of the parameters in a page (flat parameter buffer)."""
        return list(dict.fromkeys(f.source for f in self.pages[page].page.fields))

    @cached_property
    def _page_names(self) -> list[str]:
        ends = [(page.fields[0].name, page.fields[-1].name) for page in self.layout.pages]
        return [first if first == last else f"{first}..{last}" for first, last in ends]

    def all_gather_numbers(self, values: list[float], what: str, comm: Communicator | None = None) -> list[list[float]]:
        """Gather a list of float64 numbers from every rank of `comm` (default: all ranks). Return these lists in rank
        order. `what` names the transfer in error messages. Collective."""
        rows: list[list[float]] = self.start_all_gather_numbers(values, what, lambda rows: rows, comm).wait()
        return rows

    def start_all_gather_numbers(
        self, values: list[float], what: str, use: Callable[[list[list[float]]], Any], comm: Communicator | None = None
    ) -> TimedTransfer:
        """Start gathering `values` from all ranks of `comm` (default: all ranks). Waiting for the returned transfer
        calls `use` with a list that contains the values of each rank, and returns the result of `use`. `what` names the
        transfer in error messages. Collective."""
        comm, n = comm or self.axes.world, len(values)
        if comm.size == 1:
            return TimedTransfer(COMPLETED, lambda: use([values]))
        table = np.zeros(n * comm.size)
        own_rows = table[comm.rank * n : (comm.rank + 1) * n]
        own_rows[:] = values
        handle = comm.all_gather(own_rows, table, what=what)
        if not comm.has_peers:  # simulated ranks all have the same values as this rank
            return TimedTransfer(handle, lambda: use([values] * comm.size))
        return TimedTransfer(handle, lambda: use(table.reshape(comm.size, n).tolist()))

    @cached_property
    def value_shapes(self) -> ValueShapes:
        """The shapes of the model's activations, for any microbatch and tensor rank."""
        return ValueShapes(self.model, self.axes, self.formats.compute)

    def count_replica_owned_elements(self, page: int) -> int:
        """Return the number of elements that this rank sums when the gradient of a page (flat parameter buffer) is
        all-reduced over replicas. These elements are part of the rank's gradient shard."""
        replica = self.axes.replica
        return split_evenly(self.pages[page].own_range.size, replica.size)[replica.rank]


def list_unit_statistics(layout: ModelLayout, unit: Unit) -> tuple[str, ...]:
    """Return the names of the running statistics that the layers in a unit (group of layers) update."""
    names = (layout.canonical_name(join_path(n.path, local)) for n in unit.nodes for local in n.layer.specs())
    return tuple(dict.fromkeys(name for name in names if name in layout.statistic_specs))


def make_optimizer_segments(
    page: Page, span: ElementRange, specs: Mapping[str, ParameterSpec]
) -> tuple[ShardSegment, ...]:
    """Return the segments that the optimizer updates, one for each parameter in the elements `span` of a page (flat
    parameter buffer)."""
    items, start = [], span.start
    for piece in page.find_field_overlaps(span):
        f = page.fields[piece.have]
        bounds, norm = (piece.start - start, piece.stop - start, piece.start - f.offset), specs[f.source].norm
        items.append(ShardSegment(f.source, *bounds, f.size, f.shape, norm))
    return tuple(items)


def _all_gather_numbers_per_parameter(
    placement: Placement, page: int, holders: Communicator, mine: Mapping[str, Sequence[float]], width: int
) -> dict[str, list[list[float]]]:
    """For each parameter in a page (flat parameter buffer), gather `width` numbers from every rank of `holders` and of
    the tensor axis. Return a dict that maps the parameter name to one list of `width` numbers per rank. Collective.

    `mine` maps parameter names to this rank's numbers. If a name is missing, its numbers are zeros.

    For a parameter that all tensor ranks hold in full, only the numbers of the first tensor rank are used; the lists of
    the other tensor ranks contain zeros."""
    layout, tensor, row = placement.layout, placement.axes.tensor, list[float]()
    names, description = placement.list_parameters_of_page(page), f"UPDATE{page} ({placement.format_page_name(page)})"
    for name in names:
        numbers = mine.get(name) if tensor.rank == 0 or layout.specs[name].cut is not None else None
        row += [0.0] * width if numbers is None else numbers
    rows = placement.all_gather_numbers(row, description, holders)
    if tensor.size > 1:
        rows = placement.all_gather_numbers([x for row in rows for x in row], description, tensor)
    numbers = [x for row in rows for x in row]
    every = len(names) * width
    return {
        name: [numbers[at : at + width] for at in range(i * width, len(numbers), every)] for i, name in enumerate(names)
    }
