"""A thread that lends a hand: tasks run one by one, and what they raise comes out where it is waited for."""

import threading

import pytest

from fsdpx.checkpoint.write import Worker


def test_tasks_run_beside_their_owner_in_order() -> None:
    done: list[int] = []
    go = threading.Event()
    with Worker("test") as hand:
        assert hand.free
        hand.begin(go.wait)
        assert not hand.free
        go.set()
        for n in range(3):
            hand.begin(lambda n=n: done.append(n))
        hand.end()
        assert hand.free
        assert done == [0, 1, 2]
        hand.end()  # nothing to wait for


@pytest.mark.parametrize("by", ["begin", "end"])
def test_errors_come_out_once_at_the_next_call(by: str) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with Worker("test") as hand:
        hand.begin(fail)
        with pytest.raises(OSError, match="No space left on device"):
            hand.begin(fail) if by == "begin" else hand.end()
        assert hand.free
        hand.end()


def test_leaving_waits_for_the_task() -> None:
    done: list[int] = []
    with Worker("test") as hand:
        hand.begin(lambda: done.append(1))
    assert done == [1]
