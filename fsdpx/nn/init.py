"""Parameter initializers. Each value depends only on the seed, the parameter's name and the index of the element, so
any rank can compute any shard without communication."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fsdpx.core.array import random
from fsdpx.core.base.dataclass import dataclass

__all__ = ["Init", "constant", "make_initial_values", "normal", "ones", "sinusoid", "uniform", "zeros"]

Init = Callable[[int, str, int, int, tuple[int, ...]], np.ndarray]
"""An initializer `init(seed, name, start, stop, shape)` returns the values of the parameter `name` at the flat indices
[start, stop). Initializers that compute their values, instead of reading them from a file, return float64."""


@dataclass(frozen=True)
class Constant:
    """Initializes every element with `value`.

    Parameters
    ----------
    value : the value of every element
    """

    value: float

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(stop - start, self.value, np.float64)


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution on [-bound, bound).

    Parameters
    ----------
    bound : upper bound of the values; the lower bound is -bound
    """

    bound: float

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        return (2.0 * random.uniform(seed, name, start, stop) - 1.0) * self.bound


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0 and standard deviation `std`.

    Parameters
    ----------
    std : standard deviation
    """

    std: float = 1.0

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        return random.normal(seed, name, start, stop) * self.std


@dataclass(frozen=True)
class Sinusoid:
    """Sinusoidal positions (Vaswani et al. 2017): each row contains sines and cosines of one position, with decreasing
    frequencies.

    From each position to the next, the row changes by the same rotation. Attention learns to use this rotation early in
    training.

    Parameters
    ----------
    std : root mean square of the elements
    """

    std: float = 1.0

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        position, column = np.divmod(np.arange(start, stop), shape[-1])
        angle = position * 10000.0 ** (-(column // 2 * 2) / shape[-1])
        return self.std * math.sqrt(2.0) * np.where(column % 2 == 0, np.sin(angle), np.cos(angle))


constant = Constant
uniform = Uniform
normal = Normal
sinusoid = Sinusoid
zeros = Constant(0.0)
ones = Constant(1.0)


def make_initial_values(specs: Mapping[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return the full initial parameters for `specs`, a dict of `ParameterSpec` by name, as NumPy arrays. Ranks that
    initialize only their shards get slices of exactly these arrays, regardless of the sharding."""
    return {
        name: spec.init(seed, name, 0, spec.size, spec.shape).astype(dtype).reshape(spec.shape)
        for name, spec in specs.items()
    }
