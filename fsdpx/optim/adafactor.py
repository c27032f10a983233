"""Adafactor: second moments as the product of a row and a column (Shazeer & Stern 2018)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fsdpx.array.sums import PARTS, block_squares, exact_sum, padded
from fsdpx.errors import ConfigError
from fsdpx.optim.factored import Divisors, MatrixPiece, elements, matrix, portion, together
from fsdpx.optim.kept import Kept, places
from fsdpx.optim.optimizer import Rate, Slots, check_number, check_options, has_data
from fsdpx.optim.plain import BLOCK
from fsdpx.optim.segments import Groups, Segment, Segments

__all__ = ["Adafactor"]


@dataclass(frozen=True)
class Adafactor:
    """p -= max(eps[1], RMS(p)) min(lr, 1 / sqrt(t)) u / max(1, RMS(u) / d), with u = g / sqrt(R C / mean(R)). R and C
    are means of g^2 + eps[0] over the columns and over the rows of a matrix, and over time, where the newest has the
    weight t^beta2_decay (Shazeer & Stern 2018, without momentum, in the form of `torch.optim.Adafactor`).

    A vector is a matrix of one column, so its R is the mean of its g^2; kernels of convolutions have as many rows as
    channels go out. Each rank keeps all of R and C of the matrices that it has a part of, and sends the sums over its
    rows and columns to those that have other parts, one message per update: with `chunks` the bits do not depend on the
    cut. The tensor axis must have one rank.

    Slots: row, column.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number: the largest relative step
    beta2_decay : power of the step, below 0
    eps : a pair, what is added to g^2, and the least RMS of p that counts. PyTorch's first one is by default that of
        the format, about 1e-7, and no gradient may be much smaller than that
    d : the largest RMS of u
    weight_decay : share of p that is taken off per step, times lr
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float, float] = (1e-30, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("row", "column")
    kept: ClassVar[Mapping[str, Kept]] = {
        "row": Kept(shape=lambda name, shape: matrix(shape)[:1]),
        "column": Kept(shape=lambda name, shape: matrix(shape)[1:]),
    }
    whole: ClassVar[bool] = True
    sends_as: ClassVar[str] = "float64"

    def __post_init__(self) -> None:
        check_options(self, but="eps")
        if not isinstance(self.eps, tuple | list) or len(self.eps) != 2:
            raise ConfigError(f"Adafactor(eps={self.eps!r}): a pair of numbers is needed, like (1e-30, 1e-3)")
        for name, value in (("eps[0]", self.eps[0]), ("eps[1]", self.eps[1]), ("d", self.d)):
            check_number(self, name, value)
            if not value and name != "eps[1]":
                raise ConfigError(f"Adafactor({name}={value!r}): a number above 0 is needed")
        if not isinstance(self.beta2_decay, int | float) or not -1.0 <= self.beta2_decay < 0:
            raise ConfigError(f"Adafactor(beta2_decay={self.beta2_decay!r}): a number >= -1 and < 0 is needed")

    def sends(self, s: Segment) -> int:
        """Numbers that a rank with this part of a parameter sends to each that has another part of it."""
        return PARTS + elements(_piece(s))

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0
    ) -> None:
        """One step in place, see `Optimizer.update`."""
        if not has_data(self, xp, p, g, slots, step, segments):
            return
        factor, share = p.dtype.type(scale), step**self.beta2_decay
        own = list(zip(*(places(self.kept[name], segments) for name in self.slots), strict=True))
        runs = segments.overrides(self.groups)
        with np.errstate(all="ignore"):  # as in all updates; gradients are checked for finite values elsewhere
            moved = [partial(self._moved, slots["row"][at], share) for at, _ in own]
            mine = zip(segments.items, moved, strict=True)
            parts = {
                s.name: _statistics(xp, s, p[s.start : s.stop], g[s.start : s.stop], factor, rows) for s, rows in mine
            }
            known = segments.together(xp, parts, self.sends, np.float64)
            for s, run, rows, (at_row, at_column) in zip(segments.items, runs, moved, own, strict=True):
                row, column = slots["row"][at_row], slots["column"][at_column]
                squares_p = exact_sum([x for _, flat in known[s.name] for x in flat[:PARTS].tolist()])
                statistics = [(_piece(other), flat[PARTS:]) for other, flat in known[s.name]]
                sums, columns, divided = together(xp, statistics, rows, _piece(s).shape)
                row[...] = rows(0, sums / column.size)
                column += (columns / row.size + self.eps[0] - column) * share
                squares_u = float(xp.mean(row) * (divided / column).sum())
                rate = lr * run.lr_scale
                relative = max(self.eps[1], (squares_p / s.size) ** 0.5) * min(rate, step**-0.5)
                relative /= max(1.0, (squares_u / s.size) ** 0.5 / self.d)
                p[s.start : s.stop] *= p.dtype.type(1.0 - rate * run.decay(self.weight_decay))
                a, b = xp.sqrt(xp.mean(row)) / xp.sqrt(row), 1.0 / xp.sqrt(column)
                for at, u in _directions(xp, s, g, factor, a.astype(p.dtype), b.astype(p.dtype)):
                    p[at] -= u * p.dtype.type(relative)

    def _moved(self, row: Any, share: float, first: int, means: Any) -> Any:
        """The new R of some rows, from the means of their squares."""
        before = row[first : first + means.size]
        return before + (means + self.eps[0] - before) * share


def _piece(s: Segment) -> MatrixPiece:
    return MatrixPiece(s.offset, s.stop - s.start, matrix(s.shape or (s.size,)))


def _statistics(xp: Any, s: Segment, p: Any, g: Any, scale: Any, divisors: Divisors) -> Any:
    """The numbers that this rank sends of its part: the sum of squares of p, and those of g by row and by column."""

    def squares(start: int, stop: int) -> Any:
        scaled = (g[start:stop] * scale).astype(np.float64)
        return scaled * scaled

    return xp.concatenate([xp.asarray(padded(block_squares(xp, p))), portion(xp, squares, divisors, _piece(s))])


def _directions(xp: Any, s: Segment, g: Any, scale: Any, a: Any, b: Any) -> Iterator[tuple[slice, Any]]:
    """g scale a b with a factor a for each row and b for each column; where in the shard, and the values."""
    for start in range(s.start, s.stop, BLOCK):
        at = slice(start, min(start + BLOCK, s.stop))
        low, high = (s.offset + bound - s.start for bound in (at.start, at.stop))
        first = low // b.size
        factors = (a[first : -(-high // b.size), None] * b).reshape(-1)[low - first * b.size : high - first * b.size]
        factors *= g[at] * scale
        yield at, factors
