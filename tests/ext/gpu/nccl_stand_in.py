"""A stand-in for CuPy's NCCL: calls of thread ranks by address, as NCCL has them, on memory of the host. A call returns
when it is done, so what is shown is that calls match and what they move, not how they wait."""

import ctypes
import itertools
import threading
import types
from collections import defaultdict
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["add_to"]

KINDS = {1: np.uint8, 2: np.int32, 4: np.int64, 5: np.uint64, 6: np.float16, 7: np.float32, 8: np.float64,
         9: ml_dtypes.bfloat16}  # fmt: skip
OPERATIONS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}
SECONDS = 20.0
_names = itertools.count()
_worlds: dict[bytes, Any] = {}
_grouped = threading.local()


class NcclError(RuntimeError):
    pass


class _World:
    """What the ranks of one communicator have in common. given: by number of the collective, then rank."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.given: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.messages: dict[Any, Any] = {}

    def wait(self, ready: Any) -> None:
        with self.condition:
            assert self.condition.wait_for(ready, SECONDS), "the other ranks made no such call of NCCL"


class NcclCommunicator:
    def __init__(self, size: int, name: bytes, rank: int) -> None:
        assert isinstance(name, bytes)
        assert len(name) == 128
        self.size, self.rank, self.error = size, rank, ""
        self.world = _worlds.setdefault(name, _World())
        self.calls = 0
        self.messages: dict[tuple[int, int], int] = defaultdict(int)

    def allReduce(self, send: int, recv: int, count: int, kind: int, op: int, stream: int) -> None:
        arrays = self._meet(("allReduce", count, kind, op), _read(send, count, kind), stream)
        _write(recv, _reduced(arrays, op), kind)

    def reduceScatter(self, send: int, recv: int, count: int, kind: int, op: int, stream: int) -> None:
        whole = _read(send, count * self.size, kind)
        total = _reduced(self._meet(("reduceScatter", count, kind, op), whole, stream), op)
        assert recv == send + self.rank * count * total.itemsize or recv not in range(send, send + total.nbytes)
        _write(recv, total[self.rank * count :][:count], kind)

    def allGather(self, send: int, recv: int, count: int, kind: int, stream: int) -> None:
        _write(recv, np.concatenate(self._meet(("allGather", count, kind), _read(send, count, kind), stream)), kind)

    def broadcast(self, send: int, recv: int, count: int, kind: int, root: int, stream: int) -> None:
        arrays = self._meet(("broadcast", count, kind, root), _read(send, count, kind), stream)
        _write(recv, arrays[root], kind)

    def reduce(self, send: int, recv: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        arrays = self._meet(("reduce", count, kind, op, root), _read(send, count, kind), stream)
        if self.rank == root:
            _write(recv, _reduced(arrays, op), kind)

    def send(self, buf: int, count: int, kind: int, peer: int, stream: int) -> None:
        key, world = self._next_message(self.rank, peer), self.world

        def put() -> None:
            with world.condition:
                world.messages[key] = (count, kind, _read(buf, count, kind))
                world.condition.notify_all()

        _grouped.sends.append(put)

    def recv(self, buf: int, count: int, kind: int, peer: int, stream: int) -> None:
        key, world = self._next_message(peer, self.rank), self.world

        def take() -> None:
            world.wait(lambda: key in world.messages)
            *found, values = world.messages.pop(key)
            assert found == [count, kind], "both sides say the same count and type"
            _write(buf, values, kind)

        _grouped.recvs.append(take)

    def check_async_error(self) -> None:
        if self.error:
            raise NcclError(self.error)

    def abort(self) -> None:
        self.error = "aborted"

    destroy = abort

    def _next_message(self, sender: int, receiver: int) -> tuple[int, int, int]:
        """Only in a group, at whose end all sends are made, and then all receives."""
        assert getattr(_grouped, "open", False), "a message outside a group would wait for its other side"
        assert sender != receiver
        self.messages[sender, receiver] += 1
        return sender, receiver, self.messages[sender, receiver]

    def _meet(self, terms: Any, array: np.ndarray, stream: int) -> list[np.ndarray]:
        """What all ranks gave to this collective, the next of each of them."""
        assert stream != 0, "on NCCL's stream"
        world, number = self.world, self.calls
        self.calls += 1
        with world.condition:
            world.given[number][self.rank] = (terms, array)
            world.condition.notify_all()
        world.wait(lambda: len(world.given[number]) == self.size)
        given = [world.given[number][rank] for rank in range(self.size)]
        assert len({terms for terms, _ in given}) == 1, f"ranks make different calls of NCCL: {given}"
        return [array for _, array in given]


def _read(at: int, count: int, kind: int) -> np.ndarray:
    return _memory(at, count, kind).copy()


def _write(at: int, values: np.ndarray, kind: int) -> None:
    _memory(at, values.size, kind)[...] = values


def _memory(at: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(KINDS[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(at), dtype)


def _reduced(arrays: list[np.ndarray], op: int) -> np.ndarray:
    assert arrays[0].dtype.itemsize != 2, "16 bits are added by us"
    return reduce(OPERATIONS[op], arrays)


def _group_start() -> None:
    _grouped.open, _grouped.sends, _grouped.recvs = True, [], []


def _group_end() -> None:
    _grouped.open = False
    for each in (*_grouped.sends, *_grouped.recvs):
        each()


def add_to(cupy: Any) -> None:
    """The module `cupy.cuda.nccl`, of a stand-in for CuPy."""
    made = types.ModuleType("cupy.cuda.nccl")
    vars(made).update(
        available=True, NcclError=NcclError, NcclCommunicator=NcclCommunicator, groupStart=_group_start,
        groupEnd=_group_end, get_unique_id=lambda: str(next(_names)).encode().ljust(128, b"\0"),
    )  # fmt: skip
    cupy.cuda.nccl = made
