"""Machine code in memory and on disk, and the kinds of arguments it is for. Loading takes neither Numba nor LLVM."""

from __future__ import annotations

import builtins
import ctypes
import functools
import hashlib
import importlib.util
import marshal
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array import jit, lazy_numba
from fsdpx.core.array.jit import freedom
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.processor import cpuinfo

__all__ = [
    "ARRAY", "FLAGS", "NUMBER", "Code", "able", "as_expected", "digest_of", "fingerprint", "keep", "load",
    "one_at_a_time", "seal", "unsealed",
]  # fmt: skip

FASTCALL = 0x80  # METH_FASTCALL of Python's methodobject.h
EXECUTABLE = 5  # PROT_READ | PROT_EXEC
PATIENCE = 60.0  # seconds: longer than a kernel compiles; a process stopped meanwhile does not block the others
SEAL = 32  # bytes of the digest that a file begins with
LARGEST = 64 << 20  # bytes of a file
_kept: list[Any] = []  # machine code, which is never unloaded


class Code(NamedTuple):
    """start: where it is entered. inside: places that get the address of the code added. outside: places that get the
    address of what has this name added."""

    data: bytes
    start: int
    inside: tuple[int, ...]
    outside: tuple[tuple[int, str], ...]


class Method(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


@functools.cache
def able() -> bool:
    """Whether machine code can be kept here: on Linux, on x86-64, in the usual build of CPython."""
    usual = platform.python_implementation() == "CPython" and getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.platform == "linux" and platform.machine() == "x86_64" and usual and as_expected()


def load(function: Callable[..., Any], fastmath: Any, wanted: tuple[str, ...]) -> Callable[..., Any] | None:
    """The code that was kept for a function and kinds of arguments; None if there is none."""
    file = _file(function, fastmath, wanted)
    code = unsealed(file)
    return None if code is None else _ready(function, *marshal.loads(code))


def keep(function: Callable[..., Any], fastmath: Any, wanted: tuple[str, ...], code: Code) -> Callable[..., Any] | None:
    """Put it on disk and load it. A disk that cannot be written is Numba's to complain of."""
    entry = _ready(function, *code)
    if entry is not None:
        file = _file(function, fastmath, wanted)
        with suppress(OSError):
            safe_files.folder(file.parent, private=False)
            seal(file, marshal.dumps(tuple(code)))
    return entry


def seal(file: Path, content: bytes) -> None:
    """Keep `content` with its digest, which is of the file's name as well: no file passes for another one."""
    safe_files.write(file, _seal_of(file, content) + content, safe_files.READABLE)


def unsealed(file: Path) -> bytes | None:
    """What `seal` has kept; None if there is none, or, with one warning, if it was damaged or another user could have
    written it: machine code is run, so it must be what this user or root has compiled, to the last bit."""
    data = safe_files.believed(file, LARGEST)
    if data is None:
        return None
    seal, content = data[:SEAL], data[SEAL:]
    if seal != _seal_of(file, content):
        safe_files.passed_over(ValueError("damaged: its digest does not fit, so it is made again"), file)
        return None
    return content


def _seal_of(file: Path, content: bytes) -> bytes:
    return hashlib.blake2b(file.name.encode() + b"\0" + content, digest_size=SEAL).digest()


@contextmanager
def one_at_a_time(function: Callable[..., Any], fastmath: Any, wanted: tuple[str, ...]) -> Iterator[None]:
    """Inside, no other process of this machine compiles the same: the ranks of a job need the same kernels at the same
    time, and load what the first of them has made. Without a disk, or one that locks nothing, each does it itself."""
    file = _file(function, fastmath, wanted).with_suffix(".lock")
    try:
        safe_files.folder(file.parent, private=False)
        descriptor = safe_files.lock(file)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + PATIENCE
        while not _locked(descriptor) and time.monotonic() < until:
            time.sleep(0.01)
        yield
    finally:
        with suppress(OSError):  # another one has
            file.unlink()
        _unlock(descriptor)


def _locked(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here
        return True
    return True


def _unlock(descriptor: int) -> None:
    """Also where a child process has got the descriptor."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _ready(function: Any, data: bytes, start: int, inside: Any, outside: Any) -> Callable[..., Any] | None:
    """A builtin function of Python; None if it needs what is not there."""
    found = {name: _address(name) for _, name in outside}
    if None in found.values():
        return None
    memory = mmap.mmap(-1, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = bytearray(data)
    for at, added in [*((at, base) for at in inside), *((at, found[name]) for at, name in outside)]:
        struct.pack_into("<Q", code, at, struct.unpack_from("<Q", code, at)[0] + added)
    memory[:] = code
    if _libraries()[0].mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(data)), EXECUTABLE):
        return None
    method = Method(function.__name__.encode(), base + start, FASTCALL, None)
    _kept.append((memory, method))
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    made: Callable[..., Any] = new(ctypes.addressof(method), None, None)
    return made


@functools.cache
def _address(name: str) -> int | None:
    """The address of an object of Python ("builtins.int", "numpy.ndarray", "dtype.float32"), or of a function in C."""
    module, _, rest = name.partition(".")
    if module == "dtype":
        return id(np.dtype(rest))
    if rest:
        return id(getattr({"numpy": np, "builtins": builtins}[module], rest))
    for library in _libraries():
        if (function := getattr(library, name, None)) is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    return ctypes.CDLL(None), ctypes.pythonapi, ctypes.CDLL("libm.so.6")


def _file(function: Callable[..., Any], fastmath: Any, wanted: tuple[str, ...]) -> Path:
    code = function.__qualname__, freedom(fastmath), wanted, fingerprint(function)
    key = repr((*code, _entries(), _machine(), SEAL))
    name = f"{function.__name__}.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.code"
    return environment.read().cache / "code" / name


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """The hash of all that the machine code of a function is made from: the same sources elsewhere on a machine are the
    same code."""
    return lazy_numba.digest(function)


@functools.cache
def _entries() -> str:
    """The hash of the files that make the entries of functions."""
    ours = (Path(__file__).with_name(f"{name}.py") for name in ("compile", "code_cache"))
    return digest_of([*ours, Path(jit.__file__), Path(lazy_numba.__file__)])


def digest_of(sources: Iterable[Path]) -> str:
    """The hash of these files."""
    return hashlib.blake2b(b"\0".join(file.read_bytes() for file in sources), digest_size=16).hexdigest()


def _folder(library: str) -> Path:
    """Where a package of Python is, without importing it."""
    found = importlib.util.find_spec(library)
    return Path(found.origin).parent if found and found.origin else Path(library)


@functools.cache
def _machine() -> tuple[str, ...]:
    """What machine code depends on beside its sources: the processor, and the versions of what compiles and runs it."""
    versions = []
    for library in ("numba", "llvmlite"):
        version = _folder(library) / "_version.py"
        versions.append(digest_of([version]) if version.exists() else str(version))
    return (*versions, sys.version, np.__version__, cpuinfo("model name"), cpuinfo("flags"), environment.compiler())


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
