"""The default communicator of the functional API: one per process, its own for every rank of `spawn`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fsdpx.comm.agreement import Agreement
from fsdpx.comm.communicator import Communicator

__all__ = ["Default", "current", "kind", "other", "put", "use", "uses"]


@dataclass(frozen=True)
class Default:
    """A default communicator, the rank's number on its host, and what is to be closed with it. agreement: how ranks
    agree on calls of the functional API, where the communicator itself does not compare them."""

    comm: Communicator
    local_rank: int
    made: tuple[Communicator, ...] = ()
    of_thread: bool = False
    agreement: Agreement | None = None


_of_thread: ContextVar[Default | None] = ContextVar("fsdpx_default", default=None)
_of_process: list[Default | None] = [None]
_other: list[tuple[int, int]] = []


@contextmanager
def use(comm: Communicator) -> Iterator[None]:
    """`comm` is this thread's default inside the block."""
    token = _of_thread.set(Default(comm, comm.rank, of_thread=True))
    try:
        yield
    finally:
        _of_thread.reset(token)


def put(default: Default | None) -> None:
    """This is the process's default from now on; None forgets it."""
    _of_process[0] = default


def uses(comm: Communicator) -> None:
    """The script has a communicator of its own in use."""
    opened = current()
    if opened is None or not (opened.of_thread or opened.comm.size == comm.size):
        _other[:] = [(comm.rank, comm.size)]


def other() -> tuple[int, int] | None:
    """This rank and the size of such a communicator, the first time that it is asked for."""
    return _other.pop() if _other else None


def kind(comm: Any) -> str | None:
    """What is given as `comm=`, for ranks to compare; None for nothing and for the default, which are the same."""
    opened = current()
    return None if comm is None or (opened is not None and comm is opened.comm) else type(comm).__name__


def current() -> Default | None:
    """The default of this thread, else of this process, else None."""
    return _of_thread.get() or _of_process[0]
