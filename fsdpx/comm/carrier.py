"""The interface of backends that carry messages between processes, beside and between shared memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from fsdpx.comm.backend import Backend, staged
from fsdpx.comm.calls import Call, Handle, copy
from fsdpx.comm.relay import in_chunks

__all__ = ["TIMEOUT", "Carrier"]

TIMEOUT = 1800.0
"""Seconds a wait lasts before it raises CommTimeout."""


class Carrier(Backend):
    """library: what moves the bytes, in a word. timeout: seconds that a single wait may last."""

    library: ClassVar[str]
    timeout: float

    def wait_up_to(self, seconds: float) -> None:
        """From now on a single wait may last this many seconds."""
        self.timeout = seconds

    @property
    @abstractmethod
    def takes_threads(self) -> bool:
        """Whether other threads than the first of a rank may use it, one at a time."""

    @property
    @abstractmethod
    def native(self) -> frozenset[str]:
        """Verbs that the library does itself where it can add the numbers; all others are made of messages."""

    def message(self, call: Call) -> Handle:
        """Begin a "send" or a "recv"."""
        pairs = [(call.root, call.arrays[0])]
        return self.exchange(call, pairs, []) if call.verb == "send" else self.exchange(call, [], pairs)

    def move_from_gpu(self, call: Call, move: Callable[[Call], Handle]) -> Handle:
        """Begin a call of arrays of a GPU by a library that knows memory of the host: small ones go there whole, and
        `move` does the rest; large ones by messages in chunks, and what is added is added on the GPU."""
        if not in_chunks(call):
            return staged(call, move)
        return self.message(call) if call.verb in ("send", "recv") else super().move(call)

    def all_gather_at(self, call: Call, counts: Sequence[int], displs: Sequence[int]) -> Handle:
        """An all-gather of pieces that need not follow each other in `recv`, nor fill it; up to 2^31 elements."""
        send, recv = call.arrays
        parts = [recv[start : start + count] for start, count in zip(displs, counts, strict=True)]
        copy(parts[self.rank], send)
        others = [rank for rank in range(self.size) if rank != self.rank]
        message = call.on(call.arrays)
        message.tag = self._tag()
        own = parts[self.rank]
        return self.exchange(message, [(rank, own) for rank in others], [(rank, parts[rank]) for rank in others])
