"""Preemption: after a signal, all ranks agree to stop between two steps, save, and exit with the same status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from fsdpx.core.base import environment
from fsdpx.core.base.arguments import wrap_with_type_hint_check
from fsdpx.core.base.hooks import STOP_SIGNALS, SignalHandler
from fsdpx.core.base.messages import flush_and_write_stderr
from fsdpx.errors import ConfigError

__all__ = ["PREEMPTED_STATUS", "JobPreempted", "Preemption"]

PREEMPTED_STATUS = 85
"""Exit status of a job that was asked to stop and has saved its state. HTCondor's manual uses this status for "start me
again"."""

# larger than the number of ranks in any job; ranks agree on the maximum of _RANKS - rank, which identifies the lowest
# rank
_RANKS = 1 << 32


class JobPreempted(SystemExit):
    """Raised on all ranks at the same step boundary, after saving, when the job was asked to stop.

    If it is not caught, Python exits with status PREEMPTED_STATUS and prints nothing.

    Attributes
    ----------
    rank : the lowest rank that was asked to stop
    name : name of the signal, such as "SIGUSR1"
    step : number of steps completed
    """

    def __init__(self, rank: int, name: str, step: int) -> None:
        super().__init__(PREEMPTED_STATUS)
        self.rank, self.name, self.step = rank, name, step

    def __str__(self) -> str:
        return f"rank {self.rank} was asked to stop by {self.name}; all ranks ended together after step {self.step}"


class Preemption:
    r"""Saves and exits when this job is asked to stop. Use it in `fit(..., preempt=Preemption(...))` or in your own
    training loop:

        with Preemption(save=lambda: trainer.save("run/last")) as preemption:
            for x, y in loader:
                trainer.step(x, y)
                preemption.check(trainer)

    A signal to one rank is enough. Handlers are installed during the `with` block, or during `fit`. Only Python's main
    thread can install handlers; in any other thread, only `request_stop` and requests on other ranks have an effect.
    The program's own handler is called as well, and is restored at the end unless the program has set another handler
    in the meantime. HUP stays ignored under nohup. If the program uses QUIT to dump stacks (`faulthandler.register`),
    QUIT still only dumps stacks.

    Parameters
    ----------
    save : function that all ranks call together to save their state (default: nothing is saved)
    signals : names of the signals that ask the job to stop. Launchers forward USR1 to the ranks; TERM is the last
        signal before KILL; HUP means that a terminal closes; QUIT is Ctrl-\; INT is Ctrl-C, and a second one ends the
        job at once
    requeue : whether rank 0 then asks Slurm to start the job again (scontrol requeue)
    """

    @wrap_with_type_hint_check
    def __init__(
        self, save: Callable[[], object] | None = None, *, signals: Sequence[str] = STOP_SIGNALS, requeue: bool = False
    ) -> None:
        self.save, self.requeue = save, requeue
        self.signals = [
            _parse_signal(name) for name in signals if hasattr(signal, "SIGUSR1") or "USR" not in name
        ]  # Windows has no USR1
        self._asked, self._since = 0, 0.0
        self._before: dict[signal.Signals, SignalHandler] = {}
        self._process = os.getpid()

    def __enter__(self) -> Preemption:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                before = SignalHandler.from_signal(number)
                if not before.is_needed_by_program():
                    self._before[number] = before
                    signal.signal(number, self._handle_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            _, before = self._before.popitem()
            before.reinstall_unless_replaced(self._handle_signal)

    def request_stop(self) -> None:
        """Ask all ranks to stop at the next step boundary, as a signal would. Not collective: one rank is enough."""
        self._asked = self._asked or int(signal.SIGTERM)

    def check(self, trainer: Any, also: Callable[[], object] | None = None) -> None:
        """If any rank was asked to stop, save and raise `JobPreempted` on all ranks. Call this between two steps.
        Collective.

        Each call costs one all-reduce of 8 bytes.

        Parameters
        ----------
        trainer : the trainer whose ranks agree on stopping
        also : function that is called before `save` (default: none)

        Raises
        ------
        JobPreempted
            on all ranks, after saving, if a rank was asked to stop
        """
        found = self._agree_on_request(trainer)
        if found is None:
            return
        for save in (also, self.save):
            if save is not None:
                save()
        trainer.call_runner.all_reduce_max(np.zeros(1), "preemption: all have saved")
        end = JobPreempted(*found, trainer.global_step)
        if trainer.call_runner.rank == 0:
            flush_and_write_stderr(
                f"fsdpx: {end}; exit status {PREEMPTED_STATUS}\n"
            )  # unlike print, this works even after the terminal was closed
            if self.requeue:
                _requeue_job()
        raise end

    def _agree_on_request(self, trainer: Any) -> tuple[int, str] | None:
        """Agree on the lowest rank that was asked to stop. Return this rank and the name of its signal. Return None if
        no rank was asked. Collective."""
        key = (_RANKS - trainer.call_runner.rank) << 8 | self._asked if self._asked else 0
        ahead, number = divmod(int(trainer.call_runner.all_reduce_max(np.array([key], np.int64), "preemption")[0]), 256)
        return (_RANKS - ahead, signal.Signals(number).name) if number else None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal, and call the program's own handler.

        A second Ctrl-C ends the job at once. Launchers deliver each Ctrl-C twice, so a second one that arrives
        immediately after the first does not count. A forked child is not a rank; there, the signal acts as if this
        handler were not installed."""
        if os.getpid() != self._process:
            self.__exit__(None, None, None)
            signal.raise_signal(number)
            return
        now = time.monotonic()
        if number == signal.SIGINT and self._asked and now > self._since + 1.0:
            raise KeyboardInterrupt
        self._asked, self._since = self._asked or number, self._since if self._asked else now
        self._before[signal.Signals(number)].call_handler(frame)


def _parse_signal(name: str) -> signal.Signals:
    found = getattr(signal, "SIG" + name.upper().removeprefix("SIG"), None)
    if not isinstance(found, signal.Signals) or found.name in ("SIGKILL", "SIGSTOP"):
        raise ConfigError(f"Preemption(signals=...): {name!r} is no signal that can be caught; use USR1, USR2 or TERM")
    return found


def _requeue_job() -> None:
    job = environment.read_environment().slurm_job
    if job is None:
        print("fsdpx: requeue=True, but this is no Slurm job (no SLURM_JOB_ID)", file=sys.stderr, flush=True)
        return
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        print(f"fsdpx: scontrol requeue {job} failed: {done.stderr.strip()}", file=sys.stderr, flush=True)
