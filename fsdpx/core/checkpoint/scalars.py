"""The scalar part of the training state, such as the number of steps, the loss scale, the seed, and the position in the
data. Checkpoints store it as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.safe_files import parse_json
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError
from fsdpx.optim.optimizer import unwrap_optimizer

__all__ = ["CheckpointScalars", "collect_checkpoint_scalars", "restore_scalars"]


@dataclass(frozen=True)
class CheckpointScalars:
    """The scalar training state in a checkpoint.

    Attributes
    ----------
    steps : number of updates
    rows : number of samples since the last update
    seed : seed of all random numbers, which depend only on the seed and on the position in training
    scale, good, dynamic : loss scale, number of steps since its last change, and whether it is dynamic
    slots : names of the optimizer's state arrays, such as "m"
    optimizer : name of the optimizer's class
    data : `state_dict` of the data loader; None if there is no loader
    fit : progress of the training loop `fit`; None if it is not used
    local : in local training, the progress of the replicas since they were last synchronized; otherwise None
    missed : for each parameter name, the number of steps that did not update the parameter because it was frozen; None
        if every step updated all parameters
    """

    steps: int
    rows: int
    seed: int
    scale: float
    good: int
    dynamic: bool
    slots: tuple[str, ...]
    optimizer: str
    data: dict[str, Any] | None = None
    fit: dict[str, Any] | None = None
    local: dict[str, Any] | None = None
    missed: dict[str, int] | None = None

    @property
    def _is_valid(self) -> bool:
        counts = (self.steps, self.rows, self.good)
        return (
            all(type(n) is int and 0 <= n < 1 << 63 for n in counts)
            and (type(self.seed) is int and self.seed >= 0)
            and (type(self.scale) is float and 0 < self.scale < math.inf)
            and type(self.dynamic) is bool
            and all(type(name) is str for name in (self.optimizer, *self.slots))
            and all(value is None or type(value) is dict for value in (self.data, self.fit, self.local, self.missed))
            and all(type(n) is int and 0 <= n <= self.steps for n in (self.missed or {}).values())
        )

    @property
    def replica_count(self) -> int | None:
        """Number of replicas that have their own state; None if all replicas have the same state."""
        return None if self.local is None else len(self.local["weights"])

    def to_json(self) -> str:
        """Return the scalars as JSON. Raise CheckpointError if the loader's state contains values that JSON cannot
        represent."""
        try:
            known = {n: value for n, value in vars(self).items() if value is not None or n not in ("local", "missed")}
            text = json.dumps(known, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            # `encode` raises an error for text that UTF-8 cannot represent, such as half of a surrogate pair
            return text.encode().decode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state_dict of the loader is not made of numbers and texts: {error}") from None

    @classmethod
    def from_json(cls, text: str | None, where: str) -> CheckpointScalars:
        try:
            table = parse_json((text or "").encode())
            scalars = cls(**{**table, "slots": tuple(table["slots"])})
            if type(table["slots"]) is not list or not scalars._is_valid:
                raise ValueError("a value is of another type or out of range")
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{where}: this state cannot be read: {error}") from None
        return scalars


def collect_checkpoint_scalars(
    state: TrainState, loader: Any, fit: Mapping[str, Any] | None, local: dict[str, Any] | None = None
) -> CheckpointScalars:
    """Collect the scalars of a train state.

    `loader` is an object with a method `state_dict`, or None. `fit` is the progress of the training loop, or None.
    `local` is the result of the synchronization policy's `gather_checkpoint_counters`."""
    optimizer, scaler = state.placement.optimizer, state.scaler
    return CheckpointScalars(
        steps=state.steps,
        rows=state.samples,
        seed=state.seed,
        scale=float(scaler.value),
        good=scaler.steps_since_change,
        dynamic=scaler.dynamic,
        slots=tuple(optimizer.slots),
        optimizer=type(unwrap_optimizer(optimizer)).__name__,
        data=None if loader is None else dict(require_loader_method(loader, "state_dict").state_dict()),
        fit=None if fit is None else dict(fit),
        local=local,
        missed=state.count_missed_steps_by_parameter() or None,
    )


def restore_scalars(state: TrainState, scalars: CheckpointScalars) -> None:
    """Set the counters and the seed of `state` to the values in a checkpoint. Also restore the loss scale if it is
    dynamic in the checkpoint, but not if it is fixed."""
    scale = (scalars.scale, scalars.good) if scalars.dynamic else None
    state.restore_position(scalars.steps, scalars.rows, scalars.seed, scale, scalars.local, scalars.missed)


def require_loader_method(loader: Any, method: str) -> Any:
    if not hasattr(loader, method):
        raise CheckpointError(
            f"the loader is a {type(loader).__name__} without {method}: a data.DataLoader knows its position in the "
            "data; leave loader out to save without it"
        )
    return loader
