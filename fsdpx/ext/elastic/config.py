"""`ElasticConfig`, the option `elastic`: how many copies of each rank's state exist, and how many ranks train."""

from __future__ import annotations

from os import PathLike
from typing import Any, ClassVar

from fsdpx.core.base.config import convert_fields_to_python_numbers
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.extensions import import_extension_module
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.core.comm.communicator import SurvivorCommunicator
from fsdpx.core.comm.default_communicator import get_default
from fsdpx.core.comm.init import open_fault_tolerant_communicator
from fsdpx.core.comm.watched import detach_and_return_watchdog
from fsdpx.core.trainer.call_runner import CallRunner, CallRunnerChoice
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.errors import ConfigError
from fsdpx.ext.elastic.exclusions import ELASTIC

__all__ = ["ElasticConfig"]


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class ElasticConfig(CallRunnerChoice):
    """Options of elastic training, passed as `distribute(..., elastic=ElasticConfig(...))`. elastic=True uses the
    default of every option.

    Parameters
    ----------
    copies : number of other ranks that keep a copy of each rank's state, in addition to data-parallel replicas; the run
        survives the simultaneous failure of any `copies` ranks
    every : number of steps from one copy to the next, and therefore the maximum number of steps to repeat after a
        failure (default: chosen so that copying takes about 1 % of the time)
    ranks : number of ranks that train at first (default: all that the mesh can use); the other ranks are idle
    resize : path of a file that contains the number of ranks that should train; a change of this number takes effect at
        the next step
    """

    excluded: ClassVar[str] = ELASTIC

    copies: int = 1
    every: int | None = None
    ranks: int | None = None
    resize: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        for name, least in (("copies", 0), ("every", 1), ("ranks", 1)):
            value = getattr(self, name)
            if not (value is None and name != "copies") and (type(value) is not int or value < least):
                raise ConfigError(f"ElasticConfig({name}={value!r}): a whole number, {least} or more")

    def open_world(self, comm: Any) -> SurvivorCommunicator:
        return open_fault_tolerant_communicator(comm)

    def make_call_runner(self, recipe: Recipe, world: Any) -> CallRunner:
        # imported here to avoid an import cycle: the runner's module imports this module
        module = import_extension_module("fsdpx.ext.elastic.call_runner", "elastic training")
        runner: CallRunner = module.ElasticRunner(recipe, world, self)
        if (opened := get_default()) is not None:
            # stop a watchdog that covers all initial ranks, because it would end the job when one of them dies
            detach_and_return_watchdog(opened.comm)
        return runner
