"""Hooks and signal handlers that fsdpx installs in the program's process. They also call the program's own hooks and
handlers, and are removed when they are no longer needed.

Hooks stay installed while an owner holds them: a trainer of several processes, or a communicator that the program has
opened. They are removed when the last owner releases them. If the program has since installed a hook on top of ours,
its hook stays, and ours only passes calls on to the function that it replaced.
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
from dataclasses import dataclass
from functools import update_wrapper
from types import ModuleType
from typing import Any

__all__ = [
    "STOP_SIGNALS", "Hook", "SignalHandler", "add_exit_listener", "find_communicator_to_abort",
    "install_hooks_for_owner", "notify_exit_listeners", "register_hooks", "release_hooks_of_owner",
    "releasing_hooks_after_block",
]  # fmt: skip


class _HookLink:
    """A wrapper that replaces a function of a module. After `bypass`, it only calls the function that it replaced."""

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
    """Return the function below all bypassed links."""
    while isinstance(function, _HookLink) and function.is_bypassed:
        function = function.former
    return function


class Hook:
    """An attribute of a module that fsdpx replaces temporarily. `wrap` takes the current function and returns ours,
    which calls it."""

    def __init__(self, module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.module, self.name, self.wrap = module, name, wrap
        self._link: _HookLink | None = None

    def install(self) -> None:
        """Install the hook on top, even if the program has installed its own hook over ours."""
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
    """An owner that holds the hooks.

    `comm`: weak reference to the communicator that ends all ranks. The reference is weak so that the communicator can
    be freed with its owner. `end`: finalizer that runs when the owner is garbage-collected.
    """

    comm: weakref.ref[Any]
    end: weakref.finalize[Any, Any]


_hooks: list[Hook] = []
_holders: dict[int, _Holder] = {}
_lock = threading.RLock()  # reentrant: the garbage collector may run a finalizer in this thread at any time
_visit: ContextVar[list[Any] | None] = ContextVar("fsdpx_visit", default=None)


def register_hooks(*hooks: Hook) -> None:
    """Add hooks that are installed whenever an owner holds the hooks. Install them now if there is an owner."""
    with _lock:
        _hooks.extend(hooks)
        if _holders:
            for hook in hooks:
                hook.install()


def install_hooks_for_owner(owner: Any, comm: Any, beyond_scope: bool = False) -> None:
    """Install all hooks, and keep them until `owner` releases them or is garbage-collected, or until the enclosing
    block of `releasing_hooks_after_block` ends.

    `comm`: the communicator whose `abort` ends all ranks. `beyond_scope`: whether to keep the hooks after the end of
    that block.
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
    """Release the hooks that `owner` holds, if any. The last release removes them."""
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
    """Return the communicator whose `abort` ends all ranks, that of the newest owner of hooks. Return None if there is
    no owner."""
    comms = [holder.comm() for holder in list(_holders.values())]
    return next((comm for comm in reversed(comms) if comm is not None), None)


class _ExceptionHolder:
    """Owner of hooks that lives as long as the exception to which it is attached."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm


@contextmanager
def releasing_hooks_after_block() -> Iterator[None]:
    """Release, at the end of the block, the hooks of all owners that were added inside it.

    If an exception leaves the block, the exception owns the hooks instead, so that all ranks end if nobody catches it.
    """
    begun: list[Any] = []
    token = _visit.set(begun)
    try:
        yield
    except BaseException as error:
        comm = find_communicator_to_abort()
        if begun and comm is not None:
            held = _ExceptionHolder(comm)
            with suppress(AttributeError):  # an exception without a __dict__
                error._fsdpx_held = held  # type: ignore[attr-defined]
                install_hooks_for_owner(held, comm)
                begun.pop()
        raise
    finally:
        _visit.reset(token)
        for hook in begun:
            release_hooks_of_owner(hook())


_observers: list[Callable[[int, str], object]] = []


def add_exit_listener(listener: Callable[[int, str], object]) -> None:
    """Register a function to be called as `listener(status, error)` before this rank ends all others.

    `error` is the name of the exception that is the reason, or "".
    """
    _observers.append(listener)


def notify_exit_listeners(status: int, error: str = "") -> None:
    """Call the listeners of `add_exit_listener` with the exit status of this process."""
    for listener in _observers:
        with suppress(OSError):  # a full disk must not keep the job from ending
            listener(status, error)


STOP_SIGNALS = tuple(name for name in ("USR1", "TERM", "HUP", "QUIT") if hasattr(signal, f"SIG{name}"))
"""Names of the signals that ask a job to stop. They are sent by launchers and schedulers, by a terminal that closes,
and by Ctrl-\\."""
MAX_SIGACTION_BYTES = 1024
"""Bytes of a buffer that is large enough for the `struct sigaction` of any system."""
_sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None


@dataclass(frozen=True)
class SignalHandler:
    """The current handler of a signal.

    `function`: the handler known to Python. `record`: the system's `struct sigaction`, which begins with the address of
    the handler. The record is needed because Python does not see handlers set by C code, and is empty if the system has
    no `sigaction`.
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
        """Return whether the program relies on its own handling of the signal. This is so for HUP if the program's
        parent has set HUP to be ignored (nohup), and for QUIT if C code, such as faulthandler's stack dump, handles
        QUIT."""
        if self.number.name == "SIGHUP":
            return self.function is signal.SIG_IGN
        address = int.from_bytes(self.record[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
        of_c = not callable(self.function) and address not in (signal.SIG_DFL, signal.SIG_IGN)
        return self.number.name == "SIGQUIT" and of_c

    def call_handler(self, frame: Any) -> None:
        """Call the program's own handler, if it is a Python function other than the default one."""
        if callable(self.function) and self.function is not signal.default_int_handler:
            self.function(int(self.number), frame)

    def restore(self, ours: Any) -> None:
        """Restore this handler, unless a function other than `ours` has been installed since."""
        if signal.getsignal(self.number) != ours:
            return
        signal.signal(self.number, signal.SIG_DFL if self.function is None else self.function)
        if self.record and _sigaction is not None:
            _sigaction(int(self.number), self.record, None)
