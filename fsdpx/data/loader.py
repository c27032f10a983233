"""The sampler, which shuffles samples and splits global batches over the ranks, and the data loader, which reads this
rank's batches ahead of time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import index
from queue import Empty, Full, Queue
from typing import Any
from zlib import crc32

import numpy as np

from fsdpx.core.array.random import random_permutation
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.comm.default_communicator import get_rank_info, require_valid_intracomm, to_mpi4py
from fsdpx.core.state.batch_samples import record_sample_digest
from fsdpx.data.dataset import Dataset, collate, hash_first_sample, make_empty_batch
from fsdpx.errors import ConfigError, DataError

__all__ = ["BatchShard", "DataLoader", "DistributedSampler", "EpochPass", "Prefetch"]


@dataclass(frozen=True)
class BatchShard:
    """A rank's shard of one global batch.

    Parameters
    ----------
    indices : indices of this rank's samples in the dataset, int64; may be empty
    global_rows : number of samples in the global batch
    position_after : number of samples of the epoch that all ranks together have received, up to and including this
        batch
    """

    indices: np.ndarray
    global_rows: int
    position_after: int


class DistributedSampler:
    """Shuffles the samples 0 .. n-1 by (seed, epoch), divides them into global batches, and splits each global batch
    over the ranks.

    The global batch of step k (from 0) is `order[k * batch : (k + 1) * batch]`. From a global batch of L samples, rank
    r gets samples `L * r // size` up to, but not including, `L * (r + 1) // size`. The global batches are therefore the
    same for any number of ranks, and each sample occurs exactly once per epoch: no sample is repeated as padding.

    Iterating over the sampler yields this rank's indices one by one; `iterate_batches()` yields one array per step.
    Both advance `epoch` and `position`, the number of samples of the epoch that all ranks together have received. At
    the end of an epoch, `epoch` is incremented. If a loop was left early, a new loop restarts the epoch, unless
    `load_state_dict` is called before the new loop. A loop inside another loop iterates over the full epoch and
    advances neither `epoch` nor `position`.

    Parameters
    ----------
    n : number of samples in the dataset
    rank, size : index of this data rank, and number of data ranks; if None, they are taken from `comm`. With rank=0,
        size=1 and no comm, the dataset must contain only this rank's samples. They are then not split over ranks
        (`presharded` is True), and `batch` counts only this rank's samples. If `fit` uses such samplers on several
        ranks, the ranks may have different numbers of samples. `fit` then sets `uneven` to True, and `state_dict`
        leaves out `n`
    comm : a communicator of the data ranks, or any object with `rank` and `size`; if None, use the default communicator
        if one exists, and otherwise all ranks of this job
    shuffle : whether each epoch has a new random order; if False, the order is 0 .. n-1
    seed : seed of the random order
    drop_last : whether to leave out the last global batch if it is shorter than `batch`
    batch : number of samples in a global batch; if None, it is `size`, so that rank r gets order[r::size], as in
        PyTorch
    reproducible_chunks : number of chunks of a global batch, like the trainer's option of the same name. `batch` must
        be a multiple of this number, each rank gets entire chunks, and a short batch is truncated to a multiple of this
        number
    """

    @wrap_with_option_check
    def __init__(
        self,
        n: int,
        rank: int | None = None,
        size: int | None = None,
        *,
        comm: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch: int | None = None,
        reproducible_chunks: int | None = None,
    ) -> None:
        self.presharded, self.uneven = comm is None and (rank, size) == (0, 1), False
        rank, size = _get_rank_and_size(comm, rank, size)
        self.n, self.rank, self.size = (
            _require_int_at_least("n", n, 0),
            _require_int_at_least("rank", rank, 0),
            _require_int_at_least("size", size, 1),
        )
        if self.n == 0:
            raise DataError("DistributedSampler(n=0): the dataset is empty")
        if self.rank >= self.size:
            raise ConfigError(f"DistributedSampler(rank={rank}, size={size}): ranks count from 0 to size - 1")
        self.shuffle, self.seed, self.drop_last = bool(shuffle), _require_int_at_least("seed", seed, 0), bool(drop_last)
        self.batch = self.size if batch is None else _require_int_at_least("batch", batch, 1)
        chunks = reproducible_chunks
        self.reproducible_chunks = None if chunks is None else _require_int_at_least("reproducible_chunks", chunks, 1)
        if self.reproducible_chunks and self.batch % self.reproducible_chunks:
            raise ConfigError(
                f"DistributedSampler: a global batch of {self.batch} cannot be divided into {self.reproducible_chunks} "
                "equal chunks; the next that can is "
                f"{-(-self.batch // self.reproducible_chunks) * self.reproducible_chunks}"
            )
        if self._count_global_batch_samples(0) == 0:
            raise DataError(
                f"DistributedSampler: {self.n} samples do not give one global batch of {self.batch} "
                f"(drop_last={self.drop_last}, reproducible_chunks={self.reproducible_chunks})"
            )
        self.epoch = self.position = 0
        self._resume = False
        self._pass: weakref.ref[EpochPass] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch. Do nothing if this is already the current epoch.

        Parameters
        ----------
        epoch : number of the epoch, counted from 0
        """
        if _require_int_at_least("epoch", epoch, 0) != self.epoch:
            self.epoch, self.position, self._resume, self._pass = index(epoch), 0, False, None

    def get_global_order(self, epoch: int) -> np.ndarray:
        """Return the order of all samples in an epoch, before they are split over ranks.

        Parameters
        ----------
        epoch : number of the epoch, counted from 0

        Returns
        -------
        array
            sample indices, `(n,)` int64, the same on every rank
        """
        if not self.shuffle:
            return np.arange(self.n)
        return random_permutation(self.seed, f"sampler.{epoch}", self.n)

    def iterate_shards(self, epoch: int, position: int = 0) -> Iterator[BatchShard]:
        """Yield this rank's shard of each global batch of an epoch, without advancing the sampler.

        Parameters
        ----------
        epoch : number of the epoch, counted from 0
        position : number of samples of the epoch to skip

        Returns
        -------
        iterator of BatchShard
            one shard per step
        """
        order = self.get_global_order(epoch)
        while rows := self._count_global_batch_samples(position):
            low, high = self._get_rank_bounds(rows)
            after = position + self.batch
            yield BatchShard(order[position + low : position + high], rows, min(after, self.n))
            position = after

    def begin_pass(self) -> EpochPass:
        """Begin a new pass over an epoch and return it. The pass starts at the position that `load_state_dict` has just
        restored, if any, and otherwise at the beginning of the epoch.

        If several passes are in progress, only the first one advances `epoch` and `position`; the other passes cover
        the full epoch."""
        first = None if self._pass is None else self._pass()
        if first is not None and first.is_open:
            return EpochPass(self, self.epoch, 0)
        if not self._resume:
            self.position = 0
        self._resume = False
        made = EpochPass(self, self.epoch, self.position)
        self._pass = weakref.ref(made)
        return made

    def iterate_batches(self) -> Iterator[np.ndarray]:
        """Yield the indices of this rank's samples, as one array per step. The last array may be empty if the last
        batch is short."""
        epoch_pass = self.begin_pass()
        for share in self.iterate_shards(epoch_pass.epoch, epoch_pass.position):
            epoch_pass.advance_to(share.position_after)
            yield share.indices
        epoch_pass.end_epoch()

    def __iter__(self) -> Iterator[int]:
        for indices in self.iterate_batches():
            yield from indices.tolist()

    def __len__(self) -> int:
        """Return the number of samples that this rank gets per epoch."""
        whole, rest = divmod(self.n, self.batch)
        low, high = self._get_rank_bounds(self.batch)
        low_rest, high_rest = self._get_rank_bounds(self._count_global_batch_samples(self.n - rest))
        return whole * (high - low) + high_rest - low_rest

    @property
    def step_count(self) -> int:
        """Number of global batches per epoch."""
        whole, rest = divmod(self.n, self.batch)
        return whole + (self._count_global_batch_samples(self.n - rest) > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the epoch, the position and the options that determine the order. It is the same on every
        rank, and can be loaded on any number of ranks."""
        over = self._count_global_batch_samples(self.position) == 0
        epoch, position = (self.epoch + 1, 0) if over else (self.epoch, self.position)
        n = {} if self.uneven else {"n": self.n}
        return {"epoch": epoch, "position": position, **n, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from the position where `state_dict` was called.

        Parameters
        ----------
        state : result of `state_dict`

        Raises
        ------
        DataError
            if the state is incomplete, or comes from a dataset of a different size or order (seed, shuffle)
        """
        for name in ("n", "seed", "shuffle"):
            if name in state and state[name] != getattr(self, name):
                raise DataError(
                    f"this state was taken with {name}={state[name]!r}, but the sampler has "
                    f"{getattr(self, name)!r}: its position means other samples"
                )
        missing = [name for name in ("epoch", "position") if name not in state]
        if missing:
            raise DataError(f"this is not the state of a sampler: {' and '.join(missing)} missing, got {sorted(state)}")
        epoch, position = (
            _require_int_at_least("epoch", state["epoch"], 0),
            _require_int_at_least("position", state["position"], 0),
        )
        if position > self.n:
            raise DataError(f"position {position} lies behind the {self.n} samples of an epoch")
        self.epoch, self.position, self._resume, self._pass = epoch, position, True, None

    def is_position_advanced_by_pass(self, epoch_pass: EpochPass) -> bool:
        """Return whether `epoch_pass` advances `epoch` and `position`.

        Parameters
        ----------
        epoch_pass : a pass returned by `begin_pass`

        Returns
        -------
        bool
            True if this pass began before all others that are in progress
        """
        return self._pass is not None and self._pass() is epoch_pass

    def _count_global_batch_samples(self, position: int) -> int:
        """Return the number of samples in the global batch that starts at `position`; 0 if there is no such batch."""
        rows = max(min(self.batch, self.n - position), 0)
        if rows < self.batch:
            rows = 0 if self.drop_last else rows - rows % (self.reproducible_chunks or 1)
        return rows

    def _get_rank_bounds(self, rows: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's slice of a global batch of `rows` samples."""
        pieces = self.reproducible_chunks or rows
        length = rows // self.reproducible_chunks if self.reproducible_chunks else 1
        return pieces * self.rank // self.size * length, pieces * (self.rank + 1) // self.size * length

    def __repr__(self) -> str:
        return f"DistributedSampler({self.n}, rank={self.rank}, size={self.size}, batch={self.batch})"


class EpochPass:
    """An iteration over an epoch. It advances the sampler's position unless an earlier iteration is in progress."""

    def __init__(self, sampler: DistributedSampler, epoch: int, position: int) -> None:
        self.epoch, self.position, self.is_open = epoch, position, True
        self._sampler = sampler

    def advance_to(self, position: int) -> None:
        """Record that the consumer has received the batch that ends at `position`."""
        if self._sampler.is_position_advanced_by_pass(self):
            self._sampler.position = position

    def end_epoch(self) -> None:
        """End the pass, and move the sampler to the start of the next epoch."""
        if self._sampler.is_position_advanced_by_pass(self):
            self._sampler.epoch, self._sampler.position = self.epoch + 1, 0
        self.is_open = False


def _get_rank_and_size(comm: Any, rank: int | None, size: int | None) -> tuple[int, int]:
    if comm is not None:
        if rank is not None or size is not None:
            raise ConfigError("DistributedSampler: pass comm, or rank and size, not both")
        comm = to_mpi4py(comm)
        require_valid_intracomm(comm)
        if not hasattr(comm, "rank"):
            raise ConfigError(
                f"DistributedSampler(comm={comm!r}): a communicator is needed, such as trainer.data_group"
            )
        return comm.rank, comm.size
    if rank is None and size is None:
        return get_rank_info()[:2]
    if rank is None or size is None:
        raise ConfigError(f"DistributedSampler(rank={rank}, size={size}): give both, or neither")
    return rank, size


def _require_int_at_least(name: str, value: Any, minimum: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        raise ConfigError(f"DistributedSampler({name}={value!r}): a whole number, {minimum} or more, is needed")
    return number


def _has_indexed_samples(dataset: Any) -> bool:
    """Return whether indexing a dataset gives its samples. The result is False for a generator, a dict of arrays, or a
    tuple of arrays with different shapes."""
    if isinstance(dataset, tuple) and len({getattr(one, "shape", None) for one in dataset}) > 1:
        return False
    if getattr(dataset, "shape", None) == ():  # a 0-dim array has __len__, but calling it raises an error
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)


MAX_PREFETCHED = 1 << 16
"""Maximum number of batches to read ahead. More batches would not fit into memory anyway, and a much larger number
could overflow a queue's counter."""
POLL_SECONDS = 0.2  # time between checks of `stopped` while the queue is full


@dataclass
class _Channel:
    """State that an iterator shares with its reading thread. The thread holds no reference to the iterator itself, so
    that the thread ends when the iterator is garbage-collected."""

    queue: Queue[tuple[str, Any]]
    stopped: bool = field(default=False)


def _fill_queue(source: Iterator[Any], channel: _Channel) -> None:
    def put_item(kind: str, value: Any) -> None:
        while not channel.stopped:
            try:
                return channel.queue.put((kind, value), timeout=POLL_SECONDS)
            except Full:
                continue

    try:
        for item in source:
            put_item("item", item)
            if channel.stopped:
                return
        put_item("end", None)
    except BaseException as error:
        put_item("error", error)


def _signal_thread_stop(channel: _Channel) -> None:
    # take no lock: garbage collection may call this function in any thread, even in one that already holds the lock
    channel.stopped = True


class Prefetch:
    """Iterates over `source` while a thread reads up to `depth` items ahead.

    If the source raises an exception, `next` raises it with the original traceback. The thread ends when the source is
    exhausted, when `close()` is called, or when the iterator is garbage-collected."""

    def __init__(self, source: Iterator[Any], depth: int, name: str) -> None:
        self._channel = _Channel(Queue(depth))
        self._thread = threading.Thread(target=_fill_queue, args=(source, self._channel), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _signal_thread_stop, self._channel)
        self._thread.start()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        if self._channel.stopped:
            raise StopIteration
        kind, value = self._channel.queue.get()
        if kind == "item":
            return value
        self.close()
        if kind == "end":
            raise StopIteration
        raise value

    def close(self) -> None:
        """Stop the thread, and wait until it has ended. The thread finishes reading its current item before it ends."""
        self._finalizer()
        while self._thread.is_alive():
            try:
                self._channel.queue.get_nowait()
            except Empty:
                self._thread.join(POLL_SECONDS / 10)


class DataLoader:
    """Iterates over this rank's batches of one epoch.

    A batch is the result of the dataset's `take` or of `collate`; for the datasets of this package, it is `(x, y)`. If
    the last batch is short, a rank may get zero samples. An exception in the reading thread is raised again in the loop
    that requests the batch. A loop inside another loop, such as validation on the training data, iterates
    independently; `state_dict` reports the position of the outer loop. The reading thread ends at the end of the loop,
    at the end of a `with` block, when `close()` is called, or when the loader is garbage-collected. Raises DataError if
    the dataset is too small for a single batch.

    Parameters
    ----------
    dataset : the samples; see the protocol `Dataset`
    batch_size : number of samples in the GLOBAL batch, which is split over the ranks; it does not depend on the number
        of ranks
    comm : a communicator of the data-parallel ranks, or any object with `rank` and `size`; if None, use the default
        communicator
    rank, size, shuffle, seed, drop_last, reproducible_chunks : see `DistributedSampler`. rank=0, size=1 without comm
        means that the dataset contains only this rank's samples, and that batch_size counts only this rank's samples
    sampler : a sampler to use instead of the arguments from batch_size to reproducible_chunks
    collate : function from a list of samples to a batch; if None, use the dataset's method `take` if there is one, and
        otherwise stack the samples
    transform : function from batch to batch; like collate, it runs in the reading thread
    prefetch : number of batches that a thread reads ahead; the thread makes no MPI calls. If 0, no thread is used
    """

    @wrap_with_option_check
    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        *,
        comm: Any = None,
        rank: int | None = None,
        size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        reproducible_chunks: int | None = None,
        sampler: DistributedSampler | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
    ) -> None:
        if not _has_indexed_samples(dataset):
            raise ConfigError(
                f"DataLoader({type(dataset).__name__}): a dataset with len() and samples [i] is needed; of arrays make "
                "one by data.ArrayDataset(x, y)"
            )
        if len(dataset) == 0:
            raise DataError(f"DataLoader: the dataset ({type(dataset).__name__}) is empty")
        if not isinstance(prefetch, int) or not 0 <= prefetch <= MAX_PREFETCHED:
            raise ConfigError(
                f"DataLoader(prefetch={prefetch!r}): a number of batches, 0 to {MAX_PREFETCHED}, is needed"
            )
        if sampler is None:
            order: dict[str, Any] = {
                "shuffle": shuffle,
                "seed": seed,
                "drop_last": drop_last,
                "reproducible_chunks": reproducible_chunks,
            }
            sampler = DistributedSampler(
                len(dataset), rank, size, comm=comm, batch=_require_batch_size(batch_size), **order
            )
        else:
            given = {
                "batch_size": batch_size,
                "comm": comm,
                "rank": rank,
                "size": size,
                "reproducible_chunks": reproducible_chunks,
            }
            _require_no_sampler_options(given, shuffle, seed, drop_last)
            if sampler.n != len(dataset):
                raise ConfigError(f"DataLoader: the sampler is of {sampler.n} samples, the dataset has {len(dataset)}")
        self.dataset, self.sampler, self.prefetch = dataset, sampler, prefetch
        self.collate, self.transform = collate, transform
        self._running: weakref.WeakSet[_EpochIterator] = weakref.WeakSet()

    @property
    def batch_size(self) -> int:
        """Number of samples in a global batch."""
        return self.sampler.batch

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Stop iterations in progress, and move to the start of an epoch. Do nothing if this is already the current
        epoch.

        Parameters
        ----------
        epoch : number of the epoch, counted from 0
        """
        if epoch != self.epoch:
            self.close()
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of global batches per epoch, which is the same on every rank."""
        return self.sampler.step_count

    def __iter__(self) -> Iterator[Any]:
        return self._start_iteration(self.sampler.begin_pass())

    def hash_first_sample(self) -> int | None:
        """Return a hash of the first sample, so that ranks can check that they have the same dataset. See
        `fsdpx.data.dataset.hash_first_sample`."""
        return hash_first_sample(self.dataset)

    def iterate_independently(self) -> Iterator[Any]:
        """Return an iterator over all batches of the current epoch. The iterator does not change the loader's
        position."""
        return self._start_iteration(EpochPass(self.sampler, self.epoch, 0))

    def _start_iteration(self, epoch_pass: EpochPass) -> Iterator[Any]:
        iteration = _EpochIterator(self, epoch_pass)
        self._running.add(iteration)
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the epoch and the position after the last batch that the loop received; batches that were
        read ahead do not count. It is the same on every rank, and can be loaded on any number of ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stop iterations in progress, and make the next iteration continue from the position where `state_dict` was
        called.

        Parameters
        ----------
        state : result of `state_dict`

        Raises
        ------
        DataError
            if the state is incomplete, or comes from a dataset of a different size or order (seed, shuffle)
        """
        self.close()
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """Stop the iterations in progress and their threads."""
        for running in list(self._running):
            running.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read_batch(self, indices: np.ndarray) -> Any:
        """Read the samples at `indices`, and return them as a batch, collated and transformed.

        Parameters
        ----------
        indices : sample indices `(k,)`; k may be 0

        Returns
        -------
        batch
            `(x, y)` for the datasets of this package, with k rows
        """
        # PyTorch and Hugging Face datasets may have this method, which reads all samples of a batch at once
        several = getattr(self.dataset, "__getitems__", None)
        take = getattr(self.dataset, "take", None) if several is None else None
        if take is not None and self.collate is None:
            batch = take(indices)
        else:
            stack, numbers = self.collate or collate, indices.tolist()
            samples = several(numbers) if several and numbers else [self.dataset[i] for i in numbers]
            batch = stack(samples) if samples else make_empty_batch(stack([self.dataset[0]]))
        return self.transform(batch) if self.transform else batch

    def __repr__(self) -> str:
        return f"DataLoader({type(self.dataset).__name__}, {self.sampler!r}, prefetch={self.prefetch})"


class _EpochIterator:
    """Iterator over the batches of one epoch. It advances the sampler's position when the consumer receives a batch,
    not when the batch is read ahead."""

    def __init__(self, loader: DataLoader, epoch_pass: EpochPass) -> None:
        self._pass = epoch_pass
        source = _iterate_batches_with_positions(loader, self._pass.epoch, self._pass.position)
        name = f"fsdpx loader (rank {loader.sampler.rank})"
        self._source: Any = Prefetch(source, loader.prefetch, name) if loader.prefetch else source

    def __iter__(self) -> _EpochIterator:
        return self

    def __next__(self) -> Any:
        if not self._pass.is_open:
            raise StopIteration
        try:
            batch, after, indices = next(self._source)
        except StopIteration:
            self._pass.end_epoch()
            raise
        except BaseException:
            self._pass.is_open = False
            raise
        self._pass.advance_to(after)
        record_sample_digest(batch, crc32(indices.tobytes()))
        return batch

    def close(self) -> None:
        self._pass.is_open = False
        self._source.close()


def _iterate_batches_with_positions(
    loader: DataLoader, epoch: int, position: int
) -> Iterator[tuple[Any, int, np.ndarray]]:
    """Yield the batches from `position` to the end of an epoch, as (batch, position after the batch, indices of the
    batch's samples). Positions count the samples of all ranks."""
    sampler = loader.sampler
    for share in sampler.iterate_shards(epoch, position):
        try:
            batch = loader.read_batch(share.indices)
        except Exception as error:
            where = f"samples {position} to {share.position_after} of epoch {epoch}"
            error.add_note(f"[loader of rank {sampler.rank}] while reading the global batch of {where}")
            raise
        position = share.position_after
        yield batch, position, share.indices


def _require_batch_size(batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or index(batch_size) < 1:
        raise ConfigError(f"DataLoader(batch_size={batch_size!r}): the size of the global batch, 1 or more, is needed")
    return index(batch_size)


def _require_no_sampler_options(given: dict[str, Any], shuffle: bool, seed: int, drop_last: bool) -> None:
    """Raise ConfigError if the caller passed both a sampler and an option that the sampler determines."""
    names = [name for name, value in given.items() if value is not None]
    names += [n for n, v in {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}.items() if v]
    if names:
        raise ConfigError(f"DataLoader: the sampler determines {', '.join(names)}: pass them to the sampler")
