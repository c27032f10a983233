"""Excepthooks and signal handlers that fsdpx installs in the user's process. They also call the user's own hooks and
handlers, and are removed when they are no longer needed.

Hooks stay installed while they have an owner: a trainer that runs on several processes, or a communicator that the
user's program has opened. They are removed when the last owner releases them. The program may have installed its own
hook on top of fsdpx's hook. In that case, both hooks stay, but fsdpx's hook then only forwards calls to the function
that fsdpx had replaced.
"""

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
from functools import update_wrapper
from types import ModuleType
from typing import Any

from fsdpx.core.base.dataclass import dataclass

__all__ = [
    "STOP_SIGNALS", "Hook", "SignalHandler", "add_exit_listener", "find_communicator_to_abort",
    "install_process_hooks_while_alive", "notify_exit_listeners", "register_process_hooks", "release_hooks_of_owner",
    "releasing_hooks_after_block",
]  # fmt: skip


class _HookLink:
    """A wrapper that replaces a function of a module, such as `sys.excepthook`. After `bypass` is called, it only calls
    the function that it replaced."""

    def __init__(self, former: Callable[..., Any], ours: Callable[..., Any]) -> None:
        update_wrapper(self, former, updated=())
        self.former, self.function = former, ours

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.function(*given, **options)

    def bypass(self) -> None:
        self.function = self.former

    @property
    def is_bypassed(self) -> bool:
        return self.function is self.former


def _skip_bypassed_links(function: Callable[..., Any]) -> Callable[..., Any]:
    """Strip bypassed wrappers from the outside of `function`, up to the first wrapper that is still active. Return the
    result."""
    while isinstance(function, _HookLink) and function.is_bypassed:
        function = function.former
    return function


class Hook:
    """A function of a module that fsdpx replaces temporarily, such as `sys.excepthook`. `wrap` takes the current
    function and returns its replacement, which calls the current function."""

    def __init__(self, module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.module, self.name, self.wrap = module, name, wrap
        self._link: _HookLink | None = None

    def install(self) -> None:
        """Install the hook on top of all other hooks, so that it is called first. If the program has put its own hook
        on top of this hook, install this hook again above the program's hook."""
        target = getattr(self.module, self.name)
        if target is self._link:
            return
        if self._link is not None:
            self._link.bypass()
        target = _skip_bypassed_links(target)
        self._link = _HookLink(target, self.wrap(target))
        setattr(self.module, self.name, self._link)

    def uninstall(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.bypass()
            if getattr(self.module, self.name) is link:
                setattr(self.module, self.name, _skip_bypassed_links(link))


@dataclass(frozen=True)
class _Holder:
    """An owner of the hooks, which keeps them installed.

    Attributes
    ----------
    comm : the communicator whose `abort` ends all ranks. It is a weak reference, so that the holder does not keep the
        communicator alive
    end : finalizer that runs when the owner is garbage-collected
    """

    comm: weakref.ref[Any]
    end: weakref.finalize[Any, Any]


_hooks: list[Hook] = []
_holders: dict[int, _Holder] = {}
_lock = threading.RLock()  # reentrant, because garbage collection may run a finalizer while this thread holds the lock
_visit: ContextVar[list[Any] | None] = ContextVar("fsdpx_visit", default=None)


def register_process_hooks(*hooks: Hook) -> None:
    """Register hooks. All registered hooks stay installed as long as they have at least one owner. If an owner already
    exists, install the new hooks immediately."""
    with _lock:
        _hooks.extend(hooks)
        if _holders:
            for hook in hooks:
                hook.install()


def install_process_hooks_while_alive(owner: Any, comm: Any, beyond_scope: bool = False) -> None:
    """Install all hooks until `owner` releases them or is garbage-collected, or until the enclosing block of
    `releasing_hooks_after_block` ends.

    `comm` is the communicator whose `abort` ends all ranks. If `beyond_scope` is true, the hooks stay installed after
    the end of the block.
    """
    with _lock:
        known = id(owner) in _holders
        if not known:
            end = weakref.finalize(owner, _drop_holder_and_unused_hooks, id(owner))
            end.atexit = False
            _holders[id(owner)] = _Holder(weakref.ref(comm), end)
        for hook in _hooks:
            hook.install()
    begun = _visit.get()
    if begun is not None and not known and not beyond_scope:
        begun.append(weakref.ref(owner))


def release_hooks_of_owner(owner: Any) -> None:
    """Remove `owner` from the owners of the hooks. When the last owner is removed, the hooks are uninstalled."""
    with _lock:
        holder = _holders.get(id(owner))
        if holder is not None:
            holder.end.detach()
            _drop_holder_and_unused_hooks(id(owner))


def _drop_holder_and_unused_hooks(key: int) -> None:
    with _lock:
        _holders.pop(key, None)
        if not _holders:
            for hook in reversed(_hooks):
                hook.uninstall()


def find_communicator_to_abort() -> Any:
    """Return the communicator whose `abort` ends all ranks, namely the communicator of the newest owner of the hooks.
    Return None if there is none."""
    comms = [holder.comm() for holder in list(_holders.values())]
    return next((comm for comm in reversed(comms) if comm is not None), None)


class _ExceptionHolder:
    """A hook owner that is stored in an exception. It keeps the process hooks installed as long as the exception
    exists."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm


@contextmanager
def releasing_hooks_after_block() -> Iterator[None]:
    """Return a context manager that removes all hook owners added inside its block when the block ends.

    If an exception leaves the block, the exception becomes the owner instead. The hooks then stay installed, and end
    all ranks if the exception is not caught."""
    begun: list[Any] = []
    token = _visit.set(begun)
    try:
        yield
    except BaseException as error:
        comm = find_communicator_to_abort()
        if begun and comm is not None:
            held = _ExceptionHolder(comm)
            with suppress(AttributeError):  # some exceptions have no __dict__
                error._fsdpx_held = held  # type: ignore[attr-defined]
                install_process_hooks_while_alive(held, comm)
                begun.pop()
        raise
    finally:
        _visit.reset(token)
        for hook in begun:
            release_hooks_of_owner(hook())


_observers: list[Callable[[int, str], object]] = []


def add_exit_listener(listener: Callable[[int, str], object]) -> None:
    """Register a function that is called as `listener(status, error)` before this rank ends all other ranks. `error` is
    the name of the exception that made this rank end the others, or "" if there is none."""
    _observers.append(listener)


def notify_exit_listeners(status: int, error: str = "") -> None:
    """Call the functions registered by `add_exit_listener`. `status` is the exit status of this process, and `error` is
    the name of its exception, or "" if there is none."""
    for listener in _observers:
        with suppress(OSError):  # the job must end even if a listener fails, for example because the disk is full
            listener(status, error)


STOP_SIGNALS = tuple(name for name in ("USR1", "TERM", "HUP", "QUIT") if hasattr(signal, f"SIG{name}"))
"""Names of the signals that ask a job to stop. They are sent by launchers and schedulers, by a terminal that closes,
and by Ctrl-\\."""
MAX_SIGACTION_BYTES = 1024
"""Size in bytes of a buffer that is large enough for the `struct sigaction` of any system."""
_sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None


@dataclass(frozen=True)
class SignalHandler:
    """The handler of a signal, saved so that it can be restored later.

    Attributes
    ----------
    number : the signal
    function : the handler known to Python
    record : the system's `struct sigaction`, which begins with the address of the handler. It is needed because Python
        does not see handlers set by C code. It is empty if the system has no `sigaction`
    """

    number: signal.Signals
    function: Any
    record: bytes

    @classmethod
    def from_signal(cls, number: signal.Signals) -> SignalHandler:
        record = ctypes.create_string_buffer(MAX_SIGACTION_BYTES)
        known = _sigaction is not None and _sigaction(int(number), None, record) == 0
        return cls(number, signal.getsignal(number), record.raw if known else b"")

    def is_needed_by_program(self) -> bool:
        """Return whether this handler must not be replaced, because the user's program relies on it.

        The program relies on a handler that ignores SIGHUP (nohup), and on a SIGQUIT handler in C code, such as
        faulthandler's stack dump.
        """
        if self.number.name == "SIGHUP":
            return self.function is signal.SIG_IGN
        address = int.from_bytes(self.record[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
        of_c = not callable(self.function) and address not in (signal.SIG_DFL, signal.SIG_IGN)
        return self.number.name == "SIGQUIT" and of_c

    def call_handler(self, frame: Any) -> None:
        """Call the handler if it is a Python function other than Python's default SIGINT handler."""
        if callable(self.function) and self.function is not signal.default_int_handler:
            self.function(int(self.number), frame)

    def reinstall_unless_replaced(self, ours: Any) -> None:
        """Install this handler again, unless the program has meanwhile replaced `ours`, fsdpx's handler, with another
        function."""
        if signal.getsignal(self.number) != ours:
            return
        signal.signal(self.number, signal.SIG_DFL if self.function is None else self.function)
        if self.record and _sigaction is not None:
            _sigaction(int(self.number), self.record, None)
