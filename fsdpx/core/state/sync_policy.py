"""Synchronization policies: the hooks through which strategies change how ranks synchronize, if they do not make every
step together."""

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
    """A strategy as a user chooses it, as far as it concerns synchronization. The base class: ranks step together.

    Attributes
    ----------
    excluded : the choice whose rows of the table in core/trainer/option_rules.py name the options that cannot be
        combined with it
    replicas : whether replicas train independently, so that the ranks of one are a group
    optimizers : optimizers in addition to the one of each step
    outer_codec : the codec between replicas, if it differs
    description : text that must be equal on all ranks
    message_prefix : the beginning of errors about excluded options
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
        """Return the sharding strategy of ranks that step together, "" for the one that was chosen."""
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
    """The synchronization of the ranks of a placement. By default they make every step together; strategies override
    hooks.

    Attributes
    ----------
    is_synchronous : whether all ranks make each step together
    own_speed : whether ranks wait for each other only where they must
    owner : which ranks hold the same trained parameters and optimizer state, an `Owner` of the ledger
    lasting : kinds of slots that stay filled from program to program
    about : text about it in the note of a checkpoint; None: no note
    """

    is_synchronous, own_speed = True, False
    owner: Literal["shard", "replica"] = "shard"
    lasting: frozenset[str] = frozenset()
    about: str | None = None

    def __init__(self, placement: Any) -> None:
        self.placement = placement

    # -- programs ------------------------------------------------------------------------------------------------------

    def get_program_kind(self, kind: str) -> str:
        """Return the kind of program to run when a trainer asks for this one; raise ConfigError if there is none."""
        return kind

    def get_sync_rules(self, step: int) -> SyncRules:
        """Return how ranks synchronize in step `step`, counted from 1."""
        return EVERY_STEP

    def count_steps_of_round(self) -> list[tuple[SyncRules, int]]:
        """Return the different steps of a round, its last one last, and how often each occurs."""
        return [(EVERY_STEP, 1)]

    def is_sync_step(self, step: int) -> bool:
        """Return whether all ranks synchronize in step `step`."""
        return True

    def get_loss(self, results: Mapping[Slot, Any]) -> float:
        """Return the loss of a finished step."""
        return float(results[MEAN].value)

    # -- what a rank holds ---------------------------------------------------------------------------------------------

    def open_shared_memory(self) -> Iterator[tuple[Any, Any]]:
        """Allocate memory that all ranks can access; yield keys of rows with their arrays in it. Collective."""
        return iter(())

    def list_policy_rows(self, page: ShardedPage) -> Iterator[Any]:
        """Yield additional rows of the ledger for a trained page."""
        return iter(())

    def list_saved_name_prefixes(self, replicas: int | None) -> list[str]:
        """Return what checkpoints hold for each trained parameter, as the first half of the names. replicas: number of
        replicas with a state of their own, if they have one; None: those of the mesh."""
        return list(self.placement.slot_formats)

    # -- changes of the state; each gets the `TrainState` --------------------------------------------------------------

    def on_created(self, state: Any) -> None:
        """Fill slots of a state that has just been made."""

    def on_initialized(self, state: Any) -> None:
        """Handle that parameters got their initial values."""

    def on_loaded(self, state: Any) -> None:
        """Handle that parameters were set from outside."""

    def on_step(self, state: Any, weight: float) -> None:
        """Handle a finished step. weight: loss weight of its samples."""

    def on_resume(self, state: Any, saved: Mapping[str, Any] | None) -> None:
        """Resume from a saved state. saved: data of the checkpoint, see `gather_checkpoint_data`."""

    def gather_checkpoint_data(self, state: Any) -> dict[str, Any] | None:
        """Return what a checkpoint holds in addition to its arrays. Collective."""
        return None

    def require_resumable(self, saved: Mapping[str, Any], where: str) -> None:
        """Raise CheckpointError unless training can resume here from the data of a checkpoint."""

    def require_common_parameters(self, steps: int) -> None:
        """Raise ConfigError if ranks have different parameters after so many steps, for callers that need common
        ones."""

    # -- begin and end of calls ----------------------------------------------------------------------------------------

    def wait_for_last_step(self) -> None:
        """Wait until all ranks have made their last step, if ranks run at their own speed."""

    def count_updates(self, name: str, steps: int) -> int:
        """Return how many updates the page of a parameter has had after `steps` steps of the trainer."""
        return steps

    @property
    def updates_per_step(self) -> int:
        """The number of updates that a page gets in one step of all ranks."""
        return 1

    def on_parameters_set(self, steps: int) -> None:
        """Handle that all parameters were set, after this number of steps."""

    def get_failed_ranks(self) -> list[int]:
        """Return the ranks that are known to have died, if training continues without them."""
        return []

    def read_common_parameters(self) -> dict[str, Any] | None:
        """Return the parameters common to all ranks, if one rank can read them on its own; else None."""
        return None

    def read_state_to_swap(self, state: Any, kinds: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        """Read the state common to all ranks for these kinds of rows, if each rank also has its own. Return a function
        that sets the rows to it, once all ranks have read, and returns a function that restores the own state; None if
        there is nothing to read."""
        return None

    def copy_parameters_to_restore(self) -> Callable[[], None] | None:
        """Copy the parameters that this rank holds, if all ranks change them; return a function that restores them,
        else None."""
        return None

    def close(self) -> None:
        """Free memory that all ranks can access. Collective."""


def set_arrays_returning_undo(values: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
    """Set arrays to values; return a function that restores the former values."""
    before = [(array, array.copy()) for array, _ in values]
    for array, value in values:
        array[...] = value

    def put_back() -> None:
        for array, value in before:
            array[...] = value

    return put_back
