"""Preemption: a signal asks the job to stop; all ranks agree between two steps, save, and end with one status."""

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
from fsdpx.core.base.arguments import check_arguments
from fsdpx.core.base.hooks import STOP_SIGNALS, SignalHandler
from fsdpx.core.base.messages import flush_and_write
from fsdpx.errors import ConfigError

__all__ = ["PREEMPTED_STATUS", "JobPreempted", "Preemption"]

PREEMPTED_STATUS = 85
"""Exit status of a job that was asked to stop and has saved: what HTCondor's manual uses for "start me again"."""

_RANKS = 1 << 32  # more than there are: lower ranks make larger keys


class JobPreempted(SystemExit):
    """Raised on all ranks at the same step boundary, after saving. Not caught, it ends Python with status
    PREEMPTED_STATUS and prints nothing. rank: the lowest that was asked. name: the signal, as in "SIGUSR1". step: steps
    made."""

    def __init__(self, rank: int, name: str, step: int) -> None:
        super().__init__(PREEMPTED_STATUS)
        self.rank, self.name, self.step = rank, name, step

    def __str__(self) -> str:
        return f"rank {self.rank} was asked to stop by {self.name}; all ranks ended together after step {self.step}"


class Preemption:
    """The reaction when this job is asked to stop: for `fit(..., preempt=Preemption(...))` or a loop of one's own.

        with Preemption(save=lambda: trainer.save("run/last")) as preemption:
            for x, y in loader:
                trainer.step(x, y)
                preemption.check(trainer)

    It is enough that one rank gets a signal. Handlers are set while the `with` lasts, or `fit`; a thread that is not
    Python's main thread can set none, and hears of `request_stop` and of the other ranks. A handler of the program's
    own is called as well, and is put back at the end, unless the program has set another one meanwhile. HUP stays
    ignored under nohup, and a QUIT that dumps stacks (`faulthandler.register`) still does that instead.

    Parameters
    ----------
    save : called on all ranks, together
    signals : names; USR1 is forwarded to the ranks by every launcher, TERM comes last before KILL, HUP means that a
        terminal closes, QUIT is Ctrl-\\, INT is Ctrl-C (a second one ends at once)
    requeue : rank 0 then asks Slurm to start the job again (scontrol requeue)
    """

    @check_arguments
    def __init__(
        self,
        save: Callable[[], object] | None = None,
        *,
        signals: Sequence[str] = STOP_SIGNALS,
        requeue: bool = False,
    ) -> None:
        self.save, self.requeue = save, requeue
        self.signals = [
            _parse_signal(name) for name in signals if hasattr(signal, "SIGUSR1") or "USR" not in name
        ]  # Windows
        self._asked, self._since = 0, 0.0
        self._before: dict[signal.Signals, SignalHandler] = {}
        self._process = os.getpid()

    def __enter__(self) -> Preemption:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                before = SignalHandler.from_signal(number)
                if not before.is_wanted():
                    self._before[number] = before
                    signal.signal(number, self._handle_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            _, before = self._before.popitem()
            before.put_back(self._handle_signal)

    def request_stop(self) -> None:
        """The effect of a signal: this rank asks all to stop at the next boundary."""
        self._asked = self._asked or int(signal.SIGTERM)

    def check(self, trainer: Any, also: Callable[[], object] | None = None) -> None:
        """Between two steps, on all ranks: go on, or save and raise `JobPreempted` everywhere. Collective.

        also: called before `save`. Costs one all-reduce of 8 bytes."""
        found = self._agree_on_request(trainer)
        if found is None:
            return
        for save in (also, self.save):
            if save is not None:
                save()
        trainer.call_runner.all_reduce_max(np.zeros(1), "preemption: all have saved")
        end = JobPreempted(*found, trainer.global_step)
        if trainer.call_runner.rank == 0:
            flush_and_write(f"fsdpx: {end}; exit status {PREEMPTED_STATUS}\n")  # its terminal may have closed
            if self.requeue:
                _requeue_job()
        raise end

    def _agree_on_request(self, trainer: Any) -> tuple[int, str] | None:
        """The lowest rank that was asked, and by which signal; the same on all ranks."""
        key = (_RANKS - trainer.call_runner.rank) << 8 | self._asked if self._asked else 0
        ahead, number = divmod(int(trainer.call_runner.all_reduce_max(np.array([key], np.int64), "preemption")[0]), 256)
        return (_RANKS - ahead, signal.Signals(number).name) if number else None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Note who asks, and do what the program would have done. A second Ctrl-C does not wait for the boundary;
        launchers hand on the first one twice, at the same time. In a child that was forked, which is no rank, the
        signal has the effect that it had before."""
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
