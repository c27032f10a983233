"""Optimisers: flat, in place, on this rank's shard only; and the schedules of their learning rates."""

from typing import TYPE_CHECKING, Any

from fsdpx.optim import schedules
from fsdpx.optim.adam import Adam, AdamW
from fsdpx.optim.average import EMA, SWA
from fsdpx.optim.lamb import LAMB
from fsdpx.optim.lion import Lion
from fsdpx.optim.muon import Muon
from fsdpx.optim.optimizer import Kept, Optimizer, Rate, no_decay, rate
from fsdpx.optim.segments import Groups, Run, Segment, Segments
from fsdpx.optim.sgd import SGD
from fsdpx.words import absent, knowing

__all__ = [
    "EMA", "LAMB", "SGD", "SWA", "Adam", "AdamW", "Groups", "Kept", "Lion", "Muon", "Optimizer", "Rate", "Run",
    "Segment", "Segments", "no_decay", "rate", "schedules",
]  # fmt: skip


for _kind in (EMA, LAMB, SGD, SWA, Adam, AdamW, Lion, Muon, *(getattr(schedules, name) for name in schedules.__all__)):
    knowing(_kind)


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        raise absent(__name__, name, __all__)
