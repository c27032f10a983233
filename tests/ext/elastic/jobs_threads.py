"""Elastic training on thread ranks: one job, undisturbed or with ranks that die where they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from bits import Bits, bits

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import RankDied

STEPS, ROWS = 4, 6
rng = np.random.default_rng(0)
BATCHES = [(rng.standard_normal((ROWS, 6)), rng.integers(0, 3, ROWS)) for _ in range(STEPS)]


@dataclass(frozen=True)
class Kill:
    """Rank `rank` dies when it comes to its action `at` (text, and how often it was there before)."""

    rank: int
    at: str
    before: int = 0


@dataclass(frozen=True)
class Result:
    """Of a rank that lived: its losses, bits, what happened, and all actions and announcements in order."""

    losses: list[float]
    bits: Bits
    recoveries: list[Any]
    actions: list[str]
    idle: list[bool]


class Killer:
    """An observer that keeps the actions of its rank, and dies at the right one."""

    def __init__(self, rank: int, kills: Sequence[Kill]) -> None:
        self.actions: list[str] = []
        self.due = [kill for kill in kills if kill.rank == rank]

    def __call__(self, action: object) -> None:
        self.actions.append(str(action))
        for kill in self.due:
            if kill.at == str(action) and self.actions.count(kill.at) == kill.before + 1:
                raise RankDied(f"{kill}")


def make(comm: Any, strategy: str = "fsdp", model: Any = None, **options: Any) -> Any:
    model = model or nn.Sequential(
        nn.Linear(6, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 3)
    )
    chosen: dict[str, Any] = {"group_bytes": 0, "reproducible_chunks": ROWS, "elastic": fsdpx.ElasticConfig(every=2)}
    chosen["optimizer"] = optim.AdamW(lr=0.01)
    return model.as_distributed(loss=nn.CrossEntropyLoss(), strategy=strategy, comm=comm, **(chosen | options))


def train(ranks: int, kills: Sequence[Kill] = (), strategy: str = "fsdp", **options: Any) -> list[Result]:
    """What the ranks that live to the end saw."""

    def body(comm: Any) -> Result:
        trainer = make(comm, strategy, **options)
        killer = Killer(comm.rank, kills)
        trainer.inspect.engine.add_observer(killer)
        losses, idle = [], []
        for x, y in BATCHES:
            losses.append(trainer.step(x, y))
            idle.append(not trainer.call_runner.is_training)
        return Result(losses, bits(trainer), trainer.call_runner.recoveries, killer.actions, idle)

    return [result for result in spawn(body, ranks, survive=True, timeout=30) if result is not None]


@cache
def calm(strategy: str, ranks: int) -> list[Result]:
    """Undisturbed: copies change no bits."""
    return train(ranks, (), strategy)
