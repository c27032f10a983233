"""Rotary positions of queries and keys, and the ways to stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.gradient_accumulation import wide
from fsdpx.nn.layer import Array, Env, Layer, Params, positive
from fsdpx.nn.per_head import PerHead
from fsdpx.nn.sharding import CutRequest

__all__ = ["Rotary", "frequencies"]

NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The ways to stretch positions, and what must be said about each."""


class Rotary(PerHead):
    """Queries or keys `(samples, time, heads x d_head)`, feature i of a head turned with feature i + d_head / 2 by the
    angle position x frequency (Su et al. 2021, in the order of Llama).

    Parameters
    ----------
    d_head : features of a head, an even number
    theta : frequency i is theta^(-2 i / d_head), per position
    rope_scaling : None, or a mapping as transformers has it: "rope_type" is "linear", "dynamic", "llama3" or "yarn",
        and beside it "factor" and what else that way needs; ConfigError for one that is missing
    seq_len : with "dynamic", frequencies are lower for sequences that are longer than this
    """

    acts_on = "position"
    runs = ("rotate",)

    def __init__(
        self, d_head: int, theta: float = 10000.0, rope_scaling: Mapping[str, Any] | None = None, seq_len: int = 2048
    ) -> None:
        positive(self, d_head=d_head, seq_len=seq_len)
        if d_head % 2:
            raise ConfigError(f"Rotary: d_head must be even, got {d_head}")
        self.d_head, self.theta, self.seq_len = d_head, float(theta), seq_len
        self.rope_scaling = dict(rope_scaling) if rope_scaling else None
        self.part = False
        self._scaling = _checked(self.rope_scaling)

    def on_part(self, request: CutRequest) -> Layer:
        new = Rotary(self.d_head, self.theta, self.rope_scaling, self.seq_len)
        new.part = True
        return new

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim != 3 or x.shape[2] % self.d_head:
            raise ShapeError(f"{self!r} wants (samples, time, heads x {self.d_head}), got {tuple(x.shape)}")
        if env.cache is not None:
            return self._turned_at(env, env.cache.positions(x.shape[1]), env.cache.capacity, x), ()
        first, total = env.place(x.shape[1]) if self.part else (0, x.shape[1])
        cos, sin = self.table(env, first, x.shape[1], total, x.dtype)
        return self._turned(env, x, cos, sin), (cos, sin)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        cos, sin = saved
        return self._turned(env, dy, cos, -sin), ()

    def table(self, env: Env, first: int, count: int, total: int, dtype: Any) -> tuple[Array, Array]:
        """Cosines and sines (count, d_head / 2) of the positions from `first` on, of a sequence of `total`."""
        end, kind = first + count, wide(dtype)
        if self._scaling and self._scaling[0] == "dynamic" and total > self.seq_len:
            cos, sin = self._angles(env.xp, total, end, kind)  # of no other length
        else:
            rows = 1 << max(end - 1, 0).bit_length()  # one table for many lengths
            key = (Rotary, self.d_head, self.theta, self._scaling, self.seq_len, rows, kind)
            if key not in env.constants:
                env.constants[key] = self._angles(env.xp, self.seq_len, rows, kind)
            cos, sin = env.constants[key]
        return cos[first:end], sin[first:end]

    def _angles(self, xp: Any, total: int, rows: int, kind: np.dtype) -> tuple[Array, Array]:
        cos, sin = _table(self.d_head, self.theta, self._scaling, self.seq_len, total, rows)
        return xp.asarray(cos.astype(kind)), xp.asarray(sin.astype(kind))

    def _turned_at(self, env: Env, positions: np.ndarray, longest: int, x: Array) -> Array:
        """positions: (samples, time), below `longest`."""
        if self._scaling and self._scaling[0] == "dynamic":
            raise ConfigError(f"{self!r}: the angles of all tokens change with the length of the text: use cache=False")
        cos, sin = self.table(env, 0, longest, longest, x.dtype)
        at = env.xp.asarray(positions.reshape(-1))
        return self._turned(env, x.reshape(1, at.size, x.shape[2]), cos[at], sin[at]).reshape(x.shape)

    def _turned(self, env: Env, x: Array, cos: Array, sin: Array) -> Array:
        heads = x.reshape(*x.shape[:2], x.shape[2] // self.d_head, self.d_head)
        return kernels.rotate(env.xp, heads, cos, sin).reshape(x.shape)


def frequencies(
    d_head: int, theta: float, scaling: Mapping[str, Any] | None = None, seq_len: int = 2048, time: int = 0
) -> tuple[np.ndarray, float]:
    """Angles per position (d_head / 2,) in float64, and what cosines and sines are multiplied by.

    time: length of the sequence at hand, which "dynamic" depends on; the other arguments are those of `Rotary`."""
    checked = _checked(scaling)
    steps = np.arange(0, d_head, 2) / d_head
    if checked is None:
        return theta**-steps, 1.0
    way, options = checked[0], dict(checked[1:])
    factor = options["factor"]
    if way == "linear":
        return theta**-steps / factor, 1.0
    if way == "dynamic":
        longer = factor * max(time, seq_len) / seq_len - (factor - 1)
        return (theta * longer ** (d_head / (d_head - 2))) ** -steps, 1.0
    return (_llama3 if way == "llama3" else _yarn)(theta**-steps, d_head, theta, options)


def _llama3(plain: np.ndarray, d_head: int, theta: float, options: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Long waves are stretched by the factor, short ones are not, and those between by a part of it."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)
    part = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - part) * plain / factor + part * plain, 1.0


def _yarn(plain: np.ndarray, d_head: int, theta: float, options: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Peng et al. 2023: a ramp over the features between `beta_fast` and `beta_slow` turns in the old length."""
    factor, length = options["factor"], options["original_max_position_embeddings"]

    def place(turns: float) -> float:
        return d_head * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(options.get("beta_fast") or 32), place(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_head - 1)
    ramp = np.clip((np.arange(d_head // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_size(factor, options)


def _yarn_size(factor: float, options: Mapping[str, Any]) -> float:
    def size(scale: float, by: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    both = options.get("mscale"), options.get("mscale_all_dim")
    return size(factor, both[0]) / size(factor, both[1]) if both[0] and both[1] else size(factor)


def _checked(scaling: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """The way, then pairs of a name and a value; None: as they are."""
    if not scaling:
        return None
    way = scaling.get("rope_type", scaling.get("type"))
    if way not in NEEDED:
        raise ConfigError(f"Rotary: rope_type must be one of {', '.join(NEEDED)}, got {way!r}")
    if missing := [name for name in NEEDED[way] if scaling.get(name) is None]:
        raise ConfigError(f"Rotary: rope_scaling of the type {way!r} needs {', '.join(missing)}")
    if way == "default":
        return None
    return way, *((name, value) for name, value in scaling.items() if isinstance(value, int | float))


@lru_cache(maxsize=64)
def _table(
    d_head: int, theta: float, scaling: tuple[Any, ...] | None, seq_len: int, time: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the first `count` positions, in float64."""
    options = {"rope_type": scaling[0], **dict(scaling[1:])} if scaling else None
    turns, size = frequencies(d_head, theta, options, seq_len, time)
    angles = np.arange(count)[:, None] * turns[None, :]
    return np.cos(angles) * size, np.sin(angles) * size
