"""The update kernels by formula: flat, in place, elementwise, the same bits whatever the cut and the version.

Arrays are 1-D of one size; `g` counts as `g * scale` and is not changed. Numbers are rounded to the arrays'
dtype once. On NumPy float32 and float64 the one-pass Numba version runs if Numba is installed, else the plain
one: the same bits. Threads (`array.parallel`) cut the elements among them."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from fsdpx.array.kernels.choice import installed
from fsdpx.array.parallel import over
from fsdpx.cuda.kernels import update
from fsdpx.errors import ConfigError
from fsdpx.optim import plain

__all__ = ["adam", "direction", "follow", "lion", "moments", "sgd", "use"]

Version = Literal["default", "plain", "numba"]
_version: ContextVar[Version] = ContextVar("version", default="default")


@contextmanager
def use(version: Version) -> Iterator[None]:
    """Within: every update runs this version ("numba" still leaves what it cannot compile to "plain")."""
    if version not in ("default", "plain", "numba"):
        raise ConfigError(f"unknown kernel version {version!r}: choose one of default, plain, numba")
    if version == "numba" and _compiled() is None:
        raise ConfigError("kernel version 'numba' needs Numba: pip install numba")
    token = _version.set(version)
    try:
        yield
    finally:
        _version.reset(token)


@lru_cache
def _compiled() -> dict[str, Callable[..., None]] | None:
    return importlib.import_module("fsdpx.optim.compiled").KERNELS if installed() else None


def _compiles(array: Any, dtype: Any) -> bool:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        return False
    return array.flags.c_contiguous and array.flags.aligned


def _run(name: str, xp: Any, arrays: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
    dtype = arrays[0].dtype
    if arrays[0].size == 0 or getattr(xp, "holds_no_data", False):
        return
    values = tuple(map(dtype.type, numbers))
    compilable = _version.get() != "plain" and dtype.char in "fd" and all(_compiles(a, dtype) for a in arrays)
    if compilable and (compiled := _compiled()) is not None:
        over(compiled[name], arrays, *values)
        return
    if xp.__name__ == "cupy" and _version.get() != "plain" and update(name, arrays, values):
        return
    plain.KERNELS[name](xp, arrays, values)


def sgd(
    xp: Any, p: Any, g: Any, m: Any, *, lr: float, momentum: float, nesterov: bool, weight_decay: float, scale: float
) -> None:
    """d = scale g + weight_decay p; m = momentum m + d; p -= lr (d + momentum m if nesterov else m).

    m is None without momentum: p -= lr d."""
    if m is None:
        _run("sgd", xp, (p, g), (scale, weight_decay, lr))
    else:
        _run("momentum", xp, (p, g, m), (scale, weight_decay, lr, momentum, nesterov))


def adam(
    xp: Any, p: Any, g: Any, m: Any, v: Any, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, step: int, scale: float,
) -> None:  # fmt: skip
    """m, v: running means of g and g^2, divided by 1 - beta^step; p -= lr m / (sqrt(v) + eps).

    Weight decay is added to g (Kingma & Ba 2015, with L2) or, decoupled, p *= 1 - lr weight_decay
    (Loshchilov & Hutter 2019)."""
    l2, keep = (0.0, 1.0 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    unbias, rate = (1.0 - beta2**step) ** -0.5, lr / (1.0 - beta1**step)
    _run("adam", xp, (p, g, m, v), (scale, l2, keep, 1.0 - beta1, beta2, 1.0 - beta2, unbias, eps, rate))


def lion(
    xp: Any, p: Any, g: Any, m: Any, *, lr: float, beta1: float, beta2: float, weight_decay: float, scale: float
) -> None:
    """p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g); m = beta2 m + (1 - beta2) g."""
    _run("lion", xp, (p, g, m), (scale, 1.0 - lr * weight_decay, 1.0 - beta1, 1.0 - beta2, lr))


def moments(xp: Any, m: Any, v: Any, g: Any, *, beta1: float, beta2: float, scale: float) -> None:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2."""
    _run("moments", xp, (m, v, g), (scale, 1.0 - beta1, beta2, 1.0 - beta2))


def direction(
    xp: Any, u: Any, p: Any, m: Any, v: Any, *, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> None:
    """u = m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay p, into u."""
    _run("direction", xp, (u, p, m, v), (*_unbias(beta1, beta2, step), eps, weight_decay))


def follow(
    xp: Any, p: Any, m: Any, v: Any, *, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    rate: float,
) -> None:  # fmt: skip
    """p -= rate u, with the u of `direction`."""
    _run("follow", xp, (p, m, v), (*_unbias(beta1, beta2, step), eps, weight_decay, rate))


def _unbias(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    return 1.0 / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5
