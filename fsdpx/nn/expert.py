"""Experts cut over the tensor axis: rows travel to the ranks of their experts, and back (Lepikhin et al. 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fsdpx.nn import moves
from fsdpx.nn.cut import Cut, share
from fsdpx.nn.init import Init
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.moe import (
    MoE,
    add_experts,
    balancing,
    experts,
    experts_backward,
    router,
    router_backward,
    tally,
    want_good,
)
from fsdpx.nn.numeric import add_product, flat, product
from fsdpx.nn.tensor import named

__all__ = ["CutMoE"]
EXPERTS = Cut(0)


class CutMoE(Layer):
    """`MoE` of whose experts each rank of the tensor axis has some, whole: expert parallelism.

    `gate`, `up` and `down` are cut along dim 0, every rank has all of `router`. Each rank routes its own rows: those of
    its part of the input, or its part of the rows where all ranks have the whole input. They travel by all-to-all to
    the ranks that have their experts, as many as have chosen them, and the results travel back; no row is dropped. The
    gradient of `router` is this rank's part. The balancing loss is that of the positions of all ranks of the axis.

    Bytes that one rank sends to others, d = bytes of a row, w = bytes of a weight, c = choices of its rows that fall on
    experts elsewhere, c' = those from elsewhere that fall on its own: c (d + w) + c' d in forward, c d + c' (d + w) in
    backward, the counts of rows, 8 bytes x experts of each rank, and without `sequence` an all-gather of the result and
    one of the gradient of the input.

    Parameters
    ----------
    d_model, d_hidden, experts, active, balance, init, out_init : of the full layer, as in `MoE`
    sequence : the input and the result are cut, along dim 1 or dim 0; else every rank has all of them
    """

    acts_on = "position"
    runs = MoE.runs

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        experts: int,
        active: int = 2,
        balance: float = 0.0,
        sequence: bool = False,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        self._moe = MoE(d_model, d_hidden, experts, active, balance, init=init, out_init=out_init)
        self.d_model, self.d_hidden, self.experts, self.active = d_model, d_hidden, experts, active
        self.balance, self.sequence = self._moe.balance, bool(sequence)
        self.init, self.out_init = self._moe.init, self._moe.out_init
        self.caches = not sequence

    def specs(self) -> dict[str, Spec]:
        return {n: s if n == "router" else replace(s, cut=EXPERTS) for n, s in self._moe.specs().items()}

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_good(self, x, self.d_model, self.balance)
        xp, own = env.xp, self._own(env, flat(x))
        chosen = router(xp, own, p["router"], self.active)
        way = self._way(env, chosen.experts)
        arrived = self._there(env, way, own[way.order // self.active], "rows for experts")
        weights = self._there(env, way, chosen.weights.reshape(-1)[way.order], "weights of experts")
        z, held = experts(xp, p, arrived, [(at, weights[at]) for at in way.places])
        y = self._summed(xp, way, self._back(env, way, z.astype(x.dtype, copy=False), "results of experts"), z.dtype)
        tally(env, way.counts[env.mesh.tensor.rank], sum(way.arriving))
        return self._whole(env, y.astype(x.dtype, copy=False), x.shape, "output"), (own, chosen, way, arrived, held)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        own, chosen, way, arrived, held = saved
        xp, drows = env.xp, self._own(env, flat(dy))
        dz = self._there(env, way, drows[way.order // self.active], "gradients for experts")
        darrived, found, kept = experts_backward(xp, p, held, dz)
        there = xp.zeros((arrived.shape[0],), dtype=darrived.dtype)
        for at, one in zip(way.places, found, strict=True):
            there[at] = one
        dx = self._back(env, way, darrived.astype(dy.dtype, copy=False), "gradients of rows")
        dx = self._summed(xp, way, dx, darrived.dtype)
        dweights = xp.zeros((chosen.weights.size,), dtype=chosen.weights.dtype)
        dweights[way.order] = self._back(env, way, there, "gradients of weights")
        dlogits = router_backward(xp, chosen, dweights, dy.dtype, self._slopes(way))
        dx += product(xp, dlogits, p["router"])
        dx = self._whole(env, dx.astype(dy.dtype, copy=False), dy.shape, "input gradient")
        return dx, (own, dlogits, arrived, kept)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        own, dlogits, arrived, each = kept
        add_product(env.xp, g, "router", dlogits.T, own)
        add_experts(env.xp, g, arrived, each)

    def _own(self, env: Env, rows: Array) -> Array:
        """The rows that this rank routes."""
        return rows if self.sequence else moves.cut(env.xp, env.mesh.tensor, rows, 0)

    def _whole(self, env: Env, own: Array, shape: tuple[int, ...], what: str) -> Array:
        """The inverse, in the shape of the layer's input."""
        if not self.sequence:
            own = moves.join(env.xp, env.mesh.tensor, own, 0, _rows(shape), what=named(env, what))
        return own.reshape(shape)

    def _evenly(self, rows: int) -> list[int]:
        """How many of `rows` fall on each expert where all have equally many."""
        return [stop - start for start, stop in (share(rows, e, self.experts) for e in range(self.experts))]

    def _way(self, env: Env, chosen: Array) -> _Way:
        """Agreed on by the ranks of the axis, by all-gather; without data, as many rows for each expert."""
        xp, comm, choices = env.xp, env.mesh.tensor, chosen.reshape(-1)
        imagined = getattr(xp, "holds_no_data", False)
        mine = xp.zeros((self.experts,), dtype=np.int64) if imagined else xp.bincount(choices, minlength=self.experts)
        counts = moves.gather(xp, comm, mine.astype(np.int64, copy=False)[None], 0, what=named(env, "counts of rows"))
        known = [self._evenly(choices.size)] * comm.size if imagined else counts.tolist()
        bounds = [share(self.experts, rank, comm.size) for rank in range(comm.size)]
        here = range(*bounds[comm.rank])
        places: list[list[Array]] = [[] for _ in here]
        at = 0
        for row in known:
            for found, e in zip(places, here, strict=True):
                found.append(xp.arange(at, at + row[e]))
                at += row[e]
        return _Way(
            xp.argsort(choices, kind="stable"),
            known,
            [sum(known[comm.rank][first:end]) for first, end in bounds],
            [sum(row[e] for e in here) for row in known],
            [xp.concatenate(found) for found in places],
        )

    def _there(self, env: Env, way: _Way, rows: Array, what: str) -> Array:
        return moves.dispatch(env.xp, env.mesh.tensor, rows, way.leaving, way.arriving, what=named(env, what))

    def _back(self, env: Env, way: _Way, rows: Array, what: str) -> Array:
        return moves.dispatch(env.xp, env.mesh.tensor, rows, way.arriving, way.leaving, what=named(env, what))

    def _summed(self, xp: Any, way: _Way, found: Array, dtype: Any) -> Array:
        """For each row of this rank the sum of what came back for its choices."""
        each = xp.empty(found.shape, dtype=found.dtype)
        each[way.order] = found
        return xp.sum(each.reshape(-1, self.active, self.d_model), axis=1, dtype=dtype)

    def _slopes(self, way: _Way) -> list[float]:
        """Of the balancing loss over all ranks of the axis."""
        return balancing(self.balance, [sum(column) for column in zip(*way.counts, strict=True)], self.active)


class _Way(NamedTuple):
    """How rows travel. order: the flat choices of this rank's rows by expert. counts: by rank, of how many rows each
    expert was chosen there. leaving, arriving: rows to and from each rank. places: of each expert that is here, its
    rows among those that arrive."""

    order: Array
    counts: list[list[int]]
    leaving: list[int]
    arriving: list[int]
    places: list[Array]


def _rows(shape: tuple[int, ...]) -> int:
    """How many rows an array has, of which the last dim is one."""
    return int(np.prod(shape[:-1]))
