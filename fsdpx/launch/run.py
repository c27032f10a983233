"""`fsdpx run`: start a job with the MPI launcher of the environment, and restart it after failures."""

from __future__ import annotations

import argparse
import os
import re
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
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.dataclass import dataclass, fields, replace
from fsdpx.core.base.hooks import STOP_SIGNALS, SignalHandler
from fsdpx.core.base.messages import flush_and_write_stderr, format_count
from fsdpx.core.comm.mpi.start import (
    find_waiting_ranks,
    has_start_timed_out,
    identify_process,
    is_process_alive,
    remove_dead_folders,
)
from fsdpx.errors import LaunchError
from fsdpx.ext.watch.flight_recorder import FlightRecord, format_records, read_all_records
from fsdpx.launch.batch import find_cores_per_node, make_batch_script
from fsdpx.launch.elastic_join import JoinRequests, request_more_ranks
from fsdpx.launch.exit_status import DeathRecorder, Evidence, JobEnding, RestartPlan, record_and_decide_restart
from fsdpx.launch.launchers import FoundLauncher, find_launcher_to_use, list_answering_hosts, make_command
from fsdpx.launch.options import (
    LaunchConfig,
    NodeRank,
    count_ranks_with_slots,
    find_default_rank_count,
    read_hostfile,
    require_resolvable_hosts,
    write_hostfile,
)
from fsdpx.launch.rank import request_kill_on_parent_death
from fsdpx.launch.rank_status import LogFollower, RankStatus, read_rank_statuses, write_log_folder_request

__all__ = ["LaunchedJob", "main", "run_job"]

_END_TIMEOUT_SECONDS = 5.0
_JOIN_TIMEOUT_SECONDS = 60.0
_FOLDER_PREFIX, _OWNER_FILE = "fsdpx-run-", "owner"


def main(args: argparse.Namespace) -> int:
    """Run the requested job, or only print its command line (--dry-run) or batch script (--print-batch). Return the
    exit status."""
    given = {one.name: getattr(args, one.name) for one in fields(LaunchConfig)}
    node = NodeRank.from_options(args.backend, args.nodes, args.node_rank, args.master_addr, args.master_port)
    ranks = _choose_and_print_rank_count(args)
    if node is not None:
        unfit = [word for word in ("min_ranks", "print_batch", "join") if getattr(args, word) is not None]
        if unfit:
            option = unfit[0].replace("_", "-")
            raise LaunchError(f"--{option} with --node-rank: each host starts the same ranks again; leave it out")
        given |= {"nodes": None, "per_node": None}
        ranks = node.count_ranks_on_this_host(ranks, args.per_node)
    config = LaunchConfig(**given | {"ranks": ranks})
    if args.join is not None:
        answer = request_more_ranks(args.join, config.ranks, config.timeout or _JOIN_TIMEOUT_SECONDS)
        print(f"fsdpx run: {args.join}: {answer}")
        return 0
    if args.script is None:
        raise LaunchError("which script? fsdpx run -n 4 train.py, or -m and a module")
    program = [*(["-m"] if args.module else []), args.script, *args.args]
    variables = {"FSDPX_TUNE": "again"} if args.retune else {}
    if args.print_batch:
        _require_existing_program(program)
        print(text := make_batch_script(args.print_batch, config, program, find_cores_per_node(), variables), end="")
        if found := re.search(r"^# (.* more than a node has\.)\n#( .*)", text, re.M):
            _log_line(found[1] + found[2])
    elif args.dry_run:
        folder = config.folder or Path(tempfile.gettempdir(), f"{_FOLDER_PREFIX}{secrets.token_hex(8)}")
        job = LaunchedJob(find_launcher_to_use(config), config, program, variables, node)
        named = [
            f"{name}={shlex.quote(value)}"
            for name, value in job.make_environment(folder / "start-0", 0, config.ranks).items()
        ]
        print(*named, shlex.join(job.make_command(config.ranks)), sep=" \\\n  " if sys.stdout.isatty() else " ")
    else:
        return run_job(config, program, variables, node).status
    return 0


def _choose_and_print_rank_count(args: argparse.Namespace) -> int:
    """Return the number of ranks given by -n. Without -n, return a default derived from the allocation or from this
    machine, and print the default and its origin."""
    if args.ranks is not None:
        return int(args.ranks)
    elsewhere = (args.print_batch and (args.nodes is None or args.per_node is None)) or args.join is not None
    if elsewhere:
        raise LaunchError("how many ranks? -n 4; a batch file also takes --nodes and --nproc-per-node")
    ranks, source = find_default_rank_count(args.nodes, args.per_node, args.hostfile, args.threads)
    _log_line(f"{format_count(ranks, 'rank')}, by {source}")
    return ranks


def run_job(
    config: LaunchConfig, program: Sequence[str], variables: Mapping[str, str] | None = None,
    node: NodeRank | None = None,
) -> JobEnding:  # fmt: skip
    """Run a job, and restart it after failures, as far as `config` allows. Return how the last attempt ended.

    `program` are the command-line arguments of Python, such as ["train.py", "--fast"] or ["-m", "train"]. `variables`
    are additional environment variables of the ranks. `node` is this host's position among the hosts if each host has
    its own launcher; `config` then counts only the ranks of this host."""
    plan = RestartPlan(config.ranks, config.least_ranks, config.max_restarts, config.backoff)
    job = LaunchedJob(find_launcher_to_use(config), config, program, variables or {}, node)
    _require_existing_program(program)
    job.make_command(config.ranks)  # raises an error if the options cannot work, before any file is written
    if config.hostfile is not None:
        require_resolvable_hosts(read_hostfile(config.hostfile), config.hostfile)
    folder = (
        _make_temporary_folder_and_remove_dead(_choose_temporary_parent_folder(config))
        if config.folder is None
        else _create_and_require_writable(config.folder.absolute(), "folder")
    )
    if config.logs is not None:
        _create_and_require_writable(config.logs.absolute(), "logs")
    guests = JoinRequests(folder, lambda more: job.make_command(plan.ranks + more))
    with _SignalForwarder(config.grace) as signals:
        while True:
            here, ranks = _choose_job_and_rank_count_of_attempt(job, plan, folder)
            ending = _run_job_once(here, folder, len(plan.endings), ranks, signals, guests)
            if signals.received and ending.kind not in ("done", "preempted"):
                ending = replace(ending, text=f"{ending.text}; it was asked to stop by {signals.received.name}")
            elif ending.kind == "preempted" and guests.accepted_ranks and not signals.received:
                plan.ranks += (came := guests.pop_accepted_rank_count())
                ending = replace(ending, kind="joined", text=f"all have saved, for {came} more to join")
            reason, seconds = record_and_decide_restart(plan, ending)
            if seconds is None or signals.received:
                break
            restart = f"restart {plan.restart_count + 1} of {plan.max_restarts} in {seconds:g} s"
            _log_line(f"{ending.text}; {'they go on' if ending.kind == 'joined' else restart}: {reason}")
            if signals.sleep_until_signal_or_timeout(seconds):
                break
    guests.refuse_open_requests()
    if ending.kind != "done":
        kept = "" if ending.kind == "preempted" else f". Records: {folder}"
        _log_line(f"{ending.text}{'' if seconds is not None or reason == ending.kind else f'; {reason}'}{kept}")
    if config.folder is None and ending.kind in ("done", "preempted"):
        safe_files.remove_user_owned_folder(folder)
    # later jobs remove old folders only if they contain an owner file; without this file, the records are kept
    (folder / _OWNER_FILE).unlink(missing_ok=True)
    return ending


def _choose_job_and_rank_count_of_attempt(job: LaunchedJob, plan: RestartPlan, folder: Path) -> tuple[LaunchedJob, int]:
    """Return the job and the number of ranks for the next attempt.

    A restart uses only the hosts of the hostfile that still answer, provided that they have slots for at least
    `min_ranks` ranks. Otherwise it uses all hosts."""
    config = job.config
    if config.hostfile is None or not plan.endings:
        return job, plan.ranks
    hosts = read_hostfile(config.hostfile)
    left = list_answering_hosts(job.found, hosts)
    gone = [host.name for host in hosts if host not in left]
    ranks = count_ranks_with_slots(left, config, plan.ranks)
    if not gone or ranks < plan.min_ranks:
        return job, plan.ranks
    names = ", ".join(host.name for host in left)
    _log_line(f"{', '.join(gone)} cannot be reached: {format_count(ranks, 'rank')} on {names}")
    nodes = None if config.nodes is None else min(config.nodes, len(left))
    fewer = replace(config, hostfile=write_hostfile(left, folder / "hosts"), nodes=nodes, ranks=ranks, min_ranks=None)
    return replace(job, config=fewer), ranks


@dataclass(frozen=True)
class LaunchedJob:
    """A job and its launcher. The job can be started repeatedly.

    Attributes
    ----------
    found : the launcher
    config : options of the job
    program : command-line arguments of Python
    more : additional environment variables of the ranks
    node : position of this host among all hosts, if each host has its own launcher
    """

    found: FoundLauncher
    config: LaunchConfig
    program: Sequence[str]
    more: Mapping[str, str]
    node: NodeRank | None = None

    def make_environment(self, folder: Path, start: int, ranks: int) -> dict[str, str]:
        """Return the environment variables of the ranks. `folder` is where the ranks leave their records, and `start`
        is the number of restarts so far."""
        own = {"FSDPX_RUN": str(folder), "FSDPX_RESTART": str(start), "FSDPX_EXPECT_SIZE": str(ranks)}
        meet = {} if self.node is None else self.node.make_rendezvous_environment(start, ranks)
        return {**own, **self.config.make_environment(), **self.more, **meet}

    def make_command(self, ranks: int) -> list[str]:
        """Return the command line that starts the job on `ranks` ranks. Raise LaunchError if each host has its own
        launcher and the number of ranks differs from the configured one."""
        if self.node is not None:
            if ranks != self.config.ranks:
                raise LaunchError("ranks of hosts that were started one by one can be neither more nor fewer")
            words = (*self.found.words, *self.node.make_local_launcher_options(ranks))
            return make_command(replace(self.found, words=words), self.config, ranks, self.program, ())
        names = {*self.make_environment(Path(), 0, ranks), *environment.list_shared_variables()}
        return make_command(self.found, self.config, ranks, self.program, names)


def _choose_temporary_parent_folder(config: LaunchConfig) -> Path:
    """Return the folder in which to create a temporary folder. For a job on several hosts, it is the working folder,
    which all hosts can see, whereas $TMPDIR may differ between hosts."""
    return Path(tempfile.gettempdir()) if config.hostfile is None and config.nodes is None else Path.cwd()


def _make_temporary_folder_and_remove_dead(parent: Path) -> Path:
    """Return a new temporary folder that this process owns. Remove the temporary folders of killed processes."""

    def is_abandoned(left: Path) -> bool:
        owner = safe_files.read_if_trusted(left / _OWNER_FILE) or b""
        return not is_process_alive(owner.decode(errors="replace"))

    remove_dead_folders((file.parent for file in parent.glob(f"{_FOLDER_PREFIX}*/{_OWNER_FILE}")), is_abandoned)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
    safe_files.write_file(folder / _OWNER_FILE, identify_process())
    return folder


def _create_and_require_writable(folder: Path, option: str) -> Path:
    """Create the folder if necessary, and return it. If it is not writable, raise a LaunchError that names `option`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise LaunchError(f"{option}={folder} cannot be written ({error.strerror}): name a folder that can") from None
    return folder


def _recreate_private_folder(own: Path) -> Path:
    """Create an empty folder, which only this user can access, for one attempt to run the job. Raise LaunchError if
    another user has already created the folder."""
    safe_files.remove_user_owned_folder(own)
    try:
        return safe_files.make_folder(own)
    except safe_files.Untrusted as error:
        raise LaunchError(f"{error}: name a --folder in which no other user can write") from None


def _require_existing_program(program: Sequence[str]) -> None:
    """Raise LaunchError if the script or module does not exist. This is checked before ranks are started, because each
    of them would fail."""
    where, module, script = Path.cwd(), program[0] == "-m", program[1 if program[0] == "-m" else 0]
    if module and not _is_importable(script.partition(".")[0], where):
        raise LaunchError(f"there is no module {script!r} on Python's path or in {where}")
    if not module and not Path(script).exists():
        raise LaunchError(f"there is no script {script!r} in {where}")
    if not module and Path(script).is_dir() and not Path(script, "__main__.py").exists():
        raise LaunchError(f"{script!r} is no script but a folder, and has no __main__.py")


def _is_importable(package: str, where: Path) -> bool:
    """Return whether a Python process started in the folder `where` can import the package.

    The result is True if the package is in that folder, or if the current process can find the package. All finders in
    sys.meta_path are asked, because a package that is installed in editable mode may not be on sys.path."""
    here = PathFinder.find_spec(package, [str(where)]) is not None
    return here or any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def _log_line(text: str) -> None:
    """Print a line of text to stderr, preceded by "fsdpx run:"."""
    flush_and_write_stderr(f"fsdpx run: {text}\n")  # never raises, even if the terminal was closed


def _run_job_once(
    job: LaunchedJob, folder: Path, start: int, ranks: int, signals: _SignalForwarder, guests: JoinRequests
) -> JobEnding:
    """Start the job once, wait until it ends, and return how it ended.

    `start` is the number of restarts so far, `signals` forwards signals to the ranks, and `guests` handles requests to
    add ranks."""
    own = _recreate_private_folder(folder / f"start-{start}")
    logs = None if job.config.logs is None else LogFollower(job.config.logs.absolute())
    if logs is not None:
        write_log_folder_request(own, logs.folder)
    process = subprocess.Popen(
        job.make_command(ranks), env={**os.environ, **job.make_environment(own, start, ranks)},
        stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=request_kill_on_parent_death if os.name == "posix" else None,
    )  # fmt: skip
    deaths = DeathRecorder(own, ranks)
    listen = lambda: any(note.listens for note in read_rank_statuses(own).values())  # noqa: E731
    signals.wait_for_job(process, deaths.in_vain, lambda: guests.answer_and_request_save(own), listen)
    deaths.close()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    notes = read_rank_statuses(own)
    if deaths.launcher_hangs:  # then the launcher's status tells only that it was killed
        status = next((note.status for note in notes.values() if note.status), 0)
        _log_line(f"all ranks have ended, but the launcher, {job.found.words[0]}, has not: it was killed")
    if logs is not None:
        logs.stop_and_write_rank_statuses({note.rank: note.to_json() for note in notes.values()})
    flights = _read_flight_records(own, notes)
    waited = find_waiting_ranks(own) if status or deaths.in_vain.is_set() else set()
    asked = signals.received or deaths.in_vain.is_set()
    ending = Evidence(
        status, notes, flights, [*deaths.missed, *deaths.order] if waited else deaths.order, waited,
        has_start_timed_out(own), ranks, job.config.elastic, job.found.words[0],
        "" if process.returncode >= 0 or asked else signal.Signals(-process.returncode).name,
    ).decide_ending()  # fmt: skip
    if ending.kind in ("done", "preempted"):
        safe_files.remove_user_owned_folder(own)
    elif flights:
        safe_files.write_file(own / "actions.txt", format_records(flights))
    return ending


def _read_flight_records(folder: Path, notes: dict[int, RankStatus]) -> dict[int, FlightRecord]:
    """Return the flight records (logs of the last actions) of all ranks, as a dict keyed by rank. The keys are the
    ranks that the processes had at the start. After a death, the surviving processes get new ranks, which are not used
    here."""
    started = {(note.host, note.process): note.rank for note in notes.values()}
    found: dict[int, FlightRecord] = {}
    for flown in sorted(folder.glob("flight-*/"), key=lambda path: path.stat().st_mtime):
        for flight in read_all_records(flown).values():
            rank = started.get((flight.host, flight.process), flight.rank)
            found[rank] = replace(flight, rank=rank)
    return dict(sorted(found.items()))


class _SignalForwarder:
    """Handles signals to `fsdpx run`: sends SIGUSR1 to the ranks, gives them `grace` seconds to save a checkpoint, then
    sends SIGTERM, and finally SIGKILL.

    SIGTERM is sent at once after a second signal, or if no rank handles SIGUSR1."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.received: signal.Signals | None = None
        self._times = 0
        self._before: list[SignalHandler] = []

    def __enter__(self) -> _SignalForwarder:
        if threading.current_thread() is threading.main_thread():
            for name in ("INT", *STOP_SIGNALS):
                before = SignalHandler.from_signal(signal.Signals[f"SIG{name}"])
                if not before.is_needed_by_program():
                    self._before.append(before)
                    signal.signal(before.number, self._record_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            self._before.pop().reinstall_unless_replaced(self._record_signal)

    def sleep_until_signal_or_timeout(self, seconds: float) -> bool:
        """Sleep until a signal is received, but at most `seconds` seconds. Return whether one was received."""
        end = time.monotonic() + seconds
        while not self.received and time.monotonic() < end:
            time.sleep(min(0.1, max(end - time.monotonic(), 0)))
        return self.received is not None

    def wait_for_job(
        self, job: subprocess.Popen[bytes], in_vain: threading.Event, meanwhile: Callable[[], object],
        listen: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Forward signals to the job until the job has ended, and finally kill any remaining processes of the job's
        process group.

        The job is ended at once when the event `in_vain` is set. The function `meanwhile` is called repeatedly while
        the job is running and has received no signal. The function `listen` returns whether a rank saves a checkpoint
        when it gets SIGUSR1."""
        stage, due = 0, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                job.wait(0.1)
                break
            now = time.monotonic()
            if stage < 2 and in_vain.is_set():
                job.terminate()
                stage, due = 2, now + _END_TIMEOUT_SECONDS / 5
            elif stage == 0 and self.received:
                stage, due = 1, now
                if not hasattr(signal, "SIGUSR1"):  # on Windows, the console itself sends Ctrl-C to the ranks
                    due += self.grace
                elif listen():
                    job.send_signal(signal.SIGUSR1)
                    due += self.grace
            elif stage == 1 and (now >= due or self._times > 1):
                job.terminate()
                stage, due = 2, now + _END_TIMEOUT_SECONDS
            elif stage == 2 and now >= due:
                _kill_process_group(job)
                stage = 3
            elif stage == 0:
                meanwhile()
        _kill_process_group(job)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, self.received or signal.Signals(number)
        # both the terminal and the shell may send SIGHUP, so a second SIGHUP is not counted
        if first or signal.Signals(number).name != "SIGHUP":
            self._times += 1


def _kill_process_group(job: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and, on POSIX systems, its entire process group."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(job.pid, signal.SIGKILL)
        else:
            job.kill()
