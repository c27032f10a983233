"""Codecs by name, and the one that a precision implies."""

from __future__ import annotations

from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.codecs.cast import Cast
from fsdpx.codecs.codec import Codec
from fsdpx.codecs.int8 import Int8
from fsdpx.codecs.plain import Plain
from fsdpx.codecs.powersgd import PowerSGD
from fsdpx.codecs.sparse import TopK
from fsdpx.config import half_name
from fsdpx.errors import ConfigError
from fsdpx.words import meant

__all__ = ["codec"]

SIMPLE: dict[str, type[Codec]] = {"int8": Int8, "topk": TopK, "powersgd": PowerSGD}
NAMES = ", ".join(["plain, ring, bf16, fp16", *SIMPLE])


def codec(choice: str | Codec | None, reduce: str, compute: str, algorithm: str = "library") -> Codec:
    """The codec behind a name, or the one that a precision implies, whose all-reduces are by `algorithm`."""
    if choice is None:
        return Plain(algorithm) if dtype_of(reduce).itemsize >= dtype_of(compute).itemsize else Cast(reduce)
    if isinstance(choice, str):
        if choice in ("plain", "ring"):
            return Plain("ring" if choice == "ring" else "library")
        if half_name(choice) in ("bf16", "float16"):
            return Cast(choice)
        if choice in SIMPLE:
            return SIMPLE[choice]()
        raise ConfigError(f"unknown codec {choice!r}: choose one of {NAMES}, or pass a Codec{meant(choice, SIMPLE)}")
    if not isinstance(choice, Codec):
        raise ConfigError(f"codec={choice!r} is no Codec: pass {NAMES} or an object of a class of it")
    return choice
