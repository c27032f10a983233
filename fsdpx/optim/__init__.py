"""Optimizers and learning-rate schedules. An optimizer updates this rank's flat parameter shard in place."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.optim import schedules as schedules
    from fsdpx.optim.adam import Adam as Adam, AdamW as AdamW
    from fsdpx.optim.average import EMA as EMA, SWA as SWA
    from fsdpx.optim.lamb import LAMB as LAMB
    from fsdpx.optim.lion import Lion as Lion
    from fsdpx.optim.muon import Muon as Muon
    from fsdpx.optim.optimizer import (
        SlotFormat as SlotFormat, Optimizer as Optimizer, LearningRate as LearningRate, no_decay as no_decay,
        get_learning_rate as get_learning_rate,
    )  # fmt: skip
    from fsdpx.optim.segments import (
        ParamGroups as ParamGroups,
        HyperparameterSpan as HyperparameterSpan,
        ShardSegment as ShardSegment,
        ShardSegments as ShardSegments,
    )
    from fsdpx.optim.sgd import SGD as SGD
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
