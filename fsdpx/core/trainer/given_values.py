"""Initial parameter values that come from another library, such as PyTorch. They are broadcast to all ranks, and freed
once each rank has copied its shard."""

from __future__ import annotations

import gc

from fsdpx.core.array.arena import trim_heap
from fsdpx.core.comm.communicator import Communicator
from fsdpx.nn.layer import GivenValues, Layer

__all__ = ["broadcast_foreign_values", "release_foreign_library_arrays"]


def broadcast_foreign_values(model: Layer, comm: Communicator) -> None:
    """Broadcast, from rank 0, the parameter values that come from another library. Without the broadcast, parameters
    would differ between ranks, because each process initialized its own copy of the model with different random
    numbers. Collective."""
    for values in _find_initial_values_of_other_library(model):
        values.broadcast_from_rank0(comm)


def release_foreign_library_arrays(model: Layer, comm: Communicator) -> None:
    """Once each rank has copied its shard, drop the references to arrays of another library, so that their memory can
    be freed. Collective."""
    if not (given_values := _find_initial_values_of_other_library(model)):
        return
    comm.barrier(what="first values").wait()  # wait, because ranks that are threads may still be reading the values
    for values in given_values:
        values.release_reproducible_values()
    gc.collect()  # the conversion from PyTorch leaves reference cycles that keep the parameters alive
    trim_heap()


def _find_initial_values_of_other_library(layer: Layer) -> list[GivenValues]:
    """Return the initial values from another library for the parameters of a layer and all its child layers."""
    own_values = [] if layer.given_values is None else [layer.given_values]
    net = getattr(layer, "net", None)  # a Rollout runs a model that is not its child
    inner = [*layer.children().values(), *([net] if isinstance(net, Layer) else [])]
    return own_values + [one for child in inner for one in _find_initial_values_of_other_library(child)]
