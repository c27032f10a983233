"""Entry point of each rank under `fsdpx run`: runs the user's script, and writes a status file when it starts and when
it ends."""

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
from fsdpx.core.comm.mpi.start import guarding_mpi_start
from fsdpx.ext.gloo import rendezvous
from fsdpx.launch.rank_status import (
    RankStatus,
    open_pipe_that_reveals_rank_death,
    read_log_folder,
    redirect_output_to_log,
)

__all__ = ["RankStatusWriter", "escape_colon_words", "request_kill_on_parent_death"]

_SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Run a script as one rank: `python -m fsdpx.launch.rank script.py ...`. The command-line arguments are the same
    as for `python -m mpi4py`."""
    settings = environment.read_environment()
    request_kill_on_parent_death()
    sys.argv[1:] = [word[1:] if _has_only_colons(word) else word for word in sys.argv[1:]]
    if settings.launcher is not None and not settings.launcher.mpi:
        run = _run_program
    else:
        from mpi4py.run import main as run
    if settings.run is None or settings.launcher is None or settings.launcher.rank is None:
        run()
        return
    environment.set_rank_variables(settings.launcher, settings.expected_size)
    sys.meta_path.insert(0, _MpiStartGuardFinder())
    begun = RankStatus(settings.launcher.rank, os.getpid(), platform.node())
    open_pipe_that_reveals_rank_death(settings.run, begun.rank)
    begun.write_to_folder(settings.run)
    logs = read_log_folder(settings.run)
    if logs is not None:
        redirect_output_to_log(logs, begun.rank)
    note = RankStatusWriter(begun, settings.run)
    _patch_os_exit_to_record(note)
    hooks.add_exit_listener(note.record_final_status)
    _patch_signal_to_record_handlers(note)
    try:
        run()
    except BaseException as error:
        note.update(**_make_status_fields_of_exception(error))
        raise
    note.update(status=0)


def escape_colon_words(program: Sequence[str]) -> list[str]:
    """Escape the words of a program's command line for mpiexec, which takes the word ":" as the start of another
    program.

    One more colon is appended to each word that consists only of colons; `main` removes it."""
    return [f":{word}" if _has_only_colons(word) else word for word in program]


def _has_only_colons(word: str) -> bool:
    return word != "" and not word.strip(":")


def _run_program() -> None:
    """Run the script or the module (-m) that sys.argv names, as Python itself would."""
    module = sys.argv[1] == "-m"
    del sys.argv[: 2 if module else 1]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


class RankStatusWriter:
    """Writes this rank's status file. The methods are thread-safe.

    Once this rank has recorded that it ends the whole job, its status no longer changes, for two reasons: the launcher
    may see other ranks end first, and the script may still run to completion in another thread."""

    def __init__(self, begun: RankStatus, folder: Path) -> None:
        self._note, self._folder = begun, folder
        self._final = False
        # reentrant, because a signal handler that interrupts `update` may call `update` again
        self._lock = threading.RLock()

    def update(self, final: bool = False, **changes: Any) -> None:
        """Replace the fields in `changes` and write the status, unless a final status has been written. In a forked
        child process, which is not a rank, this method does nothing."""
        if os.getpid() == self._note.process:
            with self._lock:
                if not self._final:
                    self._final = final
                    self._note = replace(self._note, **changes)
                    self._note.write_to_folder(self._folder)

    def record_final_status(self, status: int, error: str) -> None:
        """Write the exit status with which this rank ends the whole job. Later updates are ignored."""
        self.update(final=True, status=status, error=error)


def _make_status_fields_of_exception(error: BaseException) -> dict[str, Any]:
    """Return the fields of the status file for a script that ended with the exception `error`."""
    if not isinstance(error, SystemExit):
        return {"status": 1, "error": type(error).__name__}
    return {"status": error.code if isinstance(error.code, int) else int(error.code is not None)}


def _patch_os_exit_to_record(note: RankStatusWriter) -> None:
    """Patch `os._exit` so that it records the exit status with `note`, because a launcher may not report the status of
    a rank that exits before MPI_Init."""
    leave = os._exit

    def exit_and_record(status: int) -> NoReturn:
        if get_running_mpi() is None and not rendezvous.opened_rendezvous:
            note.update(status=status)
        leave(status)

    os._exit = exit_and_record


def _patch_signal_to_record_handlers(note: RankStatusWriter) -> None:
    """Patch `signal.signal` to record whether the script handles SIGUSR1. Asking the operating system would not help:
    it does not distinguish a handler of the script from a handler that an MPI library has installed."""
    set_handler, heard = signal.signal, getattr(signal, "SIGUSR1", None)

    def set_and_record(number: int, handler: Any, /) -> Any:
        before = set_handler(number, handler)
        if number == heard:
            note.update(listens=callable(handler))
        return before

    signal.signal = set_and_record  # type: ignore[assignment]


class _MpiStartGuardFinder(MetaPathFinder):
    """Import hook that sets a timeout if the script itself imports `mpi4py.MPI`. This import calls MPI_Init, which
    waits for all ranks."""

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
                with guarding_mpi_start():
                    load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def request_kill_on_parent_death() -> None:
    """Ask Linux to kill this process when its parent ends, so that no rank outlives its launcher, and no launcher
    outlives `fsdpx run`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main()
