"""The context of the operations in one run of a program, and the search for NaN and Inf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdpx.comm.communicator import Communicator
from fsdpx.comm.guarded import grouped
from fsdpx.comm.mesh import REPLICA
from fsdpx.engine.workspace import Views, Workspace
from fsdpx.errors import ConfigError, NumericsError
from fsdpx.layout.units import Unit
from fsdpx.nn.cache import Cache
from fsdpx.nn.layer import Env, time_of
from fsdpx.program import KINDS, Action, Outer, Stage
from fsdpx.state.exchange import Exchange
from fsdpx.state.feed import Feed, Microbatch
from fsdpx.state.offload import Disk
from fsdpx.state.placement import Placement
from fsdpx.state.state import Scaler, TrainState
from fsdpx.state.ties import Tie
from fsdpx.state.transfer import Transfer

__all__ = [
    "Operation", "ProgramRun", "Values", "Worlds", "demand_alike", "demand_finite", "microbatch_of", "number_of",
    "words",
]  # fmt: skip

def demand_finite(placement: Placement, array: Any, what: str, action: Action | None = None) -> None:
    """NumericsError naming rank, tensor, action and the first bad element, if there is one."""
    xp = placement.xp
    if placement.imaginary or array.dtype.kind not in "fV" or bool(xp.isfinite(array).all()):
        return
    bad = xp.asarray(~xp.isfinite(array)).reshape(-1)
    first = int(xp.argmax(bad))
    value = float(array.reshape(-1)[first])
    where = f" in action {action}" if action is not None else ""
    raise NumericsError(
        f"rank {placement.axes.world.rank}: {what} has {int(bad.sum())} of {bad.size} elements NaN or Inf{where}, "
        f"the first is {value} at flat index {first}"
    )


Values = tuple[Any, ...]


class Worlds:
    """The environment that layers see, one `Env` for the model and one per node, made once: only the moment moves, and
    the time where sequences may be cut."""

    def __init__(self, state: TrainState) -> None:
        place, self.seed, self.moment = state.placement, state.seed, state.moment
        self._root = Env(place.xp, place.axes, state.random, recompute=place.options.recompute.cores)
        self._units, self._made = place.layout.units, dict[tuple[bool, bool], tuple[Env, list[list[Env]]]]()

    def of(
        self, training: bool, recomputing: bool, inputs: Sequence[Any], cache: Cache | None = None
    ) -> tuple[Env, list[list[Env]]]:
        """The environment of the model as a whole, and those of the nodes of each unit.

        recomputing: the forward is made again for backward. inputs: the arrays that the model gets."""
        time = time_of(inputs) if self._root.mesh.tensor.size > 1 else None
        if time != self._root.time or cache is not self._root.cache:
            self._root = replace(self._root, time=time, cache=cache)
            self._made.clear()
        if (training, recomputing) not in self._made:
            root = replace(self._root, training=training, recomputing=recomputing)
            self._made[training, recomputing] = root, [[root.at(n.path) for n in u.nodes] for u in self._units]
        return self._made[training, recomputing]


@dataclass
class ProgramRun:
    """place: what is fixed. feed: what this run was given. units: of the layout, as they run. ties: by their first
    page. step, scaler: number of updates
    made, and the loss scale, as they were when it began. issue: takes transfers that no slot holds, and the action that
    began them; the run waits for them at its end."""

    place: Placement
    feed: Feed
    workspace: Workspace
    views: Views
    worlds: Worlds
    units: Sequence[Unit]
    ties: dict[int, Tie]
    step: int
    scaler: Scaler
    issue: Callable[[Action, Transfer], None]

    @property
    def stage(self) -> Stage:
        """The model as the program sees it."""
        return self.workspace.program.stage

    @property
    def updates(self) -> bool:
        """Whether the program ends with an update of parameters."""
        return KINDS[self.workspace.program.kind].updates

    @property
    def disk(self) -> Disk:
        """Where records lie, in a program that has some."""
        assert self.workspace.state.disk is not None
        return self.workspace.state.disk

    @property
    def together(self) -> Communicator:
        """The ranks whose losses and gradients are one: all of them where nothing is trained."""
        axes = self.place.axes
        return axes.world if self.workspace.program.kind == "evaluate" else axes.group

    @property
    def outer(self) -> Outer:
        """The outer step in which replicas that train by themselves meet."""
        assert self.place.rounds is not None
        return self.place.rounds.at(self.step + 1)

    @property
    def exchange(self) -> Exchange:
        """The state that ranks at their own speed have in common."""
        assert self.workspace.state.exchange is not None
        return self.workspace.state.exchange

    def batch(self, action: Action) -> Microbatch | None:
        """The microbatch that an action is about; None if this rank has no samples in it."""
        return self.feed.batch[microbatch_of(action)]

    def worlds_at(self, batch: Microbatch, recomputing: bool = False) -> tuple[Env, list[list[Env]]]:
        """The world at this microbatch, as the loss sees it, and as each node of each unit does."""
        self.worlds.moment.step, self.worlds.moment.row = self.step, batch.row + self.place.first_sample(batch)
        return self.worlds.of(self.feed.training, recomputing, batch.inputs, self.feed.cache)


Operation = Callable[[ProgramRun, Action, Values, Values, Values], Values]
"""(run, action, taken, read, added) -> values given, then values added into, all in the order of the table."""


def microbatch_of(action: Action) -> int:
    assert action.mb is not None
    return action.mb


def number_of(action: Action) -> int:
    """The number of the unit, page or edge that an action works on."""
    assert action.unit is not None
    return action.unit


def demand_alike(run: ProgramRun, comm: Communicator, rows: list[list[float]], names: Mapping[int, str]) -> None:
    """ConfigError on all ranks of `comm` where some say otherwise of this step. rows: what each of them told, in their
    order. names: of the numbers there that must be alike."""
    if len(rows) == 1 or run.place.imaginary:
        return
    for at, name in names.items():
        first = rows[0][at]
        if any(row[at] != first for row in rows) and len({*(values := [repr(row[at]) for row in rows])}) > 1:
            axes = run.place.axes
            ranks = range(axes.world.size) if comm is axes.world else axes.mesh.line(axes.coordinates, REPLICA)
            raise ConfigError(
                f"ranks differ in the {name} of step {run.step + 1}: {grouped(dict(zip(ranks, values, strict=True)))}. "
                "A schedule is a function of the step alone, which gives all ranks the same number; it must not ask "
                "for the rank, the clock or chance"
            )


def words(run: ProgramRun, action: Action) -> str:
    """An action and its page as text, for errors; made once."""
    known = run.workspace.words
    if action not in known:
        known[action] = f"{action} {run.place.name(number_of(action))}"
    return known[action]
