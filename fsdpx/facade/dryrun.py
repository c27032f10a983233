"""A dry run: any rank of any world runs a step on shapes alone and counts bytes, calls and memory. No MPI, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.comm.fake import FakeCommunicator
from fsdpx.engine.activations import activation_bytes
from fsdpx.errors import ConfigError
from fsdpx.facade.distribute import distribute
from fsdpx.nn.layer import Layer
from fsdpx.program import SLOTS, VERBS, Action, Program
from fsdpx.trainer.report import Report
from fsdpx.trainer.trainer import Trainer

__all__ = ["DryRun", "dry_run"]

GROWING = frozenset(
    op
    for op, verb in VERBS.items()
    for kind in (word.partition(":")[0] for word in (*verb.gives, *verb.adds))
    if kind == "edge" or SLOTS[kind].memory == "activations"
)
"""Verbs after which there may be more activations than before."""


@dataclass(frozen=True)
class DryRun:
    """program: the step. report: counted traffic and memory of one step. activations: most bytes of activations alive
    at once, in forward outputs, what backward keeps, and their gradients."""

    program: Program
    report: Report
    trainer: Trainer
    activations: int


def dry_run(
    model: Layer,
    x: Any,
    y: Any,
    *,
    ranks: int,
    rank: int = 0,
    **options: Any,
) -> DryRun:
    """Run one step of one rank on shapes alone: no MPI, no data.

    Parameters
    ----------
    x, y : this rank's batch as (shape, dtype) pairs, a tuple or dict of them for several inputs
    ranks, rank : how many ranks there would be, and which of them this is
    options : those of `fsdpx.distribute`, without comm, device and backend
    """
    for name in ("comm", "device", "backend"):
        if name in options:
            raise ConfigError(f"dry_run decides {name} itself")
    trainer = distribute(model, comm=FakeCommunicator(rank, ranks), device="shape", **options)
    trainer.reset()
    held: list[int] = []

    def look(action: Action) -> None:
        if action.op in GROWING:
            held.append(activation_bytes(trainer.engine.state))

    trainer.engine.observers.append(look)
    trainer.step(_shapes(x), _shapes(y))
    program = trainer.engine.ran
    assert program is not None
    return DryRun(program, trainer.report(), trainer, max(held))


def _shapes(spec: Any) -> Any:
    from fsdpx.array.namespace import dtype
    from fsdpx.array.shapes import ShapeArray

    if isinstance(spec, dict):
        return {name: _shapes(one) for name, one in spec.items()}
    if isinstance(spec, Sequence) and len(spec) == 2 and isinstance(spec[1], str):
        return ShapeArray(tuple(spec[0]), dtype(spec[1]))
    return tuple(_shapes(one) for one in spec)
