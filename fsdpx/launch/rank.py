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
from fsdpx.core.comm.default_communicator import running_mpi
from fsdpx.core.comm.mpi.start import together
from fsdpx.ext.gloo import rendezvous
from fsdpx.launch.rank_status import Note, asked, hold_lifeline, redirect

__all__ = ["OwnNote", "end_with_parent", "handed_over"]

_PDEATHSIG = 1


def main() -> None:
    """`python -m fsdpx.launch.rank script.py ...`, as `python -m mpi4py script.py ...` otherwise."""
    settings = environment.read()
    end_with_parent()
    sys.argv[1:] = [word[1:] if _only_colons(word) else word for word in sys.argv[1:]]
    if settings.launcher is not None and not settings.launcher.mpi:
        run = _run
    else:
        from mpi4py.run import main as run
    if settings.run is None or settings.launcher is None or settings.launcher.rank is None:
        run()
        return
    environment.number(settings.launcher, settings.expected_size)
    sys.meta_path.insert(0, _Start())
    begun = Note(settings.launcher.rank, os.getpid(), platform.node())
    hold_lifeline(settings.run, begun.rank)
    begun.write(settings.run)
    logs = asked(settings.run)
    if logs is not None:
        redirect(logs, begun.rank)
    note = OwnNote(begun, settings.run)
    _note_exits(note)
    hooks.on_end(note.end)
    _note_handlers(note)
    error: BaseException | None = None
    try:
        run()
    except BaseException as raised:
        error = raised
        raise
    finally:
        note.update(**_outcome(error))


def handed_over(program: Sequence[str]) -> list[str]:
    """The words of a program as a launcher gets them for its ranks. A launcher takes ":" for the beginning of another
    program, wherever it is: a word of nothing but colons gets one more, which `main` drops."""
    return [f":{word}" if _only_colons(word) else word for word in program]


def _only_colons(word: str) -> bool:
    return word != "" and not word.strip(":")


def _run() -> None:
    """The script or module of the command line, as Python itself runs it."""
    module = sys.argv[1] == "-m"
    del sys.argv[: 2 if module else 1]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


class OwnNote:
    """The note of this rank, which its threads write. When this rank ends all others, that is the last word: they may
    be seen to end before it does, or while its script still comes to its end in another thread."""

    def __init__(self, begun: Note, folder: Path) -> None:
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
                    self._note.write(self._folder)

    def end(self, status: int, error: str) -> None:
        """Write that this rank ends all others."""
        self.update(final=True, status=status, error=error)


def _outcome(error: BaseException | None) -> dict[str, Any]:
    """What the note of a script says that has ended with this exception, or with none."""
    if error is None:
        return {"status": 0}
    if not isinstance(error, SystemExit):
        return {"status": 1, "error": type(error).__name__}
    return {"status": error.code if isinstance(error.code, int) else int(error.code is not None)}


def _note_exits(note: OwnNote) -> None:
    """Before ranks have met, a launcher may not report the status with which `os._exit` ended one."""
    leave = os._exit

    def noted(status: int) -> NoReturn:
        if running_mpi() is None and not rendezvous.opened:
            note.update(status=status)
        leave(status)

    os._exit = noted


def _note_handlers(note: OwnNote) -> None:
    """MPI libraries catch USR1 themselves, so only Python knows whether the script reacts to it."""
    set_handler, heard = signal.signal, getattr(signal, "SIGUSR1", None)

    def noted(number: int, handler: Any, /) -> Any:
        before = set_handler(number, handler)
        if number == heard:
            note.update(listens=callable(handler))
        return before

    signal.signal = noted  # type: ignore[assignment]


class _Start(MetaPathFinder):
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
                with together():
                    load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def end_with_parent() -> None:
    """On Linux, no rank outlives the launcher's process on its host, and no launcher `fsdpx run`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
