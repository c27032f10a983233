"""Rounds: when replicas that train by themselves meet, page by page (local SGD, DiLoCo)."""

from dataclasses import dataclass

__all__ = ["Outer", "Rounds"]


@dataclass(frozen=True)
class Outer:
    """What a step of local training does beside its update, by pages.

    deltas: their outer gradients are sent. steps: these have arrived, and the outer optimiser steps. adopts: its result
    has arrived, and the replica goes on from there. summing, coming: pages whose outer gradients, or whose new outer
    parameters, are under way when the step begins."""

    deltas: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    adopts: frozenset[int] = frozenset()
    summing: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rounds:
    """every: steps from one outer gradient of a page to its next. fragments: pages that travel together, each at its
    own time of a round. delay: steps that a fragment may be under way: its outer gradient for the first half of them,
    its new parameters for the rest."""

    every: int
    fragments: tuple[frozenset[int], ...]
    delay: int = 0

    @property
    def half(self) -> int:
        """Steps for which outer gradients are under way."""
        return self.delay // 2

    def first(self, fragment: int) -> int:
        """The step after which a fragment sets out for the first time; the last one at the end of a round."""
        return -(-self.every * (fragment + 1) // len(self.fragments))

    def at(self, step: int) -> Outer:
        """What step `step`, counted from 1, does."""
        found: dict[str, set[int]] = {name: set() for name in Outer.__dataclass_fields__}
        for number, pages in enumerate(self.fragments):
            since = step - self.first(number)
            lag = since % self.every if since >= 0 else -1
            for name, now in (
                ("deltas", lag == 0),
                ("steps", lag == self.half),
                ("adopts", lag == self.delay),
                ("summing", 0 < lag <= self.half),
                ("coming", self.half < lag <= self.delay),
            ):
                found[name] |= pages if now else set()
        return Outer(**{name: frozenset(pages) for name, pages in found.items()})

    def fragment(self, page: int) -> int:
        """The fragment of a page."""
        return next(number for number, pages in enumerate(self.fragments) if page in pages)

    def number(self, page: int, step: int) -> int:
        """The number, counted from 1, of the outer step that a page makes in step `step`."""
        return (step - self.half - self.first(self.fragment(page))) // self.every + 1
