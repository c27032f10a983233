"""Stragglers: ranks that are slower in some steps than in others, and the slowest of many."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log
from statistics import NormalDist
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError

__all__ = ["Stragglers"]


@dataclass(frozen=True)
class Stragglers:
    """The computing of each rank in each step takes so many times as long as in the mean: a lognormal number, drawn for
    itself, with mean 1.

    Parameters
    ----------
    spread : standard deviation of its logarithm; 0.05 is about 5 %
    draws : steps that are simulated
    seed : of what is drawn
    """

    spread: float
    draws: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.spread, bool) or not isinstance(self.spread, int | float) or not 0 <= self.spread <= 2:
            raise ConfigError(f"stragglers={self.spread!r}: a spread between 0 and 2 is needed, 0.05 for about 5 %")
        for name, least in (("draws", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"stragglers: {name}={value!r}: a whole number is needed, {least} or more")

    @classmethod
    def of(cls, choice: Stragglers | float) -> Stragglers:
        """From a spread alone."""
        return choice if isinstance(choice, Stragglers) else cls(choice)

    def slowest(self, ranks: int, groups: int) -> Any:
        """The factor of the slowest of so many ranks, for groups that are drawn for themselves: (groups, draws).

        The distribution of the largest of n numbers is the n-th power of that of one, so one number is drawn in place
        of n. Draws are spread evenly over the distribution (McKay et al. 1979, Latin hypercube)."""
        draw = np.random.default_rng(self.seed)
        places = [(draw.permutation(self.draws) + draw.random(self.draws)) / self.draws for _ in range(groups)]
        above = np.vectorize(lambda u: -expm1(log(u) / ranks))(np.maximum(places, 1e-12))
        score = np.vectorize(lambda p: -NormalDist().inv_cdf(min(max(p, 1e-300), 1 - 1e-12)))(above)
        return np.exp(self.spread * score - self.spread**2 / 2)
