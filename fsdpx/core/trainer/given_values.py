"""Initial parameter values from another library, such as those of a PyTorch model: broadcast them to all ranks, and
release them afterwards."""

from __future__ import annotations

import gc

from fsdpx.core.array.arena import trim_heap
from fsdpx.core.comm.communicator import Communicator
from fsdpx.nn.layer import GivenValues, Layer

__all__ = ["broadcast_given_values", "release_given_values"]


def broadcast_given_values(model: Layer, comm: Communicator) -> None:
    """Broadcast the given values from rank 0, because each process has its own random numbers in the other library.
    Collective."""
    for values in _find_given_values(model):
        values.broadcast_from_rank0(comm)


def release_given_values(model: Layer, comm: Communicator) -> None:
    """Release the given values, which the other library keeps as well, once each rank has copied its part.
    Collective."""
    if not (given_values := _find_given_values(model)):
        return
    comm.barrier(what="first values").wait()  # thread ranks may share the layers
    for values in given_values:
        values.release_reproducible_values()
    gc.collect()  # reference cycles from PyTorch's conversion keep the parameters alive
    trim_heap()


def _find_given_values(layer: Layer) -> list[GivenValues]:
    """Return the given values of a layer and of all its child layers."""
    own_values = [] if layer.given_values is None else [layer.given_values]
    return own_values + [one for child in layer.children().values() for one in _find_given_values(child)]
