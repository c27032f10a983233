"""Communication between ranks: communicators, the mesh and the functional API. Importing it loads no MPI."""

from fsdpx.core.comm.backend import Backend, FakeCommunicator
from fsdpx.core.comm.calls import DONE, Call, Done, Handle, ReduceOp, split_evenly
from fsdpx.core.comm.communicator import Communicator, Count, Counted, Counters, Survivor, Wrapper, survives
from fsdpx.core.comm.desync_check import Guarded
from fsdpx.core.comm.local import Died, LocalCommunicator, single
from fsdpx.core.comm.mesh import Axes, Coordinates, Mesh, alone, connect
from fsdpx.core.comm.init import BACKENDS, adopt, resilient, spawn, world

__all__ = [
    "BACKENDS", "DONE", "Axes", "Backend", "Call", "Communicator", "Coordinates", "Count", "Counted", "Counters",
    "Died", "Done", "FakeCommunicator", "Guarded", "Handle", "LocalCommunicator", "Mesh", "ReduceOp", "Survivor",
    "Wrapper", "adopt", "alone", "connect", "resilient", "single", "spawn", "split_evenly", "survives", "world",
]  # fmt: skip
