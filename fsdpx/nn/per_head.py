"""Layers that treat each head alone: attention, a norm within heads, and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import joined
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.attention_math import Core, Heads, split_heads
from fsdpx.nn.gradient_accumulation import is_index, wide
from fsdpx.nn.layer import Array, Env, Layer, Params, Portion, Spec, fraction, positive
from fsdpx.nn.norm import RMSNorm
from fsdpx.nn.sequence import Ring, Ulysses
from fsdpx.nn.sharding import CutRequest, Features, Positions

__all__ = ["Attention", "HeadNorm", "PerHead", "Rotary", "frequencies"]

class PerHead(Layer):
    """A layer that gets features of heads side by side, and so can be given a part of the heads.

    Parameters of it are of one head, which all heads share: with a part of the heads their gradient is a part."""

    d_head: int
    blocks = 1
    """Blocks of heads that come side by side in one input."""

    def cut(self, request: CutRequest) -> Portion:
        """With a part of the heads it does what it does with all; parts of several inputs must be of the same heads."""
        kinds = request.kinds[:3]  # without segments, which are whole
        cut = [kind for kind in kinds if isinstance(kind, Features)]
        if request.mark is not None or not (cut or any(isinstance(kind, Positions) for kind in kinds)):
            return super().cut(replace(request, kinds=kinds))
        if not cut:
            return Portion(self.on_part(request), Positions(), self.specs())
        grain = cut[0].grain
        whole = all(kind.blocks == self.blocks and kind.grain % self.d_head == 0 for kind in cut)
        if len(cut) < len(kinds) or not whole or len({kind.total // kind.grain for kind in cut}) > 1:
            options = f"grain={self.d_head}" if self.blocks == 1 else f"blocks={self.blocks}, grain={self.d_head}"
            raise ConfigError(
                f"{request.path!r} {self!r} reads {', '.join(map(str, kinds))}, but needs heads of {self.d_head} "
                f"features that stay together: give Columns a grain, such as nn.Column({options})"
            )
        return Portion(self, Features(cut[0].total // self.blocks, 1, grain, cut[0].source), self.specs())

    def on_part(self, request: CutRequest) -> Layer:
        """The layer that does the same with a part of the sequence, of all heads."""
        return self


class HeadNorm(PerHead):
    """`RMSNorm` of each head: `(samples, time, heads x d_head)` to the same.

    Parameters
    ----------
    d_head : features of a head; `weight (d_head,)` is that of all heads
    eps, unit_offset : as in `RMSNorm`
    """

    acts_on = "position"
    cheap = True

    def __init__(self, d_head: int, eps: float | None = None, unit_offset: bool = False) -> None:
        self.d_head, self.eps, self.unit_offset = d_head, eps, bool(unit_offset)
        self._norm = RMSNorm(d_head, eps, unit_offset=unit_offset)
        self.runs = self._norm.runs

    def specs(self) -> dict[str, Spec]:
        return self._norm.specs()

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        y, (_, rstd) = self._norm.forward(env, p, self._apart(x))
        return y.reshape(x.shape), (x, rstd)

    def recompute(self, env: Env, p: Params, saved: Any) -> Array:
        return self.forward(env, p, saved[0])[0]

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, rstd = saved
        dx, kept = self._norm.backward_input(env, p, (self._apart(x), rstd), self._apart(dy))
        return dx.reshape(x.shape), kept

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        self._norm.backward_params(env, g, kept)

    def _apart(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.d_head, self.d_head)


class Attention(PerHead):
    """softmax(q k^T / sqrt(d_head)) v per head, of queries, keys and values that come as three inputs.

    Queries are `(samples, time, heads x d_head)`, keys and values `(samples, time, kv_heads x d_head)`: queries of
    heads / kv_heads heads, one after the other, share a head of keys and values (Ainslie et al. 2023). With "attention"
    in `env.recompute` the layer around it saves the inputs alone, see `Attending`.

    Parameters
    ----------
    n_heads, kv_heads : heads of queries, and of keys and values; n_heads is a multiple of kv_heads
    d_head : features of a head
    causal : a position attends to itself and to earlier positions only
    window : with `causal`, to itself and the window - 1 positions before it (Beltagy et al. 2020); None: to all
    segments : a fourth input, whole numbers (samples, time): a position attends to those of its own number only.
        Documents that are packed into one sequence have a number each, and padding another one
    fused : queries, keys and values are one input, side by side, and have as many heads
    dropout : with `fused`, on the attention weights, which are then saved in full, (samples, heads, time, time)
    """

    def __init__(
        self,
        n_heads: int,
        kv_heads: int,
        d_head: int,
        causal: bool = True,
        window: int | None = None,
        segments: bool = False,
        *,
        fused: bool = False,
        dropout: float = 0.0,
    ) -> None:
        positive(self, n_heads=n_heads, kv_heads=kv_heads, d_head=d_head)
        fraction(self, dropout=dropout)
        if window is not None:
            positive(self, window=window)
        if n_heads % kv_heads:
            raise ConfigError(f"Attention: n_heads {n_heads} is not a multiple of kv_heads {kv_heads}")
        if window is not None and not causal:
            raise ConfigError("Attention: a window needs causal=True")
        if fused and (segments or kv_heads != n_heads):
            raise ConfigError("Attention: fused needs kv_heads=n_heads, and no segments")
        if dropout and not fused:
            raise ConfigError("Attention: dropout needs fused=True")
        self.n_heads, self.kv_heads, self.d_head = n_heads, kv_heads, d_head
        self.causal, self.window = bool(causal), window
        self.fused, self.dropout = bool(fused), float(dropout)
        self.segments, self.n_inputs = bool(segments), 1 if fused else 4 if segments else 3
        self.takes = ("numbers", "numbers", "numbers", "indices")[: self.n_inputs]
        self.runs = ("softmax", "softmax_backward", "drop_backward") if dropout else ("attention", "attention_backward")
        self.blocks = 3 if fused else 1
        self._heads = Heads(n_heads, d_head, self.causal, self.dropout, window or 0)
        self.core: Core | None = None

    @property
    def caches(self) -> bool:  # type: ignore[override]
        return self.causal and self.core is None and not self.segments

    def reads_whole(self, place: int, mark: Any) -> bool:
        return place == 3

    def on_part(self, request: CutRequest) -> Layer:
        path, sequence = request.path, request.sequence
        if sequence == "ulysses":
            request.enough(self.n_heads, "heads", 'sequence="ring"')
        if sequence not in ("ring", "ulysses"):
            raise ConfigError(
                f"{path!r}: attention needs the whole sequence, but gets a part of it: cut it by heads, with nn.Own "
                "for the layer around it"
            )
        within = "segments" if self.segments else None if self.window is None else f"a window of {self.window}"
        if within:
            raise ConfigError(
                f"{path!r}: attention within {within} works on whole sequences: use a tensor plan, or "
                f"sequence='parallel', instead of {sequence!r}"
            )
        new = copy(self)
        new.core = Ring(self._heads) if sequence == "ring" else Ulysses(self._heads)
        return new

    def forward(self, env: Env, p: Params, x: Any) -> tuple[Array, Any]:
        self._want((x,) if self.fused else x)
        inputs = (x,) if "attention" in env.recompute else ()
        if self.core is not None:
            merged, kept = self.core.forward(env, x if self.fused else self._repeated(env, *x))
        elif self.fused:
            merged, kept = self._heads.forward(env, x)
        else:
            merged, rest = self._heads.attend(env, *self._split(x[:3]), segments=self._names(env, x))
            kept = tuple(x), merged, rest
        return merged, (kept, *inputs)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        kept = saved[0]
        if self.fused:
            return (self.core or self._heads).backward(env, kept, dy), ()
        if self.core is not None:
            return self._summed(env, self.core.backward(env, kept, dy)), ()
        x, merged, rest = kept
        d = self._heads.attend_backward(env, merged, rest, dy, *self._split(x[:3]), segments=self._names(env, x))
        parts = [part.swapaxes(1, 2).reshape(a.shape) for part, a in zip(d, x[:3], strict=True)]
        return (*parts, *(None for _ in x[3:])), ()

    def _want(self, x: tuple[Array, ...]) -> None:
        q, k, v, *segments = x * 3 if self.fused else x
        fits = q.shape[2:] and q.shape[2] * self.kv_heads == k.shape[2] * self.n_heads and k.shape == v.shape
        if not fits or q.shape[2] % (self.blocks * self.d_head) or any(a.shape[:2] != q.shape[:2] for a in x):
            wanted = f"(samples, time, {self.n_heads} x {self.d_head}), twice (.., {self.kv_heads} x {self.d_head})"
            got = ", ".join(str(tuple(a.shape)) for a in x)
            more = " and segments (samples, time)" if self.segments else ", side by side" if self.fused else ""
            raise ShapeError(f"{self!r} wants queries, keys and values {wanted}{more}, got {got}")
        if any(not is_index(a) for a in segments):
            raise DataError(f"{self!r} wants whole numbers as segments, got {segments[0].dtype}")

    def _names(self, env: Env, x: tuple[Array, ...]) -> Array | None:
        """The segments, if there are any, as the kernel takes them."""
        return x[3].astype(env.xp.int64, copy=False) if self.segments else None

    def _split(self, x: tuple[Array, ...]) -> list[Array]:
        """Views (samples, heads, time, d_head)."""
        return [split_heads(a, 1, self.d_head)[0] for a in x]

    def _repeated(self, env: Env, q: Array, k: Array, v: Array) -> Array:
        """Queries, keys and values side by side, with a head of keys and values for each of the queries."""
        shape = (*q.shape[:2], self.kv_heads, self.n_heads // self.kv_heads, self.d_head)
        more = [env.xp.broadcast_to(a.reshape(*shape[:3], 1, self.d_head), shape).reshape(q.shape) for a in (k, v)]
        return joined(env.xp, (q, *more), 2)

    def _summed(self, env: Env, d: Array) -> tuple[Array, ...]:
        """The gradients of q, k and v from that of `_repeated`."""
        width = self.n_heads * self.d_head
        dq, *rest = (d[:, :, i * width : (i + 1) * width] for i in range(3))
        shape = (*d.shape[:2], self.kv_heads, self.n_heads // self.kv_heads, self.d_head)
        kv = (*d.shape[:2], self.kv_heads * self.d_head)
        return dq, *(env.xp.sum(part.reshape(shape), axis=3).reshape(kv) for part in rest)


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
