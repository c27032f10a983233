"""The time model: how long computing and communication take on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import ceil, inf, log2, prod
from typing import NamedTuple

from fsdpx.core.array.shapes.flop_counter import KernelPass, ProductCount, WorkCount
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.mesh import AXES, Mesh
from fsdpx.errors import ConfigError
from fsdpx.plan.costing import ActionCost
from fsdpx.plan.machine import Compute, DiskSpeed, Machine, NetworkLevel

__all__ = ["MeshOnMachine", "StepTimes", "compute_work_seconds"]

FORMAT_BY_ITEMSIZE = {8: "float64", 4: "float32"}
SPILLING_KERNELS = {"attention", "attention_backward", "cross_entropy", "cross_entropy_backward"}
"""Kernels whose intermediate arrays are as large as the attention scores or the logits. The intermediate arrays of
other kernels stay in registers."""

WIDENED_KERNEL_PREFIX = "correlate"
"""Prefix of kernels that compute in float32 on CPUs, regardless of the format of their arrays."""


def compute_work_seconds(work: WorkCount, compute: Compute, half: str) -> float:
    """Return the time in seconds that counted work (matrix products and kernels) takes. `half` is the 16-bit format of
    the step.

    Kernels that were measured on the machine have their own rates. Any other matrix product takes
    `FLOP / Compute.flops` for computing and `bytes / Compute.memory` for memory access. On a CPU, these two times are
    added, because operands are first copied into the order needed for the multiplication. On a GPU, only the longer of
    the two times counts. `Compute.half` makes small matrix products slower. All other work takes
    `bytes / Compute.memory`."""
    products = sum(_compute_product_seconds(p, compute, half) * times for p, times in work.products.items())
    passes = sum(_compute_memory_bound_seconds(p, compute, half) * times for p, times in work.passes.items())
    spilt = compute.spill * sum(nbytes for name, nbytes in work.inner.items() if name in SPILLING_KERNELS)
    return products + passes + spilt / (compute.memory * compute.memory_efficiency)


def _compute_memory_bound_seconds(kernel_pass: KernelPass, compute: Compute, half: str) -> float:
    """Return the time in seconds of one call of a memory-bound kernel. For a kernel that contains matrix products with
    measured rates, return only the time of its remaining work."""
    name = FORMAT_BY_ITEMSIZE.get(kernel_pass.itemsize, "float32" if kernel_pass.itemsize > 2 else half)
    beside = compute.kernels.compute_memory_seconds_beyond_products(kernel_pass, name)
    if beside is not None:
        return beside
    rate = compute.kernels.get_bytes_per_second(kernel_pass, name)
    return kernel_pass.nbytes / (compute.memory * compute.memory_efficiency if rate is None else rate)


def _count_launched_kernels(work: WorkCount) -> int:
    return work.kernel_count + sum(times for p, times in work.products.items() if not p.is_fused)


def _compute_product_seconds(product: ProductCount, compute: Compute, half: str) -> float:
    """Return the time in seconds of one matrix product. Raise ConfigError if the machine has no rate for its number
    format."""
    name = FORMAT_BY_ITEMSIZE.get(product.itemsize, half)
    own = compute.kernels.compute_product_seconds(product, name)
    if own is not None:
        return own
    # CPUs compute 16-bit products in float32
    widened = None if compute.gpu or product.itemsize != 2 else compute.flops.get("float32")
    always = widened is not None and product.kernel.startswith(WIDENED_KERNEL_PREFIX)
    flops = widened if always else compute.flops.get(name, widened)
    if flops is None:
        have = ", ".join(compute.flops)
        raise ConfigError(f"the machine does not say how fast it computes in {name}, only in {have}: add it to flops")
    rate = flops * compute.efficiency
    # fixed overhead of a product, as the number of FLOP that this format computes in the time of the overhead, which is
    # the same in every format
    slow = compute.half * flops / max(compute.flops.values())
    seconds = (product.flops + slow) / rate
    if product.is_fused:
        return seconds
    moving = product.nbytes / (compute.memory * compute.memory_efficiency)
    return max(seconds, moving) if compute.gpu else seconds + moving


class LevelCrossing(NamedTuple):
    """A network level (such as the network between hosts) that a group of ranks communicates across. The units of the
    level are the hosts, sockets or racks that it connects.

    Attributes
    ----------
    level : the network level
    width : number of connected units that the group is spread over
    members : number of ranks of the group in each unit
    users : number of all ranks in a unit, including those outside the group; they share the links of the unit
    """

    level: NetworkLevel
    width: float
    members: float
    users: float

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of one rank, in bytes per second, while all ranks in the same unit (host, socket or rack)
        communicate."""
        return self.level.compute_bandwidth_per_rank(self.users)


@dataclass(frozen=True)
class MeshOnMachine:
    """Maps mesh axes to the network levels of a machine whose ranks are numbered host by host.

    Attributes
    ----------
    mesh, machine : the mesh and the machine
    faces : for each dim of a split field, the fraction of a rank's halo bytes that is exchanged along this dim
    """

    mesh: Mesh
    machine: Machine
    faces: tuple[float, ...] = ()

    @cached_property
    def rank_strides(self) -> Mapping[str, int]:
        """For each mesh axis, the difference between the global rank IDs of two ranks that are neighbors along the
        axis."""
        found, stride = {}, 1
        for axis in reversed(self.mesh.order):
            found[axis] = stride
            stride *= self.mesh.width_of(axis)
        return found

    def find_crossed_network_levels(self, axes: tuple[str, ...]) -> list[LevelCrossing]:
        """Return the network levels across which the ranks along these mesh axes communicate with each other, from the
        lowest to the highest."""
        found, before, unit, size = list[LevelCrossing](), 1.0, 1.0, self.mesh.size
        for level in self.machine.levels:
            inside = 1.0
            for axis in axes:
                inside *= max(1.0, min(self.mesh.width_of(axis), level.ranks // self.rank_strides[axis]))
            if inside > before:
                found.append(
                    LevelCrossing(level, inside / before, before, min(unit if unit > 1 else level.ranks, size))
                )
            before, unit = inside, level.ranks
        return found

    def require_room_for_ranks(self) -> None:
        """Raise ConfigError if the mesh has more ranks than the machine."""
        last, size = self.machine.levels[-1], self.mesh.size
        if size > last.ranks:
            raise ConfigError(
                f"machine {self.machine.name!r}: its last level, {last.name}, holds {last.ranks:g} ranks, and the job "
                f"has {size}: run measure-machine on two hosts or more, or add a [[levels]] section"
            )

    @cached_property
    def crossed_network_levels_by_axis(self) -> dict[str, list[LevelCrossing]]:
        """For each axis, the network levels across which the ranks along this axis communicate. The keys are the axis
        names that the traffic counters use, such as "peers"."""
        groups = {axis: (axis,) for axis in AXES} | {"world": AXES, "group": AXES, "data": ("replica", "shard")}
        groups |= {"peers": ("pipe",), "domain": ("replica", "shard")}
        return {name: self.find_crossed_network_levels(axes) for name, axes in groups.items()}


@dataclass(frozen=True)
class StepTimes:
    """Computes the time of communication calls and of actions of a step. `lines` says which network levels each mesh
    axis uses on the machine, and `half` is the 16-bit format of the step."""

    lines: MeshOnMachine
    half: str

    def compute_seconds_of_communication_call(self, axis: str, verb: str, nbytes: float) -> float:
        """Return the time in seconds of the communication call `verb`, such as "all_reduce", in which this rank sends
        `nbytes` bytes. A collective takes the time of the fastest of three algorithms.

        - ring: the time of each step is the highest latency of all links, and bytes move at the speed of the slowest
          link
        - tree: for an all-reduce, log2(ranks) steps in each direction, each of which sends the full array; for small
          MPI messages, log2(ranks) steps that send everything received so far (Bruck et al. 1997)
        - hierarchy: one network level after another; each level transfers the bytes that remain after the levels below
          it

        A message to a neighbor takes one latency plus the time for its bytes. Receiving it takes no additional time."""
        if axis == "disk":
            disk = self.lines.machine.disk or DiskSpeed(inf, inf)
            return nbytes / min(getattr(disk, verb), disk.total / self.rank_count)
        reaches = self.lines.crossed_network_levels_by_axis.get(axis, [])
        if not reaches or verb == "recv":
            return 0.0
        if verb == "send":
            return self._compute_neighbor_message_seconds(axis, reaches, nbytes)
        # an all-reduce is a reduce-scatter and an all-gather, and each of them sends the bytes once
        times = 2 if verb == "all_reduce" else 1
        ranks = prod(r.width for r in reaches)
        whole = nbytes / times * ranks / (ranks - 1)
        slowest = min(r.members * r.bytes_per_second for r in reaches)
        latest = max(r.level.latency for r in reaches)
        ring = times * (ranks - 1) * latest + nbytes / slowest
        levels = sum(
            times * ((r.width - 1) * r.level.latency + whole / r.members * (r.width - 1) / r.width / r.bytes_per_second)
            for r in reaches
        )
        tree = inf
        if verb == "all_reduce":
            tree = 2 * sum(ceil(log2(r.width)) * r.level.latency for r in reaches) + 2 * whole / slowest
        elif axis == "world":
            tree = sum(ceil(log2(r.width)) * r.level.latency for r in reaches) + nbytes / slowest
        return min(ring, tree, levels)

    def _compute_neighbor_message_seconds(self, axis: str, reaches: list[LevelCrossing], nbytes: float) -> float:
        """Return the time in seconds of a message to the neighbor that is the farthest away in the network, because all
        ranks wait for this message. For the halo messages of fields, return the mean of this time over the dims,
        weighted by the halo bytes along each dim."""
        if axis != "domain":
            return reaches[-1].level.latency + nbytes / reaches[-1].bytes_per_second
        seconds, stride = 0.0, self.lines.rank_strides["shard"]
        for width, face in zip(reversed(self.lines.mesh.domain), reversed(self.lines.faces), strict=True):
            unit = 1.0
            for level in self.lines.machine.levels:
                if stride * width <= level.ranks:
                    users = min(stride, unit) if unit > 1 else min(level.ranks, self.rank_count)
                    seconds += face * (level.latency + nbytes / level.compute_bandwidth_per_rank(users))
                    break
                unit = level.ranks
            stride *= width
        return seconds

    def compute_message_seconds(self, sender: int, receiver: int, nbytes: float) -> float:
        """Return the time in seconds of one message between the global ranks `sender` and `receiver`."""
        users = 1.0
        for level in self.lines.machine.levels:
            if sender // level.ranks == receiver // level.ranks:
                return level.latency + nbytes / level.compute_bandwidth_per_rank(
                    min(users if users > 1 else level.ranks, self.rank_count)
                )
            users = level.ranks
        return 0.0

    @property
    def rank_count(self) -> int:
        """Number of ranks of the job."""
        return self.lines.mesh.size

    def predict_action_seconds(self, cost: ActionCost) -> tuple[float, dict[str, float]]:
        """Return the computing time of an action, and its communication time along each axis, in seconds.

        On a GPU, the host launches the next kernels during computing, so the action takes the longer of the computing
        time and the launch time. On a CPU, `Compute.launch`, which is the time of the Python code around a kernel, is
        added for each kernel."""
        moving: dict[str, float] = {}
        launches = _count_launched_kernels(cost.work)
        for axis, verb, calls, nbytes in cost.calls:
            moving[axis] = moving.get(axis, 0.0) + calls * self.compute_seconds_of_communication_call(
                axis, verb, nbytes / calls
            )
            launches += calls
        compute = self.lines.machine.compute
        seconds, host = compute_work_seconds(cost.work, compute, self.half), launches * compute.launch
        if compute.gpu:
            return max(seconds, host - sum(moving.values())), moving
        return (seconds + host) * self.lines.machine.compute_slowdown(self.rank_count), moving
