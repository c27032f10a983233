"""Arrays that MPI cannot see are copied to the host, and back, once, when the transfer is complete."""

from __future__ import annotations

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


class Later:
    """Completes on the second test."""

    def __init__(self):
        self.tests = 0

    def test(self):
        self.tests += 1
        return self.tests > 1

    def wait(self):
        self.tests += 2


class Doubling:
    """A backend that writes twice what it reads."""

    def __init__(self, handle):
        self.handle = handle

    def double(self, send, recv):
        return start_through_host(Call("reduce", (send, recv)), self.start_call)

    def in_place(self, buf):
        return start_through_host(Call("all_reduce", (buf,)), self.start_call)

    def start_call(self, call):
        assert all(type(array) in (np.ndarray, type(None)) for array in call.arrays)
        if call.arrays[-1] is not None:
            call.arrays[-1][:] = 2 * call.arrays[0]
        return self.handle


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
    handle = Doubling(Later()).double(send, recv)
    assert not handle.test()
    assert recv.hidden.tolist() == [0, 0]
    assert handle.test()
    assert recv.hidden.tolist() == [2, 4]
    recv.hidden[:] = 7
    handle.wait()
    assert recv.hidden.tolist() == [7, 7]


def test_in_place_none_and_host_arrays():
    buf = DeviceArray([1, 2])
    Doubling(COMPLETED).in_place(buf).wait()
    assert buf.hidden.tolist() == [2, 4]
    assert Doubling(COMPLETED).double(DeviceArray([1]), None).test()
    host = np.zeros(2)
    assert Doubling(COMPLETED).double(np.ones(2), host) is COMPLETED
    assert host.tolist() == [2, 2]


def test_what_is_only_read_does_not_come_back_and_what_is_only_written_does_not_go():
    send, recv = DeviceArray([1, 2]), DeviceArray([3, 4])
    seen = []

    def move(call):
        seen.extend(call.arrays)
        return COMPLETED

    start_through_host(Call("send", (send,)), move)
    start_through_host(Call("recv", (recv,)), move).wait()
    assert seen[0].tolist() == [1, 2]
    seen[0][:] = 9
    assert send.hidden.tolist() == [1, 2]
    assert np.array_equal(recv.hidden, seen[1])
    assert seen[1] is not recv.hidden


def test_the_call_is_the_same_but_for_its_arrays():
    found = []

    def move(call):
        found.append(call)
        return COMPLETED

    start_through_host(Call("recv", (DeviceArray([0]),), root=3, what="w", tag=7), move)
    assert [(call.verb, call.root, call.what, call.tag) for call in found] == [("recv", 3, "w", 7)]
