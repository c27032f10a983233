"""The engine of one rank, as plain data: everything that the operations of a program work on."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx.array.arena import Arena
from fsdpx.array.random import Moment, Random
from fsdpx.comm.codecs import Codec
from fsdpx.comm.counted import Counters
from fsdpx.comm.fake import FakeCommunicator
from fsdpx.comm.mesh import Axes, connect
from fsdpx.comm.poker import Poker
from fsdpx.config import Precision, Sharding
from fsdpx.engine.views import Views
from fsdpx.layout.tree import Node, Stack, chunks_of, nodes_of
from fsdpx.layout.units import Layout
from fsdpx.nn.layer import Env, join
from fsdpx.nn.sort import Sorted, shapes
from fsdpx.program import Action, Program, Stage
from fsdpx.state.pages import PageState
from fsdpx.state.pipe import Pipe
from fsdpx.state.scaler import Scaler
from fsdpx.state.ties import Tie
from fsdpx.state.tuning import Tuning
from fsdpx.trainer.recompute import Recompute

__all__ = ["PROGRESS", "Clock", "Engine", "Microbatch", "Options"]

PROGRESS = "(moving transfers on)"
"""The row of the clock beside those of the verbs."""


@dataclass(frozen=True)
class Microbatch:
    """One forward's worth of this rank's batch. row: number of its first sample in the global batch."""

    inputs: tuple[Any, ...]
    target: Any
    row: int


@dataclass(frozen=True)
class Options:
    """What a step may be asked for beside its placement.

    clip_norm: largest global gradient norm. chunks: number of equal pieces of the global batch whose gradients are
    added in one fixed tree. check_finite: look for NaN and Inf in every unit. schedule, recompute: in words, for ranks
    to agree on.
    """

    seed: int = 0
    clip_norm: float | None = None
    chunks: int | None = None
    check_finite: bool = False
    schedule: str | None = None
    recompute: str | None = None


@dataclass
class Clock:
    """rows: by verb, the seconds spent in its actions, those waited for transfers that they were the first to need, and
    how many there were. Moving transfers on between actions is a row of its own. flown: by mesh axis, the seconds that
    transfers were under way, and those of them in which this rank did nothing else."""

    timeline: list[tuple[Action, float, float]] | None = None  # (action, start, end) of all, while somebody wants it
    rows: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0]))
    flown: dict[str, tuple[float, float]] = field(default_factory=dict)
    start: float = field(default_factory=perf_counter)

    def land(self, axis: str, seconds: float, busy: float) -> None:
        before = self.flown.get(axis, (0.0, 0.0))
        self.flown[axis] = (before[0] + seconds, before[1] + busy)

    def add(self, op: str, spent: float, waited: float) -> None:
        row = self.rows[op]
        row[0] += spent
        row[1] += waited
        row[2] += 1


@dataclass
class Engine:
    """store: slot -> value, between actions and between programs. steps: updates made so far.

    stages: what each rank of the pipe sees. model: sorted, as this line of the tensor axis runs it. output_dim: dim of
    the model's output that is cut over the tensor axis. ties: gradients to be added up with other ranks, by page.
    """

    xp: Any
    model: Sorted
    layout: Layout
    stages: tuple[Stage, ...]
    axes: Axes
    counters: Counters
    arena: Arena
    sharding: Sharding
    precision: Precision
    dtype: Any  # of parameters, gradients and activations
    wire: Any  # of parameters on their way, None if the same
    codec: Codec
    optimizer: Any
    loss: Any
    options: Options
    pages: dict[int, PageState]
    state: dict[str, Any]
    scaler: Scaler
    tuning: Tuning
    pipe: Pipe
    recompute: Recompute
    output_dim: int | None = None
    ties: dict[int, Tie] = field(default_factory=dict)
    segments: dict[int, Any] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    batch: list[Microbatch | None] = field(default_factory=list)
    views: Views | None = None
    training: bool = True
    kinds: set[str] = field(default_factory=set)  # of programs that ran since the last update, alike on all ranks
    adding: str = ""  # what the gradients in the store came from: "accumulate" or "backward"
    rows: int = 0  # samples of the global batch since the last update
    moment: Moment = field(default_factory=Moment)
    steps: int = 0
    clock: Clock = field(default_factory=Clock)
    ran: Program | None = None  # the last one
    poker: Poker | None = None  # moves transfers on during actions, not only between them
    flying: list[tuple[str, Any]] = field(default_factory=list)  # (mesh axis, transfer) to move on
    sends: list[Any] = field(default_factory=list)  # messages of this program that nobody here waits for
    observers: list[Callable[[Action], None]] = field(default_factory=list)  # called after every action
    commit: Callable[[Any, Any], None] | None = None  # called with a step's mean loss and scale before it updates

    @cached_property
    def stage(self) -> Stage:
        return self.stages[self.axes.pipe.rank]

    @property
    def keep_full(self) -> bool:
        """Full parameters stay until the update: asked for, or the shard is the whole."""
        return self.sharding.full_params == "step" or self.axes.shard.size == 1

    @property
    def reduce_each(self) -> bool:
        """Each microbatch's gradients are reduced at once. Not with `chunks`: partial sums cost less whole than cut."""
        return self.sharding.full_grads == "use" and self.axes.shard.size > 1 and self.options.chunks is None

    @property
    def whole_grads(self) -> bool:
        return self.sharding.full_grads == "step" or self.axes.shard.size == 1

    @cached_property
    def chunks(self) -> range:
        """The chunks of this rank (empty without `chunks`)."""
        count = self.options.chunks or 0
        return chunks_of(count, self.axes.data.rank, self.axes.data.size)

    @cached_property
    def copies(self) -> int:
        """Partial gradients of a page that are alive at once: one, or with chunks the depth of this rank's tree."""
        if self.options.chunks is None:
            return 1
        stack: Stack[None] = Stack(self.options.chunks, lambda a, b: None)
        most = 1
        for c in self.chunks:
            most = max(most, len(stack.entries) + 1)
            stack.push(Node(0, c), None)
        return most

    @property
    def product_threads(self) -> int:
        """Products cut among threads end in other last bits; with chunks, bits do not tell how many there were."""
        return self.tuning.threads if self.options.chunks is None else 1

    @property
    def env(self) -> Env:
        return self._worlds[self.training, False][0]

    def envs(self, unit: int, again: bool = False) -> list[Env]:
        """One world per node, made once: what moves in them is the moment. again: this is a recompute."""
        return self._worlds[self.training, again][1][unit]

    @cached_property
    def _worlds(self) -> dict[tuple[bool, bool], tuple[Env, list[list[Env]]]]:
        random, cores = Random(self.options.seed, moment=self.moment), self.recompute.cores
        made = {}
        for training, again in ((True, False), (False, False), (True, True)):
            root = Env(self.xp, self.axes, random, training, recompute=cores, again=again)
            made[training, again] = (root, [[root.at(n.path) for n in u.nodes] for u in self.layout.units])
        return made

    def reseed(self) -> None:
        """After a change of `options.seed`: the worlds of layers hold random numbers of the seed before."""
        vars(self).pop("_worlds", None)

    def nodes(self, ranks: range) -> tuple[Node, ...]:
        """What the chunks of consecutive data ranks add up to."""
        assert self.options.chunks is not None
        first = chunks_of(self.options.chunks, ranks[0], self.axes.data.size)
        last = chunks_of(self.options.chunks, ranks[-1], self.axes.data.size)
        return nodes_of(self.options.chunks, range(first.start, last.stop))

    def forget(self) -> None:
        """After an error: what the broken program left in slots is lost, gradients included; parameters are whole."""
        self.adding = ""
        self.kinds.clear()
        for slot in [slot for slot in self.store if not slot.startswith("shard")]:
            del self.store[slot]

    def clear(self) -> None:
        """Let go of every buffer."""
        self.store.clear()
        self.pages.clear()
        self.flying.clear()
        self.sends.clear()
        self.views = None

    def close(self) -> None:
        """Free the memory that ranks share and the communicators that were made for this engine. Collective."""
        self.clear()
        self.arena.close()
        for tie in self.ties.values():
            if tie.comm is not None:
                tie.comm.close()
        self.axes.close()

    def drop_local(self) -> None:
        """Give back whole gradients that `no_sync` asked for, and the views that would keep them."""
        local = [f"local{p}" for p in self.stage.trained if f"local{p}" in self.arena.kept]
        for name in local:
            self.arena.drop(name)
        if local:
            self.views = None

    @property
    def pipe_home(self) -> int:
        """The rank of the pipe where the outputs are."""
        return self.layout.spread.home[-1]

    @cached_property
    def state_home(self) -> dict[str, int]:
        """The rank of the pipe that moves each running statistic."""
        spread, layout = self.layout.spread, self.layout
        users = ((join(n.path, local), i) for i, n in enumerate(self.model.nodes) for local in n.layer.specs())
        names = ((layout.canonical(name), i) for name, i in users)
        return {name: spread.rank_of(i) for name, i in names if name in layout.state}

    def name(self, page: int) -> str:
        """A page in words, for errors: the names it holds."""
        return self._names[page]

    @cached_property
    def _names(self) -> list[str]:
        ends = [(page.fields[0].name, page.fields[-1].name) for page in self.layout.pages]
        return [first if first == last else f"{first}..{last}" for first, last in ends]

    def everyone(self, values: list[float], what: str) -> list[list[float]]:
        """A few float64 numbers of every rank, in rank order, on every rank."""
        comm, n = self.axes.world, len(values)
        if comm.size == 1:
            return [values]
        table = np.zeros(n * comm.size)
        table[comm.rank * n : (comm.rank + 1) * n] = values
        comm.all_gather(table[comm.rank * n : (comm.rank + 1) * n], table, what=what).wait()
        return table.reshape(comm.size, n).tolist()

    @property
    def counts_loss(self) -> bool:
        """Whether the loss found here counts: ranks of one tensor line find the same, unless each finds a part."""
        return getattr(self.loss, "partial", False) or self.axes.tensor.rank == 0

    def message(self, value: int, batch: Microbatch, tensor: int | None = None) -> Any:
        """Shape and dtype of a value of a microbatch, as a shape-only array; on rank `tensor` of the tensor axis."""
        rank = self.axes.tensor.rank if tensor is None else tensor
        key = (rank, *((tuple(a.shape), str(a.dtype)) for a in batch.inputs))
        if key not in self._shapes:
            from fsdpx.array.shapes import ShapeArray

            inputs = [ShapeArray(tuple(a.shape), a.dtype) for a in batch.inputs]
            self._shapes[key] = shapes(self.model, inputs, self.dtype, axes=self.imagined(rank))
        return self._shapes[key][value]

    def imagined(self, tensor: int) -> Axes:
        """These axes at a rank of the tensor axis, without anybody else on them: layers can be asked for shapes."""
        if tensor not in self._imagined:
            mesh, place = self.axes.mesh, self.axes.coordinates._replace(tensor=tensor)
            self._imagined[tensor] = connect(mesh, FakeCommunicator(mesh.rank(place), mesh.size))
        return self._imagined[tensor]

    @cached_property
    def _imagined(self) -> dict[int, Axes]:
        return {}

    @cached_property
    def _shapes(self) -> dict[Any, list[Any]]:
        return {}
