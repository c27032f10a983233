"""Predicts the traffic, memory and time of a step before a job is submitted, and searches for the best configuration.

    fsdpx.plan.predict(model, batch, ranks=64, machine="a100-dgx-200g", strategy="fsdp").seconds
    print(fsdpx.plan(model, batch=batch, ranks=64, machine="a100-dgx-200g", memory="40GiB"))

The package itself is callable: `fsdpx.plan(...)` calls `fsdpx.plan.search(...)`."""

import sys
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fsdpx.errors import ConfigError
from fsdpx.plan.result import Candidate, Plan
from fsdpx.plan.kernels import KernelRates
from fsdpx.plan.machine import Compute, NetworkLevel, Machine, DiskSpeed
from fsdpx.plan.prediction import Prediction, predict
from fsdpx.plan.searching import search
from fsdpx.plan.world_step import RankClass

if TYPE_CHECKING:
    from fsdpx.plan.prediction import predict as _predict
    from fsdpx.plan.searching import search as _search

__all__ = [
    "Candidate", "Compute", "DiskSpeed", "KernelRates", "Machine", "NetworkLevel", "Plan", "Prediction", "RankClass",
    "predict", "search",
]  # fmt: skip


class CallablePackage(ModuleType):
    """Module type of this package. It makes the package itself callable, as a shortcut for `search`, and tells type
    checkers what the package contains."""

    if TYPE_CHECKING:
        from fsdpx.plan.kernels import KernelRates as KernelRates
        from fsdpx.plan.machine import Compute as Compute, DiskSpeed as DiskSpeed, Machine as Machine
        from fsdpx.plan.machine import NetworkLevel as NetworkLevel
        from fsdpx.plan.prediction import Prediction as Prediction
        from fsdpx.plan.result import Candidate as Candidate, Plan as Plan
        from fsdpx.plan.world_step import RankClass as RankClass

        __call__ = search = staticmethod(_search)
        predict = staticmethod(_predict)
    else:

        def __call__(self, *arguments: Any, **options: Any) -> Plan:
            """Search for the fastest configuration: call `search` with these arguments. Raise ConfigError if the
            arguments do not match the signature of `search`."""
            try:
                signature(search).bind(*arguments, **options)
            except TypeError as error:
                machine = f"machine= is {', '.join(Machine.list_names())}, or the file that measure-machine writes"
                raise ConfigError(f"fsdpx.plan(model, batch=, ranks=, machine=): {error}; {machine}") from None
            return search(*arguments, **options)


sys.modules[__name__].__class__ = CallablePackage
