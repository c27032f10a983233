"""Texts while they are written: checked prompts, what of them a model sees, and when each ends."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, DataError, NumericsError
from fsdpx.generation.sampling import NO_TOKEN, Sampling

__all__ = ["Stream", "TextLimits", "checked", "is_one", "padded", "window", "write"]

Stream = Callable[[int, int], Any]


@dataclass(frozen=True)
class TextLimits:
    """max_new_tokens: of each text. stop: tokens that end a text."""

    max_new_tokens: int
    stop: frozenset[int]

    @classmethod
    def of(cls, max_new_tokens: int, stop: int | Collection[int], vocab: int) -> "TextLimits":
        """ConfigError for what cannot be."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"generate(max_new_tokens={max_new_tokens!r}): it must be a whole number >= 1")
        tokens = frozenset([stop] if isinstance(stop, int) else stop)
        for token in sorted(tokens):
            if not 0 <= token < vocab:
                raise ConfigError(f"generate(stop=...): token {token} is not of the vocabulary, 0 to {vocab - 1}")
        return cls(max_new_tokens, tokens)


def is_one(prompt: Any) -> bool:
    """Whether this is one prompt, and no list of prompts."""
    return getattr(prompt, "ndim", 0) == 1 or all(np.ndim(part) == 0 for part in prompt)


def checked(prompts: Sequence[Any], vocab: int, context: int) -> list[list[int]]:
    """Prompts as lists of tokens. DataError, with the number of the prompt, for one that cannot be read."""
    if not len(prompts):
        raise DataError("generate: there is no prompt")
    return [_checked(f"generate: prompt {i}", prompt, vocab, context) for i, prompt in enumerate(prompts)]


def _checked(who: str, prompt: Any, vocab: int, context: int) -> list[int]:
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


def window(length: int, context: int) -> int:
    """Where begins what the model sees of a text of `length` tokens. When the context is full the older half of it is
    left out, so that most tokens find the keys and values of those before them."""
    half = max(context // 2, 1)
    return 0 if length <= context else -(-(length - context) // half) * half


def padded(texts: Sequence[Sequence[int]], time: int) -> np.ndarray:
    """As one array of tokens (texts, time), shorter ones filled up behind with token 0."""
    tokens = np.zeros((len(texts), time), np.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return tokens


def write(
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
                found[i] = sampling.pick(row, texts[i], i, number)
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
