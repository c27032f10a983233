"""Datasets, the sampler that splits them over ranks, and the loader that reads batches ahead of time."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.data.dataset import (
        ArrayDataset as ArrayDataset, Dataset as Dataset, TextDataset as TextDataset, TokenDataset as TokenDataset,
        python_stdlib_folder as python_stdlib_folder,
    )  # fmt: skip
    from fsdpx.ext.coupling.replay_buffer import ReplayBuffer as ReplayBuffer
    from fsdpx.ext.fields.dataset import FieldDataset as FieldDataset
    from fsdpx.data.loader import (
        DataLoader as DataLoader,
        DistributedSampler as DistributedSampler,
        BatchShard as BatchShard,
    )
    from fsdpx.ext.fields.cell_volumes import (
        compute_cell_volumes as compute_cell_volumes, compute_latitude_weights as compute_latitude_weights,
    )  # fmt: skip
    from fsdpx.ext.fields.channel_statistics import (
        ChannelStatistics as ChannelStatistics,
        gather_channel_statistics as gather_channel_statistics,
    )
    from fsdpx.data.packing import PackedGraphs as PackedGraphs, pack_graphs as pack_graphs
    from fsdpx.data.supervised import SupervisedDataset as SupervisedDataset
    from fsdpx.data.trajectories import TrajectoryDataset as TrajectoryDataset
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
