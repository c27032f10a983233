"""Memory that a step frees stays with the process for the next step, which then has no page faults."""

import ctypes
import sys

__all__ = ["give_back", "keep_pages"]

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt, see <malloc.h>
NEVER = -1


def keep_pages() -> bool:
    """Ask the C library to keep freed memory, instead of giving arrays of more than 128 KiB back to the system at once.

    A new page costs a fault and is zeroed by the kernel, at 4 KiB about as long as filling it. In return the process
    keeps its peak of memory. Linux with glibc; elsewhere nothing is changed and the result is False."""
    library = _glibc()
    return library is not None and bool(library.mallopt(MMAP_MAX, 0)) and bool(library.mallopt(TRIM_THRESHOLD, NEVER))


def give_back() -> None:
    """Give what is free now back to the system, once: what was alive before training is not what a step needs."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None  # musl knows mallopt by name only
