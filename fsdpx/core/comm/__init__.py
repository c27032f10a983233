"""Communication between ranks: communicators, their backends, and the device mesh.

Importing this package does not load MPI.
"""

from fsdpx.core.comm.backend import Backend, FakeCommunicator
from fsdpx.core.comm.calls import COMPLETED, Call, CompletedHandle, Handle, ReduceOp, split_evenly
from fsdpx.core.comm.communicator import (
    Communicator,
    CallCount,
    CountingCommunicator,
    TrafficCounters,
    SurvivorCommunicator,
    CommunicatorWrapper,
    can_survive,
)
from fsdpx.core.comm.desync_check import CheckedCommunicator
from fsdpx.core.comm.local import RankDied, LocalCommunicator, make_single_rank_communicator
from fsdpx.core.comm.mesh import MeshAxes, MeshCoordinates, Mesh, make_single_rank_axes, connect_axes
from fsdpx.core.comm.init import BACKENDS, as_communicator, open_fault_tolerant_communicator, spawn, open_world

__all__ = [
    "BACKENDS", "COMPLETED", "Backend", "Call", "CallCount", "CheckedCommunicator", "Communicator",
    "CommunicatorWrapper", "CompletedHandle", "CountingCommunicator", "FakeCommunicator", "Handle", "LocalCommunicator",
    "Mesh", "MeshAxes", "MeshCoordinates", "RankDied", "ReduceOp", "SurvivorCommunicator", "TrafficCounters",
    "as_communicator", "can_survive", "connect_axes", "make_single_rank_axes", "make_single_rank_communicator",
    "open_fault_tolerant_communicator", "open_world", "spawn", "split_evenly",
]  # fmt: skip
