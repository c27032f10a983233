"""Machine code for a function and kinds of arguments: what Numba makes of it, and an entry that Python can call.

The entry takes the arguments of a Python call as they are. It compares each with the kind it is for and returns
NotImplemented if one is of another kind; else it reads numbers and where arrays lie, releases the GIL and calls what
Numba has compiled."""

from __future__ import annotations

import gc
from typing import Any, cast

import llvmlite.binding as llvm
import numpy as np
from numba import types

from fsdpx.native import link
from fsdpx.native.kinds import ARRAY, FLAGS, NUMBER
from fsdpx.native.link import Code

__all__ = ["build", "prepared"]

CONSTANTS = ("builtins.None", "builtins.True", "builtins.False", "builtins.NotImplemented")
NUMBERS = {"int": types.int64, "float": types.float64, "bool": types.boolean}
WORDS = {
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
"""How a result lies in memory, and what makes it an object."""

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
"""What Numba's code calls. Arrays inside it: a count of references, three words, where the numbers lie, the numbers;
and strides of a contiguous array in another shape."""


def build(dispatcher: Any, wanted: tuple[str, ...]) -> Code | None:
    """Machine code for arguments of these kinds; None if it returns, or calls, what an entry cannot."""
    arguments = tuple(map(_type, wanted))
    _compile(dispatcher, arguments)
    found = dispatcher.overloads[arguments]
    if found.signature.return_type not in RESULTS:
        return None
    text = _entry(found.fndesc.llvm_func_name, wanted, found.signature.return_type)
    module = llvm.parse_assembly(text + SUPPORT)
    module.verify()
    machine = found.library.codegen._tm
    loaded = getattr(dispatcher._cache, "objects", {}).get(arguments)
    return link.link([loaded or found.library._get_compiled_object(), machine.emit_object(module)], "entry")


def prepared(dispatcher: Any, wanted: tuple[str, ...] | None) -> Any:
    """The dispatcher, ready for arguments of these kinds; if they are declared, for no others."""
    if wanted is not None:
        _compile(dispatcher, tuple(map(_type, wanted)))
        if any(word.endswith((" r", " w")) for word in wanted):
            dispatcher.disable_compile()
    return dispatcher


def _compile(dispatcher: Any, arguments: tuple[Any, ...]) -> None:
    """Without looking for garbage among the millions of objects that Numba makes: a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        dispatcher.disable_compile(False)
        dispatcher.compile(arguments)
    finally:
        if collects:
            gc.enable()


def _type(word: str) -> Any:
    if " " not in word:
        return NUMBERS.get(word) or getattr(types, word.removeprefix("numpy."))
    dtype, ndim, layout, *mode = word.split()
    read, array = mode == ["r"], cast(Any, types.Array)
    layout = "A" if layout == "any" else layout
    return array(_dtype(dtype), int(ndim), layout, readonly=read, aligned=not read)


def _dtype(name: str) -> Any:
    return types.boolean if name == "bool" else getattr(types, name)


def _entry(function: str, wanted: tuple[str, ...], result: Any) -> str:
    """The entry as LLVM's text. In front of the arguments Numba passes where the result goes, and where an error."""
    returned, boxed = RESULTS[result]
    checks, reads, passed = [], [], ["ptr %slot", "ptr %error"]
    for n, word in enumerate(wanted):
        check, read, values = _array(n, word) if " " in word else _number(n, word)
        checks.append(check + f"  br i1 %fits{n}, label %check{n + 1}, label %other\ncheck{n + 1}:\n")
        reads.append(read)
        passed += values
    kinds = ", ".join(value.partition(" ")[0] for value in passed)
    names = {*CONSTANTS, *map(_object, wanted), *(f"dtype.{word.split()[0]}" for word in wanted if " " in word)}
    objects = "".join(f"@{name} = external global i8\n" for name in sorted(names))
    return f"""{objects}declare i32 @"{function}"({kinds})
define ptr @entry(ptr %self, ptr %arguments, i64 %count) {{
  %slot = alloca {returned}
  %error = alloca ptr
  %all = icmp eq i64 %count, {len(wanted)}
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


def _object(word: str) -> str:
    """The Python type of a kind."""
    return "numpy.ndarray" if " " in word else word if "." in word else f"builtins.{word}"


def _field(to: str, kind: str, base: str, at: int) -> str:
    return f"  {to}.at = getelementptr i8, ptr {base}, i64 {at}\n  {to} = load {kind}, ptr {to}.at\n"


def _typed(n: int, word: str) -> str:
    """Argument n, and whether it is of its type."""
    text = f"  %place{n} = getelementptr ptr, ptr %arguments, i64 {n}\n  %a{n} = load ptr, ptr %place{n}\n"
    return text + _field(f"%type{n}", "ptr", f"%a{n}", 8) + f"  %is{n} = icmp eq ptr %type{n}, @{_object(word)}\n"


def _number(n: int, word: str) -> tuple[str, str, list[str]]:
    """Code that checks a number, code that reads it, and the arguments passed on."""
    check = _typed(n, word) + f"  %fits{n} = and i1 %is{n}, true\n"
    if word == "bool":
        return check, f"  %v{n} = icmp eq ptr %a{n}, @builtins.True\n", [f"i1 %v{n}"]
    if word == "int":
        return check, f"  %v{n} = call i64 @PyLong_AsLongLong(ptr %a{n})\n", [f"i64 %v{n}"]
    kind = "double" if word == "float" else WORDS[word.removeprefix("numpy.")]
    return check, _field(f"%v{n}", kind, f"%a{n}", NUMBER), [f"{kind} %v{n}"]


def _array(n: int, word: str) -> tuple[str, str, list[str]]:
    """The same for an array, which Numba takes as two owners, sizes, where it lies, shape and strides."""
    dtype, ndim, layout, *mode = word.split()
    mask, flags = FLAGS[layout, "".join(mode)]
    check = _typed(n, word) + f"  br i1 %is{n}, label %array{n}, label %other\narray{n}:\n"
    check += _field(f"%dims{n}", "i32", f"%a{n}", ARRAY["nd"]) + _field(f"%flags{n}", "i32", f"%a{n}", ARRAY["flags"])
    check += _field(f"%dtype{n}", "ptr", f"%a{n}", ARRAY["descr"])
    check += f"  %masked{n} = and i32 %flags{n}, {mask}\n  %one{n} = icmp eq i32 %masked{n}, {flags}\n"
    check += f"  %two{n} = icmp eq i32 %dims{n}, {ndim}\n  %both{n} = and i1 %one{n}, %two{n}\n"
    check += f"  %same{n} = icmp eq ptr %dtype{n}, @dtype.{dtype}\n  %fits{n} = and i1 %both{n}, %same{n}\n"
    read = _field(f"%data{n}", "ptr", f"%a{n}", ARRAY["data"]) + _field(f"%shape{n}", "ptr", f"%a{n}", ARRAY["dims"])
    read += _field(f"%strides{n}", "ptr", f"%a{n}", ARRAY["strides"])
    values, size = [], f"%size{n}.0"
    read += f"  {size} = add i64 1, 0\n"
    for what in ("shape", "strides"):
        for i in range(int(ndim)):
            read += _field(f"%{what}{n}.{i}", "i64", f"%{what}{n}", 8 * i)
            values.append(f"i64 %{what}{n}.{i}")
    for i in range(int(ndim)):
        read += f"  %size{n}.{i + 1} = mul i64 %size{n}.{i}, %shape{n}.{i}\n"
    item = np.dtype(dtype).itemsize
    return check, read, ["ptr null", "ptr null", f"i64 %size{n}.{ndim}", f"i64 {item}", f"ptr %data{n}", *values]
