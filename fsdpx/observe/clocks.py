"""How far the clocks of ranks are apart: rank 0 asks each other rank what time it is, and takes the quickest answer.

An answer that took t seconds says the other clock to t/2, whatever of the way was slow (Cristian 1989)."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from fsdpx.comm.communicator import Communicator

__all__ = ["Reading", "offset_at", "synchronise"]

ENOUGH, LONGEST = 10e-6, 0.1
"""Seconds: of error with which rank 0 is content, and after which it takes what it has."""
LEAST = 20
"""Questions, however good the first answers are."""
TAG = 7


class Reading(NamedTuple):
    """At `at` seconds of this rank's clock that was `offset` seconds ahead of rank 0's, give or take `error`."""

    at: float
    offset: float
    error: float


def synchronise(comm: Communicator) -> Reading:
    """This rank's clock, `time.perf_counter`, beside rank 0's. Collective; one rank after the other."""
    if comm.rank == 0:
        for rank in range(1, comm.size):
            offset, error = _ask(comm, rank)
            _send(comm, rank, offset, error)
        return Reading(perf_counter(), 0.0, 0.0)
    while True:
        offset, error = _receive(comm, 0)
        if error:
            return Reading(perf_counter(), offset, error)
        _send(comm, 0, perf_counter(), 0.0)


def _ask(comm: Communicator, rank: int) -> tuple[float, float]:
    """Offset and error of the quickest answer."""
    best, asked, start = (0.0, float("inf")), 0, perf_counter()
    while True:
        begin = perf_counter()
        _send(comm, rank, 0.0, 0.0)  # no error yet: a question
        theirs, _ = _receive(comm, rank)
        end = perf_counter()
        best, asked = min(best, (theirs - (begin + end) / 2, (end - begin) / 2), key=lambda one: one[1]), asked + 1
        if asked >= LEAST and (best[1] <= ENOUGH or end - start > LONGEST):
            return best


def _send(comm: Communicator, rank: int, *numbers: float) -> None:
    comm.send(np.array(numbers), rank, TAG, what="clock").wait()


def _receive(comm: Communicator, rank: int) -> tuple[float, float]:
    found = np.empty(2)
    comm.recv(found, rank, TAG, what="clock").wait()
    return float(found[0]), float(found[1])


def offset_at(readings: list[Reading], at: float) -> float:
    """The offset at some time of this rank's clock: on the straight line between the first reading and the last."""
    first, last = readings[0], readings[-1]
    if last.at <= first.at:
        return last.offset
    return first.offset + (last.offset - first.offset) * (at - first.at) / (last.at - first.at)
