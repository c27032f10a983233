"""Means and standard deviations of the channels of distributed data, computed in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.array.sums import combine_moments
from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.comm.default_communicator import all_gather_plain_value, require_valid_intracomm, to_mpi4py
from fsdpx.errors import ConfigError, DataError

__all__ = [
    "ChannelStatistics", "all_gather_and_merge_moments", "compute_statistics_from_moments", "gather_channel_statistics",
    "merge_batch_into_moments",
]  # fmt: skip


class ChannelStatistics(NamedTuple):
    """A pair (mean, standard deviation), each with one value per channel, in the order in which `nn.Standardize` takes
    them. The standard deviation of a constant channel is set to 1, so that dividing by it is safe."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@wrap_with_option_check
def gather_channel_statistics(
    batches: Iterable[Any], *, dim: int = 1, comm: Any = None, skipna: bool = False
) -> ChannelStatistics:
    """Return the mean and standard deviation of each channel over all ranks' data. Collective over `comm`.

    Counts, means and sums of squared deviations are merged in float64 with the formula of Chan et al. (1979), batch by
    batch and then rank by rank. The result is the same on every rank. For a constant channel, the mean is exactly the
    channel's value, and the standard deviation is set to 1. Ranks may pass different numbers of batches, including
    none, and batches may have any size.

    Parameters
    ----------
    batches : this rank's arrays, such as samples, time steps, or parts of fields without ghost cells
    dim : index of the channels dim, such as -1 if channels are last; default 1
    comm : communicator of the ranks that merge their data, such as `grid.comm` or the solver's communicator; if None
        (default), only this rank's data is used
    skipna : whether to ignore NaN values, such as those of land cells; default False

    Returns
    -------
    ChannelStatistics
        mean and std, each a tuple of floats

    Raises
    ------
    DataError : on all ranks, if a channel has no data, if arrays differ in their number of channels, or if a value is
        not finite
    """
    comm = to_mpi4py(comm)
    require_valid_intracomm(comm)
    if comm is not None and not (hasattr(comm, "rank") and hasattr(comm, "size")):
        raise ConfigError(f"gather_channel_statistics(comm={comm!r}): a communicator is needed, such as grid.comm")
    found, problem = None, ""
    try:
        for batch in batches:
            found = merge_batch_into_moments(found, np.moveaxis(to_host(batch), dim, 0), skipna)
    except (DataError, ValueError) as error:
        problem = str(error) or repr(error)
    return compute_statistics_from_moments(all_gather_and_merge_moments(comm, found, problem))


def merge_batch_into_moments(moments: np.ndarray | None, batch: np.ndarray, skipna: bool) -> np.ndarray:
    """Merge the moments (count, mean, sum of squared deviations) of each channel of `batch`, (channels, ...), into
    `moments`, (3, channels), and return the result. `moments` is None before the first batch."""
    rows = batch.reshape(len(batch), int(np.prod(batch.shape[1:]))).astype(np.float64)
    counted = ~np.isnan(rows) if skipna else np.ones(rows.shape, bool)
    count = counted.sum(axis=1).astype(np.float64)
    lowest = np.where(count > 0, rows.min(axis=1, where=counted, initial=np.inf), 0.0)
    # subtract the lowest value of each channel first: in a constant channel, only zeros remain, so the mean has no
    # rounding error
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite raise DataError below
        above = np.where(counted, rows - lowest[:, None], 0.0)
        mean = above.sum(axis=1) / np.maximum(count, 1.0)
        apart = np.where(counted, above - mean[:, None], 0.0)
        new = np.stack([count, lowest + mean, (apart * apart).sum(axis=1)])
    if not np.isfinite(new).all():
        raise DataError(f"channel {int(np.argmin(np.isfinite(new).all(axis=0)))} has values that are not finite")
    if moments is not None and moments.shape != new.shape:
        raise DataError(f"a batch has {new.shape[1]} channels, those before it {moments.shape[1]}")
    return new if moments is None else combine_moments(np, moments, new)


def all_gather_and_merge_moments(comm: Any, moments: np.ndarray | None, error_text: str) -> np.ndarray | None:
    """All-gather the moments of all ranks, and return the moments of all data together, or None if no rank has data. If
    any rank passes a nonempty `error_text`, raise DataError on all ranks. Collective."""
    mine = (error_text, None if moments is None else moments.tolist())
    everyone, whole = [mine], None
    if comm is not None:
        everyone = all_gather_plain_value(comm, mine)
    for rank, (text, values) in enumerate(everyone):
        if text:
            raise DataError(f"gather_channel_statistics: rank {rank}: {text}")
        if values is None:
            continue
        other = np.array(values)
        if whole is not None and whole.shape != other.shape:
            raise DataError(
                f"gather_channel_statistics: rank {rank} has {other.shape[1]} channels, "
                f"ranks before it {whole.shape[1]}"
            )
        whole = other if whole is None else combine_moments(np, whole, other)
    return whole


def compute_statistics_from_moments(whole: np.ndarray | None) -> ChannelStatistics:
    """Return the mean and standard deviation of each channel, given its moments; raise DataError if a channel has no
    data."""
    if whole is None or not whole[0].all():
        raise DataError("gather_channel_statistics: some channel has no data on any rank")
    std = np.sqrt(whole[2] / whole[0])
    return ChannelStatistics(tuple(whole[1].tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))
