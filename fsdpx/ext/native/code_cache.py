"""A disk cache of machine code, keyed by function and argument types, and a loader for this code. Loading needs neither
Numba nor LLVM."""

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
from fsdpx.core.array.jit import format_fastmath_for_file_name
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.processor import read_cpuinfo_field

__all__ = [
    "ARRAY", "FLAGS", "NUMBER", "MachineCode", "can_store_machine_code", "has_expected_object_layout", "hash_files",
    "hash_function_sources", "holding_compilation_lock", "load_code", "read_with_digest", "store_and_load_code",
    "write_with_digest",
]  # fmt: skip

FASTCALL = 0x80  # METH_FASTCALL in Python's methodobject.h
EXECUTABLE = 5  # PROT_READ | PROT_EXEC
# longer than any compilation takes; if the lock's owner is suspended, others stop waiting after this time
LOCK_TIMEOUT_SECONDS = 60.0
DIGEST_BYTES = 32
MAX_CODE_BYTES = 64 << 20
_kept: list[Any] = []  # loaded machine code, which must never be freed


class MachineCode(NamedTuple):
    """Position-independent machine code.

    Attributes
    ----------
    start : offset of the entry point, in bytes
    inside : offsets of the words to which the loader adds the address of the code itself
    outside : (offset, name) for each word to which the loader adds the address of the named object
    """

    data: bytes
    start: int
    inside: tuple[int, ...]
    outside: tuple[tuple[int, str], ...]


class PyMethodDef(ctypes.Structure):
    """CPython's struct PyMethodDef, which describes a builtin function."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


@functools.cache
def can_store_machine_code() -> bool:
    """Return whether machine code can be stored on disk. This requires x86-64 Linux and a standard build of CPython
    (with the GIL)."""
    usual = platform.python_implementation() == "CPython" and getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.platform == "linux" and platform.machine() == "x86_64" and usual and has_expected_object_layout()


def load_code(function: Callable[..., Any], fastmath: Any, kinds: tuple[str, ...]) -> Callable[..., Any] | None:
    """Load the stored machine code of a function for these kinds (types) of arguments, and return it as a callable.
    Return None if no code is stored."""
    file = _get_code_path(function, fastmath, kinds)
    code = read_with_digest(file)
    return None if code is None else _load_machine_code_from_bytes(function, *marshal.loads(code))


def store_and_load_code(
    function: Callable[..., Any], fastmath: Any, kinds: tuple[str, ...], code: MachineCode
) -> Callable[..., Any] | None:
    """Store the machine code of a function on disk, and return it as a callable. Return None if it cannot be loaded.

    Write errors are ignored, since Numba's cache warns about them."""
    entry = _load_machine_code_from_bytes(function, *code)
    if entry is not None:
        file = _get_code_path(function, fastmath, kinds)
        with suppress(OSError):
            safe_files.make_folder(file.parent, private=False)
            write_with_digest(file, marshal.dumps(tuple(code)))
    return entry


def write_with_digest(file: Path, content: bytes) -> None:
    """Write a digest and then `content` to a file. Readers use the digest to detect damage.

    The digest also covers the name of the file, so that no file can be passed off as another."""
    safe_files.write_file(file, _compute_digest(file, content) + content, safe_files.READABLE)


def read_with_digest(file: Path) -> bytes | None:
    """Return the content that `write_with_digest` stored, or None if there is none.

    The content is executed, so it must be exactly what this user or root has compiled. If it is damaged, or if another
    user could have written it, the function warns once and returns None."""
    data = safe_files.read_if_trusted(file, MAX_CODE_BYTES)
    if data is None:
        return None
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _compute_digest(file, content):
        safe_files.warn_file_ignored(ValueError("damaged: its digest does not fit, so it is made again"), file)
        return None
    return content


def _compute_digest(file: Path, content: bytes) -> bytes:
    return hashlib.blake2b(file.name.encode() + b"\0" + content, digest_size=DIGEST_BYTES).digest()


@contextmanager
def holding_compilation_lock(function: Callable[..., Any], fastmath: Any, kinds: tuple[str, ...]) -> Iterator[None]:
    """Context manager that keeps other processes on this host from compiling the same code.

    The ranks of a job need the same kernels at the same time, and load the code that the first of them compiled. If the
    disk is not writable, or its file system does not support locks, each process compiles on its own."""
    file = _get_code_path(function, fastmath, kinds).with_suffix(".lock")
    try:
        safe_files.make_folder(file.parent, private=False)
        descriptor = safe_files.open_lock_file(file)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _try_lock_file(descriptor) and time.monotonic() < until:
            time.sleep(0.01)
        yield
    finally:
        with suppress(OSError):  # another process may have removed the lock file already
            file.unlink()
        _unlock_and_close_file(descriptor)


def _try_lock_file(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        return True
    return True


def _unlock_and_close_file(descriptor: int) -> None:
    """Release the lock on a file, even if a child process has inherited the descriptor, and close the file."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _load_machine_code_from_bytes(
    function: Any, data: bytes, start: int, inside: Any, outside: Any
) -> Callable[..., Any] | None:
    """Load machine code into memory, and return it as a Python builtin function. Return None if a symbol that the code
    needs does not exist."""
    found = {name: _find_python_object_or_c_function_address(name) for _, name in outside}
    if None in found.values():
        return None
    memory = mmap.mmap(-1, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = bytearray(data)
    for at, added in [*((at, base) for at in inside), *((at, found[name]) for at, name in outside)]:
        struct.pack_into("<Q", code, at, struct.unpack_from("<Q", code, at)[0] + added)
    memory[:] = code
    if _load_libraries()[0].mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(data)), EXECUTABLE):
        return None
    method = PyMethodDef(function.__name__.encode(), base + start, FASTCALL, None)
    _kept.append((memory, method))
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    made: Callable[..., Any] = new(ctypes.addressof(method), None, None)
    return made


@functools.cache
def _find_python_object_or_c_function_address(name: str) -> int | None:
    """Return the address of a Python object, such as "builtins.int" or "dtype.float32", or of a C function. Return None
    if no library contains the C function."""
    module, _, rest = name.partition(".")
    if module == "dtype":
        return id(np.dtype(rest))
    if rest:
        return id(getattr({"numpy": np, "builtins": builtins}[module], rest))
    for library in _load_libraries():
        if (function := getattr(library, name, None)) is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


@functools.cache
def _load_libraries() -> tuple[ctypes.CDLL, ...]:
    return ctypes.CDLL(None), ctypes.pythonapi, ctypes.CDLL("libm.so.6")


def _get_code_path(function: Callable[..., Any], fastmath: Any, kinds: tuple[str, ...]) -> Path:
    code = function.__qualname__, format_fastmath_for_file_name(fastmath), kinds, hash_function_sources(function)
    key = repr((*code, _hash_entry_generators(), _describe_code_dependencies(), DIGEST_BYTES))
    name = f"{function.__name__}.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.code"
    return environment.read_environment().cache / "code" / name


@functools.cache
def hash_function_sources(function: Callable[..., Any]) -> str:
    """Return a hash of all sources that a function's machine code is compiled from. The hash does not depend on where
    the sources are installed."""
    return lazy_numba.hash_function(function)


@functools.cache
def _hash_entry_generators() -> str:
    """Return a hash of the source files that generate entry points of compiled functions."""
    ours = (Path(__file__).with_name(f"{name}.py") for name in ("compile", "code_cache"))
    return hash_files([*ours, Path(jit.__file__), Path(lazy_numba.__file__)])


def hash_files(sources: Iterable[Path]) -> str:
    """Return a hash of the contents of these files."""
    return hashlib.blake2b(b"\0".join(file.read_bytes() for file in sources), digest_size=16).hexdigest()


def _find_package_folder(library: str) -> Path:
    """Return the folder of an installed Python package, without importing it."""
    found = importlib.util.find_spec(library)
    return Path(found.origin).parent if found and found.origin else Path(library)


@functools.cache
def _describe_code_dependencies() -> tuple[str, ...]:
    """Describe what machine code depends on besides its sources: the processor, and the versions of the compiler and
    the libraries."""
    versions = []
    for library in ("numba", "llvmlite"):
        version = _find_package_folder(library) / "_version.py"
        versions.append(hash_files([version]) if version.exists() else str(version))
    return (
        *versions,
        sys.version,
        np.__version__,
        read_cpuinfo_field("model name"),
        read_cpuinfo_field("flags"),
        environment.describe_compiler_target(),
    )


ARRAY = {"data": 16, "nd": 24, "dims": 32, "strides": 40, "descr": 56, "flags": 64}
"""Byte offsets of fields in an array object. See PyArrayObject_fields in NumPy's ndarraytypes.h."""
NUMBER = 16
"""Byte offset of the value in a NumPy scalar, and in a Python float."""

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
"""(layout, access) of an array argument -> (mask of the array flags to check, required values of these flags)."""


@functools.cache
def has_expected_object_layout() -> bool:
    """Return whether Python's and NumPy's objects have the memory layout that the compiled entry points assume."""
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    a, real = np.empty((3, 5), np.float32)[:, 1:3], np.float64(1.5)
    places = {name: id(a) + at for name, at in ARRAY.items()}
    dims, strides = (ctypes.c_int64.from_address(_read_word(places[name])) for name in ("dims", "strides"))
    return (
        a.__array_interface__["data"][0] == _read_word(places["data"])
        and ctypes.c_int.from_address(places["nd"]).value == 2
        and (dims.value, strides.value) == (3, 20)
        and _read_word(places["descr"]) == id(a.dtype)
        and ctypes.c_int.from_address(places["flags"]).value == a.flags.num
        and _read_word(id(a) + 8) == id(np.ndarray)
        and ctypes.c_double.from_address(id(real) + NUMBER).value == 1.5
        and ctypes.c_double.from_address(id(2.5) + NUMBER).value == 2.5
    )


def _read_word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
