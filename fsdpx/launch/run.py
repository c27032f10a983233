"""`fsdpx run`: starts a job with the mpiexec of the environment, and anew when a rank has died."""

from __future__ import annotations

import argparse
import os
import platform
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from fsdpx.engine.flight import Flight, log, read_all
from fsdpx.engine.preempt import PREEMPTED
from fsdpx.engine.watchdog import HUNG
from fsdpx.errors import LaunchError
from fsdpx.launch.rank import Note, read_notes

__all__ = ["Ending", "Plan", "decide", "main"]

_MOST_SECONDS_BETWEEN = 60.0
_SECONDS_TO_END = 5.0
_OF_OTHERS = ("Aborted", "CommError", "CommTimeout")
"""Errors of ranks that heard of another one's failure."""


@dataclass(frozen=True)
class Ending:
    """How one start of the job ended.

    kind: "done", "preempted", "error" (a Python exception or sys.exit), "hung" (a watchdog ended it) or "died".
    who: the rank that ended first and its host, if that is known. step: the last one that any rank had begun.
    """

    kind: str
    status: int
    who: tuple[int, str] | None = None
    step: int | None = None
    text: str = ""


@dataclass
class Plan:
    """Who is started next. endings: of the starts so far."""

    ranks: int
    min_ranks: int
    max_restarts: int
    backoff: float = 1.0
    endings: list[Ending] = field(default_factory=list)

    @property
    def restarts(self) -> int:
        return max(len(self.endings) - 1, 0)


def decide(plan: Plan, ending: Ending) -> tuple[str, float | None]:
    """Take in an ending: why the job is started again or not, in words, and after how many seconds (None: not).

    A rank that dies twice in a row in the same place makes one rank fewer, as far as min_ranks allows. An error that
    comes again at the same step would come for ever. Seconds double as long as no start gets further than the last.
    """
    before = plan.endings[-1] if plan.endings else None
    plan.endings.append(ending)
    if ending.kind in ("done", "preempted"):
        return ending.kind, None
    if ending.kind == "error" and before is not None and (before.kind, before.step) == ("error", ending.step):
        return "the same error at the same step again: another start would not help", None
    if plan.restarts >= plan.max_restarts:
        return f"{plan.restarts} of {plan.max_restarts} restarts are used up", None
    reason = ""
    again = before is not None and ending.kind == before.kind == "died" and ending.who == before.who
    if again and ending.who is not None and plan.ranks > plan.min_ranks:
        plan.ranks -= 1
        reason = f"rank {ending.who[0]} on {ending.who[1]} died twice: one rank fewer, "
    return f"{reason}{plan.ranks} ranks", min(plan.backoff * 2 ** _stuck(plan.endings), _MOST_SECONDS_BETWEEN)


def _stuck(endings: Sequence[Ending]) -> int:
    """How many starts in a row did not get further than the one before."""
    count, last = 0, endings[-1].step or 0
    for earlier in reversed(endings[:-1]):
        if (earlier.step or 0) < last:
            break
        count += 1
    return count


def main(args: argparse.Namespace) -> int:
    """Start until the job is done or may not be started again; its status."""
    least = args.ranks if args.min_ranks is None else args.min_ranks
    if not 1 <= least <= args.ranks:
        raise LaunchError(f"run: -n {args.ranks} --min-ranks {least}: 1 <= min-ranks <= n is needed")
    if args.max_restarts < 0 or args.backoff < 0 or args.grace < 0:
        raise LaunchError("run: --max-restarts, --backoff and --grace are 0 or more")
    plan = Plan(args.ranks, least, args.max_restarts, args.backoff)
    folder = Path(tempfile.mkdtemp(prefix="fsdpx-run-")) if args.folder is None else args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _Signals(args.grace) as signals:
        while True:
            start = len(plan.endings)
            ending = _start(_command(args, plan.ranks), folder, start, plan.ranks, signals)
            if signals.asked and ending.kind not in ("done", "preempted"):
                ending = replace(ending, text=f"{ending.text}; it was asked to stop by {signals.asked.name}")
            reason, seconds = decide(plan, ending)
            if seconds is None or signals.asked:
                break
            _say(f"{ending.text}; restart {start + 1} of {plan.max_restarts} in {seconds:g} s: {reason}")
            if signals.wait(seconds):
                break
    if ending.kind != "done":
        kept = "" if ending.kind == "preempted" else f". Records: {folder}"
        _say(f"{ending.text}{'' if seconds is not None or reason == ending.kind else f'; {reason}'}{kept}")
    if args.folder is None and ending.kind in ("done", "preempted"):
        shutil.rmtree(folder, ignore_errors=True)
    return ending.status


def _say(text: str) -> None:
    print(f"fsdpx run: {text}", file=sys.stderr, flush=True)


def _command(args: argparse.Namespace, ranks: int) -> list[str]:
    script = [*(["-m"] if args.module else []), args.script, *args.args]
    return [*_launcher(args.mpiexec), "-n", str(ranks), sys.executable, "-m", "fsdpx.launch.rank", *script]


def _launcher(asked: str | None) -> list[str]:
    """The mpiexec beside this Python belongs to the MPI that mpi4py loads from a wheel; else the first on PATH."""
    if asked is not None:
        return shlex.split(asked)
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError("run: no mpiexec beside this Python or on PATH; install fsdpx[mpich], or name one: --mpiexec")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if not any(word in (said.stdout + said.stderr).lower() for word in ("open mpi", "openrte", "prte")):
        return [found]
    passed = [word for name in ("FSDPX_RUN", "FSDPX_RESTART", "FSDPX_EXPECT_SIZE") for word in ("-x", name)]
    return [found, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *passed]


def _start(command: list[str], folder: Path, start: int, ranks: int, signals: _Signals) -> Ending:
    """Run the job once."""
    own = folder / f"start-{start}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    said = {"FSDPX_RUN": str(own), "FSDPX_RESTART": str(start), "FSDPX_EXPECT_SIZE": str(ranks)}
    job = subprocess.Popen(
        command, env={**os.environ, **said}, stdin=subprocess.DEVNULL, start_new_session=True
    )  # fmt: skip
    deaths = _Deaths(own, ranks)
    signals.wait_for(job)
    deaths.close()
    status = job.returncode if job.returncode >= 0 else 128 - job.returncode
    flights: dict[int, Flight] = {}
    for flown in own.glob("flight-*/"):
        flights |= read_all(flown)
    ending = _ending(status, read_notes(own), flights, deaths.order)
    if ending.kind in ("done", "preempted"):
        shutil.rmtree(own, ignore_errors=True)
    elif flights:
        (own / "actions.txt").write_text(log(flights))
    return ending


def _ending(status: int, notes: dict[int, Note], flights: dict[int, Flight], deaths: list[int]) -> Ending:
    """What the status of the launcher, the ranks' notes and records, and the order of their deaths mean together."""
    step = max((f.step for f in flights.values() if f.program), default=None)
    if status == 0:
        return Ending("done", 0)
    if status == PREEMPTED or any(note.status == PREEMPTED for note in notes.values()):
        return Ending("preempted", PREEMPTED, step=step, text="the job was asked to stop and has saved")
    errors = [n for n in notes.values() if n.status not in (None, 0)]
    if errors and not all(n.error in _OF_OTHERS for n in errors):
        first = errors[0]
        what = first.error or f"exit status {first.status}"
        where = f"rank {first.rank} on {first.host}"
        at = "" if step is None else f" in step {step + 1}"
        return Ending("error", status, (first.rank, first.host), step, f"{where} ended with {what}{at}")
    if status == HUNG or errors:
        return Ending("hung", HUNG, None, step, "the job hung, see the report above")
    who = next((rank for rank in deaths if rank in notes and notes[rank].status is None), None)
    if who is None:
        return Ending("died", status, None, step, f"a rank died (status {status})")
    text = f"rank {who} on {notes[who].host} died (status {status})"
    if who in flights:
        text += f" in step {flights[who].step + 1}, {flights[who].where(time.time())}"
    return Ending("died", status, (who, notes[who].host), step, text)


class _Deaths:
    """A thread that sees in which order the ranks of this host end: the first one pulls down the others.

    epoll tells descriptors in the order in which they became ready, so that no two deaths are too close together.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.order: list[int] = []
        self._folder, self._ranks, self._host = folder, ranks, platform.node()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsdpx run", daemon=True)
        if hasattr(os, "pidfd_open") and hasattr(select, "epoll"):
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        living: dict[int, int] = {}  # descriptor of a process -> rank
        known: set[int] = set()
        with select.epoll() as deaths:
            while not self._stop.is_set():
                notes = read_notes(self._folder) if len(known) < self._ranks and not self.order else {}
                for rank in notes.keys() - known:
                    known.add(rank)
                    if notes[rank].host == self._host:
                        with suppress(OSError):
                            descriptor = os.pidfd_open(notes[rank].process)
                            living[descriptor] = rank
                            deaths.register(descriptor, select.EPOLLIN)
                for descriptor, _ in deaths.poll(0.1):
                    deaths.unregister(descriptor)
                    self.order.append(living.pop(descriptor))
                    os.close(descriptor)
        for descriptor in living:
            os.close(descriptor)


class _Signals:
    """What a signal to `fsdpx run` does: the ranks get USR1 and `grace` seconds to save; then TERM, then KILL. A second
    signal does not wait."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.asked: signal.Signals | None = None
        self._times = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)):
                self._before.setdefault(number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> bool:
        """Sleep; True, at once, if a signal comes."""
        end = time.monotonic() + seconds
        while not self.asked and time.monotonic() < end:
            time.sleep(min(0.1, max(end - time.monotonic(), 0)))
        return self.asked is not None

    def wait_for(self, job: subprocess.Popen[bytes]) -> None:
        """Return when the job has ended and nothing of it is left in its process group."""
        stage, due = 0, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                job.wait(0.1)
                break
            now = time.monotonic()
            if stage == 0 and self.asked:
                job.send_signal(getattr(signal, "SIGUSR1", signal.SIGTERM))
                stage, due = 1, now + self.grace
            elif stage == 1 and (now >= due or self._times > 1):
                job.terminate()
                stage, due = 2, now + _SECONDS_TO_END
            elif stage == 2 and now >= due:
                _kill(job)
                stage = 3
        _kill(job)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number)
        self._times += 1


def _kill(job: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(job.pid, signal.SIGKILL)
