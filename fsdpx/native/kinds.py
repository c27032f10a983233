"""Kinds of arguments, and how arrays lie in memory."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["ARRAY", "FLAGS", "NUMBER", "SCALARS", "as_expected", "declared", "of"]

SCALARS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool",
    **{kind: f"numpy.{np.dtype(kind).name}" for kind in (
        np.float32, np.float64, np.int32, np.int64, np.uint32, np.uint64, np.uint16, np.int8, np.uint8,
    )},
}  # fmt: skip


def of(arguments: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The kinds of the arguments of a call; None if no machine code is kept for one of them."""
    words = [_array(a) if type(a) is np.ndarray else SCALARS.get(type(a)) for a in arguments]
    return None if None in words else tuple(word for word in words if word is not None)


def declared(declaration: Sequence[str], formats: Sequence[str], arguments: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The kinds that a declaration (see `fixed`) means in the format of the first array whose format is free; None if
    that is none of `formats`."""
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


ARRAY = {"data": 16, "nd": 24, "dims": 32, "strides": 40, "descr": 56, "flags": 64}
"""Bytes from the start of an array, see PyArrayObject_fields in NumPy's ndarraytypes.h."""
NUMBER = 16
"""Bytes from the start of a number of NumPy, and of a float."""

C, F, ALIGNED, WRITEABLE = 1, 2, 0x100, 0x400
FLAGS = {
    ("C", ""): (C | ALIGNED | WRITEABLE, C | ALIGNED | WRITEABLE),
    ("F", ""): (C | F | ALIGNED | WRITEABLE, F | ALIGNED | WRITEABLE),
    ("A", ""): (C | F | ALIGNED | WRITEABLE, ALIGNED | WRITEABLE),
    ("C", "w"): (C | ALIGNED | WRITEABLE, C | ALIGNED | WRITEABLE),
    ("any", "w"): (ALIGNED | WRITEABLE, ALIGNED | WRITEABLE),
    ("C", "r"): (C, C),
    ("any", "r"): (0, 0),
}
"""By layout, and whether it is written: which flags count, and those that are set."""


@functools.cache
def as_expected() -> bool:
    """Whether this Python and this NumPy keep things there."""
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    a, real = np.empty((3, 5), np.float32)[:, 1:3], np.float64(1.5)
    places = {name: id(a) + at for name, at in ARRAY.items()}
    dims, strides = (ctypes.c_int64.from_address(_text(places[name])) for name in ("dims", "strides"))
    return (
        a.__array_interface__["data"][0] == _text(places["data"])
        and ctypes.c_int.from_address(places["nd"]).value == 2
        and (dims.value, strides.value) == (3, 20)
        and _text(places["descr"]) == id(a.dtype)
        and ctypes.c_int.from_address(places["flags"]).value == a.flags.num
        and _text(id(a) + 8) == id(np.ndarray)
        and ctypes.c_double.from_address(id(real) + NUMBER).value == 1.5
        and ctypes.c_double.from_address(id(2.5) + NUMBER).value == 2.5
    )


def _text(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value
