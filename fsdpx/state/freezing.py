"""Which parameters are frozen for now, and how many updates each has missed."""

from collections.abc import Callable, Iterable

__all__ = ["Freezing"]


class Freezing:
    """frozen: parameters that get no gradient and no update for now. missed: parameter -> updates that left it alone
    until it was trained again, if it was ever frozen; its own count of updates is that many smaller."""

    def __init__(self, updates: Callable[[str], int]) -> None:
        """updates: how many the page of a parameter has had so far."""
        self.frozen: frozenset[str] = frozenset()
        self.missed: dict[str, int] = {}
        self._updates = updates
        self._since: dict[str, int] = {}  # frozen parameter -> updates of its page before that

    def freeze(self, names: Iterable[str]) -> None:
        """Leave parameters alone from now on; on all ranks the same ones."""
        self._since |= {name: self._updates(name) for name in names if name not in self.frozen}
        self.frozen = frozenset(self._since)

    def unfreeze(self, names: Iterable[str]) -> None:
        """Train parameters again."""
        self.missed = self.count_missed()
        self._since = {name: self._updates(name) for name in self.frozen.difference(names)}
        self.frozen = frozenset(self._since)

    def count_missed(self) -> dict[str, int]:
        """The updates missed so far, also by what is frozen now."""
        now = {name: self._updates(name) - before for name, before in self._since.items()}
        return {name: self.missed.get(name, 0) + now.get(name, 0) for name in sorted({**self.missed, **now})}

    def resume(self, missed: dict[str, int], updates: int) -> None:
        """Go on where each page has had so many updates, and parameters have missed some of them. What is frozen stays
        so."""
        self.missed, self._since = missed, dict.fromkeys(self.frozen, updates)
