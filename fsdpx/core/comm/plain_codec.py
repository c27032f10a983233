"""Serialization of the plain data that ranks send to each other. Unlike unpickling, decoding never runs code from the
sender, and its memory use is bounded."""

from __future__ import annotations

import dataclasses
import enum
import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np

from fsdpx.errors import CommError, ConfigError

__all__ = ["MAX_PACKED_BYTES", "pack", "unpack"]

MAX_PACKED_BYTES = 1 << 31
"""Maximum size of the message of one rank, in bytes."""
_MAX_DEPTH = 64
"""Maximum nesting depth of values."""
_SIZE = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {"l": list, "t": tuple, "e": set, "z": frozenset}
_SINGLE = {None: "N", True: "T", False: "F", ...: "."}
_NAMED = {letter: value for value, letter in _SINGLE.items()}


def pack(value: Any) -> bytes:
    """Encode a value as bytes. The value may be a number, text, bytes, an array, a path, an fsdpx class that only holds
    values, an instance of such a class, or a collection of such values.

    Raise ConfigError for any other object. For user-defined objects, use `all_gather_object`."""
    buffer = io.BytesIO()
    _write_value(buffer, value, 0)
    return buffer.getvalue()


def unpack(data: Any) -> Any:
    """Decode bytes that another rank has encoded with `pack`. Raise CommError if they are invalid.

    Decoding can create instances of fsdpx classes that only hold values and that this process has already loaded. It
    runs no other code. The memory use is proportional to the size of `data`."""
    reader = _PlainReader(memoryview(data).cast("B"))
    try:
        value = reader.read_value(0)
        if reader.at != len(reader.data):
            raise ValueError("bytes are left over")
    except CommError:
        raise
    except Exception as error:
        raise CommError(f"a rank has sent what is no plain data ({type(error).__name__}: {error})") from error
    return value


def _write_value(buffer: io.BytesIO, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"plain data may be nested at most {_MAX_DEPTH} levels deep")
    kind = type(value)
    if value is None or value is ... or kind is bool:
        buffer.write(_SINGLE[value].encode())
    elif kind is float:
        buffer.write(b"f" + _FLOAT.pack(value))
    elif kind in _SIMPLE:
        letter, encode = _SIMPLE[kind]
        _write_bytes(buffer, letter, encode(value))
    elif kind in (list, tuple, set, frozenset):
        letter = next(letter for letter, made in _ITEMS.items() if made is kind)
        _write_sequence(buffer, letter, list(value), depth)
    elif isinstance(value, dict):
        _write_sequence(buffer, "d", [part for pair in value.items() for part in pair], depth)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "O":
        _write_array(buffer, value)
    elif isinstance(value, np.dtype):
        _write_bytes(buffer, "y", _format_dtype(value).encode())
    elif isinstance(value, PurePath):
        _write_bytes(buffer, "p", str(value).encode(errors="surrogateescape"))
    else:
        _write_object(buffer, value, depth)


_SIMPLE: dict[type, tuple[str, Callable[[Any], bytes]]] = {
    int: ("i", lambda n: n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)),
    str: ("s", lambda text: text.encode(errors="surrogatepass")),
    bytes: ("b", bytes),
    complex: ("c", lambda z: _FLOAT.pack(z.real) + _FLOAT.pack(z.imag)),
}


def _write_bytes(buffer: io.BytesIO, letter: str, data: bytes) -> None:
    buffer.write(letter.encode() + _SIZE.pack(len(data)) + data)


def _write_sequence(buffer: io.BytesIO, letter: str, values: list[Any], depth: int) -> None:
    buffer.write(letter.encode() + _SIZE.pack(len(values)))
    for value in values:
        _write_value(buffer, value, depth + 1)


def _write_array(buffer: io.BytesIO, value: Any) -> None:
    _write_bytes(buffer, "a" if isinstance(value, np.ndarray) else "g", _format_dtype(value.dtype).encode())
    whole = np.ascontiguousarray(value)
    if not whole.dtype.isnative:
        whole = whole.astype(whole.dtype.newbyteorder("="))
    buffer.write(_SIZE.pack(np.ndim(value)) + b"".join(map(_SIZE.pack, np.shape(value))))
    buffer.write(whole.reshape(-1).view(np.uint8).tobytes())


def _write_object(buffer: io.BytesIO, value: Any, depth: int) -> None:
    kind = value if isinstance(value, type) else type(value)
    if not _is_value_class(kind):
        raise ConfigError(f"{kind.__module__}.{kind.__qualname__} is no plain data: send it by all_gather_object")
    _write_bytes(buffer, "k" if isinstance(value, type) else "o", f"{kind.__module__}:{kind.__qualname__}".encode())
    if not isinstance(value, type):
        _write_sequence(buffer, "t", _get_field_values(value), depth)


def _get_field_values(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, enum.Enum):
        return [value.value]
    if isinstance(value, Exception):
        return list(value.args)
    return [getattr(value, field.name) for field in dataclasses.fields(value) if field.init]


def _is_value_class(kind: type) -> bool:
    """Return whether `kind` is an fsdpx class that only holds values: a dataclass, named tuple, enum or exception."""
    of_values = issubclass(kind, enum.Enum | Exception) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    return kind.__module__.partition(".")[0] == "fsdpx" and of_values


class _PlainReader:
    """A decoder for bytes (`data`) from another rank. `at` is the position of the next byte to decode."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def read_next_bytes(self, n: int) -> memoryview:
        if not 0 <= n <= len(self.data) - self.at:
            raise ValueError(f"it ends before {n} bytes")
        self.at += n
        return self.data[self.at - n : self.at]

    def read_size(self) -> int:
        return int(_SIZE.unpack(self.read_next_bytes(8))[0])

    def read_next_text(self) -> str:
        return str(self.read_next_bytes(self.read_size()), "utf-8", "surrogatepass")

    def read_values(self, depth: int) -> list[Any]:
        count = self.read_size()
        # the count cannot exceed the number of remaining bytes, because each value occupies at least one byte
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError(f"it ends before {count} values")
        return [self.read_value(depth + 1) for _ in range(count)]

    def read_value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
        letter = str(self.read_next_bytes(1), "ascii")
        if letter in _NAMED:
            return _NAMED[letter]
        if letter in _ITEMS:
            return _ITEMS[letter](self.read_values(depth))
        return _READ[letter](self, depth)

    def read_dict(self, depth: int) -> dict[Any, Any]:
        flat = self.read_values(depth)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def read_array(self) -> np.ndarray:
        dtype = _parse_dtype(self.read_next_text())
        ndim = self.read_size()
        if not 0 <= ndim <= 64:
            raise ValueError(f"{ndim} dimensions")
        shape = [self.read_size() for _ in range(ndim)]
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape}")
        count = 1
        for n in shape:
            count *= n
        return np.frombuffer(bytearray(self.read_next_bytes(count * dtype.itemsize)), dtype).reshape(shape)

    def read_class(self) -> type:
        """Read the name of an fsdpx class, and return the class. Raise ValueError unless the class only holds values
        and this process has already loaded it."""
        module, _, name = self.read_next_text().partition(":")
        kind: Any = sys.modules.get(module) if module.partition(".")[0] == "fsdpx" else None
        for part in name.split("."):
            kind = None if part.startswith("__") else getattr(kind, part, None)
        if not isinstance(kind, type) or not _is_value_class(kind):
            raise ValueError(f"{module}.{name} is no class of values")
        return kind

    def read_instance(self, depth: int) -> Any:
        kind: Any = self.read_class()
        fields = self.read_value(depth)
        if not isinstance(fields, tuple):
            raise ValueError(f"a {kind.__name__} without fields")
        if not dataclasses.is_dataclass(kind):
            return kind(*fields)
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return cast(Any, kind)(**dict(zip(names, fields, strict=True)))


def _format_dtype(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in "USMm" else dtype.name


def _parse_dtype(name: str) -> np.dtype:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    dtype = np.dtype(name)
    if dtype.kind not in "biufcUSMm":
        raise ValueError(f"dtype {name}")
    return dtype


_READ: dict[str, Callable[[_PlainReader, int], Any]] = {
    "f": lambda r, d: _FLOAT.unpack(r.read_next_bytes(8))[0],
    "i": lambda r, d: int.from_bytes(r.read_next_bytes(r.read_size()), "little", signed=True),
    "s": lambda r, d: r.read_next_text(),
    "b": lambda r, d: bytes(r.read_next_bytes(r.read_size())),
    "c": lambda r, d: complex(*struct.unpack("<dd", r.read_next_bytes(r.read_size()))),
    "d": lambda r, d: r.read_dict(d),
    "a": lambda r, d: r.read_array(),
    "g": lambda r, d: r.read_array()[()],
    "y": lambda r, d: _parse_dtype(r.read_next_text()),
    "p": lambda r, d: Path(str(r.read_next_bytes(r.read_size()), "utf-8", "surrogateescape")),
    "k": lambda r, d: r.read_class(),
    "o": lambda r, d: r.read_instance(d),
}
