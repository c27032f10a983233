"""Compilation of functions to relocatable machine code: Numba's code is linked with an entry point that Python can
call.

The entry point takes the arguments of a Python call. It checks the type of each argument, and returns NotImplemented if
an argument has an unexpected type. Otherwise it reads numbers and array pointers, releases the GIL, and calls the code
that Numba has compiled. The compiler's object files are ELF for x86-64 in the large code model. Where entry points are
not supported, Numba's own disk cache is used."""

from __future__ import annotations

import gc
import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import llvmlite.binding as llvm
import numpy as np
from numba import types
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from fsdpx.core.array.jit import format_fastmath_for_file_name
from fsdpx.core.base import environment
from fsdpx.errors import warn
from fsdpx.ext.native.code_cache import (
    ARRAY,
    FLAGS,
    NUMBER,
    MachineCode,
    hash_function_sources,
    read_with_digest,
    write_with_digest,
)

__all__ = ["compile_dispatcher", "compile_to_machine_code", "enable_disk_cache", "try_link_function"]

ALLOCATED, PROGRAM, SYMBOLS, RELOCATIONS = 0x2, 1, 2, 4
"""Constants of ELF: the section flag SHF_ALLOC, and the section types SHT_PROGBITS, SHT_SYMTAB and SHT_RELA. See
<elf.h>."""
ADDRESS, RELATIVE, DISTANCE, CALL = 1, 2, 24, 4  # relocation types R_X86_64_64, _PC32, _PC64 and _PLT32 of ELF
FUNCTION, COMMON = 2, 0xFFF2


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    at: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Symbol(NamedTuple):
    """A symbol in object files. `at` is its offset from the start of the code, or None if no object file defines it."""

    name: str
    kind: int
    at: int | None
    size: int


class _Relocation(NamedTuple):
    """A place in the code where the linker writes the address of a symbol."""

    at: int
    kind: int
    symbol: _Symbol
    added: int


def try_link_function(objects: Sequence[bytes], start: str) -> MachineCode | None:
    """Link the function `start` with everything that it calls, or return None if a relocation cannot be resolved."""
    data = bytearray()
    symbols: dict[str, _Symbol] = {}
    places: list[_Relocation] = []
    for one in objects:
        _merge_object_file_sections(one, data, symbols, places)
    functions = [s for s in symbols.values() if s.kind == FUNCTION and s.at is not None]

    def find_function_at(offset: int) -> str:
        return next((s.name for s in functions if s.at is not None and s.at <= offset < s.at + s.size), "")

    within: dict[str, list[_Relocation]] = {}
    for place in places:
        within.setdefault(find_function_at(place.at), []).append(place)
    reached, waiting = set(), ["", start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [
                p.symbol.name if p.symbol.at is None else find_function_at(p.symbol.at + p.added)
                for p in within.get(name, ())
            ]
    inside, outside = [], []
    for place in (place for name in reached for place in within.get(name, ())):
        symbol = place.symbol if place.symbol.at is not None else symbols.get(place.symbol.name, place.symbol)
        if place.kind == ADDRESS and symbol.at is not None:
            struct.pack_into("<q", data, place.at, symbol.at + place.added)
            inside.append(place.at)
        elif place.kind == ADDRESS:
            struct.pack_into("<q", data, place.at, place.added)
            outside.append((place.at, symbol.name))
        elif symbol.at is not None and place.kind in (RELATIVE, CALL, DISTANCE):
            form = "<q" if place.kind == DISTANCE else "<i"
            struct.pack_into(form, data, place.at, symbol.at + place.added - place.at)
        else:
            return None
    at = symbols[start].at
    assert at is not None
    return MachineCode(bytes(data), at, tuple(sorted(inside)), tuple(sorted(outside)))


def _merge_object_file_sections(
    content: bytes, data: bytearray, symbols: dict[str, _Symbol], relocations: list[_Relocation]
) -> None:
    """Append the sections, symbols and relocations of an object file to those of earlier files. If two functions have
    the same name, the first one is used."""
    offset, (size, count) = struct.unpack_from("<Q", content, 40)[0], struct.unpack_from("<HH", content, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", content, offset + n * size)) for n in range(count)]
    begins: dict[int, int] = {}
    for n, section in enumerate(sections):
        if section.kind == PROGRAM and section.flags & ALLOCATED:
            data.extend(bytes(-len(data) % max(section.align, 1)))
            begins[n] = len(data)
            data.extend(content[section.at : section.at + section.size])
    table = next(section for section in sections if section.kind == SYMBOLS)
    names, own = sections[table.link].at, []
    for at in range(table.at, table.at + table.size, 24):
        where, info, _, home, value, length = struct.unpack_from("<IBBHQQ", content, at)
        name = content[names + where : content.index(b"\0", names + where)].decode()
        if home == COMMON:
            data.extend(bytes(-len(data) % 16))
            begin: int | None = len(data)
            data.extend(bytes(length))
        else:
            begin = begins[home] + value if home in begins else None
        own.append(_Symbol(name, info & 15, begin, length))
    for symbol in own:
        if symbol.at is not None and symbol.name:
            symbols.setdefault(symbol.name, symbol)
    for section in sections:
        if section.kind == RELOCATIONS and section.info in begins:
            for at in range(section.at, section.at + section.size, 24):
                where, info, added = struct.unpack_from("<QQq", content, at)
                relocations.append(_Relocation(begins[section.info] + where, info & 0xFFFFFFFF, own[info >> 32], added))


def enable_disk_cache(dispatcher: Any, function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
    """Let a Numba dispatcher cache compiled code on disk. `function` is the kernel; the dispatcher may compile a copy
    of it.

    If `bare` is True, the code has no entry point for Python."""
    try:
        dispatcher._cache = KernelCache(dispatcher.py_func, function, fastmath, bare)
    except RuntimeError as error:
        _warn_cannot_cache(error)


class KernelCache(FunctionCache):
    """Numba's disk cache, with one file per function, signature and version of the sources. It warns if a file cannot
    be read or written.

    Numba's own cache numbers its files consecutively, so two ranks that compile at the same time can pick the same
    name. In addition, it notices changes only in the source file of the kernel, not in the source files of the
    functions that the kernel calls."""

    def __init__(self, copy: Callable[..., Any], function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
        super().__init__(copy)
        self.made_as = hash_function_sources(function), format_fastmath_for_file_name(fastmath), bare
        self.objects: dict[Any, bytes] = {}
        """Object code that was loaded from disk, keyed by signature. Numba itself does not keep this code."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return Numba's cache key without the function's closure.

        An intrinsic in the closure is a different object in every process, so if keys included the closure, each
        process would compile again. Keys need not include it, because file names already depend on the function's name
        and sources."""
        return sig, codegen.magic_tuple(), self._py_func.__code__.co_code

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load a compiled signature as Numba does, but without Numba's `refresh`, which imports modules that are
        needed only for compiling."""
        rtsys.initialize(target_context)
        try:
            self._select_cache_file(sig, target_context.codegen())
            data = self._cache_file.load(self._index_key(sig, target_context.codegen()))
        except OSError as error:
            return _warn_cannot_cache(error)
        if data is None:
            return None
        self.objects[sig] = data[0][2][0]
        return self._impl.rebuild(target_context, data)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_cannot_cache(error)

    def _save_overload(self, sig: Any, data: Any) -> None:
        self._select_cache_file(sig, data.codegen)
        super()._save_overload(sig, data)

    def _select_cache_file(self, sig: Any, codegen: Any) -> None:
        """Select the cache file of this signature. The caller holds the compiler's lock."""
        key = repr((str(sig), codegen.magic_tuple(), self.made_as, environment.describe_compiler_target()))
        name = f"{self._impl.filename_base}.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
        self._cache_file: Any = _DigestedFile(Path(self._cache_path, f"{name}.kept"))


class _DigestedFile:
    """A file that holds one pickled object and its digest, in place of Numba's index and data files.

    The object is unpickled only if this user or root has written the file and the digest is correct."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def save(self, key: Any, data: Any) -> None:
        write_with_digest(self.file, dumps((key, data)))

    def load(self, key: Any) -> Any:
        content = read_with_digest(self.file)
        known, data = (None, None) if content is None else pickle.loads(content)
        return data if known == key else None


_warned = False


def _warn_cannot_cache(error: Exception) -> None:
    """Warn once per process, and only on the first rank of a host, that compiled kernels cannot be stored on disk."""
    global _warned
    launcher = environment.read_environment().launcher
    if not _warned and not (launcher and launcher.local_rank):
        _warned = True
        warn(
            f"fsdpx: compiled kernels cannot be kept on disk ({error}), so every process compiles them again at its "
            "start: set FSDPX_CACHE to a folder that can be written",
        )


CONSTANTS = ("builtins.None", "builtins.True", "builtins.False", "builtins.NotImplemented")
NUMBERS = {"int": types.int64, "float": types.float64, "bool": types.boolean}
LLVM_TYPES = {
    "int64": "i64", "uint64": "i64", "int32": "i32", "uint32": "i32", "uint16": "i16", "int8": "i8", "uint8": "i8",
    "float32": "float", "float64": "double",
}  # fmt: skip
RESULTS = {
    types.none: ("ptr", "  %out = getelementptr i8, ptr @builtins.None, i64 0\n  call void @Py_IncRef(ptr %out)"),
    types.boolean: (
        "i8",
        "  %yes = icmp ne i8 %result, 0\n  %out = select i1 %yes, ptr @builtins.True, ptr @builtins.False\n"
        "  call void @Py_IncRef(ptr %out)",
    ),
    types.int64: ("i64", "  %out = call ptr @PyLong_FromLongLong(i64 %result)"),
    types.int32: ("i32", "  %wide = sext i32 %result to i64\n  %out = call ptr @PyLong_FromLongLong(i64 %wide)"),
    types.float64: ("double", "  %out = call ptr @PyFloat_FromDouble(double %result)"),
    types.float32: (
        "float",
        "  %wide = fpext float %result to double\n  %out = call ptr @PyFloat_FromDouble(double %wide)",
    ),
}
"""Numba type of a result -> (its LLVM type in memory, LLVM code that converts the result to a Python object)."""

SUPPORT = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare ptr @PyErr_NoMemory()
declare ptr @PyErr_Occurred()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyFloat_FromDouble(double)

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %padded = add i64 %size, %wide
  %all = add i64 %padded, 48
  %info = call ptr @malloc(i64 %all)
  %none = icmp eq ptr %info, null
  br i1 %none, label %end, label %fill
fill:
  store i64 1, ptr %info
  %start = ptrtoint ptr %info to i64
  %least = add i64 %start, 47
  %past = add i64 %least, %wide
  %mask = sub i64 0, %wide
  %at = and i64 %past, %mask
  %place = getelementptr i64, ptr %info, i64 3
  store i64 %at, ptr %place
  br label %end
end:
  ret ptr %info
}

define ptr @NRT_Allocate(i64 %size) {
  %memory = call ptr @malloc(i64 %size)
  ret ptr %memory
}

define void @NRT_Free(ptr %memory) {
  call void @free(ptr %memory)
  ret void
}

define void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}

define i32 @numba_attempt_nocopy_reshape(i64 %nd, ptr %dims, ptr %strides, i64 %count, ptr %sizes, ptr %steps,
                                         i64 %item, i32 %turned) {
begin:
  %refused = icmp ne i32 %turned, 0
  br i1 %refused, label %no, label %next
next:
  %left = phi i64 [ %count, %begin ], [ %at, %put ]
  %step = phi i64 [ %item, %begin ], [ %further, %put ]
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %put, label %yes
put:
  %at = sub i64 %left, 1
  %to = getelementptr i64, ptr %steps, i64 %at
  store i64 %step, ptr %to
  %from = getelementptr i64, ptr %sizes, i64 %at
  %size = load i64, ptr %from
  %further = mul i64 %step, %size
  br label %next
yes:
  ret i32 1
no:
  ret i32 0
}
"""
"""The runtime functions that Numba's code calls, in LLVM assembly. An allocation has a header of 48 bytes, with the
reference count in the first word and the address of the data in the fourth word. The last function computes the strides
of a contiguous array after its shape has changed."""


def compile_to_machine_code(dispatcher: Any, kinds: tuple[str, ...]) -> MachineCode | None:
    """Compile a function for these kinds (types) of arguments, and return its machine code.

    Returns None if the type of the function's result is not in `RESULTS`, or if the compiled code cannot be linked."""
    arguments = tuple(map(_to_numba_type, kinds))
    _compile_without_gc(dispatcher, arguments)
    found = dispatcher.overloads[arguments]
    if found.signature.return_type not in RESULTS:
        return None
    text = _make_entry_ir(found.fndesc.llvm_func_name, kinds, found.signature.return_type)
    module = llvm.parse_assembly(text + SUPPORT)
    module.verify()
    machine = found.library.codegen._tm
    loaded = getattr(dispatcher._cache, "objects", {}).get(arguments)
    return try_link_function([loaded or found.library._get_compiled_object(), machine.emit_object(module)], "entry")


def compile_dispatcher(dispatcher: Any, kinds: tuple[str, ...] | None) -> Any:
    """Return the Numba dispatcher `dispatcher`. If `kinds` are given, the dispatcher is first compiled for arguments of
    these kinds (types).

    The kind of an array may end in " r" (the kernel only reads it) or " w" (the kernel writes to it). If any kind ends
    in this way, the dispatcher then compiles no further signatures, so it rejects arguments of other types."""
    if kinds is not None:
        _compile_without_gc(dispatcher, tuple(map(_to_numba_type, kinds)))
        if any(kind.endswith((" r", " w")) for kind in kinds):
            dispatcher.disable_compile()
    return dispatcher


def _compile_without_gc(dispatcher: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a function with garbage collection turned off. This saves a tenth of the time, because Numba creates
    millions of objects."""
    collects = gc.isenabled()
    gc.disable()
    try:
        dispatcher.disable_compile(False)
        dispatcher.compile(arguments)
    finally:
        if collects:
            gc.enable()


def _to_numba_type(kind: str) -> Any:
    if " " not in kind:
        return NUMBERS.get(kind) or getattr(types, kind.removeprefix("numpy."))
    dtype, ndim, layout, *mode = kind.split()
    read, array = mode == ["r"], cast(Any, types.Array)
    layout = "A" if layout == "any" else layout
    return array(_parse_dtype(dtype), int(ndim), layout, readonly=read, aligned=not read)


def _parse_dtype(name: str) -> Any:
    return types.boolean if name == "bool" else getattr(types, name)


def _make_entry_ir(function: str, argument_kinds: tuple[str, ...], result: Any) -> str:
    """Return the LLVM assembly of an entry point that Python can call.

    The first two arguments of the function that Numba compiled are pointers through which it returns its result and an
    error."""
    returned, boxed = RESULTS[result]
    checks, reads, passed = [], [], ["ptr %slot", "ptr %error"]
    for n, word in enumerate(argument_kinds):
        check, read, values = _emit_array_argument(n, word) if " " in word else _emit_number_argument(n, word)
        checks.append(check + f"  br i1 %fits{n}, label %check{n + 1}, label %other\ncheck{n + 1}:\n")
        reads.append(read)
        passed += values
    kinds = ", ".join(value.partition(" ")[0] for value in passed)
    names = {
        *CONSTANTS,
        *map(_get_python_type_name, argument_kinds),
        *(f"dtype.{word.split()[0]}" for word in argument_kinds if " " in word),
    }
    objects = "".join(f"@{name} = external global i8\n" for name in sorted(names))
    return f"""{objects}declare i32 @"{function}"({kinds})
define ptr @entry(ptr %self, ptr %arguments, i64 %count) {{
  %slot = alloca {returned}
  %error = alloca ptr
  %all = icmp eq i64 %count, {len(argument_kinds)}
  br i1 %all, label %check0, label %other
check0:
{"".join(checks)}{"".join(reads)}  %failed = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %failed, null
  br i1 %fine, label %run, label %raise
run:
  %thread = call ptr @PyEval_SaveThread()
  %status = call i32 @"{function}"({", ".join(passed)})
  call void @PyEval_RestoreThread(ptr %thread)
  switch i32 %status, label %memory [ i32 0, label %done i32 -2, label %done ]
done:
  %result = load {returned}, ptr %slot
{boxed}
  ret ptr %out
memory:
  %ignored = call ptr @PyErr_NoMemory()
  br label %raise
raise:
  ret ptr null
other:
  call void @Py_IncRef(ptr @builtins.NotImplemented)
  ret ptr @builtins.NotImplemented
}}
"""


def _get_python_type_name(kind: str) -> str:
    """Return the name of the Python type that arguments of this kind have."""
    return "numpy.ndarray" if " " in kind else kind if "." in kind else f"builtins.{kind}"


def _emit_field_load(to: str, llvm_type: str, base: str, offset: int) -> str:
    return f"  {to}.at = getelementptr i8, ptr {base}, i64 {offset}\n  {to} = load {llvm_type}, ptr {to}.at\n"


def _emit_load_and_type_check(n: int, kind: str) -> str:
    """Return LLVM assembly that loads argument n of a Python call and checks its type."""
    text = f"  %place{n} = getelementptr ptr, ptr %arguments, i64 {n}\n  %a{n} = load ptr, ptr %place{n}\n"
    return (
        text
        + _emit_field_load(f"%type{n}", "ptr", f"%a{n}", 8)
        + f"  %is{n} = icmp eq ptr %type{n}, @{_get_python_type_name(kind)}\n"
    )


def _emit_number_argument(n: int, kind: str) -> tuple[str, str, list[str]]:
    """Return code for the numeric argument n of a Python call: LLVM assembly that checks its type, LLVM assembly that
    reads its value, and the list of arguments to pass to the function that Numba compiled."""
    check = _emit_load_and_type_check(n, kind) + f"  %fits{n} = and i1 %is{n}, true\n"
    if kind == "bool":
        return check, f"  %v{n} = icmp eq ptr %a{n}, @builtins.True\n", [f"i1 %v{n}"]
    if kind == "int":
        return check, f"  %v{n} = call i64 @PyLong_AsLongLong(ptr %a{n})\n", [f"i64 %v{n}"]
    llvm_type = "double" if kind == "float" else LLVM_TYPES[kind.removeprefix("numpy.")]
    return check, _emit_field_load(f"%v{n}", llvm_type, f"%a{n}", NUMBER), [f"{llvm_type} %v{n}"]


def _emit_array_argument(n: int, kind: str) -> tuple[str, str, list[str]]:
    """Return code for the array argument n of a Python call: LLVM assembly that checks its type, LLVM assembly that
    reads its fields, and the list of arguments to pass to the function that Numba compiled.

    Numba passes an array as several arguments: two pointers to its owners (null here), the number of elements, the item
    size, the data pointer, the shape and the strides."""
    dtype, ndim, layout, *mode = kind.split()
    mask, flags = FLAGS[layout, "".join(mode)]
    check = _emit_load_and_type_check(n, kind) + f"  br i1 %is{n}, label %array{n}, label %other\narray{n}:\n"
    check += _emit_field_load(f"%dims{n}", "i32", f"%a{n}", ARRAY["nd"]) + _emit_field_load(
        f"%flags{n}", "i32", f"%a{n}", ARRAY["flags"]
    )
    check += _emit_field_load(f"%dtype{n}", "ptr", f"%a{n}", ARRAY["descr"])
    check += f"  %masked{n} = and i32 %flags{n}, {mask}\n  %one{n} = icmp eq i32 %masked{n}, {flags}\n"
    check += f"  %two{n} = icmp eq i32 %dims{n}, {ndim}\n  %both{n} = and i1 %one{n}, %two{n}\n"
    check += f"  %same{n} = icmp eq ptr %dtype{n}, @dtype.{dtype}\n  %fits{n} = and i1 %both{n}, %same{n}\n"
    read = _emit_field_load(f"%data{n}", "ptr", f"%a{n}", ARRAY["data"]) + _emit_field_load(
        f"%shape{n}", "ptr", f"%a{n}", ARRAY["dims"]
    )
    read += _emit_field_load(f"%strides{n}", "ptr", f"%a{n}", ARRAY["strides"])
    values, size = [], f"%size{n}.0"
    read += f"  {size} = add i64 1, 0\n"
    for what in ("shape", "strides"):
        for i in range(int(ndim)):
            read += _emit_field_load(f"%{what}{n}.{i}", "i64", f"%{what}{n}", 8 * i)
            values.append(f"i64 %{what}{n}.{i}")
    for i in range(int(ndim)):
        read += f"  %size{n}.{i + 1} = mul i64 %size{n}.{i}, %shape{n}.{i}\n"
    item = np.dtype(dtype).itemsize
    return check, read, ["ptr null", "ptr null", f"i64 %size{n}.{ndim}", f"i64 {item}", f"ptr %data{n}", *values]
