"""`fsdpx run`: starts a job with the mpiexec of the environment, and restarts it when the death of a rank ended it."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.hooks import STOP_SIGNALS, SignalHandler
from fsdpx.core.base.messages import last_words
from fsdpx.core.comm.mpi.start import clear, late, lives, owner, waiting
from fsdpx.errors import LaunchError
from fsdpx.ext.watch.flight_recorder import FlightRecord, log, read_all
from fsdpx.launch.batch import batch, node_cores
from fsdpx.launch.elastic_join import Guests, join
from fsdpx.launch.exit_status import Deaths, Ending, Evidence, RestartPlan, decide
from fsdpx.launch.launchers import Found, answering, command, find
from fsdpx.launch.options import LaunchConfig, NodeRank, look_up, ranks_there, read_hosts, slots_of, write_hosts
from fsdpx.launch.rank import end_with_parent
from fsdpx.launch.rank_status import Follower, Note, ask, read_notes

__all__ = ["Job", "main", "run"]

_SECONDS_TO_END = 5.0
_SECONDS_TO_JOIN = 60.0
_PREFIX, _OWNER = "fsdpx-run-", "owner"


def main(args: argparse.Namespace) -> int:
    """The job of a command line, or what it would be (--dry-run, --print-batch); its exit status."""
    given = {one.name: getattr(args, one.name) for one in fields(LaunchConfig)}
    node = NodeRank.of(args.backend, args.nodes, args.node_rank, args.master_addr, args.master_port)
    ranks = _ranks(args)
    if node is not None:
        unfit = [word for word in ("min_ranks", "print_batch", "join") if getattr(args, word) is not None]
        if unfit:
            option = unfit[0].replace("_", "-")
            raise LaunchError(f"--{option} with --node-rank: each host starts the same ranks again; leave it out")
        given |= {"nodes": None, "per_node": None}
        ranks = node.ranks_here(ranks, args.per_node)
    config = LaunchConfig(**given | {"ranks": ranks})
    if args.join is not None:
        print(f"fsdpx run: {args.join}: {join(args.join, config.ranks, config.timeout or _SECONDS_TO_JOIN)}")
        return 0
    if args.script is None:
        raise LaunchError("which script? fsdpx run -n 4 train.py, or -m and a module")
    program = [*(["-m"] if args.module else []), args.script, *args.args]
    variables = {"FSDPX_TUNE": "again"} if args.retune else {}
    if args.print_batch:
        _look_for(program)
        print(batch(args.print_batch, config, program, node_cores(), variables), end="")
    elif args.dry_run:
        folder = config.folder or Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(8)}")
        job = Job(find(config), config, program, variables, node)
        named = [
            f"{name}={shlex.quote(value)}" for name, value in job.variables(folder / "start-0", 0, config.ranks).items()
        ]
        print(*named, shlex.join(job.command(config.ranks)))
    else:
        return run(config, program, variables, node).status
    return 0


def _ranks(args: argparse.Namespace) -> int:
    """The number of ranks that is asked for; else that of the allocation or of this machine, and a line that says
    so."""
    if args.ranks is not None:
        return int(args.ranks)
    elsewhere = (args.print_batch and (args.nodes is None or args.per_node is None)) or args.join is not None
    if elsewhere:
        raise LaunchError("how many ranks? -n 4; a batch file also takes --nodes and --nproc-per-node")
    ranks, source = ranks_there(args.nodes, args.per_node, args.hostfile, args.threads)
    _log(f"{ranks} rank{'' if ranks == 1 else 's'}, by {source}")
    return ranks


def run(
    config: LaunchConfig, program: Sequence[str], variables: Mapping[str, str] | None = None,
    node: NodeRank | None = None,
) -> Ending:  # fmt: skip
    """Start a job until it is done or must not be restarted; how it ended.

    program: words for Python, as in ["train.py", "--fast"] or ["-m", "train"]. variables: for the ranks. node: this
    host, where other launchers start the ranks of the others; `config` is then of the ranks here."""
    plan = RestartPlan(config.ranks, config.least, config.max_restarts, config.backoff)
    job = Job(find(config), config, program, variables or {}, node)
    _look_for(program)
    job.command(config.ranks)  # what is wrong with it is said before anything is written
    if config.hostfile is not None:
        look_up(read_hosts(config.hostfile), config.hostfile)
    folder = _temporary(_place(config)) if config.folder is None else _writable(config.folder.absolute(), "folder")
    if config.logs is not None:
        _writable(config.logs.absolute(), "logs")
    guests = Guests(folder, lambda more: job.command(plan.ranks + more))
    with _Signals(config.grace) as signals:
        while True:
            here, ranks = _on_hosts_left(job, plan, folder)
            ending = _start(here, folder, len(plan.endings), ranks, signals, guests)
            if signals.received and ending.kind not in ("done", "preempted"):
                ending = replace(ending, text=f"{ending.text}; it was asked to stop by {signals.received.name}")
            elif ending.kind == "preempted" and guests.ranks and not signals.received:
                plan.ranks += (came := guests.take())
                ending = replace(ending, kind="joined", text=f"all have saved, for {came} more to join")
            reason, seconds = decide(plan, ending)
            if seconds is None or signals.received:
                break
            restart = f"restart {plan.restarts + 1} of {plan.max_restarts} in {seconds:g} s"
            _log(f"{ending.text}; {'they go on' if ending.kind == 'joined' else restart}: {reason}")
            if signals.wait(seconds):
                break
    guests.close()
    if ending.kind != "done":
        kept = "" if ending.kind == "preempted" else f". Records: {folder}"
        _log(f"{ending.text}{'' if seconds is not None or reason == ending.kind else f'; {reason}'}{kept}")
    if config.folder is None and ending.kind in ("done", "preempted"):
        safe_files.remove(folder)
    (folder / _OWNER).unlink(missing_ok=True)  # what is left is left on purpose
    return ending


def _on_hosts_left(job: Job, plan: RestartPlan, folder: Path) -> tuple[Job, int]:
    """Where the next start is made, and on how many ranks: a further one on the hosts of the hostfile that answer, if
    they have room for enough ranks."""
    config = job.config
    if config.hostfile is None or not plan.endings:
        return job, plan.ranks
    hosts = read_hosts(config.hostfile)
    left = answering(job.found, hosts)
    gone = [host.name for host in hosts if host not in left]
    ranks = slots_of(left, config, plan.ranks)
    if not gone or ranks < plan.min_ranks:
        return job, plan.ranks
    _log(f"{', '.join(gone)} cannot be reached: {ranks} ranks on {', '.join(host.name for host in left)}")
    nodes = None if config.nodes is None else min(config.nodes, len(left))
    fewer = replace(config, hostfile=write_hosts(left, folder / "hosts"), nodes=nodes, ranks=ranks, min_ranks=None)
    return replace(job, config=fewer), ranks


@dataclass(frozen=True)
class Job:
    """A job as it is started, and started again if need be."""

    found: Found
    config: LaunchConfig
    program: Sequence[str]
    more: Mapping[str, str]
    node: NodeRank | None = None

    def variables(self, folder: Path, start: int, ranks: int) -> dict[str, str]:
        """The environment for the ranks of a start. folder: theirs."""
        own = {"FSDPX_RUN": str(folder), "FSDPX_RESTART": str(start), "FSDPX_EXPECT_SIZE": str(ranks)}
        meet = {} if self.node is None else self.node.variables(start, ranks)
        return {**own, **self.config.variables(), **self.more, **meet}

    def command(self, ranks: int) -> list[str]:
        if self.node is not None:
            if ranks != self.config.ranks:
                raise LaunchError("ranks of hosts that were started one by one can be neither more nor fewer")
            words = (*self.found.words, *self.node.words(ranks))
            return command(replace(self.found, words=words), self.config, ranks, self.program, ())
        names = {*self.variables(Path(), 0, ranks), *environment.alike()}
        return command(self.found, self.config, ranks, self.program, names)


def _place(config: LaunchConfig) -> Path:
    """Where a temporary folder is made: each host may have its own $TMPDIR, but all of them have the scripts here."""
    return Path(tempfile.gettempdir()) if config.hostfile is None and config.nodes is None else Path.cwd()


def _temporary(place: Path) -> Path:
    """A folder of this process. Folders of killed processes are removed."""
    owned = (file.parent for file in place.glob(f"{_PREFIX}*/{_OWNER}"))
    clear(owned, lambda left: not lives((safe_files.believed(left / _OWNER) or b"").decode(errors="replace")))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    safe_files.write(folder / _OWNER, owner())
    return folder


def _writable(folder: Path, option: str) -> Path:
    """The folder; LaunchError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise LaunchError(f"{option}={folder} cannot be written ({error.strerror}): name a folder that can") from None
    return folder


def _private(own: Path) -> Path:
    """The folder of a start, empty, which no other user can enter; LaunchError if another one has made it."""
    safe_files.remove(own)
    try:
        return safe_files.folder(own)
    except safe_files.Untrusted as error:
        raise LaunchError(f"{error}: name a --folder in which no other user can write") from None


def _look_for(program: Sequence[str]) -> None:
    """LaunchError if there is nothing to start, before any rank says so."""
    where, module, script = Path.cwd(), program[0] == "-m", program[1 if program[0] == "-m" else 0]
    if module and not _importable(script.partition(".")[0], where):
        raise LaunchError(f"there is no module {script!r} on Python's path or in {where}")
    if not module and not Path(script).exists():
        raise LaunchError(f"there is no script {script!r} in {where}")
    if not module and Path(script).is_dir() and not Path(script, "__main__.py").exists():
        raise LaunchError(f"{script!r} is no script but a folder, and has no __main__.py")


def _importable(package: str, where: Path) -> bool:
    """Whether a Python that is started in `where` finds it: there, or as this one does. Packages that are installed as
    links to their sources are on no path; a finder of their own knows them."""
    here = PathFinder.find_spec(package, [str(where)]) is not None
    return here or any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def _log(text: str) -> None:
    last_words(f"fsdpx run: {text}\n")  # a terminal that closes asks the job to stop, and shows nothing any more


def _start(job: Job, folder: Path, start: int, ranks: int, signals: _Signals, guests: Guests) -> Ending:
    """Run the job once."""
    own = _private(folder / f"start-{start}")
    logs = None if job.config.logs is None else Follower(job.config.logs.absolute())
    if logs is not None:
        ask(own, logs.folder)
    process = subprocess.Popen(
        job.command(ranks), env={**os.environ, **job.variables(own, start, ranks)}, stdin=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=end_with_parent if os.name == "posix" else None,
    )  # fmt: skip
    deaths = Deaths(own, ranks)
    listen = lambda: any(note.listens for note in read_notes(own).values())  # noqa: E731
    signals.wait_for(process, deaths.in_vain, lambda: guests.look(own), listen)
    deaths.close()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    notes = read_notes(own)
    if logs is not None:
        logs.close({note.rank: note.text() for note in notes.values()})
    flights = _flights(own, notes)
    waited = waiting(own) if status or deaths.in_vain.is_set() else set()
    asked = signals.received or deaths.in_vain.is_set()
    ending = Evidence(
        status, notes, flights, [*deaths.missed, *deaths.order] if waited else deaths.order, waited, late(own), ranks,
        job.config.elastic, job.found.words[0],
        "" if process.returncode >= 0 or asked else signal.Signals(-process.returncode).name,
    ).ending()  # fmt: skip
    if ending.kind in ("done", "preempted"):
        safe_files.remove(own)
    elif flights:
        safe_files.write(own / "actions.txt", log(flights))
    return ending


def _flights(folder: Path, notes: dict[int, Note]) -> dict[int, FlightRecord]:
    """The flight records by the rank that a process was started as; survivors of a death have other ranks later."""
    started = {(note.host, note.process): note.rank for note in notes.values()}
    found: dict[int, FlightRecord] = {}
    for flown in sorted(folder.glob("flight-*/"), key=lambda path: path.stat().st_mtime):
        for flight in read_all(flown).values():
            rank = started.get((flight.host, flight.process), flight.rank)
            found[rank] = replace(flight, rank=rank)
    return dict(sorted(found.items()))


class _Signals:
    """Handles a signal to `fsdpx run`: the ranks get USR1 and `grace` seconds to save, then TERM, then KILL. A second
    signal, or the first where no rank listens to USR1, sends TERM at once."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.received: signal.Signals | None = None
        self._times = 0
        self._before: list[SignalHandler] = []

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for name in ("INT", *STOP_SIGNALS):
                before = SignalHandler.of(signal.Signals[f"SIG{name}"])
                if not before.is_wanted():
                    self._before.append(before)
                    signal.signal(before.number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            self._before.pop().put_back(self._note)

    def wait(self, seconds: float) -> bool:
        """Sleep; True as soon as a signal was received."""
        end = time.monotonic() + seconds
        while not self.received and time.monotonic() < end:
            time.sleep(min(0.1, max(end - time.monotonic(), 0)))
        return self.received is not None

    def wait_for(
        self, job: subprocess.Popen[bytes], in_vain: threading.Event, meanwhile: Callable[[], object],
        listen: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Return when the job has ended and its process group is empty. in_vain: whether to end it now. meanwhile:
        called again and again while nothing is to end. listen: whether a rank would save at USR1."""
        stage, due = 0, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                job.wait(0.1)
                break
            now = time.monotonic()
            if stage < 2 and in_vain.is_set():
                job.terminate()
                stage, due = 2, now + _SECONDS_TO_END / 5
            elif stage == 0 and self.received:
                stage, due = 1, now
                if not hasattr(signal, "SIGUSR1"):  # a console of Windows has told the ranks of Ctrl-C itself
                    due += self.grace
                elif listen():
                    job.send_signal(signal.SIGUSR1)
                    due += self.grace
            elif stage == 1 and (now >= due or self._times > 1):
                job.terminate()
                stage, due = 2, now + _SECONDS_TO_END
            elif stage == 2 and now >= due:
                _kill(job)
                stage = 3
            elif stage == 0:
                meanwhile()
        _kill(job)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, self.received or signal.Signals(number)
        if first or signal.Signals(number).name != "SIGHUP":  # a shell hands on what the terminal has sent already
            self._times += 1


def _kill(job: subprocess.Popen[bytes]) -> None:
    """The launcher, and on POSIX all of its process group."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(job.pid, signal.SIGKILL)
        else:
            job.kill()
