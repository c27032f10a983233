"""What a run is beside its arrays: steps, loss scale, seed, position in the data; as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpx.checkpoint.format import unique
from fsdpx.errors import CheckpointError
from fsdpx.state.state import TrainState

__all__ = ["Scalars", "restore", "scalars_of"]


@dataclass(frozen=True)
class Scalars:
    """steps: updates made. rows: samples since the last one. scaler: value and good steps of the loss scale. seed: of
    all random numbers, which are functions of it and of the place in training. slots: of the optimiser. data: what a
    loader's `state_dict` gave, if there was one. fit: how far the training loop was, if there was one."""

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

    def text(self) -> str:
        """CheckpointError if the state of the data holds more than JSON can."""
        try:
            return json.dumps(vars(self), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state_dict of the loader is not made of numbers and texts: {error}") from None

    @classmethod
    def parse(cls, text: str | None, where: str) -> Scalars:
        try:
            table = json.loads(text or "", object_pairs_hook=unique)
            made = cls(**{**table, "slots": tuple(table["slots"])})
            good = all(type(n) is int and n >= 0 for n in (made.steps, made.rows, made.seed, made.good))
            if not good or type(made.scale) is not float or not made.scale > 0:
                raise ValueError("numbers out of range")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{where}: this state cannot be read: {error}") from None
        return made


def scalars_of(state: TrainState, loader: Any, fit: Mapping[str, Any] | None) -> Scalars:
    """loader: anything with `state_dict`, or None."""
    optimizer, scaler = state.placement.optimizer, state.scaler
    return Scalars(
        steps=state.steps,
        rows=state.samples,
        seed=state.seed,
        scale=float(scaler.value),
        good=scaler.good,
        dynamic=scaler.dynamic,
        slots=tuple(optimizer.slots),
        optimizer=type(optimizer).__name__,
        data=None if loader is None else dict(demand_state(loader, "state_dict").state_dict()),
        fit=None if fit is None else dict(fit),
    )


def restore(state: TrainState, scalars: Scalars) -> None:
    """Go on where `scalars` were taken."""
    scale = (scalars.scale, scalars.good) if scalars.dynamic else None
    state.resume(scalars.steps, scalars.rows, scalars.seed, scale)


def demand_state(loader: Any, method: str) -> Any:
    if not hasattr(loader, method):
        raise CheckpointError(
            f"the loader is a {type(loader).__name__} without {method}: a data.DataLoader knows its place in the data; "
            "leave loader out to save without it"
        )
    return loader
