"""Where arrays lie: the arena, the heap, and what is computed again."""

import ctypes
import gc
import mmap
import sys
import weakref

import numpy as np
import pytest
from layouts import lay
from programs import run_program

from fsdpx.core.array import kernels
from fsdpx.core.array.arena import ALIGN, BLOCK_BYTES, Arena, get_data_pointer
from fsdpx.core.array.namespace import parse_dtype


def test_kept_buffers_begin_on_cache_lines_in_one_block_and_do_not_overlap() -> None:
    arena = Arena(np)
    made = [arena.get_or_create_buffer(f"{n}", n, "float32") for n in (1, 16, 17, 0, 1000, 3)]
    assert [a.size for a in made] == [1, 16, 17, 0, 1000, 3]
    assert all(get_data_pointer(a) % ALIGN == 0 for a in made)
    assert get_data_pointer(made[-1]) - get_data_pointer(made[0]) < 5000
    for value, array in enumerate(made):
        assert not array.any()
        array[...] = value + 1
    assert all((array == value + 1).all() for value, array in enumerate(made))
    assert sum(buffer.nbytes for buffer in made) == 4 * 1037


def test_a_buffer_larger_than_a_block_has_its_own() -> None:
    arena = Arena(np)
    small, large = (arena.get_or_create_buffer(str(n), n, "float64") for n in (5, BLOCK_BYTES))
    assert (small.nbytes, large.nbytes) == (40, 8 * BLOCK_BYTES)
    assert get_data_pointer(large) % ALIGN == 0


def test_a_passing_buffer_gives_its_memory_back_alone() -> None:
    arena = Arena(np)
    arena.get_or_create_buffer("stays", 5, "float32")
    alive = weakref.ref(arena.get_or_create_buffer("goes", 5, "float32", temporary=True))
    assert arena.kept["goes"].base is None
    arena.drop_buffer("goes")
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(sys.platform != "linux", reason="where mincore tells which pages are in memory")
def test_what_is_not_written_takes_no_memory() -> None:
    for sizes in ((31,), (31, 20)):  # MiB: once freed, so much stays in the heap, and is taken from there
        freed = [np.ones(size << 20, np.uint8) for size in sizes]
        del freed
    made = Arena(np).get_or_create_buffer("a", BLOCK_BYTES, "uint8")
    made[0] = 1
    start = get_data_pointer(made) // mmap.PAGESIZE * mmap.PAGESIZE
    pages = np.zeros(BLOCK_BYTES // mmap.PAGESIZE, np.uint8)
    where = ctypes.c_void_p(start), ctypes.c_size_t(BLOCK_BYTES), ctypes.c_void_p(get_data_pointer(pages))
    assert ctypes.CDLL(None).mincore(*where) == 0
    assert 1 <= (pages & 1).sum() * mmap.PAGESIZE <= 2 << 20, "one page, or a huge one"


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"^unable to allocate 4611686018427387904 bytes for what a rank keeps: "):
        Arena(np).get_or_create_buffer("a", 1 << 62, "uint8")


def test_a_closed_arena_holds_no_block() -> None:
    arena = Arena(np)
    block = weakref.ref(arena.get_or_create_buffer("a", 5, "float32").base)
    arena.close()
    gc.collect()
    assert block() is None


PROGRAM = """
import resource
import numpy as np
from fsdpx.core.array.arena import make_malloc_keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert make_malloc_keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_arrays_come_back_without_page_faults() -> None:
    """In a process of its own: the setting cannot be undone."""
    (faults,) = run_program(PROGRAM)
    assert int(faults) < 100  # 40,960 pages of 4 KiB were written


@pytest.mark.parametrize("name", ["bf16", "float32", "float64"])
def test_addresses_of_arrays_with_gaps_and_of_others(name: str) -> None:
    x = np.zeros((3, 4), parse_dtype(name))
    still = x[1:]
    still.flags.writeable = False
    for array in (x, x[:, 1:], x.T, x[:0], still, np.broadcast_to(x[0], (2, 4))):
        assert get_data_pointer(array) == array.__array_interface__["data"][0]
    assert get_data_pointer(x[1:]) == get_data_pointer(x) + 4 * x.itemsize


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("rows", [7, 0])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_the_same_as_gelu_and_its_gradient(mode, dtype, rows, approximate, layout) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(0, 3, (rows, 37)).astype(dtype) for _ in range(2))
    changed = lay(dy, layout)
    y = kernels.recompute_gelu_and_backward(np, x, changed, approximate)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, kernels.gelu(np, x, approximate))
    np.testing.assert_array_equal(changed, kernels.gelu_backward(np, x, dy, approximate))
