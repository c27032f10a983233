"""Local SGD and DiLoCo: each replica trains on its own for a round of steps, and then a step of an outer optimizer
combines the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array.sums import sum_exactly
from fsdpx.core.base.config import PRESETS, Sharding, convert_fields_to_python_numbers
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.core.base.option_names import CodecName, Strategy
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import COMPLETED, split_evenly
from fsdpx.core.comm.mesh import Mesh, MeshCoordinates
from fsdpx.core.compression import Codec
from fsdpx.core.compression import make_gradient_codec as codec_of
from fsdpx.core.engine.operations import OPERATIONS, preserving_frozen_parameters
from fsdpx.core.engine.run import (
    ProgramRun,
    Values,
    format_action_label,
    get_action_target,
    require_same_scheduled_values,
)
from fsdpx.core.program import SLOTS, VERBS, Action, ScratchBuffer, Slot, SlotKind, SyncRules, Verb, VerbTransfer
from fsdpx.core.state.flat_parameters import ElementRange, ShardedPage
from fsdpx.core.state.ledger import LEDGER_KINDS, LedgerKey, LedgerKind, LedgerRow, add_replica_prefix
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.sync_policy import SyncChoice, SyncPolicy, set_arrays_returning_undo
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.optim import ShardSegments, get_learning_rate
from fsdpx.optim.optimizer import SlotFormat, get_scheduled_lr_and_average_weight, get_slot_formats, update_parameters
from fsdpx.optim.sgd import SGD

__all__ = ["LocalSGD", "OuterStep", "RoundSchedule"]

SLOTS.update({
    "outer": SlotKind("outer", "outer parameters"),
    "velocity": SlotKind("velocity", "outer optimizer"),
    "delta": SlotKind("delta", "gradients"),
    "next": SlotKind("next", "outer parameters"),
    # "trained" holds one number for each fragment (set of pages that are sent together). The number is the loss weight
    # of the data that this replica has trained on since it last sent the fragment
    "trained": SlotKind("trained", "control"),
    "share": SlotKind("share", "control"),
    "parcel": SlotKind("parcel", "scratch", in_slab=True, raw=True),
})  # fmt: skip

# fmt: off
VERBS.update({
    "SHARE": Verb(reads=("mean", "trained"), gives=("share",), about="",
                  lane="world", moves=(VerbTransfer("world", "all_gather", "numbers", "control"),)),
    "DELTA": Verb(reads=("shard:page", "outer:page", "share"), adds=("memory:coded",), gives=("delta:page",),
                  about="page", scratch=(ScratchBuffer("parcel", "delta:page"),),
                  lane="replica", moves=(VerbTransfer("replica", "reduce_scatter", "shard", "grad"),)),
    "OUTER": Verb(takes=("delta:page",), adds=("outer:page", "velocity:page"), gives=("next:page",), about="page",
                  lane="replica", moves=(VerbTransfer("replica", "all_gather", "shard", "grad"),)),
    "ADOPT": Verb(takes=("next:page",), adds=("shard:page",), about="page"),
})
# fmt: on


@dataclass(frozen=True)
class OuterStep:
    """The sets of pages (flat parameter buffers) that replicas communicate in one step of local SGD.

    An outer gradient is the change of a replica's parameters during a round. The outer optimizer applies the mean
    outer gradient to the outer parameters, which all replicas have in common.

    Attributes
    ----------
    deltas : pages whose outer gradients are sent in this step
    steps : pages that the outer optimizer updates in this step, because their outer gradients have arrived
    adopts : pages whose new outer parameters have arrived; the replica continues from these parameters
    summing : pages whose outer gradients are still being transferred when the step begins
    coming : pages whose new outer parameters are still being transferred when the step begins
    """

    deltas: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    adopts: frozenset[int] = frozenset()
    summing: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()

    @property
    def communication_rules(self) -> SyncRules:
        """Rules that insert the communication of this outer step into the program (list of actions) of a training
        step."""
        summing, coming = (self.summing | self.deltas) - self.steps, (self.coming | self.steps) - self.adopts
        share = ("SHARE",) if self.deltas else ()
        return SyncRules(
            share, (("DELTA", self.deltas),), (("OUTER", self.steps), ("ADOPT", self.adopts)), ("outer", "velocity"),
            _list_slots_in_flight(self.summing, self.coming), _list_slots_in_flight(summing, coming),
            tuple(map(str.lower, share)),
        )  # fmt: skip


def _list_slots_in_flight(summing: frozenset[int], coming: frozenset[int]) -> frozenset[Slot]:
    pages = ("delta", summing), ("next", coming)
    return frozenset({Slot("trained"), *(Slot(kind, page) for kind, some in pages for page in some)})


@dataclass(frozen=True)
class RoundSchedule:
    """Schedule that determines when each page (flat parameter buffer) is synchronized within a round of local steps.

    Attributes
    ----------
    every : number of steps from one synchronization of a page to the next
    fragments : sets of pages. The pages of a set are sent together, and each set is sent at a different point of the
        round
    delay : number of steps that the transfers of a fragment may take. The outer gradient is sent during the first half
        of these steps, and the new parameters during the second half
    """

    every: int
    fragments: tuple[frozenset[int], ...]
    delay: int = 0

    @property
    def outer_gradient_delay_steps(self) -> int:
        """Number of steps that the transfer of an outer gradient may take."""
        return self.delay // 2

    def find_first_send_step(self, fragment: int) -> int:
        """Return the step after which a fragment (set of pages sent together) is sent for the first time. For the last
        fragment, this is the last step of the first round."""
        return -(-self.every * (fragment + 1) // len(self.fragments))

    def get_replica_communication(self, step: int) -> OuterStep:
        """Return what the replicas communicate in step `step`, counted from 1."""
        found: dict[str, set[int]] = {name: set() for name in OuterStep.__dataclass_fields__}
        for number, pages in enumerate(self.fragments):
            since = step - self.find_first_send_step(number)
            lag = since % self.every if since >= 0 else -1
            for name, now in (
                ("deltas", lag == 0),
                ("steps", lag == self.outer_gradient_delay_steps),
                ("adopts", lag == self.delay),
                ("summing", 0 < lag <= self.outer_gradient_delay_steps),
                ("coming", self.outer_gradient_delay_steps < lag <= self.delay),
            ):
                found[name] |= pages if now else set()
        return OuterStep(**{name: frozenset(pages) for name, pages in found.items()})

    def get_fragment(self, page: int) -> int:
        """Return the index of the fragment (set of pages sent together) that contains a page."""
        return next(number for number, pages in enumerate(self.fragments) if page in pages)

    def count_outer_steps(self, page: int, step: int) -> int:
        """Return how many updates by the outer optimizer a page (flat parameter buffer) has received by the end of
        training step `step`."""
        return (
            step - self.outer_gradient_delay_steps - self.find_first_send_step(self.get_fragment(page))
        ) // self.every + 1


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class LocalSGD(SyncChoice):
    """Local SGD (Stich 2019) and DiLoCo (Douillard et al. 2023), streamed in fragments (Douillard et al. 2025).

    Every `sync_every` steps, each replica computes its outer gradient: the outer parameters (all parameters at the
    start of the round) minus its current parameters. Then `outer_optimizer` takes one step on the outer parameters. The
    gradient of this step is the weighted mean of all outer gradients. The weight of a replica is the amount of data
    that it has trained on. All replicas continue from the new outer parameters. For P bytes of parameters on R
    replicas, a rank sends 2 P (R - 1) / R bytes per round. Plain data parallelism sends this many bytes in every step.

    Parameters
    ----------
    sync_every : number of steps in a round, at least 1
    outer_optimizer : optimizer of the outer step; `optim.SGD(lr=1.0)` sets the parameters to the mean over all
        replicas. Its state is sharded over the replicas
    fragments : number of parts into which the model is divided; each part is sent at a different point of the round
    delay : number of steps that the transfers of a fragment may take while training continues, less than `sync_every`.
        The outer gradient is sent during the first half of these steps, and the new parameters during the second half
    mix : number in [0, 1). After an outer step, a replica continues from `mix` times its own parameters plus 1 - `mix`
        times the new outer parameters
    compression : codec of outer gradients, as in `fsdpx.distribute`
    inner_strategy : strategy of the ranks within one replica (default: "ddp", or "fsdp" if the mesh shards a replica)
    """

    excluded: ClassVar[str] = "local training"
    replicas: ClassVar[bool] = True
    sync_every: int = 50
    outer_optimizer: Any = field(default_factory=lambda: SGD(lr=0.7, momentum=0.9, nesterov=True))
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    compression: CodecName | Codec | None = None
    inner_strategy: Strategy | Sharding | None = None

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        self._require_int("sync_every", 1, None, "a number of steps, 1 or more")
        self._require_int(
            "fragments", 1, self.sync_every, f"a number from 1 to the steps of a round, sync_every={self.sync_every}"
        )
        self._require_int(
            "delay", 0, self.sync_every - 1, f"a number of steps below those of a round, sync_every={self.sync_every}"
        )
        if not isinstance(self.mix, int | float) or isinstance(self.mix, bool) or not 0 <= self.mix < 1:
            raise ConfigError(f"LocalSGD(mix={self.mix!r}): a number in [0, 1) is needed")
        if isinstance(self.outer_optimizer, type) or not all(
            hasattr(self.outer_optimizer, name) for name in ("update", "slots", "lr")
        ):
            raise ConfigError(
                f"LocalSGD(outer_optimizer={self.outer_optimizer!r}): an optimizer is needed, such as optim.SGD(lr=1.0)"
            )
        if any(form != SlotFormat() for form in get_slot_formats(self.outer_optimizer).values()):
            raise ConfigError(
                f"LocalSGD(outer_optimizer={self.outer_optimizer!r}): its state must be as large as the parameters, "
                "as SGD's is"
            )
        self.outer_codec.check("float32")
        named = isinstance(self.inner_strategy, str) and self.inner_strategy in PRESETS
        if not (named or self.inner_strategy is None or isinstance(self.inner_strategy, Sharding)):
            raise ConfigError(
                f"LocalSGD(inner_strategy={self.inner_strategy!r}): what the ranks of one replica do, such as 'fsdp'"
            )

    @property
    def description(self) -> str:
        """String with the values of all options except the outer optimizer and the codec."""
        return f"sync_every={self.sync_every}, fragments={self.fragments}, delay={self.delay}, mix={self.mix}"

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """A tuple whose only element is the outer optimizer."""
        return (self.outer_optimizer,)

    @property
    def outer_codec(self) -> Codec:
        """Codec that compresses outer gradients."""
        return codec_of(self.compression, "float32", "float32")

    def strategy_within_replica(self, mesh: Mesh | None, ranks: int) -> str | Sharding:
        """Return the strategy of the ranks within one replica.

        Parameters
        ----------
        mesh : the mesh that the user gave; None if the strategy determines it
        ranks : number of all ranks

        Returns
        -------
        str or Sharding : `inner_strategy`, or its default
        """
        if self.inner_strategy is not None:
            return self.inner_strategy
        return "ddp" if mesh is None or mesh.fill_from_strategy("ddp", ranks).shard == 1 else "fsdp"

    def make_policy(self, placement: Placement) -> SyncPolicy:
        """Return the policy that tells the engine what the replicas synchronize, and when.

        Parameters
        ----------
        placement : the placement of this rank

        Returns
        -------
        SyncPolicy : a policy with rounds of `sync_every` steps
        """
        return LocalSyncPolicy(placement, self)

    def _require_int(self, name: str, minimum: int, maximum: int | None, wanted: str) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
            raise ConfigError(f"LocalSGD({name}={value!r}): {wanted}")


LEDGER_KINDS.update({
    "outer": LedgerKind("outer parameters", "outer", saved=True),
    "velocity": LedgerKind("outer optimizer", "velocity", saved=True, prefix="outer."),
    "delta": LedgerKind("gradients"),
    "sum": LedgerKind("gradients", saved=True, prefix="delta"),
    "parcel": LedgerKind("gradients"),
})  # fmt: skip
MEAN, SHARE, TRAINED = Slot("mean"), Slot("share"), Slot("trained")


class LocalSyncPolicy(SyncPolicy):
    """Synchronization policy of local SGD: replicas train independently, and synchronize each page (flat parameter
    buffer) once per round."""

    is_synchronous, owner = False, "replica"
    lasting = frozenset({"outer", "velocity", "trained", "delta", "next"})

    def __init__(self, placement: Placement, choice: LocalSGD) -> None:
        self.placement, self.choice = placement, choice
        self.outer, self.about = choice.outer_optimizer, f"rounds of {choice.sync_every} steps"

    @cached_property
    def round_schedule(self) -> RoundSchedule:
        """Schedule that says at which steps of a round each page (flat parameter buffer) is synchronized.

        Pages are synchronized in fragments, which are sets of pages that are sent together. Pages are assigned to
        fragments round-robin, but all copies of a tied parameter go to the same fragment."""
        choice, layout = self.choice, self.placement.layout
        first = {p: group[0] for group in layout.twins for p in group}
        trained = [page.index for page in layout.pages if page.trainable]
        turns = {p: i for i, p in enumerate(p for p in trained if first.get(p, p) == p)}
        if len(turns) < choice.fragments:
            raise ConfigError(
                f"LocalSGD(fragments={choice.fragments}): the model has {len(turns)} pages of parameters; a smaller "
                "group_bytes makes more of them"
            )
        fragments = [
            frozenset(p for p in trained if turns[first.get(p, p)] % choice.fragments == number)
            for number in range(choice.fragments)
        ]
        return RoundSchedule(choice.sync_every, tuple(fragments), choice.delay)

    def get_sync_rules(self, step: int) -> SyncRules:
        return self.round_schedule.get_replica_communication(step).communication_rules

    def count_steps_per_sync_rules(self) -> list[tuple[SyncRules, int]]:
        every = self.round_schedule.every
        steps = Counter(self.round_schedule.get_replica_communication(step) for step in range(2 * every, 3 * every))
        last = self.round_schedule.get_replica_communication(3 * every)
        return [(outer.communication_rules, steps[outer]) for outer in (*(one for one in steps if one != last), last)]

    def is_sync_step(self, step: int) -> bool:
        return bool(self.round_schedule.get_replica_communication(step).deltas)

    def get_loss(self, results: Mapping[Slot, Any]) -> float:
        found = results.get(SHARE)
        return float(results[MEAN].value if found is None else found.loss)

    def find_elements_of_outer_step(self, page: int) -> ElementRange:
        """Return the range of elements of a page (flat parameter buffer) that this rank updates in the step of the
        outer optimizer. The range lies within the rank's shard."""
        return self._find_elements_of_rank(page, self.placement.axes.coordinates)

    def _find_elements_of_rank(self, page: int, coordinates: MeshCoordinates) -> ElementRange:
        shard = self.placement.pages[page].shards[coordinates.shard]
        counts = split_evenly(shard.size, self.placement.axes.replica.size)
        start = shard.start + sum(counts[: coordinates.replica])
        return ElementRange(start, start + counts[coordinates.replica])

    @cached_property
    def segments(self) -> dict[int, ShardSegments]:
        """Dict that maps the index of a page (flat parameter buffer) to the parameters, or parts of parameters, that
        this rank updates in the outer step."""
        axes, trained = self.placement.axes, self.placement.stage.trained_pages
        alone = axes.data.size == axes.tensor.size == 1
        whole = axes.data.size == axes.world.size
        ranks = range(axes.world.size) if whole else axes.mesh.ranks_along(axes.coordinates, ("replica", "shard"))
        places = [axes.mesh.coordinates_of(rank) for rank in ranks]
        parts = {p: [self._find_elements_of_rank(p, place) for place in places] for p in trained}
        return {p: self.placement.make_local_optimizer_segments(p, axes.data, parts[p], alone) for p in trained}

    def list_policy_ledger_rows(self, page: ShardedPage) -> Iterator[LedgerRow]:
        """Yield the additional arrays that local SGD needs for a page, as rows of the ledger (the table of a rank's
        arrays).

        The outer gradient needs an array of its own only if its transfer takes longer than a step. Otherwise, it uses
        the memory of the reduced gradient."""
        place, p = self.placement, page.page.index
        dtype, replicas, part = place.formats.gradients, place.axes.replica.size, self.find_elements_of_outer_step(p)
        yield LedgerRow(LedgerKey("outer", p), dtype, page.own_range)
        for name in self.outer.slots:
            yield LedgerRow(LedgerKey("velocity", p, name), dtype, part, "data")
        inside = LedgerKey("part", p) if self.round_schedule.outer_gradient_delay_steps == 0 else None
        yield (delta := LedgerRow(LedgerKey("delta", p), dtype, page.own_range, "private", "step", inside=inside))
        if inside is None:
            yield LedgerRow(LedgerKey("sum", p), dtype, part, "data", inside=delta.key)
            if replicas > 1 and (
                nbytes := place.get_codec_route(p).replica.scratch_bytes(page.own_range.size, replicas)
            ):
                yield LedgerRow(LedgerKey("parcel", p), np.dtype(np.uint8), ElementRange(0, nbytes), "private", "step")

    def list_saved_name_prefixes(self, replicas: int | None) -> list[str]:
        width = self.placement.axes.replica.size if replicas is None else replicas
        found = [add_replica_prefix(slot, r) for r in range(width) for slot in ("", *self.placement.slot_formats)]
        found += [LEDGER_KINDS["velocity"].prefix + name for name in self.outer.slots]
        return found + [LEDGER_KINDS["sum"].prefix] * bool(self.round_schedule.outer_gradient_delay_steps)

    def on_created(self, state: TrainState) -> None:
        for p in self.placement.stage.trained_pages:
            state.store.setdefault(Slot("velocity", p), {})
        state.store[TRAINED] = [0.0] * len(self.round_schedule.fragments)

    def on_initialized(self, state: TrainState) -> None:
        for page, array in _iterate_outer_parameters(state):
            array[...] = state.ledger.get_array("master", page)

    def on_loaded(self, state: TrainState) -> None:
        """Begin a new round after loading a checkpoint: set the parameters to the outer parameters, and set the
        restored sums of outer gradients to zero."""
        for page, array in _iterate_outer_parameters(state):
            state.ledger.get_array("master", page)[...] = array
        for row, array in state.ledger.iterate_saved_rows():
            if row.key.kind == "sum":
                array[...] = 0
        state.store[TRAINED] = [0.0] * len(self.round_schedule.fragments)

    def on_step(self, state: TrainState, weight: float) -> None:
        gone = self.round_schedule.get_replica_communication(state.steps).deltas
        known = zip(state.store[TRAINED], self.round_schedule.fragments, strict=True)
        state.store[TRAINED] = [0.0 if pages & gone else before + weight for before, pages in known]

    def on_resume(self, state: TrainState, saved: Mapping[str, Any] | None) -> None:
        """Restore the transfers that were pending when the state was saved. They count as complete, because the
        checkpoint holds their results."""
        if saved is not None:
            weights = saved["weights"]
            state.store[TRAINED] = list(weights[self.placement.axes.replica.rank % len(weights)])
        outer, here = self.round_schedule.get_replica_communication(state.steps + 1), self.placement.stage.trained_pages
        state.clear_slots(["delta", "next"])
        state.store |= {Slot("delta", p): state.ledger.get_array("sum", p) for p in here if p in outer.summing}
        state.store |= {Slot("next", p): state.ledger.get_array("outer", p) for p in here if p in outer.coming}

    @property
    def _sync_schedule_state(self) -> dict[str, int]:
        """The synchronization schedule, as a dict that is stored in checkpoints."""
        return {
            "every": self.round_schedule.every,
            "fragments": len(self.round_schedule.fragments),
            "delay": self.round_schedule.delay,
        }

    def gather_checkpoint_counters(self, state: TrainState) -> dict[str, Any]:
        """Return the information about local training that a checkpoint stores. Collective.

        The information consists of the schedule of rounds and, for each replica and fragment, the loss weight of the
        data that the replica has trained on since it last sent the fragment."""
        replica = self.placement.axes.replica
        weights = self.placement.all_gather_numbers(state.store[TRAINED], "weights of replicas", replica)
        return {**self._sync_schedule_state, "weights": weights}

    def require_resumable(self, saved: Mapping[str, Any], where: str) -> None:
        now = self._sync_schedule_state
        if now["delay"] == saved["delay"] == 0 and now["fragments"] == saved["fragments"]:
            return
        if other := [f"{name} is {saved[name]} there and {now[name]} here" for name in now if saved[name] != now[name]]:
            raise CheckpointError(f"{where}: the rounds of local training differ: {', '.join(other)}")

    def require_synchronized_replicas(self, steps: int) -> None:
        rounds = self.round_schedule
        if len(rounds.fragments) > 1 or rounds.delay or steps % rounds.every:
            raise ConfigError(
                f"freeze: replicas have different parameters after step {steps}; call it at the end of a round of "
                f"{rounds.every} steps of local training without fragments and delay, or say distribute(frozen=[...])"
            )

    def read_common_state_and_get_setter(
        self, state: TrainState, kinds: Sequence[str]
    ) -> Callable[[], Callable[[], None]] | None:
        if "master" not in kinds:
            return None
        rows = [(state.ledger.get_array("master", page), array) for page, array in _iterate_outer_parameters(state)]

        def put_common() -> Callable[[], None]:
            state.wait_for_transfers()
            return set_arrays_returning_undo(rows)

        return put_common


def _iterate_outer_parameters(state: TrainState) -> Iterator[tuple[int | None, Any]]:
    """Yield a pair (index of its page, array) for each array of outer parameters that this rank holds. A page is a flat
    parameter buffer."""
    return ((row.key.page, array) for row, array in state.ledger.iterate_saved_rows() if row.key.kind == "outer")


@dataclass(frozen=True)
class RoundShare:
    """What a replica needs to know about the other replicas before it sends outer gradients.

    `own` is this replica's share of the data that all replicas trained on in the round. `loss` is the mean loss over
    the batches of all replicas in the last step."""

    own: float
    loss: float


def _get_policy_schedule_and_outer_step(run: ProgramRun) -> tuple[LocalSyncPolicy, RoundSchedule, OuterStep]:
    """Return the local synchronization policy, its round schedule, and what the replicas communicate in the current
    step."""
    policy = run.placement.sync_policy
    assert isinstance(policy, LocalSyncPolicy)
    return policy, policy.round_schedule, policy.round_schedule.get_replica_communication(run.step + 1)


def start_all_gather_data_amounts(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Start an all-gather of how much data each replica trained on in this round. These amounts determine the weights
    of the outer gradients.

    Each replica also sends its loss, and the learning rates of this step and of the outer step. The learning rates must
    be equal on all replicas."""
    (mean, weights), place, (policy, rounds, now) = read, run.placement, _get_policy_schedule_and_outer_step(run)
    number = rounds.count_outer_steps(min(now.deltas), run.step + 1 + rounds.outer_gradient_delay_steps)
    (known,) = (w for w, pages in zip(weights, rounds.fragments, strict=True) if pages & now.deltas)
    replicas = place.axes.mesh.ranks_along(place.axes.coordinates, ("replica",))

    def make_share(rows: list[list[float]]) -> RoundShare:
        require_same_scheduled_values(
            run, place.axes.world, rows, {3: "learning rate", 4: "learning rate of the outer optimizer"}
        )
        trained, total, weight = (sum_exactly([rows[rank][i] for rank in replicas]) for i in range(3))
        return RoundShare(rows[place.axes.world.rank][0] / (trained or 1.0), total / (weight or 1.0))

    numbers = [
        known + mean.shared,
        mean.total,
        mean.weight,
        mean.rate,
        *get_scheduled_lr_and_average_weight(policy.outer, number)[:1],
    ]
    return (place.start_all_gather_numbers(numbers, "SHARE (samples, loss)", make_share),)


def start_reduce_scatter_outer_gradient(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Start a reduce-scatter, over the replicas, of the outer gradient of a page (flat parameter buffer). Each
    replica's outer gradient is weighted by its share of the data.

    The outer gradient is the outer parameters minus this replica's parameters. Each of R replicas sends n - n/R of the
    page's n elements."""
    p, place, (master, start, mine), kept = get_action_target(action), run.placement, read, added[0] if added else {}
    buffer, replica = run.workspace.state.ledger.get_array("delta", p), place.axes.replica
    if place.device.holds_data:
        place.xp.subtract(start, master, out=buffer)
        buffer *= buffer.dtype.type(mine.own)
    if replica.size == 1:
        return (TimedTransfer(COMPLETED, lambda: buffer), *added)
    counts = split_evenly(buffer.size, replica.size)
    total = buffer[: counts[replica.rank]]
    memory = {name.partition("/")[2]: array for name, array in kept.items() if name.startswith("replica/")}
    parcel = run.workspace.take_next_scratch_buffer("parcel", p)
    handle = place.get_codec_route(p).replica.reduce_scatter(
        replica, buffer, total, counts, parcel, memory, what=format_action_label(run, action)
    )  # fmt: skip
    return (TimedTransfer(handle, lambda: total), *added)


def update_outer_and_start_all_gather(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Run the outer optimizer on this rank's elements of a page (flat parameter buffer), then start the all-gather of
    the outer parameters.

    Each of R replicas sends n - n/R of the page's n elements."""
    p, place, (gradient,), (whole, slots) = get_action_target(action), run.placement, taken, added
    policy, rounds, _ = _get_policy_schedule_and_outer_step(run)
    segments, optimizer = policy.segments[p], policy.outer
    part, first, replica = policy.find_elements_of_outer_step(p), place.pages[p].own_range.start, place.axes.replica
    own, number = whole[part.start - first : part.stop - first], rounds.count_outer_steps(p, run.step + 1)
    counted = segments.with_missed_update_counts({name: n // rounds.every for name, n in run.missed.items()})
    with preserving_frozen_parameters(run, segments, own, slots):
        update_parameters(
            optimizer,
            place.xp,
            own,
            gradient,
            slots,
            lr=get_learning_rate(optimizer, number),
            step=number,
            segments=counted,
        )
    if replica.size == 1:
        return (TimedTransfer(COMPLETED, lambda: whole), whole, slots)
    handle = replica.all_gather(
        own, whole, split_evenly(whole.size, replica.size), what=format_action_label(run, action)
    )
    return (TimedTransfer(handle, lambda: whole), whole, slots)


def mix_in_outer_parameters(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Continue from the outer parameters: set parameters = mix * parameters + (1 - mix) * outer parameters."""
    (found,), (master,), mix = taken, added, _get_policy_schedule_and_outer_step(run)[0].choice.mix
    if not mix:
        master[...] = found
    elif run.placement.device.holds_data:
        master *= master.dtype.type(mix)
        master += found * master.dtype.type(1.0 - mix)
    return (master,)


OPERATIONS.update(
    {
        "SHARE": start_all_gather_data_amounts,
        "DELTA": start_reduce_scatter_outer_gradient,
        "OUTER": update_outer_and_start_all_gather,
        "ADOPT": mix_in_outer_parameters,
    }
)
