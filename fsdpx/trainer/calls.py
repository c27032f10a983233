"""How every call of a trainer begins: one exchange in which the ranks tell each other which call it is."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fsdpx.comm.communicator import Communicator, ReduceOp
from fsdpx.comm.guarded import compare, grouped
from fsdpx.errors import DesyncError, FsdpxError

__all__ = ["CALL", "CallRecord", "begin", "call_records", "different", "exchange", "largest", "number"]

WIDTH, CALL = 4, 2
"""Numbers of 8 bytes that each rank sends, and which of them identifies its call; the others are the call's own."""
OWN = [column for column in range(WIDTH) if column != CALL]
OWN_WIDTH = len(OWN)


class CallRecord(NamedTuple):
    """A rank's call, its arguments, and what is wrong with them, for errors that all ranks raise alike."""

    call: str
    features: str = ""
    kind: type[FsdpxError] | None = None
    text: str = ""


def exchange(comm: Communicator, row: Sequence[int], what: str) -> np.ndarray:
    """The numbers of every rank, by rank: one all-gather of 32 bytes, the same for every call."""
    table = np.zeros((comm.size, WIDTH), np.int64)
    table[comm.rank] = row
    if comm.size > 1:
        flat = table.reshape(-1)
        comm.all_gather(flat[WIDTH * comm.rank : WIDTH * (comm.rank + 1)], flat, what=what).wait()
    return table


def begin(comm: Communicator, call: str, values: Mapping[str, str] | None = None) -> None:
    """Return when all ranks have come to `call`; DesyncError on all of them if some call something else, ConfigError if
    some have other `values`."""
    own = 0 if values is None else number(str(sorted(values.items())))
    table = _checked(comm, call, [own] * OWN_WIDTH)
    if values is not None and (table[:, 0] != own).any():
        compare(comm, values)


def largest(comm: Communicator, call: str, values: np.ndarray) -> np.ndarray:
    """Begin a call as `begin` does, and return the largest of each of the values, of 8 bytes, over all ranks: in one
    exchange if there are few."""
    if values.size > OWN_WIDTH:
        begin(comm, call)
        found = np.array(values)
        comm.all_reduce(found, ReduceOp.MAX, what=call).wait()
        return found
    row = np.zeros(OWN_WIDTH, values.dtype)
    row[: values.size] = values
    table = _checked(comm, call, row.view(np.int64).tolist())
    return np.ascontiguousarray(table[:, OWN]).view(values.dtype)[:, : values.size].max(axis=0)


def _checked(comm: Communicator, call: str, own: Sequence[int]) -> np.ndarray:
    table = exchange(comm, [*own[:CALL], number(call), *own[CALL:]], call)
    if (table[:, CALL] != table[0, CALL]).any():
        call_records(comm, CallRecord(call))
    return table


def call_records(comm: Communicator, mine: CallRecord) -> list[CallRecord]:
    """The descriptions of all ranks' calls, where they are the same call; an error on all ranks alike where a rank has
    met one, or where the calls differ. Collective, after an exchange that did not agree."""
    everyone: list[CallRecord] = comm.all_gather_plain(mine)
    for rank, one in enumerate(everyone):
        if one.kind is not None:
            raise one.kind(one.text if one.text.startswith(f"rank {rank}: ") else f"rank {rank}: {one.text}")
    if any(one.call != mine.call for one in everyone):
        raise DesyncError(different({rank: one.call for rank, one in enumerate(everyone)}))
    return everyone


def different(calls: dict[int, str]) -> str:
    """The error text if ranks make these calls."""
    return f"ranks called different methods: {grouped(calls)}. All ranks make the same calls, in the same order"


def number(text: str) -> int:
    """Tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
