"""Which token comes next: the most likely one, or one that is drawn."""

from dataclasses import dataclass

import numpy as np

from fsdpx.array.random import uniform
from fsdpx.config import python_fields
from fsdpx.errors import ConfigError

__all__ = ["NO_TOKEN", "Sampling"]

NO_TOKEN = -1
"""In place of a token, where the logits are NaN or infinite."""
ROW = 1 << 32  # random numbers of one row
LIKELY = 64
"""Tokens that have most of the probability, as a rule: the first guess of how many `top_p` leaves."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits: penalty, then temperature, then top-k, then top-p.

    A draw takes one number, a function of (seed, row, number of the new token) and nothing else.

    Parameters
    ----------
    temperature : logits are divided by it; 0: the most likely token, the first of several
    top_k : draw only from this many of the most likely tokens; None: from all
    top_p : draw only from the fewest most likely tokens that have this probability together (Holtzman et al. 2020)
    repetition_penalty : logits of tokens that the text has are divided by it, or multiplied if negative (Keskar et al.
        2019); 1: none
    seed : of the draws
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        python_fields(self)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"generate(temperature={self.temperature}): it must be 0 (the most likely token) or more")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"generate(top_k={self.top_k!r}): it must be a whole number >= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"generate(top_p={self.top_p}): it must be in (0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"generate(repetition_penalty={self.repetition_penalty}): it must be > 0; 1 is none")

    def pick(self, logits: np.ndarray, text: list[int], row: int, number: int) -> int:
        """The next token of a text, or `NO_TOKEN`.

        logits: (vocab,). text: its tokens so far. row: of the text among all. number: of the new token, from 0."""
        logits = np.array(logits, np.float64)
        if not np.isfinite(logits.max()):
            return NO_TOKEN
        if self.repetition_penalty != 1.0:
            seen = np.unique(text)
            found = logits[seen]
            logits[seen] = np.where(found > 0, found / self.repetition_penalty, found * self.repetition_penalty)
        if self.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits - logits.max()) / self.temperature)
        kept = self._kept(weights)
        weights = weights[kept]
        sums = np.cumsum(weights)
        draw = uniform(self.seed, "generate", row * ROW + number, row * ROW + number + 1)[0]
        last = int(np.flatnonzero(weights)[-1])  # rounding may bring a draw to the very end
        return int(kept[min(int(np.searchsorted(sums, draw * sums[-1], side="right")), last)])

    def _kept(self, weights: np.ndarray) -> np.ndarray:
        """Tokens that are drawn from, by number."""
        if self.top_k is None and self.top_p is None:
            return np.arange(weights.size)
        count = min(self.top_k or LIKELY, weights.size)
        order = _largest(weights, count)
        if self.top_p is not None:
            most = self.top_p * (weights.sum() if self.top_k is None else weights[order].sum())
            while (sums := np.cumsum(weights[order]))[-1] < most and self.top_k is None and count < weights.size:
                count = min(count * LIKELY, weights.size)
                order = _largest(weights, count)
            order = order[: int(np.searchsorted(sums, most)) + 1]
        return np.sort(order)


def _largest(weights: np.ndarray, count: int) -> np.ndarray:
    """The tokens of the `count` largest weights, those first; of equal ones the first tokens. Sorts no others."""
    if count < weights.size:
        least = np.partition(weights, -count)[-count]
        tokens = np.flatnonzero(weights >= least)
    else:
        tokens = np.arange(weights.size)
    return tokens[np.argsort(-weights[tokens], kind="stable")][:count]
