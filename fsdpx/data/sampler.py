"""The samples of every global batch, and the part of each rank: the batches do not depend on the number of ranks."""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from fsdpx.array.random import permutation
from fsdpx.comm.default import place
from fsdpx.errors import ConfigError, DataError

__all__ = ["DistributedSampler", "Pass", "Share"]


@dataclass(frozen=True)
class Share:
    """A rank's part of one global batch.

    Parameters
    ----------
    indices : its samples, int64; may be empty
    rows : samples of the global batch
    after : position in the epoch's order after this batch
    """

    indices: np.ndarray
    rows: int
    after: int


class DistributedSampler:
    """The samples 0 .. n-1, ordered by (seed, epoch), cut into global batches, each split among the ranks.

    Step k's global batch is order[k batch : (k+1) batch]; rank r of `size` has elements floor(len r / size) to
    floor(len (r+1) / size) of it. So the global batches are the same at any number of ranks, and each sample comes
    exactly once per epoch: nothing is repeated as padding.

    Iterating yields this rank's indices; `batches()` yields one array per step. `epoch` and `position` (samples of the
    global order that are done) advance meanwhile, and the end of an epoch begins the next. A loop that was left early
    restarts its epoch, unless `load_state_dict` came before. A loop inside another one reads the whole epoch, and moves
    neither.

    Parameters
    ----------
    n : samples of the dataset
    rank, size : this data rank, and how many there are; None: those of comm; 0 and 1: the dataset holds this rank's own
        samples, which are not cut again (`presharded`), and `batch` counts those of this rank; `fit` on several ranks
        makes it `uneven`: they may have more and fewer samples, so that `state_dict` does not tell how many
    comm : a communicator of the data ranks, or any object with `rank` and `size`; None: the default communicator, or
        all ranks of this job as long as there is none
    shuffle : a new random order every epoch; else 0 .. n-1
    seed : of the order
    drop_last : leave out a last global batch that is shorter than `batch`
    batch : samples of a global batch; None: `size`, so that rank r gets order[r::size], as in PyTorch
    chunks : the trainer's: batch is a multiple of it, ranks get whole chunks, a short batch is cut to a multiple of it
    """

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
        chunks: int | None = None,
    ) -> None:
        self.presharded, self.uneven = comm is None and (rank, size) == (0, 1), False
        rank, size = _place(comm, rank, size)
        self.n, self.rank, self.size = _whole("n", n, 0), _whole("rank", rank, 0), _whole("size", size, 1)
        if self.n == 0:
            raise DataError("DistributedSampler(n=0): the dataset is empty")
        if self.rank >= self.size:
            raise ConfigError(f"DistributedSampler(rank={rank}, size={size}): ranks count from 0 to size - 1")
        self.shuffle, self.seed, self.drop_last = bool(shuffle), _whole("seed", seed, 0), bool(drop_last)
        self.batch = self.size if batch is None else _whole("batch", batch, 1)
        self.chunks = None if chunks is None else _whole("chunks", chunks, 1)
        if self.chunks and self.batch % self.chunks:
            raise ConfigError(
                f"DistributedSampler: a global batch of {self.batch} does not cut into {self.chunks} equal "
                f"chunks; the next that does is {-(-self.batch // self.chunks) * self.chunks}"
            )
        if self._rows(0) == 0:
            raise DataError(
                f"DistributedSampler: {self.n} samples do not give one global batch of {self.batch} "
                f"(drop_last={self.drop_last}, chunks={self.chunks})"
            )
        self.epoch = self.position = 0
        self._resume = False
        self._pass: weakref.ref[Pass] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing if that is the current one."""
        if _whole("epoch", epoch, 0) != self.epoch:
            self.epoch, self.position, self._resume, self._pass = index(epoch), 0, False, None

    def order(self, epoch: int) -> np.ndarray:
        """The global order of an epoch, `(n,)` int64, the same on every rank."""
        if not self.shuffle:
            return np.arange(self.n)
        return permutation(self.seed, f"sampler.{epoch}", self.n)

    def plan(self, epoch: int, position: int = 0) -> Iterator[Share]:
        """This rank's shares of an epoch from `position` on. Does not advance the sampler."""
        order = self.order(epoch)
        while rows := self._rows(position):
            low, high = self._bounds(rows)
            after = position + self.batch
            yield Share(order[position + low : position + high], rows, min(after, self.n))
            position = after

    def begin(self) -> "Pass":
        """Begin a pass over the epoch: where a `load_state_dict` just before says, or at its start.

        Of passes that are under way at once, the first moves `epoch` and `position`; others read the whole epoch."""
        first = None if self._pass is None else self._pass()
        if first is not None and first.open:
            return Pass(self, self.epoch, 0)
        if not self._resume:
            self.position = 0
        self._resume = False
        made = Pass(self, self.epoch, self.position)
        self._pass = weakref.ref(made)
        return made

    def batches(self) -> Iterator[np.ndarray]:
        """This rank's indices, one array per step; the array of a short batch may be empty."""
        under_way = self.begin()
        for share in self.plan(under_way.epoch, under_way.position):
            under_way.move(share.after)
            yield share.indices
        under_way.end()

    def __iter__(self) -> Iterator[int]:
        for indices in self.batches():
            yield from indices.tolist()

    def __len__(self) -> int:
        """Samples that this rank gets in an epoch."""
        whole, rest = divmod(self.n, self.batch)
        low, high = self._bounds(self.batch)
        low_rest, high_rest = self._bounds(self._rows(self.n - rest))
        return whole * (high - low) + high_rest - low_rest

    @property
    def steps(self) -> int:
        """Global batches of an epoch."""
        whole, rest = divmod(self.n, self.batch)
        return whole + (self._rows(self.n - rest) > 0)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position: the same on every rank, valid at any number of ranks."""
        over = self._rows(self.position) == 0
        epoch, position = (self.epoch + 1, 0) if over else (self.epoch, self.position)
        n = {} if self.uneven else {"n": self.n}
        return {"epoch": epoch, "position": position, **n, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; DataError if it is of other data or another order."""
        for name in ("n", "seed", "shuffle"):
            if name in state and state[name] != getattr(self, name):
                raise DataError(
                    f"this state was taken with {name}={state[name]!r}, but the sampler has "
                    f"{getattr(self, name)!r}: its position means other samples"
                )
        missing = [name for name in ("epoch", "position") if name not in state]
        if missing:
            raise DataError(f"this is no state of a sampler: {' and '.join(missing)} missing, got {sorted(state)}")
        epoch, position = _whole("epoch", state["epoch"], 0), _whole("position", state["position"], 0)
        if position > self.n:
            raise DataError(f"position {position} lies behind the {self.n} samples of an epoch")
        self.epoch, self.position, self._resume, self._pass = epoch, position, True, None

    def follows(self, one: "Pass") -> bool:
        """Whether this pass moves `epoch` and `position`."""
        return self._pass is not None and self._pass() is one

    def _rows(self, position: int) -> int:
        """Samples of the global batch that starts at `position`, 0 if there is none."""
        rows = max(min(self.batch, self.n - position), 0)
        if rows < self.batch:
            rows = 0 if self.drop_last else rows - rows % (self.chunks or 1)
        return rows

    def _bounds(self, rows: int) -> tuple[int, int]:
        """This rank's slice of a global batch of `rows` samples."""
        pieces = self.chunks or rows
        length = rows // self.chunks if self.chunks else 1
        return pieces * self.rank // self.size * length, pieces * (self.rank + 1) // self.size * length

    def __repr__(self) -> str:
        return f"DistributedSampler({self.n}, rank={self.rank}, size={self.size}, batch={self.batch})"


class Pass:
    """A pass over an epoch, which moves the sampler's place if it is the one that the sampler follows."""

    def __init__(self, sampler: DistributedSampler, epoch: int, position: int) -> None:
        self.epoch, self.position, self.open = epoch, position, True
        self._sampler = sampler

    def move(self, after: int) -> None:
        """A batch was handed out."""
        if self._sampler.follows(self):
            self._sampler.position = after

    def end(self) -> None:
        """The epoch is over: the next one begins."""
        if self._sampler.follows(self):
            self._sampler.epoch, self._sampler.position = self.epoch + 1, 0
        self.open = False


def _place(comm: Any, rank: int | None, size: int | None) -> tuple[int, int]:
    if comm is not None:
        if rank is not None or size is not None:
            raise ConfigError("DistributedSampler: pass comm, or rank and size, not both")
        return comm.rank, comm.size
    if rank is None and size is None:
        return place()[:2]
    if rank is None or size is None:
        raise ConfigError(f"DistributedSampler(rank={rank}, size={size}): one of them is missing")
    return rank, size


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"DistributedSampler({name}={value!r}): a whole number, {least} or more, is needed")
    return number
