"""New tokens: how one is chosen, and texts that go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpx.core.array.random import uniform
from fsdpx.core.base.config import convert_fields_to_python
from fsdpx.errors import ConfigError, DataError, NumericsError

__all__ = [
    "NO_TOKEN",
    "Sampling",
    "Stream",
    "TextLimits",
    "check_prompts",
    "find_window_start",
    "generate_texts",
    "is_single_prompt",
    "pad_texts",
]

NO_TOKEN = -1
"""In place of a token, where the logits are NaN or infinite."""
ROW_STRIDE = 1 << 32  # random numbers of one row
DEFAULT_CANDIDATES = 64
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
        convert_fields_to_python(self)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"generate(temperature={self.temperature}): it must be 0 (the most likely token) or more")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"generate(top_k={self.top_k!r}): it must be a whole number >= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"generate(top_p={self.top_p}): it must be in (0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"generate(repetition_penalty={self.repetition_penalty}): it must be > 0; 1 is none")

    def pick_token(self, logits: np.ndarray, text: list[int], row: int, number: int) -> int:
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
        kept = self._list_candidates(weights)
        weights = weights[kept]
        sums = np.cumsum(weights)
        draw = uniform(self.seed, "generate", row * ROW_STRIDE + number, row * ROW_STRIDE + number + 1)[0]
        last = int(np.flatnonzero(weights)[-1])  # rounding may bring a draw to the very end
        return int(kept[min(int(np.searchsorted(sums, draw * sums[-1], side="right")), last)])

    def _list_candidates(self, weights: np.ndarray) -> np.ndarray:
        """Tokens that are drawn from, by number."""
        if self.top_k is None and self.top_p is None:
            return np.arange(weights.size)
        count = min(self.top_k or DEFAULT_CANDIDATES, weights.size)
        order = _find_largest(weights, count)
        if self.top_p is not None:
            most = self.top_p * (weights.sum() if self.top_k is None else weights[order].sum())
            while (sums := np.cumsum(weights[order]))[-1] < most and self.top_k is None and count < weights.size:
                count = min(count * DEFAULT_CANDIDATES, weights.size)
                order = _find_largest(weights, count)
            order = order[: int(np.searchsorted(sums, most)) + 1]
        return np.sort(order)


def _find_largest(weights: np.ndarray, count: int) -> np.ndarray:
    """The tokens of the `count` largest weights, those first; of equal ones the first tokens. Sorts no others."""
    if count < weights.size:
        least = np.partition(weights, -count)[-count]
        tokens = np.flatnonzero(weights >= least)
    else:
        tokens = np.arange(weights.size)
    return tokens[np.argsort(-weights[tokens], kind="stable")][:count]


Stream = Callable[[int, int], Any]


@dataclass(frozen=True)
class TextLimits:
    """max_new_tokens: of each text. stop: tokens that end a text."""

    max_new_tokens: int
    stop: frozenset[int]

    @classmethod
    def from_options(cls, max_new_tokens: int, stop: int | Collection[int], vocab: int) -> TextLimits:
        """ConfigError for what cannot be."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"generate(max_new_tokens={max_new_tokens!r}): it must be a whole number >= 1")
        tokens = frozenset([stop] if isinstance(stop, int) else stop)
        for token in sorted(tokens):
            if not 0 <= token < vocab:
                raise ConfigError(f"generate(stop=...): token {token} is not of the vocabulary, 0 to {vocab - 1}")
        return cls(max_new_tokens, tokens)


def is_single_prompt(prompt: Any) -> bool:
    """Whether this is one prompt, and no list of prompts."""
    return not isinstance(prompt, Iterable) or all(np.ndim(part) == 0 for part in prompt)


def check_prompts(prompts: Sequence[Any], vocab: int, context: int) -> list[list[int]]:
    """Prompts as lists of tokens. DataError, with the number of the prompt, for one that cannot be read."""
    if not len(prompts):
        raise DataError("generate: there is no prompt")
    return [_check_prompt(f"generate: prompt {i}", prompt, vocab, context) for i, prompt in enumerate(prompts)]


def _check_prompt(who: str, prompt: Any, vocab: int, context: int) -> list[int]:
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"{who} is {tokens.dtype}{list(tokens.shape)}: it must be a list of tokens, whole numbers")
    if not tokens.size:
        raise DataError(f"{who} is empty: give it one token at least, such as that which begins a text")
    if tokens.size > context:
        raise DataError(f"{who} has {tokens.size} tokens, the model's context has {context}: leave out the first ones")
    if tokens.min() < 0 or tokens.max() >= vocab:
        wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise DataError(f"{who}: token {wrong} is not of the vocabulary, 0 to {vocab - 1}")
    return [int(token) for token in tokens]


def find_window_start(length: int, context: int) -> int:
    """Where begins what the model sees of a text of `length` tokens. When the context is full the older half of it is
    left out, so that most tokens find the keys and values of those before them."""
    half = max(context // 2, 1)
    return 0 if length <= context else -(-(length - context) // half) * half


def pad_texts(texts: Sequence[Sequence[int]], time: int) -> np.ndarray:
    """As one array of tokens (texts, time), shorter ones filled up behind with token 0."""
    tokens = np.zeros((len(texts), time), np.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return tokens


def generate_texts(
    texts: list[list[int]],
    mine: range,
    logits: Callable[[list[list[int]]], Iterable[np.ndarray]],
    share: Callable[[np.ndarray], None],
    sampling: Sampling,
    limits: TextLimits,
    stream: Stream | None,
) -> list[np.ndarray]:
    """The new tokens of each text, which is extended by them.

    mine: the texts that this rank finds tokens for. logits: of all texts so far, gives those of the next token of each
    of mine. share: fills in what other ranks have found, in an array of one number for each text. stream: called with
    text and token for each new one."""
    begin, going = [len(text) for text in texts], set(range(len(texts)))
    for number in range(limits.max_new_tokens):
        found = np.zeros(len(texts), np.int64)
        for i, row in zip(mine, logits(texts), strict=True):
            if i in going:
                found[i] = sampling.pick_token(row, texts[i], i, number)
        share(found)
        for i in sorted(going):
            token = int(found[i])
            if token == NO_TOKEN:
                raise NumericsError(f"generate: prompt {i}: the logits of new token {number} are NaN or infinite")
            texts[i].append(token)
            if token in limits.stop:
                going.discard(i)
            if stream is not None:
                stream(i, token)
        if not going:
            break
    return [np.array(text[start:], np.int64) for text, start in zip(texts, begin, strict=True)]
