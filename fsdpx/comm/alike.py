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
    words = {name: repr(value) for name, value in choices.items()}
    token = _given.set({**words, **_given.get()})
    try:
        yield words
    finally:
        _given.reset(token)


def given_to_call() -> Mapping[str, str]:
    """The arguments of the call that opens a communicator now, by name, as text."""
    return _given.get()


def compare(comm: Communicator, settings: Mapping[str, str], arguments: Mapping[str, str] | None = None) -> None:
    """ConfigError on all ranks if they have other settings; it names the ranks, and only what differs. Collective.

    settings : values as text, by name; a rank that lacks one differs
    arguments : of the call that this rank makes; those that some rank's call does not have are not compared"""
    everyone = comm.all_gather_plain((dict(settings), dict(arguments or {})))
    every_setting, every_argument = zip(*everyone, strict=True)
    rows = {name: [one.get(name, "not given") for one in every_setting] for one in every_setting for name in one}
    shared = set.intersection(*map(set, every_argument))
    rows |= {name: [one[name] for one in every_argument] for name in every_argument[0] if name in shared}
    different = [f"{name} ({grouped(dict(enumerate(row)))})" for name, row in rows.items() if len({*row}) > 1]
    if different:
        raise ConfigError(f"ranks differ in {', in '.join(different)}. {REMEDY}")
