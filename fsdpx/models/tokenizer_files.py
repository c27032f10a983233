"""Read the tokenizer in a model's folder, and the tokens that mark the end of a text."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base.safe_files import Untrusted, expanduser, read_file, read_json
from fsdpx.errors import ConfigError, install_hint

__all__ = [
    "MAX_JSON_BYTES",
    "TOKENIZER_NAME",
    "find_largest_token",
    "load_tokenizer",
    "read_end_tokens",
    "read_json_object",
]

TOKENIZER_NAME = "tokenizer.json"
MAX_JSON_BYTES = 10_000_000
MAX_TOKENIZER_BYTES = 200_000_000


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file in a model's folder that contains a JSON object.

    Raise FileNotFoundError if the file does not exist. Raise ConfigError if it is not a regular file, is larger than
    `max_bytes`, or does not contain a JSON object."""
    try:
        found = read_json(path, max_bytes, ours=False)
    except (Untrusted, ValueError) as error:
        raise ConfigError(str(error)) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: this must be an object of JSON, and is {type(found).__name__}")
    return found


def load_tokenizer(folder: str | PathLike[str]) -> Any:
    """Load the `tokenizers.Tokenizer` in a model's folder. Raise ConfigError if the file or the library is missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"text needs the tokenizers library: {install_hint('text')}") from error
    file = expanduser(folder) / TOKENIZER_NAME
    if not file.exists():
        raise ConfigError(
            f"{folder}: there is no {TOKENIZER_NAME}: trainer.generate takes tokens of any other tokenizer"
        )
    try:
        return Tokenizer.from_buffer(read_file(file, MAX_TOKENIZER_BYTES, ours=False))
    except Untrusted as error:
        raise ConfigError(str(error)) from None
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"{file}: this is no tokenizer: {error}") from error


def find_largest_token(folder: Path) -> int:
    """Return the largest token id of the tokenizer in a folder, or -1 if there is no tokenizer or it has no tokens."""
    file = folder / TOKENIZER_NAME
    if not file.exists():
        return -1
    table = read_json_object(file, MAX_TOKENIZER_BYTES)
    model, added = table.get("model"), table.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values() if isinstance(vocab, dict) else range(len(vocab)) if isinstance(vocab, list) else ())
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    if not isinstance(vocab, dict | list | None) or not all(type(one) is int for one in ids):
        raise ConfigError(f"{file}: this is no tokenizer: it needs a vocabulary, of which numbers are whole numbers")
    return max(ids, default=-1)


def read_end_tokens(folder: str | PathLike[str]) -> list[int]:
    """Return the end-of-text tokens (`eos_token_id`) that a model's folder defines, or [] if it defines none. To mark
    the end of a text, append the first of these tokens."""
    for name in ("generation_config.json", "config.json"):
        file = expanduser(folder) / name
        found = read_json_object(file).get("eos_token_id") if file.exists() else None
        if found is not None:
            ends = found if isinstance(found, list) else [found]
            if not all(type(end) is int for end in ends):
                raise ConfigError(f"{file}: eos_token_id={found!r}: it must be a whole number, or a list of them")
            return ends
    return []
