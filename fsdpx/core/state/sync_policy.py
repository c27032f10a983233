"""Synchronization policies: hooks through which strategies change how ranks synchronize, for strategies in which ranks
do not step together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal

from fsdpx.core.base.config import PRESETS, Sharding
from fsdpx.core.base.extensions import find_extension
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.compression import Codec
from fsdpx.core.program import Slot, SyncRules
from fsdpx.core.state.flat_parameters import ShardedPage

__all__ = ["SYNCHRONOUS", "SyncChoice", "SyncPolicy", "get_sync_choice", "set_arrays_returning_undo"]

MEAN, EVERY_STEP = Slot("mean"), SyncRules()


class SyncChoice:
    """The synchronization of a strategy, as a user chooses it. In the base class ranks step together.

    Attributes
    ----------
    excluded : the name under which the table in core/trainer/option_rules.py lists the options that cannot be combined
        with this strategy
    replicas : whether replicas train independently, so that the ranks of one replica form a group
    optimizers : optimizers in addition to the one that updates in each step
    outer_codec : the codec between replicas, if it differs from the codec within them
    description : text that must be equal on all ranks
    message_prefix : beginning of error messages about excluded options
    """

    excluded: ClassVar[str] = "nothing"
    replicas: ClassVar[bool] = False

    @property
    def optimizers(self) -> tuple[Any, ...]:
        return ()

    @property
    def outer_codec(self) -> Codec | None:
        return None

    @property
    def description(self) -> str:
        return ""

    @property
    def message_prefix(self) -> str:
        return f"{self.excluded} with "

    def strategy_within_replica(self, mesh: Mesh | None, ranks: int) -> str | Sharding:
        """Return the sharding strategy of the ranks that step together; "": the strategy that the user chose."""
        return ""

    def make_policy(self, placement: Any) -> SyncPolicy:
        """Return the policy for a placement."""
        return SyncPolicy(placement)


SYNCHRONOUS = SyncChoice()


def get_sync_choice(strategy: Any) -> SyncChoice:
    """Return the synchronization that a strategy or its name implies."""
    if isinstance(strategy, SyncChoice):
        return strategy
    return SYNCHRONOUS if not isinstance(strategy, str) or strategy in PRESETS else _make_sync_choice(strategy)


@cache
def _make_sync_choice(name: str) -> SyncChoice:
    make = find_extension("strategy", name)
    return SYNCHRONOUS if make is None else make()


class SyncPolicy:
    """How the ranks of a placement synchronize. By default they make every step together. Strategies override hooks.

    Attributes
    ----------
    is_synchronous : whether all ranks make each step together
    own_speed : whether ranks run asynchronously, and wait for each other only where they must
    owner : which ranks hold the same trained parameters and optimizer state, an `Owner` of the ledger
    lasting : kinds of slots that stay filled from program to program
    about : text about the policy in the note of a checkpoint; None: no note
    """

    is_synchronous, own_speed = True, False
    owner: Literal["shard", "replica"] = "shard"
    lasting: frozenset[str] = frozenset()
    about: str | None = None

    def __init__(self, placement: Any) -> None:
        self.placement = placement

    def get_program_kind(self, kind: str) -> str:
        """Return the kind of program that runs when a trainer asks for `kind`. Raise ConfigError if there is none."""
        return kind

    def get_sync_rules(self, step: int) -> SyncRules:
        """Return how ranks synchronize in step `step`, counted from 1."""
        return EVERY_STEP

    def count_steps_of_round(self) -> list[tuple[SyncRules, int]]:
        """Return (rules, count) for each different kind of step in a round, with the last step of the round at the
        end."""
        return [(EVERY_STEP, 1)]

    def is_sync_step(self, step: int) -> bool:
        """Return whether all ranks synchronize in step `step`."""
        return True

    def get_loss(self, results: Mapping[Slot, Any]) -> float:
        """Return the loss of a finished step."""
        return float(results[MEAN].value)

    def open_shared_memory(self) -> Iterator[tuple[Any, Any]]:
        """Allocate memory that all ranks can access, and yield (key of a row, its array in this memory). Collective."""
        return iter(())

    def list_policy_rows(self, page: ShardedPage) -> Iterator[Any]:
        """Yield additional rows of the ledger for a trained page."""
        return iter(())

    def list_saved_name_prefixes(self, replicas: int | None) -> list[str]:
        """Return the prefixes of the names of all tensors that checkpoints hold for a trained parameter. replicas:
        number of replicas, if each has its own state; None: the number in the mesh."""
        return list(self.placement.slot_formats)

    def on_created(self, state: Any) -> None:
        """Fill slots of a new state."""

    def on_initialized(self, state: Any) -> None:
        """Called after the parameters got their initial values."""

    def on_loaded(self, state: Any) -> None:
        """Called after the parameters were set from outside, for example by a load."""

    def on_step(self, state: Any, weight: float) -> None:
        """Called after a step. weight: loss weight of its samples."""

    def on_resume(self, state: Any, saved: Mapping[str, Any] | None) -> None:
        """Called after a saved state was loaded. saved: data of the checkpoint, see `gather_checkpoint_counters`."""

    def gather_checkpoint_counters(self, state: Any) -> dict[str, Any] | None:
        """Return the data of this policy that a checkpoint holds in addition to its arrays; None if there is none.
        Collective."""
        return None

    def require_resumable(self, saved: Mapping[str, Any], where: str) -> None:
        """Raise CheckpointError unless training can resume from this data of a checkpoint. where: the checkpoint, for
        errors."""

    def require_common_parameters(self, steps: int) -> None:
        """Raise ConfigError if ranks have different parameters after `steps` steps, for callers that need common
        parameters."""

    def wait_for_last_step(self) -> None:
        """Wait until all ranks have made their last step, if ranks run asynchronously."""

    def count_updates(self, name: str, steps: int) -> int:
        """Return how many updates the page of parameter `name` has had after `steps` steps of the trainer."""
        return steps

    @property
    def updates_per_step(self) -> int:
        """The number of updates that a page gets in one step of all ranks."""
        return 1

    def on_parameters_set(self, steps: int) -> None:
        """Called after all parameters were set. steps: number of steps of the trainer so far."""

    def get_failed_ranks(self) -> list[int]:
        """Return the ranks that are known to have died, if training continues without them."""
        return []

    def read_common_parameters(self) -> dict[str, Any] | None:
        """Return the parameters common to all ranks, if one rank can read them without the others; otherwise None."""
        return None

    def read_state_to_swap(self, state: Any, kinds: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        """Read the state that is common to all ranks, for these kinds of rows, if each rank has its own state as well.
        Return a function to call once all ranks have read. That function sets the rows to the common state, and returns
        a function that restores the rank's own state. Return None if there is no common state."""
        return None

    def copy_parameters_to_restore(self) -> Callable[[], None] | None:
        """Copy the parameters that this rank holds, if all ranks change them, and return a function that restores them;
        otherwise return None."""
        return None

    def close(self) -> None:
        """Free memory that all ranks can access. Collective."""


def set_arrays_returning_undo(values: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
    """Set arrays to values, from (array, value) pairs. Return a function that restores the previous values."""
    before = [(array, array.copy()) for array, _ in values]
    for array, value in values:
        array[...] = value

    def put_back() -> None:
        for array, value in before:
            array[...] = value

    return put_back
