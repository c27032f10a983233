"""The options of `fsdpx run` and `fsdpx.launch`, and the distribution of ranks over the hosts of a hostfile or an
allocation. Options are checked before anything is started."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.messages import format_count
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.errors import LaunchError

__all__ = [
    "HostSlots",
    "LaunchArgs",
    "LaunchConfig",
    "NodeRank",
    "assign_ranks_to_hosts",
    "count_ranks_with_slots",
    "find_default_rank_count",
    "read_hostfile",
    "require_resolvable_hosts",
    "write_hostfile",
]  # fmt: skip

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class LaunchConfig:
    """How many ranks a job starts, on which hosts, and when it is restarted.

    The options of `fsdpx run` are named like these parameters (`--max-restarts`), except that `per_node` is
    `--nproc-per-node`. Invalid values raise LaunchError.

    Parameters
    ----------
    ranks : number of ranks
    nodes : number of hosts to use: the first ones in the hostfile, or any hosts of the allocation
    per_node : maximum number of ranks per host
    backend : "mpi", or "gloo" to start ranks on this host without MPI (docs: backends). To use "gloo" on several hosts,
        call `fsdpx run --node-rank` on each
    hostfile : file with host names and the number of ranks for each, in the format of any supported launcher (docs:
        launching)
    mpiexec : command line of the launcher, such as "srun --mpi=pmi2" (if None, one is found automatically)
    elastic : keep the job running when ranks die (Open MPI's --with-ft ulfm)
    threads : threads per rank for BLAS and kernels (if None, the cores of a host divided by its ranks)
    timeout : seconds that ranks wait for each other while MPI starts (if None, FSDPX_START_TIMEOUT, or 60 if it is not
        set)
    grace : seconds that ranks are given to save a checkpoint after a signal
    max_restarts : maximum number of restarts
    min_ranks : minimum number of ranks with which a job is restarted (if None, `ranks`, or 1 for an elastic job)
    backoff : seconds before the first restart; doubled for each further restart, up to 60
    folder : where the records of failed attempts are kept (if None, a temporary folder)
    logs : folder for two files of each rank: its output, such as rank-0003.log, and a record of how the rank ended,
        such as rank-0003.json. With this option, the launcher prints the output lines of all ranks, each preceded by
        the rank number (if None, no files)
    """

    ranks: int
    nodes: int | None = None
    per_node: int | None = None
    backend: Literal["mpi", "gloo"] = "mpi"
    hostfile: Path | None = None
    mpiexec: str | None = None
    elastic: bool = False
    threads: int | None = None
    timeout: float | None = None
    grace: float = 60.0
    max_restarts: int = 3
    min_ranks: int | None = None
    backoff: float = 1.0
    folder: Path | None = None
    logs: Path | None = None

    def __post_init__(self) -> None:
        for name in ("hostfile", "folder", "logs"):  # callers may give these paths as str
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else safe_files.expanduser(value))
        wrong = next(self._iterate_option_errors(), None)
        if wrong is not None:
            raise LaunchError(wrong)

    @property
    def least_ranks(self) -> int:
        """Minimum number of ranks with which the job is restarted: `min_ranks`, or its default if not given."""
        if self.min_ranks is not None:
            return self.min_ranks
        return 1 if self.elastic else self.ranks

    def count_hosts_and_ranks_per_host(self, ranks: int) -> tuple[int, int] | None:
        """Return how many hosts the given number of ranks needs, and how many ranks each host gets.

        Parameters
        ----------
        ranks : number of ranks to place

        Returns
        -------
        tuple : (hosts, ranks per host), where the ranks per host are rounded up; None if neither `nodes` nor `per_node`
            is set
        """
        if self.nodes is None and self.per_node is None:
            return None
        if self.per_node is not None:
            return math.ceil(ranks / self.per_node), self.per_node
        assert self.nodes is not None
        return min(self.nodes, ranks), math.ceil(ranks / self.nodes)

    def make_environment(self) -> dict[str, str]:
        """Return the environment variables that pass the options `timeout` and `threads` to the ranks."""
        found = {} if self.timeout is None else {"FSDPX_START_TIMEOUT": f"{self.timeout:g}"}
        return found | ({} if self.threads is None else dict.fromkeys(_THREAD_VARIABLES, str(self.threads)))

    def _iterate_option_errors(self) -> Iterator[str]:
        """Yield an error message for each invalid option and for each invalid combination of options."""
        for name in ("ranks", "nodes", "per_node", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value}: one or more is needed"
        if not 1 <= self.least_ranks <= self.ranks:
            yield f"ranks={self.ranks} min_ranks={self.min_ranks}: 1 <= min_ranks <= ranks is needed"
        for name in ("max_restarts", "backoff", "grace"):
            if getattr(self, name) < 0:
                yield f"{name}={getattr(self, name)}: 0 or more is needed"
        if self.timeout is not None and self.timeout <= 0:
            yield f"timeout={self.timeout:g}: a positive number of seconds is needed"
        if self.backend not in ("mpi", "gloo"):
            yield f"backend={self.backend!r}: ranks are started for mpi or gloo"
        if self.backend == "gloo":
            unfit = [name for name in ("nodes", "per_node", "hostfile", "mpiexec") if getattr(self, name) is not None]
            if unfit:
                yield f"backend='gloo': ranks are started on this host, without MPI; leave {' and '.join(unfit)} out"
            if self.elastic:
                yield "backend='gloo': all ranks end when one dies; leave elastic out, or start them by MPI"
        if self.nodes and self.per_node and self.ranks > self.nodes * self.per_node:
            capacity = f"{self.nodes} hosts with {self.per_node} ranks each have room for {self.nodes * self.per_node}"
            yield f"ranks={self.ranks}: {capacity}; ask for fewer ranks, or more nodes or per_node"
        elif self.nodes and self.per_node and not self.hostfile and self.ranks <= (self.nodes - 1) * self.per_node:
            asked = f"nodes={self.nodes} with per_node={self.per_node} are {self.nodes * self.per_node}"
            yield f"ranks={self.ranks}: {asked}, and a host would have none; leave one of the three out"


class LaunchArgs(TypedDict, total=False):
    """The fields of `LaunchConfig` as keyword arguments of `fsdpx.launch`, for type checkers. Paths may be given as
    str."""

    ranks: int
    nodes: int | None
    per_node: int | None
    backend: Literal["mpi", "gloo"]
    hostfile: str | Path | None
    mpiexec: str | None
    elastic: bool
    threads: int | None
    timeout: float | None
    grace: float
    max_restarts: int
    min_ranks: int | None
    backoff: float
    folder: str | Path | None
    logs: str | Path | None


@dataclass(frozen=True)
class NodeRank:
    """Position of this host in a job without a common launcher: the user runs `fsdpx run --backend gloo` on each host,
    with the same options except for --node-rank.

    Parameters
    ----------
    nodes : number of hosts
    number : index of this host, from 0
    address : name or address of host 0, reachable from all other hosts
    port : a free port on host 0. Each restart uses the next port, so that its ranks cannot connect to ranks of the
        previous attempt
    """

    nodes: int
    number: int
    address: str
    port: int = 29500

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.nodes:
            raise LaunchError(f"--node-rank {self.number}: hosts are numbered from 0, those of --nodes {self.nodes}")
        if not self.address or any(char.isspace() for char in self.address):
            raise LaunchError(f"--master-addr {self.address!r} is no name or address of a host")
        if not 0 < self.port < 1 << 16:
            raise LaunchError(f"--master-port {self.port}: ports are from 1 to 65535")
        if not environment.read_secret():
            raise LaunchError(
                "FSDPX_SECRET is not set, by which ranks of several hosts prove that they belong together: make one "
                "(openssl rand -hex 32), and export the same on all hosts before fsdpx run"
            )

    @classmethod
    def from_options(
        cls, backend: str, nodes: int | None, number: int | None, address: str | None, port: int | None
    ) -> NodeRank | None:
        """Parse the options --nodes, --node-rank, --master-addr and --master-port of `fsdpx run`. Return None if a
        single launcher starts all ranks.

        Raise LaunchError if an option is missing or does not fit the backend."""
        given = {"--nodes": nodes, "--node-rank": number, "--master-addr": address}
        missing = [option for option, value in given.items() if value is None]
        asked = port is not None or any(value is not None for value in (number, address))
        if backend != "gloo":
            if asked:
                raise LaunchError(
                    "--node-rank, --master-addr and --master-port are for --backend gloo: MPI's launcher starts the "
                    "ranks of all hosts itself, see --hostfile"
                )
            return None
        if not asked and nodes is None:
            return None
        if nodes is None or number is None or address is None:
            raise LaunchError(
                f"--backend gloo on several hosts: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
                "missing. Start the same line on each host, with its own --node-rank from 0: fsdpx run --backend gloo "
                "--nodes 2 --node-rank 0 --master-addr HOST-0 --nproc-per-node 4 train.py"
            )
        return cls(nodes, number, address) if port is None else cls(nodes, number, address, port)

    def count_ranks_on_this_host(self, ranks: int, per_node: int | None) -> int:
        """Return how many of the job's `ranks` ranks this host starts. Raise LaunchError if they cannot be divided
        evenly among the hosts."""
        here, left = divmod(ranks, self.nodes)
        if left or (per_node is not None and per_node != here):
            each = "" if per_node is None else f" with --nproc-per-node {per_node}"
            raise LaunchError(
                f"-n {ranks} on --nodes {self.nodes}{each}: each host has the same number of ranks; -n is of the job"
            )
        return here

    def make_local_launcher_options(self, ranks: int) -> list[str]:
        """Return the options that pass the number of this host's first rank and the total number of ranks to the local
        launcher. `ranks` is the number of ranks per host."""
        return ["--first", str(self.number * ranks), "--of", str(self.nodes * ranks)]

    def make_rendezvous_environment(self, start: int, ranks: int) -> dict[str, str]:
        """Return the environment variables through which the ranks of all hosts find each other.

        `start` is the number of restarts so far, and `ranks` the number of ranks per host."""
        port = self.port + start
        if port >= 1 << 16:
            raise LaunchError(f"--master-port {self.port}: restart {start} would meet at port {port}; take a lower one")
        where = f"{environment.TCP_PREFIX}{self.address}:{port}"
        return {"FSDPX_STORE": where, "FSDPX_EXPECT_SIZE": str(self.nodes * ranks)}


MAX_HOSTFILE_BYTES = 10_000_000
"""Maximum size of a hostfile, in bytes."""
_HOST = re.compile(r"(?P<name>\w[\w.-]*)(?:(?::|\s+slots\s*=\s*|\s+)(?P<slots>\d+))?(?:\s+max[_-]slots\s*=\s*\d+)?")
_FORMS = "write one host in a line, as n1, n1:4, n1 slots=4 or n1 4"


@dataclass(frozen=True)
class HostSlots:
    """One host of a hostfile.

    Attributes
    ----------
    name : name of the host
    slots : maximum number of ranks on the host; None if the file does not say
    line : number of the first line that names the host
    """

    name: str
    slots: int | None
    line: int = 0


def read_hostfile(path: Path) -> list[HostSlots]:
    """Read a hostfile, and return its hosts in the order of the file. Raise LaunchError if a line does not describe a
    host.

    If several lines name the same host, their slots are added up. As in the node files of PBS, a line without a number
    then counts as one slot."""
    try:
        lines = safe_files.read_file(path, MAX_HOSTFILE_BYTES, ours=False).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the hostfile {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found: dict[str, HostSlots] = {}
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        match = _HOST.fullmatch(line)
        if line and (match is None or match["slots"] == "0"):
            raise LaunchError(f"{path}:{number}: {line!r} is no line of a hostfile: {_FORMS}")
        if match:
            known, slots = found.get(match["name"]), match["slots"] and int(match["slots"])
            if known is not None:
                slots = (known.slots or 1) + (slots or 1)
            found[match["name"]] = HostSlots(match["name"], slots or None, known.line if known else number)
    if not found:
        raise LaunchError(f"the hostfile {path} names no host: {_FORMS}")
    if any(host.slots for host in found.values()):
        return [HostSlots(host.name, host.slots or 1, host.line) for host in found.values()]
    return list(found.values())


def assign_ranks_to_hosts(hosts: Sequence[HostSlots], config: LaunchConfig, ranks: int) -> list[tuple[str, int]]:
    """Distribute ranks over hosts, filling the slots of each host in order. Return (host name, number of ranks) for
    each host that gets ranks. Raise LaunchError if there are more ranks than slots."""
    if config.nodes is not None and len(hosts) < config.nodes:
        raise LaunchError(f"nodes={config.nodes}: {config.hostfile} names {format_count(len(hosts), 'host')}")
    chosen = hosts[: config.nodes]
    evenly = config.per_node or -(-ranks // len(chosen))
    fits = [min(host.slots or evenly, config.per_node or ranks) for host in chosen]
    if sum(fits) < ranks:
        each = ", ".join(f"{host.name}:{slots}" for host, slots in zip(chosen, fits, strict=True))
        raise LaunchError(
            f"ranks={ranks}: {config.hostfile} has {format_count(sum(fits), 'slot')} on "
            f"{format_count(len(chosen), 'host')} "
            f"({each}); start fewer ranks, or name more hosts or slots"
        )
    shared, left = [], ranks
    for host, slots in zip(chosen, fits, strict=True):
        if left:
            shared.append((host.name, min(slots, left)))
            left -= shared[-1][1]
    return shared


def find_default_rank_count(
    nodes: int | None, per_node: int | None, hostfile: Path | None, threads: int | None
) -> tuple[int, str]:
    """Return the number of ranks of a job that is started without -n, and a phrase that says where this number comes
    from, such as "the 8 cores that this process may use". The number is derived from other options, a hostfile, the
    allocation, or the cores of this machine."""
    if hostfile is None and nodes is not None and per_node is not None:
        return nodes * per_node, "--nodes and --nproc-per-node"
    made = environment.find_hostfile_and_variable() if hostfile is None else (hostfile, "--hostfile")
    allocated = environment.get_allocated_ranks_and_variable() if hostfile is None else None
    if made is not None and allocated is None:
        hosts = read_hostfile(Path(made[0]))[:nodes]
        if per_node is None and hostfile is not None and not all(host.slots for host in hosts):
            raise LaunchError(f"{made[0]} does not say how many ranks a host takes: say -n or --nproc-per-node")
        return sum(min(host.slots or per_node or 1, per_node or host.slots or 1) for host in hosts), made[1]
    if per_node is not None and (nodes == 1 or environment.is_single_host_job()):
        return per_node, "--nproc-per-node on one host"
    if allocated is not None:
        return allocated
    if nodes is not None and nodes > 1:
        raise LaunchError(f"how many ranks on {nodes} hosts? Say -n or --nproc-per-node")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (threads or 1)), f"the {format_count(cores, 'core')} that this process may use"


def count_ranks_with_slots(hosts: Sequence[HostSlots], config: LaunchConfig, ranks: int) -> int:
    """Return how many of `ranks` ranks fit into the slots of the hosts. A host without a known number of slots takes
    any number of ranks."""
    most = config.per_node or ranks
    return min(sum(min(host.slots or most, most) for host in hosts[: config.nodes]), ranks)


def write_hostfile(hosts: Sequence[HostSlots], path: Path) -> Path:
    """Write a hostfile that `read_hostfile` can read, and return its path."""
    safe_files.write_file(
        path, "".join(f"{host.name}:{host.slots}\n" if host.slots else f"{host.name}\n" for host in hosts)
    )
    return path


def require_resolvable_hosts(hosts: Sequence[HostSlots], path: Path) -> None:
    """Raise LaunchError if a host name cannot be resolved. Without this check, a launcher might hang or print a long
    error message."""
    for host in hosts:
        try:
            socket.getaddrinfo(host.name, None)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "parts of a name have 1 to 63 letters"
            raise LaunchError(
                f"{path}:{host.line}: host {host.name!r} is unknown here ({why}): correct its name, or add "
                "it to /etc/hosts"
            ) from None
