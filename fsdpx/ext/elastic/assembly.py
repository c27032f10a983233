"""Assemble the ranks of an elastic run: choose which ranks train, on which mesh, and from which in-memory state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base.config import Sharding
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.checkpoint.local_shards import iterate_codec_reads_and_zero_missing, iterate_local_state_shards
from fsdpx.core.checkpoint.scalars import CheckpointScalars, collect_checkpoint_scalars, restore_scalars
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator, SurvivorCommunicator
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.comm.plain_codec import MAX_PACKED_BYTES, pack, unpack
from fsdpx.core.comm.watched import start_watchdog_if_possible
from fsdpx.core.state.allocate import initialize_parameters
from fsdpx.core.state.ledger import list_checkpoint_tensors
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.tuning import Tuning
from fsdpx.core.trainer.distribute import make_session
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.core.trainer.session import Commit, Session
from fsdpx.errors import CommError, ConfigError, MeshError, StateLost
from fsdpx.ext.elastic.config import ElasticConfig
from fsdpx.ext.elastic.copies import StateCopies, StateGeneration
from fsdpx.ext.elastic.reshard import (
    ShardDescriptor,
    describe_missing_elements,
    describe_shard,
    find_uncovered_ranges_of_tensor,
    reshard_arrays,
)
from fsdpx.ext.watch.watchdog import Watchdog

__all__ = [
    "Assembler", "Assembly", "Member", "choose_training_ranks", "find_largest_mesh_for_ranks", "recv_object_from_rank",
    "send_value_to_ranks",
]  # fmt: skip


def find_largest_mesh_for_ranks(mesh: Mesh | None, strategy: str | Sharding, ranks: int) -> Mesh:
    """Return the largest mesh that fits on `ranks` ranks. Pipeline and tensor axes keep their widths, and data axes
    become as wide as possible.

    If the user specified the widths of all axes, the number of replicas may be reduced. Raises MeshError if no mesh
    fits."""
    asked = mesh or Mesh()
    widths = range(asked.replica or 1, 0, -1)
    tries = [asked, *(replace(asked, replica=width) for width in widths)]
    for size in range(ranks, 0, -1):
        for one in tries:
            try:
                return one.fill_from_strategy(strategy, size)
            except ConfigError:
                continue
    raise MeshError(f"mesh {asked} with strategy {strategy!r}: {ranks} ranks are left, which is too few for it")


def choose_training_ranks(training_ranks: Sequence[int | None], count: int) -> list[int]:
    """Return the `count` ranks that train from now on. Ranks that trained before come first, in their old order,
    because they hold the state; ranks that were idle follow.

    `training_ranks` has one element for each rank: its index among the ranks that trained before, or None if it was
    idle."""
    order = sorted(enumerate(training_ranks), key=lambda pair: (pair[1] is None, pair[1] or 0, pair[0]))
    return [rank for rank, _ in order[:count]]


def send_value_to_ranks(comm: Communicator, listeners: Sequence[int], value: Any) -> None:
    """Send a Python value to the ranks `listeners`, each of which must call `recv_object_from_rank`.

    Each of these ranks gets two messages: the size and the data."""
    if not listeners:
        return
    data = np.frombuffer(pack(value), np.uint8)
    size = np.array([data.size])
    handles = [comm.send(part, rank, what="the result") for rank in listeners for part in (size, data)]
    for handle in handles:
        handle.wait()


def recv_object_from_rank(comm: Communicator, source: int) -> Any:
    """Receive the Python value that rank `source` sends with `send_value_to_ranks`."""
    size = np.empty(1, np.int64)
    comm.recv(size, source, what="the result").wait()
    if not 0 <= size[0] <= MAX_PACKED_BYTES:
        raise CommError(
            f"rank {source} announced a result of {size[0]} bytes, but a message has at most {MAX_PACKED_BYTES}"
        )
    data = np.empty(int(size[0]), np.uint8)
    comm.recv(data, source, what="the result").wait()
    return unpack(data)


class GenerationSummary(NamedTuple):
    """Summary of a state snapshot that a rank holds in memory. The summary is sent to the other ranks.

    Attributes
    ----------
    step : number of the step after which the snapshot was taken
    scalars : step count, loss scale and other scalars, as JSON
    parts : which elements of which tensors the snapshot holds
    """

    step: int
    scalars: str
    parts: list[ShardDescriptor]


class Member(NamedTuple):
    """Information that a rank sends about itself to all other ranks during a recovery.

    Attributes
    ----------
    initial_rank : rank of this process when the job began
    training_rank : index of this rank among the ranks that train; None if it is idle
    fresh : whether the rank can restart from step 0, with the initial parameters
    generations : the snapshots of the state that the rank holds in memory
    """

    initial_rank: int
    training_rank: int | None
    fresh: bool
    generations: list[GenerationSummary]


@dataclass(frozen=True)
class Assembly:
    """The ranks of an elastic run after a start or recovery, with the training session that they share.

    Attributes
    ----------
    control : communicator of all living ranks
    initial_ranks : for each living rank, its rank when the job began
    training : the ranks that train
    group : communicator of the training ranks; None on an idle rank
    session : the training session of this rank; on an idle rank, it holds no data
    copies : manages the copies of the state that ranks keep in memory for each other
    step : number of the step that training continues from; 0 for initial parameters
    watchdog : the watchdog that finds hanging ranks, if any
    copied : whether the copies of the state after step `step` have arrived on this rank
    """

    control: SurvivorCommunicator
    initial_ranks: list[int]
    training: list[int]
    group: Communicator | None
    session: Session
    copies: StateCopies
    step: int
    watchdog: Watchdog | None
    copied: bool = False

    @property
    def is_training(self) -> bool:
        return self.group is not None

    def close(self) -> None:
        """Free communicators and buffers of an assembly that is no longer used. Collective over the living ranks."""
        self.copies.close()
        self.session.close()
        if self.group is not None:
            self.group.close()


@dataclass(frozen=True)
class Assembler:
    """Builds an `Assembly` at the start of a run and after each change of ranks, always with the same settings.

    `commit` is called before each update (see `StepInputs`)."""

    recipe: Recipe
    tuning: Tuning
    elastic: ElasticConfig
    commit: Commit

    def build_initial_assembly(self, control: SurvivorCommunicator, ranks: int | None) -> Assembly:
        """Return the assembly (the ranks and their training session) for the start of a run, with initial parameters.
        Collective over `control`."""
        everyone = [Member(rank, None, True, []) for rank in range(control.size)]
        return self._build_assembly(control, everyone, ranks, initial=True, timeout=None)

    def rebuild_after_change(
        self, control: SurvivorCommunicator, member: Member, generations: Sequence[StateGeneration], ranks: int | None,
        report: Callable[[str], None], timeout: float | None,
    ) -> Assembly:  # fmt: skip
        """Return the assembly after a change of ranks, with the newest complete state that the surviving ranks together
        hold. Collective.

        Raises StateLost on all ranks if no complete state is left. On return, ranks again hold copies of each other's
        state. `report` is called with messages about the progress. `timeout` is the timeout in seconds for the new
        watchdog. Pass the timeout of the previous watchdog, not the one of `control`, which is longer."""
        mine = [
            GenerationSummary(g.step, g.scalars.to_json(), [describe_shard(part) for part in g.parts])
            for g in generations
        ]
        everyone: list[Member] = control.all_gather_value(member._replace(generations=mine))
        report("recovery: all ranks have said what they hold")
        built = self._build_assembly(control, everyone, ranks, initial=False, timeout=timeout)
        report("recovery: the new trainer is there")
        state = built.session.state
        newest = _find_newest_step_held_by_ranks(state.placement, everyone)
        if newest is None:
            initialize_parameters(state)
            return built
        step, text = newest
        have = [part for g in generations if g.step == step for part in g.parts]
        complete = _find_tensors_complete_over_ranks(everyone, step)
        arriving = list(iterate_codec_reads_and_zero_missing(state, complete)) if built.is_training else []
        reshard_arrays(
            control,
            have,
            [*iterate_local_state_shards(state), *(part for part, _ in arriving)] if built.is_training else [],
        )
        for part, target in arriving:
            if target is not None:
                target += part.array
        report("recovery: state has moved")
        restore_scalars(state, CheckpointScalars.from_json(text, f"the state of step {step}"))
        if built.copies.needed:
            built.copies.start_copying_to_buddies(collect_checkpoint_scalars(state, None, None), step)
            built.copies.wait_for_copies()
            report("recovery: there are copies again")
        return replace(built, step=step, copied=built.copies.needed)

    def _build_assembly(
        self, control: SurvivorCommunicator, everyone: list[Member], ranks: int | None, initial: bool,
        timeout: float | None,
    ) -> Assembly:  # fmt: skip
        where, most = self.recipe.distribution, control.size if ranks is None else min(ranks, control.size)
        mesh = find_largest_mesh_for_ranks(where.mesh, where.strategy_within_replica(most), most)
        training = choose_training_ranks([one.training_rank for one in everyone], mesh.size)
        trains = control.rank in training
        group = control.split(0 if trains else None, training.index(control.rank) if trains else 0)
        watchdog = start_watchdog_if_possible(control, *([] if group is None else [group]), timeout=timeout)
        recorder = None if watchdog is None else watchdog.record
        recipe, world = self.recipe.with_mesh(mesh), group
        if world is None:
            recipe, world, initial = recipe.without_data(), FakeCommunicator(0, mesh.size), True
        options = {"initial": initial, "commit": self.commit, "watch": lambda axes: recorder}
        session = make_session(recipe, world, self.tuning, **options)
        copies = StateCopies(control.subgroup(range(control.size)), session.state, self.elastic.copies, trains)
        initial_ranks = [one.initial_rank for one in everyone]
        return Assembly(control, initial_ranks, training, group, session, copies, 0, watchdog)


def _find_tensors_complete_over_ranks(everyone: list[Member], step: int) -> dict[str, tuple[int, ...]]:
    """Find the tensors that are complete if the ranks combine the snapshots that they took after step `step`. Return
    them as a dict that maps names to shapes."""
    parts: dict[str, list[ShardDescriptor]] = {}
    for part in (part for one in everyone for g in one.generations if g.step == step for part in g.parts):
        parts.setdefault(part.name, []).append(part)
    return {
        n: some[0].shape
        for n, some in parts.items()
        if not find_uncovered_ranges_of_tensor(some, math.prod(some[0].shape))[0].size
    }


def _find_newest_step_held_by_ranks(placement: Placement, everyone: list[Member]) -> tuple[int, str] | None:
    """Return the newest step for which the ranks together hold the complete state, and the scalars of that state as
    JSON.

    Returns None if no complete state is left but every rank can start again from the initial parameters. Raises
    StateLost if some rank cannot start again."""
    wanted = list_checkpoint_tensors(placement)
    lost: dict[int, list[str]] = {}
    for step in sorted({g.step for one in everyone for g in one.generations}, reverse=True):
        found = [g for one in everyone for g in one.generations if g.step == step]
        lost[step] = describe_missing_elements([g.parts for g in found], wanted)
        if not lost[step]:
            return step, found[0].scalars
    if all(one.fresh for one in everyone):
        return None
    listed = {step: ", ".join(n[:3]) + (f" and {len(n) - 3} more" if len(n) > 3 else "") for step, n in lost.items()}
    what = "; ".join(f"of step {step}: {names}" for step, names in listed.items()) or "no rank has any"
    raise StateLost(
        f"the remaining ranks cannot continue from memory, because parts of the state were lost ({what}). Start "
        "again from the last checkpoint, or keep more copies: elastic=fsdpx.ElasticConfig(copies=2)"
    )
