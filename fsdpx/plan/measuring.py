"""The machine that this runs on, measured in seconds: products, memory, what a kernel takes beside, and links."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from math import ceil, inf, log2
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx import nn, optim
from fsdpx.comm.communicator import Communicator, ReduceOp
from fsdpx.comm.local import single
from fsdpx.comm.opening import node_of
from fsdpx.nn.numeric import product
from fsdpx.plan.machine import Compute, Level, Machine
from fsdpx.plan.prediction import prepared

__all__ = ["machine_text", "measured"]

TIMES = 5
LARGE, SMALL = 768, 96
"""Rows of square matrices: products that are as quick as any, and such that are not."""
BLOCK = 1 << 24
"""Elements of float32 that no cache holds."""
SIZES = (8, 1 << 20)
"""Elements of float32 of a short and of a long all-reduce."""
LAYERS = (4, 16)


def measured(name: str, comm: Communicator) -> Machine:
    """The machine of these ranks, alike on all of them. Collective."""
    compute = _compute(comm)
    return Machine(name, _levels(comm, compute), compute)


def _seconds(call: Callable[[], Any], times: int = TIMES) -> float:
    call()
    found = []
    for _ in range(times):
        begin = perf_counter()
        call()
        found.append(perf_counter() - begin)
    return median(found)


def _slowest(comm: Communicator, seconds: float) -> float:
    """The mean over ranks, which compute at the same time and share the memory of their host."""
    return float(np.mean(comm.all_gather_plain(seconds)))


def _compute(comm: Communicator) -> Compute:
    flops, halves = {}, []
    for name in ("float32", "float64"):
        large, small = (_slowest(comm, _seconds(_product(n, name))) for n in (LARGE, SMALL))
        rate = 2 * (LARGE**3 - SMALL**3) / max(large - small, 1e-9)
        flops[name] = rate
        halves.append(max(small * rate - 2 * SMALL**3, 0.0))
    a, b = np.ones(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    memory = 2 * a.nbytes / _slowest(comm, _seconds(lambda: np.copyto(b, a)))
    bare = Compute(flops, memory, half=min(halves))
    launch, overhead = _beside(comm, bare)
    return Compute(flops, memory, half=min(halves), launch=launch, overhead=overhead)


def _product(n: int, name: str) -> Callable[[], Any]:
    a, b = np.ones((n, n), name), np.ones((n, n), name)
    return lambda: product(np, a, b)


def _beside(comm: Communicator, bare: Compute) -> tuple[float, float]:
    """Seconds of a kernel and of a step beside what is computed, from steps of small models on one rank."""
    found = []
    for layers in LAYERS:
        model = nn.Chain(*[one for _ in range(layers) for one in (nn.Linear(16, 16), nn.GELU())])
        trainer = model.as_distributed(
            loss=nn.MSE(), optimizer=optim.AdamW(), comm=single(), strategy="ddp", tune=False, group_bytes=0
        )
        x = np.ones((4, 16), np.float32)
        shape = ((4, 16), "float32")
        dry = prepared(model, (shape, shape), 1, False, group_bytes=0)
        one = Machine("one", (Level("host", 0.0, 1.0),), Compute(bare.flops, bare.memory, launch=1.0))
        kernels = round(dry.on(one).seconds)
        found.append((kernels, _slowest(comm, _seconds(partial(trainer.step, x, x), 4 * TIMES))))
        trainer.close()
    (few, quick), (many, slow) = found
    launch = max((slow - quick) / (many - few), 1e-7)
    return launch, max(quick - few * launch, 0.0)


def _levels(comm: Communicator, compute: Compute) -> tuple[Level, ...]:
    if comm.size == 1:  # no link to measure: ranks of a host read each other's memory
        return (Level("host", 2e-5, compute.memory / 4),)
    node = node_of(comm)
    hosts = len(node.machines) if node is not None else 1
    here = comm if hosts == 1 or node is None else comm.subgroup(node.machine)
    levels = [Level("host", *_link(here), ranks=here.size)] if here.size > 1 else []
    if hosts > 1 or not levels:
        levels.append(Level("system", *_link(comm)))
    return tuple(levels)


def _link(comm: Communicator) -> tuple[float, float]:
    """Latency and bytes per second of one rank, from all-reduces of all ranks at once, short and long."""
    seconds = []
    for elements in SIZES:
        array = np.zeros(elements, np.float32)
        comm.barrier()
        own = _seconds(partial(_reduce, comm, array), 4 * TIMES)
        seconds.append(max(comm.all_gather_plain(own)))
    short, long = seconds
    sent = 2 * 4 * SIZES[1] * (comm.size - 1) / comm.size
    return short / (2 * ceil(log2(comm.size))), sent / max(long - short, 1e-9)


def _reduce(comm: Communicator, array: np.ndarray) -> None:
    comm.all_reduce(array, ReduceOp.SUM).wait()


def machine_text(machine: Machine) -> str:
    """The file of a machine."""
    compute = machine.compute
    flops = ", ".join(f"{name} = {value:.4g}" for name, value in compute.flops.items())
    lines = [f"# Measured on {platform.node()}.", f'name = "{machine.name}"', "", "[compute]", f"flops = {{{flops}}}"]
    numbers = [one.name for one in fields(compute) if one.name not in ("flops", "gpu")]
    lines += [f"{key} = {getattr(compute, key):.4g}" for key in numbers if getattr(compute, key) is not None]
    lines += ["gpu = true"] * compute.gpu
    for level in machine.levels:
        lines += ["", "[[levels]]", f'name = "{level.name}"']
        lines += [f"ranks = {level.ranks:g}"] if level.ranks < float("inf") else []
        lines += [f"latency = {level.latency:.4g}", f"bandwidth = {level.bandwidth:.4g}"]
        lines += [f"contention = {level.contention:g}"] if level.contention else []
    if machine.disk is not None:
        lines += ["", "[disk]", *[f"{key} = {value:.4g}" for key, value in vars(machine.disk).items() if value < inf]]
    return "\n".join(lines) + "\n"
