"""Initial parameter values from another library, such as a PyTorch model: broadcast to all ranks, and then released."""

from __future__ import annotations

import gc

from fsdpx.core.array.arena import trim_heap
from fsdpx.core.comm.communicator import Communicator
from fsdpx.nn.layer import GivenValues, Layer

__all__ = ["broadcast_given_values", "release_given_values"]


def broadcast_given_values(model: Layer, comm: Communicator) -> None:
    """Take the given values from rank 0: each process has seeded the other library's generator on its own.
    Collective."""
    for values in _find_given_values(model):
        values.broadcast_from_rank0(comm)


def release_given_values(model: Layer, comm: Communicator) -> None:
    """Release given values that the other library keeps as well, once each rank has taken its part. Collective."""
    if not (given_values := _find_given_values(model)):
        return
    comm.barrier(what="first values").wait()  # thread ranks may share the layers
    for values in given_values:
        values.release_copy()
    gc.collect()  # cycles left by PyTorch's conversion hold the parameters
    trim_heap()


def _find_given_values(layer: Layer) -> list[GivenValues]:
    """Return the given values of a layer and of all layers inside it."""
    own_values = [] if layer.given_values is None else [layer.given_values]
    return own_values + [one for child in layer.children().values() for one in _find_given_values(child)]
