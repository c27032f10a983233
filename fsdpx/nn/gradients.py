"""Gradients as layers get them: arrays to add into, which are set to zero when they are first read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["BLANK", "WRITTEN", "Entries", "GradientEntry", "Gradients", "destination"]

Array = Any

WRITTEN, BLANK = 0, 1


class GradientEntry:
    """One parameter's gradient. blank: nothing was written yet, and the content of the array is undefined.

    One byte of `flags`, at `at`, says so: those of a buffer lie in a row, to be looked at and changed all at once."""

    __slots__ = ("array", "at", "flags")

    def __init__(self, array: Array, flags: bytearray, at: int) -> None:
        self.array, self.flags, self.at = array, flags, at

    @property
    def blank(self) -> bool:
        return self.flags[self.at] == BLANK

    def open(self) -> Array:
        """The array to add into; a blank one is set to zero first."""
        if self.flags[self.at] == BLANK:
            self.array[...] = 0
            self.flags[self.at] = WRITTEN
        return self.array


class Entries(dict[str, GradientEntry]):
    """The gradients in one buffer by name, in the order of memory."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.flags = bytearray(len(arrays))
        super().__init__({name: GradientEntry(array, self.flags, i) for i, (name, array) in enumerate(arrays.items())})

    def blank(self) -> None:
        """All are used for the first time."""
        self.flags[:] = bytes((BLANK,)) * len(self)

    def complete(self) -> Sequence[str]:
        """Set what was not written to zero; returns its names."""
        if BLANK not in self.flags:
            return ()
        blank = [name for name, entry in self.items() if entry.blank]
        for name in blank:
            self[name].open()
        return blank


class Gradients(Mapping[str, Array]):
    """Name -> gradient: `g["weight"] += d` works for every layer; `destination` saves zeroing and adding.

    Tied parameters are one `GradientEntry` under several names."""

    __slots__ = ("_branches", "entries")

    def __init__(self, entries: Mapping[str, GradientEntry]) -> None:
        self.entries = entries
        self._branches: tuple[Mapping[str, str], dict[str, Gradients]] | None = None

    def __getitem__(self, name: str) -> Array:
        return self.entries[name].open()

    def __setitem__(self, name: str, array: Array) -> None:
        """Called by `g[name] += d`, after the addition in place."""
        entry = self.entries[name]
        if array is not entry.array:
            entry.array[...] = array
            entry.flags[entry.at] = WRITTEN

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def branches(self, aliases: Mapping[str, str]) -> dict[str, Gradients]:
        """Grouped by the first part of the names, as `fsdpx.nn.layer.branches`; aliases: alias -> name. Cached."""
        if self._branches is None or self._branches[0] is not aliases:
            self._branches = (aliases, self._grouped(aliases))
        return self._branches[1]

    def _grouped(self, aliases: Mapping[str, str]) -> dict[str, Gradients]:
        known = {alias: self.entries[name] for alias, name in aliases.items() if name in self.entries}
        grouped: dict[str, dict[str, GradientEntry]] = {}
        for name, entry in {**self.entries, **known}.items():
            head, _, rest = name.partition(".")
            grouped.setdefault(head, {})[rest] = entry
        return {head: Gradients(entries) for head, entries in grouped.items()}


def destination(g: Mapping[str, Array], name: str) -> tuple[Array, bool] | None:
    """Where a gradient is to be written, and whether it must be added to what is there; None if it is frozen.

    The caller must fill the whole array."""
    if type(g) is not Gradients:
        return (g[name], True) if name in g else None
    entry = g.entries.get(name)
    if entry is None:
        return None
    add, entry.flags[entry.at] = not entry.blank, WRITTEN
    return entry.array, add
