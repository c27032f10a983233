"""The state that a rank keeps from step to step: parameters, optimizer state, accumulated gradients and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdpx.core.array.arena import Arena
from fsdpx.core.array.random import Random, TrainingMoment
from fsdpx.core.base.config import Precision
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.program import Slot
from fsdpx.core.state.ledger import LEDGER_KINDS, Ledger, LedgerKey, LedgerRow
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import StateStorage
from fsdpx.errors import NumericsError

__all__ = ["FrozenParameters", "LossScaler", "TieGroup", "TrainState", "restore_from_copies"]

SMALLEST_LOSS_SCALE = 2.0**-40


@dataclass(frozen=True)
class LossScaler:
    """The loss scale for training with 16-bit floats. A dynamic scale is halved on overflow, and doubled after
    `growth_interval` steps without overflow.

    Attributes
    ----------
    value : factor by which the loss is multiplied
    dynamic : whether the scale changes during training
    growth_interval : number of steps without overflow after which the scale is doubled
    steps_since_change : number of steps since the last change of the scale
    """

    value: float
    dynamic: bool
    growth_interval: int
    steps_since_change: int = 0

    @classmethod
    def from_precision(cls, precision: Precision) -> LossScaler:
        dynamic = precision.loss_scale == "dynamic"
        value = precision.initial_scale if precision.loss_scale == "dynamic" else float(precision.loss_scale)
        return cls(value, dynamic, precision.growth_interval)

    def make_scaler_for_next_step(self, finite: bool) -> LossScaler:
        """Return the loss scaler for the next step. `finite` is True if all gradients were finite, and must be the same
        on all ranks. Raise NumericsError if the scale becomes too small."""
        if not self.dynamic:
            return self
        if finite:
            grown = self.steps_since_change + 1 >= self.growth_interval
            return (
                replace(self, value=self.value * 2, steps_since_change=0)
                if grown
                else replace(self, steps_since_change=self.steps_since_change + 1)
            )
        if self.value / 2 < SMALLEST_LOSS_SCALE:
            raise NumericsError(
                f"gradients are NaN or Inf at every loss scale down to {self.value / 2:g}: "
                "distribute(..., check_finite=True) names where they begin"
            )
        return replace(self, value=self.value / 2, steps_since_change=0)

    def restore_scale(self, value: float, steps_since_change: int) -> LossScaler:
        """Return this scaler with the value and the step count from a checkpoint. A fixed scale is not changed."""
        return replace(self, value=value, steps_since_change=steps_since_change) if self.dynamic else self


@dataclass(frozen=True)
class TieGroup:
    """Pages (flat parameter buffers) whose gradients must be summed before the update. Either the pages are copies of a
    tied parameter on several pipeline ranks, or several tensor ranks compute partial sums of the gradient.

    Attributes
    ----------
    pages : a single page, or the pages with copies of one parameter, beginning with the page of the first layer that
        uses the parameter
    ranks : pipeline rank of each page
    comm : communicator of the pipeline ranks that have a copy; None if only one rank has a copy
    partial : whether gradients must also be summed over the tensor axis
    """

    pages: tuple[int, ...]
    ranks: tuple[int, ...]
    comm: Communicator | None
    partial: bool

    @property
    def gather_order(self) -> list[int]:
        """Indices into `pages` (flat parameter buffers), sorted by the pages' pipeline ranks. An all-gather returns the
        gradients in this order."""
        return sorted(range(len(self.pages)), key=lambda i: self.ranks[i])

    @property
    def page_counts_by_rank(self) -> list[int]:
        """Number of pages (flat parameter buffers) of this group on each pipeline rank that has any, in rank order."""
        return [self.ranks.count(rank) for rank in sorted(set(self.ranks))]

    def count_gathered_elements(self, page_elements: int) -> int:
        """Return the number of elements in the result of an all-gather of all copies' gradients, or 0 if no all-gather
        is needed. `page_elements` is the number of elements of one copy on this rank."""
        return page_elements * len(self.pages) if self.comm is not None else 0


class FrozenParameters:
    """Keeps track of frozen parameters, and of the updates that they miss.

    Attributes
    ----------
    frozen : names of the parameters that currently receive no gradients or updates
    missed : for each parameter name, the total number of updates that the parameter had missed when it was last
        unfrozen. It has received this many fewer updates than the other parameters in its page (flat buffer)
    """

    def __init__(self, updates: Callable[[str], int]) -> None:
        """Start without frozen parameters. `updates(name)` must return the number of updates that the parameter would
        have received so far if it had never been frozen."""
        self.frozen: frozenset[str] = frozenset()
        self.missed: dict[str, int] = {}
        self._updates = updates
        # for each frozen parameter, the number of updates before it was frozen
        self._updates_when_frozen: dict[str, int] = {}

    def freeze(self, names: Iterable[str]) -> None:
        """Exclude parameters from training from now on. All ranks must freeze the same parameters."""
        self._updates_when_frozen |= {name: self._updates(name) for name in names if name not in self.frozen}
        self.frozen = frozenset(self._updates_when_frozen)

    def unfreeze(self, names: Iterable[str]) -> None:
        """Train these parameters again. For each of them, add to `missed` the number of updates that it missed while it
        was frozen."""
        self.missed = self.count_missed_updates()
        self._updates_when_frozen = {name: self._updates(name) for name in self.frozen.difference(names)}
        self.frozen = frozenset(self._updates_when_frozen)

    def count_missed_updates(self) -> dict[str, int]:
        """Return a dict that maps each parameter name to the number of updates that the parameter has missed so far.
        The dict includes parameters that are still frozen."""
        now = {name: self._updates(name) - before for name, before in self._updates_when_frozen.items()}
        return {name: self.missed.get(name, 0) + now.get(name, 0) for name in sorted({**self.missed, **now})}

    def resume_at(self, missed: dict[str, int], updates: int) -> None:
        """Continue from a checkpoint that was saved after `updates` updates. `missed` maps each parameter name to the
        number of these updates that the parameter missed. Currently frozen parameters stay frozen."""
        self.missed, self._updates_when_frozen = missed, dict.fromkeys(self.frozen, updates)


def restore_from_copies(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Restore the earlier values of arrays, given as (array, copy) pairs."""
    for array, before in pairs:
        array[...] = before


LASTING_SLOT_KINDS = frozenset({"stats", *(kind.slot for kind in LEDGER_KINDS.values() if kind.slot)})
"""Kinds of slots (named values of a program) that are filled before and after every program, or that belong to a later
program. A `SyncPolicy` may add others."""


class TrainState:
    """The state that a rank keeps from step to step.

    Attributes
    ----------
    store : the values that programs read and write, keyed by slot (name of a value, such as the gradient of page 3)
    steps : number of updates made so far
    samples : number of samples in all global batches since the last update
    gradient_source : the call that computed the gradients in `store`, "accumulate" or "backward"; "" if there are no
        gradients
    ran : kinds of programs that have run since the last update; the same on all ranks
    idle : parameters that received no gradient in at least one backward pass
    storage : the storage for offloaded arrays
    """

    def __init__(
        self, placement: Placement, arena: Arena, ledger: Ledger, ties: dict[int, TieGroup], storage: StateStorage
    ) -> None:
        self.placement, self.arena, self.ledger, self.ties = placement, arena, ledger, ties
        self.storage = storage
        self.store: dict[Slot, Any] = {}
        self.scaler = LossScaler.from_precision(placement.formats.precision)
        self.seed = placement.options.seed
        self.moment = TrainingMoment()
        self.steps = self.samples = 0
        self.gradient_source = ""
        self.ran: set[str] = set()
        self.freezing = FrozenParameters(self._count_updates)
        self.idle: dict[str, None] = {}
        self._put_initial_arrays_into_store()

    def _put_initial_arrays_into_store(self) -> None:
        """Put the arrays that every program expects, such as parameter shards and optimizer state, into `store`."""
        place, store = self.placement, self.store
        store |= {Slot("slots", p): {} for p in place.stage.trained_pages}
        for row in self.ledger:
            kind, page, name = row.key
            if page is not None and LEDGER_KINDS[kind].slot and row.is_kept:
                slot, array = Slot(LEDGER_KINDS[kind].slot, page), self.ledger.arrays[row.key]
                if name:
                    store.setdefault(slot, {})[name] = array
                else:
                    store[slot] = array
        for unit, names in place.running_statistics_names_by_unit.items():
            store[Slot("stats", unit)] = {name: self.view_running_statistic(name) for name in names}
        place.sync_policy.on_created(self)
        self.storage.fill_slots_with_placeholders(self)

    def view_running_statistic(self, name: str) -> Any:
        """Return a view of a running statistic in its original shape."""
        return self.ledger.get_array("statistic", None, name).reshape(self.placement.layout.specs[name].shape)

    def back_up_running_statistics(self) -> list[tuple[Any, Any]]:
        """Copy the running statistics that this rank updates. Return a list of (array, copy) pairs that can be passed
        to `restore_from_copies` to undo a failed step."""
        names = {name for names in self.placement.running_statistics_names_by_unit.values() for name in names}
        arrays = [self.ledger.get_array("statistic", None, name) for name in sorted(names)]
        return [(array, array.copy()) for array in arrays]

    @property
    def random(self) -> Random:
        """A random number generator for layers. Its numbers depend on the seed and the position in training."""
        return Random(self.seed, moment=self.moment)

    def list_indices_of_filled_slots(self, kind: str) -> frozenset[int]:
        """Return the IDs (integers) of the pages (flat buffers), units (groups of layers) or activations for which
        `store` holds a value of kind `kind`, such as "grad"."""
        return frozenset(slot.at for slot in self.store if slot.kind == kind and slot.at is not None)

    def clear_slots(self, kinds: Iterable[str]) -> None:
        """Remove all values of the given kinds, such as "grad", from `store`."""
        unwanted = set(kinds)
        for slot in [slot for slot in self.store if slot.kind in unwanted]:
            del self.store[slot]

    def pop_values_of_earlier_programs(self, keep: Iterable[str] = ("full",)) -> dict[Slot, Any]:
        """Remove the values that earlier programs have left in `store`, such as gradients, and return them. Values of
        the kinds in `keep` are not removed. Use `store.update` to put the returned values back."""
        stored_slots = dict(self.placement.stage.stored_slots)
        stands = {stand.kind for stand in stored_slots.values()}
        stay = LASTING_SLOT_KINDS | self.placement.sync_policy.lasting | stands | set(keep)
        passing = {s for s in self.store if s in stored_slots or (s.kind in stands and s.mb is not None)}
        gone = [s for s in self.store if s.kind not in stay or s in passing]
        return {slot: self.store.pop(slot) for slot in gone}

    def finish_update(self, skipped: bool, scaler: LossScaler, weight: float = 0.0) -> None:
        """Count an update, unless it was skipped, and free the gradients. `skipped` is True if parameters were left
        unchanged because gradients overflowed. `weight` is the loss weight of the step's samples."""
        self.steps += not skipped
        self.placement.sync_policy.on_step(self, weight)
        self.scaler = scaler
        self.samples, self.gradient_source = 0, ""
        self.ran = {"updated"}
        self.drop_local_gradients()
        for row in self.ledger:
            if row.is_freed_by_update:
                self.ledger.arrays.pop(row.key, None)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that currently receive no gradients or updates."""
        return self.freezing.frozen

    def count_missed_steps_by_parameter(self) -> dict[str, int]:
        """Return a dict that maps each parameter name to the number of trainer steps that did not update the parameter.
        Parameters that were updated in every step are omitted."""
        each = self.placement.sync_policy.updates_per_step
        missed = self.freezing.count_missed_updates().items()
        steps = {name: self.steps - (self._count_updates(name) - n) // each for name, n in missed}
        return {name: n for name, n in steps.items() if n}

    def _count_updates(self, name: str) -> int:
        return self.placement.sync_policy.count_updates(name, self.steps)

    def set_counters_from_other_ranks(self, steps: int, value: float, steps_since_change: int) -> None:
        """Set the step count and the loss scale after an update in which this rank did not take part. The arguments
        come from a rank that took part: its step count, and the `value` and `steps_since_change` of its
        `LossScaler`."""
        self.steps, self.scaler = steps, self.scaler.restore_scale(value, steps_since_change)

    def wait_for_transfers(self) -> None:
        """Wait for transfers that programs have started but not waited for."""
        for slot, value in self.store.items():
            if slot.kind in self.placement.sync_policy.lasting and isinstance(value, TimedTransfer):
                self.store[slot] = value.wait()

    def restore_position(
        self,
        steps: int,
        samples: int,
        seed: int,
        scale: tuple[float, int] | None,
        policy_data: dict[str, Any] | None = None,
        missed: Mapping[str, int] | None = None,
    ) -> None:
        """Continue training from the position stored in a checkpoint. From now on, random numbers depend on `seed`.

        `scale` is the loss scale as (value, steps since its last change), or None to leave it unchanged. `policy_data`
        holds the counters of the `SyncPolicy`. `missed` is what `count_missed_steps_by_parameter` returned when the
        checkpoint was saved."""
        self.discard_after_error()
        self.drop_local_gradients()
        self.steps, self.samples, self.seed = steps, samples, seed
        self.placement.sync_policy.on_resume(self, policy_data)
        each = self.placement.sync_policy.updates_per_step
        self.freezing.resume_at({name: n * each for name, n in (missed or {}).items()}, steps * each)
        if scale is not None:
            self.scaler = self.scaler.restore_scale(*scale)

    def zero_grad(self) -> None:
        """Discard accumulated gradients, but keep the activations that `forward` saved for `backward`."""
        self.clear_slots(["grad", "part", "weight"])
        self.samples, self.gradient_source = 0, ""
        self.drop_local_gradients()

    def invalidate_full_parameters(self) -> None:
        """Discard gathered parameters, because the parameters have changed. All ranks must call this."""
        self.clear_slots(["full"])
        self.ran.discard("updated")

    def discard_after_error(self) -> None:
        """Discard everything that a failed program has left in `store`, including gradients. Parameters are kept."""
        self.gradient_source = ""
        self.ran.clear()
        self.pop_values_of_earlier_programs(keep=())

    def get_or_allocate_until_update(self, key: LedgerKey) -> Any:
        """Return the array with this key. It is allocated on first use and freed by the next update. An error does not
        free it, because a transfer may still be writing to it."""
        if key not in self.ledger.arrays:
            row = self.ledger.rows[key]
            self.ledger.arrays[key] = self.arena.allocate(row.elements, row.dtype)
        return self.ledger.arrays[key]

    def get_or_create_local_gradient(self, row: LedgerRow) -> Any:
        """Return the array for an unsharded gradient that `no_sync` keeps on this rank until the update. The array is
        allocated on first use."""
        if row.key not in self.ledger.arrays:
            self.ledger.add_row(row, self.arena.get_or_create_buffer(row.key, row.elements, row.dtype, temporary=True))
        return self.ledger.arrays[row.key]

    def drop_local_gradients(self) -> None:
        """Free the unsharded gradients that `no_sync` has kept on this rank."""
        for key in [row.key for row in self.ledger if row.key.name == "local" and row.key.kind == "grad"]:
            self.ledger.drop_row(key)
            self.arena.drop_buffer(key)

    def count_bytes_by_kind(self) -> dict[str, int]:
        """Return the number of bytes that this rank now holds, as a dict keyed by kind of memory, such as
        "gradients"."""
        bytes_by_kind = self.ledger.count_bytes_by_kind()
        return bytes_by_kind | ({"working set": self.arena.slab_nbytes} if self.arena.slab_nbytes else {})

    def get_planned_and_peak_bytes(self) -> dict[str, tuple[int, int]]:
        """Return (planned bytes, maximum bytes so far) for each kind of memory, such as "gradients", as a dict."""
        ledger, slab = self.ledger, self.arena.slab_nbytes
        planned_and_most = {kind: (ledger.planned_bytes.get(kind, 0), most) for kind, most in ledger.peak_bytes.items()}
        return planned_and_most | ({"working set": (slab, slab)} if slab else {})

    def close(self) -> None:
        """Free shared memory and communicators. Collective."""
        self.store.clear()
        self.ledger.clear()
        self.storage.close()
        self.arena.close()
        self.placement.sync_policy.close()
        for tie in self.ties.values():
            if tie.comm is not None:
                tie.comm.close()
        self.placement.axes.close()
