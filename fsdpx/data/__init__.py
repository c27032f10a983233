"""Data: datasets, the order in which ranks train on their samples, and reading them ahead."""

from fsdpx.data.augment import Augmentation, Draw, RandomCrop, RandomFlip
from fsdpx.data.columns import ParquetDataset
from fsdpx.data.dataset import ArrayDataset, Dataset
from fsdpx.data.images import ImageFolder
from fsdpx.data.loader import DataLoader
from fsdpx.data.mixture import Mixture
from fsdpx.data.sampler import DistributedSampler, Share
from fsdpx.data.shards import TarDataset
from fsdpx.data.supervised import SupervisedDataset
from fsdpx.data.text import TextDataset, stdlib_sources
from fsdpx.data.tokens import TokenDataset

__all__ = [
    "ArrayDataset", "Augmentation", "DataLoader", "Dataset", "DistributedSampler", "Draw", "ImageFolder", "Mixture",
    "ParquetDataset", "RandomCrop", "RandomFlip", "Share", "SupervisedDataset", "TarDataset", "TextDataset",
    "TokenDataset", "stdlib_sources",
]  # fmt: skip
