"""MPI-first distributed training on NumPy and CuPy arrays.

    model = nn.Chain(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    trainer = model.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-3), strategy="fsdp")
    loss = trainer.step(x, y)

Importing this package loads neither MPI nor Numba nor CuPy; names are fetched from their floors when first used."""

# ruff: noqa: F401, F403 - imported for type checkers; at run time the table below says where a name lives
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fsdpx.version import __version__

if TYPE_CHECKING:
    from fsdpx import data, errors, models, nn, optim, testing
    from fsdpx.checkpoint.load import WeightsReport
    from fsdpx.codecs import Between, Cast, Codec, Int8, Plain, PowerSGD, TopK
    from fsdpx.comm.backend import FakeCommunicator
    from fsdpx.comm.communicator import Communicator, Handle, ReduceOp
    from fsdpx.comm.mesh import Mesh
    from fsdpx.comm.opening import spawn
    from fsdpx.config import Elastic, Offload, Precision, Sharding
    from fsdpx.facade.adapters import load_adapter, merged_parameters, save_adapter
    from fsdpx.facade.builder import ModelBuilder
    from fsdpx.facade.distribute import distribute
    from fsdpx.facade.dryrun import dry_run
    from fsdpx.facade.functional import *
    from fsdpx.facade.latest import latest
    from fsdpx.launch.call import launch
    from fsdpx.launch.info import info
    from fsdpx.launch.options import LaunchConfig
    from fsdpx.layout.grid import Grid
    from fsdpx.observe.folder import RunFolder
    from fsdpx.observe.trace import Trace
    from fsdpx.optim.average import EMA, SWA
    from fsdpx.strategies import Async, Gossip, Local
    from fsdpx.trainer.recipe import Machinery
    from fsdpx.trainer.saves import Checkpoints
    from fsdpx.trainer.trainer import Trainer
    from fsdpx.watch.preempt import Preempted, Preemption

    plan: Any  # a package that is called

_FLOORS = ("data", "errors", "launch", "models", "nn", "optim", "plan", "testing")
_NAMES = {
    "fsdpx.checkpoint.load": ("WeightsReport",),
    "fsdpx.codecs": ("Between", "Cast", "Codec", "Int8", "Plain", "PowerSGD", "TopK"),
    "fsdpx.comm.communicator": ("Communicator", "Handle", "ReduceOp"),
    "fsdpx.comm.backend": ("FakeCommunicator",),
    "fsdpx.comm.mesh": ("Mesh",),
    "fsdpx.comm.opening": ("spawn",),
    "fsdpx.config": ("Elastic", "Offload", "Precision", "Sharding"),
    "fsdpx.layout.grid": ("Grid",),
    "fsdpx.facade.adapters": ("load_adapter", "merged_parameters", "save_adapter"),
    "fsdpx.facade.builder": ("ModelBuilder",),
    "fsdpx.facade.distribute": ("distribute",),
    "fsdpx.facade.dryrun": ("dry_run",),
    "fsdpx.facade.functional": (
        "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "finalize", "gather", "init",
        "is_initialized", "local_rank", "rank", "recv", "reduce", "reduce_scatter", "scatter", "send", "world_size",
    ),
    "fsdpx.facade.latest": ("latest",),
    "fsdpx.launch.info": ("info",),
    "fsdpx.launch.options": ("LaunchConfig",),
    "fsdpx.observe.folder": ("RunFolder",),
    "fsdpx.observe.trace": ("Trace",),
    "fsdpx.optim.average": ("EMA", "SWA"),
    "fsdpx.strategies": ("Async", "Gossip", "Local"),
    "fsdpx.trainer.recipe": ("Machinery",),
    "fsdpx.trainer.saves": ("Checkpoints",),
    "fsdpx.trainer.trainer": ("Trainer",),
    "fsdpx.watch.preempt": ("Preempted", "Preemption"),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_FLOORS, *_HOME]


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        if name in _FLOORS:
            return import_module(f"fsdpx.{name}")
        if name in _HOME:
            value = globals()[name] = getattr(import_module(_HOME[name]), name)
            return value
        from fsdpx.words import absent

        raise absent(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """The class of this module: gives layers their `as_distributed`, so that `fsdpx.nn` need not import what uses it.

    However `fsdpx.nn` is imported, Python then sets it as an attribute of this module."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "nn":
            value.Layer._distribute = staticmethod(lambda model, **options: self.distribute(model, **options))


sys.modules[__name__].__class__ = _Package
