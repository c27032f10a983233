"""A stand-in for CuPy: NumPy arrays that behave as if they lay on a GPU. It refuses what CuPy refuses: to compute with
arrays of the host, to copy them in by assignment, and to be turned into them unasked."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import operator
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from capturing import OF_DRIVER, Capturing, Graph, at_address, owner_of, using_allocator
from numpy.lib.mixins import NDArrayOperatorsMixin

__all__ = ["Cupy", "ndarray"]

HERE = Path(__file__).parent
_at = threading.local()


class Device:
    compute_capability = "90"

    def __init__(self, number: int | None = None) -> None:
        self.id = getattr(_at, "gpu", 0) if number is None else number

    def use(self) -> None:
        _at.gpu = self.id

    def synchronize(self) -> None:
        """What computes is done at once."""
        _require_no_capture("synchronize")

    def __enter__(self) -> Device:
        self.before = Device().id
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        _at.gpu = self.before


class ndarray(NDArrayOperatorsMixin):  # noqa: N801
    """Numbers on a GPU: `memory` is a NumPy array that only this file knows of."""

    def __init__(self, memory: Any, dtype: Any = None, memptr: Any = None, strides: Any = None) -> None:
        self.gpu = Device().id
        self.memory = memory if memptr is None else at_address(memptr.ptr, memory, dtype, strides)

    @property
    def device(self) -> Any:
        return Device(self.gpu)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.memory.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.memory.__array_interface__, "version": 3, "stream": None}

    def get(self) -> np.ndarray:
        _require_no_capture("get")
        return self.memory.copy()

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if out is not None:
            options["out"] = tuple(_bare(one) for one in out)
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        result = _performed(function, tuple(map(_bare, inputs)), options)
        return out[0] if out is not None and len(out) == 1 else _wrapped(result)

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, options: Any) -> Any:
        return _calling(function)(*arguments, **options)

    def __setitem__(self, key: Any, value: Any) -> None:
        assert getattr(value, "gpu", self.gpu) == self.gpu, "arrays of two GPUs"
        _performed(operator.setitem, (self.memory, _bare(key), _bare(value)), {})

    def __getitem__(self, key: Any) -> Any:
        return _wrapped(_performed(operator.getitem, (self.memory, _bare(key)), {}))

    def __len__(self) -> int:
        return len(self.memory)

    def _read(self, kind: type) -> Any:
        _require_no_capture(kind.__name__)
        return kind(self.memory)

    __float__ = partialmethod(_read, float)
    __int__ = partialmethod(_read, int)
    __bool__ = partialmethod(_read, bool)

    def __getattr__(self, name: str) -> Any:
        if name in ("ctypes", "memory") or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.memory, name)
        return _calling(found) if callable(found) else _wrapped(found)


ndarray.__module__ = "cupy"


class Event:
    """Done when its stream has come there: streams beside the one that computes do nothing until they are looked at for
    the second time, so that what does not wait for them finds old numbers."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.stream: Any = None
        self.at = self.looks = 0

    def record(self, stream: Any = None) -> None:
        self.stream = stream
        self.at, self.looks = 0 if stream is None else stream.issued, 0

    @property
    def done(self) -> bool:
        _require_no_capture("an event")
        self.looks += 1
        if self.stream is None or self.stream.stuck:
            return self.stream is None
        if self.looks > 1:
            self.stream.run(self.at)
        return self.stream.ran >= self.at

    def synchronize(self) -> None:
        while not self.done:
            pass


class Stream:
    """ptr tells streams apart; 0 is the one that computes, at once. stuck: it does nothing any more."""

    known: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()
    numbers = itertools.count(7)

    def __init__(self, non_blocking: bool = False, ptr: int | None = None) -> None:
        self.ptr = next(self.numbers) if ptr is None else ptr
        self.work: list[Any] = []
        self.issued = self.ran = self.waited = 0
        self.stuck, self.non_blocking = False, non_blocking
        self.inside: list[Any] = []
        self.capturing: Capturing | None = None
        self.lock = threading.RLock()  # threads share the stream of their GPU
        self.known[self.ptr] = self

    def issue(self, what: Any) -> None:
        with self.lock:
            self.issued += 1
            self.work.append(what)

    def run(self, until: int) -> None:
        with self.lock:
            while self.ran < until:
                self.work.pop(0)()
                self.ran += 1

    def record(self, event: Event) -> Event:
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.synchronize()
        self.waited += 1

    def synchronize(self) -> None:
        _require_no_capture("synchronize")
        self.run(self.issued)

    def begin_capture(self, mode: Any = None) -> None:
        if not self.non_blocking:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        assert self.capturing is None
        self.capturing = Capturing()

    def end_capture(self) -> Graph:
        capturing, self.capturing = self.capturing, None
        assert capturing is not None
        return capturing.end()

    def is_capturing(self) -> bool:
        return self.capturing is not None

    def __enter__(self) -> Stream:
        self.inside.append(_stream())
        _at.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _at.stream = self.inside.pop()


COMPUTE = Stream(ptr=0)


def _stream() -> Stream:
    """The one on which this thread issues."""
    return getattr(_at, "stream", COMPUTE)


def _require_no_capture(what: str) -> None:
    if (capturing := _stream().capturing) is not None:
        capturing.refuse(what, invalidates=True)


def _performed(function: Any, given: Any, options: Any) -> Any:
    capturing = _stream().capturing
    return function(*given, **options) if capturing is None else capturing.call(function, given, options)


def _memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    _require_no_capture("a copy")
    assert kind in (1, 2, 3)
    assert stream != 0, "copies are beside what computes"
    assert nbytes > 0
    Stream.known[stream].issue(lambda: ctypes.memmove(target, source, nbytes))


def _memcpy(target: int, source: int, nbytes: int, kind: int) -> None:
    assert kind in (1, 2)
    ctypes.memmove(target, source, nbytes)


def _pinned(nbytes: int) -> Any:
    """Full of what an earlier owner has left."""
    return (ctypes.c_char * nbytes).from_buffer(bytearray(b"\x7f" * nbytes))


def _bare(value: Any) -> Any:
    """What NumPy computes with."""
    if isinstance(value, tuple | list):
        return type(value)(map(_bare, value))
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value.memory if isinstance(value, ndarray) else value


def _wrapped(value: Any) -> Any:
    """CuPy's sums and single elements are arrays as well."""
    if isinstance(value, list) or (isinstance(value, tuple) and any(isinstance(v, np.ndarray) for v in value)):
        return type(value)(map(_wrapped, value))
    return ndarray(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def _as_strided(array: ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> ndarray:
    memory = array.memory
    return ndarray(at_address(memory.ctypes.data, shape, memory.dtype, strides, owner_of(memory)))


def _calling(function: Any) -> Any:
    def call(*given: Any, **options: Any) -> Any:
        return _wrapped(_performed(function, _bare(given), {k: _bare(v) for k, v in options.items()}))

    return call


class RawModule:
    """CUDA C compiled for the host, one launch at a time. What kernels get is checked: arrays of the GPU, and numbers
    that say their type."""

    def __init__(self, code: str, options: tuple[str, ...] = (), **_: Any) -> None:
        defines = [option for option in options if option.startswith("-D")]
        head, *updates = code.split("#if KIND != 16")
        calls = _launchers(head) + ([] if "-DKIND=16" in defines else _launchers("".join(updates)))
        shim = (HERE / "on_the_host.h").read_text()
        self.library = ctypes.PyDLL(_compiled("".join([shim, code, *calls]), defines))

    def get_function(self, name: str) -> Any:
        function = getattr(self.library, f"host_{name.removeprefix('fsdpx_')}")

        def launch(grid: tuple[int, ...], block: tuple[int, ...], given: tuple[Any, ...]) -> None:
            assert all(0 < n < 2**31 for n in grid), grid
            assert block[0] % 32 == 0, block
            passed = (*(*grid, 1)[:2], *block, *map(_passed, given))
            if (capturing := _stream().capturing) is None:
                function(*passed)
                return
            for one in given:
                if isinstance(one, ndarray):
                    capturing.look_at(one.memory)
            capturing.issue(lambda: function(*passed))

        return launch


def _launchers(code: str) -> list[str]:
    """For each kernel a function that runs it on a grid."""
    made, macros = [], re.findall(r"^#define (\w+)(?:\((\w+)\))? (.*)", code, re.M)
    for name, given in re.findall(r"^KERNEL\((\w+)\)\((.*?)\) *\{", code, re.M | re.S):
        for macro, parameter, body in macros:
            pattern = rf"\b{macro}\((\w+)\)" if parameter else rf"\b{macro}\b"
            text = re.sub(rf"(##)?\b{parameter}\b(##)?", r"\\1", body) if parameter else body
            given = re.sub(pattern, text, given)
        names = ", ".join(word.split()[-1].lstrip("*") for word in given.split(","))
        body = f"run(grid_x, grid_y, block, [&] {{ fsdpx_{name}({names}); }});"
        made.append(f'extern "C" void host_{name}(int grid_x, int grid_y, int block, {given}) {{ {body} }}\n')
    return made


def _passed(value: Any) -> Any:
    if isinstance(value, ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.memory.ctypes.data)
    return TYPES[type(value)](value.item())


TYPES = {
    np.int32: ctypes.c_int, np.int64: ctypes.c_longlong, np.uint64: ctypes.c_ulonglong, np.float32: ctypes.c_float,
    np.float64: ctypes.c_double,
}  # fmt: skip


def _compiled(source: str, defines: list[str]) -> str:
    """The library, kept from one run of the tests to the next; made once where several ranks or processes want it."""
    folder = Path(tempfile.gettempdir()) / f"fsdpx-kernels-on-the-host-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    key = hashlib.sha256(repr((source, defines)).encode()).hexdigest()[:16]
    made = folder / f"{key}.so"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # threads open it each, so it holds between them as well
        if not made.exists():
            made.with_suffix(".cpp").write_text(source)
            flags = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-shared", "-fPIC", "-w", *defines]
            subprocess.run(["g++", *flags, "-o", made.with_suffix(".part"), made.with_suffix(".cpp")], check=True)
            made.with_suffix(".part").rename(made)
    return str(made)


FORMATS = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}


def by_columns(kind, into, shape, alpha, a, lda, b, ldb, beta, c, ldc) -> None:
    """C = alpha op(A) op(B) + beta C of matrices that lie by columns, as cuBLAS has it. a, b, c: addresses."""
    turn_a, turn_b, m, n, k = shape
    one = _columns(a, kind, *((k, m) if turn_a else (m, k)), lda)
    two = _columns(b, kind, *((n, k) if turn_b else (k, n)), ldb)
    out, wide = _columns(c, into, m, n, ldc), np.float64 if kind is np.float64 else np.float32
    product = (one.T if turn_a else one).astype(wide) @ (two.T if turn_b else two).astype(wide)
    out[...] = wide(alpha) * product + (wide(beta) * out.astype(wide) if beta else 0)


class Cublas:
    """The library as ctypes has it. It takes part in graphs, while CuPy's functions refuse to. CuPy has a handle for
    each thread, so a stream that one thread sets is not that of another."""

    def __init__(self) -> None:
        self.of_thread = threading.local()
        # `partial` also of one's own method: it takes attributes such as `argtypes`, and a bound method takes none
        self.cublasSetStream_v2 = partial(self._set)
        self.cublasGemmEx = partial(self._issue, _gemm)
        self.cublasGemmStridedBatchedEx = partial(self._issue, _product)

    def _set(self, handle: Any, stream: int) -> int:
        self.of_thread.stream = stream
        return 0

    def _issue(self, function: Any, *given: Any) -> int:
        assert getattr(self.of_thread, "stream", 0) == _stream().ptr, "on the stream of CuPy"
        function(*given, refused=False)
        return 0


def _columns(at: int, kind: Any, rows: int, columns: int, ld: int) -> np.ndarray:
    assert ld >= rows, "a leading dimension is at least as long as a column"
    size = np.dtype(kind).itemsize
    memory = (ctypes.c_char * (((columns - 1) * ld + rows) * size)).from_address(at)
    return np.ndarray((rows, columns), kind, memory, strides=(size, ld * size))


def _gemm(*given: Any, refused: bool = True) -> None:
    """gemmEx: gemmStridedBatchedEx of one product."""
    _product(*given[:10], 0, *given[10:13], 0, *given[13:17], 0, 1, *given[17:], refused=refused)


def _product(*given: Any, refused: bool = True) -> None:
    """gemmStridedBatchedEx."""
    if refused and _stream().capturing is not None:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    _, ta, tb, m, n, k, alpha, a, kind_a, lda, step_a, b, kind_b, ldb, step_b, *rest = given
    beta, c, kind_c, ldc, step_c, count, compute, _ = rest
    assert kind_a == kind_b
    assert compute == (70 if kind_a == 1 else 68), "sums are in float32, or of float64"
    number = ctypes.c_double if kind_a == 1 else ctypes.c_float
    factors = [number.from_address(at).value for at in (alpha, beta)]
    kind, into = FORMATS[kind_a], FORMATS[kind_c]
    sizes = np.dtype(kind).itemsize, np.dtype(into).itemsize
    for i in range(count):
        at = a + i * step_a * sizes[0], b + i * step_b * sizes[0], c + i * step_c * sizes[1]
        call = (kind, into, (ta, tb, m, n, k), factors[0], at[0], lda, at[1], ldb, factors[1], at[2], ldc)
        if (capturing := _stream().capturing) is None:
            by_columns(*call)
        else:
            capturing.keep(_columns(at[2], into, m, n, ldc))
            capturing.issue(partial(by_columns, *call))


class Cupy(types.ModuleType):
    """The module. gpus: how many there are. error: what the driver says instead."""

    __version__ = "14.2.0"
    ndarray = ndarray

    def __init__(self, gpus: int = 1, error: str = "") -> None:
        super().__init__("cupy")
        self.gpus, self.error, self.pinned, space = gpus, error, _pinned, types.SimpleNamespace
        self.RawModule = RawModule
        runtime = space(
            getDeviceCount=self._count, memcpyAsync=_memcpy_async, memcpy=_memcpy,
            deviceGetPCIBusId=lambda number: f"0000:{number + 1:02x}:00.0",
        )  # fmt: skip
        self.cuda = space(
            runtime=runtime, get_current_stream=_stream, using_allocator=using_allocator, nccl=space(available=False),
            alloc_pinned_memory=lambda nbytes: self.pinned(nbytes), device=space(get_cublas_handle=lambda: 1),
            set_pinned_memory_allocator=partial(setattr, self, "pinned"),
        )  # fmt: skip
        for kind in (Device, Stream, Event, *OF_DRIVER):
            setattr(self.cuda, kind.__name__, kind)
        self.get_default_memory_pool = lambda: space(free_all_blocks=lambda: None)
        self.get_default_pinned_memory_pool = lambda: space(malloc=_pinned)
        self.fft = space(**vars(np.fft), config=space(get_plan_cache=lambda: space(set_size=lambda size: None)))
        self.lib = space(stride_tricks=space(as_strided=_as_strided))

    def modules(self) -> dict[str, types.ModuleType]:
        """What `import` finds of it, cuBLAS too."""
        names = "cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs", "cublas"
        *above, libs, cublas = map(types.ModuleType, names)
        vars(cublas).update(gemmEx=_gemm, gemmStridedBatchedEx=_product)
        vars(libs)["cublas"] = cublas
        return {"cupy": self, "cupy.cuda.nccl": self.cuda.nccl, **dict(zip(names, [*above, libs], strict=False))}

    def install(self, monkeypatch: Any) -> Cupy:
        """Until the end of a test `import` finds this module; the test begins on the first GPU."""
        for name, module in self.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        Device(0).use()
        return self

    def _count(self) -> int:
        if self.error:
            raise RuntimeError(self.error)
        return self.gpus

    def asarray(self, value: Any, dtype: Any = None) -> Any:
        if isinstance(value, ndarray):
            return value if dtype is None else value.astype(dtype)
        host = np.array(value, dtype)
        self.cuda.alloc_pinned_memory(max(host.nbytes, 1))
        if _stream().capturing is not None:  # a launch copies what then lies in the pinned memory
            return _wrapped(_performed(np.full, (host.shape, 127), {"dtype": host.dtype}))
        return _wrapped(host)

    array = asarray

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return _calling(found)
