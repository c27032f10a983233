"""Strategies in which ranks step at their own speed: asynchronous SGD on parameters sharded over all ranks, and
gossip, in which pairs of ranks average their models."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fsdpx.core.array.kernels import store
from fsdpx.core.base.config import Sharding, convert_fields_to_python_numbers
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.comm.windows import CACHE_LINE_BYTES, Window
from fsdpx.core.engine.operations import OPERATIONS, compute_local_loss_and_gradient_scale, run_optimizer_on_page
from fsdpx.core.engine.run import ProgramRun, Values, get_action_target
from fsdpx.core.program import PROGRAM_KINDS, SLOTS, VERBS, Action, ProgramKind, ProgramRequest, SlotKind, Verb
from fsdpx.core.program.passes import insert_gathers
from fsdpx.core.state import ledger
from fsdpx.core.state.flat_parameters import ElementRange, ShardedPage
from fsdpx.core.state.ledger import LedgerKey, LedgerRow
from fsdpx.core.state.placement import Placement, make_optimizer_segments
from fsdpx.core.state.sync_policy import SyncChoice, SyncPolicy, set_arrays_returning_undo
from fsdpx.errors import ConfigError, DataError
from fsdpx.optim import ShardSegments
from fsdpx.optim.optimizer import AVERAGE_SLOT
from fsdpx.optim.segments import ShardPeers

__all__ = ["AsyncSGD", "CommonMemory", "GossipSGD", "Span"]

Span = tuple[int, ElementRange]
"""A rank, and the range of elements that the rank owns in a page (flat parameter buffer)."""


class WindowItem(NamedTuple):
    """An array in a rank's part of the shared-memory window. `start` is its offset in bytes, and `elements` is its
    number of elements."""

    key: LedgerKey
    dtype: Any
    start: int
    elements: int

    @property
    def stop(self) -> int:
        return self.start + self.elements * int(np.dtype(self.dtype).itemsize)


class CommonMemory:
    """Parameters and optimizer state in a shared-memory window. Every rank can read and update all data in the window
    without involving the rank that owns them. The constructor is collective.

    Each rank owns one part of the window. A part consists of the rank's own counters, followed by its pages (flat
    parameter buffers). A page consists of arrays of these kinds: "words" (counters of the page), "master" (parameters),
    "slot" and "average" (optimizer state) and, if `added` is true, "added" (sum of gradients). If `sharded` is true,
    all ranks update one model, and each rank owns a shard of it; otherwise, each rank owns a model."""

    def __init__(self, placement: Placement, sharded: bool, added: bool) -> None:
        self.placement, world = placement, placement.axes.world
        self.rank, self.size = world.rank, world.size
        self.sharded = sharded
        self._items = [_lay_out_window_items(placement, rank, sharded, added) for rank in range(self.size)]
        ends = [max(item.stop for item in found.values()) for found in self._items]
        self.window: Window = world.window(ends[self.rank])
        self._segments: dict[tuple[int, int], ShardSegments] = {}

    @property
    def keys(self) -> Collection[LedgerKey]:
        """Keys of all arrays in this rank's part of the window."""
        return self._items[self.rank]

    def dtype_of(self, key: LedgerKey) -> Any:
        """Return the dtype of the array `key`. All ranks use the same dtype."""
        return self._items[self.rank][key].dtype

    def get_own_array(self, key: LedgerKey) -> Any:
        """Return the array `key` in this rank's part of the window."""
        item = self._items[self.rank][key]
        return self.window.own[item.start : item.stop].view(item.dtype)

    def iterate_own_arrays(self) -> Iterator[tuple[LedgerKey, Any]]:
        """Yield a (key, array) pair for each array in this rank's part of the window, except the counters."""
        for item in self._items[self.rank].values():
            if item.key.kind != "words":
                yield item.key, self.get_own_array(item.key)

    @contextmanager
    def locked_arrays(self, rank: int, *keys: LedgerKey, write: bool = True) -> Iterator[list[Any]]:
        """Context manager that locks arrays in the part of the window that rank `rank` owns, and yields the arrays.
        `write` says whether this rank may change them."""
        items = [self._items[rank][key] for key in keys]
        first, last = min(i.start for i in items), max(i.stop for i in items)
        with self.window.open_locked_part(rank, first, last, write) as block:
            yield [block[i.start - first : i.stop - first].view(i.dtype) for i in items]

    @contextmanager
    def locked_page_for_update(self, rank: int, page: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        """Context manager that locks a page (flat parameter buffer) in the part of the window that rank `rank` owns. It
        yields the page's counters, master parameters and optimizer state."""
        keys = [key for key in self._items[rank] if key.page == page and key.kind in ("slot", "average")]
        with self.locked_arrays(rank, LedgerKey("words", page), LedgerKey("master", page), *keys) as (
            words,
            master,
            *slots,
        ):
            yield words, master, {key.name: array for key, array in zip(keys, slots, strict=True)}

    def read_page_counter(self, rank: int, page: int, index: int) -> int:
        """Read, without a lock, one counter of a page (flat parameter buffer) in the part of the window that rank
        `rank` owns. `index` says which of the page's counters to read."""
        return self.window.read_word(rank, self._items[rank][LedgerKey("words", page)].start // 8 + index)

    def list_owners_and_ranges(self, page: int) -> Sequence[Span]:
        """Return a (rank, range of elements) pair for each rank that owns a part of a page (flat parameter buffer).

        The list begins with this rank, so that the ranks do not all lock the same part first."""
        turned = [(self.rank + i) % self.size for i in range(self.size if self.sharded else 1)]
        return [(rank, _find_owned_element_range(self.placement, page, rank, self.sharded)) for rank in turned]

    def make_owned_parameter_segments(self, rank: int, page: int) -> ShardSegments:
        """Return the segments (parameters, or parts of parameters) that rank `rank` owns in a page (flat parameter
        buffer), in the form that optimizers take."""
        if (rank, page) not in self._segments:
            here, mine = self.placement.pages[page], _find_owned_element_range(self.placement, page, rank, self.sharded)
            others = (
                ()
                if mine.size == here.size
                else (_raise_needs_norms, ShardPeers(_raise_needs_norms, rank, _raise_needs_norms))
            )
            self._segments[rank, page] = ShardSegments(
                make_optimizer_segments(here.page, mine, self.placement.layout.specs), *others
            )
        return self._segments[rank, page]


def _lay_out_window_items(placement: Placement, rank: int, sharded: bool, added: bool) -> dict[LedgerKey, WindowItem]:
    """Return the position of each array in the part of the window that rank `rank` owns. The rank's own counters, such
    as its clock, come first. The pages (flat parameter buffers) follow in order.

    The result is the same on all ranks."""
    found: dict[LedgerKey, WindowItem] = {}
    at = CACHE_LINE_BYTES
    for p in placement.pages:
        for key, dtype, elements in _iterate_page_array_sizes(
            placement, p, _find_owned_element_range(placement, p, rank, sharded), added
        ):
            found[key] = item = WindowItem(key, dtype, at, elements)
            at = -(-item.stop // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return found


def _iterate_page_array_sizes(
    placement: Placement, p: int, mine: ElementRange, added: bool
) -> Iterator[tuple[LedgerKey, Any, int]]:
    page, master = placement.pages[p], placement.formats.master
    yield LedgerKey("words", p), np.dtype(np.int64), CACHE_LINE_BYTES // 8
    if page.page.trainable and added:
        yield LedgerKey("added", p), placement.formats.gradients, mine.size
    yield LedgerKey("master", p), master, mine.size
    if not page.page.trainable:
        return
    for name in placement.slot_formats:
        yield (
            LedgerKey("average" if name == AVERAGE_SLOT else "slot", p, name),
            placement.get_slot_dtype(name),
            mine.size,
        )


def _find_owned_element_range(placement: Placement, page: int, rank: int, sharded: bool) -> ElementRange:
    """Return the range of elements that rank `rank` owns in a page (flat parameter buffer) of the window."""
    here = placement.pages[page]
    return here.shards[rank] if sharded else here.own_range


def _raise_needs_norms(*asked: Any) -> Any:
    raise ConfigError(
        "this optimizer needs norms of full parameters, of which asynchronous ranks have only shards: use optim.AdamW "
        "or optim.SGD, or strategy='gossip'"
    )


class OwnSpeed(SyncChoice):
    """Base class for strategies in which ranks step at their own speed: `AsyncSGD` and `GossipSGD`.

    If `sharded` is true, all ranks update one model, and each rank holds a shard of it; otherwise, each rank has its
    own model."""

    excluded: ClassVar[str] = "asynchronous training"
    sharded: ClassVar[bool] = False
    staleness: int | None = None
    by_staleness: bool = False
    sync_every: int = 1

    @property
    def description(self) -> str:
        return repr(self)

    @property
    def message_prefix(self) -> str:
        return f"strategy={self!r}: "

    def make_policy(self, placement: Placement) -> SyncPolicy:
        return AsynchronousPolicy(placement, self)


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class AsyncSGD(OwnSpeed):
    """Asynchronous SGD: each rank reads and updates sharded parameters independently, at its own speed (Dean et al.,
    NeurIPS'12; Ho et al., NeurIPS'13).

    Parameters
    ----------
    staleness : number of steps that a rank may be ahead of the slowest rank. With 0, ranks step together, and the
        gradients of a step are added in rank order before one update, as in synchronous training. With 1 or more, each
        gradient is applied in a separate update. None (default) means no limit
    by_staleness : whether to divide the learning rate of an update by 1 + n, where n is the number of other updates
        since the rank read the parameters (Zhang et al., IJCAI'16)
    """

    sharded: ClassVar[bool] = True
    staleness: int | None = None
    by_staleness: bool = False

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            given = f"AsyncSGD(staleness={self.staleness!r})"
            raise ConfigError(f"{given}: a number of steps, 0 or more, or None for any number")
        if type(self.by_staleness) is not bool:
            raise ConfigError(f"AsyncSGD(by_staleness={self.by_staleness!r}): choose True or False")

    def strategy_within_replica(self, mesh: Mesh | None, ranks: int) -> Sharding:
        """Return how parameters and optimizer state are sharded.

        Parameters
        ----------
        mesh : the mesh that the user gave; not used
        ranks : number of all ranks; not used

        Returns
        -------
        Sharding : parameters sharded over all ranks, with full parameters and gradients kept during a step
        """
        return Sharding(full_params="step", full_grads="step")


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class GossipSGD(OwnSpeed):
    """Gossip averaging: each rank trains its own model. Every `sync_every` steps, the rank averages its model with the
    model of a random rank (AD-PSGD: Lian et al., ICML'18).

    Parameters
    ----------
    sync_every : number of steps from one averaging to the next, at least 1
    """

    sync_every: int = 1

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        if type(self.sync_every) is not int or self.sync_every < 1:
            raise ConfigError(f"GossipSGD(sync_every={self.sync_every!r}): a number of steps, 1 or more")

    def strategy_within_replica(self, mesh: Mesh | None, ranks: int) -> Sharding:
        """Return how parameters and optimizer state are sharded.

        Parameters
        ----------
        mesh : the mesh that the user gave; not used
        ranks : number of all ranks; not used

        Returns
        -------
        Sharding : a full replica on every rank
        """
        return Sharding(replica=None, shard=1, full_params="step", full_grads="step")


# the value "pushed" of a page (flat parameter buffer) exists once this rank's gradient of the page has been applied
SLOTS.update({"pushed": SlotKind("pushed", "control")})

# fmt: off
VERBS.update({  # one-sided actions: none of them waits for another rank to make a call
    "PULL": Verb(gives=("full:page",), lane="window", about="page"),
    "ALONE": Verb(takes=("loss:all", "weight:scored"), reads=("grad:every",), gives=("mean", "scale"), about=""),
    "PUSH": Verb(takes=("grad:page",), reads=("mean", "scale"), gives=("pushed:page",), lane="window", about="page"),
    "TICK": Verb(takes=("pushed:every",), lane="window", about=""),
    "MIX": Verb(takes=("pushed:page",), lane="window", about="page"),
})
# fmt: on
ledger.LEDGER_KINDS.update({"added": ledger.LedgerKind("gradients")})


def _build_own_speed_actions(actions: list[Action], request: ProgramRequest) -> list[Action]:
    """Return the actions of an asynchronous step: read all parameters, compute, and apply the gradients to the shared
    memory."""
    stage = request.stage
    pages = [a.unit for a in insert_gathers(actions, stage, 0, keep=True) if a.op == "GATHER"]
    tail = [Action("ALONE"), *(Action("FREE", p) for p in pages)]
    for p in reversed(stage.trained_pages):
        tail += [Action("PUSH", p), *([Action("MIX", p)] if request.kind == "mix" else [])]
    tail += [Action("TICK")] if request.kind == "push" else []
    return [*(Action("PULL", p) for p in pages), *actions, *tail]


PROGRAM_KINDS.update({
    name: ProgramKind(
        about, "FB", "LOSS", ("mean", "scale"), updates=True, compile_without_peers=_build_own_speed_actions
    )
    for name, about in (
        ("push", "a step at this rank's own speed, on parameters of all ranks"),
        ("mix", "the same on this rank's own model, which is averaged with random others"),
    )
})  # fmt: skip

CLOCK, SYNC_COUNT = 0, 1
"""Indices of the counters at the start of each rank's part of the window. CLOCK: number of steps of the rank since all
ranks last synchronized. SYNC_COUNT: number of times that the rank has waited for all ranks."""
AWAY_CLOCK = 1 << 62
"""Clock value of a rank that takes no more steps until all ranks synchronize. It is so large that no other rank waits
for this rank."""
UPDATES, ADDED, WEIGHT = 0, 1, 2
"""Indices of the counters that the window stores before each page (flat parameter buffer). UPDATES: number of updates
of the page. ADDED: number of gradients in the page's sum of gradients. WEIGHT: total weight of these gradients (a
float64)."""


Update = Callable[[Any, Any, Mapping[str, Any], ShardSegments, int, float | None, float], None]
"""Function that updates elements of a page (flat parameter buffer). Its arguments are the parameters, gradient,
optimizer state, segments, step, weight, and a factor for the learning rate. The weight is the total weight of the
gradients of all ranks, or None if the gradient comes from this rank alone."""


class AsynchronousPolicy(SyncPolicy):
    """Synchronization policy of ranks that step at their own speed. On behalf of this rank, the policy reads and
    updates the shared memory.

    Attributes
    ----------
    clock : number of steps of this rank since all ranks last synchronized
    staleness_counts : maps each staleness to the number of this rank's updates that had this staleness. The staleness
        of an update is the number of other updates to the page (flat parameter buffer) between this rank's reading of
        the page and its update
    """

    is_synchronous, own_speed = False, True
    memory: CommonMemory

    def __init__(self, placement: Placement, choice: OwnSpeed) -> None:
        self.placement, world = placement, placement.axes.world
        self.choice, self.rank, self.size = choice, world.rank, world.size
        self.clock = self._sync_count = 0
        # maps (owner, page) to the number of updates that the page (flat parameter buffer) had received when this rank
        # last read it
        self._read: dict[tuple[int, int], int] = {}
        self.staleness_counts: dict[int, int] = {}

    def get_program_kind(self, kind: str) -> str:
        if kind not in ("step", "evaluate", "predict"):
            raise ConfigError(f"{kind}: ranks that step at their own speed train in complete steps; use step or fit")
        return kind if kind != "step" else "push" if self.choice.sharded else "mix"

    def is_sync_step(self, step: int) -> bool:
        return False

    def open_shared_memory(self) -> Iterator[tuple[LedgerKey, Any]]:
        self.memory = CommonMemory(self.placement, self.choice.sharded, self.choice.staleness == 0)
        self.window = self.memory.window
        return self.memory.iterate_own_arrays()

    def list_policy_ledger_rows(self, page: ShardedPage) -> Iterator[LedgerRow]:
        if (key := LedgerKey("added", page.page.index)) in self.memory.keys:
            span = ElementRange(0, self.memory.get_own_array(key).size)
            yield LedgerRow(key, self.memory.dtype_of(key), span, "private")

    def _count_traffic(self, call: str, elements: int, dtype: Any) -> None:
        self.placement.axes.counters.add_calls("world", call, elements * int(np.dtype(dtype).itemsize))

    def pull_parameters(self, page: int, full: Any) -> None:
        """Read the current parameters of a page (flat parameter buffer) into `full`. If this rank is too far ahead of
        the slowest rank, first wait for that rank."""
        self._wait_for_staleness_bound()
        with self.window.access_epoch("pull"):
            for rank, span in self.memory.list_owners_and_ranges(page):
                with self.memory.locked_arrays(
                    rank, LedgerKey("words", page), LedgerKey("master", page), write=False
                ) as (words, master):
                    self._read[rank, page] = int(words[UPDATES])
                    store(np, master, full[span.start : span.stop])
                if rank != self.rank:
                    self._count_traffic("pull", span.size, master.dtype)

    def _wait_for_staleness_bound(self) -> None:
        if (bound := self.choice.staleness) is not None:
            first = self.clock - bound
            self.window.wait_until_none_missing(
                lambda: [
                    r
                    for r in self._other_ranks
                    if self.window.read_word(r, CLOCK) < first and not self.window.has_rank_died(r)
                ],
                f"step {first} of the slowest rank, staleness={bound}",
            )

    @property
    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def push_gradient(self, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Update a page (flat parameter buffer) with this rank's gradient, directly in the memory of every rank that
        owns a part of the page.
        """
        for rank, span in self.memory.list_owners_and_ranges(page):
            own = gradient[span.start : span.stop]
            if self.choice.staleness == 0:
                self._add_gradient_in_rank_order(rank, page, own, weight, update)
                continue
            with (
                self.window.access_epoch("push"),
                self.memory.locked_page_for_update(rank, page) as (words, master, slots),
            ):
                late = int(words[UPDATES]) - self._read[rank, page]
                self.staleness_counts[late] = self.staleness_counts.get(late, 0) + 1
                lr = 1 / (1 + late) if self.choice.by_staleness else 1.0
                words[UPDATES] += 1
                update(
                    master,
                    own,
                    slots,
                    self.memory.make_owned_parameter_segments(rank, page),
                    int(words[UPDATES]),
                    None,
                    lr,
                )
            if rank != self.rank:
                self._count_traffic("push", span.size, own.dtype)

    def _add_gradient_in_rank_order(self, rank: int, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Add this rank's gradient to the sum for the part of a page (flat parameter buffer) that rank `rank` owns.
        First wait until all lower ranks have added their gradients, so that the sum is the same as in synchronous
        training. The last rank that adds its gradient then updates the part."""
        self.window.wait_until_none_missing(
            lambda: self._find_rank_to_add_gradient_next(rank, page),
            f"the gradients of earlier ranks in step {self.clock}, staleness=0",
        )
        with self.window.access_epoch("push"):
            with self.memory.locked_arrays(rank, LedgerKey("words", page), LedgerKey("added", page)) as (words, total):
                weights = words[WEIGHT : WEIGHT + 1].view(np.float64)
                if self.rank == 0:
                    total[...], weights[...] = gradient, weight
                else:
                    total += gradient
                    weights += weight
                words[ADDED] = (self.rank + 1) % self.size
                whole, shared = total, float(weights[0])
            if self.rank == self.size - 1:
                with self.memory.locked_page_for_update(rank, page) as (words, master, slots):
                    words[UPDATES] += 1
                    update(
                        master,
                        whole,
                        slots,
                        self.memory.make_owned_parameter_segments(rank, page),
                        int(words[UPDATES]),
                        shared,
                        1.0,
                    )
        if rank != self.rank:
            self._count_traffic("push", gradient.size, gradient.dtype)

    def _find_rank_to_add_gradient_next(self, rank: int, page: int) -> list[int]:
        """Return a list with the rank whose turn it is to add its gradient, or an empty list if it is this rank's turn.
        Ranks take turns to add their gradients to the part of a page (flat parameter buffer) that rank `rank` owns.

        Raises DataError if the rank whose turn it is has stopped taking steps."""
        turn = self.memory.read_page_counter(rank, page, ADDED)
        if turn == self.rank:
            return []
        away = self.window.read_word(turn, CLOCK) == AWAY_CLOCK or self.window.has_rank_died(turn)
        # read the counter again, because rank `turn` may have added its gradient in its last step, just before it
        # stopped
        if away and self.memory.read_page_counter(rank, page, ADDED) == turn:
            raise DataError(f"rank {turn} takes no more steps, and staleness=0 needs all ranks in each")
        return [turn]

    def mix_page(self, page: int, step: int) -> None:
        """If `step` is a multiple of `sync_every`, average a page (flat parameter buffer) of this rank's model with the
        same page of a random rank's model."""
        if step % self.choice.sync_every == 0:
            with self.window.access_epoch("mix"):
                self._average_page_with_random_rank(page, step)

    def _average_page_with_random_rank(self, page: int, step: int) -> None:
        """Average a page (flat parameter buffer) of this rank with the same page of a random rank. Both ranks get the
        mean, so the mean of all models does not change.

        The random rank is the same for all pages of a step."""
        key, drawn = LedgerKey("master", page), random.Random(f"{self.placement.options.seed} {self.rank} {step}")
        others = [
            rank for rank in drawn.sample(self._other_ranks, self.size - 1) if not self.window.has_rank_died(rank)
        ]
        if not others:
            return
        with ExitStack() as both:
            a, b = (both.enter_context(self.memory.locked_arrays(r, key))[0] for r in sorted((self.rank, others[0])))
            a += b
            a *= 0.5
            b[...] = a
        self._count_traffic("mix", 2 * a.size, a.dtype)

    def advance_clock(self) -> None:
        """Count one more step of this rank, and publish the count, so that other ranks know how far this rank is."""
        self.clock += 1
        self.window.write_word(CLOCK, self.clock)

    @property
    def updates_per_step(self) -> int:
        return self.size if self.choice.sharded and self.choice.staleness != 0 else 1

    def count_updates(self, name: str, steps: int) -> int:
        pages = self.placement.layout.pages
        page = next(page.index for page in pages if any(f.source == name for f in page.fields))
        return self.memory.read_page_counter(self.rank, page, UPDATES)

    def on_parameters_set(self, steps: int) -> None:
        """Reset the counters of all pages after parameters were replaced. All ranks must call this method before any
        rank takes a step."""
        updates = steps * self.updates_per_step
        for key in self.memory.keys:
            if key.kind == "words":
                self.memory.get_own_array(key)[...] = 0
                self.memory.get_own_array(key)[UPDATES] = updates

    def get_failed_ranks(self) -> list[int]:
        return [rank for rank in self._other_ranks if self.window.has_rank_died(rank)]

    def wait_for_last_step(self) -> None:
        """Wait until all living ranks have called this method, then reset all clocks to zero. Collective.

        Ranks that are still taking steps do not wait for a rank that is waiting here."""
        self.window.write_word(CLOCK, AWAY_CLOCK)
        self.window.stop_accessing()
        self._wait_for_all_ranks()
        self.clock = 0
        self.window.write_word(CLOCK, 0)
        # wait again, so that no rank continues before all ranks have reset their clocks
        self._wait_for_all_ranks()

    def _wait_for_all_ranks(self) -> None:
        self._sync_count += 1
        self.window.write_word(SYNC_COUNT, self._sync_count)
        self.window.wait_for_all_ranks(
            lambda: [
                r
                for r in self._other_ranks
                if self.window.read_word(r, SYNC_COUNT) < self._sync_count and not self.window.has_rank_died(r)
            ],
            "the last steps of the others",
        )

    def assemble_full_page_locally(self, key: LedgerKey) -> Any:
        """Return all elements of a page (flat buffer) of parameters or optimizer state. Not collective: this rank reads
        the elements from shared memory, and no other rank needs to make a call.

        The elements are assembled from all shards or, if each rank has its own model, averaged over the models."""
        if self.choice.sharded:
            here = self.placement.pages[key.page]
            if self.choice.staleness == 0:
                self._wait_for_staleness_bound()
            full = np.empty(here.size, self.memory.dtype_of(key))
            for rank, span in self.memory.list_owners_and_ranges(here.page.index):
                with self.memory.locked_arrays(rank, key, write=False) as (values,):
                    full[span.start : span.stop] = values
            return full
        living = [rank for rank in range(self.size) if rank == self.rank or not self.window.has_rank_died(rank)]
        dtype = self.memory.dtype_of(key)
        # if the dtype is not the master dtype, this is quantized optimizer state, which cannot be averaged, so take the
        # state of the lowest living rank
        if dtype != self.placement.formats.master:
            living = living[:1]
        total = np.zeros(self.memory.get_own_array(key).size)
        for rank in living:
            with self.memory.locked_arrays(rank, key, write=False) as (values,):
                total += values
        return (total / len(living)).astype(dtype)

    def read_common_parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for page in self.placement.layout.pages:
            named = page.view_parameters_by_name(self.assemble_full_page_locally(LedgerKey("master", page.index)))
            found |= {f.source: named[f.name] for f in page.fields}
        return found

    def read_common_state_and_get_setter(
        self, state: Any, kinds: Sequence[str]
    ) -> Callable[[], Callable[[], None]] | None:
        if self.choice.sharded:
            return None
        rows = [
            (self.memory.get_own_array(key), self.assemble_full_page_locally(key))
            for key in self.memory.keys
            if key.kind in kinds
        ]
        return partial(set_arrays_returning_undo, rows)

    def copy_parameters_and_get_restorer(self) -> Callable[[], Any]:
        keys = {LedgerKey("master", p): page.own_range for p, page in self.placement.pages.items()}
        return partial(
            set_arrays_returning_undo,
            [
                (self.memory.get_own_array(k), self.assemble_full_page_locally(k)[m.start : m.stop])
                for k, m in keys.items()
            ],
        )

    def close(self) -> None:
        self.window.close()


def _get_policy(run: ProgramRun) -> AsynchronousPolicy:
    policy = run.placement.sync_policy
    assert isinstance(policy, AsynchronousPolicy)
    return policy


def pull_parameters(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Read the current parameters of a page (flat parameter buffer) of n elements from the shared memory. Each of N
    ranks reads n - n/N elements from other ranks."""
    p = get_action_target(action)
    full = run.workspace.get_full_parameter_buffer(p)
    _get_policy(run).pull_parameters(p, full)
    return (run.views.view_parameters(run.placement.pages[p].page, full),)


def push_gradient(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Apply this rank's gradient of a page (flat parameter buffer) of n elements to the shards of all ranks. Each of N
    ranks writes n - n/N elements to other ranks."""
    (gradient,), (mean, scale) = taken, read

    def apply_gradient(
        master: Any, gradient: Any, slots: Any, segments: ShardSegments, step: int, weight: float | None, lr: float
    ) -> None:
        factor = scale.factor if weight is None else 1.0 / (weight * run.scaler.value)
        run_optimizer_on_page(run, master, gradient, slots, segments, step, scale.rate * lr, factor)

    _get_policy(run).push_gradient(
        get_action_target(action), gradient.get_microbatch_buffer(0), mean.shared, apply_gradient
    )
    return (True,)


def advance_clock(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    _get_policy(run).advance_clock()
    return ()


def mix_page(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    _get_policy(run).mix_page(get_action_target(action), run.step + 1)
    return ()


OPERATIONS.update(
    {
        "PULL": pull_parameters,
        "ALONE": compute_local_loss_and_gradient_scale,
        "PUSH": push_gradient,
        "TICK": advance_clock,
        "MIX": mix_page,
    }
)
