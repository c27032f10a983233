"""The pace of ranks: what a strategy changes where they do not make every step together, one hook for each question."""

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

__all__ = ["SYNCHRONOUS", "SyncChoice", "SyncPolicy", "get_sync_choice", "set_temporarily"]

MEAN, EVERY_STEP = Slot("mean"), SyncRules()


class SyncChoice:
    """A strategy as a user chooses it, as far as it is about the pace of ranks; by this one they step together.

    excluded: the choice whose rows of the table in core/trainer/option_rules.py name what cannot be beside it.
    replicas: whether those train by themselves, so that the ranks of one of them are a group. optimizers: beside the
    one of each step. outer_codec: the codec between replicas, if it is another one. description: what all ranks must
    have chosen alike. message_prefix: how an error about what is excluded begins."""

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
        """The strategy of those ranks that step together, "" for the one that was chosen."""
        return ""

    def make_policy(self, placement: Any) -> SyncPolicy:
        """The pace of ranks that are placed so."""
        return SyncPolicy(placement)


SYNCHRONOUS = SyncChoice()


def get_sync_choice(strategy: Any) -> SyncChoice:
    """What a strategy or its name says of the pace of ranks."""
    if isinstance(strategy, SyncChoice):
        return strategy
    return SYNCHRONOUS if not isinstance(strategy, str) or strategy in PRESETS else _make_sync_choice(strategy)


@cache
def _make_sync_choice(name: str) -> SyncChoice:
    make = find_extension("strategy", name)
    return SYNCHRONOUS if make is None else make()


class SyncPolicy:
    """The pace of the ranks of a placement. These make every step together; strategies change what is theirs.

    is_synchronous: whether each step is one of all ranks. own_speed: whether ranks wait for each other only where they
    must. owner: which ranks hold the same of trained parameters and of the optimiser's state, an `Owner` of the ledger.
    lasting: kinds of slots that stay from program to program. about: what a checkpoint's note says."""

    is_synchronous, own_speed = True, False
    owner: Literal["shard", "replica"] = "shard"
    lasting: frozenset[str] = frozenset()
    about: str | None = None

    def __init__(self, placement: Any) -> None:
        self.placement = placement

    # -- programs ------------------------------------------------------------------------------------------------------

    def get_program_kind(self, kind: str) -> str:
        """The kind of program that runs when a trainer asks for this one; ConfigError if there is none."""
        return kind

    def get_sync_rules(self, step: int) -> SyncRules:
        """How ranks come together in step `step`, counted from 1."""
        return EVERY_STEP

    def get_round(self) -> list[tuple[SyncRules, int]]:
        """The different steps of a round, its last one last, and how often each is made."""
        return [(EVERY_STEP, 1)]

    def is_sync_step(self, step: int) -> bool:
        """Whether all ranks come together in step `step`."""
        return True

    def get_loss(self, results: Mapping[Slot, Any]) -> float:
        """The loss of a step that has ended."""
        return float(results[MEAN].value)

    # -- what a rank holds ---------------------------------------------------------------------------------------------

    def open_shared_memory(self) -> Iterator[tuple[Any, Any]]:
        """Make memory that all ranks reach: keys of rows, and their arrays there. Collective."""
        return iter(())

    def list_rows(self, page: ShardedPage) -> Iterator[Any]:
        """More rows of the ledger, of a trained page."""
        return iter(())

    def list_saved_slots(self, replicas: int | None) -> list[str]:
        """What is kept of each trained parameter, by the first half of its name in a checkpoint. replicas: how many of
        them have a state of their own, where they do; None: those of the mesh."""
        return list(self.placement.slot_formats)

    # -- changes of the state; each is given the `TrainState` ----------------------------------------------------------

    def on_created(self, state: Any) -> None:
        """Fill its slots: it has just been made."""

    def on_initialized(self, state: Any) -> None:
        """Parameters have their first values."""

    def on_loaded(self, state: Any) -> None:
        """Parameters have been set from outside."""

    def on_step(self, state: Any, weight: float) -> None:
        """A step has been made, on samples of this weight."""

    def on_resume(self, state: Any, saved: Mapping[str, Any] | None) -> None:
        """Training goes on where the state was saved. saved: what the checkpoint says."""

    def gather_checkpoint_data(self, state: Any) -> dict[str, Any] | None:
        """What a checkpoint says beside its arrays. Collective."""
        return None

    def require_resumable(self, saved: Mapping[str, Any], where: str) -> None:
        """CheckpointError unless training can go on here from what a checkpoint says."""

    def require_common_parameters(self, steps: int) -> None:
        """ConfigError where ranks have parameters of their own after so many steps, and something asks for the same."""

    # -- where calls begin and end -------------------------------------------------------------------------------------

    def wait_for_last_step(self) -> None:
        """Return when all ranks have made their last step, where they have to wait for that by themselves."""

    def count_updates(self, name: str, steps: int) -> int:
        """How many updates the page of a parameter has had, after `steps` of the trainer."""
        return steps

    @property
    def updates_per_step(self) -> int:
        """How many updates a page gets in one step of all ranks."""
        return 1

    def on_parameters_set(self, steps: int) -> None:
        """All parameters have been set, after this number of steps."""

    def failed_ranks(self) -> list[int]:
        """The ranks that are known to have died, where the others train on."""
        return []

    def read_common_parameters(self) -> dict[str, Any] | None:
        """The parameters that all ranks have in common, where one rank can read them by itself."""
        return None

    def read_shared_state(self, state: Any, kinds: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        """Read what all ranks have in common of these kinds of rows, where each has its own. What is returned puts it
        there, once all have read, and returns what puts the own back."""
        return None

    def copy_parameters(self) -> Callable[[], None] | None:
        """Copy what this rank holds of the parameters, where all ranks change them; what is returned puts it back."""
        return None

    def close(self) -> None:
        """Free memory that all ranks reach. Collective."""


def set_temporarily(values: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
    """Set arrays to values, as a function that puts back what they were."""
    before = [(array, array.copy()) for array, _ in values]
    for array, value in values:
        array[...] = value

    def put_back() -> None:
        for array, value in before:
            array[...] = value

    return put_back
