"""First values of parameters that come from another library, until the ranks have taken their parts of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fsdpx.core.array.arena import give_back
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer, Spec

__all__ = ["Values", "handed_on", "same_values", "values_in"]

Remake = Callable[[], np.ndarray | None]


class Values:
    """First values of parameters by name. Once released, they are kept only where `remakers` cannot give them.

    Parameters
    ----------
    arrays : the values by name
    missing : name -> why a parameter has no values
    remakers : name -> what gives the values as long as their owner keeps them, then None
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], missing: Mapping[str, str] | None = None,
        remakers: Mapping[str, Remake] | None = None,
    ) -> None:  # fmt: skip
        self._held, self._remakers = dict(arrays), dict(remakers or {})
        self._names, self.missing = tuple(arrays), dict(missing or {})

    def specs(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        trained: Collection[str],
        state: Collection[str] = (),
        norms: Collection[str] = (),
    ) -> dict[str, Spec]:
        """The specs of parameters that begin with these values."""
        return {
            name: Spec(shape, _Given(self, name), trainable=name in trained, state=name in state, norm=name in norms)
            for name, shape in shapes.items()
        }

    def agree(self, comm: Communicator) -> None:
        """Take those of rank 0: others may have drawn their own. Collective."""
        for name in self._names:
            self._held[name] = array = np.ascontiguousarray(self.of(name))
            comm.broadcast(array.reshape(-1), 0, what=f"first values of {name}").wait()

    def of(self, name: str) -> np.ndarray:
        """The values of one parameter. ConfigError if they are gone, or never existed."""
        if name in self.missing:
            raise ConfigError(f"{name!r} {self.missing[name]}")
        array = self._held.get(name)
        if array is None and name in self._remakers:
            array = self._remakers[name]()
        if array is None:
            raise ConfigError(
                f"{name!r}: the first values of this layer were released, and the module that they came from is no "
                "more; keep the module, or make a new layer of it"
            )
        return array

    def release(self) -> None:
        """Drop the values that `remakers` can give: all ranks have taken their parts."""
        self._held = {name: array for name, array in self._held.items() if name not in self._remakers}


@dataclass(frozen=True, eq=False)
class _Given:
    """Initial values: those that were there when the layer was made."""

    values: Values
    name: str

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.values.of(self.name).reshape(-1)[start:stop].astype(np.float64)


def values_in(layer: Layer) -> list[Values]:
    """The `Values` of a layer and of all layers inside it."""
    own = getattr(layer, "values", None)
    found = [own] if isinstance(own, Values) else []
    return found + [one for child in layer.children().values() for one in values_in(child)]


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
