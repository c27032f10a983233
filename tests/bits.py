"""All bits of a trainer's parameters: where two are not equal, a failing test names the tensor and the element."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from fsdpx import Trainer
from fsdpx.testing import find_difference


class Bits:
    """Equal to another if and only if all bits of all parameters are, as fingerprints are."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self.parameters = {name: np.array(array) for name, array in sorted(parameters.items())}
        self._key = tuple((name, str(a.dtype), a.shape, a.tobytes()) for name, a in self.parameters.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<bits {hash(self) & 0xFFFFFFFF:08x}>"


def bits(trainer: Trainer) -> Bits:
    """Of all parameters. Collective."""
    return Bits(trainer.parameters())


def demand_same(found: Iterable[Bits]) -> None:
    """AssertionError that names tensor and element unless all of them have the same bits."""
    first, *others = found
    for one in others:
        assert one == first


def explained(got: Any, want: Any) -> Iterator[str]:
    """What differs between the parameters in two structures, one line for each pair of them."""
    if isinstance(got, Bits) and isinstance(want, Bits):
        if got != want:
            yield str(find_difference(got.parameters, want.parameters))
    elif isinstance(got, Mapping) and isinstance(want, Mapping):
        for key in got.keys() & want.keys():
            yield from explained(got[key], want[key])
    elif isinstance(got, Set) and isinstance(want, Set):
        for one in got - want:
            yield from explained(one, next(iter(want), None))
    elif isinstance(got, Sequence) and isinstance(want, Sequence) and not isinstance(got, str):
        for pair in zip(got, want, strict=False):
            yield from explained(*pair)
