"""One rank under `fsdpx run`: runs the script, and writes a note when it begins and when it ends."""

import ctypes
import importlib.util
import os
import platform
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fsdpx.core.base import environment, hooks
from fsdpx.core.comm.default_communicator import get_running_mpi
from fsdpx.core.comm.mpi.start import guard_mpi_start
from fsdpx.ext.gloo import rendezvous
from fsdpx.launch.rank_status import RankStatus, get_log_folder, hold_lifeline, redirect_output

__all__ = ["RankStatusWriter", "end_with_parent", "escape_words"]

_PDEATHSIG = 1


def main() -> None:
    """`python -m fsdpx.launch.rank script.py ...`, as `python -m mpi4py script.py ...` otherwise."""
    settings = environment.read_environment()
    end_with_parent()
    sys.argv[1:] = [word[1:] if _has_only_colons(word) else word for word in sys.argv[1:]]
    if settings.launcher is not None and not settings.launcher.mpi:
        run = _run_program
    else:
        from mpi4py.run import main as run
    if settings.run is None or settings.launcher is None or settings.launcher.rank is None:
        run()
        return
    environment.set_rank_variables(settings.launcher, settings.expected_size)
    sys.meta_path.insert(0, _MpiStartFinder())
    begun = RankStatus(settings.launcher.rank, os.getpid(), platform.node())
    hold_lifeline(settings.run, begun.rank)
    begun.write_to(settings.run)
    logs = get_log_folder(settings.run)
    if logs is not None:
        redirect_output(logs, begun.rank)
    note = RankStatusWriter(begun, settings.run)
    _record_exits(note)
    hooks.add_end_listener(note.record_end)
    _record_handlers(note)
    error: BaseException | None = None
    try:
        run()
    except BaseException as raised:
        error = raised
        raise
    finally:
        note.update(**_describe_outcome(error))


def escape_words(program: Sequence[str]) -> list[str]:
    """The words of a program as a launcher gets them for its ranks. A launcher takes ":" for the beginning of another
    program, wherever it is: a word of nothing but colons gets one more, which `main` drops."""
    return [f":{word}" if _has_only_colons(word) else word for word in program]


def _has_only_colons(word: str) -> bool:
    return word != "" and not word.strip(":")


def _run_program() -> None:
    """The script or module of the command line, as Python itself runs it."""
    module = sys.argv[1] == "-m"
    del sys.argv[: 2 if module else 1]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


class RankStatusWriter:
    """The note of this rank, which its threads write. When this rank ends all others, that is the last word: they may
    be seen to end before it does, or while its script still comes to its end in another thread."""

    def __init__(self, begun: RankStatus, folder: Path) -> None:
        self._note, self._folder = begun, folder
        self._final = False
        self._lock = threading.RLock()  # of its own thread as well: a handler may interrupt a change

    def update(self, final: bool = False, **changes: Any) -> None:
        """Write the note with these changes, unless its last word is written. A child that was forked is no rank."""
        if os.getpid() == self._note.process:
            with self._lock:
                if not self._final:
                    self._final = final
                    self._note = replace(self._note, **changes)
                    self._note.write_to(self._folder)

    def record_end(self, status: int, error: str) -> None:
        """Write that this rank ends all others."""
        self.update(final=True, status=status, error=error)


def _describe_outcome(error: BaseException | None) -> dict[str, Any]:
    """What the note of a script says that has ended with this exception, or with none."""
    if error is None:
        return {"status": 0}
    if not isinstance(error, SystemExit):
        return {"status": 1, "error": type(error).__name__}
    return {"status": error.code if isinstance(error.code, int) else int(error.code is not None)}


def _record_exits(note: RankStatusWriter) -> None:
    """Before ranks have met, a launcher may not report the status with which `os._exit` ended one."""
    leave = os._exit

    def exit_and_record(status: int) -> NoReturn:
        if get_running_mpi() is None and not rendezvous.opened_rendezvous:
            note.update(status=status)
        leave(status)

    os._exit = exit_and_record


def _record_handlers(note: RankStatusWriter) -> None:
    """MPI libraries catch USR1 themselves, so only Python knows whether the script reacts to it."""
    set_handler, heard = signal.signal, getattr(signal, "SIGUSR1", None)

    def set_and_record(number: int, handler: Any, /) -> Any:
        before = set_handler(number, handler)
        if number == heard:
            note.update(listens=callable(handler))
        return before

    signal.signal = set_and_record  # type: ignore[assignment]


class _MpiStartFinder(MetaPathFinder):
    """Notices that the script starts MPI by itself, which importing `mpi4py.MPI` does: others then wait for it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with guard_mpi_start():
                    load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def end_with_parent() -> None:
    """On Linux, no rank outlives the launcher's process on its host, and no launcher `fsdpx run`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
