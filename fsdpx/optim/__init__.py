"""Optimisers: flat, in place, on this rank's shard only; and the schedules of their learning rates."""

from fsdpx.optim import schedules
from fsdpx.optim.adafactor import Adafactor
from fsdpx.optim.adam import Adam, AdamW
from fsdpx.optim.adam8 import AdamW8bit
from fsdpx.optim.average import EMA, SWA
from fsdpx.optim.kept import Kept
from fsdpx.optim.lamb import LAMB
from fsdpx.optim.lion import Lion
from fsdpx.optim.muon import Muon
from fsdpx.optim.onebit import OneBitAdam
from fsdpx.optim.optimizer import Optimizer, Rate, no_decay, rate
from fsdpx.optim.prodigy import Prodigy
from fsdpx.optim.schedulefree import AdamWScheduleFree
from fsdpx.optim.segments import Groups, Run, Segment, Segments
from fsdpx.optim.sgd import SGD
from fsdpx.optim.soap import SOAP

__all__ = [
    "EMA", "LAMB", "SGD", "SOAP", "SWA", "Adafactor", "Adam", "AdamW", "AdamW8bit", "AdamWScheduleFree", "Groups",
    "Kept", "Lion", "Muon", "OneBitAdam", "Optimizer", "Prodigy", "Rate", "Run", "Segment", "Segments", "no_decay",
    "rate", "schedules",
]  # fmt: skip
