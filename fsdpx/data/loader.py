"""The loader: batches of a dataset for this rank, prepared ahead."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from queue import Empty, Full, Queue
from typing import Any

import numpy as np

from fsdpx.data.dataset import Dataset, collate, emptied
from fsdpx.data.sampler import DistributedSampler, Pass
from fsdpx.errors import ConfigError, DataError
from fsdpx.words import refusing

__all__ = ["DataLoader", "Prefetch"]

POLL = 0.2  # seconds between looks at `stopped` while the queue is full


@dataclass
class _Channel:
    """What the iterator and its thread share. The thread has no reference to the iterator, so that garbage collection
    of the iterator ends the thread."""

    queue: Queue[tuple[str, Any]]
    stopped: bool = field(default=False)


def _fill(source: Iterator[Any], channel: _Channel) -> None:
    def put(kind: str, value: Any) -> None:
        while not channel.stopped:
            try:
                return channel.queue.put((kind, value), timeout=POLL)
            except Full:
                continue

    try:
        for item in source:
            put("item", item)
            if channel.stopped:
                return
        put("end", None)
    except BaseException as error:
        put("error", error)


def _stop(channel: _Channel) -> None:
    channel.stopped = True  # takes no lock: it may run inside the garbage collection of any thread


class Prefetch:
    """Iterates over `source` with up to `depth` items ready. An exception of the source is raised from `next`, with its
    traceback. The thread ends with exhaustion, `close()` or garbage collection."""

    def __init__(self, source: Iterator[Any], depth: int, name: str) -> None:
        self._channel = _Channel(Queue(depth))
        self._thread = threading.Thread(target=_fill, args=(source, self._channel), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._channel)
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
        """End the thread and wait for it (for the item it is reading)."""
        self._finalizer()
        while self._thread.is_alive():
            try:
                self._channel.queue.get_nowait()
            except Empty:
                self._thread.join(POLL / 10)


class DataLoader:
    """Iterates over this rank's batches of one epoch.

    A batch is what the dataset's `take` or `collate` returns, `(x, y)` for the datasets of this package; of a short
    last batch a rank may get zero rows. An exception while reading is raised where the batch was requested. A loop
    inside another one, as over the training data to validate, has batches of its own: the place that `state_dict` tells
    is that of the outer loop. The thread ends with the loop, with `close()`, `with`, or garbage
    collection. DataError for a dataset that does not give a single batch.

    Parameters
    ----------
    dataset : samples by number, see `Dataset`
    batch_size : samples of the GLOBAL batch, which the ranks share; it is the same at any number of ranks
    comm : a communicator of the data-parallel ranks, or any object with `rank` and `size`; None: the
        default communicator
    rank, size, shuffle, seed, drop_last, chunks : as in `DistributedSampler`; rank=0, size=1 without comm: the dataset
        holds the samples of this rank alone, and batch_size counts those
    sampler : instead of batch_size, comm and these six
    collate : list of samples -> batch; None: `take` of the dataset if it has one, else stack
    transform : batch -> batch; it runs, as collate does, in the thread that reads
    prefetch : batches read ahead by a thread, which makes no call to MPI; 0: no thread
    """

    @refusing
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
        chunks: int | None = None,
        sampler: DistributedSampler | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
    ) -> None:
        if len(dataset) == 0:
            raise DataError(f"DataLoader: the dataset ({type(dataset).__name__}) is empty")
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ConfigError(f"DataLoader(prefetch={prefetch!r}): a number of batches, 0 or more, is needed")
        if sampler is None:
            order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "chunks": chunks}
            sampler = DistributedSampler(len(dataset), rank, size, comm=comm, batch=_size(batch_size), **order)
        else:
            given = {"batch_size": batch_size, "comm": comm, "rank": rank, "size": size, "chunks": chunks}
            _check_unused(given, shuffle, seed, drop_last)
            if sampler.n != len(dataset):
                raise ConfigError(f"DataLoader: the sampler is of {sampler.n} samples, the dataset has {len(dataset)}")
        self.dataset, self.sampler, self.prefetch = dataset, sampler, prefetch
        self.collate, self.transform = collate, transform
        self._running: weakref.WeakSet[_Iteration] = weakref.WeakSet()

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.sampler.batch

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing if that is the current one."""
        if epoch != self.epoch:
            self.close()
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Global batches of an epoch, the same on every rank."""
        return self.sampler.steps

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self.sampler.begin())

    def aside(self) -> Iterator[Any]:
        """The batches of the current epoch from its start on, without moving the place in the data."""
        return self._iterate(Pass(self.sampler, self.epoch, 0))

    def _iterate(self, under_way: Pass) -> Iterator[Any]:
        iteration = _Iteration(self, under_way)
        self._running.add(iteration)
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position after the last batch that was received, not read ahead; the same on every rank, valid at
        any number of ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where `state_dict` was taken."""
        self.close()
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """End the iterations in progress and their threads, if any."""
        for running in list(self._running):
            running.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, indices: np.ndarray) -> Any:
        """The batch of these samples `(k,)`; k may be 0."""
        several = getattr(self.dataset, "__getitems__", None)  # as PyTorch and Hugging Face have it
        take = getattr(self.dataset, "take", None) if several is None else None
        if take is not None and self.collate is None:
            batch = take(indices)
        else:
            stack, numbers = self.collate or collate, indices.tolist()
            samples = several(numbers) if several and numbers else [self.dataset[i] for i in numbers]
            batch = stack(samples) if samples else emptied(stack([self.dataset[0]]))
        return self.transform(batch) if self.transform else batch

    def __repr__(self) -> str:
        return f"DataLoader({type(self.dataset).__name__}, {self.sampler!r}, prefetch={self.prefetch})"


class _Iteration:
    """One epoch in progress. Advances the sampler's position as the consumer receives batches."""

    def __init__(self, loader: DataLoader, under_way: Pass) -> None:
        self._pass = under_way
        source = _read(loader, self._pass.epoch, self._pass.position)
        name = f"fsdpx loader (rank {loader.sampler.rank})"
        self._source: Any = Prefetch(source, loader.prefetch, name) if loader.prefetch else source

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if not self._pass.open:
            raise StopIteration
        try:
            batch, after = next(self._source)
        except StopIteration:
            self._pass.end()
            raise
        except BaseException:
            self._pass.open = False
            raise
        self._pass.move(after)
        return batch

    def close(self) -> None:
        self._pass.open = False
        self._source.close()


def _read(loader: DataLoader, epoch: int, position: int) -> Iterator[tuple[Any, int]]:
    """(batch, position after it) of an epoch."""
    sampler = loader.sampler
    for share in sampler.plan(epoch, position):
        try:
            batch = loader.read(share.indices)
        except Exception as error:
            where = f"samples {position} to {share.after} of epoch {epoch}"
            error.add_note(f"[loader of rank {sampler.rank}] while reading the global batch of {where}")
            raise
        position = share.after
        yield batch, position


def _size(batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or index(batch_size) < 1:
        raise ConfigError(f"DataLoader(batch_size={batch_size!r}): the size of the global batch, 1 or more, is needed")
    return index(batch_size)


def _check_unused(given: dict[str, Any], shuffle: bool, seed: int, drop_last: bool) -> None:
    """ConfigError if options are given that the sampler already decides."""
    names = [name for name, value in given.items() if value is not None]
    names += [n for n, v in {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}.items() if v]
    if names:
        raise ConfigError(f"DataLoader: the sampler decides {', '.join(names)}: give them to it")
