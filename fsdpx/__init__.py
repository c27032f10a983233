"""MPI-first distributed training on NumPy and CuPy arrays.

    model = nn.Chain(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    trainer = model.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-3), strategy="fsdp")
    loss = trainer.step(x, y)

Importing this package loads neither MPI nor Numba nor CuPy; names are fetched from their floors when first used."""

from typing import TYPE_CHECKING, Any

from fsdpx.lazy_names import attach
from fsdpx.version import __version__ as __version__

if TYPE_CHECKING:
    from fsdpx import data as data, errors as errors, models as models, nn as nn, optim as optim, testing as testing
    from fsdpx.checkpoint.load import WeightsReport as WeightsReport
    from fsdpx.codecs import (
        Between as Between, Cast as Cast, Codec as Codec, Int8 as Int8, Plain as Plain, PowerSGD as PowerSGD,
        TopK as TopK,
    )  # fmt: skip
    from fsdpx.comm.backend import FakeCommunicator as FakeCommunicator
    from fsdpx.comm.communicator import Communicator as Communicator, Handle as Handle, ReduceOp as ReduceOp
    from fsdpx.comm.mesh import Mesh as Mesh
    from fsdpx.comm.opening import spawn as spawn
    from fsdpx.config import Elastic as Elastic, Offload as Offload, Precision as Precision, Sharding as Sharding
    from fsdpx.facade.adapters import (
        load_adapter as load_adapter, merged_parameters as merged_parameters, save_adapter as save_adapter,
    )  # fmt: skip
    from fsdpx.facade.builder import ModelBuilder as ModelBuilder
    from fsdpx.facade.distribute import distribute as distribute
    from fsdpx.facade.dryrun import dry_run as dry_run
    from fsdpx.facade.functional import (
        all_gather as all_gather, all_reduce as all_reduce, all_to_all as all_to_all, barrier as barrier,
        broadcast as broadcast, finalize as finalize, gather as gather, init as init, is_initialized as is_initialized,
        local_rank as local_rank, rank as rank, recv as recv, reduce as reduce, reduce_scatter as reduce_scatter,
        scatter as scatter, send as send, world_size as world_size,
    )  # fmt: skip
    from fsdpx.facade.latest import latest as latest
    from fsdpx.launch.call import launch as launch
    from fsdpx.launch.info import info as info
    from fsdpx.launch.options import LaunchConfig as LaunchConfig
    from fsdpx.layout.grid import Grid as Grid
    from fsdpx.observe.folder import RunFolder as RunFolder
    from fsdpx.observe.trace import Trace as Trace
    from fsdpx.optim.average import EMA as EMA, SWA as SWA
    from fsdpx.strategies import Async as Async, Gossip as Gossip, Local as Local
    from fsdpx.trainer.recipe import Machinery as Machinery
    from fsdpx.trainer.saves import Checkpoints as Checkpoints
    from fsdpx.trainer.trainer import Trainer as Trainer
    from fsdpx.watch.preempt import Preempted as Preempted, Preemption as Preemption

    plan: Any  # a package that is called
else:
    __getattr__, __dir__, __all__ = attach(__name__)
