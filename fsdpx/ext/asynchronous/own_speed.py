"""Ranks at their own speed: asynchronous SGD on parameters in shards, and gossip between models of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fsdpx.core.array.kernels import store
from fsdpx.core.base.config import Sharding, python_fields
from fsdpx.core.base.name_hints import knowing
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.comm.windows import LINE, Window
from fsdpx.core.engine.operations import OPERATIONS, alone, move
from fsdpx.core.engine.run import ProgramRun, Values, number_of
from fsdpx.core.program import KINDS, SLOTS, VERBS, Action, ProgramKind, Request, SlotKind, Verb
from fsdpx.core.program.passes import page as paged
from fsdpx.core.state import ledger
from fsdpx.core.state.flat_parameters import Range, ShardedPage
from fsdpx.core.state.ledger import Key, LedgerRow
from fsdpx.core.state.placement import Placement, segments_of
from fsdpx.core.state.sync_policy import Pace, PaceChoice, put_for_now
from fsdpx.errors import ConfigError, DataError
from fsdpx.optim import Segments
from fsdpx.optim.optimizer import AVERAGE
from fsdpx.optim.segments import Peers

__all__ = ["Async", "CommonMemory", "Gossip", "Span"]

Span = tuple[int, Range]
"""A rank, and the elements of a page that it holds."""


class Item(NamedTuple):
    """What a part of a page's memory is, and where it lies in the part of its rank, in bytes."""

    key: Key
    dtype: Any
    start: int
    elements: int

    @property
    def stop(self) -> int:
        return self.start + self.elements * int(np.dtype(self.dtype).itemsize)


class CommonMemory:
    """One rank's view of the window, in which each rank has a part of its own. Collective to make.

    Kinds of keys: "words" (counts, in front of each page), "master", "slot", "average", and if wanted "added" (the sum
    of gradients). sharded: all ranks update one model, of which each holds a shard; else each rank holds its own."""

    def __init__(self, placement: Placement, sharded: bool, added: bool) -> None:
        self.placement, world = placement, placement.axes.world
        self.rank, self.size = world.rank, world.size
        self.sharded = sharded
        self._items = [_items(placement, rank, sharded, added) for rank in range(self.size)]
        ends = [max(item.stop for item in found.values()) for found in self._items]
        self.window: Window = world.window(ends[self.rank])
        self._segments: dict[tuple[int, int], Segments] = {}

    @property
    def keys(self) -> Collection[Key]:
        """All that lies in this rank's part."""
        return self._items[self.rank]

    def dtype(self, key: Key) -> Any:
        """The format of a key's arrays."""
        return self._items[self.rank][key].dtype

    def own(self, key: Key) -> Any:
        """The array of a key in this rank's part."""
        item = self._items[self.rank][key]
        return self.window.own[item.start : item.stop].view(item.dtype)

    def arrays(self) -> Iterator[tuple[Key, Any]]:
        """Key and array of everything in this rank's part but the words."""
        for item in self._items[self.rank].values():
            if item.key.kind != "words":
                yield item.key, self.own(item.key)

    @contextmanager
    def open(self, rank: int, *keys: Key, write: bool = True) -> Iterator[list[Any]]:
        """Arrays in the part of a rank, which is this rank's alone while the block runs."""
        items = [self._items[rank][key] for key in keys]
        first, last = min(i.start for i in items), max(i.stop for i in items)
        with self.window.open(rank, first, last, write) as block:
            yield [block[i.start - first : i.stop - first].view(i.dtype) for i in items]

    @contextmanager
    def open_to_update(self, rank: int, page: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        """The words, master parameters and optimiser slots of a page in the part of a rank."""
        keys = [key for key in self._items[rank] if key.page == page and key.kind in ("slot", "average")]
        with self.open(rank, Key("words", page), Key("master", page), *keys) as (words, master, *slots):
            yield words, master, {key.name: array for key, array in zip(keys, slots, strict=True)}

    def word(self, rank: int, page: int, at: int) -> int:
        """Word number `at` of a page in the part of a rank, read without a lock."""
        return self.window.word(rank, self._items[rank][Key("words", page)].start // 8 + at)

    def holders(self, page: int) -> Sequence[Span]:
        """Whose parts a page is read from and updated in: from this rank on, so that ranks start at different parts."""
        turned = [(self.rank + i) % self.size for i in range(self.size if self.sharded else 1)]
        return [(rank, _held(self.placement, page, rank, self.sharded)) for rank in turned]

    def segments_of(self, rank: int, page: int) -> Segments:
        """What a rank holds of a page, in the optimiser's terms."""
        if (rank, page) not in self._segments:
            here, mine = self.placement.pages[page], _held(self.placement, page, rank, self.sharded)
            others = () if mine.size == here.size else (_refuse, Peers(_refuse, rank, _refuse))
            self._segments[rank, page] = Segments(segments_of(here.page, mine, self.placement.layout.specs), *others)
        return self._segments[rank, page]


def _items(placement: Placement, rank: int, sharded: bool, added: bool) -> dict[Key, Item]:
    """What lies in the part of a rank, the same on all ranks: after the words of its clock, page by page."""
    found: dict[Key, Item] = {}
    at = LINE
    for p in placement.pages:
        for key, dtype, elements in _of_page(placement, p, _held(placement, p, rank, sharded), added):
            found[key] = item = Item(key, dtype, at, elements)
            at = -(-item.stop // LINE) * LINE
    return found


def _of_page(placement: Placement, p: int, mine: Range, added: bool) -> Iterator[tuple[Key, Any, int]]:
    page, master = placement.pages[p], placement.formats.master
    yield Key("words", p), np.dtype(np.int64), LINE // 8
    if page.page.trainable and added:
        yield Key("added", p), placement.formats.gradients, mine.size
    yield Key("master", p), master, mine.size
    if not page.page.trainable:
        return
    for name in placement.kept:
        yield Key("average" if name == AVERAGE else "slot", p, name), placement.slot_format(name), mine.size


def _held(placement: Placement, page: int, rank: int, sharded: bool) -> Range:
    """The elements of a page in the part of a rank."""
    here = placement.pages[page]
    return here.shards[rank] if sharded else here.mine


def _refuse(*asked: Any) -> Any:
    raise ConfigError(
        "this optimizer needs norms of whole parameters, which asynchronous ranks have in shards: use optim.AdamW or "
        "optim.SGD, or strategy='gossip'"
    )


class OwnSpeed(PaceChoice):
    """What strategies at their own speed have in common. sharded: all ranks update one model, of which each holds a
    shard; else each rank has a model of its own. The rest: as in `Async` and `Gossip`."""

    excluded: ClassVar[str] = "ranks at their own speed"
    sharded: ClassVar[bool] = False
    staleness: int | None = None
    by_staleness: bool = False
    every: int = 1

    @property
    def words(self) -> str:
        return repr(self)

    @property
    def prefix(self) -> str:
        return f"strategy {self!r}: "

    def on(self, placement: Placement) -> Pace:
        return OwnPace(placement, self)


@knowing
@dataclass(frozen=True)
class Async(OwnSpeed):
    """Asynchronous SGD on parameters in shards, which every rank reads and updates by itself, at its own speed (Dean et
    al., NeurIPS'12; Ho et al., NeurIPS'13).

    Parameters
    ----------
    staleness : steps that a rank may be ahead of the slowest. 0: ranks step together, gradients of a step are added in
        rank order before one update, as synchronous training does. Above, each gradient is an update. None: any number
    by_staleness : divide the learning rate by 1 + the updates since the parameters were read (Zhang et al., IJCAI'16)
    """

    sharded: ClassVar[bool] = True
    staleness: int | None = None
    by_staleness: bool = False

    def __post_init__(self) -> None:
        python_fields(self)
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            given = f"Async(staleness={self.staleness!r})"
            raise ConfigError(f"{given}: a number of steps, 0 or more, or None for any number")
        if type(self.by_staleness) is not bool:
            raise ConfigError(f"Async(by_staleness={self.by_staleness!r}): choose True or False")

    def inner(self, mesh: Mesh | None, ranks: int) -> Sharding:
        """Where parameters and the state of the optimiser lie."""
        return Sharding(full_params="step", full_grads="step")


@knowing
@dataclass(frozen=True)
class Gossip(OwnSpeed):
    """Each rank trains a model of its own and, every `every` steps, averages it with that of a rank drawn at random
    (AD-PSGD: Lian et al., ICML'18)."""

    every: int = 1

    def __post_init__(self) -> None:
        python_fields(self)
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(f"Gossip(every={self.every!r}): a number of steps, 1 or more")

    def inner(self, mesh: Mesh | None, ranks: int) -> Sharding:
        """Where parameters and the state of the optimiser lie."""
        return Sharding(replica=None, shard=1, full_params="step", full_grads="step")


SLOTS.update({"pushed": SlotKind("pushed", "control")})  # this rank's gradient of a page is where it is held
# fmt: off
VERBS.update({  # nothing of this waits for a call of another rank
    "PULL": Verb(gives=("full:page",), lane="window", about="page"),
    "ALONE": Verb(takes=("loss:all", "weight:scored"), reads=("grad:every",), gives=("mean", "scale"), about=""),
    "PUSH": Verb(takes=("grad:page",), reads=("mean", "scale"), gives=("pushed:page",), lane="window", about="page"),
    "TICK": Verb(takes=("pushed:every",), lane="window", about=""),
    "MIX": Verb(takes=("pushed:page",), lane="window", about="page"),
})
# fmt: on
ledger.KINDS.update({"added": ledger.Kind("gradients")})  # of a step of all ranks, added up in a window


def _by_itself(actions: list[Action], request: Request) -> list[Action]:
    """A step of a rank at its own speed: all parameters as they are now, compute, and what it has found."""
    stage = request.stage
    pages = [a.unit for a in paged(actions, stage, 0, keep=True) if a.op == "GATHER"]
    tail = [Action("ALONE"), *(Action("FREE", p) for p in pages)]
    for p in reversed(stage.trained):
        tail += [Action("PUSH", p), *([Action("MIX", p)] if request.kind == "mix" else [])]
    tail += [Action("TICK")] if request.kind == "push" else []
    return [*(Action("PULL", p) for p in pages), *actions, *tail]


KINDS.update({
    name: ProgramKind(about, "FB", "LOSS", ("mean", "scale"), updates=True, alone=_by_itself)
    for name, about in (
        ("push", "a step at this rank's own speed, on parameters of all ranks"),
        ("mix", "the same on a model of its own, which others are drawn to"),
    )
})  # fmt: skip

CLOCK, MET = 0, 1
"""Words at the start of each part: steps its rank has made since all met, and how many times it has waited for all."""
AWAY = 1 << 62
"""The clock of a rank that makes no steps until all meet."""
UPDATES, ADDED, WEIGHT = 0, 1, 2
"""Words in front of each page: updates made, ranks whose gradients are in the sum, and their weight (a float64)."""


Update = Callable[[Any, Any, Mapping[str, Any], Segments, int, float | None, float], None]
"""Updates elements of a page: parameters, gradient, slots of the optimiser, what they are, step, weight of the
gradients of all ranks (None if it is that of this rank alone), and what the learning rate is multiplied by."""


class OwnPace(Pace):
    """The pace of ranks at their own speed, and one rank's side of what they exchange.

    clock: steps of this rank since all met. taken: staleness, as updates made since something was read -> how often
    this rank has updated it then."""

    together, own_speed = False, True
    memory: CommonMemory

    def __init__(self, placement: Placement, choice: OwnSpeed) -> None:
        self.placement, world = placement, placement.axes.world
        self.choice, self.rank, self.size = choice, world.rank, world.size
        self.clock = self._met = 0
        self._read: dict[tuple[int, int], int] = {}  # (rank, page) -> updates there, when it was read
        self.taken: dict[int, int] = {}

    def kind(self, kind: str) -> str:
        if kind not in ("step", "evaluate", "predict"):
            raise ConfigError(f"{kind}: ranks that step at their own speed train by whole steps; use step or fit")
        return kind if kind != "step" else "push" if self.choice.sharded else "mix"

    def met(self, step: int) -> bool:
        return False

    def connect(self) -> Iterator[tuple[Key, Any]]:
        self.memory = CommonMemory(self.placement, self.choice.sharded, self.choice.staleness == 0)
        self.window = self.memory.window
        return self.memory.arrays()

    def rows(self, page: ShardedPage) -> Iterator[LedgerRow]:
        if (key := Key("added", page.page.index)) in self.memory.keys:
            span = Range(0, self.memory.own(key).size)
            yield LedgerRow(key, self.memory.dtype(key), span, "private")

    def _note(self, call: str, elements: int, dtype: Any) -> None:
        self.placement.axes.counters.add("world", call, elements * int(np.dtype(dtype).itemsize))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def pull(self, page: int, full: Any) -> None:
        """Read a page as it is now, once the slowest rank is not too far behind."""
        self._keep_pace()
        with self.window.turn("pull"):
            for rank, span in self.memory.holders(page):
                with self.memory.open(rank, Key("words", page), Key("master", page), write=False) as (words, master):
                    self._read[rank, page] = int(words[UPDATES])
                    store(np, master, full[span.start : span.stop])
                if rank != self.rank:
                    self._note("pull", span.size, master.dtype)

    def _keep_pace(self) -> None:
        if (bound := self.choice.staleness) is not None:
            first = self.clock - bound
            self.window.wait(
                lambda: [r for r in self._others if self.window.word(r, CLOCK) < first and not self.window.gone(r)],
                f"step {first} of the slowest rank, staleness={bound}",
            )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def push(self, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Bring this rank's gradient of a page to where it is held, and update what is there."""
        for rank, span in self.memory.holders(page):
            own = gradient[span.start : span.stop]
            if self.choice.staleness == 0:
                self._add(rank, page, own, weight, update)
                continue
            with self.window.turn("push"), self.memory.open_to_update(rank, page) as (words, master, slots):
                late = int(words[UPDATES]) - self._read[rank, page]
                self.taken[late] = self.taken.get(late, 0) + 1
                lr = 1 / (1 + late) if self.choice.by_staleness else 1.0
                words[UPDATES] += 1
                update(master, own, slots, self.memory.segments_of(rank, page), int(words[UPDATES]), None, lr)
            if rank != self.rank:
                self._note("push", span.size, own.dtype)

    def _add(self, rank: int, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Gradients of a step are added in rank order, as synchronous training adds them; the last rank updates."""
        self.window.wait(
            lambda: self._before_me(rank, page), f"the gradients of earlier ranks in step {self.clock}, staleness=0"
        )
        with self.window.turn("push"):
            with self.memory.open(rank, Key("words", page), Key("added", page)) as (words, total):
                weights = words[WEIGHT : WEIGHT + 1].view(np.float64)
                if self.rank == 0:
                    total[...], weights[...] = gradient, weight
                else:
                    total += gradient
                    weights += weight
                words[ADDED] = (self.rank + 1) % self.size
                whole, shared = total, float(weights[0])
            if self.rank == self.size - 1:
                with self.memory.open_to_update(rank, page) as (words, master, slots):
                    words[UPDATES] += 1
                    update(master, whole, slots, self.memory.segments_of(rank, page), int(words[UPDATES]), shared, 1.0)
        if rank != self.rank:
            self._note("push", gradient.size, gradient.dtype)

    def _before_me(self, rank: int, page: int) -> list[int]:
        """The rank that adds next, unless it is this one."""
        turn = self.memory.word(rank, page, ADDED)
        if turn != self.rank and (self.window.word(turn, CLOCK) == AWAY or self.window.gone(turn)):
            raise DataError(f"rank {turn} takes no more steps, and staleness=0 needs all ranks in each")
        return [] if turn == self.rank else [turn]

    def mix(self, page: int, step: int) -> None:
        """Draw this rank's model and those of others near each other, after step number `step`."""
        if step % self.choice.every == 0:
            with self.window.turn("mix"):
                self._average(page, step)

    def _average(self, page: int, step: int) -> None:
        """With another rank, the same one for all pages of a step; the mean of all models stays what it is."""
        key, drawn = Key("master", page), random.Random(f"{self.placement.options.seed} {self.rank} {step}")
        others = [rank for rank in drawn.sample(self._others, self.size - 1) if not self.window.gone(rank)]
        if not others:
            return
        with ExitStack() as both:
            one, two = (both.enter_context(self.memory.open(r, key))[0] for r in sorted((self.rank, others[0])))
            one += two
            one *= 0.5
            two[...] = one
        self._note("mix", 2 * one.size, one.dtype)

    def tick(self) -> None:
        """This rank has made a step."""
        self.clock += 1
        self.window.say(CLOCK, self.clock)

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def updates_per_step(self) -> int:
        return self.size if self.choice.sharded and self.choice.staleness != 0 else 1

    def count_updates(self, name: str, steps: int) -> int:
        pages = self.placement.layout.pages
        page = next(page.index for page in pages if any(f.source == name for f in page.fields))
        return self.memory.word(self.rank, page, UPDATES)

    def placed(self, steps: int) -> None:
        """All ranks call it; none may step before all have."""
        updates = steps * self.updates_per_step
        for key in self.memory.keys:
            if key.kind == "words":
                self.memory.own(key)[...] = 0
                self.memory.own(key)[UPDATES] = updates

    def lost(self) -> list[int]:
        return [rank for rank in self._others if self.window.gone(rank)]

    def meet(self) -> None:
        """Until all living ranks are here no step of another rank waits for this one. From then on all clocks are
        equal."""
        self.window.say(CLOCK, AWAY)
        self.window.leave()
        self._await()
        self.clock = 0
        self.window.say(CLOCK, 0)
        self._await()  # a rank not yet back from the first wait is still AWAY

    def _await(self) -> None:
        self._met += 1
        self.window.say(MET, self._met)
        self.window.meet(
            lambda: [r for r in self._others if self.window.word(r, MET) < self._met and not self.window.gone(r)],
            "the last steps of the others",
        )

    def whole(self, key: Key) -> Any:
        """All elements of a page of what the ranks have in common: of its shards, or the mean of all models; and of the
        state of the optimiser. On this rank alone."""
        if self.choice.sharded:
            here = self.placement.pages[key.page]
            if self.choice.staleness == 0:
                self._keep_pace()
            full = np.empty(here.size, self.memory.dtype(key))
            for rank, span in self.memory.holders(here.page.index):
                with self.memory.open(rank, key, write=False) as (values,):
                    full[span.start : span.stop] = values
            return full
        living = [rank for rank in range(self.size) if rank == self.rank or not self.window.gone(rank)]
        dtype = self.memory.dtype(key)
        if dtype != self.placement.formats.master:  # codes have no mean
            living = living[:1]
        total = np.zeros(self.memory.own(key).size)
        for rank in living:
            with self.memory.open(rank, key, write=False) as (values,):
                total += values
        return (total / len(living)).astype(dtype)

    def parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for page in self.placement.layout.pages:
            named = page.named(self.whole(Key("master", page.index)))
            found |= {f.source: named[f.name] for f in page.fields}
        return found

    def common(self, state: Any, kinds: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        if self.choice.sharded:
            return None
        rows = [(self.memory.own(key), self.whole(key)) for key in self.memory.keys if key.kind in kinds]
        return partial(put_for_now, rows)

    def remember(self) -> Callable[[], Any]:
        keys = {Key("master", p): page.mine for p, page in self.placement.pages.items()}
        return partial(put_for_now, [(self.memory.own(k), self.whole(k)[m.start : m.stop]) for k, m in keys.items()])

    def close(self) -> None:
        self.window.close()


# -- operations --------------------------------------------------------------------------------------------------------


def _of(run: ProgramRun) -> OwnPace:
    pace = run.place.pace
    assert isinstance(pace, OwnPace)
    return pace


def pull(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """full parameters as they are now: n - n/N elements read."""
    p = number_of(action)
    full = run.workspace.full(p)
    _of(run).pull(p, full)
    return (run.views.page(run.place.pages[p].page, full),)


def push(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """This rank's gradient, n - n/N elements, into the shards of all."""
    (gradient,), (mean, scale) = taken, read

    def change(
        master: Any, gradient: Any, slots: Any, segments: Segments, step: int, weight: float | None, lr: float
    ) -> None:
        factor = scale.factor if weight is None else 1.0 / (weight * run.scaler.value)
        move(run, master, gradient, slots, segments, step, scale.rate * lr, factor)

    _of(run).push(number_of(action), gradient.at(0), mean.shared, change)
    return (True,)


def tick(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    _of(run).tick()
    return ()


def mix(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    _of(run).mix(number_of(action), run.step + 1)
    return ()


OPERATIONS.update({"PULL": pull, "ALONE": alone, "PUSH": push, "TICK": tick, "MIX": mix})
