"""Kinds of arguments, as words: "int", "float", "numpy.float32"; of arrays dtype, dims, layout and what else is needed.

"float32 2 C" is an array that is contiguous, aligned and can be written; "float32 2 any r" has any strides and is only
read, at any byte. Calls are matched to machine code by these words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["SCALARS", "declared", "of"]

SCALARS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool",
    **{kind: f"numpy.{np.dtype(kind).name}" for kind in (
        np.float32, np.float64, np.int32, np.int64, np.uint32, np.uint64, np.uint16, np.int8, np.uint8,
    )},
}  # fmt: skip


def of(arguments: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Those of a call; None if there is one for which no machine code is kept."""
    words = [_array(a) if type(a) is np.ndarray else SCALARS.get(type(a)) for a in arguments]
    return None if None in words else tuple(word for word in words if word is not None)


def declared(declaration: Sequence[str], formats: Sequence[str], arguments: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Those of a declaration (see `fixed`) in the format of the first array that may have any; None if it has none of
    `formats`."""
    free = (a for a, word in zip(arguments, declaration, strict=False) if len(word) > 1 and word[2:3] not in ("h", "s"))
    real = next((a.dtype.name for a in free), formats[0])
    return tuple(_word(word, real) for word in declaration) if real in formats else None


def _word(word: str, real: str) -> str:
    if len(word) == 1:
        return {"i": "int", "b": "bool"}[word]
    dtype = {"h": "uint16", "s": "float32"}.get(word[2:3], real)
    return f"{dtype} {word[1]} {'any' if word[0] == 'A' else word[0]}{' r' if word.endswith('r') else ' w'}"


def _array(a: np.ndarray) -> str | None:
    flags = a.flags
    layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    if not (flags.aligned and flags.writeable) or a.dtype.kind not in "biuf" or not a.dtype.isnative:
        return None
    return f"{a.dtype.name} {a.ndim} {layout}"
