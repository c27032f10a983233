"""Rotary position embeddings (RoPE) of queries and keys, and their scaling for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_positive
from fsdpx.nn.per_head import PerHead
from fsdpx.nn.shard_specs import ShardingContext

__all__ = ["Rotary", "compute_rotary_frequencies_and_factor"]

SCALING_OPTIONS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Required options of each type of position scaling, keyed by `rope_type`."""


class Rotary(PerHead):
    """Rotary position embedding (RoPE) of queries or keys `(samples, time, heads x d_head)`. In each head, the pair of
    features i and i + d_head / 2 is rotated by the angle `position * frequency` (Su et al. 2021, with the feature order
    of Llama).

    Parameters
    ----------
    d_head : number of features per head; must be even
    theta : base of the frequencies; frequency i is `theta^(-2 * i / d_head)`
    rope_scaling : None, or a mapping as in transformers, with "rope_type" ("linear", "dynamic", "llama3" or "yarn"),
        "factor" and the other options of that type. Raises ConfigError if an option is missing, or for "dynamic" with
        d_head=2
    seq_len : with "dynamic", the sequence length above which frequencies are lowered
    """

    acts_on = "position"
    kernel_names = ("rotate",)

    def __init__(
        self, d_head: int, theta: float = 10000.0, rope_scaling: Mapping[str, Any] | None = None, seq_len: int = 2048
    ) -> None:
        require_positive(self, d_head=d_head, seq_len=seq_len)
        if d_head % 2:
            raise ConfigError(f"Rotary: d_head must be even, got {d_head}")
        self.d_head, self.theta, self.seq_len = d_head, float(theta), seq_len
        self.rope_scaling = dict(rope_scaling) if rope_scaling else None
        self.part = False
        self._scaling = _parse_scaling(self.rope_scaling, d_head)

    def needs_all_positions(self) -> bool:
        return True

    def bind_sequence_shard(self, request: ShardingContext) -> Layer:
        new = Rotary(self.d_head, self.theta, self.rope_scaling, self.seq_len)
        new.part = True
        return new

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim != 3 or x.shape[2] % self.d_head:
            raise ShapeError(f"{self!r} wants (samples, time, heads x {self.d_head}), got {tuple(x.shape)}")
        if env.cache is not None:
            return self._rotate_by_positions(env, env.cache.get_input_positions(x.shape[1]), env.cache.capacity, x), ()
        first, total = env.sequence_offset(x.shape[1]) if self.part else (0, x.shape[1])
        cos, sin = self.get_cos_sin(env, first, x.shape[1], total, x.dtype)
        return self._rotate_heads(env, x, cos, sin), (cos, sin)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        cos, sin = saved
        return self._rotate_heads(env, dy, cos, -sin), ()

    def get_cos_sin(self, env: LayerContext, first: int, count: int, total: int, dtype: Any) -> tuple[Array, Array]:
        """Return the cosines and sines for a range of positions, from a cached table if possible.

        Parameters
        ----------
        env : array namespace, and the constants that the table is cached in
        first, count : first position, and number of positions
        total : length of the full sequence, on which "dynamic" scaling depends
        dtype : dtype of the activations; the table has the dtype `accumulation_dtype(dtype)`

        Returns
        -------
        (cos, sin)
            arrays (count, d_head / 2), views of the table
        """
        end, kind = first + count, accumulation_dtype(dtype)
        if self._scaling and self._scaling[0] == "dynamic" and total > self.seq_len:
            # not cached, because the table depends on `total`
            cos, sin = self._make_cos_sin_table(env.xp, total, end, kind)
        else:
            # rounded up to a power of two, so that texts of different lengths can share one table
            rows = 1 << max(end - 1, 0).bit_length()
            key = (Rotary, self.d_head, self.theta, self._scaling, self.seq_len, rows, kind)
            if key not in env.constants:
                env.constants[key] = self._make_cos_sin_table(env.xp, self.seq_len, rows, kind)
            cos, sin = env.constants[key]
        return cos[first:end], sin[first:end]

    def _make_cos_sin_table(self, xp: Any, total: int, rows: int, kind: np.dtype) -> tuple[Array, Array]:
        cos, sin = _compute_cos_sin(self.d_head, self.theta, self._scaling, self.seq_len, total, rows)
        return xp.asarray(cos.astype(kind)), xp.asarray(sin.astype(kind))

    def _rotate_by_positions(self, env: LayerContext, positions: np.ndarray, longest: int, x: Array) -> Array:
        """Return x with each token rotated by its own position. `positions` is (samples, time), and all positions are
        less than `longest`."""
        if self._scaling and self._scaling[0] == "dynamic":
            raise ConfigError(f"{self!r}: the angles of all tokens change with the length of the text: use cache=False")
        cos, sin = self.get_cos_sin(env, 0, longest, longest, x.dtype)
        flat_positions = env.xp.asarray(positions.reshape(-1))
        return self._rotate_heads(
            env, x.reshape(1, flat_positions.size, x.shape[2]), cos[flat_positions], sin[flat_positions]
        ).reshape(x.shape)

    def _rotate_heads(self, env: LayerContext, x: Array, cos: Array, sin: Array) -> Array:
        heads = x.reshape(*x.shape[:2], x.shape[2] // self.d_head, self.d_head)
        return kernels.rotate(env.xp, heads, cos, sin).reshape(x.shape)


def compute_rotary_frequencies_and_factor(
    d_head: int, theta: float, scaling: Mapping[str, Any] | None = None, seq_len: int = 2048, time: int = 0
) -> tuple[np.ndarray, float]:
    """Return two values: a float64 array (d_head / 2,) with the angle by which each pair of features is rotated from
    one position to the next, and the factor by which cosines and sines are multiplied.

    `time` is the length of the current sequence, on which "dynamic" scaling depends. The other arguments are as in
    `Rotary`."""
    checked = _parse_scaling(scaling, d_head)
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
    return (_scale_llama3 if way == "llama3" else _scale_yarn)(theta**-steps, d_head, theta, options)


def _scale_llama3(plain: np.ndarray, d_head: int, theta: float, options: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Return two values: the frequencies, scaled as in Llama 3, and the factor by which cosines and sines are
    multiplied, which is 1.0. Low frequencies are divided by "factor", high frequencies are kept, and frequencies in
    between are interpolated."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)
    part = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - part) * plain / factor + part * plain, 1.0


def _scale_yarn(plain: np.ndarray, d_head: int, theta: float, options: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Return two values: the frequencies, scaled by YaRN (Peng et al. 2023), and the factor by which cosines and sines
    are multiplied.

    Frequencies that make more than `beta_fast` turns over the original context length are kept. Frequencies that make
    fewer than `beta_slow` turns are divided by "factor". Frequencies in between are interpolated with a linear ramp
    over the features."""
    factor, length = options["factor"], options["original_max_position_embeddings"]

    def find_feature(turns: float) -> float:
        return d_head * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = find_feature(options.get("beta_fast") or 32), find_feature(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_head - 1)
    ramp = np.clip((np.arange(d_head // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), _compute_yarn_attention_factor(factor, options)


def _compute_yarn_attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    def compute_size(scale: float, by: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    both = options.get("mscale"), options.get("mscale_all_dim")
    return (
        compute_size(factor, both[0]) / compute_size(factor, both[1]) if both[0] and both[1] else compute_size(factor)
    )


def _parse_scaling(scaling: Mapping[str, Any] | None, d_head: int) -> tuple[Any, ...] | None:
    """Return `rope_scaling` as a hashable tuple: the scaling type, then a (name, value) pair for each option. Return
    None if positions are not scaled. Raise ConfigError for an unknown type or a missing option."""
    if not scaling:
        return None
    way = scaling.get("rope_type", scaling.get("type"))
    if way not in SCALING_OPTIONS:
        raise ConfigError(f"Rotary: rope_type must be one of {', '.join(SCALING_OPTIONS)}, got {way!r}")
    if missing := [name for name in SCALING_OPTIONS[way] if scaling.get(name) is None]:
        raise ConfigError(f"Rotary: rope_scaling of the type {way!r} needs {', '.join(missing)}")
    if way == "default":
        return None
    if way == "dynamic" and d_head == 2:
        raise ConfigError("Rotary: rope_type 'dynamic' needs d_head >= 4: a single pair has no lower frequency")
    return way, *((name, value) for name, value in scaling.items() if isinstance(value, int | float))


@lru_cache(maxsize=64)
def _compute_cos_sin(
    d_head: int, theta: float, scaling: tuple[Any, ...] | None, seq_len: int, time: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of the rotation angles of the first `count` positions, multiplied by the factor of
    the scaling. Both are float64 arrays (count, d_head / 2)."""
    options = {"rope_type": scaling[0], **dict(scaling[1:])} if scaling else None
    turns, size = compute_rotary_frequencies_and_factor(d_head, theta, options, seq_len, time)
    angles = np.arange(count)[:, None] * turns[None, :]
    return np.cos(angles) * size, np.sin(angles) * size
