"""Communication between ranks: communicators, the mesh and the functional API. Importing it loads no MPI."""

from fsdpx.comm.backend import Backend, FakeCommunicator
from fsdpx.comm.calls import DONE, Call, Done, Handle, ReduceOp, split_evenly
from fsdpx.comm.communicator import Communicator, Count, Counted, Counters, Survivor, Wrapper, survives
from fsdpx.comm.guarded import Guarded
from fsdpx.comm.local import Died, LocalCommunicator, single
from fsdpx.comm.mesh import Axes, Coordinates, Mesh, alone, connect
from fsdpx.comm.opening import BACKENDS, adopt, resilient, spawn, world

__all__ = [
    "BACKENDS", "DONE", "Axes", "Backend", "Call", "Communicator", "Coordinates", "Count", "Counted", "Counters",
    "Died", "Done", "FakeCommunicator", "Guarded", "Handle", "LocalCommunicator", "Mesh", "ReduceOp", "Survivor",
    "Wrapper", "adopt", "alone", "connect", "resilient", "single", "spawn", "split_evenly", "survives", "world",
]  # fmt: skip
