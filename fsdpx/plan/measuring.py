"""Measures the speed of this machine, as a basis for predictions: the speed of matrix products, memory, kernels and
their overhead, the network and the disk."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import pairwise
from math import ceil, inf, log2
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx import nn, optim
from fsdpx.core.array import shapes
from fsdpx.core.array.cores import count_threads_per_rank, count_usable_cores, set_threads_per_rank
from fsdpx.core.array.kernels import relu
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.shapes.flop_counter import WorkCount, counting_work
from fsdpx.core.base.messages import ProgressCallback
from fsdpx.core.comm.communicator import Communicator, ReduceOp
from fsdpx.core.comm.init import find_node_communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.ext.gpu.cupy_devices import import_cupy, list_gpu_pci_addresses
from fsdpx.ext.offload.disk import get_or_measure_disk_rates
from fsdpx.nn.gradient_accumulation import matmul_in_dtype_of_first
from fsdpx.plan import probes
from fsdpx.plan.kernels import LONG, SHORT, WEIGHTS, KernelRates, count_weight_bytes, locate_product_in_rate_table
from fsdpx.plan.machine import Compute, DiskSpeed, Machine, NetworkLevel
from fsdpx.plan.prediction import dry_run_one_rank_per_group, predict_from_dry_runs

__all__ = ["format_machine_file", "measure_this_machine"]

ROUNDS, ROUND_SECONDS, SHORT_ROUND_SECONDS = 5, 0.1, 0.01
"""Each timing consists of `ROUNDS` rounds of at least `ROUND_SECONDS`. If many kernels are timed one by one, each round
takes at least `SHORT_ROUND_SECONDS`."""
KERNELS = ("float32", "bf16")
"""Formats in which kernels are timed one by one. The rates in other formats are derived from these rates (see
`KernelRates`)."""
ALL_REDUCE_ELEMENTS = (8, 1 << 20)
"""Numbers of float32 elements of a short and of a long all-reduce."""
LAYER_COUNTS = (4, 16)


def measure_this_machine(
    name: str, comm: Communicator, device: str = "cpu", count: ProgressCallback = lambda done: None
) -> Machine:
    """Measure the machine that these ranks run on. The result is identical on all ranks. Collective.

    `device` says whether ranks compute on cores ("cpu") or on GPUs ("cuda"). To report progress, `count` is called with
    the number of timings so far."""
    of = Processors() if device == "cpu" else Gpus()
    of.count = count
    # measure with as many threads as a training job uses
    set_threads_per_rank(comm.all_gather_value(platform.node()).count(platform.node()))
    compute, known = _measure_compute(comm, of), ("compute", "links")[: 1 + (comm.size > 1)]
    return Machine(name, _measure_network_levels(comm, of, compute), compute, _measure_disk_on_rank0(comm), known)


def _measure_disk_on_rank0(comm: Communicator) -> DiskSpeed | None:
    """Measure the disk of the working folder on rank 0, and return its speed on all ranks. Return None if the speed
    cannot be measured. Collective."""
    rates, node = get_or_measure_disk_rates(Path.cwd(), None) if comm.rank == 0 else None, find_node_communicator(comm)
    hosts = 1 if node is None else len(node.ranks_by_host)
    own = None if rates is None else (rates.written, rates.read, rates.written * hosts)
    found = comm.all_gather_value(own)[0]
    return None if found is None else DiskSpeed(*found)


class Processors:
    """Sizes and formats for measurements on CPU cores.

    Attributes
    ----------
    formats : number formats whose matrix products are timed
    basis : format in which small matrix products are timed, to determine `Compute.half`
    large : size of square matrices whose products reach the peak rate
    small : size of square matrices whose products do not reach the peak rate
    block : number of float32 elements of an array that does not fit into the caches
    """

    gpu, xp, timings = False, np, 0
    count: ProgressCallback = staticmethod(lambda done: None)
    capacity: float | None = None
    formats, basis = ("float32", "float64", "bf16", "float16"), "float32"
    large, small, block = 768, 96, 1 << 24

    def synchronize_device(self) -> None:
        """Wait until all calls have finished on the device. On a CPU there is nothing to wait for."""


class Gpus(Processors):
    """Array sizes and number formats for measurements on the current GPU. Calls run asynchronously, so measurements
    must synchronize the device."""

    gpu, basis = True, "bf16"
    large, small, block = 8192, 512, 1 << 28

    def __init__(self) -> None:
        list_gpu_pci_addresses()
        self.xp = import_cupy()
        self.capacity = float(self.xp.cuda.runtime.memGetInfo()[1])

    def synchronize_device(self) -> None:
        self.xp.cuda.Device().synchronize()


def _measure_mean_call_seconds_over_ranks(
    comm: Communicator, call: Callable[[], Any], device: Processors, round_seconds: float | None = None
) -> float:
    """Return the time of one call in seconds, averaged over ranks. Collective.

    Each round of calls ends with a barrier, so that ranks that share a core all wait for the slowest rank, as they do
    in a step. The time of a round is counted from the end of the previous round, in order to include the delay of ranks
    that are still asleep when other ranks begin."""
    device.timings += 1
    device.count(device.timings)
    call()
    first = min(comm.all_gather_value(_measure_total_time_of_calls(call, device, 1)))
    calls = ceil((ROUND_SECONDS if round_seconds is None else round_seconds) / first)
    comm.barrier().wait()
    ends = [perf_counter()]
    for _ in range(ROUNDS):
        _measure_total_time_of_calls(call, device, calls)
        comm.barrier().wait()
        ends.append(perf_counter())
    own = median(after - before for before, after in pairwise(ends))
    return float(np.mean(comm.all_gather_value(own))) / calls


def _measure_total_time_of_calls(call: Callable[[], Any], device: Processors, calls: int) -> float:
    """Run `call()` `calls` times, and return the total time in seconds until the device has finished the last call."""
    device.synchronize_device()
    begin = perf_counter()
    for _ in range(calls):
        call()
    device.synchronize_device()
    return perf_counter() - begin


def _measure_compute(comm: Communicator, device: Processors) -> Compute:
    """Measure the compute speed, memory and overheads of one rank. Collective."""
    flops, extra_seconds = {}, {}
    for name in device.formats:
        products = (_make_matmul_call(device, n, name) for n in (device.large, device.small))
        large, small = (_measure_mean_call_seconds_over_ranks(comm, call, device) for call in products)
        rate = 2 * (device.large**3 - device.small**3) / max(large - small, 1e-9)
        flops[name], extra_seconds[name] = rate, max(small - 2 * device.small**3 / rate, 0.0)
    a, b = device.xp.ones(device.block, np.float32), device.xp.empty(device.block, np.float32)
    memory = 2 * a.nbytes / _measure_mean_call_seconds_over_ranks(comm, lambda: device.xp.copyto(b, a), device)
    half = extra_seconds[device.basis] * max(flops.values())
    known = {"flops": flops, "memory": memory, "half": half, "gpu": device.gpu, "capacity": device.capacity}
    here = comm.all_gather_value(platform.node()).count(platform.node())
    known["cores"] = 1.0 if device.gpu else min(count_threads_per_rank(here), count_usable_cores() / here)
    launch, overhead = _measure_kernel_and_step_overhead(comm, device, Compute(**known))
    kernels = KernelRates() if device.gpu else _measure_kernel_rates(comm, device)
    return Compute(**known, launch=launch, overhead=overhead, kernels=kernels)


def _measure_kernel_rates(comm: Communicator, device: Processors) -> KernelRates:
    """Time each kernel, and return the rates. The overhead of a call is excluded, because `Compute.launch` accounts
    for it. Collective."""
    passes, products = {}, {}
    nothing = device.xp.zeros(1, np.float32)
    call_overhead = _measure_mean_call_seconds_over_ranks(
        comm, lambda: relu(device.xp, nothing), device, SHORT_ROUND_SECONDS
    )

    def time_kernel(call: Callable[[], Any]) -> float:
        seconds = _measure_mean_call_seconds_over_ranks(comm, call, device, SHORT_ROUND_SECONDS)
        return max(seconds - call_overhead, seconds / 4)

    for name in KERNELS:
        own: dict[str, list[float]] = {}
        for nbytes in (SHORT, LONG):
            sums: dict[str, tuple[float, float]] = {}
            for work, call in _iterate_calls_with_work_counts(
                probes.make_calls_of_all_memory_bound_kernels(device.xp, name, nbytes),
                probes.make_calls_of_all_memory_bound_kernels(shapes, name, nbytes),
            ):
                (one,) = work.passes
                moved, seconds = sums.get(one.kernel, (0.0, 0.0))
                sums[one.kernel] = moved + one.nbytes, seconds + time_kernel(call)
            for kernel, (moved, seconds) in sums.items():
                own.setdefault(kernel, []).append(moved / seconds)
        passes[name] = own
        grids: dict[str, list[tuple[float, ...]]] = {}
        for work, call in _iterate_calls_with_work_counts(
            probes.iterate_matmul_calls(device.xp, name), probes.iterate_matmul_calls(shapes, name)
        ):
            # a convolution has one product per window offset; the one with the most FLOP represents them all
            most = max(work.products, key=lambda one: one.flops)
            grids.setdefault(most.kernel, []).append(
                (*locate_product_in_rate_table(most), work.flops / time_kernel(call))
            )
        products[name] = grids
    known, name = KernelRates({}, products), KERNELS[0]
    for work, call in _iterate_calls_with_work_counts(
        probes.iterate_weight_heavy_convolution_calls(device.xp, name),
        probes.iterate_weight_heavy_convolution_calls(shapes, name),
    ):
        (kernel,) = {one.kernel for one in work.products}
        whole, nbytes = time_kernel(call), sum(count_weight_bytes(one) * times for one, times in work.products.items())
        rest = sum((known.compute_product_seconds(one, name) or 0.0) * times for one, times in work.products.items())
        passes[name][WEIGHTS + kernel] = [nbytes / max(whole - rest, whole / 4)] * 2
    return KernelRates(passes, products)


def _iterate_calls_with_work_counts(
    calls: Iterable[Callable[[], Any]], dry: Iterable[Callable[[], Any]]
) -> Iterator[tuple[WorkCount, Callable[[], Any]]]:
    """Yield (work, call) for each call in `calls`; the caller times the call. `dry` contains the same calls on
    shape-only arrays; they are run to count the work."""
    for call, shaped in zip(calls, dry, strict=True):
        with counting_work() as work:
            shaped()
        yield work, call


def _make_matmul_call(device: Processors, n: int, name: str) -> Callable[[], Any]:
    a, b = (device.xp.ones((n, n), parse_dtype(name)) for _ in range(2))
    return lambda: matmul_in_dtype_of_first(device.xp, a, b)


def _measure_kernel_and_step_overhead(comm: Communicator, device: Processors, bare: Compute) -> tuple[float, float]:
    """Return the overhead of one kernel and of one step in seconds. Both overheads are fitted to the step times of two
    small models on one rank."""
    found = []
    for layers in LAYER_COUNTS:
        model = nn.Sequential(*[one for _ in range(layers) for one in (nn.Linear(16, 16), nn.GELU())])
        trainer = model.as_distributed(
            loss=nn.MSELoss(), optimizer=optim.AdamW(), comm=make_single_rank_communicator(), strategy="ddp",
            tune=False, group_bytes=0, device="cuda" if device.gpu else "cpu",
        )  # fmt: skip
        x = device.xp.ones((4, 16), np.float32)
        shape = ((4, 16), "float32")
        dry = dry_run_one_rank_per_group(model, (shape, shape), 1, device.gpu, group_bytes=0)
        one = Machine(
            "one", (NetworkLevel("host", 0.0, 1.0),), Compute(bare.flops, bare.memory, launch=1.0, gpu=device.gpu)
        )
        kernels = round(predict_from_dry_runs(dry, one).seconds)
        found.append((kernels, _measure_mean_call_seconds_over_ranks(comm, partial(trainer.step, x, x), device)))
        trainer.close()
    (few, quick), (many, slow) = found
    launch = max((slow - quick) / (many - few), 1e-7)
    return launch, max(quick - few * launch, 0.0)


def _measure_network_levels(comm: Communicator, device: Processors, compute: Compute) -> tuple[NetworkLevel, ...]:
    """Measure the network between the ranks of a host, and the network between all hosts. Return one level for each of
    these networks. Collective."""
    # with one rank, no link can be measured; estimate the link from the memory speed, because ranks on a host
    # communicate through memory
    if comm.size == 1:
        return (NetworkLevel("host", 2e-5, compute.memory / 4),)
    node = find_node_communicator(comm)
    hosts = len(node.ranks_by_host) if node is not None else 1
    here = comm if hosts == 1 or node is None else comm.subgroup(node.ranks_on_host)
    levels: list[NetworkLevel] = []
    if here.size > 1:
        levels.append(NetworkLevel("host", *_measure_latency_and_bandwidth(here, device), ranks=here.size))
    if hosts > 1 or not levels:
        levels.append(NetworkLevel("system", *_measure_latency_and_bandwidth(comm, device)))
    return tuple(levels)


def _measure_latency_and_bandwidth(comm: Communicator, device: Processors) -> tuple[float, float]:
    """Return the latency in seconds, and the bandwidth of one rank in bytes per second. Both are fitted to the times
    of a short and a long all-reduce over all ranks. Collective."""
    seconds = []
    for elements in ALL_REDUCE_ELEMENTS:
        array = device.xp.zeros(elements, np.float32)
        seconds.append(_measure_mean_call_seconds_over_ranks(comm, partial(_all_reduce_and_wait, comm, array), device))
    short, long = seconds
    sent = 2 * 4 * ALL_REDUCE_ELEMENTS[1] * (comm.size - 1) / comm.size
    return short / (2 * ceil(log2(comm.size))), sent / max(long - short, 1e-9)


def _all_reduce_and_wait(comm: Communicator, array: Any) -> None:
    comm.all_reduce(array, ReduceOp.SUM).wait()


def format_machine_file(machine: Machine) -> str:
    """Return the text of a machine.toml file that describes the machine."""
    compute = machine.compute
    flops = ", ".join(f"{name} = {value:.4g}" for name, value in compute.flops.items())
    lines = [f"# Measured on {platform.node()}.", f'name = "{machine.name}"']
    lines += [] if machine.measured is None else [f"measured = {json.dumps(machine.measured)}"]
    lines += ["", "[compute]", f"flops = {{{flops}}}"]
    numbers = [one.name for one in fields(compute) if one.name not in ("flops", "gpu", "kernels")]
    lines += [f"{key} = {getattr(compute, key):.4g}" for key in numbers if getattr(compute, key) is not None]
    lines += ["gpu = true"] * compute.gpu
    for level in machine.levels:
        lines += ["", "[[levels]]", f'name = "{level.name}"']
        lines += [f"ranks = {level.ranks:g}"] if level.ranks < float("inf") else []
        lines += [f"latency = {level.latency:.4g}", f"bandwidth = {level.bandwidth:.4g}"]
        lines += [f"contention = {level.contention:g}"] if level.contention else []
    if machine.disk is not None:
        lines += ["", "[disk]", *[f"{key} = {value:.4g}" for key, value in vars(machine.disk).items() if value < inf]]
    return "\n".join([*lines, *_iterate_kernel_rate_toml_lines(compute.kernels)]) + "\n"


def _iterate_kernel_rate_toml_lines(rates: KernelRates) -> Iterator[str]:
    """Yield the TOML lines of the [kernels] tables: bytes per second of short and long calls, and grids of FLOP per
    second."""
    for name, passes in rates.passes.items():
        yield from ("", f"[kernels.passes.{name}]")
        yield from (f'"{kernel}" = [{", ".join(f"{rate:.3g}" for rate in two)}]' for kernel, two in passes.items())
    for name, products in rates.products.items():
        yield from ("", f"[kernels.products.{name}]")
        for kernel, rows in products.items():
            each = ", ".join(f"[{', '.join(f'{n:g}' for n in row[:-1])}, {row[-1]:.3g}]" for row in rows)
            yield f'"{kernel}" = [{each}]'
