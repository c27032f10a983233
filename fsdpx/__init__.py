"""MPI-first distributed training on NumPy and CuPy arrays.

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    trainer = model.as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=1e-3), strategy="fsdp")
    loss = trainer.step(x, y)

Importing this package does not load MPI, Numba or CuPy; each name is imported from its module when first used."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes
from fsdpx.core.base.version import __version__ as __version__

if TYPE_CHECKING:
    from fsdpx import data as data, errors as errors, models as models, nn as nn, optim as optim, testing as testing
    from fsdpx.core.checkpoint.load import WeightsReport as WeightsReport
    from fsdpx.core.compression import (
        HierarchicalCompression as HierarchicalCompression,
        Cast16 as Cast16,
        Codec as Codec,
        NoCompression as NoCompression,
    )
    from fsdpx.ext.compression.int8 import Int8 as Int8
    from fsdpx.ext.compression.powersgd import PowerSGD as PowerSGD
    from fsdpx.ext.compression.topk import TopK as TopK
    from fsdpx.core.comm.backend import FakeCommunicator as FakeCommunicator
    from fsdpx.core.comm.communicator import Communicator as Communicator, Handle as Handle, ReduceOp as ReduceOp
    from fsdpx.core.comm.mesh import Mesh as Mesh
    from fsdpx.core.comm.init import spawn as spawn
    from fsdpx.core.base.config import (
        Precision as Precision,
        Sharding as Sharding,
        TraceConfig as TraceConfig,
    )
    from fsdpx.ext.lora.adapters import (
        load_adapter as load_adapter, gather_merged_parameters as gather_merged_parameters,
        save_adapter as save_adapter,
    )  # fmt: skip
    from fsdpx.launch.builder import ModelBuilder as ModelBuilder
    from fsdpx.core.trainer.distribute import distribute as distribute
    from fsdpx.plan import CallablePackage
    from fsdpx.plan.dry_run import dry_run as dry_run
    from fsdpx.core.trainer.array_collectives import (
        all_gather as all_gather, all_reduce as all_reduce, all_to_all as all_to_all, barrier as barrier,
        broadcast as broadcast, gather as gather, recv as recv, reduce as reduce, reduce_scatter as reduce_scatter,
        scatter as scatter, send as send,
    )  # fmt: skip
    from fsdpx.core.trainer.initialize import (
        finalize as finalize, init as init, is_initialized as is_initialized, local_rank as local_rank, rank as rank,
        world_size as world_size,
    )  # fmt: skip
    from fsdpx.core.trainer.latest import latest_checkpoint as latest_checkpoint
    from fsdpx.launch.python_api import launch as launch
    from fsdpx.launch.info import info as info
    from fsdpx.launch.options import LaunchConfig as LaunchConfig
    from fsdpx.ext.coupling.bridge import Bridge as Bridge
    from fsdpx.ext.fields.grid import Grid as Grid
    from fsdpx.ext.meshes.mesh_level import MeshLevel as MeshLevel
    from fsdpx.ext.meshes.partition import Partition as Partition
    from fsdpx.ext.elastic.config import ElasticConfig as ElasticConfig
    from fsdpx.ext.offload.choice import OffloadConfig as OffloadConfig
    from fsdpx.ext.observe.folder import RunFolder as RunFolder
    from fsdpx.optim.average import EMA as EMA, SWA as SWA
    from fsdpx.ext.asynchronous import AsyncSGD as AsyncSGD, GossipSGD as GossipSGD, LocalSGD as LocalSGD
    from fsdpx.core.trainer.recipe import RuntimeOptions as RuntimeOptions
    from fsdpx.core.trainer.fit_checkpoints import CheckpointConfig as CheckpointConfig
    from fsdpx.core.trainer.trainer import Trainer as Trainer
    from fsdpx.ext.watch.preempt import JobPreempted as JobPreempted, Preemption as Preemption

    plan: CallablePackage
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
