"""Predictions that start without waiting for all ranks, for use inside a solver. As long as batches keep their shapes
and dtypes, ranks do not compare them. An error on one rank still reaches all ranks.

Each rank counts its calls of `predict` in a window (shared memory) that other ranks can read at any time. A rank whose
batch is invalid, or differs in shape or dtype from the previous one, waits until all other ranks have begun the same
call. If the batches of all ranks differ from the previous ones, the ranks compare them as in the first call. If the
batches of only some ranks differ, the lowest of these ranks writes an error into the windows of all ranks, together
with the number of calls that have begun. Each rank then runs the calls that it has missed on a batch of zeros, so that
no message remains unreceived and no rank waits for another. Some ranks learn of the error one call later than others.
Therefore, each rank raises the error in all its calls up to the last call in which any rank learns of the error. After
that call, all ranks that continue are again at the same call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fsdpx import errors
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommTimeout, ConfigError, FsdpxError

__all__ = ["UncoordinatedPrediction"]

CALL, STOP, READY, BEGUN, FAILS = range(5)
"""Indices of the 64-bit words in a rank's part of the window (shared memory). CALL: index and state of the rank's
current call. An epoch is a series of calls that ends with an error. STOP: the epoch in which the rank must stop. READY:
the last epoch for which an error has been written into the window. BEGUN: the last call of that epoch that any rank has
begun. FAILS: the last call in which ranks raise the error."""
STARTED, WAITING, RETURNED = range(3)
"""States of a rank's call: the rank runs the call, waits for the other ranks to begin it, or has returned from it."""
HEAD, TEXT = 64, 1024  # sizes in bytes
WINDOW_BYTES = HEAD + 2 * TEXT
OWN, ERROR = HEAD, HEAD + TEXT
"""Byte offsets of two texts in a rank's part of the window. OWN: the description of the rank's batch, or its error,
written only if the batch is invalid or differs from the previous one. ERROR: the error that the rank has to raise."""
CALLS = 1 << 32
"""Maximum number of calls of `predict` in an epoch. An epoch is a series of calls that ends with an error; the next
epoch begins once the ranks have agreed on a batch."""


class UncoordinatedPrediction:
    """Lets each rank start `predict` without waiting for other ranks, as long as batches keep their shapes and dtypes.

    Parameters
    ----------
    comm : communicator of the ranks that each hold a part of the field
    run_on_zeros : function that runs a prediction on zeros, given the shapes and dtypes of the inputs
    """

    def __init__(self, comm: Communicator, run_on_zeros: Callable[[tuple[Any, ...]], None]) -> None:
        self._comm, self._run_on_zeros = comm, run_on_zeros
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._window: Window | None = None
        self._has_windows = comm.has_peers
        self._agreed_kind: Any = None
        self._inputs: tuple[Any, ...] = ()
        self._epoch = self._count = 0
        # errors that the next calls of `predict` on this rank raise, one for each call
        self._failed: list[FsdpxError] = []

    def record_agreed_batch(self, batch_kind: tuple[str, int], inputs: tuple[Any, ...]) -> None:
        """Store the description of the batch that all ranks have just compared. Collective. On a backend without
        one-sided windows, no description is stored, because ranks then compare their batches in every call.

        Parameters
        ----------
        batch_kind : description of the batch, and its number of samples
        inputs : shapes and dtypes of this rank's inputs
        """
        if self._window is None and self._has_windows:
            try:
                self._window = self._comm.window(WINDOW_BYTES)
            except ConfigError:
                self._has_windows = False
        if self._window is not None and self._agreed_kind is None:
            self._epoch, self._count = self._epoch + 1, 0
            with self._window.open_locked_part(self._comm.rank, 0, HEAD) as head:
                head.view(np.int64)[CALL] = self._encode_call_state(STARTED)
        self._agreed_kind, self._inputs = batch_kind if self._has_windows else None, inputs

    def can_start_without_agreement(self, batch_kind: tuple[str, int], error: FsdpxError | None) -> bool:
        """Return True if this rank may start its prediction immediately, and False if all ranks must first compare
        their batches. In two cases, raise an error, which is the same on all ranks: another rank has reported an error,
        or only some ranks have a batch that differs from the previous one."""
        if self._failed:
            raise self._failed.pop()
        if self._agreed_kind is None or self._window is None:
            return False
        same, text = error is None and batch_kind == self._agreed_kind, b""
        if not same:
            kind, said = ("", _describe_batch(batch_kind)) if error is None else (type(error).__name__, str(error))
            text = _pack_error(kind, said)
        with self._window.open_locked_part(self._comm.rank, 0, HEAD if same else OWN + TEXT) as part:
            words = part[:HEAD].view(np.int64)
            stopped = words[STOP] == self._epoch
            if not stopped:
                self._count += 1
                _write_text(part, OWN, text)
                words[CALL] = self._encode_call_state(STARTED if same else WAITING)
        if stopped:
            self._count += 1
            raise self._run_missed_calls_and_get_error(1)
        try:
            return same or self._require_new_batch_on_all_ranks(self._window)
        except CommTimeout as timeout:
            raise error or timeout from timeout

    def mark_call_returned_or_raise_peer_error(self) -> None:
        """Mark this rank's call as returned. If another rank has reported an error in the meantime, raise it."""
        if self._agreed_kind is None or self._window is None:
            return
        with self._window.open_locked_part(self._comm.rank, 0, HEAD) as head:
            words = head.view(np.int64)
            stopped = words[STOP] == self._epoch
            if not stopped:
                words[CALL] = self._encode_call_state(RETURNED)
        if stopped:
            raise self._run_missed_calls_and_get_error(0)

    def take_error_from_other_rank(self) -> FsdpxError | None:
        """Return the error that another rank has reported since this rank's last `predict`; None if there is none.
        Calls other than `predict` use this method. If there is an error, first run the predictions that this rank has
        missed, so that other ranks do not wait for this rank."""
        self._failed.clear()
        window = self._window
        if self._agreed_kind is None or window is None or window.read_word(self._comm.rank, STOP) != self._epoch:
            return None
        error = self._run_missed_calls_and_get_error(0)
        self._failed.clear()
        return error

    def close(self) -> None:
        """Free the window (shared memory). Collective."""
        if self._window is not None:
            self._window.close()
        self._window = self._agreed_kind = None

    def _encode_call_state(self, state: int) -> int:
        """Encode the state of this rank's current call as one integer. The integers are ordered by epoch (series of
        calls that ends with an error), then by the index of the call in the epoch, then by `state` (STARTED, WAITING or
        RETURNED)."""
        return 4 * (self._epoch * CALLS + self._count) + state

    def _require_new_batch_on_all_ranks(self, window: Window) -> bool:
        """Wait until the other ranks have begun this call. If the batch has changed on every rank, return False,
        because the ranks must then compare their batches. Otherwise, raise an error, which is the same on all ranks."""
        me, own_call = self._comm.rank, self._encode_call_state(WAITING)

        def find_late_ranks() -> list[int]:
            if window.read_word(me, STOP) == self._epoch:
                return []
            return [rank for rank in self._others if window.read_word(rank, CALL) < self._encode_call_state(STARTED)]

        window.poll_until_none_missing(find_late_ranks, "predict with another batch than before")
        asking = [me, *(rank for rank in self._others if window.read_word(rank, CALL) == own_call)]
        if window.read_word(me, STOP) != self._epoch:
            if len(asking) == self._comm.size:
                return False
            if me == min(asking):
                self._write_error_to_all_ranks(window, sorted(asking))
        raise self._run_missed_calls_and_get_error(1)

    def _write_error_to_all_ranks(self, window: Window, differing: Sequence[int]) -> None:
        """Write an error into the window (shared memory) of every rank, which makes all ranks stop. The error is about
        the ranks in `differing`, whose batches differ from their previous batches."""
        begun = fails = self._count
        for rank in self._others:
            with window.open_locked_part(rank, 0, HEAD) as head:
                words = head.view(np.int64)
                words[STOP] = self._epoch
                call, state = divmod(int(words[CALL]), 4)
                call -= self._epoch * CALLS
                # a rank that has returned from its call sees the error only in its next call
                begun, fails = max(begun, call), max(fails, call + (state == RETURNED))
        texts = {}
        for rank in differing:
            with window.open_locked_part(rank, OWN, OWN + TEXT, write=False) as part:
                texts[rank] = json.loads(_read_text(part, 0))
        text = _pack_error(*_choose_common_error(texts, _describe_batch(self._agreed_kind)))
        for rank in range(self._comm.size):
            with window.open_locked_part(rank, 0, WINDOW_BYTES) as part:
                _write_text(part, ERROR, text)
                words = part[:HEAD].view(np.int64)
                words[BEGUN], words[FAILS], words[STOP], words[READY] = begun, fails, self._epoch, self._epoch

    def _run_missed_calls_and_get_error(self, begun: int) -> FsdpxError:
        """Run the predictions that this rank has missed, with zeros as inputs, so that no other rank waits for this
        rank. Then return the error that all ranks raise. `begun` is 1 if this rank has begun a call but has not run its
        prediction; otherwise, it is 0."""
        window, me = self._window, self._comm.rank
        assert window is not None
        window.poll_until_none_missing(
            lambda: [] if window.read_word(me, READY) == self._epoch else self._others, "the error of predict"
        )
        with window.open_locked_part(me, ERROR, WINDOW_BYTES, write=False) as part:
            kind, text = json.loads(_read_text(part, 0))
        for _ in range(window.read_word(me, BEGUN) - self._count + begun):
            self._run_on_zeros(self._inputs)
        self._agreed_kind = None
        self._failed = [getattr(errors, kind)(text) for _ in range(1 + window.read_word(me, FAILS) - self._count)]
        return self._failed.pop()


def _describe_batch(batch_kind: tuple[str, int]) -> str:
    """Return a phrase that states a batch's number of samples, followed by the description of the samples."""
    features, rows = batch_kind
    return f"{rows} sample{'s' * (rows != 1)} of {features}"


def _choose_common_error(texts: dict[int, list[str]], agreed: str) -> tuple[str, str]:
    """Return the class name and the text of the error that all ranks raise.

    `texts` has an entry for each rank whose batch differs from that rank's previous batch. For an invalid batch, the
    entry holds the class name and the text of the error. For a valid batch, the class name is empty, and the text
    describes the batch. `agreed` describes the batch of the other ranks."""
    for rank, (kind, text) in texts.items():
        if kind:
            return kind, f"rank {rank}: {text}"
    odd = "; ".join(f"rank {rank} brings {text}" for rank, (_, text) in texts.items())
    return "DataError", f"predict: {odd}, and the other ranks bring {agreed}, as before: all bring the same samples"


def _pack_error(kind: str, text: str) -> bytes:
    """Encode the class name and text of an error as JSON bytes that fit into the window (shared memory); truncate the
    text if it is too long."""
    while len(data := json.dumps([kind, text]).encode()) > TEXT - 8:
        text = text[: len(text) - max(1, (len(data) - TEXT + 8) // 6)]
    return data


def _write_text(part: Any, offset: int, text: bytes) -> None:
    if text:
        part[offset : offset + 8].view(np.int64)[0] = len(text)
        part[offset + 8 : offset + 8 + len(text)] = np.frombuffer(text, np.uint8)


def _read_text(part: Any, offset: int) -> bytes:
    return bytes(part[offset + 8 : offset + 8 + int(part[offset : offset + 8].view(np.int64)[0])])
