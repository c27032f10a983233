"""The settings of a job for `fsdpx run` and `fsdpx.launch`, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdpx.errors import LaunchError
from fsdpx.words import knowing

__all__ = ["LaunchConfig"]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@knowing
@dataclass(frozen=True)
class LaunchConfig:
    """How many ranks are started where, and what follows when they end.

    The options of `fsdpx run` have the same names (`--max-restarts`), `per_node` is `--nproc-per-node`. LaunchError for
    impossible numbers.

    Parameters
    ----------
    ranks : number of ranks
    nodes : number of hosts: the first of the hostfile, or any of the allocation
    per_node : ranks per host, at most
    backend : "mpi", or "gloo": on this host, without any MPI (docs/backends.md; on several: torchrun)
    hostfile : names of hosts and how many ranks each takes, in the form of any launcher (docs/launching.md)
    mpiexec : the launcher's words, as in "srun --mpi=pmi2" (None: one that is found)
    elastic : deaths do not end the job (Open MPI's --with-ft ulfm)
    threads : of BLAS and kernels in each rank (None: the cores of a host are shared by its ranks)
    timeout : seconds that ranks wait in MPI's start for those that do not come (None: 60, or FSDPX_START_TIMEOUT)
    grace : seconds to save in after a signal
    max_restarts : number of further starts, at most
    min_ranks : fewest ranks of a further start (None: `ranks`, of an elastic job 1)
    backoff : seconds before the first further start; they double up to 60
    folder : where records of failed starts are kept (None: a temporary one)
    logs : a folder for what each rank prints, rank-0003.log, and how it ended, rank-0003.json; the launcher then
        prints the lines of all ranks with their numbers before them
    """

    ranks: int
    nodes: int | None = None
    per_node: int | None = None
    backend: str = "mpi"
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
        for name in ("hostfile", "folder", "logs"):  # text will do
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else Path(value))
        wrong = next(self._wrong(), None)
        if wrong is not None:
            raise LaunchError(wrong)

    @property
    def least(self) -> int:
        if self.min_ranks is not None:
            return self.min_ranks
        return 1 if self.elastic else self.ranks

    def spread(self, ranks: int) -> tuple[int, int] | None:
        """Hosts and ranks per host for this many ranks, None if neither was given."""
        if self.nodes is None and self.per_node is None:
            return None
        if self.per_node is not None:
            return math.ceil(ranks / self.per_node), self.per_node
        assert self.nodes is not None
        return min(self.nodes, ranks), math.ceil(ranks / self.nodes)

    def variables(self) -> dict[str, str]:
        """Settings that ranks get through their environment."""
        found = {} if self.timeout is None else {"FSDPX_START_TIMEOUT": f"{self.timeout:g}"}
        return found | ({} if self.threads is None else dict.fromkeys(_THREADS, str(self.threads)))

    def _wrong(self) -> Iterator[str]:
        for name in ("ranks", "nodes", "per_node", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value}: one or more is needed"
        if not 1 <= self.least <= self.ranks:
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
