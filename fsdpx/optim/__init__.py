"""Optimisers: flat, in place, on this rank's shard only; and the schedules of their learning rates."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import attach

if TYPE_CHECKING:
    from fsdpx.optim import schedules as schedules
    from fsdpx.optim.adam import Adam as Adam, AdamW as AdamW
    from fsdpx.optim.average import EMA as EMA, SWA as SWA
    from fsdpx.optim.lamb import LAMB as LAMB
    from fsdpx.optim.lion import Lion as Lion
    from fsdpx.optim.muon import Muon as Muon
    from fsdpx.optim.optimizer import (
        Kept as Kept, Optimizer as Optimizer, Rate as Rate, no_decay as no_decay, rate as rate,
    )  # fmt: skip
    from fsdpx.optim.segments import Groups as Groups, Run as Run, Segment as Segment, Segments as Segments
    from fsdpx.optim.sgd import SGD as SGD
else:
    __getattr__, __dir__, __all__ = attach(__name__)
