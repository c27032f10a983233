"""`doctor`: asks all ranks of a job what each has and which transports connect them, and tries the one in use."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx import environment
from fsdpx.array import parallel
from fsdpx.comm.carrier import CHUNK
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.gpu import devices
from fsdpx.comm.gpu.nccl import missing
from fsdpx.comm.mpi.clock import ranks_text
from fsdpx.comm.opening import backend_name, node_of
from fsdpx.cuda.devices import gpus as seen
from fsdpx.errors import ConfigError
from fsdpx.facade.functional import init
from fsdpx.launch import deaths
from fsdpx.state import tuning
from fsdpx.state.tuning import bytes_text
from fsdpx.version import __version__

__all__ = ["RankFacts", "Way", "diagnose", "doctor", "warnings_of", "ways_of"]

PACKAGES = ("numpy", "numba", "ml_dtypes", "mpi4py", "cupy", "torch")
SIZES = (8 << 10, 4 << 20)
"""Bytes of the all-reduces that are timed."""
LITTLE = 64 << 20
"""Bytes of free shared memory that windows for training soon exceed: Docker's default."""


class RankFacts(NamedTuple):
    """A rank's description of itself. cores: those it may run on. free: bytes of shared memory. locked, files: bytes it
    may lock, files it may open; None: no limit. gpus: that CuPy sees. driver: whether the host has NVIDIA's. load:
    processes that want to run, per core of the host."""

    host: str
    versions: dict[str, str]
    cores: tuple[int, ...]
    threads: int
    free: int | None
    locked: int | None
    files: int | None
    cache: str
    writable: bool
    gpus: tuple[str, ...]
    driver: bool
    load: float = 0.0


class Way(NamedTuple):
    """A transport. carries: arrays of the "host" or of a "gpu". able: whether it works here. why: the evidence."""

    name: str
    carries: str
    able: bool
    why: str
    chosen: bool = False


def doctor(args: argparse.Namespace) -> int:
    """The exit status: 0, or 1 where sums are wrong or GPUs that are there cannot be used. Collective."""
    with init() as comm:
        report = diagnose(comm)
        if comm.rank == 0:
            print(json.dumps(report, indent=1) if args.json else _text(report))
        return 0 if report["healthy"] else 1


def diagnose(comm: Communicator) -> dict[str, Any]:
    """The findings by topic, as `--json` prints them. Collective."""
    facts: list[RankFacts] = comm.all_gather_plain(_rank_facts())
    speed = [_timed(comm, nbytes) for nbytes in SIZES]
    mpi = _mpi(comm)
    seats, why_not = _gpus(comm)
    awareness = _awareness(comm, seats is not None) if mpi else None
    sharing = [] if seats is None else devices.shared(seats)
    ways, warnings = ways_of(comm, facts, mpi, awareness, sharing), warnings_of(facts, mpi, sharing)
    hosts = list(dict.fromkeys(one.host for one in facts))
    return {
        "healthy": not any(row["wrong_ranks"] for row in speed) and not (why_not and any(one.gpus for one in facts)),
        "versions": {"fsdpx": __version__, "python": platform.python_version(), **facts[0].versions},
        "mpi": mpi,
        "launcher": deaths.launcher(),
        "ranks": comm.size,
        "hosts": {host: [rank for rank, one in enumerate(facts) if one.host == host] for host in hosts},
        "binding": _binding(facts),
        "cores": [list(one.cores) for one in facts],
        "threads": [one.threads for one in facts],
        "devices": why_not or [seat._asdict() for seat in seats or []],
        "gpu_awareness": None if awareness is None else awareness._asdict(),
        "limits": [
            {"host": one.host, "shared_memory_free": one.free, "locked_memory": one.locked, "open_files": one.files,
             "cache": one.cache, "cache_writable": one.writable}
            for one in (next(o for o in facts if o.host == host) for host in hosts)
        ],
        "transports": [way._asdict() for way in ways],
        "all_reduce": speed,
        "warnings": warnings,
    }  # fmt: skip


def _rank_facts() -> RankFacts:
    settings = environment.read()
    try:
        gpus = seen()
    except ConfigError:
        gpus = ()
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return RankFacts(
        platform.node(), {name: _version(name) for name in PACKAGES}, affinity, parallel.threads(),
        deaths.free_shared(), *_limits(), str(settings.cache), _writable(settings), gpus,
        os.path.exists("/dev/nvidiactl"), tuning.load(),
    )  # fmt: skip


def _version(name: str) -> str:
    if name != "cupy":
        return deaths.version(name)
    return re.split("[:,]", deaths.cupy()[0])[0]


def _limits() -> tuple[int | None, int | None]:
    """Bytes that may be locked in memory, and open files; None: no limit."""
    import resource

    numbers = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)]
    locked, files = (None if number == resource.RLIM_INFINITY else number for number in numbers)
    return locked, files


def _writable(settings: environment.Environment) -> bool:
    """The cache, or the first folder above it that is there."""
    folder = next(f for f in (settings.cache, *settings.cache.parents) if f.exists())
    return os.access(folder, os.W_OK)


def _timed(comm: Communicator, nbytes: int) -> dict[str, Any]:
    """The median time of an all-reduce, the slowest rank's, and whether the sum is right on all ranks."""
    wanted, times, right = comm.size * (comm.size + 1) / 2, [], True
    buf = np.empty(nbytes // 4, np.float32)
    for _ in range(7):
        buf[:] = comm.rank + 1
        comm.barrier().wait()
        begin = time.perf_counter()
        comm.all_reduce(buf, what="doctor").wait()
        times.append(time.perf_counter() - begin)
        right = right and bool((buf == wanted).all())
    everyone = comm.all_gather_plain((statistics.median(times[2:]), right))
    return {
        "bytes": nbytes, "seconds": max(seconds for seconds, _ in everyone),
        "wrong_ranks": [rank for rank, (_, good) in enumerate(everyone) if not good],
    }  # fmt: skip


def _mpi(comm: Communicator) -> dict[str, Any] | None:
    """The library that this process has loaded; None: ranks are not of MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or backend_name() not in ("mpi", "node"):
        return None
    path, wanted = devices.library_path(), environment.mpi_library()
    if wanted is not None:
        how = f"MPI4PY_LIBMPI={wanted}"
    elif path is not None and path.startswith((sys.prefix, sys.base_prefix)):
        how = "a wheel in this environment"
    else:
        how = "where the system looks for libraries"
    levels = {getattr(mpi, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    return {
        "library": deaths.first_line(mpi.Get_library_version()),
        "standard": ".".join(map(str, mpi.Get_version())),
        "path": path,
        "found": how,
        "threads": levels[mpi.Query_thread()],
    }


def _gpus(comm: Communicator) -> tuple[list[devices.Seat] | None, str]:
    """The GPU that each rank would take, or why there is none."""
    try:
        return devices.seats(comm), ""
    except ConfigError as error:
        return None, str(error)


def _awareness(comm: Communicator, gpus: bool) -> devices.Awareness:
    """Whether MPI takes arrays of GPUs; where there are none, what it says of itself."""
    found = None
    if comm.rank == 0:
        notes = tuple(text for _, text in devices.claims())
        found = devices.awareness(environment.gpu_aware_mpi()) if gpus else devices.Awareness(False, ("no GPU", *notes))
    return comm.all_gather_plain(found)[0]


def ways_of(
    comm: Communicator, facts: Sequence[RankFacts], mpi: dict[str, Any] | None, awareness: devices.Awareness | None,
    sharing: Sequence[Sequence[int]],
) -> list[Way]:  # fmt: skip
    """The transports with their evidence; for each kind of array one is chosen, the one that `distribute` takes."""
    node, name = node_of(comm), backend_name()
    no_mpi = "MPI did not start these ranks: mpiexec -n 2 python -m fsdpx doctor"
    if node is None:
        node_why = "one rank" if comm.size == 1 else "FSDPX_NODE=0, ranks may die, or ranks are threads"
    elif not node.shares:
        node_why = "no host has several ranks, or hosts have different numbers of them: messages only"
    else:
        hosts = "one host" if len(node.machines) == 1 else f"each of {len(node.machines)} hosts"
        node_why = f"{len(node.machine)} ranks on {hosts}, {deaths.shared()}"
    windows = node is not None and node.shares
    ways = [
        Way("node", "host", windows, node_why, windows),
        Way("mpi", "host", mpi is not None, mpi["library"] if mpi else no_mpi, mpi is not None and not windows),
        Way("gloo", "host", name == "gloo", f"PyTorch {deaths.version('torch')}", name == "gloo" and not windows),
        Way("local", "host", name == "local", "one rank by itself, or threads of fsdpx.spawn", name == "local"),
    ]
    gpus = all(one.gpus for one in facts)
    direct = awareness is not None and awareness.able
    evidence = "; ".join(awareness.evidence) if awareness else no_mpi
    ways.append(Way("MPI on GPU memory", "gpu", gpus and direct, evidence, gpus and direct))
    ways.append(Way("nccl", "gpu", *_nccl(gpus, mpi is not None, sharing)))
    staged = f"always possible; above {bytes_text(CHUNK)} in chunks" if gpus else _no_gpu(facts)
    ways.append(Way("staged through the host", "gpu", gpus, staged, gpus and not direct))
    return ways


def _nccl(gpus: bool, mpi: bool, sharing: Sequence[Sequence[int]]) -> tuple[bool, str]:
    if not gpus:
        return False, "no GPU"
    if (why := missing()) is not None:
        return False, why
    if sharing:
        return False, f"{ranks_text(sharing[0])} share a GPU, and NCCL takes one rank per GPU"
    return mpi, "taken with backend='nccl'" if mpi else "its ranks meet through MPI, which did not start these"


def _no_gpu(facts: Sequence[RankFacts]) -> str:
    ranks = [rank for rank, one in enumerate(facts) if not one.gpus]
    return f"no GPU on {ranks_text(ranks)}: CuPy {deaths.cupy()[0]}"


def warnings_of(facts: Sequence[RankFacts], mpi: dict[str, Any] | None, sharing: Sequence[Sequence[int]]) -> list[str]:
    """Likely problems, each with its remedy."""
    notes = []
    for host in dict.fromkeys(one.host for one in facts):
        here = [one for one in facts if one.host == host]
        running, able = sum(one.threads for one in here), len({core for one in here for core in one.cores})
        if able and running > able:
            notes.append(f"{host}: {running} threads of {len(here)} ranks on {able} cores: set OMP_NUM_THREADS to "
                        f"{max(able // len(here), 1)}, or start at most {able} ranks")  # fmt: skip
        if (busy := max(one.load for one in here)) >= tuning.BUSY:
            notes.append(f"{host}: {busy:.1f} processes per core want to run: what was timed here is not to be trusted")
        free = here[0].free
        if free is not None and free < LITTLE and len(here) > 1:
            notes.append(
                f"{host}: {bytes_text(free)} of shared memory are free: docker run --shm-size=8g, or FSDPX_NODE=0"
            )
        if here[0].driver and not here[0].gpus:
            notes.append(f"{host} has an NVIDIA driver, but CuPy sees no GPU: pip install 'fsdpx[cuda13]', and look at "
                        "CUDA_VISIBLE_DEVICES")  # fmt: skip
    for rank, one in enumerate(facts):
        if one.versions != facts[0].versions:
            names = ", ".join(f"{n} {v}" for n, v in one.versions.items() if v != facts[0].versions[n])
            notes.append(f"rank {rank} on {one.host} has {names}, rank 0 has other versions: use one environment")
        if not one.writable:
            notes.append(
                f"rank {rank} on {one.host} cannot write {one.cache}: set FSDPX_CACHE, else each job compiles again"
            )
    if facts[0].versions["numba"] == "not installed":
        notes.append("Numba is not installed: kernels are several times slower; pip install numba")
    if mpi is not None and mpi["threads"] != "MULTIPLE":
        notes.append(f"MPI's thread level is {mpi['threads']}: transfers move between actions only (progress='loop')")
    notes += [
        f"{ranks_text(ranks)} share a GPU: start one rank per GPU, or name them by device_map" for ranks in sharing
    ]
    return notes


def _binding(facts: Sequence[RankFacts]) -> str:
    """Whether the launcher gave each rank cores of its own."""
    for host in dict.fromkeys(one.host for one in facts):
        sets = [set(one.cores) for one in facts if one.host == host]
        if len(sets) > 1 and sum(map(len, sets)) > len(set().union(*sets)):
            return "ranks of a host may run on the same cores"
    return "each rank has cores of its own"


def _text(report: dict[str, Any]) -> str:
    """For people: the findings, the transports with the chosen one, the test, the warnings."""
    mpi = report["mpi"]
    rows = [("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items()))]
    if mpi is None:
        rows.append(("MPI", f"not in use; Python would load {deaths.mpi()}"))
    else:
        rows.append(("MPI", f"{mpi['library']} (MPI {mpi['standard']}), thread level {mpi['threads']}"))
        rows.append(("", f"{mpi['path']}: {mpi['found']}"))
    rows.append(("launcher", report["launcher"]))
    hosts = ", ".join(f"{ranks_text(ranks)} on {host}" for host, ranks in report["hosts"].items())
    rows.append(("ranks", f"{report['ranks']}: {hosts}"))
    threads = ", ".join(map(str, report["threads"]))
    rows.append(("cores", f"{', '.join(str(len(own)) for own in report['cores'])} by rank; {report['binding']}"))
    rows.append(("threads", f"{threads} by rank"))
    if isinstance(report["devices"], str):
        rows.append(("GPUs", report["devices"]))
    rows += [("GPU", f"rank {r}: GPU {s['gpu']} ({s['bus']}) of {s['host']}") for r, s in _seats(report)]
    for limits in report["limits"]:
        names = ("shared_memory_free", "locked_memory", "open_files")
        free, locked, files = ("no limit" if limits[name] is None else limits[name] for name in names)
        texts = [n if isinstance(n, str) else bytes_text(n) for n in (free, locked)]
        rows.append(
            ("limits", f"{limits['host']}: shared memory free {texts[0]}, locked memory {texts[1]}, {files} files")
        )
    for way in report["transports"]:
        mark = "chosen" if way["chosen"] else "yes" if way["able"] else "no"
        rows.append((f"{way['carries']} arrays", f"{mark:6}  {way['name']}: {way['why']}"))
    for row in report["all_reduce"]:
        good = "the sum is right" if not row["wrong_ranks"] else f"the sum is WRONG on {ranks_text(row['wrong_ranks'])}"
        rows.append(("all-reduce", f"{bytes_text(row['bytes'])}: {row['seconds'] * 1e6:,.0f} us, {good}"))
    rows += [("warning", text) for text in report["warnings"]]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}".rstrip() for name, text in rows)


def _seats(report: dict[str, Any]) -> list[tuple[int, Any]]:
    return [] if isinstance(report["devices"], str) else list(enumerate(report["devices"]))
