"""Where NumPy keeps what: the fields of an array and of a number, as machine code reads them."""

from __future__ import annotations

import ctypes
import functools
import sys

import numpy as np

__all__ = ["ARRAY", "FLAGS", "NUMBER", "as_expected"]

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
    dims, strides = (ctypes.c_int64.from_address(_word(places[name])) for name in ("dims", "strides"))
    return (
        a.__array_interface__["data"][0] == _word(places["data"])
        and ctypes.c_int.from_address(places["nd"]).value == 2
        and (dims.value, strides.value) == (3, 20)
        and _word(places["descr"]) == id(a.dtype)
        and ctypes.c_int.from_address(places["flags"]).value == a.flags.num
        and _word(id(a) + 8) == id(np.ndarray)
        and ctypes.c_double.from_address(id(real) + NUMBER).value == 1.5
        and ctypes.c_double.from_address(id(2.5) + NUMBER).value == 2.5
    )


def _word(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value
