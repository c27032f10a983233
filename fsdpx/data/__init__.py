"""Data: datasets, the order in which ranks train on their samples, and reading them ahead."""

from typing import TYPE_CHECKING, Any

from fsdpx.data.dataset import ArrayDataset, Dataset, TextDataset, TokenDataset, stdlib_sources
from fsdpx.data.fields import FieldDataset
from fsdpx.data.loader import DataLoader, DistributedSampler, Share
from fsdpx.data.statistics import ChannelStatistics, channel_statistics
from fsdpx.data.supervised import SupervisedDataset
from fsdpx.words import absent

__all__ = [
    "ArrayDataset", "ChannelStatistics", "DataLoader", "Dataset", "DistributedSampler", "FieldDataset",
    "Share", "SupervisedDataset", "TextDataset", "TokenDataset", "channel_statistics", "stdlib_sources",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        raise absent(__name__, name, __all__)
