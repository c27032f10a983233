"""Which samples are trained on when, and by which rank: global batches first, ranks second."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from fsdpx.array.random import permutation
from fsdpx.errors import ConfigError, DataError

__all__ = ["DistributedSampler", "Share"]


@dataclass(frozen=True)
class Share:
    """A rank's part of one global batch.

    indices: its samples, int64, maybe none. rows: samples of the global batch. after: position in the epoch's
    order once this batch is done.
    """

    indices: np.ndarray
    rows: int
    after: int


class DistributedSampler:
    """The samples 0 .. n-1, ordered by (seed, epoch), cut into global batches, each shared by the ranks.

    Step k's global batch is order[k batch : (k+1) batch]. Rank r of `size` holds elements floor(len r / size)
    to floor(len (r+1) / size) of it, so at any world size the global batches are the same and each sample
    comes exactly once per epoch; nothing is repeated to fill up.

    batch: samples of a global batch; None means `size`, one per rank (rank r gets order[r::size], as in
    PyTorch).
    drop_last: leave out a last global batch that is shorter than `batch`.
    chunks: for a trainer with `chunks=S`: `batch` is a multiple of S, and rank r holds chunks floor(S r /
    size) to floor(S (r+1) / size) of S equal pieces. What of a short last batch does not divide by S is left
    out.

    It iterates over this rank's indices; `batches()` gives them one array per step. `epoch` and `position`
    (samples of the global order that are done) move along; an epoch that ended makes way for the next. A loop
    that was left early starts its epoch again, unless `load_state_dict` came before.
    """

    def __init__(
        self,
        n: int,
        rank: int = 0,
        size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch: int | None = None,
        chunks: int | None = None,
    ) -> None:
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

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The epoch it is in already goes on where it is."""
        if _whole("epoch", epoch, 0) != self.epoch:
            self.epoch, self.position, self._resume = index(epoch), 0, False

    def order(self, epoch: int) -> np.ndarray:
        """The global order of an epoch, `(n,)` int64, the same on every rank."""
        if not self.shuffle:
            return np.arange(self.n)
        return permutation(self.seed, f"sampler.{epoch}", self.n)

    def plan(self, epoch: int, position: int = 0) -> Iterator[Share]:
        """This rank's shares of an epoch from `position` on. Changes nothing."""
        order = self.order(epoch)
        while rows := self._rows(position):
            low, high = self._bounds(rows)
            after = position + self.batch
            yield Share(order[position + low : position + high], rows, min(after, self.n))
            position = after

    def start(self) -> int:
        """Where an iteration that begins now begins: 0, or right after `load_state_dict` where that says."""
        if not self._resume:
            self.position = 0
        self._resume = False
        return self.position

    def ended(self) -> None:
        """The epoch is done: on to the next."""
        self.epoch, self.position = self.epoch + 1, 0

    def batches(self) -> Iterator[np.ndarray]:
        """This rank's indices, one array per step; the array of a short batch may be empty."""
        for share in self.plan(self.epoch, self.start()):
            self.position = share.after
            yield share.indices
        self.ended()

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
        """Where it stands: the same on every rank, good for any world size."""
        over = self._rows(self.position) == 0
        epoch, position = (self.epoch + 1, 0) if over else (self.epoch, self.position)
        return {"epoch": epoch, "position": position, "n": self.n, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. A state of other data or another order is a DataError."""
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
        self.epoch, self.position, self._resume = epoch, position, True

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


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"DistributedSampler({name}={value!r}): a whole number, {least} or more, is needed")
    return number
