"""The assignment of GPUs to ranks, and detection of GPU-aware MPI.

The MPI library's claim to be GPU-aware is only a hint, so a test sends GPU arrays. The test runs in a child job because
a library that does not accept GPU arrays crashes the process."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fsdpx.core.array.devices import DeviceMap
from fsdpx.core.base import environment
from fsdpx.core.comm import default_communicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import get_running_mpi
from fsdpx.core.comm.message_backend import find_outermost_with_attribute
from fsdpx.errors import ConfigError
from fsdpx.ext.gpu import cupy_devices as devices

__all__ = [
    "GpuAwareness",
    "RankGpu",
    "agree_on_gpu_awareness",
    "assign_and_select_gpus",
    "find_loaded_mpi_library_path",
    "find_ranks_sharing_gpus",
    "gather_gpu_assignments",
    "list_gpu_awareness_claims",
    "probe_gpu_awareness",
    "probe_gpu_transfer_in_child",
]

MODULE = "fsdpx.ext.gpu.visible_devices"
"""Name of this module, which the child job runs."""
PROBE_ELEMENTS = 1 << 18
PROBE_OUTPUT = "fsdpx: MPI has moved and added arrays of a GPU"
PROBE_TIMEOUT_SECONDS = 60.0
CUDA = 0  # value of MPIX_GPU_SUPPORT_CUDA


class GpuAwareness(NamedTuple):
    """Whether MPI is GPU-aware. If `able`, GPU arrays are passed to MPI; otherwise, they are copied through the host.
    `evidence` states the reasons as text."""

    able: bool
    evidence: tuple[str, ...]


def agree_on_gpu_awareness(world: Communicator) -> GpuAwareness | None:
    """Decide for all ranks whether GPU arrays are passed to MPI or copied through the host, and return the decision.
    Collective.

    The decision applies to the MPI communicator inside `world` and to groups split from it later. Returns None if
    there is no MPI. Raises ConfigError on all ranks if FSDPX_GPU_AWARE_MPI=1 and the test fails."""
    inner: Any = find_outermost_with_attribute(world, "takes_gpus")
    if inner is None:
        return None
    wanted = environment.get_gpu_aware_mpi_setting()
    found: GpuAwareness = world.all_gather_value(probe_gpu_awareness(wanted) if world.rank == 0 else None)[0]
    if wanted and not found.able:
        raise ConfigError(
            f"FSDPX_GPU_AWARE_MPI=1, but this MPI does not accept GPU arrays ({'; '.join(found.evidence)}): "
            "leave it out, then they go through the host"
        )
    inner.takes_gpus = found.able
    return found


def probe_gpu_awareness(wanted: bool | None) -> GpuAwareness:
    """Return whether the MPI library of this process accepts GPU arrays.

    If `wanted` is False, return False without a test. If `wanted` is True, run a test. If `wanted` is None, run a test
    only if the library claims to accept GPU arrays; otherwise, return False."""
    if wanted is False:
        return GpuAwareness(False, ("FSDPX_GPU_AWARE_MPI=0",))
    claimed = list_gpu_awareness_claims()
    if wanted is None and not any(yes for yes, _ in claimed):
        evidence = tuple(text for _, text in claimed)
        return GpuAwareness(False, evidence or ("the MPI library does not say whether it supports GPUs",))
    able, text = probe_gpu_transfer_in_child()
    return GpuAwareness(able, (*(text for _, text in claimed), text))


def list_gpu_awareness_claims() -> list[tuple[bool, str]]:
    """Query the loaded MPI library in several ways about support for GPU arrays. Return each answer as (whether the
    answer is yes, text)."""
    from mpi4py import MPI

    found, path = list[tuple[bool, str]](), find_loaded_mpi_library_path()
    if path is not None:
        library = ctypes.CDLL(path)  # reopened because mpi4py loads MPI without global symbols
        if (query := getattr(library, "MPIX_Query_cuda_support", None)) is not None:
            found.append((bool(query()), f"MPIX_Query_cuda_support() = {query()}"))
        elif (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:
            flag = ctypes.c_int(0)
            query(CUDA, ctypes.byref(flag))
            found.append((bool(flag.value), f"MPIX_GPU_query_support(CUDA) = {flag.value}"))
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None:
        found.append(("cuda" in kinds or "gpu" in kinds, f"mpi_memory_alloc_kinds = {kinds}"))
    return found


def find_loaded_mpi_library_path() -> str | None:
    """Return the path of the MPI library that this process has loaded, or None if it is unknown."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(None, 5)[-1] for line in lines if "/" in line)
    return next((path for path in paths if Path(path).name.startswith(("libmpi.", "libmpi_", "libmpich"))), None)


def probe_gpu_transfer_in_child(launcher: list[str] | None = None) -> tuple[bool, str]:
    """Run a child job that sends and reduces GPU arrays with MPI. Return (whether the job succeeded, text that
    describes the result).

    `launcher` is the command that starts the job. By default, this is mpiexec with two ranks, or no launcher if mpiexec
    is not found."""
    if launcher is None:
        beside = Path(sys.executable).with_name("mpiexec")
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        launcher = [] if found is None else [found, "-n", "2"]
    command = [*launcher, sys.executable, "-m", MODULE]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_SECONDS,
            env=environment.copy_without_rank_variables(),
        )
    except subprocess.TimeoutExpired:
        return False, f"the probe did not end within {PROBE_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return False, f"the probe could not be started ({error})"
    for line in done.stdout.splitlines():
        if PROBE_OUTPUT in line and done.returncode == 0:
            return True, f"a probe of{line.rpartition(',')[2]} moved and added arrays of a GPU"
    if done.returncode == 0:
        return False, "the probe got other numbers than were sent"
    reasons = [line for line in done.stderr.splitlines() if "Error" in line or "Exception" in line]
    return False, f"the probe ended with status {done.returncode}" + (f" ({reasons[-1].strip()})" if reasons else "")


class RankGpu(NamedTuple):
    """The GPU of a rank: its index `gpu` among the GPUs visible to the process, and its PCI address `bus`."""

    host: str
    local_rank: int
    gpu: int
    bus: str


class _RankFacts(NamedTuple):
    """Information that a rank sends to the other ranks before GPUs are assigned.

    `known` is the rank's index, counted from 0, among all ranks on its host. This index is needed only if some ranks of
    the job are not in the communicator. `why` explains why the rank cannot use a GPU."""

    host: str
    process: int
    known: int | None
    buses: tuple[str, ...]
    device_map: DeviceMap
    why: str = ""


def assign_and_select_gpus(world: Communicator, device_map: DeviceMap = None) -> list[RankGpu]:
    """Assign a GPU to each rank, select the GPU of this rank, and return the GPUs of all ranks. Collective.

    The GPUs of a host are assigned to its processes in the order of their ranks in `world`, which is MPI's order. If
    `world` has only some of the ranks, the launcher's local ranks are used instead. Ranks that run as threads of a
    process share its GPU. This function also decides how arrays are passed to MPI. Raises ConfigError on all ranks if
    any rank has no GPU."""
    found = gather_gpu_assignments(world, device_map)
    devices.select_gpu(found[world.rank].gpu)
    agree_on_gpu_awareness(world)
    return found


def gather_gpu_assignments(world: Communicator, device_map: DeviceMap = None) -> list[RankGpu]:
    """Return the GPUs that `assign_and_select_gpus` would assign to all ranks, without selecting any. Collective."""
    here, process = platform.node(), os.getpid()
    try:
        mine = _RankFacts(
            here, process, _find_host_local_rank(world.size), devices.list_gpu_pci_addresses(), device_map
        )
    except ConfigError as error:
        mine = _RankFacts(here, process, None, (), device_map, str(error))
    facts = world.all_gather_value(mine)
    return [_choose_gpu_of_rank(rank, facts) for rank in range(len(facts))]


def find_ranks_sharing_gpus(rank_gpus: list[RankGpu]) -> list[list[int]]:
    """Return groups of ranks that share a GPU. The list is empty if each rank has its own GPU."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, rank_gpu in enumerate(rank_gpus):
        groups.setdefault((rank_gpu.host, rank_gpu.bus), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _choose_gpu_of_rank(rank: int, facts: list[_RankFacts]) -> RankGpu:
    own = facts[rank]
    who = f"rank {rank} on {own.host}"
    if own.why:
        raise ConfigError(f"{who}: {own.why}")
    here = {one.process: one.known for one in facts if one.host == own.host}
    known = list(here.values())
    complete = None not in known and len({*known}) == len(known)
    local_rank = here[own.process] if complete else list(here).index(own.process)
    assert local_rank is not None
    try:
        gpu = devices.choose_gpu_number(local_rank, len(own.buses), own.device_map)
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    return RankGpu(own.host, local_rank, gpu, own.buses[gpu])


def _find_host_local_rank(size: int) -> int | None:
    """Return the index of this rank, counted from 0, among all ranks on its host. Return None if the index is unknown
    or not needed.

    The index is not needed if the communicator, which has `size` ranks, includes all ranks of the job."""
    opened = default_communicator.get_default()
    if opened is not None and not opened.of_thread and opened.comm.size > size:
        return opened.local_rank
    settings, mpi = environment.read_environment(), get_running_mpi()
    if settings.launcher is None:
        return None
    everyone = (settings.expected_size or 0) if mpi is None else mpi.COMM_WORLD.Get_size()
    return settings.launcher.local_rank if everyone > size else None


def run_transfer_probe() -> int:
    """Run the test of GPU-aware MPI and return its exit status. This is the main function of the child job.

    Prints `PROBE_OUTPUT` on success. An MPI library that does not accept GPU arrays may end the process."""
    from mpi4py import MPI

    comm, cupy = MPI.COMM_WORLD, devices.import_cupy()
    devices.select_gpu(comm.rank % len(devices.list_gpu_pci_addresses()))
    mine = cupy.full(PROBE_ELEMENTS, comm.rank + 1.0, dtype="float32")
    theirs, total = cupy.zeros_like(mine), mine[:1024].copy()
    cupy.cuda.get_current_stream().synchronize()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Sendrecv(mine, right, recvbuf=theirs, source=left)
    comm.Allreduce(MPI.IN_PLACE, total)
    want = (left + 1.0, comm.size * (comm.size + 1) / 2)
    good = bool((theirs == want[0]).all()) and bool((total == want[1]).all())
    if comm.allreduce(good, MPI.LAND) and comm.rank == 0:
        print(f"{PROBE_OUTPUT}, {comm.size} ranks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_transfer_probe())
