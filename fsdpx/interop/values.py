"""First values of parameters that come from another library, until the ranks have taken their parts of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fsdpx.comm.communicator import Communicator
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer, Spec

__all__ = ["Values", "values_in"]


class Values(dict[str, np.ndarray]):
    """Name -> first values of a parameter. Emptied when ranks have taken their parts: none keeps them all.

    missing: name -> why a parameter has no values."""

    def __init__(self, arrays: Mapping[str, np.ndarray], missing: Mapping[str, str] | None = None) -> None:
        super().__init__(arrays)
        self.missing = dict(missing or {})

    def specs(
        self, shapes: Mapping[str, tuple[int, ...]], trained: Collection[str], state: Collection[str] = ()
    ) -> dict[str, Spec]:
        """The specs of parameters that begin with these values."""
        return {
            name: Spec(shape, _Given(self, name), trainable=name in trained, state=name in state)
            for name, shape in shapes.items()
        }

    def agree(self, comm: Communicator) -> None:
        """Take those of rank 0: others may have drawn their own. Collective."""
        for name, array in self.items():
            self[name] = array = np.ascontiguousarray(array)
            comm.broadcast(array.reshape(-1), 0, what=f"first values of {name}").wait()


@dataclass(frozen=True, eq=False)
class _Given:
    """Initial values: those that were there when the layer was made."""

    values: Values
    name: str

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        if self.name in self.values.missing:
            raise ConfigError(f"{name!r} {self.values.missing[self.name]}")
        if self.name not in self.values:
            raise ConfigError(f"{name!r}: the first values of this layer were handed on; make a layer of it anew")
        return self.values[self.name].reshape(-1)[start:stop].astype(np.float64)


def values_in(layer: Layer) -> list[Values]:
    """Those of all layers inside."""
    own = getattr(layer, "values", None)
    found = [own] if isinstance(own, Values) else []
    return found + [one for child in layer.children().values() for one in values_in(child)]
