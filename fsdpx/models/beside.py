"""What lies beside the weights in a folder: the tokenizer, and which tokens end a text."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.files import parse_json

__all__ = ["ends_of", "tokenizer_of"]

TOKENIZER = "tokenizer.json"


def tokenizer_of(folder: str | PathLike[str]) -> Any:
    """The `tokenizers.Tokenizer` of a folder; ConfigError if there is none, or no such library."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("text needs the tokenizers library: pip install 'fsdpx[text]'") from error
    file = Path(folder, TOKENIZER)
    if not file.exists():
        raise ConfigError(f"{folder}: there is no {TOKENIZER}: trainer.generate takes tokens of any other tokenizer")
    return Tokenizer.from_file(str(file))


def ends_of(folder: str | PathLike[str]) -> list[int]:
    """The tokens that end a text, the first of them the one to write; none if the folder does not say."""
    for name in ("generation_config.json", "config.json"):
        file = Path(folder, name)
        found = parse_json(file.read_bytes()).get("eos_token_id") if file.exists() else None
        if found is not None:
            return [int(end) for end in (found if isinstance(found, list) else [found])]
    return []
