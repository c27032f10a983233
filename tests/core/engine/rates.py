"""A training in which the learning rate of one rank is another one."""

from collections.abc import Callable
from typing import Any

import numpy as np
from models import CASES, make, part

from fsdpx import optim
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError

LATE = "ranks differ in the learning rate of step 3: {}: 0.125; rank 1: 0.25. A schedule is a function of the step"


def rated(comm: Communicator, ours: Callable[[int], Any], how: str = "step", **options: Any) -> tuple[int, str]:
    """Steps made, and the error. ours: the rate of rank 1."""
    steps = 0
    try:
        schedule = ours if comm.rank == 1 else lambda step: 0.125
        trainer = make(comm, "mlp", options.pop("strategy", "ddp"), optimizer=optim.SGD(lr=schedule), **options)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
        mine = slice(None) if "mesh" in options else part(comm, 12)
        while trainer.global_step < 6:
            steps = trainer.global_step
            getattr(trainer, how)(x[mine], y[mine])
            if how == "accumulate":
                trainer.update()
    except ConfigError as error:
        return steps, str(error)
    return steps, "none"
