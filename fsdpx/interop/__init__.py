"""Models of other libraries: `fsdpx.interop.torch`, `.jax` and `.autograd`. This file loads none of them."""

from __future__ import annotations

import gc
import sys
from typing import Any

from fsdpx.array.arena import give_back
from fsdpx.comm.communicator import Communicator
from fsdpx.interop.values import values_in
from fsdpx.nn.layer import Layer

__all__ = ["handed_on", "native", "same_values"]


def native(model: Any, loss: Any) -> tuple[Any, Any]:
    """A model and a loss of PyTorch as those of fsdpx; all else as it is."""
    theirs = getattr(sys.modules.get("torch"), "nn", None)
    if theirs is None or not (isinstance(model, theirs.Module) or isinstance(loss, theirs.Module)):
        return model, loss
    from fsdpx.interop.torch import Criterion, from_torch

    if isinstance(model, theirs.Module):
        model = from_torch(model)
    return model, Criterion(loss) if isinstance(loss, theirs.Module) else loss


def same_values(model: Layer, comm: Communicator) -> None:
    """First values as on rank 0, where they come from a library whose generator every process seeds by itself.
    Collective."""
    for values in values_in(model):
        values.agree(comm)


def handed_on(model: Layer, comm: Communicator) -> None:
    """Every rank has taken its part of the first values: layers keep none that a module has. Collective."""
    if not (found := values_in(model)):
        return
    comm.barrier(what="first values").wait()  # ranks that are threads may share the layers
    for values in found:
        values.release()
    gc.collect()  # what PyTorch has made to cut a module holds its parameters, in circles
    give_back()
