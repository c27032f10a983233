"""Mixture of experts: each position goes through a few of many gated MLPs (Shazeer et al. 2017)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array import kernels
from fsdpx.errors import ConfigError
from fsdpx.nn.check import positive, want_last
from fsdpx.nn.init import Init, normal
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.numeric import add_product, affine, flat, product, wide

__all__ = ["MoE"]


class MoE(Layer):
    """sum over the chosen experts e of w_e down_e(silu(gate_e(x)) up_e(x)): `(samples, ..., d_model)` to the same.

    The `active` experts with the largest of the logits `router x` are chosen at each position, w is the softmax of
    their logits (Mixtral, Jiang et al. 2024). Every position gets all it has chosen, however many choose the same: none
    is dropped. Weights `router (experts, d_model)`, `gate` and `up (experts, d_hidden, d_model)`, `down (experts,
    d_model, d_hidden)`; every rank has all experts of the units that it computes.

    Parameters
    ----------
    d_model : features of the input and the result
    d_hidden : features inside an expert
    experts : so many MLPs
    active : so many of them for each position
    balance : weight of the loss that balances the load (Fedus et al. 2022): experts x the sum over experts e of
        f_e P_e, f_e the choices of e per position and P_e the mean of the softmax of all its logits. It is that of the
        positions computed together, of one microbatch, and acts in backward only: reported losses are without it
    init, out_init : of `router`, `gate` and `up`, and of `down`; None: N(0, 0.02)
    """

    acts_on = "position"
    runs = ("linear", "gated", "gated_backward", "softmax", "softmax_backward")

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        experts: int,
        active: int = 2,
        balance: float = 0.0,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        positive(self, d_model=d_model, d_hidden=d_hidden, experts=experts, active=active)
        if active > experts:
            raise ConfigError(f"MoE: active {active} is more than the {experts} experts")
        self.d_model, self.d_hidden, self.experts, self.active = d_model, d_hidden, experts, active
        self.balance = float(balance)
        self.init = init or normal(0.02)
        self.out_init = out_init or self.init

    def specs(self) -> dict[str, Spec]:
        inside = (self.experts, self.d_hidden, self.d_model)
        return {
            "router": Spec((self.experts, self.d_model), self.init),
            "gate": Spec(inside, self.init),
            "up": Spec(inside, self.init),
            "down": Spec((self.experts, self.d_model, self.d_hidden), self.out_init),
        }

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_last(self, x, self.d_model)
        if self.balance and np.dtype(x.dtype) == np.float16:
            raise ConfigError(f"{self!r}: balance does not know by how much float16 scales the loss: use bf16")
        xp, rows = env.xp, flat(x)
        logits = affine(xp, rows, p["router"], None)
        chosen = xp.argsort(-logits, axis=1, kind="stable")[:, : self.active]
        dtype = wide(x.dtype)
        weights = kernels.softmax(xp, xp.take_along_axis(logits, chosen, axis=1).astype(dtype, copy=False))
        y, held = xp.zeros(rows.shape, dtype=dtype), []
        for e, at in enumerate(self._routes(xp, chosen)):
            mine = at // self.active
            a, b = (affine(xp, rows[mine], p[name][e], None) for name in ("gate", "up"))
            o = affine(xp, kernels.gated(xp, a, b), p["down"][e], None)
            y[mine] += o * weights.reshape(-1)[at][:, None]
            held.append((at, a, b))
        return y.astype(x.dtype, copy=False).reshape(x.shape), (rows, logits, chosen, weights, tuple(held))

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        rows, logits, chosen, weights, held = saved
        xp, drows, dtype = env.xp, flat(dy), wide(dy.dtype)
        dx, kept = xp.zeros(rows.shape, dtype=dtype), []
        dweights = xp.zeros((weights.size,), dtype=weights.dtype)
        for e, (at, a, b) in enumerate(held):
            mine, h = at // self.active, kernels.gated(xp, a, b)
            dh = product(xp, drows[mine], p["down"][e])
            dweights[at] = xp.sum(dh * h, axis=1, dtype=dtype)
            share = weights.reshape(-1)[at][:, None]
            da, db = kernels.gated_backward(xp, a, b, (dh * share).astype(dy.dtype, copy=False))
            dx[mine] += product(xp, da, p["gate"][e]) + product(xp, db, p["up"][e])
            kept.append((mine, da, db, (drows[mine] * share).astype(dy.dtype, copy=False), h))
        dpicked = kernels.softmax_backward(xp, weights, dweights.reshape(weights.shape))
        dlogits = xp.zeros((rows.shape[0], self.experts), dtype=dy.dtype)
        xp.put_along_axis(dlogits, chosen, dpicked.astype(dy.dtype, copy=False), axis=1)
        if self.balance:
            dlogits += self._balancing(xp, logits, [len(at) for at, *_ in held]).astype(dy.dtype, copy=False)
        dx += product(xp, dlogits, p["router"])
        return dx.astype(dy.dtype, copy=False).reshape(dy.shape), (rows, dlogits, kept)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        rows, dlogits, experts = kept
        add_product(env.xp, g, "router", dlogits.T, rows)
        for e, (mine, da, db, do, h) in enumerate(experts):
            xs = rows[mine]
            for name, left, right in (("gate", da, xs), ("up", db, xs), ("down", do, h)):
                if name in g:
                    add_product(env.xp, {name: g[name][e]}, name, left.T, right)

    def _balancing(self, xp: Any, logits: Array, counts: list[int]) -> Array:
        """The gradient of the balancing loss times the number of positions: losses are sums over positions here."""
        odds = kernels.softmax(xp, logits.astype(wide(logits.dtype), copy=False))
        factor = self.balance * self.experts / max(logits.shape[0], 1)
        slopes = xp.zeros(odds.shape, dtype=odds.dtype)
        slopes += xp.asarray([count * factor for count in counts], dtype=odds.dtype)
        return kernels.softmax_backward(xp, odds, slopes)

    def _routes(self, xp: Any, chosen: Array) -> list[Array]:
        """For each expert where it is in the flat `chosen`; without data, as many for each."""
        places = chosen.reshape(-1)
        if getattr(xp, "holds_no_data", False):
            return [xp.arange(places.size // self.experts) for _ in range(self.experts)]
        return [xp.flatnonzero(places == e) for e in range(self.experts)]
