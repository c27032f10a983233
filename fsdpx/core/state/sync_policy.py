"""Synchronization policies: hooks that strategies such as local SGD or asynchronous SGD override because their ranks do
not synchronize in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal

from fsdpx.core.base.config import PRESETS, Sharding
from fsdpx.core.base.extensions import import_extension_if_declared
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.compression import Codec
from fsdpx.core.program import Slot, SyncRules
from fsdpx.core.state.flat_parameters import ShardedPage

__all__ = ["SYNCHRONOUS", "SyncChoice", "SyncPolicy", "get_sync_choice", "set_arrays_returning_undo"]

MEAN, EVERY_STEP = Slot("mean"), SyncRules()


class SyncChoice:
    """How the ranks of a strategy synchronize. In this base class, they synchronize in every step.

    Attributes
    ----------
    excluded : name of this kind of strategy in core/trainer/option_rules.py, which lists the options that cannot be
        combined with it
    replicas : whether replicas train independently, so that the ranks of each replica form a group
    optimizers : additional optimizers, besides the one that updates parameters in each step
    outer_codec : compression codec for communication between replicas; None for the same codec as within a replica
    description : text that describes this choice; it must be the same on all ranks
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
        """Return the sharding strategy for the ranks that synchronize in every step, or "" to use the strategy that the
        user chose."""
        return ""

    def make_policy(self, placement: Any) -> SyncPolicy:
        """Return the synchronization policy that carries out this choice for a placement."""
        return SyncPolicy(placement)


SYNCHRONOUS = SyncChoice()


def get_sync_choice(strategy: Any) -> SyncChoice:
    """Return the `SyncChoice` of a strategy. `strategy` is an object or a name."""
    if isinstance(strategy, SyncChoice):
        return strategy
    return SYNCHRONOUS if not isinstance(strategy, str) or strategy in PRESETS else _make_sync_choice(strategy)


@cache
def _make_sync_choice(name: str) -> SyncChoice:
    make = import_extension_if_declared("strategy", name)
    return SYNCHRONOUS if make is None else make()


class SyncPolicy:
    """Determines how and when the ranks of a placement synchronize. In this base class, they synchronize in every step.
    Strategies override its methods.

    Attributes
    ----------
    is_synchronous : whether all ranks take each step together
    own_speed : whether each rank takes steps at its own speed (asynchronous training)
    owner : "shard" if all replicas hold the same trained parameters and optimizer state; "replica" if each replica has
        its own
    lasting : kinds of slots (named values of a program) that programs leave filled for later programs
    about : text about the policy, which checkpoints store in their description of the run; None for no text
    """

    is_synchronous, own_speed = True, False
    owner: Literal["shard", "replica"] = "shard"
    lasting: frozenset[str] = frozenset()
    about: str | None = None

    def __init__(self, placement: Any) -> None:
        self.placement = placement

    def get_program_kind(self, kind: str) -> str:
        """Return the kind of program to run when the trainer requests a program of kind `kind`, such as "step". Raise
        ConfigError if the policy does not support this kind."""
        return kind

    def get_sync_rules(self, step: int) -> SyncRules:
        """Return the rules that ranks follow to synchronize in step `step`. The first step is step 1."""
        return EVERY_STEP

    def count_steps_per_sync_rules(self) -> list[tuple[SyncRules, int]]:
        """Return the rules for one round, which consists of the steps from one synchronization of all ranks to the
        next. The result is a list of pairs (rules, number of steps that follow these rules). The last pair is for the
        last step of the round, in which all ranks synchronize."""
        return [(EVERY_STEP, 1)]

    def is_sync_step(self, step: int) -> bool:
        """Return whether all ranks synchronize in step `step`."""
        return True

    def get_loss(self, results: Mapping[Slot, Any]) -> float:
        """Return the loss of a completed step, given the results of its program."""
        return float(results[MEAN].value)

    def open_shared_memory(self) -> Iterator[tuple[Any, Any]]:
        """Allocate memory that all ranks can access, and yield (key, array) for each array in it. `key` identifies the
        array in the ledger (table of a rank's arrays). Collective."""
        return iter(())

    def list_policy_ledger_rows(self, page: ShardedPage) -> Iterator[Any]:
        """Yield a row of the ledger (table of a rank's arrays) for each array that this policy needs for a trained page
        (flat parameter buffer)."""
        return iter(())

    def list_saved_name_prefixes(self, replicas: int | None) -> list[str]:
        """Return the name prefixes, such as "m", that checkpoints use for the optimizer state of a parameter.
        `replicas` is the number of replicas that have their own optimizer state. If it is None, use the number of
        replicas in the mesh."""
        return list(self.placement.slot_formats)

    def on_created(self, state: Any) -> None:
        """Initialize this policy's slots (named values of a program) in a newly created state."""

    def on_initialized(self, state: Any) -> None:
        """Called after the parameters have been initialized."""

    def on_loaded(self, state: Any) -> None:
        """Called after parameters have been set outside a training step, for example from a checkpoint."""

    def on_step(self, state: Any, weight: float) -> None:
        """Called after each step. `weight` is the loss weight of the step's samples."""

    def on_resume(self, state: Any, saved: Mapping[str, Any] | None) -> None:
        """Called after a checkpoint has been loaded. `saved` is what `gather_checkpoint_counters` returned when the
        checkpoint was saved."""

    def gather_checkpoint_counters(self, state: Any) -> dict[str, Any] | None:
        """Return the counters of this policy that checkpoints store in addition to arrays, or None if there are none.
        Collective."""
        return None

    def require_resumable(self, saved: Mapping[str, Any], where: str) -> None:
        """Raise CheckpointError unless training can resume from `saved`, the counters of this policy in a checkpoint.
        `where` names the checkpoint in error messages."""

    def require_synchronized_replicas(self, steps: int) -> None:
        """Raise ConfigError if ranks have different parameters after `steps` steps. Methods that need the same
        parameters on all ranks call this method."""

    def wait_for_last_step(self) -> None:
        """In asynchronous training, wait until all ranks have finished their last step. Otherwise, do nothing."""

    def count_updates(self, name: str, steps: int) -> int:
        """Return the number of updates, in the first `steps` steps of the trainer, to the page (flat buffer) that
        contains the parameter `name`."""
        return steps

    @property
    def updates_per_step(self) -> int:
        """Number of updates to a parameter while every rank takes one step."""
        return 1

    def on_parameters_set(self, steps: int) -> None:
        """Called after all parameters have been set. `steps` is the number of steps that the trainer has taken."""

    def get_failed_ranks(self) -> list[int]:
        """Return the ranks that have died. Training continues without them."""
        return []

    def read_common_parameters(self) -> dict[str, Any] | None:
        """Return a dict of the parameters that all ranks have in common. Return None if a rank cannot read them without
        the help of other ranks."""
        return None

    def read_common_state_and_get_setter(
        self, state: Any, kinds: Sequence[str]
    ) -> Callable[[], Callable[[], None]] | None:
        """For the given kinds of arrays, read the state that all ranks have in common. Return a function that copies
        this state into this rank's arrays. Return None if no arrays need to change.

        The returned function may be called only after all ranks have read the common state. It returns another
        function, which restores this rank's own state."""
        return None

    def copy_parameters_and_get_restorer(self) -> Callable[[], None] | None:
        """If other ranks can change this rank's parameters, copy the parameters and return a function that restores
        them. Otherwise return None."""
        return None

    def close(self) -> None:
        """Free the memory that all ranks share. Collective."""


def set_arrays_returning_undo(values: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
    """Set each array to a new value, given as (array, value) pairs. Return a function that restores the old values."""
    before = [(array, array.copy()) for array, _ in values]
    for array, value in values:
        array[...] = value

    def put_back() -> None:
        for array, value in before:
            array[...] = value

    return put_back
