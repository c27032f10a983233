"""The base of optimisers that update whole matrices: which parameters are matrices, and how ranks put them together."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.optim.elementwise import Elementwise
from fsdpx.optim.kept import kept_of, places
from fsdpx.optim.optimizer import Rate, Slots, check_options, has_data
from fsdpx.optim.segments import Groups, Run, Segment, Segments

__all__ = ["BUT", "Matrices"]

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
        """The same, whatever its rates."""

    @abstractmethod
    def _part(self, xp: Any, g: Any, slots: Slots, scale: float) -> Any:
        """This rank's part of what is put together for a matrix: `arrays` arrays, one after the other."""

    @abstractmethod
    def _follow(self, xp: Any, p: Any, full: Any, slots: Slots, s: Segment, run: Run, lr: float, step: int) -> None:
        """Update this rank's part. full: (arrays, size) of the whole matrix."""
