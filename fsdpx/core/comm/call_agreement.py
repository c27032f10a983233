"""Check, before data is transferred, that all ranks make the same functional API call, such as `fsdpx.all_reduce`.

If all ranks are on one host, each writes an eight-byte hash of its call to shared memory. Otherwise, an all-reduce
compares the hashes. If ranks make different calls, or pass different shapes, dtypes, operations or roots, all ranks
raise an error that lists the ranks and their calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from fsdpx.core.comm.calls import Array, GeneratorHandle, Handle, ReduceOp, spin_until
from fsdpx.core.comm.desync_check import make_desync_error
from fsdpx.core.comm.message_backend import MessageBackend
from fsdpx.core.comm.node.shared_windows import MAX_PAYLOAD_BYTES, CollectiveBoard
from fsdpx.errors import CommTimeout, DesyncError

__all__ = ["CallAgreement", "CallSignature", "make_signature"]

QUICK_POLLS = range(64)
"""Number of times that a wait polls the board (records in shared memory) before it also begins to advance other
transfers."""


class CallSignature(str):
    """The text that describes one rank's call, and a hash of this text.

    Attributes
    ----------
    digest : 8-byte hash of the text
    words : the hash as 64-bit words, as it is written to shared memory
    """

    digest: int
    words: memoryview


@lru_cache(maxsize=1024, typed=True)  # typed, because the roots 0, 0.0 and False must have different signatures
def make_signature(
    verb: str, dtype: Any = None, shape: Any = None, op: str = "", root: int | None = None
) -> CallSignature:
    """Return the signature of a call: its name and the arguments that must be equal on all ranks."""
    parts = {"dtype": dtype, "shape": shape if shape is None else list(shape), "op": op or None, "root": root}
    call_signature = CallSignature(
        verb + "".join(f", {name} {part}" for name, part in parts.items() if part is not None)
    )
    call_signature.digest = int.from_bytes(blake2b(call_signature.encode(), digest_size=8).digest(), "big") >> 1
    call_signature.words = np.array([call_signature.digest, 0, 0]).data
    return call_signature


class CallAgreement:
    """Compares the calls of all ranks before they start. The constructor is collective.

    Calls are compared one at a time, in the order in which they are issued, which is the same on all ranks. A record in
    shared memory is therefore overwritten only after all ranks have read it.

    Attributes
    ----------
    base : communicator whose calls are compared
    comm : second communicator of the same ranks as `base`, used for comparisons and for the data of asynchronous calls;
        it is closed together with this object
    single_host : whether all ranks run on one host with shared memory
    turn : index of the call that is compared next"""

    def __init__(self, base: MessageBackend, comm: MessageBackend, single_host: bool) -> None:
        self.base, self.comm, self.progress = base, comm, comm.progress
        self.board = CollectiveBoard(comm) if single_host else None
        self.others = [rank for rank in range(comm.size) if rank != comm.rank]
        self.turn = self.calls = 0
        self.under_way: dict[int, GeneratorHandle] = {}  # handles of asynchronous calls, by call number

    def agree_on_call(self, call: CallSignature, payload: Array = None) -> list[Array] | None:
        """Wait until all ranks have reached this call. Raise DesyncError on all ranks if their calls differ.
        Collective.

        If all ranks are on one host, a `payload` (contiguous host array with the data of the call) of at most
        `MAX_PAYLOAD_BYTES` bytes is exchanged at the same time. In this case, return the payloads of all ranks in rank
        order; they are valid until the next call. Otherwise return None."""
        if self.turn != self.calls:
            EarlierCallsStage(self, self.calls, call).wait()
        number, board = self._take_next_number(), self.board
        few = board is not None and payload is not None and payload.nbytes <= MAX_PAYLOAD_BYTES
        if board is not None and few:
            board.view_payload(board.rank, number + 1)[: payload.nbytes] = payload.reshape(-1).view(np.uint8)
        if board is None or not self._agree_within_few_polls(number, call, board):
            stage = self._start_comparison(number, call)
            stage.wait()
            stage.test()
        self.allow_next_comparison()
        if board is None or not few:
            return None
        return [
            board.view_payload(rank, number + 1)[: payload.nbytes].view(payload.dtype) for rank in range(board.size)
        ]

    def allow_next_comparison(self) -> None:
        """Allow the comparison of the next call to begin."""
        self.under_way.pop(self.turn, None)
        self.turn += 1

    def _agree_within_few_polls(self, number: int, call: CallSignature, board: CollectiveBoard) -> bool:
        """Post this rank's call, and return whether all ranks post the same call within a few polls. Try this method
        before creating a handle, because it is faster. It usually returns True, and then no handle is needed."""
        board.post_record(number + 1, call.words)
        for other in self.others:
            if not any(board.has_posted(other, number + 1) for _ in QUICK_POLLS):
                return False
            if board.read_words(other, number + 1, 1)[0] != call.digest:
                return False
        return True

    def start_after_agreement(self, call: CallSignature, begin: Callable[[], Handle]) -> Handle:
        """Return a handle immediately, without waiting. When all ranks have reached this call, `begin` is called to
        start the transfer. The handle is complete when that transfer is complete."""
        number = self._take_next_number()

        def issue_in_turn() -> Iterator[Handle]:
            yield EarlierCallsStage(self, number, call)
            yield self._start_comparison(number, call)
            try:
                begun = begin()
            finally:
                self.allow_next_comparison()
            yield begun

        handle = GeneratorHandle(issue_in_turn(), self.progress)
        if self.turn <= number:
            self.under_way[number] = handle
        return handle

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        self.comm.close()

    def gather_desync_error(self, call: CallSignature) -> DesyncError:
        """Return an error that lists the calls of all ranks. Collective: all ranks call this method, because each of
        them notices that the calls differ."""
        return make_desync_error(self.turn + 1, self.comm.all_gather_value(str(call)))

    def _take_next_number(self) -> int:
        self.calls += 1
        return self.calls - 1

    def _start_comparison(self, number: int, call: CallSignature) -> AgreementStage:
        if self.board:
            return AgreementInSharedMemory(self, number, call, self.board)
        return AgreementByAllReduce(self, number, call)


class AgreementStage(ABC):
    """Base class of handles for the two stages of checking that all ranks make the same call: waiting for earlier
    calls, and comparing this one.

    `wait` first polls only this handle. After a number of polls, it also advances other transfers between polls."""

    def __init__(self, agreement: CallAgreement, number: int, call: CallSignature) -> None:
        self.agreement, self.number, self.call = agreement, number, call
        self.asking = False
        self.error: DesyncError | None = None

    @abstractmethod
    def poll_agreement(self) -> bool | None:
        """Return whether all ranks make the same call, or None while some ranks have not arrived yet."""

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        # avoid endless recursion: creating the error waits for other ranks, and that wait calls this method again
        alike = None if self.asking else self.poll_agreement()
        if alike is False:
            self.asking = True
            self.error = self.agreement.gather_desync_error(self.call)
            self.agreement.allow_next_comparison()
            raise self.error
        return alike is True

    def is_complete_or_failed(self) -> bool:
        """Return whether the comparison is complete or has failed, so that waiting can end. If it has failed, the next
        call to `test` raises the error."""
        try:
            return self.test()
        except DesyncError:
            return True

    def wait(self) -> None:
        for _ in QUICK_POLLS:
            if self.is_complete_or_failed():
                return
        if not spin_until(self.is_complete_or_failed, self.agreement.progress, self.agreement.base.timeout):
            raise CommTimeout(
                f"{self} is not complete after {self.agreement.base.timeout:g} s: {self.describe_missing_ranks()}"
            )

    def describe_missing_ranks(self) -> str:
        """Return a phrase for error messages. It names the ranks that have not arrived, if they are known."""
        return "a peer did not call or has ended"

    def __str__(self) -> str:
        return f"{self.call} on rank {self.agreement.comm.rank} of {self.agreement.comm.size}"


class EarlierCallsStage(AgreementStage):
    """A handle that is complete when all earlier calls of this rank have been compared."""

    def poll_agreement(self) -> bool | None:
        agreement, seen = self.agreement, -1
        # advance earlier calls here, because there may be no other code that waits for them
        while seen < agreement.turn < self.number:
            seen = agreement.turn
            if (first := agreement.under_way.get(seen)) is not None:
                with suppress(DesyncError):  # the error is raised again when the caller waits for call number `seen`
                    first.test()
        return True if agreement.turn >= self.number else None


class AgreementByAllReduce(AgreementStage):
    """A handle that compares calls with an all-reduce. The calls are equal if the maximum of their hashes equals the
    minimum."""

    def __init__(self, agreement: CallAgreement, number: int, call: CallSignature) -> None:
        super().__init__(agreement, number, call)
        self.ends = np.array([call.digest, -call.digest])
        self.sum = agreement.comm.all_reduce(self.ends, ReduceOp.MAX, what="calls")

    def poll_agreement(self) -> bool | None:
        return bool(self.ends[0] == -self.ends[1]) if self.sum.test() else None


class AgreementInSharedMemory(AgreementStage):
    """A handle that compares the hashes that ranks have written to shared memory."""

    def __init__(self, agreement: CallAgreement, number: int, call: CallSignature, board: CollectiveBoard) -> None:
        super().__init__(agreement, number + 1, call)  # numbers on the board start at 1, because 0 means "no record"
        self.board, self.same = board, True
        self.others = list(agreement.others)
        board.post_record(number + 1, call.words)

    def poll_agreement(self) -> bool | None:
        others, board, number = self.others, self.board, self.number
        while others and board.has_posted(others[-1], number):
            self.same &= board.read_words(others.pop(), number, 1)[0] == self.call.digest
        return None if others else self.same

    def describe_missing_ranks(self) -> str:
        return f"ranks {sorted(self.others)} did not call it or have ended"
