"""Mixture of experts (MoE): a layer that routes each token to some of its experts, and its expert-parallel version."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError
from fsdpx.nn import collectives
from fsdpx.nn.gradient_accumulation import (
    accumulation_dtype,
    add_matmul_gradient,
    as_rows,
    linear_forward,
    matmul_in_dtype_of_first,
)
from fsdpx.nn.init import Init, normal
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    ShardedLayer,
    require_last_dim,
    require_positive,
)
from fsdpx.nn.linear import make_call_label
from fsdpx.nn.shard_specs import (
    LayerDefault,
    Replicated,
    ShardedBatch,
    ShardedSequence,
    ShardingContext,
    ShardSpec,
    shard_bounds,
)

__all__ = [
    "MoE", "RoutingChoice", "ShardedMoE", "add_expert_gradients", "apply_experts", "apply_experts_backward",
    "choose_experts_for_rows", "compute_balance_gradients", "compute_router_logits_gradient", "require_valid_input",
    "tally_expert_choices",
]  # fmt: skip


class MoE(Layer):
    """Mixture of experts with gated MLPs: sum over the chosen experts e of `w_e * down_e(silu(gate_e(x)) * up_e(x))`.

    Input and output are `(samples, ..., d_model)`. For each token, that is, each vector x of `d_model` features, the
    `active` experts with the largest logits `router x` are chosen. The routing weights w are the softmax over the
    logits of the chosen experts (Mixtral, Jiang et al. 2024). There is no capacity limit, so no token is dropped. The
    parameters are `router (experts, d_model)`, `gate` and `up (experts, d_hidden, d_model)`, and
    `down (experts, d_model, d_hidden)`. Every rank that runs the layer holds all of its experts. On a tensor axis, the
    layer is replaced by a `ShardedMoE`, which distributes the experts over the ranks.

    Parameters
    ----------
    d_model : number of features of the input and the output
    d_hidden : hidden width of an expert
    experts : number of experts
    active : number of experts chosen for each token
    balance : weight of the load-balancing loss (Fedus et al. 2022), which is `experts` times the sum of f_e * P_e over
        all experts e. Here f_e is the mean number of times that a token chooses e, and P_e is the softmax probability
        of e among all experts, averaged over tokens. The loss is computed over the tokens of one microbatch, and acts
        only in the backward pass, so reported losses do not include it
    init, out_init : initializer of `router`, `gate` and `up`, and initializer of `down`; if None, N(0, 0.02)
    """

    acts_on = "position"
    kernel_names = ("linear", "gated", "gated_backward", "softmax", "softmax_backward")
    plan = {"": LayerDefault()}  # noqa: RUF012
    part = False
    """Whether the input is sharded, so that each rank of the tensor axis has different tokens."""

    routes = True

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
        require_positive(self, d_model=d_model, d_hidden=d_hidden, experts=experts, active=active)
        if active > experts:
            raise ConfigError(f"MoE: active {active} is more than the {experts} experts")
        self.d_model, self.d_hidden, self.experts, self.active = d_model, d_hidden, experts, active
        self.balance = float(balance)
        self.init = init or normal(0.02)
        self.out_init = out_init or self.init

    def specs(self) -> dict[str, ParameterSpec]:
        inside = (self.experts, self.d_hidden, self.d_model)
        return {
            "router": ParameterSpec((self.experts, self.d_model), self.init),
            "gate": ParameterSpec(inside, self.init),
            "up": ParameterSpec(inside, self.init),
            "down": ParameterSpec((self.experts, self.d_model, self.d_hidden), self.out_init),
        }

    def needs_all_positions(self) -> bool:
        # the balancing loss is computed from averages over all tokens, so a rank cannot compute it from its own tokens
        # alone
        return self.balance > 0

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind, context = request.kinds[0], request.sequence in ("ulysses", "ring")
        if isinstance(request.mark, LayerDefault) or (
            request.mark is None and (context or isinstance(kind, ShardedBatch))
        ):
            kind = request.require_unsharded_features(self)
            request.require_at_least_one_per_rank(
                self.experts, "experts", "" if context else "a tensor_plan that leaves them whole"
            )
            size = (self.d_model, self.d_hidden, self.experts, self.active, self.balance)
            cut = ShardedMoE(*size, not isinstance(kind, Replicated), init=self.init, out_init=self.out_init)
            return ShardedLayer(cut, kind, ("router",))
        portion = super().shard_over_ranks(request)
        if not isinstance(portion.kind, ShardedSequence):
            return portion
        new = copy(self)
        new.part = True
        return replace(portion, layer=new)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_valid_input(self, x, self.d_model, self.balance)
        xp, rows = env.xp, as_rows(x)
        chosen = choose_experts_for_rows(xp, rows, p["router"], self.active)
        routes = self._group_choices_by_expert(xp, chosen.experts)
        if self.part or env.mesh.tensor.rank == 0:
            counts = [len(at) for at in routes]
            tally_expert_choices(env, counts, sum(counts))
        weights = chosen.weights.reshape(-1)
        y, held = apply_experts(xp, p, rows, [(at // self.active, weights[at]) for at in routes])
        return y.astype(x.dtype, copy=False).reshape(x.shape), (rows, chosen, routes, held)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        rows, chosen, routes, held = saved
        xp = env.xp
        dx, found, kept = apply_experts_backward(xp, p, held, as_rows(dy))
        dweights = xp.zeros((chosen.weights.size,), dtype=chosen.weights.dtype)
        for at, one in zip(routes, found, strict=True):
            dweights[at] = one
        slopes = compute_balance_gradients(self.balance, self._all_reduce_counts(env, routes), self.active)
        dlogits = compute_router_logits_gradient(xp, chosen, dweights, dy.dtype, slopes)
        dx += matmul_in_dtype_of_first(xp, dlogits, p["router"])
        return dx.astype(dy.dtype, copy=False).reshape(dy.shape), (rows, dlogits, kept)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        rows, dlogits, each = kept
        add_matmul_gradient(env.xp, g, "router", dlogits.T, rows)
        add_expert_gradients(env.xp, g, rows, each)

    def _all_reduce_counts(self, env: LayerContext, routes: Sequence[Array]) -> list[int]:
        """Return how often each expert was chosen, summed over the tensor axis, for the balancing loss. Collective if
        the input is sharded and `balance` is not 0."""
        counts = [len(at) for at in routes]
        if not self.part or not self.balance:
            return counts
        mine, what = env.xp.asarray(counts, dtype=np.int64), make_call_label(env, "choices of experts")
        total = collectives.all_reduce_sum(env.xp, env.mesh.tensor, mine, fresh=True, what=what)
        return counts if getattr(env.xp, "holds_no_data", False) else total.tolist()

    def _group_choices_by_expert(self, xp: Any, chosen: Array) -> list[Array]:
        """Return the positions at which each expert occurs in the flattened array `chosen`.

        On shape-only arrays, all experts get the same number of positions."""
        places = chosen.reshape(-1)
        if getattr(xp, "holds_no_data", False):
            return [xp.arange(places.size // self.experts) for _ in range(self.experts)]
        return [xp.flatnonzero(places == e) for e in range(self.experts)]


class RoutingChoice(NamedTuple):
    """The experts chosen for each row (token) of the input.

    Attributes
    ----------
    logits : logits of all experts, (rows, experts)
    experts : indices of the chosen experts, (rows, active)
    weights : routing weights of the chosen experts, (rows, active)
    """

    logits: Array
    experts: Array
    weights: Array


def require_valid_input(layer: Layer, x: Array, d_model: int, balance: float) -> None:
    """Raise ShapeError unless the last dim of x has size `d_model`. Raise ConfigError for a balancing loss in float16.
    """
    require_last_dim(layer, x, d_model)
    if balance and np.dtype(x.dtype) == np.float16:
        raise ConfigError(f"{layer!r}: balance does not know by how much float16 scales the loss: use bf16")


def choose_experts_for_rows(xp: Any, rows: Array, weight: Array, active: int) -> RoutingChoice:
    """Choose the `active` experts with the largest logits for each row (token). The logits are `rows @ weight.T`."""
    logits = linear_forward(xp, rows, weight, None)
    best = xp.argsort(-logits, axis=1, kind="stable")[:, :active]
    picked = xp.take_along_axis(logits, best, axis=1).astype(accumulation_dtype(rows.dtype), copy=False)
    return RoutingChoice(logits, best, kernels.softmax(xp, picked))


def compute_balance_gradients(balance: float, counts: Sequence[int], active: int) -> list[float]:
    """Return the derivative of the balancing loss with respect to each expert's probability for one token.

    The derivative is multiplied by the number of tokens, because the balancing loss is a mean over tokens, but other
    losses are sums over tokens."""
    factor = balance * len(counts) / max(sum(counts) / active, 1)
    return [factor * count for count in counts]


def compute_router_logits_gradient(
    xp: Any, chosen: RoutingChoice, dweights: Array, dtype: Any, slopes: Sequence[float]
) -> Array:
    """Return the gradient of the router's logits, (rows, experts).

    `dweights` is the flattened gradient of the routing weights, and `slopes` is the result of
    `compute_balance_gradients`."""
    logits, best, weights = chosen
    dpicked = kernels.softmax_backward(xp, weights, dweights.reshape(weights.shape))
    dlogits = xp.zeros(logits.shape, dtype=dtype)
    xp.put_along_axis(dlogits, best, dpicked.astype(dtype, copy=False), axis=1)
    if any(slopes):
        odds = kernels.softmax(xp, logits.astype(accumulation_dtype(logits.dtype), copy=False))
        dodds = xp.zeros(odds.shape, dtype=odds.dtype)
        dodds += xp.asarray(slopes, dtype=odds.dtype)
        dlogits += kernels.softmax_backward(xp, odds, dodds).astype(dtype, copy=False)
    return dlogits


def apply_experts(xp: Any, p: Params, rows: Array, routes: Sequence[tuple[Array, Array]]) -> tuple[Array, list[Any]]:
    """Return the weighted sum of each row's expert outputs on this rank, and the values saved for the backward pass.

    `routes` has one entry per local expert: (indices of its rows, routing weights of these rows)."""
    y, held = xp.zeros(rows.shape, dtype=accumulation_dtype(rows.dtype)), []
    for e, (mine, weights) in enumerate(routes):
        a, b = (linear_forward(xp, rows[mine], p[name][e], None) for name in ("gate", "up"))
        o = linear_forward(xp, kernels.gated(xp, a, b), p["down"][e], None)
        y[mine] += o * weights[:, None]
        held.append((mine, weights, a, b))
    return y, held


def apply_experts_backward(xp: Any, p: Params, held: Any, dy: Array) -> tuple[Array, list[Array], list[Any]]:
    """Return the gradients of the rows, a list with the gradients of each expert's routing weights, and the argument
    `kept` for `add_expert_gradients`."""
    dx, slopes, kept = xp.zeros(dy.shape, dtype=accumulation_dtype(dy.dtype)), [], []
    for e, (mine, weights, a, b) in enumerate(held):
        h, share = kernels.gated(xp, a, b), weights[:, None]
        dh = matmul_in_dtype_of_first(xp, dy[mine], p["down"][e])
        slopes.append(xp.sum(dh * h, axis=1, dtype=dx.dtype))
        da, db = kernels.gated_backward(xp, a, b, (dh * share).astype(dy.dtype, copy=False))
        dx[mine] += matmul_in_dtype_of_first(xp, da, p["gate"][e]) + matmul_in_dtype_of_first(xp, db, p["up"][e])
        kept.append((mine, da, db, (dy[mine] * share).astype(dy.dtype, copy=False), h))
    return dx, slopes, kept


def add_expert_gradients(xp: Any, g: Params, rows: Array, kept: Sequence[Any]) -> None:
    """Add the gradients of the parameters of this rank's experts to `g`."""
    for e, (mine, da, db, do, h) in enumerate(kept):
        xs = rows[mine]
        for name, left, right in (("gate", da, xs), ("up", db, xs), ("down", do, h)):
            if name in g:
                add_matmul_gradient(xp, {name: g[name][e]}, name, left.T, right)


def tally_expert_choices(env: LayerContext, counts: Sequence[int], computed: int) -> None:
    """Count how often each expert was chosen, and how many (token, expert) choices this rank computed, for the report
    on expert load."""
    if env.training and not env.recomputing and not getattr(env.xp, "holds_no_data", False):
        env.mesh.counters.add_tally(env.random.path, (*counts, computed))


EXPERT_SHARDS = ShardSpec(0)


class ShardedMoE(Layer):
    """`MoE` with expert parallelism: the experts are distributed over the ranks of the tensor axis.

    `gate`, `up` and `down` are sharded along dim 0; `router` is replicated. Each rank routes the rows (tokens) of its
    shard of the input or, if all ranks have the full input, its share of the rows. An all-to-all sends the rows to the
    ranks that hold their experts, and a second all-to-all returns the results. No row is dropped. Each rank computes
    only a partial gradient of `router`, from the rows that it routed. The balancing loss includes the tokens of all
    ranks of the axis.

    Communication per rank: a row has d bytes, and a routing weight w bytes. This rank's rows choose experts on other
    ranks c times, and other ranks' rows choose experts on this rank c' times. The rank sends c * (d + w) + c' * d bytes
    in the forward pass and c * d + c' * (d + w) bytes in the backward pass. In addition, each rank sends its row
    counts, 8 bytes per expert, to every other rank. Without `sequence`, the result and the gradient of the input are
    all-gathered.

    Parameters
    ----------
    d_model, d_hidden, experts, active, balance, init, out_init : arguments of the full layer, as in `MoE`
    sequence : whether input and result are sharded, along either dim 0 or dim 1; if False (default), every rank has
        them in full
    """

    acts_on = "position"
    kernel_names = MoE.kernel_names

    routes = True

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

    def specs(self) -> dict[str, ParameterSpec]:
        return {n: s if n == "router" else replace(s, cut=EXPERT_SHARDS) for n, s in self._moe.specs().items()}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_valid_input(self, x, self.d_model, self.balance)
        xp, own = env.xp, self._select_rows_of_rank(env, as_rows(x))
        chosen = choose_experts_for_rows(xp, own, p["router"], self.active)
        routing = self._all_gather_row_counts_and_make_routing(env, chosen.experts)
        arrived = self._all_to_all_to_experts(env, routing, own[routing.order // self.active], "rows for experts")
        weights = self._all_to_all_to_experts(
            env, routing, chosen.weights.reshape(-1)[routing.order], "weights of experts"
        )
        z, held = apply_experts(xp, p, arrived, [(at, weights[at]) for at in routing.places])
        y = self._sum_results_of_choices(
            xp,
            routing,
            self._all_to_all_from_experts(env, routing, z.astype(x.dtype, copy=False), "results of experts"),
            z.dtype,
        )
        tally_expert_choices(env, routing.counts[env.mesh.tensor.rank], sum(routing.recv_counts))
        return self._all_gather_rows(env, y.astype(x.dtype, copy=False), x.shape, "output"), (
            own,
            chosen,
            routing,
            arrived,
            held,
        )

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        own, chosen, routing, arrived, held = saved
        xp, drows = env.xp, self._select_rows_of_rank(env, as_rows(dy))
        dz = self._all_to_all_to_experts(env, routing, drows[routing.order // self.active], "gradients for experts")
        darrived, found, kept = apply_experts_backward(xp, p, held, dz)
        there = xp.zeros((arrived.shape[0],), dtype=darrived.dtype)
        for at, one in zip(routing.places, found, strict=True):
            there[at] = one
        dx = self._all_to_all_from_experts(env, routing, darrived.astype(dy.dtype, copy=False), "gradients of rows")
        dx = self._sum_results_of_choices(xp, routing, dx, darrived.dtype)
        dweights = xp.zeros((chosen.weights.size,), dtype=chosen.weights.dtype)
        dweights[routing.order] = self._all_to_all_from_experts(env, routing, there, "gradients of weights")
        dlogits = compute_router_logits_gradient(
            xp, chosen, dweights, dy.dtype, self._compute_balance_gradients(routing)
        )
        dx += matmul_in_dtype_of_first(xp, dlogits, p["router"])
        dx = self._all_gather_rows(env, dx.astype(dy.dtype, copy=False), dy.shape, "input gradient")
        return dx, (own, dlogits, arrived, kept)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        own, dlogits, arrived, each = kept
        add_matmul_gradient(env.xp, g, "router", dlogits.T, own)
        add_expert_gradients(env.xp, g, arrived, each)

    def _select_rows_of_rank(self, env: LayerContext, rows: Array) -> Array:
        """Return the rows that this rank routes. If the input is sharded, it routes all of its rows; otherwise, it
        routes its share of the rows of the full input."""
        return rows if self.sequence else collectives.take_shard(env.xp, env.mesh.tensor, rows, 0)

    def _all_gather_rows(self, env: LayerContext, own: Array, shape: tuple[int, ...], what: str) -> Array:
        """All-gather the rows of all ranks, and return them in the shape of the layer's input. Collective unless
        `sequence` is True; in that case, `own` is only reshaped.

        This inverts `_select_rows_of_rank`. `what` names the rows in error messages."""
        if not self.sequence:
            own = collectives.all_gather_replicated(
                env.xp, env.mesh.tensor, own, 0, _count_rows(shape), what=make_call_label(env, what)
            )
        return own.reshape(shape)

    def _get_even_row_counts(self, rows: int) -> list[int]:
        """Return how many of `rows` rows each expert gets if they are distributed evenly."""
        return [stop - start for start, stop in (shard_bounds(rows, e, self.experts) for e in range(self.experts))]

    def _all_gather_row_counts_and_make_routing(self, env: LayerContext, chosen: Array) -> _RowRouting:
        """All-gather the number of rows that each rank sends to each expert, and return the routing between ranks.
        Collective.

        On shape-only arrays, rows are distributed evenly."""
        xp, comm, choices = env.xp, env.mesh.tensor, chosen.reshape(-1)
        imagined = getattr(xp, "holds_no_data", False)
        mine = xp.zeros((self.experts,), dtype=np.int64) if imagined else xp.bincount(choices, minlength=self.experts)
        counts = collectives.all_gather_dim(
            xp, comm, mine.astype(np.int64, copy=False)[None], 0, what=make_call_label(env, "counts of rows")
        )
        known = [self._get_even_row_counts(choices.size)] * comm.size if imagined else counts.tolist()
        bounds = [shard_bounds(self.experts, rank, comm.size) for rank in range(comm.size)]
        here = range(*bounds[comm.rank])
        places: list[list[Array]] = [[] for _ in here]
        at = 0
        for row in known:
            for found, e in zip(places, here, strict=True):
                found.append(xp.arange(at, at + row[e]))
                at += row[e]
        return _RowRouting(
            xp.argsort(choices, kind="stable"),
            known,
            [sum(known[comm.rank][first:end]) for first, end in bounds],
            [sum(row[e] for e in here) for row in known],
            [xp.concatenate(found) for found in places],
        )

    def _all_to_all_to_experts(self, env: LayerContext, routing: _RowRouting, rows: Array, what: str) -> Array:
        return collectives.all_to_all_rows(
            env.xp, env.mesh.tensor, rows, routing.send_counts, routing.recv_counts, what=make_call_label(env, what)
        )

    def _all_to_all_from_experts(self, env: LayerContext, routing: _RowRouting, rows: Array, what: str) -> Array:
        return collectives.all_to_all_rows(
            env.xp, env.mesh.tensor, rows, routing.recv_counts, routing.send_counts, what=make_call_label(env, what)
        )

    def _sum_results_of_choices(self, xp: Any, routing: _RowRouting, found: Array, dtype: Any) -> Array:
        """Return the sum of the chosen experts' results for each row that this rank routed."""
        each = xp.empty(found.shape, dtype=found.dtype)
        each[routing.order] = found
        return xp.sum(each.reshape(-1, self.active, self.d_model), axis=1, dtype=dtype)

    def _compute_balance_gradients(self, routing: _RowRouting) -> list[float]:
        """Return the result of `compute_balance_gradients` for the expert choices on all ranks of the tensor axis."""
        return compute_balance_gradients(
            self.balance, [sum(column) for column in zip(*routing.counts, strict=True)], self.active
        )


class _RowRouting(NamedTuple):
    """The routing of rows between ranks: which rows are sent to which rank, and which experts process them.

    Attributes
    ----------
    order : indices into the flattened (row, expert) choices of this rank's rows, sorted by expert
    counts : counts[rank][expert] is the number of times that rows of the rank chose the expert
    send_counts, recv_counts : number of rows sent to, and received from, each rank
    places : for each local expert, the indices of its rows among the received rows
    """

    order: Array
    counts: list[list[int]]
    send_counts: list[int]
    recv_counts: list[int]
    places: list[Array]


def _count_rows(shape: tuple[int, ...]) -> int:
    """Return the number of rows of an array whose last dim is the feature dim: the product of its other dims."""
    return int(np.prod(shape[:-1]))
