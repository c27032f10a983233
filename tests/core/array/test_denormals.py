"""Inside the block denormals count as 0, outside they are numbers like others; each thread for itself."""

import platform
import threading

import numpy as np
import pytest

from fsdpx.core.array import parallel
from fsdpx.core.array.parallel import flush_denormals

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
TINY = np.full(100, 1e-40, np.float32)


def survive() -> bool:
    return bool((TINY * np.float32(0.5)).any())


def test_inside_only() -> None:
    assert survive()
    with flush_denormals():
        assert not survive()
        with flush_denormals():
            assert not survive()
        assert not survive()
    assert survive()


def test_after_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), flush_denormals():
        raise ZeroDivisionError
    assert survive()


def on_each_of_two_threads() -> set[bool]:
    """Whether denormals survive in the calling thread and in a worker, which meet so that each has one piece."""
    meeting, survived = threading.Barrier(2, timeout=60), dict[str, bool]()

    def look() -> None:
        meeting.wait()
        survived[threading.current_thread().name] = survive()

    parallel.set_threads(2)
    parallel.run_tasks(look, [(), ()])
    assert len(survived) == 2
    return set(survived.values())


def test_workers_do_as_the_calling_thread_does() -> None:
    """Whichever thread works on a piece, the bits are the same, in a step and outside of one."""
    assert on_each_of_two_threads() == {True}
    with flush_denormals():
        assert on_each_of_two_threads() == {False}
    assert on_each_of_two_threads() == {True}
