"""Whether the loaders of all ranks share out the same samples, as those of `fsdpx.data` do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np

from fsdpx.core.comm.desync_check import format_calls_by_rank
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.errors import ConfigError, DataError, warn

__all__ = ["SharingLoader", "require_shares"]

NOT_KNOWN = -(2**62)
"""Below all numbers that ranks compare."""


@runtime_checkable
class SharingLoader(Protocol):
    """A loader whose ranks take their parts of one dataset, such as `data.DataLoader`."""

    dataset: Any
    sampler: Any
    """Which samples this rank takes: `data.DistributedSampler`, or what has its attributes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def iterate_aside(self) -> Iterator[Any]:
        """Batches of a loop of their own, inside of another one."""

    def hash_first_sample(self) -> int | None:
        """A number that tells the first sample from others; None if it cannot be told."""


def require_shares(host: CallRunner, *loaders: Any) -> None:
    """An error on all ranks if a DataLoader cuts batches for other ranks than the trainer's, or if datasets that are
    cut differ in length; a warning if they have the same length and begin with other samples. Collective."""
    place = host.data_group.rank, host.data_group.size
    compared = host.world.size > 1 and host.placement.sample_layout.is_whole  # parts differ
    samplers = [loader.sampler for loader in loaders if isinstance(loader, SharingLoader)]
    wrong = [s.size for s in samplers if (s.rank, s.size) != place and not s.presharded]
    rows = [1 + host.rank if wrong else 0, max(wrong, default=0)]
    for loader in loaders:
        rows += _make_span(_count_to_compare(loader, place[1])) + _make_span(
            _get_first_digest(loader) if compared else None
        )
        rows += _make_span(_hash_order(loader, place[1]))
    rank, size, *spans = host.all_reduce_max(np.array(rows, np.int64), "fit").tolist()
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
            _raise_length_error(host, loader)
        if row + other > 0:
            raise ConfigError(
                "fit: the DataLoaders of the ranks take samples in different orders: batch_size, shuffle, seed, "
                "drop_last and chunks must be the same on all ranks"
            )
        if last + first > 0:
            _warn_of_first(host, loader)


def _make_span(value: int | None) -> list[int]:
    """What `most` finds the largest value of all ranks from, and the smallest, negated. None: not known here."""
    return [NOT_KNOWN, NOT_KNOWN] if value is None else [value, -value]


def _count_to_compare(loader: Any, size: int) -> int | None:
    """Twice what must be the same on all ranks: the samples of a dataset that is cut, or the batches of one that each
    rank has cut, and then 1 more."""
    if not isinstance(loader, SharingLoader):
        return None
    return 2 * len(loader) + 1 if loader.sampler.presharded and size > 1 else 2 * len(loader.dataset)


def _get_first_digest(loader: Any) -> int | None:
    """The digest of the first sample of a dataset that is cut, if it is known."""
    return loader.hash_first_sample() if isinstance(loader, SharingLoader) and not loader.sampler.presharded else None


def _hash_order(loader: Any, size: int) -> int | None:
    """What tells orders of samples apart that must be the same on all ranks."""
    if not isinstance(loader, SharingLoader) or (loader.sampler.presharded and size > 1):
        return None
    s = loader.sampler
    return crc32(repr((s.batch, s.shuffle, s.seed, s.drop_last, s.reproducible_chunks)).encode())


def _raise_length_error(host: CallRunner, loader: Any) -> None:
    """DataError that says what each rank has. Collective."""
    everyone = np.zeros(host.world.size, np.int64)
    everyone[host.rank] = _count_to_compare(loader, host.data_group.size) or 0
    lengths = host.all_reduce_max(everyone, "fit").tolist()
    words = {r: f"{n // 2} {'batches of its own' if n % 2 else 'samples'}" for r, n in enumerate(lengths) if n}
    raise DataError(
        f"fit: the datasets of the ranks differ in length: {format_calls_by_rank(words)}. "
        "DataLoader(comm=trainer.data_group) takes the "
        "whole dataset on every rank and cuts it; where each rank has its own part already, DataLoader(dataset, "
        "samples of this rank, rank=0, size=1) takes that as it is, and must give as many batches on every rank"
    )


def _warn_of_first(host: CallRunner, loader: Any) -> None:
    """Warn on rank 0, unless a sample differs each time that it is read. Collective."""
    changes = _get_first_digest(loader) != _get_first_digest(loader)
    if not host.all_reduce_max(np.array([int(changes)]), "fit")[0] and host.rank == 0:
        warn(
            f"fsdpx: the datasets of the ranks have {len(loader.dataset)} samples each and differ in the first one, "
            "and each rank trains on its share of its own dataset alone: give all ranks the same dataset, or, where "
            "each has its own part already, say DataLoader(dataset, samples of this rank, rank=0, size=1)",
        )
