"""Data: datasets, the order in which ranks train on their samples, and reading them ahead."""

from fsdpx.data.augment import Augmentation, Draw, RandomCrop, RandomFlip
from fsdpx.data.dataset import ArrayDataset, Dataset
from fsdpx.data.images import ImageFolder
from fsdpx.data.loader import DataLoader
from fsdpx.data.sampler import DistributedSampler, Share
from fsdpx.data.supervised import SupervisedDataset
from fsdpx.data.text import TextDataset, stdlib_sources

__all__ = [
    "ArrayDataset", "Augmentation", "DataLoader", "Dataset", "DistributedSampler", "Draw", "ImageFolder", "RandomCrop",
    "RandomFlip", "Share", "SupervisedDataset", "TextDataset", "stdlib_sources",
]  # fmt: skip
