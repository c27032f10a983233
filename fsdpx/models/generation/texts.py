"""The generation loop, and the sampling of tokens from logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array.random import uniform
from fsdpx.core.base.config import convert_fields_to_python_numbers
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, DataError, NumericsError

__all__ = [
    "NO_TOKEN",
    "Sampling",
    "Stream",
    "TextLimits",
    "convert_prompts_to_lists",
    "find_context_start",
    "generate_texts",
    "is_single_prompt",
    "pad_texts",
]

NO_TOKEN = -1
"""Placeholder for a token that cannot be chosen because the logits are NaN or infinite."""
ROW_STRIDE = 1 << 32  # each text has its own range of this many random numbers
DEFAULT_CANDIDATES = 64
"""Initial guess for the number of tokens that `top_p` keeps. It is usually large enough: in most cases, the
probabilities of fewer tokens already sum to `top_p`."""


@dataclass(frozen=True)
class Sampling:
    """Samples a token from logits. The repetition penalty is applied first, then temperature, top-k and top-p.

    Each token uses one random number, which depends only on (seed, index of the text, index of the new token).

    Parameters
    ----------
    temperature : divisor of the logits; if 0, take the most likely token (ties go to the smallest token id)
    top_k : draw only from the `top_k` most likely tokens; if None, from all tokens
    top_p : draw only from the smallest set of most likely tokens whose probabilities sum to at least `top_p` (Holtzman
        et al. 2020)
    repetition_penalty : positive logits of tokens that occur in the text are divided by this number, and negative
        logits are multiplied by it (Keskar et al. 2019); 1 means no penalty
    seed : seed of the random numbers
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"generate(temperature={self.temperature}): it must be 0 (the most likely token) or more")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"generate(top_k={self.top_k!r}): it must be a whole number >= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"generate(top_p={self.top_p}): it must be in (0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"generate(repetition_penalty={self.repetition_penalty}): it must be > 0; 1 is none")

    def pick_token(self, logits: np.ndarray, text: list[int], row: int, number: int) -> int:
        """Return the next token of a text, given its logits (vocab,), or `NO_TOKEN` if the logits are not finite.

        `text` contains the tokens so far, `row` is the index of the text among all texts, and `number` is the index of
        the new token, from 0."""
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
        # the last token with a nonzero weight; because of rounding, the search below could otherwise return a later one
        last = int(np.flatnonzero(weights)[-1])
        return int(kept[min(int(np.searchsorted(sums, draw * sums[-1], side="right")), last)])

    def _list_candidates(self, weights: np.ndarray) -> np.ndarray:
        """Return the ids of the tokens that top-k and top-p keep, in ascending order. `weights` are proportional to the
        probabilities of all tokens."""
        if self.top_k is None and self.top_p is None:
            return np.arange(weights.size)
        count = min(self.top_k or DEFAULT_CANDIDATES, weights.size)
        order = _find_top_k_tokens(weights, count)
        if self.top_p is not None:
            most = self.top_p * (weights.sum() if self.top_k is None else weights[order].sum())
            while (sums := np.cumsum(weights[order]))[-1] < most and self.top_k is None and count < weights.size:
                count = min(count * DEFAULT_CANDIDATES, weights.size)
                order = _find_top_k_tokens(weights, count)
            order = order[: int(np.searchsorted(sums, most)) + 1]
        return np.sort(order)


def _find_top_k_tokens(weights: np.ndarray, count: int) -> np.ndarray:
    """Return the tokens with the `count` largest weights, in descending order of weight. Ties go to the smaller token
    id. To save time, not all tokens are sorted."""
    if count < weights.size:
        least = np.partition(weights, -count)[-count]
        tokens = np.flatnonzero(weights >= least)
    else:
        tokens = np.arange(weights.size)
    return tokens[np.argsort(-weights[tokens], kind="stable")][:count]


Stream = Callable[[int, int], Any]


@dataclass(frozen=True)
class TextLimits:
    """Where a generated text ends: after `max_new_tokens` new tokens, or after a token in `stop`."""

    max_new_tokens: int
    stop: frozenset[int]

    @classmethod
    def from_options(cls, max_new_tokens: int, stop: int | Collection[int], vocab: int) -> TextLimits:
        """Build the limits from the arguments of `generate`. Raise ConfigError if an argument is invalid."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"generate(max_new_tokens={max_new_tokens!r}): it must be a whole number >= 1")
        tokens = frozenset([stop] if isinstance(stop, int) else stop)
        for token in sorted(tokens):
            if not 0 <= token < vocab:
                raise ConfigError(f"generate(stop=...): token {token} is not of the vocabulary, 0 to {vocab - 1}")
        return cls(max_new_tokens, tokens)


def is_single_prompt(prompt: Any) -> bool:
    """Return whether `prompt` is one prompt (a sequence of tokens), not a list of prompts."""
    return not isinstance(prompt, Iterable) or all(np.ndim(part) == 0 for part in prompt)


def convert_prompts_to_lists(prompts: Sequence[Any], vocab: int, context: int) -> list[list[int]]:
    """Check prompts and convert them to lists of tokens. If a prompt is invalid, raise a DataError that contains its
    index."""
    if not len(prompts):
        raise DataError("generate: there is no prompt")
    return [
        _validate_prompt_tokens(f"generate: prompt {i}", prompt, vocab, context) for i, prompt in enumerate(prompts)
    ]


def _validate_prompt_tokens(who: str, prompt: Any, vocab: int, context: int) -> list[int]:
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


def find_context_start(length: int, context: int) -> int:
    """Return the index of the first token to keep in the model's context, for a text of `length` tokens.

    When the context is full, its entire older half is dropped, so that cached keys and values can be reused for most
    new tokens."""
    half = max(context // 2, 1)
    return 0 if length <= context else -(-(length - context) // half) * half


def pad_texts(texts: Sequence[Sequence[int]], time: int) -> np.ndarray:
    """Return the texts as one int64 array (texts, time), padded at the end with token 0."""
    tokens = np.zeros((len(texts), time), np.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return tokens


def generate_texts(
    texts: list[list[int]],
    own_texts: range,
    logits: Callable[[list[list[int]]], Iterable[np.ndarray]],
    share_tokens: Callable[[np.ndarray], None],
    sampling: Sampling,
    limits: TextLimits,
    stream: Stream | None,
) -> list[np.ndarray]:
    """Extend each text in place by new tokens, and return the new tokens of each text.

    `own_texts` are the indices of the texts whose tokens this rank chooses. `logits` is a function that takes all texts
    so far, and returns the logits of the next token for each text in `own_texts`. `share_tokens` is a function that
    takes an array with one token per text, and fills in the tokens that other ranks chose. `stream` is called with
    (index of the text, token) for each new token."""
    begin, going = [len(text) for text in texts], set(range(len(texts)))
    for number in range(limits.max_new_tokens):
        found = np.zeros(len(texts), np.int64)
        for i, row in zip(own_texts, logits(texts), strict=True):
            if i in going:
                found[i] = sampling.pick_token(row, texts[i], i, number)
        share_tokens(found)
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
