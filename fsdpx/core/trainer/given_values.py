"""First values of parameters that layers were given by another library: the same on all ranks, and then let go."""

from __future__ import annotations

import gc

from fsdpx.core.array.arena import trim_heap
from fsdpx.core.comm.communicator import Communicator
from fsdpx.nn.layer import GivenValues, Layer

__all__ = ["broadcast_given_values", "release_given_values"]


def broadcast_given_values(model: Layer, comm: Communicator) -> None:
    """Take first values from rank 0, as each process has seeded that library's generator by itself. Collective."""
    for values in _find_given_values(model):
        values.broadcast_from_rank0(comm)


def release_given_values(model: Layer, comm: Communicator) -> None:
    """Let go of first values that their library keeps as well: each rank has taken its part. Collective."""
    if not (given_values := _find_given_values(model)):
        return
    comm.barrier(what="first values").wait()  # ranks that are threads may share the layers
    for values in given_values:
        values.release_copy()
    gc.collect()  # what PyTorch has made to cut a module holds its parameters, in circles
    trim_heap()


def _find_given_values(layer: Layer) -> list[GivenValues]:
    own_values = [] if layer.given_values is None else [layer.given_values]
    return own_values + [one for child in layer.children().values() for one in _find_given_values(child)]
