"""Checks of constructor arguments and input shapes: ConfigError and ShapeError in the same words for all layers."""

from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.numeric import is_index

__all__ = ["fraction", "pair", "positive", "want_image", "want_last", "want_time"]


def positive(owner: object, **values: Any) -> None:
    """Each value must be a whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ConfigError(f"{type(owner).__name__}: {name} must be a whole number >= 1, got {value!r}")


def fraction(owner: object, **values: Any) -> None:
    """Each value must be a number from 0 to 1."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ConfigError(f"{type(owner).__name__}: {name} must be between 0 and 1, got {value!r}")


def pair(owner: object, name: str, value: Any, least: int) -> tuple[int, int]:
    """`3` or `(3, 5)` as (height, width), each at least `least`."""
    both = (value, value) if hasattr(value, "__index__") else value
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise ConfigError(f"{type(owner).__name__}: {name} must be one whole number or two, got {value!r}")
    if any(not hasattr(side, "__index__") or side < least for side in both):
        raise ConfigError(f"{type(owner).__name__}: {name} must be whole numbers >= {least}, got {value!r}")
    return int(both[0]), int(both[1])


def want_last(layer: object, x: Any, size: int) -> None:
    """The last dim of `x` must be `size`; at least the dim of samples comes before it."""
    if x.ndim < 2 or x.shape[-1] != size:
        raise ShapeError(f"{layer!r} wants an input of shape (samples, ..., {size}), got {tuple(x.shape)}")


def want_image(layer: object, x: Any, channels: int | None = None) -> None:
    """`x` must be (samples, channels, height, width)."""
    if x.ndim != 4 or channels not in (None, x.shape[1]):
        wanted = "channels" if channels is None else channels
        raise ShapeError(f"{layer!r} wants an input of shape (samples, {wanted}, height, width), got {tuple(x.shape)}")


def want_time(x: Any) -> None:
    """Dim 1 of `x` must be a time; judged by the number of dims, as activations have features after it."""
    least, wanted = (2, "(samples, time, ...)") if is_index(x) else (3, "(samples, time, ..., features)")
    if x.ndim < least:
        kind = "whole numbers" if is_index(x) else "floats"
        raise ShapeError(
            f"sequence=... cuts dim 1, the time; the input has shape {tuple(x.shape)}, but {kind} with a time "
            f"have {least} dims or more, {wanted}: leave sequence=None"
        )
