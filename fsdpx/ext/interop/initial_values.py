"""Initial parameter values from another library, kept until the ranks have copied their shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import ParameterSpec

__all__ = ["InitialValues"]

Remake = Callable[[], np.ndarray | None]


class InitialValues:
    """Initial values of parameters by name.

    After `release_reproducible_values`, only values that `remakers` cannot reproduce are kept.

    Parameters
    ----------
    arrays : the values by name
    missing : name of a parameter without values -> message that explains why it has none
    remakers : name of a parameter -> function that returns its values again. The function returns None if the object
        that owns the values no longer exists
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], missing: Mapping[str, str] | None = None,
        remakers: Mapping[str, Remake] | None = None,
    ) -> None:  # fmt: skip
        self._held, self._remakers = dict(arrays), dict(remakers or {})
        self._names, self.missing = tuple(arrays), dict(missing or {})

    def make_parameter_specs(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        trained: Collection[str],
        state: Collection[str] = (),
        norms: Collection[str] = (),
    ) -> dict[str, ParameterSpec]:
        """Return the specs of the parameters that are initialized with these values, keyed by name."""
        return {
            name: ParameterSpec(
                shape, _GivenInit(self, name), trainable=name in trained, state=name in state, norm=name in norms
            )
            for name, shape in shapes.items()
        }

    def broadcast_from_rank0(self, comm: Communicator) -> None:
        """Replace the values with rank 0's values because ranks may have drawn different values. Collective."""
        for name in self._names:
            self._held[name] = array = np.ascontiguousarray(self.get_values_of_parameter(name))
            comm.broadcast(array.reshape(-1), 0, what=f"first values of {name}").wait()

    def get_values_of_parameter(self, name: str) -> np.ndarray:
        """Return the values of one parameter. Raise ConfigError if they were released or never existed."""
        if name in self.missing:
            raise ConfigError(f"{name!r} {self.missing[name]}")
        array = self._held.get(name)
        if array is None and name in self._remakers:
            array = self._remakers[name]()
        if array is None:
            raise ConfigError(
                f"{name!r}: the first values of this layer were released, and their module was deleted; keep the "
                "module, or make a new layer of it"
            )
        return array

    def release_reproducible_values(self) -> None:
        """Free the values that `remakers` can reproduce. Call this after all ranks have copied their shards."""
        self._held = {name: array for name, array in self._held.items() if name not in self._remakers}


@dataclass(frozen=True, eq=False)
class _GivenInit:
    """Initializer for a parameter whose values are held in an `InitialValues`."""

    values: InitialValues
    name: str

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.values.get_values_of_parameter(self.name).reshape(-1)[start:stop].astype(np.float64)
