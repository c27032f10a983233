"""Arrays that MPI cannot see are copied to the host, and back, once, when the transfer is complete."""

from unittest.mock import Mock

import numpy as np
import pytest

from fsdpx.core.array.devices import CPU, Device
from fsdpx.core.comm import backend
from fsdpx.core.comm.backend import start_through_host
from fsdpx.core.comm.calls import COMPLETED, Call


class DeviceArray:
    """Numbers in a memory that only `to_host` and assignment can reach."""

    def __init__(self, values):
        self.hidden = np.array(values, np.float64)
        self.shape, self.dtype = self.hidden.shape, self.hidden.dtype

    def __setitem__(self, key, value):
        assert isinstance(value, DeviceArray)
        self.hidden[key] = value.hidden


def double(verb, *arrays, handle=COMPLETED):
    """By a backend that writes twice what it reads."""

    def start_call(call):
        assert all(type(array) in (np.ndarray, type(None)) for array in call.arrays)
        if call.arrays[-1] is not None:
            call.arrays[-1][:] = 2 * call.arrays[0]
        return handle

    return start_through_host(Call(verb, arrays), start_call)


class Far(Device):
    """The device of such arrays."""

    def to_host(self, array):
        return array.hidden.copy()

    def from_host(self, array):
        return DeviceArray(array)


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    far = Far()
    monkeypatch.setattr(backend, "get_device_of_array", lambda array: far if type(array) is DeviceArray else CPU)


def test_results_come_back_when_the_transfer_is_complete():
    send, recv = DeviceArray([1, 2]), DeviceArray([0, 0])
    later = Mock(test=Mock(side_effect=[False, True]))
    handle = double("reduce", send, recv, handle=later)
    assert not handle.test()
    assert recv.hidden.tolist() == [0, 0]
    assert handle.test()
    assert recv.hidden.tolist() == [2, 4]
    recv.hidden[:] = 7
    handle.wait()
    assert recv.hidden.tolist() == [7, 7]


def test_in_place_none_and_host_arrays():
    buf = DeviceArray([1, 2])
    double("all_reduce", buf).wait()
    assert buf.hidden.tolist() == [2, 4]
    assert double("reduce", DeviceArray([1]), None).test()
    host = np.zeros(2)
    assert double("reduce", np.ones(2), host) is COMPLETED
    assert host.tolist() == [2, 2]


def test_what_is_only_read_does_not_come_back_and_what_is_only_written_does_not_go():
    """And the call is the same but for its arrays."""
    send, recv = DeviceArray([1, 2]), DeviceArray([3, 4])
    seen = []

    def move(call):
        seen.append(call)
        return COMPLETED

    start_through_host(Call("send", (send,)), move)
    start_through_host(Call("recv", (recv,), root=3, what="w", tag=7), move).wait()
    (sent,), (received,) = (call.arrays for call in seen)
    assert sent.tolist() == [1, 2]
    sent[:] = 9
    assert send.hidden.tolist() == [1, 2]
    assert np.array_equal(recv.hidden, received)
    assert received is not recv.hidden
    assert (seen[1].verb, seen[1].root, seen[1].what, seen[1].tag) == ("recv", 3, "w", 7)
