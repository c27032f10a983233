"""`doctor`: check the environment and communication of all ranks of a job, and print warnings with remedies."""

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
from typing import NamedTuple

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.base import environment
from fsdpx.core.base.messages import format_bytes, format_count, format_ranks, wrap_for_terminal
from fsdpx.core.base.safe_files import can_write_folder
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import find_node_communicator, get_backend_name, parse_mpi_library_name
from fsdpx.core.trainer.initialize import init
from fsdpx.errors import ConfigError, install_hint
from fsdpx.ext.gpu import visible_devices
from fsdpx.ext.gpu.cupy_devices import list_gpu_pci_addresses as seen
from fsdpx.launch import info
from fsdpx.launch.launchers import try_launcher_and_explain_failure

__all__ = ["RankFacts", "doctor", "gather_health_report_of_ranks", "list_warnings"]

PACKAGES = ("numpy", "numba", "ml_dtypes", "mpi4py", "torch")
OPTIONAL = ("torch", "cupy")
"""Packages that are listed only if they are installed."""
SIZES = (8 << 10, 4 << 20)
"""Sizes in bytes of the all-reduces that are timed."""
BUSY_LOAD = 0.5
"""Load average per core above which timings are unreliable."""
MIN_SHARED_BYTES = 64 << 20
"""A warning is printed if fewer than this many bytes of shared memory are free. The value is Docker's default limit,
which the shared memory windows of a training run soon exceed."""


class RankFacts(NamedTuple):
    """Environment of one rank.

    Attributes
    ----------
    host : name of the rank's host
    versions : package name -> version
    cores : ids of the cores that the rank may run on
    threads : number of threads that compute kernels use
    free : free bytes of shared memory; None if there is no separate limit on shared memory
    cache, writable : path of the cache folder, and whether the rank can write to it
    gpus : GPUs that CuPy sees
    driver : whether the host has an NVIDIA driver
    load : load average of the host, divided by its number of cores
    """

    host: str
    versions: dict[str, str]
    cores: tuple[int, ...]
    threads: int
    free: int | None
    cache: str
    writable: bool
    gpus: tuple[str, ...]
    driver: bool
    load: float = 0.0


def doctor(args: argparse.Namespace) -> int:
    """Print the diagnosis of the job. Return 1 if an all-reduce gives a wrong sum or existing GPUs cannot be used,
    else 0. Collective."""
    with init() as comm:
        healthy, rows = gather_health_report_of_ranks(comm)
        if comm.rank == 0:
            width = max(len(name) for name, _ in rows)
            text = "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)
            print(json.dumps({"healthy": healthy, "found": rows}, indent=1) if args.json else wrap_for_terminal(text))
        return 0 if healthy else 1


def gather_health_report_of_ranks(comm: Communicator) -> tuple[bool, list[tuple[str, str]]]:
    """Examine all ranks of the job. Return whether the job is healthy, and the results as (topic, text) rows, with
    warnings last. Collective."""
    facts: list[RankFacts] = comm.all_gather_value(_collect_rank_facts())
    speed = [_time_and_check_all_reduce(comm, nbytes) for nbytes in SIZES]
    try:
        seats, why_not = visible_devices.gather_gpu_assignments(comm), ""
    except ConfigError as error:
        seats, why_not = [], str(error)
    threads = _get_mpi_thread_level()
    hosts = {one.host: [rank for rank, other in enumerate(facts) if other.host == one.host] for one in facts}
    rows = [
        ("versions", ", ".join(f"{name} {v}" for name, v in _get_versions(facts[0]).items())),
        ("MPI", _describe_mpi(threads)),
        ("launcher", info.describe_launcher()),
        ("ranks", f"{comm.size}: {', '.join(f'{format_ranks(ranks)} on {host}' for host, ranks in hosts.items())}"),
        ("cores", f"{_format_by_rank([len(one.cores) for one in facts])}; {_describe_core_binding(facts)}"),
        ("threads", _format_by_rank([one.threads for one in facts])),
        *(("GPU", f"rank {r}: GPU {seat.gpu} ({seat.bus}) of {seat.host}") for r, seat in enumerate(seats)),
        *([("GPUs", why_not if any(map(_has_host_gpu, facts)) else "none")] if why_not else []),
        ("host arrays", _describe_transport_within_host(comm)),
        *([("GPU arrays", _describe_gpu_transport(comm))] if seats else []),
        *(("all-reduce", text) for text, _ in speed),
    ]
    notes = list_warnings(facts, visible_devices.find_ranks_sharing_gpus(seats) if seats else [])
    if (
        environment.read_environment().launcher is None
        and comm.size == 1
        and (why := try_launcher_and_explain_failure())
    ):
        notes.append(why)
    healthy = all(right for _, right in speed) and not (why_not and any(one.gpus for one in facts))
    verdict = "all-reduces are right" if healthy else "NOT healthy: look at all-reduce and GPUs"
    result = ("result", f"{verdict}; {format_count(len(notes), 'warning') if notes else 'no warnings'}")
    return healthy, [result, *rows, *(("warning", text) for text in notes)]


def _format_by_rank(numbers: Sequence[int]) -> str:
    """Format a list that has one number per rank: "2 per rank" if all are equal, else "2, 4 by rank"."""
    return f"{numbers[0]} per rank" if len(set(numbers)) == 1 else f"{', '.join(map(str, numbers))} by rank"


def _has_host_gpu(facts: RankFacts) -> bool:
    """Return whether a rank's host has an NVIDIA GPU, even if the software to use it is missing."""
    return facts.driver or bool(facts.gpus)


def _get_versions(facts: RankFacts) -> dict[str, str]:
    """Return a dict from package name to version on the given rank, for fsdpx and the packages that it uses. Optional
    packages that are not installed are left out."""
    wanted = {name: v for name, v in facts.versions.items() if name not in OPTIONAL or v != "not installed"}
    return {"fsdpx": __version__, **wanted}


def _collect_rank_facts() -> RankFacts:
    """Collect the package versions, cores, GPUs, shared memory and load of this rank and its host."""
    settings = environment.read_environment()
    try:
        gpus = seen()
    except ConfigError:
        gpus = ()
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    versions = {name: info.describe_package_version(name) for name in PACKAGES} | {
        "cupy": re.split("[:,]", info.describe_cupy_and_count_gpus()[0])[0]
    }
    return RankFacts(
        platform.node(), versions, affinity, parallel.get_threads(),
        info.get_free_shared_memory_bytes(), str(settings.cache), can_write_folder(settings.cache), gpus,
        os.path.exists("/dev/nvidiactl"), _get_load_per_core(),
    )  # fmt: skip


def _time_and_check_all_reduce(comm: Communicator, nbytes: int) -> tuple[str, bool]:
    """Time an all-reduce of `nbytes` bytes, and check its result. Return a message with the median time on the slowest
    rank, and whether the sum is correct on all ranks. Collective."""
    wanted, times, right = comm.size * (comm.size + 1) / 2, [], True
    buf = np.empty(nbytes // 4, np.float32)
    for _ in range(7):
        buf[:] = comm.rank + 1
        comm.barrier().wait()
        begin = time.perf_counter()
        comm.all_reduce(buf, what="doctor").wait()
        times.append(time.perf_counter() - begin)
        right = right and bool((buf == wanted).all())
    everyone = comm.all_gather_value((statistics.median(times[2:]), right))
    wrong = [rank for rank, (_, good) in enumerate(everyone) if not good]
    verdict = f"the sum is WRONG on {format_ranks(wrong)}" if wrong else "the sum is right"
    return f"{format_bytes(nbytes)}: {max(seconds for seconds, _ in everyone) * 1e6:,.0f} us, {verdict}", not wrong


def _get_mpi_thread_level() -> str | None:
    """Return the thread support level of MPI, such as "MULTIPLE". Return None if the ranks do not use MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or get_backend_name() not in ("mpi", "node"):
        return None
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return next(name for name in names if getattr(mpi, f"THREAD_{name}") == mpi.Query_thread())


def _describe_mpi(threads: str | None) -> str:
    """Describe the MPI library that this process has loaded: its name, its thread level, and where it was found."""
    if threads is None:
        return f"not in use; Python would load {info.describe_mpi()}"
    path, wanted = visible_devices.find_loaded_mpi_library_path(), environment.get_requested_mpi_library()
    how = f"MPI4PY_LIBMPI={wanted}" if wanted else "where the system looks for libraries"
    # a library below /usr was installed by the system, not from a wheel
    wheels = {sys.prefix, sys.base_prefix} - {"/usr"}
    if not wanted and path is not None and path.startswith(tuple(wheels)):
        how = "a wheel in this environment"
    library = parse_mpi_library_name(sys.modules["mpi4py.MPI"].Get_library_version())
    return f"{library}, thread level {threads}; {path}: {how}"


def _describe_transport_within_host(comm: Communicator) -> str:
    """Describe how ranks on the same host exchange NumPy arrays: through shared memory or by messages. For messages,
    also say why shared memory is not used."""
    node, name = find_node_communicator(comm), get_backend_name()
    if name == "local":
        return "local: one rank by itself, or threads of fsdpx.spawn"
    if node is None:
        return f"{name}: messages only: one rank, FSDPX_NODE=0, or ranks that may die"
    if not node.is_sharing_useful:
        return f"{name}: messages only: no host has several ranks, or hosts have different numbers of them"
    hosts = "one host" if len(node.ranks_by_host) == 1 else f"each of {len(node.ranks_by_host)} hosts"
    return f"{name}: shared memory, {len(node.ranks_on_host)} ranks on {hosts}, {info.describe_shared_memory()}"


def _describe_gpu_transport(comm: Communicator) -> str:
    """Describe whether GPU arrays are passed to MPI directly or staged through the host, and how this was determined.
    The answer does not apply to backend='nccl'. Collective."""
    if get_backend_name() not in ("mpi", "node"):
        return "staged through the host"
    found = visible_devices.probe_gpu_awareness(environment.get_gpu_aware_mpi_setting()) if comm.rank == 0 else None
    aware = comm.all_gather_value(found)[0]
    return f"{'given to MPI' if aware.able else 'staged through the host'}: {'; '.join(aware.evidence)}"


def _get_load_per_core() -> float:
    """Return the one-minute load average divided by the number of cores, or 0 if the system does not report a load."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def list_warnings(facts: Sequence[RankFacts], sharing: Sequence[Sequence[int]]) -> list[str]:
    """Return a warning, with its remedy, for each likely problem. `sharing` lists groups of ranks that share a GPU."""
    notes = []
    for host in dict.fromkeys(one.host for one in facts):
        here = [one for one in facts if one.host == host]
        running, able = sum(one.threads for one in here), len({core for one in here for core in one.cores})
        if able and running > able:
            notes.append(f"{host}: {running} threads of {len(here)} ranks on {able} cores: set OMP_NUM_THREADS to "
                        f"{max(able // len(here), 1)}, or start at most {able} ranks")  # fmt: skip
        if (busy := max(one.load for one in here)) >= BUSY_LOAD:
            notes.append(f"{host}: {busy:.1f} processes per core want to run: times measured now are unreliable")
        free = here[0].free
        if free is not None and free < MIN_SHARED_BYTES and len(here) > 1:
            notes.append(
                f"{host}: {format_bytes(free)} of shared memory are free: docker run --shm-size=8g, or FSDPX_NODE=0"
            )
        if here[0].driver and not here[0].gpus:
            notes.append(f"{host} has an NVIDIA driver, but CuPy sees no GPU: {install_hint('cuda13')}, and look at "
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
    notes += [
        f"{format_ranks(ranks)} share a GPU: start one rank per GPU, or name them by device_map" for ranks in sharing
    ]
    return notes


def _describe_core_binding(facts: Sequence[RankFacts]) -> str:
    """Describe whether each rank has its own cores or shares them with other ranks of its host."""
    for host in dict.fromkeys(one.host for one in facts):
        sets = [set(one.cores) for one in facts if one.host == host]
        if len(sets) > 1 and sum(map(len, sets)) > len(set().union(*sets)):
            return "ranks of a host may run on the same cores"
    return "each rank has cores of its own"
