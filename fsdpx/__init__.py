"""MPI-first distributed training on NumPy and CuPy arrays.

    model = nn.Chain(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    trainer = model.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-3), strategy="fsdp")
    loss = trainer.step(x, y)

Importing this package loads neither MPI nor Numba nor CuPy; names are fetched from their rooms when first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fsdpx.version import __version__

if TYPE_CHECKING:
    from fsdpx import data, errors, nn, optim, testing
    from fsdpx.comm.codecs import Cast, Codec, Plain
    from fsdpx.comm.communicator import Communicator, Handle, ReduceOp
    from fsdpx.comm.fake import FakeCommunicator
    from fsdpx.comm.mesh import Mesh
    from fsdpx.comm.threads import spawn
    from fsdpx.config import Precision, Sharding
    from fsdpx.elastic.options import Elastic
    from fsdpx.elastic.trainer import ElasticTrainer
    from fsdpx.facade.distribute import distribute
    from fsdpx.facade.dryrun import dry_run
    from fsdpx.facade.functional import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        finalize,
        gather,
        init,
        is_initialized,
        local_rank,
        rank,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
        world_size,
    )
    from fsdpx.launch.info import info
    from fsdpx.trainer.trainer import Trainer

_ROOMS = ("data", "errors", "nn", "optim", "testing")
_FUNCTIONAL = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "finalize", "gather", "init", "is_initialized",
    "local_rank", "rank", "recv", "reduce", "reduce_scatter", "scatter", "send", "world_size",
)  # fmt: skip
_HOME = dict.fromkeys(_FUNCTIONAL, "fsdpx.facade.functional") | {
    "Cast": "fsdpx.comm.codecs",
    "Checkpoints": "fsdpx.checkpoint",
    "Codec": "fsdpx.comm.codecs",
    "Communicator": "fsdpx.comm.communicator",
    "Elastic": "fsdpx.elastic.options",
    "ElasticTrainer": "fsdpx.elastic.trainer",
    "FakeCommunicator": "fsdpx.comm.fake",
    "Handle": "fsdpx.comm.communicator",
    "Mesh": "fsdpx.comm.mesh",
    "Plain": "fsdpx.comm.codecs",
    "Precision": "fsdpx.config",
    "Preempted": "fsdpx.watch.preempt",
    "Preemption": "fsdpx.watch.preempt",
    "ReduceOp": "fsdpx.comm.communicator",
    "Sharding": "fsdpx.config",
    "Trainer": "fsdpx.trainer.trainer",
    "distribute": "fsdpx.facade.distribute",
    "dry_run": "fsdpx.facade.dryrun",
    "info": "fsdpx.launch.info",
    "layer_costs": "fsdpx.trainer.costs",
    "spawn": "fsdpx.comm.threads",
}

__all__ = [
    "Cast", "Checkpoints", "Codec", "Communicator", "Elastic", "ElasticTrainer", "FakeCommunicator", "Handle", "Mesh",
    "Plain", "Precision", "Preempted", "Preemption", "ReduceOp", "Sharding", "Trainer", "__version__", "all_gather",
    "all_reduce", "all_to_all", "barrier", "broadcast", "data", "distribute", "dry_run", "errors", "finalize", "gather",
    "info", "init", "is_initialized", "layer_costs", "local_rank", "nn", "optim", "rank", "recv", "reduce",
    "reduce_scatter", "scatter", "send", "spawn", "testing", "world_size",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"fsdpx.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module 'fsdpx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """The class of this module: gives layers their `as_distributed`, so that `fsdpx.nn` need not import what uses it.

    However `fsdpx.nn` is imported, Python then sets it as an attribute of this module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "nn":
            value.Layer._distribute = staticmethod(lambda model, **options: self.distribute(model, **options))


sys.modules[__name__].__class__ = _Package
