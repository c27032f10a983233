"""Machine code on disk: Numba's bits, taken only for what it was made for, and made anew when it is no good."""

import marshal
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
from amount import few

from fsdpx.core.array import lazy_numba
from fsdpx.core.array.jit import REORDER, jit, specialize
from fsdpx.core.array.lazy_numba import intrinsic, ir, overload_function, register_jitable, types
from fsdpx.core.base import safe_files
from fsdpx.ext.native import code_cache
from fsdpx.ext.native.compile import KernelCache, _DigestedFile

pytestmark = pytest.mark.skipif(not code_cache.can_store_machine_code(), reason="machine code is not kept here")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path))
    return tmp_path / "code"


def _along(x, y, factor, turned):
    """Allocates, sums in vector lanes, takes and returns numbers."""
    z = np.empty(x.shape[0] * x.shape[1], x.dtype).reshape(x.shape)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            z[i, j] = -x[i, j] if turned else x[i, j]
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total += z[i, j] * y[j]
    y[0] = total
    return total * factor


def _numbers(dtype, order="C"):
    numbers = np.random.default_rng(0)
    return np.asarray(numbers.standard_normal((7, 33)).astype(dtype), order=order), np.ones(33, dtype)


@pytest.mark.parametrize("dtype", few(["float32", "float64"], 2))
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_bits_are_those_of_numba(dtype, order):
    function = jit(_along, fastmath=REORDER)
    (x, y), (_, z) = _numbers(dtype, order), _numbers(dtype)
    found = function(x, y, 0.5, True)
    assert (found, type(found)) == (function.get_dispatcher()(x, z, 0.5, True), float)
    assert y.tobytes() == z.tobytes()
    assert function.compiled_kinds == {(f"{dtype} 2 {order}", f"{dtype} 1 C", "float", "bool")}


def test_each_call_finds_what_was_made_for_its_arguments(cache):
    function = jit(_along)
    for dtype, factor in (("float32", 2.0), ("float64", 2), ("float32", 2.0), ("float64", np.float32(2))):
        x, y = _numbers(dtype)
        assert function(x, y, factor, False) == pytest.approx(2 * x.sum(dtype="float64"), rel=1e-4)
    x, y = _numbers("float32")
    function(x[:, ::2], y[::2], 2.0, False)
    assert len(function.compiled_kinds) == len(list(cache.iterdir())) == 4
    assert ("float32 2 A", "float32 1 A", "float", "bool") in function.compiled_kinds


def test_code_that_may_reorder_sums_is_not_taken_for_one_that_may_not(cache):
    numbers = {}
    for fastmath in (False, REORDER, False, True):
        x, y = _numbers("float32")
        numbers.setdefault(str(fastmath), set()).add(jit(_along, fastmath=fastmath)(x, y, 0.5, True))
    assert numbers["False"] == {float(np.add.accumulate(-x.ravel())[-1]) * 0.5}  # one after the other
    assert len(list(cache.iterdir())) == len(numbers) == 3


def test_code_is_not_taken_for_that_of_a_compiler_told_otherwise(monkeypatch):
    kept, codegen = KernelCache(_along, _along, False, False), SimpleNamespace(magic_tuple=lambda: ("a processor",))
    names = []
    for level in ("3", "1", "3"):
        monkeypatch.setenv("NUMBA_OPT", level)
        kept._select_cache_file("a signature", codegen)
        names.append(kept._cache_file.file)
    assert names[0] == names[2] != names[1]


def test_what_no_code_is_made_for_is_left_to_numba(cache):
    function = jit(lambda x, pair: x[0] + pair[0])
    assert function(np.ones(2), (3, 4)) == 4.0
    assert not function.compiled_kinds
    assert not cache.exists()


def test_a_declaration_takes_any_layout_and_arrays_that_are_only_read():
    function = specialize(jit(lambda x, out: out.fill(x[1, 2])), "A2r C1")
    x, out = np.arange(12.0).reshape(3, 4), np.zeros(2)
    x.flags.writeable = False
    for some, expected in ((x, 6.0), (x.T, 9.0), (x[::2, ::-1], 9.0)):
        function(some, out)
        assert out.tolist() == [expected] * 2
    assert function.compiled_kinds == {("float64 2 any r", "float64 1 C w")}


def _turn_a_bit(file):
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])


def _link(file):
    file.unlink()
    file.symlink_to("/etc/passwd")


HUGE = marshal.dumps(())[:1].replace(b")", b"(") + b"\xff\xff\xff\x7f"
SPOILT = {
    "bit": (_turn_a_bit, "digest does not fit"),
    "empty": (lambda file: file.write_bytes(b""), "digest does not fit"),
    "huge tuple": (lambda file: file.write_bytes(HUGE), "digest does not fit"),
    "link": (_link, "is a link"),
    "world": (lambda file: file.chmod(0o646), "mode 0646"),
    "as large as a disk": (lambda file: os.truncate(file, 1 << 40), "more than 67,108,864"),
    "another user's": (lambda file: os.chown(file, 65534, 65534), "belongs to user 65534"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_code_that_was_spoilt_or_planted_is_never_run_but_compiled(cache, how):
    if how == "another user's" and os.geteuid():
        pytest.skip("only root can give a file away")
    x, y = _numbers("float32")
    found = jit(_along)(x, y.copy(), 2.0, False)
    (file,) = cache.iterdir()
    kept = marshal.loads(code_cache.read_with_digest(file))
    spoil, words = SPOILT[how]
    spoil(file)
    with pytest.warns(RuntimeWarning, match=f"^fsdpx: {file}.*{words}.*; it is ignored$") as warned:
        assert jit(_along)(x, y.copy(), 2.0, False) == found
    assert len(warned) == 1
    # marshal itself writes what is referred to once in two ways
    assert marshal.loads(code_cache.read_with_digest(file)) == kept
    assert file.lstat().st_mode & 0o777 == 0o644
    assert file.lstat().st_uid == os.geteuid()


def test_code_is_not_taken_under_another_name(cache):
    """Whoever may rename files in a shared cache cannot have one function run for another."""
    x, y = _numbers("float32")
    jit(_along)(x, y.copy(), 2.0, False)
    (file,) = cache.iterdir()
    jit(_along)(x, y.copy(), 2.0, 0)
    (other,) = {*cache.iterdir()} - {file}
    assert code_cache.read_with_digest(file) != code_cache.read_with_digest(other)
    file.replace(other)
    with pytest.warns(RuntimeWarning, match="digest does not fit"):
        assert code_cache.read_with_digest(other) is None


def test_what_numba_keeps_is_not_unpickled_unless_it_is_ours(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (ran,)

    kept = _DigestedFile(tmp_path / "object.kept")
    assert kept.load("key") is None
    kept.save("key", [1, 2])
    assert kept.load("key") == [1, 2]
    assert kept.load("another key") is None
    kept.file.write_bytes(bytes(code_cache.DIGEST_BYTES) + pickle.dumps(Evil()))
    with pytest.warns(RuntimeWarning, match="digest does not fit"):
        assert kept.load("key") is None
    code_cache.write_with_digest(kept.file, pickle.dumps(Evil()))
    kept.file.chmod(0o666)
    safe_files._warned.clear()
    with pytest.warns(RuntimeWarning, match=r"can be written by others \(mode 0666\)"):
        assert kept.load("key") is None
    assert not ran.exists()


def test_an_error_of_a_conversion_is_raised():
    function = jit(lambda n: n + 1)
    assert function(41) == 42
    with pytest.raises(OverflowError):
        function(1 << 70)


def test_arrays_lie_as_machine_code_reads_them(monkeypatch):
    assert code_cache.has_expected_object_layout()
    monkeypatch.setitem(code_cache.ARRAY, "nd", code_cache.ARRAY["dims"])
    assert not code_cache.has_expected_object_layout.__wrapped__()


TOGETHER = """
import sys, time
import numpy as np
from fsdpx.ext.native import compile

build = compile.compile_to_machine_code

def slowly(dispatcher, wanted):
    print("built", flush=True)
    time.sleep(1.0)
    return build(dispatcher, wanted)

compile.compile_to_machine_code = slowly
sys.stdin.readline()
from fsdpx.core.array import kernels
print(float(kernels.relu(np, np.full(4096, 2.0, np.float32)).sum()))
"""


def test_what_several_processes_need_at_once_is_compiled_once(cache):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", TOGETHER], **pipes) for _ in range(2)]
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert [lines[-1] for lines in said] == ["8192.0"] * 2
    assert sum(lines.count("built") for lines in said) == 1
    assert not list(cache.glob("*.lock"))


def test_who_holds_a_lock_too_long_is_not_waited_for(cache, monkeypatch):
    function = jit(_along)
    x, y = _numbers("float32")
    wanted = (function.function, function.fastmath, ("float32 2 C", "float32 1 C", "float", "bool"))
    monkeypatch.setattr(code_cache, "LOCK_TIMEOUT_SECONDS", 0.05)
    with code_cache.holding_compilation_lock(*wanted):
        assert len(list(cache.glob("*.lock"))) == 1
        assert function(x, y, 2.0, False) == pytest.approx(2 * x.sum(dtype="float64"), rel=1e-4)
    with monkeypatch.context() as patch:  # a disk that cannot be written
        patch.setattr(code_cache.os, "open", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
        with code_cache.holding_compilation_lock(*wanted):
            assert not list(cache.glob("*.lock"))


LIMIT = 3


@intrinsic
def _half(typingctx, x):
    def code(context, builder, signature, arguments):
        return builder.fmul(arguments[0], ir.Constant(arguments[0].type, FACTOR))

    return x(x), code


def _named(x):
    raise NotImplementedError("for compiled code")


@overload_function(_named)
def _of_type(x):
    return (lambda x: x + LIMIT) if x == types.float64 else (lambda x: x)


@register_jitable
def _added(x):
    return x + LIMIT


@jit
def _inner(x):
    return _half(_added(x))


def _outer(step):
    def outer(x):
        return _inner(x) + step + _named(x)

    return jit(outer)


FACTOR = 0.5


def test_a_function_may_use_others_and_what_libraries_have():
    assert [_outer(1.0)(4.0), _outer(2.0)(4.0)] == [3.5 + 1 + 7, 3.5 + 2 + 7]


def test_code_is_of_all_that_a_function_reaches(monkeypatch):
    """Loops have constants and functions of other files compiled in: code that was kept must not outlive them."""

    def found(step=1.0):
        lazy_numba._describe_function_and_list_callees.cache_clear()
        return lazy_numba.hash_function(_outer(step).function)

    before, here = found(), sys.modules[__name__]
    assert (found(), found(2.0) == before) == (before, False)
    changed = {"LIMIT": 4, "FACTOR": 0.25, "_added": _named, "_inner": jit(_inner.function, fastmath=REORDER)}
    for name, value in changed.items():
        with monkeypatch.context() as patch:
            patch.setattr(here, name, value)
            assert found() != before, name
    assert found() == before
    monkeypatch.setattr(here, "LIMIT", object())  # of which nobody knows what it is in another process
    with pytest.raises(TypeError, match="compiled code uses <object"):
        found()
    lazy_numba._describe_function_and_list_callees.cache_clear()


def test_the_same_package_elsewhere_takes_the_same_code():
    """A second environment or clone on a machine compiles nothing, unless its sources differ."""
    code = _along.__code__

    def file(**other):
        function = FunctionType(code.replace(**other), globals(), "_along")
        return code_cache._get_code_path(function, False, ("float32 2 C",))

    here = file()
    assert file(co_filename="/elsewhere/kernels.py", co_firstlineno=1) == here
    assert file(co_consts=(*code.co_consts, 1)) != here
