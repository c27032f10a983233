"""A dataset of conversations for supervised fine-tuning. Only answers contribute to the loss."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fsdpx.core.base.safe_files import describe_json_error, describe_read_error, expanduser, open_file, parse_json
from fsdpx.errors import ConfigError, DataError

__all__ = ["SupervisedDataset"]

IGNORED_LABEL = -100
"""The target for tokens outside of answers. It is the default `ignore_index` of `nn.CrossEntropyLoss`."""
Pieces = list[tuple[str, bool]]
"""The texts of a conversation in order, each with a flag that says whether it is an answer."""
Encoded = tuple[Sequence[int], Sequence[bool]]
"""The tokens of a conversation, and for each token whether it belongs to an answer."""


class ConversationEncoder(Protocol):
    """The protocol of chat templates that encode entire conversations as tokens, such as the result of
    `models.chat_template`."""

    def encode_conversation(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Encoded: ...


class SupervisedDataset:
    r"""Conversations from a JSON Lines file.

    Each line is `{"prompt": ..., "completion": ...}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`. The
    model is trained on answers, which are completions and messages with the role "assistant".

    A sample is (tokens, targets), both `(seq_len,)`. Targets are the tokens shifted by one position. In the targets,
    each token outside of answers is replaced by -100, which the loss ignores. The loss is therefore the mean over the
    tokens of answers.

    Conversations are truncated to seq_len + 1 tokens. A conversation is skipped if no answer token remains; `left_out`
    counts the skipped conversations. The file is read once, when the dataset is constructed.

    Parameters
    ----------
    path : path of a UTF-8 file; a byte order mark at the beginning is skipped
    encode : function from text to tokens, such as `lambda text: tokenizer.encode(text, add_special_tokens=False).ids`
        for a tokenizer of the tokenizers library
    seq_len : number of tokens in a sample
    end : token that is appended to every answer, and counts in the loss like the answer itself; this token also pads
        samples shorter than seq_len
    packed : whether to put several conversations into one sample, in the order of the file. A sample is then ((tokens,
        segments), targets), where segments contains, for each token, the index (from 0) of its conversation within the
        sample. Use this with models that have `segments=True` (docs: models)
    template : how to encode messages: `models.chat_template(folder, tokenizer)`, or a function (role, content) -> (text
        before the message, text of the message); if None, these texts are "role: " and "content\\n". For lines with
        prompt and completion, the template is not used, and the two texts are concatenated. The attribute `messages`
        counts the lines with messages, and `texts` counts those with prompt and completion
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        encode: Callable[[str], Sequence[int]],
        seq_len: int,
        *,
        end: int,
        packed: bool = False,
        template: ConversationEncoder | Callable[[str, str], tuple[str, str]] | None = None,
    ) -> None:
        if seq_len < 1:
            raise ConfigError(f"SupervisedDataset(seq_len={seq_len}): 1 or more")
        self.path, self.seq_len, self.end, self.packed = expanduser(path), seq_len, end, packed
        self.left_out = self.messages = self.texts = 0
        written: Any = template or (lambda role, content: (f"{role}: ", f"{content}\n"))
        found = []
        for where, line in _iterate_json_lines(self.path):
            tokens, learnt = self._truncate_tokens(self._encode_line(line, encode, written, where), where)
            if learnt[1:].any():
                found.append((tokens, learnt))
            else:
                self.left_out += 1
        if not found:
            raise DataError(f"{path}: no conversation has an answer within {seq_len + 1} tokens")
        self.samples = _group_conversations_into_samples(found, seq_len) if packed else [[one] for one in found]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
        tokens = np.full(self.seq_len, self.end, np.int32)
        targets = np.full(self.seq_len, IGNORED_LABEL, np.int32)
        segments = np.full(self.seq_len, len(self.samples[index]), np.int32)
        at = 0
        for n, (words, learnt) in enumerate(self.samples[index]):
            place = slice(at, at + len(words) - 1)
            tokens[place], segments[place] = words[:-1], n
            targets[place] = np.where(learnt[1:], words[1:], IGNORED_LABEL)
            at = place.stop
        return ((tokens, segments) if self.packed else tokens), targets

    def __repr__(self) -> str:
        return f"SupervisedDataset({self.path.name}, {len(self)} samples of {self.seq_len} tokens)"

    def _encode_line(self, line: Mapping[str, Any], encode: Any, template: Any, where: str) -> Encoded:
        if isinstance(line.get("prompt"), str) and isinstance(line.get("completion"), str):
            pieces = [(line["prompt"], False), (line["completion"], True)]
            self.texts += 1
        else:
            messages, chat = _get_valid_chat_messages(line, where), getattr(template, "encode_conversation", None)
            self.messages += 1
            if chat is not None:
                try:
                    return chat(messages, line.get("tools"))
                except DataError as error:
                    raise DataError(f"{where}: {error}") from error
            pieces = _split_chat_messages(messages, where, template)
        tokens: list[int] = []
        learnt: list[bool] = []
        for text, answer in pieces:
            words = [*encode(text), *([self.end] if answer else [])]
            tokens += words
            learnt += [answer] * len(words)
        return tokens, learnt

    def _truncate_tokens(self, found: Encoded, where: str) -> tuple[np.ndarray, np.ndarray]:
        tokens, learnt = (part[: self.seq_len + 1] for part in found)
        if len(tokens) < 2:
            raise DataError(f"{where}: a conversation needs two tokens or more")
        try:
            return np.array(tokens, np.int32), np.array(learnt)
        except OverflowError as error:
            raise DataError(f"{where}: a token does not fit into 32 bits: {error}") from error


def _iterate_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (location for error messages, object) for each line of a JSON Lines file. Only a line feed ends a line,
    because texts may contain other line separators."""
    try:
        with open_file(path, ours=False) as file:
            for n, line in enumerate(file, 1):
                data = line.replace(BOM_UTF8, b"   ") if n == 1 and line.startswith(BOM_UTF8) else line
                if data.strip():
                    yield f"{path}, line {n}", _parse_json_object(path, data, n)
    except OSError as error:
        raise DataError(describe_read_error(error, path)) from error


def _parse_json_object(path: Path, data: bytes, n: int) -> Mapping[str, Any]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise DataError(f"{path}, {describe_json_error(error, data, n)}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}, line {n}: a line is an object, this is {type(found).__name__}")
    return found


def _get_valid_chat_messages(line: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    for name in ("prompt", "completion"):
        if name in line and not isinstance(line[name], str):
            raise DataError(f'{where}: "{name}" is a text, this is {type(line[name]).__name__}')
    messages = line.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: it has neither "prompt" and "completion" nor "messages": {sorted(line)}')
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise DataError(f'{where}: a message has a "role" and a "content", texts both')
    return messages


def _split_chat_messages(
    messages: list[dict[str, Any]], where: str, template: Callable[[str, str], tuple[str, str]]
) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise DataError(f'{where}: a message has a "role" and a "content", texts both')
        before, text = template(message["role"], message["content"])
        pieces += [(before, False), (text, message["role"] == "assistant")]
    return pieces


def _group_conversations_into_samples(
    found: Sequence[tuple[np.ndarray, np.ndarray]], capacity: int
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Distribute conversations over samples, in the given order. Each sample gets as many conversations as fit into
    `capacity` tokens."""
    samples: list[list[tuple[np.ndarray, np.ndarray]]] = []
    left = 0
    for one in found:
        need = len(one[0]) - 1
        if need > left:
            samples.append([])
            left = capacity
        samples[-1].append(one)
        left -= need
    return samples
