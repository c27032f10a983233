"""The matrices of a model and the optimiser that updates them as a whole: Muon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.optim.adam import AdamW
from fsdpx.optim.optimizer import Elementwise, Rate, Slots, check_options, has_data, kept_of, places
from fsdpx.optim.segments import Groups, Run, Segment, Segments

__all__ = ["BUT", "Matrices", "Muon", "orthogonal"]

BUT = ("*embed*", "*wte*", "*wpe*", "*head*")
"""Patterns of embeddings and heads, of which each row is by itself."""


class Matrices(ABC):
    """The base of these optimisers. Each rank says what it has of a matrix, and every rank that has a part of one
    computes all of its update; parameters of one dim, and matrices whose names match `but`, are updated by another."""

    lr: Rate
    weight_decay: float
    but: Sequence[str]
    groups: Groups
    slots: tuple[str, ...]
    whole: ClassVar[bool] = True
    arrays: ClassVar[int] = 1
    """How many arrays of its size are put together for a matrix."""
    sends_as: ClassVar[str] = ""
    """The format of what ranks send: that of the update."""

    def __post_init__(self) -> None:
        check_options(self)
        if isinstance(self.but, str):
            kind = type(self).__name__
            raise ConfigError(f"{kind}(but={self.but!r}): a list of name patterns is needed, [{self.but!r}]")

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0
    ) -> None:
        """One step in place, see `Optimizer.update`."""
        if not has_data(self, xp, p, g, slots, step, segments):
            return
        parts: dict[str, Any] = {}
        own = dict(zip(segments.items, self._own(slots, segments), strict=True))
        for s, mine in own.items():
            at = slice(s.start, s.stop)
            if self.is_matrix(s.name, s.shape):
                parts[s.name] = self._part(xp, g[at], mine, scale).reshape(-1)
            else:
                alone = Segments((Segment(s.name, 0, s.stop - s.start, s.offset, s.size),))
                theirs = {name: mine[name] for name in self._others.slots}
                self._others.update(xp, p[at], g[at], theirs, lr=lr, step=step, segments=alone, scale=scale)
        full = self._whole(xp, segments.together(xp, parts, self.sends, p.dtype), p.dtype)
        for (s, mine), run in zip(own.items(), segments.overrides(self.groups), strict=True):
            if s.name in full and s.start < s.stop:
                self._follow(xp, p[s.start : s.stop], full[s.name], mine, s, run, lr * run.lr_scale, step)

    def sends(self, s: Segment) -> int:
        """Elements that a rank with this part of a parameter sends to each that has another part of it."""
        return self.arrays * (s.stop - s.start) if self.is_matrix(s.name, s.shape) else 0

    def _whole(self, xp: Any, known: Mapping[str, list[tuple[Segment, Any]]], dtype: Any) -> dict[str, Any]:
        """(arrays, size) of each matrix that this rank has a part of."""
        full = {}
        for name, parts in known.items():
            full[name] = xp.empty((self.arrays, parts[0][0].size), dtype)
            assert sum(s.stop - s.start for s, _ in parts) == parts[0][0].size, f"{name} is not whole"
            for s, part in parts:
                full[name][:, s.offset : s.offset + s.stop - s.start] = part.reshape(self.arrays, -1)
        return full

    def _own(self, slots: Slots, segments: Segments) -> list[Slots]:
        """The slots of each segment."""
        where = {name: list(places(kept, segments)) for name, kept in kept_of(self).items()}
        return [{name: slots[name][where[name][i]] for name in where} for i in range(len(segments.items))]

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter is updated as a matrix, of as many rows as dim 0 has."""
        return len(shape) > 1 and not any(fnmatchcase(name, pattern) for pattern in self.but)

    @cached_property
    def _others(self) -> Any:
        """The optimiser of the other parameters."""
        other: Any = self._other()
        return replace(other, lr=self.lr, weight_decay=self.weight_decay, groups=self.groups)

    @abstractmethod
    def _other(self) -> Elementwise:
        """The optimiser of the other parameters; its rates are given when it runs."""

    @abstractmethod
    def _part(self, xp: Any, g: Any, slots: Slots, scale: float) -> Any:
        """This rank's part of what is put together for a matrix: `arrays` arrays, one after the other."""

    @abstractmethod
    def _follow(self, xp: Any, p: Any, full: Any, slots: Slots, s: Segment, run: Run, lr: float, step: int) -> None:
        """Update this rank's part. full: (arrays, size) of the whole matrix."""


STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Steps and coefficients of the iteration of Newton and Schulz, which brings singular values to between 0.7 and 1.2."""


@dataclass(frozen=True)
class Muon(Matrices):
    """m = momentum m + g; p -= lr (0.2 sqrt(max(rows, columns)) O + weight_decay p), O the matrix with the singular
    vectors of g + momentum m and singular values near 1, by five steps of Newton and Schulz (Jordan et al. 2024). The
    factor makes steps as large as AdamW's, so both have one learning rate and weight decay (Liu et al. 2025).

    Parameters of one dim, and those whose names match `but`, are updated by `others`. Kernels of convolutions count as
    matrices of as many rows as channels go out. Matrices are gathered: every rank that holds a part of one computes all
    of its update, so the bits do not depend on the cut, and sends the page's momentum once per update. The tensor axis
    must have one rank.

    Slots: those of `others`, of which "m" is the momentum.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number, of all parameters
    momentum : decay of m per step, in [0, 1)
    weight_decay : share of p that is taken off per step, times lr, of all parameters
    but : name patterns (fnmatch) of matrices for `others`
    others : an `AdamW`, or another optimiser with a slot "m" that works element by element; its lr, weight decay and
        groups are those of this one
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.01
    but: Sequence[str] = BUT
    others: Elementwise = field(default_factory=AdamW)
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.others, Elementwise) or "m" not in self.slots:
            raise ConfigError(f"Muon(others={self.others!r}): an optimiser with a slot m is needed, optim.AdamW()")

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.others.slots)  # type: ignore[attr-defined]

    def _other(self) -> Elementwise:
        return self.others

    def _part(self, xp: Any, g: Any, slots: Slots, scale: float) -> Any:
        """m = momentum m + scale g; what is made orthogonal, with Nesterov's look ahead."""
        m = slots["m"]
        share = m.dtype.type(self.momentum)
        direction = g.astype(m.dtype) * m.dtype.type(scale)
        m *= share
        m += direction
        direction += m * share
        return direction

    def _follow(self, xp: Any, p: Any, full: Any, slots: Slots, s: Segment, run: Run, lr: float, step: int) -> None:
        matrix = full.reshape(s.shape[0], -1)
        o = orthogonal(xp, matrix).reshape(-1)[s.offset : s.offset + p.size]
        p *= p.dtype.type(1.0 - lr * run.decay(self.weight_decay))
        p -= o * p.dtype.type(lr * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(xp: Any, matrix: Any) -> Any:
    """U V of a matrix U S V, nearly: odd polynomials drive its singular values to 1, as long as they are above 0."""
    a, b, c = (matrix.dtype.type(number) for number in COEFFICIENTS)
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    with np.errstate(all="ignore"):
        x = x / (xp.sqrt((x * x).sum()) + matrix.dtype.type(1e-7))
        for _ in range(STEPS):
            square = x @ x.T
            x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
