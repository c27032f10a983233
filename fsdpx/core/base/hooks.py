"""What fsdpx changes in a process in which it is a guest: hooks and signals, chained to those of the program, and given
back.

Hooks are in place while somebody holds them: a trainer of several processes, or a communicator that the program has
opened. They step out with the last holder. A hook that the program has set over ours meanwhile stays, and what it calls
is then what was there before us."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from types import ModuleType
from typing import Any

__all__ = [
    "STOP_SIGNALS",
    "Hook",
    "SignalHandler",
    "add_end_listener",
    "find_newest_communicator",
    "hold_hooks",
    "notify_end",
    "register_hooks",
    "release_hooks",
    "scope_hooks",
]  # fmt: skip


class _HookLink:
    """A function of ours in the place of a module's, which it calls alone once ours has stepped out."""

    def __init__(self, former: Callable[..., Any], ours: Callable[..., Any]) -> None:
        update_wrapper(self, former, updated=())
        self.former, self.function = former, ours

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.function(*given, **options)

    def step_out(self) -> None:
        self.function = self.former

    @property
    def is_out(self) -> bool:
        return self.function is self.former


def _skip_stepped_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under links that have stepped out."""
    while isinstance(function, _HookLink) and function.is_out:
        function = function.former
    return function


class Hook:
    """An attribute of a module that is ours for a while. wrap: what is there -> ours, which calls it."""

    def __init__(self, module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.module, self.name, self.wrap = module, name, wrap
        self._link: _HookLink | None = None

    def put_in_place(self) -> None:
        """Be called first from now on, also where the program has set its own over ours."""
        target = getattr(self.module, self.name)
        if target is self._link:
            return
        if self._link is not None:
            self._link.step_out()
        target = _skip_stepped_out(target)
        self._link = _HookLink(target, self.wrap(target))
        setattr(self.module, self.name, self._link)

    def take_out(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.step_out()
            if getattr(self.module, self.name) is link:
                setattr(self.module, self.name, _skip_stepped_out(link))


@dataclass(frozen=True)
class _Holder:
    """comm: ends all ranks; weak, so that it can go with its holder. end: called when the holder is collected."""

    comm: weakref.ref[Any]
    end: weakref.finalize[Any, Any]


_hooks: list[Hook] = []
_holders: dict[int, _Holder] = {}
_lock = threading.RLock()  # of its own thread as well: the garbage collector may come at any time
_visit: ContextVar[list[Any] | None] = ContextVar("fsdpx_visit", default=None)


def register_hooks(*hooks: Hook) -> None:
    """Put these in place whenever somebody holds hooks."""
    with _lock:
        _hooks.extend(hooks)
        if _holders:
            for hook in hooks:
                hook.put_in_place()


def hold_hooks(owner: Any, comm: Any, stays: bool = False) -> None:
    """Have all hooks in place until `owner` is released or collected, or the `visit` in which this is called ends.

    comm: ends all ranks by `abort`. stays: beyond the visit."""
    with _lock:
        known = id(owner) in _holders
        if not known:
            end = weakref.finalize(owner, _drop_holder, id(owner))
            end.atexit = False
            _holders[id(owner)] = _Holder(weakref.ref(comm), end)
        for hook in _hooks:
            hook.put_in_place()
    begun = _visit.get()
    if begun is not None and not known and not stays:
        begun.append(weakref.ref(owner))


def release_hooks(owner: Any) -> None:
    """`owner` needs no hooks any more: with the last one they step out. Without effect for what holds none."""
    with _lock:
        holder = _holders.get(id(owner))
        if holder is not None:
            holder.end.detach()
            _drop_holder(id(owner))


def _drop_holder(key: int) -> None:
    with _lock:
        _holders.pop(key, None)
        if not _holders:
            for hook in reversed(_hooks):
                hook.take_out()


def find_newest_communicator() -> Any:
    """What ends all ranks, of those who hold hooks the last; None if nobody does."""
    comms = [holder.comm() for holder in list(_holders.values())]
    return next((comm for comm in reversed(comms) if comm is not None), None)


class _ExceptionHolder:
    """Holds hooks for as long as an exception lives, to which it is attached."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm


@contextmanager
def scope_hooks() -> Iterator[None]:
    """Who begins to hold hooks inside the block is released at its end. An exception that leaves it holds them instead:
    one that nobody catches ends all ranks."""
    begun: list[Any] = []
    token = _visit.set(begun)
    try:
        yield
    except BaseException as error:
        comm = find_newest_communicator()
        if begun and comm is not None:
            held = _ExceptionHolder(comm)
            with suppress(AttributeError):  # an exception that takes no attributes
                error._fsdpx_held = held  # type: ignore[attr-defined]
                hold_hooks(held, comm)
                begun.pop()
        raise
    finally:
        _visit.reset(token)
        for hook in begun:
            release_hooks(hook())


_observers: list[Callable[[int, str], object]] = []


def add_end_listener(tell: Callable[[int, str], object]) -> None:
    """Have `tell` called with the exit status, and the name of the exception if one is the reason, before this rank
    ends all others."""
    _observers.append(tell)


def notify_end(status: int, error: str = "") -> None:
    """Tell whoever asked for it how this process ends."""
    for tell in _observers:
        with suppress(OSError):  # a full disk must not keep the job from its end
            tell(status, error)


STOP_SIGNALS = tuple(name for name in ("USR1", "TERM", "HUP", "QUIT") if hasattr(signal, f"SIG{name}"))
"""Names of the signals that ask a job to stop: of launchers and schedulers, of a terminal that closes, Ctrl-\\."""
_LONGEST = 1024
"""Bytes in which a `struct sigaction` of any system has room."""
_sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None


@dataclass(frozen=True)
class SignalHandler:
    """What a signal does. function: as Python knows it. record: as the system does, the handler's address first, since
    Python knows of none that C code has set; empty where there is no sigaction."""

    number: signal.Signals
    function: Any
    record: bytes

    @classmethod
    def from_signal(cls, number: signal.Signals) -> SignalHandler:
        record = ctypes.create_string_buffer(_LONGEST)
        known = _sigaction is not None and _sigaction(int(number), None, record) == 0
        return cls(number, signal.getsignal(number), record.raw if known else b"")

    def is_wanted(self) -> bool:
        """Whether whoever started this program has HUP ignored (nohup), or the program dumps its stacks at QUIT
        (faulthandler)."""
        if self.number.name == "SIGHUP":
            return self.function is signal.SIG_IGN
        address = int.from_bytes(self.record[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
        of_c = not callable(self.function) and address not in (signal.SIG_DFL, signal.SIG_IGN)
        return self.number.name == "SIGQUIT" and of_c

    def call_handler(self, frame: Any) -> None:
        """Do what the program does at this signal, if that is a function of Python's of its own."""
        if callable(self.function) and self.function is not signal.default_int_handler:
            self.function(int(self.number), frame)

    def put_back(self, ours: Any) -> None:
        """Let the signal do that again, unless another function than `ours` has taken its place since."""
        if signal.getsignal(self.number) != ours:
            return
        signal.signal(self.number, signal.SIG_DFL if self.function is None else self.function)
        if self.record and _sigaction is not None:
            _sigaction(int(self.number), self.record, None)
