"""`ReplayBuffer`: keeps some of the samples that a solver sends. All ranks draw the same batches from it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fsdpx.core.base.safe_files import READABLE, create_file, expanduser, make_folder, open_file, read_json, write_file
from fsdpx.core.comm.default_communicator import all_gather_plain_value, get_rank_and_size
from fsdpx.errors import CheckpointError, ConfigError, DataError
from fsdpx.ext.coupling.messages import PartFacts, find_overlap, parse_number_dtype, to_native_byte_order_on_host
from fsdpx.ext.fields.channel_statistics import (
    ChannelStatistics,
    all_gather_and_merge_moments,
    compute_statistics_from_moments,
    merge_batch_into_moments,
)
from fsdpx.ext.fields.grid import Grid

__all__ = ["ReplayBatch", "ReplayBuffer"]

POLICIES = ("fifo", "reservoir", "priority")
PRIORITY_EXPONENT = 0.6
"""Exponent of a sample's priority in its probability of being drawn (alpha in Schaul et al. 2016)."""
MAX_FACTS_BYTES = 1 << 30
FACTS = "buffer.json"


class ReplayBatch(NamedTuple):
    """Samples drawn from a `ReplayBuffer`.

    Attributes
    ----------
    ids : integers that identify the samples; a sample's ID is the number of samples that were added before it
    fields : one array for each field, which holds the field's values in all samples; samples are along dim 0
    weights : importance weight of each sample, at most 1, which compensates for drawing in proportion to priorities
    """

    ids: np.ndarray
    fields: tuple[np.ndarray, ...]
    weights: np.ndarray


class ReplayBuffer:
    """Keeps up to `capacity` of the samples that are added, and draws batches from them. Each rank keeps its part of
    each field.

    All ranks of the grid must make the same calls in the same order. Because the random number generators of all ranks
    start from the same seed, all ranks keep and draw the same samples.

    Parameters
    ----------
    capacity : maximum number of samples
    grid : the grid that partitions the added fields; it must have no ghost cells
    policy : which sample a new sample replaces when the buffer is full. "fifo": the oldest sample. "reservoir": a
        random sample or none, so that every sample that was ever added is kept with the same probability (algorithm R
        of Vitter 1985). "priority": the oldest sample; in addition, samples are drawn with probabilities proportional
        to priority^0.6 (Schaul et al. 2016), and a new sample gets the highest priority in the buffer
    seed : seed of the random numbers, an integer of at least 0, the same on all ranks; default 0

    Raises
    ------
    ConfigError : if the capacity is below 1, the policy is unknown, the seed is negative, or the grid has ghost cells
    """

    def __init__(
        self, capacity: int, grid: Grid, policy: Literal["fifo", "reservoir", "priority"] = "fifo", *, seed: int = 0
    ) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(f"ReplayBuffer(capacity={capacity!r}): give the number of samples to keep, at least 1")
        if policy not in POLICIES:
            raise ConfigError(f"ReplayBuffer(policy={policy!r}): choose one of {', '.join(POLICIES)}")
        if not isinstance(grid, Grid) or any(any(sides) for sides in grid.ghosts):
            raise ConfigError(f"ReplayBuffer(grid={grid!r}): give an fsdpx.Grid without ghost cells")
        if type(seed) is not int or seed < 0:
            raise ConfigError(f"ReplayBuffer(seed={seed!r}): give an integer of at least 0, the same on all ranks")
        self.capacity, self.policy, self._grid = capacity, policy, grid
        self._part = PartFacts(grid.layout, grid.shape, grid.offsets, grid.local_shape)
        self._random = np.random.default_rng(seed)
        self._samples: list[tuple[np.ndarray, ...]] = []
        self._ids = np.empty(0, np.int64)
        self._priorities = np.empty(0)
        self._count = 0
        self._moments: list[np.ndarray | None] = []

    def __len__(self) -> int:
        """Return the number of samples in the buffer."""
        return len(self._samples)

    def add(self, *fields: Any) -> None:
        """Add a copy of a sample, unless the policy discards it. Collective over the grid.

        Parameters
        ----------
        fields : this rank's parts of one or more fields, in the grid's layout, with or without a channels dim; all
            samples must have the same number of fields, dtypes and numbers of channels

        Raises
        ------
        DataError : on all ranks, if an array of any rank is not numeric, is complex or not finite, does not have the
            shape of that rank's part, or differs from earlier samples in dtype or number of channels; no rank then
            keeps the sample
        """
        arrays: tuple[np.ndarray, ...] = ()
        moments: list[np.ndarray | None] = []
        error = ""
        try:
            arrays = tuple(to_native_byte_order_on_host(field, f"field {i}").copy() for i, field in enumerate(fields))
            self._require_fitting_fields(arrays)
            moments = self._merge_moments_of_new_sample(arrays)
        except DataError as problem:
            error = str(problem)
        for rank, text in enumerate(all_gather_plain_value(self._grid.comm, error)):
            if text:
                raise DataError(f"ReplayBuffer.add: rank {rank}: {text}")
        self._moments = moments
        number, self._count = self._count, self._count + 1
        if len(self) < self.capacity:
            self._samples.append(arrays)
            self._ids = np.append(self._ids, number)
            self._priorities = np.append(self._priorities, self._priorities.max(initial=0.0) or 1.0)
            return
        if self.policy == "reservoir":
            slot = int(self._random.integers(number + 1))
        else:
            slot = int(self._ids.argmin())
        if slot < self.capacity:
            self._samples[slot], self._ids[slot] = arrays, number
            self._priorities[slot] = self._priorities.max()

    def sample(self, batch_size: int) -> ReplayBatch:
        """Draw samples with replacement.

        Parameters
        ----------
        batch_size : number of samples

        Returns
        -------
        ReplayBatch
            with the attributes `ids` (integers that identify the samples, for `update_priorities`), `fields` (arrays
            with a leading dim of samples) and `weights`, (batch_size,). With policy "priority", a weight is 1 /
            (samples * probability), divided by the highest of these values in the buffer; otherwise it is 1

        Raises
        ------
        DataError : if the buffer is empty, or `batch_size` is not an integer of at least 1
        """
        if not isinstance(batch_size, int | np.integer) or isinstance(batch_size, bool) or batch_size < 1:
            raise DataError(f"ReplayBuffer.sample({batch_size!r}): give the number of samples, at least 1")
        if not self._samples:
            raise DataError("ReplayBuffer.sample: the buffer is empty: add a sample first")
        chances = self._priorities**PRIORITY_EXPONENT
        chances /= chances.sum()
        if self.policy == "priority":
            slots = self._random.choice(len(self), batch_size, p=chances)
            weights = chances.min() / chances[slots]
        else:
            slots, weights = self._random.integers(len(self), size=batch_size), np.ones(batch_size)
        fields = zip(*(self._samples[slot] for slot in slots), strict=True)
        return ReplayBatch(self._ids[slots], tuple(np.stack(arrays) for arrays in fields), weights)

    def update_priorities(self, ids: Sequence[int] | np.ndarray, priorities: Sequence[float] | np.ndarray) -> None:
        """Set the priorities of samples, such as their losses. Samples that have been replaced are ignored.

        Parameters
        ----------
        ids : integers that identify the samples, as returned by `sample`
        priorities : a number above 0 for each of these samples, the same on all ranks

        Raises
        ------
        ConfigError : if the policy is not "priority"
        DataError : if a priority is not a finite number above 0, or the lengths differ
        """
        if self.policy != "priority":
            raise ConfigError(f"ReplayBuffer.update_priorities: policy={self.policy!r} has none: use 'priority'")
        numbers, values = np.asarray(ids), np.asarray(priorities, np.float64)
        if numbers.shape != values.shape or not (np.isfinite(values) & (values > 0)).all():
            raise DataError(
                f"ReplayBuffer.update_priorities: {values.size} priorities for {numbers.size} samples: give a finite "
                "number above 0 for each"
            )
        slots = {number: slot for slot, number in enumerate(self._ids.tolist())}
        for number, value in zip(numbers.ravel().tolist(), values.ravel().tolist(), strict=True):
            if number in slots:
                self._priorities[slots[number]] = value

    def gather_statistics(self) -> tuple[ChannelStatistics, ...]:
        """Return the mean and standard deviation of each channel of each field, over all cells of all samples that were
        ever added, for `nn.Standardize`. Collective over the grid.

        Returns
        -------
        tuple of ChannelStatistics
            one for each field, computed in float64 with the formula of Chan et al. (1979), as in
            `gather_channel_statistics`

        Raises
        ------
        DataError : if no sample has been added
        """
        if not self._moments:
            raise DataError("ReplayBuffer.gather_statistics: no sample was added")
        return tuple(
            compute_statistics_from_moments(all_gather_and_merge_moments(self._grid.comm, one, ""))
            for one in self._moments
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the buffer to a folder. Any number of ranks can load it later. Collective over the grid.

        Each rank writes files with its parts. An earlier buffer in this folder is replaced only when the new one is
        complete.

        Parameters
        ----------
        path : a folder, on a file system that all ranks share

        Raises
        ------
        CheckpointError : on all ranks, if a rank cannot write its files
        """
        folder, comm = expanduser(path), self._grid.comm
        token = all_gather_plain_value(comm, os.urandom(8).hex())[0]
        number, problem = get_rank_and_size(self._grid.comm)[0], ""
        try:
            make_folder(folder, private=False)
            for i, _ in enumerate(self._list_dtypes_and_channel_counts()):
                with os.fdopen(create_file(folder / make_file_name(i, token, number), READABLE), "wb") as file:
                    for sample in self._samples:
                        file.write(np.ascontiguousarray(sample[i]).reshape(-1).view(np.uint8).data)
        except OSError as error:
            problem = f"rank {number}: {error}"
        moments = [all_gather_and_merge_moments(comm, one, "") for one in self._moments]
        everyone = all_gather_plain_value(comm, (problem, tuple(self._part)))
        if number == 0 and not any(text for text, _ in everyone):
            problem = self._write_metadata_and_remove_old_buffers(
                folder, token, [part for _, part in everyone], moments
            )
        texts = [text for text in all_gather_plain_value(comm, problem) if text]
        if texts:
            raise CheckpointError(f"ReplayBuffer.save({str(folder)!r}): {texts[0]}")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the content of this buffer with the content of a saved buffer. Any number of ranks may have saved it.
        The state of the random number generator is restored as well. Collective over the grid.

        Parameters
        ----------
        path : the folder that was passed to `save`

        Raises
        ------
        CheckpointError : on all ranks, if the folder has no complete buffer, or the saved buffer differs from this one
            in capacity, policy, field size or layout
        """
        folder, problem = expanduser(path), ""
        try:
            facts = read_json(folder / FACTS, MAX_FACTS_BYTES, ours=False)
            parts = [PartFacts(layout, *map(tuple, rest)) for layout, *rest in facts["parts"]]
            ours = [self.capacity, self.policy, self._part.layout, list(self._part.shape)]
            theirs = [facts["capacity"], facts["policy"], parts[0].layout, list(parts[0].shape)]
            if ours != theirs:
                raise ValueError(f"capacity, policy, layout and shape are {theirs}, but this buffer has {ours}")
            fields = [self._read_field(folder, i, facts, parts) for i in range(len(facts["kinds"]))]
            ids, priorities = (np.array(facts[name], dtype) for name, dtype in (("ids", "i8"), ("priorities", "f8")))
            moments = [None if one is None else np.array(one, np.float64) for one in facts["moments"]]
            count, random = int(facts["count"]), np.random.default_rng()
            random.bit_generator.state = facts["random"]
            if ids.ndim != 1 or len({len(ids), len(priorities), *map(len, fields)}) > 1 or len(moments) != len(fields):
                raise ValueError(f"{FACTS} is damaged: its lists differ in length")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError) as error:
            damaged = isinstance(error, (LookupError, TypeError, AttributeError))
            problem = f"{FACTS} is damaged ({type(error).__name__}: {error})" if damaged else f"{error}"
        texts = [text for text in all_gather_plain_value(self._grid.comm, problem) if text]
        if texts:
            raise CheckpointError(f"ReplayBuffer.load({str(folder)!r}): {texts[0]}")
        self._samples = list(zip(*fields, strict=True))
        self._ids, self._priorities, self._count, self._random = ids, priorities, count, random
        # the saved moments cover all ranks, so only rank 0 keeps them; otherwise, they would be counted once per rank
        is_first = get_rank_and_size(self._grid.comm)[0] == 0
        self._moments = moments if is_first else [None] * len(moments)

    def _list_dtypes_and_channel_counts(self) -> list[tuple[str, int]]:
        """Return the dtype and the number of channels of each field. The number is -1 if a field has no channels
        dim."""
        kinds, layout = [], self._part.layout
        for array in self._samples[0] if self._samples else ():
            has_channels = "c" in layout and array.ndim == len(layout)
            kinds.append((array.dtype.name, array.shape[layout.index("c")] if has_channels else -1))
        return kinds

    def _write_metadata_and_remove_old_buffers(
        self, folder: Path, token: str, parts: list[Any], moments: list[np.ndarray | None]
    ) -> str:
        """Write the file that marks the saved buffer as complete, and remove files of earlier buffers. Return an error
        message, or "" on success."""
        facts = {
            "capacity": self.capacity, "policy": self.policy, "token": token, "parts": parts, "count": self._count,
            "kinds": self._list_dtypes_and_channel_counts(), "ids": self._ids.tolist(),
            "priorities": self._priorities.tolist(), "random": self._random.bit_generator.state,
            "moments": [None if one is None else one.tolist() for one in moments],
        }  # fmt: skip
        try:
            write_file(folder / FACTS, json.dumps(facts), READABLE)
        except OSError as error:
            return str(error)
        for old in folder.glob("field-*.bin"):
            if token not in old.name:
                with suppress(OSError):
                    old.unlink()
        return ""

    def _read_field(self, folder: Path, i: int, facts: dict[str, Any], parts: Sequence[PartFacts]) -> np.ndarray:
        """Return this rank's part of field `i` for all saved samples, read from the files of the ranks that saved
        them."""
        (dtype, channels), count = facts["kinds"][i], len(facts["ids"])
        whole = np.empty((count, *self._part.compute_array_shape(channels)), parse_number_dtype(dtype))
        for rank, theirs in enumerate(parts):
            ranges = find_overlap(rank, self._part, theirs).ranges
            here, there = (part.make_slices_for_ranges(ranges, channels >= 0) for part in (self._part, theirs))
            if whole[(slice(None), *here)].size:
                shape = (count, *theirs.compute_array_shape(channels))
                name = make_file_name(i, facts["token"], rank)
                with open_file(folder / name, ours=False) as file:
                    if (size := os.fstat(file.fileno()).st_size) != prod(shape) * whole.itemsize:
                        raise ValueError(
                            f"{name} has {size} bytes, which do not make an array of {whole.dtype} {shape}"
                        )
                    saved = np.memmap(file, whole.dtype, "r", 0, shape)
                    whole[(slice(None), *here)] = saved[(slice(None), *there)]
        return whole

    def _require_fitting_fields(self, arrays: tuple[np.ndarray, ...]) -> None:
        """Raise DataError if an array does not have the shape of this rank's part, or if the sample differs from
        earlier ones in its number of fields, dtypes or numbers of channels."""
        layout = self._part.layout
        for i, array in enumerate(arrays):
            has_channels = "c" in layout and array.ndim == len(layout)
            shape = self._part.compute_array_shape(array.shape[layout.index("c")] if has_channels else -1)
            if array.shape != shape or array.dtype.kind == "c":
                raise DataError(
                    f"field {i} has shape {array.shape} and dtype {array.dtype}, but this rank's part has "
                    f"{self._part.local_shape} cells, in layout {layout!r}: pass real numbers of this shape"
                )
        if not arrays:
            raise DataError("give at least one field")
        if self._samples:
            kinds, before = ([(a.dtype.name, a.shape) for a in sample] for sample in (arrays, self._samples[0]))
            if kinds != before:
                raise DataError(f"this sample has fields {kinds}, but earlier samples have {before}")

    def _merge_moments_of_new_sample(self, arrays: tuple[np.ndarray, ...]) -> list[np.ndarray | None]:
        """Return the moments of all samples added so far, including the new sample, whose fields are `arrays`."""
        layout, before = self._part.layout, self._moments or [None] * len(arrays)
        channels = [
            np.moveaxis(a, layout.index("c"), 0) if "c" in layout and a.ndim == len(layout) else a[None] for a in arrays
        ]
        return [merge_batch_into_moments(*pair, False) for pair in zip(before, channels, strict=True)]


def make_file_name(field: int, token: str, rank: int) -> str:
    """Return the name of the file that holds a rank's part of a field. `token` is different for each save."""
    return f"field-{field}-{token}-{rank}.bin"
