"""Memory that ranks share: compiled sums with the bits of NumPy, and windows of one-sided memory."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name from here on
import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_program
from threads import on_ranks

from fsdpx import spawn
from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.array.kernels import cast_float_to_dtype, store
from fsdpx.core.comm import Communicator, RankDied
from fsdpx.core.comm.node import atomics
from fsdpx.errors import CommTimeout, ConfigError, DesyncError

ADD = {
    ("float32", None): atomics.add32, ("float64", None): atomics.add64,
    ("float32", "bfloat16"): atomics.add_bfloat16, ("float32", "float16"): atomics.add_float16,
}  # fmt: skip


def _add(kind, sources, outs, divisor=1, stream=False):
    ranks = len(sources)
    head, unused = [ranks, 0, sources[0].size, divisor, stream, len(outs)], [0] * (atomics.ADDRESS_WORDS * ranks)
    addresses = [*map(get_data_pointer, sources), *unused, *map(get_data_pointer, outs)]
    row = np.array([*head, *[0] * ranks, *addresses], np.int64)
    ADD[kind](get_data_pointer(row))


def _wanted(sources, divisor, wire=None, written=1):
    with np.errstate(all="ignore"):
        sources = [source if wire is None else cast_float_to_dtype(np, source, np.dtype(wire)) for source in sources]
        total = sources[0].astype(sources[0].dtype if wire is None else np.float32)
        for source in sources[1:]:
            total += source.astype(total.dtype)
        if divisor != 1:
            total /= divisor
        if wire is not None and written > 1:
            total = cast_float_to_dtype(np, total, np.dtype(wire)).astype(np.float32)
    return total


@settings(derandomize=True, database=None, deadline=None, max_examples=examples(150))
@given(
    kind=st.sampled_from(list(ADD)),
    n=st.one_of(st.integers(0, 200), st.integers(500, 3000)),
    ranks=st.integers(1, 6),
    outs=st.integers(1, 3),
    shift=st.integers(0, 17),
    average=st.booleans(),
    stream=st.booleans(),
)
def test_sums_have_the_bits_of_numpy_and_nothing_else_is_written(kind, n, ranks, outs, shift, average, stream):
    """Also those of summands that are rounded on their way, as the casts of messages round them."""
    (dtype, wire), rng = kind, np.random.default_rng(n)
    sources = [rng.standard_normal(n + shift).astype(dtype)[shift:] for _ in range(ranks)]
    for source in sources:
        source[::7] = rng.choice(np.array([0.0, -0.0, np.inf, 1e-310 if dtype == "float64" else 1e-40], dtype))
        source[3::7] *= np.array(2.0, dtype) ** rng.integers(-40, 40, source[3::7].size)
    whole = [np.full(n + shift + 1, 7, dtype) for _ in range(1 if stream else outs)]
    divisor = ranks if average and wire is None else 1
    _add(kind, sources, [out[shift : shift + n] for out in whole], divisor, stream)
    want = _wanted(sources, divisor, wire, len(whole))
    for out in whole:
        assert out[shift : shift + n].tobytes() == want.tobytes()
        assert (out[:shift] == 7).all()
        assert out[-1] == 7


@pytest.mark.parametrize("kind", ADD)
def test_a_sum_may_take_the_place_of_what_is_added(kind):
    sources = [np.random.default_rng(r).standard_normal(1001).astype(kind[0]) for r in range(3)]
    want = _wanted(sources, 1, kind[1], 3)
    _add(kind, sources, sources)
    assert all(source.tobytes() == want.tobytes() for source in sources)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_every_kind_of_number_is_rounded_as_casts_round_it(wire):
    """All exponents with mantissas at and beside ties, NaN of all kinds among them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (upper[:, None] | lower).reshape(-1).view(np.float32)
    out, want = np.empty_like(x), np.empty_like(x)
    _add(("float32", wire), [x], [out])
    store(np, cast_float_to_dtype(np, x, np.dtype(wire)), want)
    np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))


def test_streamed_sums_are_stored_past_the_caches():
    from numba import njit

    code = njit("void(int64)")(atomics.add32.get_dispatcher().py_func).inspect_asm()
    if atomics.X86:
        assert all("movntps" in text and "sfence" in text for text in code.values())


def test_code_is_kept_on_disk():
    """Compiling takes a second, loading less than a millisecond."""
    code = """
import sys
import numpy as np
from fsdpx.core.comm.node import atomics
row = np.array([1, 0, 0, 1, 0, 0, *[0] * 9], np.int64)
for function in (atomics.add32, atomics.add64):
    function(row.__array_interface__["data"][0])
    print("numba" in sys.modules)
"""
    code_cache = pytest.importorskip("fsdpx.ext.native.code_cache")
    wanted = ["False", "False"] if code_cache.can_store_machine_code() else ["True", "True"]
    assert wanted in (run_program(code), run_program(code))  # the first run may compile


BYTES, TIMES = 256, 40


def counts(comm: Communicator) -> None:
    """All ranks add to numbers in all parts; parts differ in size."""
    window = comm.window(BYTES + 8 * comm.rank)
    assert window.own.size >= BYTES
    assert not window.own.any()
    comm.barrier().wait()
    for i in range(TIMES):
        other = (comm.rank + i) % comm.size
        with window.open_locked_part(other, 64, 80) as block:
            numbers = block.view(np.int64)
            before = numbers.copy()
            numbers[0] = before[0] + 1
            numbers[1] = before[1] + comm.rank
    window.write_word(2, 7 + comm.rank)
    comm.barrier().wait()
    total = np.zeros(2, np.int64)
    for rank in range(comm.size):
        with window.open_locked_part(rank, 64, 80, write=False) as block:
            total += block.view(np.int64)
        assert window.read_word(rank, 2) == 7 + rank
        assert not window.has_rank_died(rank)
    assert total.tolist() == [TIMES * comm.size, TIMES * sum(range(comm.size))]
    comm.barrier().wait()
    window.close()


def test_among_threads() -> None:
    spawn(counts, 3, delays=1)


@on_ranks(2, timeout=1)
def test_a_wait_ends_with_the_rank_and_what_it_waited_for(comm: Communicator) -> None:
    window = comm.window(64)
    with pytest.raises(CommTimeout, match=f"rank {comm.rank} waited 1 s for rank {1 - comm.rank}: a word"):
        window.wait_until_none_missing(lambda: [1 - comm.rank], "a word")
    comm.barrier().wait()


def test_a_thread_that_returned_is_named_at_once() -> None:
    def run(comm: Communicator) -> None:
        window = comm.window(64)
        if comm.rank == 0:
            window.wait_until_none_missing(lambda: [1] * (window.read_word(1, 0) != 1), "its first step")

    with pytest.raises(DesyncError, match=r"^rank 1 has returned while ranks \[0\] wait in a window for its first"):
        spawn(run, 2)


@on_ranks(2, survive=True)
def test_a_thread_that_died_is_gone(comm: Communicator) -> None:
    window = comm.window(64)
    comm.barrier().wait()
    if comm.rank == 1:
        with window.open_locked_part(0, 0, 8):
            raise RankDied
    window.wait_until_none_missing(lambda: [1] * (not window.has_rank_died(1)), "its death")
    with window.open_locked_part(0, 0, 8):
        assert not window.has_rank_died(0)


@pytest.mark.world
@pytest.mark.mpi
def test_among_processes(world: Communicator) -> None:
    counts(world)


@pytest.mark.jobs
def test_a_killed_process_frees_its_locks_and_is_gone() -> None:
    """Two processes without MPI, as survivors of a job are; the second is killed with the lock of the first."""
    code = """
        import sys
        from fsdpx.core.comm.node.shared_windows import MappedWindow

        class Pipe:  # as much of a communicator as the window needs
            rank, size = int(sys.argv[1]), 2

            def all_gather_value(self, obj):
                print(repr(obj), flush=True)
                return eval(sys.stdin.readline())

        window = MappedWindow(Pipe(), 64, 5.0)
        if Pipe.rank:
            with window.open_locked_part(0, 8, 16):
                window.write_word(0, 1)
                sys.stdin.read()
        window.wait_until_none_missing(lambda: [1] * (window.read_word(1, 0) != 1), "the lock")
        assert not window.has_rank_died(1)
        print("held", flush=True)
        window.wait_until_none_missing(lambda: [1] * (not window.has_rank_died(1)), "the death")
        with window.open_locked_part(0, 8, 16):
            print("free", flush=True)
        window.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "0"], **piped) as first, subprocess.Popen([*command, "1"], **piped) as second:
        for _ in range(4):  # collective calls
            said = f"[{first.stdout.readline().strip()}, {second.stdout.readline().strip()}]"
            for rank in (first, second):
                print(said, file=rank.stdin, flush=True)
        assert first.stdout.readline() == "held\n"
        time.sleep(0.2)  # the first waits for it
        os.kill(second.pid, signal.SIGKILL)
        assert first.stdout.readline() == "free\n"
        assert first.wait(20) == 0


@on_ranks(2)
def test_no_room_is_named_on_all_ranks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdpx.core.comm.node.shared_windows import MappedWindow

    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"bytes of shared memory for a window: .*: No space left on device; give"):
        MappedWindow(comm, 64, 1.0)


@pytest.mark.jobs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files without names are Linux's")
@pytest.mark.parametrize("way", ["each", "refused", "20"])
def test_ranks_killed_while_they_make_windows_leave_no_memory(way: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("window_kills.py")), way]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 12
