"""Arrays that MPI cannot see are copied to the host, and back, once, when the transfer is complete."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from fsdpx.comm.communicator import DONE
from fsdpx.comm.staging import staged


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
    """A backend whose only verb writes twice what it reads."""

    def __init__(self, handle):
        self.handle = handle

    @staged(reads=(0,), writes=(1,))
    def double(self, send, recv, extra):
        assert type(send) in (np.ndarray, type(None))
        if recv is not None:
            assert type(recv) is np.ndarray
            recv[:] = 2 * send
        return self.handle

    @staged(reads=(0,), writes=(0,))
    def in_place(self, buf):
        buf *= 2
        return self.handle


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    namespace = importlib.import_module("fsdpx.array.namespace")
    monkeypatch.setattr(namespace, "to_host", lambda array: array.hidden.copy())
    monkeypatch.setattr(namespace, "from_host", lambda xp, array: DeviceArray(array))
    monkeypatch.setattr(namespace, "namespace_of", lambda array: None)


def test_results_come_back_when_the_transfer_is_complete():
    send, recv = DeviceArray([1, 2]), DeviceArray([0, 0])
    handle = Doubling(Later()).double(send, recv, 0)
    assert not handle.test()
    assert recv.hidden.tolist() == [0, 0]
    assert handle.test()
    assert recv.hidden.tolist() == [2, 4]
    recv.hidden[:] = 7
    handle.wait()
    assert recv.hidden.tolist() == [7, 7]


def test_in_place_none_and_host_arrays():
    buf = DeviceArray([1, 2])
    Doubling(DONE).in_place(buf).wait()
    assert buf.hidden.tolist() == [2, 4]
    assert Doubling(DONE).double(DeviceArray([1]), None, 0).test()
    host = np.zeros(2)
    assert Doubling(DONE).double(np.ones(2), host, 0) is DONE
    assert host.tolist() == [2, 2]
