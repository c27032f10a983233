"""Layers that treat each head alone: attention, and a norm within heads."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from fsdpx.core.array.namespace import joined
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.attention_math import Core, Heads, split_heads
from fsdpx.nn.gradient_accumulation import is_index
from fsdpx.nn.layer import Array, Env, Layer, Params, Portion, Spec, fraction, positive
from fsdpx.nn.norm import RMSNorm
from fsdpx.nn.sharding import CutRequest, Features, Positions

__all__ = ["Attention", "HeadNorm", "PerHead"]

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
        from fsdpx.nn.sequence_attention import Ring, Ulysses  # most sequences are whole

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
