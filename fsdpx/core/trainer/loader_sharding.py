"""Check that the data loaders of all ranks shard the same dataset in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np

from fsdpx.core.comm.desync_check import format_calls_by_rank
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.errors import ConfigError, DataError, warn

__all__ = ["ShardingLoader", "check_loader_sharding_on_all_ranks"]

NOT_KNOWN = -(2**62)
"""Placeholder for an unknown value. It is smaller than any value that ranks compare."""


@runtime_checkable
class ShardingLoader(Protocol):
    """A loader that yields this rank's share of a dataset, such as `data.DataLoader`."""

    dataset: Any
    sampler: Any
    """The sampler that selects this rank's samples: a `data.DistributedSampler`, or an object with its attributes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def iterate_independently(self) -> Iterator[Any]:
        """Iterate over the batches from the start, independently of an iteration in progress."""

    def hash_first_sample(self) -> int | None:
        """Return a hash of the first sample; None if it cannot be hashed."""


def check_loader_sharding_on_all_ranks(call_runner: CallRunner, *loaders: Any) -> None:
    """Raise an error on all ranks if a DataLoader is sharded over ranks other than the trainer's data ranks, or if the
    ranks' datasets differ in length or order. Warn if only the first samples of the datasets differ. Collective."""
    place = call_runner.data_group.rank, call_runner.data_group.size
    # with the option `domain`, ranks hold different parts of a sample, so hashes of samples cannot be compared
    compared = call_runner.world.size > 1 and call_runner.placement.sample_layout.has_complete_samples
    samplers = [loader.sampler for loader in loaders if isinstance(loader, ShardingLoader)]
    wrong = [s.size for s in samplers if (s.rank, s.size) != place and not s.presharded]
    rows = [1 + call_runner.rank if wrong else 0, max(wrong, default=0)]
    for loader in loaders:
        rows += _encode_min_and_max(_encode_sample_or_batch_count(loader, place[1])) + _encode_min_and_max(
            _get_first_sample_hash(loader) if compared else None
        )
        rows += _encode_min_and_max(_hash_settings_of_sample_order(loader, place[1]))
    rank, size, *spans = call_runner.all_reduce_max(np.array(rows, np.int64), "fit").tolist()
    if rank:
        raise ConfigError(
            f"fit: the DataLoader of rank {rank - 1} shares each batch among {size} ranks, which are not the "
            f"{place[1]} data ranks of the trainer: DataLoader(..., comm=trainer.data_group)"
        )
    for sampler in samplers:
        sampler.uneven = sampler.presharded and place[1] > 1
    for i, loader in enumerate(loaders):
        high, low, last, first, row, other = spans[6 * i : 6 * i + 6]
        if high + low > 0:
            _gather_lengths_for_error_and_raise(call_runner, loader)
        if row + other > 0:
            raise ConfigError(
                "fit: the DataLoaders of the ranks take samples in different orders: batch_size, shuffle, seed, "
                "drop_last and chunks must be the same on all ranks"
            )
        if last + first > 0:
            _warn_of_different_first_samples(call_runner, loader)


def _encode_min_and_max(value: int | None) -> list[int]:
    """Return `[value, -value]`. The elementwise maximum over all ranks then holds the maximum and the negated minimum
    of the value. A rank whose value is None does not affect the result."""
    return [NOT_KNOWN, NOT_KNOWN] if value is None else [value, -value]


def _encode_sample_or_batch_count(loader: Any, size: int) -> int | None:
    """Encode the length of the loader's dataset as a number that must be equal on all ranks. If the loader shards a
    common dataset, return the even number `2 * samples`. If each rank has its own part of the data, return the odd
    number `2 * batches + 1`. The two cases thus never give equal numbers. Return None for a loader of any other kind.
    `size` is the number of data ranks."""
    if not isinstance(loader, ShardingLoader):
        return None
    return 2 * len(loader) + 1 if loader.sampler.presharded and size > 1 else 2 * len(loader.dataset)


def _get_first_sample_hash(loader: Any) -> int | None:
    """Return the hash of the first sample; None if the hash is not known or the loader does not shard a common
    dataset."""
    return loader.hash_first_sample() if isinstance(loader, ShardingLoader) and not loader.sampler.presharded else None


def _hash_settings_of_sample_order(loader: Any, size: int) -> int | None:
    """Return a hash of the settings that determine the order of samples, such as seed and batch size. The hash must be
    the same on all ranks. Return None if each rank has its own part of the data. `size` is the number of data ranks."""
    if not isinstance(loader, ShardingLoader) or (loader.sampler.presharded and size > 1):
        return None
    s = loader.sampler
    return crc32(repr((s.batch, s.shuffle, s.seed, s.drop_last, s.reproducible_chunks)).encode())


def _gather_lengths_for_error_and_raise(call_runner: CallRunner, loader: Any) -> None:
    """Raise a DataError that shows the length of the dataset on every rank. Collective."""
    everyone = np.zeros(call_runner.world.size, np.int64)
    everyone[call_runner.rank] = _encode_sample_or_batch_count(loader, call_runner.data_group.size) or 0
    lengths = call_runner.all_reduce_max(everyone, "fit").tolist()
    words = {r: f"{n // 2} {'batches of its own' if n % 2 else 'samples'}" for r, n in enumerate(lengths) if n}
    raise DataError(
        f"fit: the datasets of the ranks differ in length: {format_calls_by_rank(words)}. "
        "DataLoader(comm=trainer.data_group) takes the "
        "whole dataset on every rank and cuts it; where each rank has its own part already, DataLoader(dataset, "
        "samples of this rank, rank=0, size=1) takes that as it is, and must give as many batches on every rank"
    )


def _warn_of_different_first_samples(call_runner: CallRunner, loader: Any) -> None:
    """Warn on rank 0 that the first sample differs between ranks, unless it changes each time it is read, as with
    random augmentation. Collective."""
    changes = _get_first_sample_hash(loader) != _get_first_sample_hash(loader)
    if not call_runner.all_reduce_max(np.array([int(changes)]), "fit")[0] and call_runner.rank == 0:
        warn(
            f"fsdpx: the datasets of the ranks have {len(loader.dataset)} samples each and differ in the first one, "
            "and each rank trains on its share of its own dataset alone: give all ranks the same dataset, or, where "
            "each has its own part already, say DataLoader(dataset, samples of this rank, rank=0, size=1)",
        )
