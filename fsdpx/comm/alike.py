"""Settings that all ranks must have alike: they agree on them in their first message, before any of them matters.

A call says its arguments here; a communicator that is opened inside it sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fsdpx.comm.communicator import Communicator
from fsdpx.comm.guarded import grouped
from fsdpx.errors import ConfigError

__all__ = ["compare", "given_to_call", "with_arguments"]

REMEDY = (
    "Give all ranks the same (Open MPI passes no variables to other hosts: start with `python -m fsdpx run`, or say "
    "mpiexec -x NAME)"
)
_given: ContextVar[Mapping[str, str]] = ContextVar("fsdpx_given", default={})  # noqa: B039


@contextmanager
def with_arguments(**choices: Any) -> Iterator[dict[str, str]]:
    """Communicators that are opened inside compare these arguments as well."""
    words = {f"{name}=": repr(value) for name, value in choices.items()}
    token = _given.set({**words, **_given.get()})
    try:
        yield words
    finally:
        _given.reset(token)


def given_to_call() -> Mapping[str, str]:
    """The arguments of the call that opens a communicator now, by name, as text."""
    return _given.get()


def compare(comm: Communicator, values: Mapping[str, str]) -> None:
    """ConfigError on all ranks if they have other values; it names the ranks and what differs alone. Collective.

    Arguments of a call that some rank has not made, as it opens the communicator by another one, are not compared."""
    everyone: list[Mapping[str, str]] = comm.all_gather_plain(dict(values))
    names = dict.fromkeys(name for one in everyone for name in one)
    names = {name: None for name in names if not name.endswith("=") or all(name in one for one in everyone)}
    by_name = {name: [one.get(name, "not given") for one in everyone] for name in names}
    different = [
        f"{name.rstrip('=')} ({grouped(dict(enumerate(values)))})"
        for name, values in by_name.items()
        if len({*values}) > 1
    ]
    if different:
        raise ConfigError(f"ranks differ in {', in '.join(different)}. {REMEDY}")
