"""The communicator that asks before each collective whether all ranks mean the same one."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from fsdpx.comm.communicator import Array, Communicator, Handle, ReduceOp
from fsdpx.comm.steps import progress_of, spin
from fsdpx.errors import DesyncError

__all__ = ["Guarded"]

_WIDTH = 256
_ENDINGS = 8
_TAG = 7


class Guarded:
    """Exchanges a fingerprint of each collective on a channel of its own, then passes the call on.

    A fingerprint is the verb, `what`, the dtype, the element count, the operation and the root, as far as
    every rank knows them. If fingerprints differ, every rank raises DesyncError with what each rank called.
    If a rank does not arrive within `timeout` seconds, the others raise DesyncError with its number. Sends
    and receives pass as they are. The exchange blocks: calls that overlap otherwise are one after the other
    here. 256 bytes to each peer and call.
    """

    def __init__(self, comm: Communicator, timeout: float = 10.0, channel: Communicator | None = None) -> None:
        self.comm, self.timeout = comm, timeout
        self.rank, self.size = comm.rank, comm.size
        self._channel = channel or comm.subgroup(range(comm.size))
        self.progress = progress_of(comm)
        self._calls = 0

    def __repr__(self) -> str:
        return f"Guarded({self.comm!r})"

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        self._agree("all_gather", what, recv, counts=_listed(counts))
        return self.comm.all_gather(send, recv, counts, what=what)

    def reduce_scatter(
        self,
        send: Array,
        recv: Array,
        op: ReduceOp = ReduceOp.SUM,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        self._agree("reduce_scatter", what, send, op=ReduceOp.of(op).name, counts=_listed(counts))
        return self.comm.reduce_scatter(send, recv, op, counts, what=what)

    def all_reduce(
        self, buf: Array, op: ReduceOp = ReduceOp.SUM, algorithm: str = "library", *, what: str = ""
    ) -> Handle:
        self._agree("all_reduce", what, buf, op=ReduceOp.of(op).name, algorithm=algorithm)
        return self.comm.all_reduce(buf, op, algorithm, what=what)

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        self._agree("broadcast", what, buf, root=root)
        return self.comm.broadcast(buf, root, what=what)

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        self._agree("reduce", what, send, op=ReduceOp.of(op).name, root=root)
        return self.comm.reduce(send, recv, op, root, what=what)

    def gather(
        self,
        send: Array,
        recv: Array | None,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        self._agree("gather", what, None, dtype=send.dtype, root=root)
        return self.comm.gather(send, recv, root, counts, what=what)

    def scatter(
        self,
        send: Array | None,
        recv: Array,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        self._agree("scatter", what, None, dtype=recv.dtype, root=root)
        return self.comm.scatter(send, recv, root, counts, what=what)

    def all_to_all(
        self,
        send: Array,
        recv: Array,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        self._agree("all_to_all", what, None, dtype=send.dtype)
        return self.comm.all_to_all(send, recv, send_counts, recv_counts, what=what)

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        return self.comm.send(buf, dest, tag, what=what)

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        return self.comm.recv(buf, source, tag, what=what)

    def barrier(self, *, what: str = "") -> Handle:
        self._agree("barrier", what, None)
        return self.comm.barrier(what=what)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        self._agree("split", "", None)
        part = self.comm.split(color, key)
        return None if part is None else Guarded(part, self.timeout)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        self._agree("subgroup", "", None)
        return Guarded(self.comm.subgroup(ranks), self.timeout)

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._agree("all_gather_object", "", None)
        return self.comm.all_gather_object(obj)

    def close(self) -> None:
        """Free the channel; the guarded communicator stays open for who made it."""
        self._channel.close()

    def abort(self, code: int = 1) -> None:
        self.comm.abort(code)

    def _agree(self, verb: str, what: str, array: Array | None, **terms: Any) -> None:
        """Return when every rank is about to call the same; DesyncError on all of them otherwise."""
        if self.size == 1:
            return
        if array is not None:
            terms = {"dtype": array.dtype, "elements": array.size} | terms
        call = verb + (f" of {what}" if what else "") + "".join(f", {key} {value}" for key, value in terms.items())
        calls = self._exchange(call)
        if any(other != calls[0] for other in calls):
            raise DesyncError(f"ranks called different collectives (call {self._calls}): {_grouped(calls)}")

    def _exchange(self, call: str) -> list[str]:
        """What every rank calls, by rank."""
        self._calls += 1
        mine = _encode(call)
        texts = np.zeros((self.size, _WIDTH), np.uint8)
        texts[self.rank] = mine
        others = [other for other in range(self.size) if other != self.rank]
        recvs = {other: self._channel.recv(texts[other], other, _TAG, what="fingerprint") for other in others}
        sends = [self._channel.send(mine, other, _TAG, what="fingerprint") for other in others]

        def all_here() -> bool:
            for other in [other for other, handle in recvs.items() if handle.test()]:
                del recvs[other]
            return not recvs

        if not spin(all_here, self.progress, self.timeout):
            here = [rank for rank in range(self.size) if rank not in recvs]
            raise DesyncError(
                f"waited {self.timeout:g} s: ranks {sorted(recvs)} did not arrive at {call} "
                f"(call {self._calls}), which ranks {here} called: they failed, ended or wait elsewhere"
            )
        for handle in sends:
            handle.wait()
        return [bytes(text).rstrip(b"\0").decode(errors="replace") for text in texts]


def _listed(counts: Sequence[int] | None) -> str:
    return "even" if counts is None else str(list(counts))


def _encode(call: str) -> np.ndarray:
    """`call` in a fixed number of bytes; a long one keeps its start, and a sum of the rest."""
    data = call.encode()
    if len(data) > _WIDTH:
        data = data[: _WIDTH - _ENDINGS - 3] + b"..." + blake2b(data, digest_size=_ENDINGS // 2).hexdigest().encode()
    text = np.zeros(_WIDTH, np.uint8)
    text[: len(data)] = np.frombuffer(data, np.uint8)
    return text


def _grouped(calls: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    return "; ".join(
        f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, who))}: {call}" for call, who in ranks.items()
    )
