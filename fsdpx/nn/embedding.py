"""Token embeddings, replicated or sharded by vocabulary over the tensor axis, and the cross-entropy loss for sharded
logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.errors import DataError, ShapeError
from fsdpx.nn import collectives
from fsdpx.nn.gradient_accumulation import accumulation_dtype, as_indices, has_integer_dtype
from fsdpx.nn.init import Init, normal
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    ShardedLayer,
    require_positive,
    require_time_dim,
)
from fsdpx.nn.linear import make_call_label, require_known_length
from fsdpx.nn.losses import CrossEntropyLoss, Loss
from fsdpx.nn.shard_specs import ShardedSequence, ShardingContext, ShardSpec, VocabParallel, shard_bounds

__all__ = [
    "Embedding", "SequenceParallelTokenEmbedding", "TokenEmbedding", "TokenEmbeddingBase",
    "VocabParallelCrossEntropyLoss", "VocabParallelEmbedding", "VocabParallelTokenEmbedding", "require_token_shape",
    "require_valid_indices",
]  # fmt: skip


class Embedding(Layer):
    """Looks up rows of the table `weight`: integers `(samples, ...)` -> `(samples, ..., embedding_dim)`.

    Raises DataError for indices outside [0, num_embeddings).

    Parameters
    ----------
    num_embeddings : number of rows of `weight (num_embeddings, embedding_dim)`
    embedding_dim : number of features per row
    init : initializer of `weight`; if None, N(0, 1) as in PyTorch
    """

    acts_on = "position"
    looks_up = True
    takes = "indices"
    kernel_names = ("embedding_backward",)

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init: Init | None = None) -> None:
        require_positive(self, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings, self.embedding_dim, self.init = num_embeddings, embedding_dim, init

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec((self.num_embeddings, self.embedding_dim), self.init or normal(1.0))}

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        if not isinstance(request.mark, VocabParallel) or type(self) is not Embedding:
            return super().shard_over_ranks(request)
        request.require_at_least_one_per_rank(self.num_embeddings, "embeddings")
        outside = request.unsharded_kind
        size = (self.num_embeddings, self.embedding_dim, isinstance(outside, ShardedSequence))
        return ShardedLayer(VocabParallelEmbedding(*size, init=self.init), outside)

    def needs_full_input(self, input_index: int, mark: Any) -> bool:
        return mark is not None

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_valid_indices(self, x, self.num_embeddings)
        return p["weight"][x], (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (saved[0], dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            rows = dy.reshape(-1, self.embedding_dim)
            kernels.embedding_backward(env.xp, g["weight"], x.reshape(-1), rows)


class TokenEmbeddingBase(Layer):
    """Base class for token embeddings with learned positions: weight[token] + position[time].

    Subclasses define which shapes of token arrays they accept (`_require_token_shape`) and the positions of the tokens
    (`_get_positions`). If a rank holds only a shard of `weight`, subclasses also define how rows are looked up and how
    gradients of rows are added (`_look_up_rows`, `_add_row_gradients`)."""

    takes = "indices"
    kernel_names = ("embedding_backward", "add_bias", "sum_rows")
    caches = True

    def __init__(
        self, vocab: int, d_model: int, seq_len: int, *, init: Init | None = None, position_init: Init | None = None
    ) -> None:
        require_positive(self, vocab=vocab, d_model=d_model, seq_len=seq_len)
        self.vocab, self.d_model, self.seq_len = vocab, d_model, seq_len
        self.init, self.position_init = init, position_init

    def specs(self) -> dict[str, ParameterSpec]:
        return {
            "weight": ParameterSpec((self.vocab, self.d_model), self.init or normal(1.0)),
            "position": ParameterSpec((self.seq_len, self.d_model), self.position_init or normal(1.0)),
        }

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        self._require_token_shape(env, x)
        require_valid_indices(self, x, self.vocab)
        y = self._look_up_rows(env, p["weight"], x)
        if env.cache is None:
            kernels.add_bias(env.xp, y, p["position"][self._get_positions(env, x)])
        else:
            y += p["position"][env.xp.asarray(env.cache.get_input_positions(x.shape[1]))]
        return y, (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (saved[0], dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            self._add_row_gradients(env, g["weight"], x, dy)
        if "position" in g:
            kernels.sum_rows(env.xp, dy, g["position"][self._get_positions(env, x)])

    def _require_token_shape(self, env: LayerContext, x: Array) -> None:
        require_token_shape(self, x, self.seq_len)

    def _get_positions(self, env: LayerContext, x: Array) -> slice:
        return slice(x.shape[1])

    def _look_up_rows(self, env: LayerContext, weight: Array, x: Array) -> Array:
        return weight[x]

    def _add_row_gradients(self, env: LayerContext, gw: Array, x: Array, dy: Array) -> None:
        kernels.embedding_backward(env.xp, gw, x.reshape(-1), dy.reshape(-1, self.d_model))


class TokenEmbedding(TokenEmbeddingBase):
    """Token embedding with learned positions, weight[token] + position[time]: tokens `(samples, time)` ->
    `(samples, time, d_model)`.

    Parameters
    ----------
    vocab : vocabulary size; tokens are integers in [0, vocab)
    d_model : number of features of the result
    seq_len : maximum length of a sequence
    init : initializer of `weight (vocab, d_model)`; if None, N(0, 1)
    position_init : initializer of `position (seq_len, d_model)`; if None, N(0, 1)
    """

    looks_up = True

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        if type(self) is not TokenEmbedding:  # do not replace a subclass: it may compute something else
            return super().shard_over_ranks(request)
        size, inits = (self.vocab, self.d_model, self.seq_len), dict[str, Any](init=self.init)
        inits["position_init"] = self.position_init
        if isinstance(request.mark, VocabParallel):
            request.require_at_least_one_per_rank(self.vocab, "tokens in its vocabulary")
            outside = request.unsharded_kind
            parts = isinstance(outside, ShardedSequence)
            return ShardedLayer(
                VocabParallelTokenEmbedding(*size, parts, **inits), outside, ("position",) if parts else ()
            )
        if request.mark is None and isinstance(request.kinds[0], ShardedSequence):
            return ShardedLayer(SequenceParallelTokenEmbedding(*size, **inits), ShardedSequence(), self.specs())
        return super().shard_over_ranks(request)

    def needs_full_input(self, input_index: int, mark: Any) -> bool:
        return mark is not None


class SequenceParallelTokenEmbedding(TokenEmbeddingBase):
    """`TokenEmbedding` whose input is sharded along the sequence (dim 1) over the tensor axis.

    Positions are counted from the start of the full sequence. Each rank computes only the contribution of its own
    tokens to the parameter gradients.

    Parameters
    ----------
    vocab, d_model, seq_len, init, position_init : as in `TokenEmbedding`
    """

    caches = False

    def _require_token_shape(self, env: LayerContext, x: Array) -> None:
        if x.ndim != 2 or env.sequence_offset(x.shape[1])[1] > self.seq_len:
            wanted = f"(samples, time <= {self.seq_len})"
            raise ShapeError(f"{self!r} wants a part of tokens of shape {wanted}, got a part of {tuple(x.shape)}")

    def _get_positions(self, env: LayerContext, x: Array) -> slice:
        first, _ = env.sequence_offset(x.shape[1])
        return slice(first, first + x.shape[1])


def require_valid_indices(layer: Layer, x: Array, count: int) -> None:
    """Raise DataError unless all elements of `x` are integers in [0, count). Without this check, NumPy would interpret
    -1 as the last row, and CuPy would wrap around invalid indices."""
    if not has_integer_dtype(x):
        raise DataError(f"{layer!r} wants whole numbers, got {x.dtype}")
    if x.size and (float(x.min()) < 0 or float(x.max()) >= count):
        low, high = int(x.min()), int(x.max())
        wrong = low if low < 0 else high
        raise DataError(f"{layer!r}: index {wrong} is out of range: it must be from 0 to {count - 1}")


def require_token_shape(layer: Layer, x: Array, seq_len: int) -> None:
    """Raise ShapeError unless `x` has the shape (samples, time) and time is at most `seq_len`."""
    if x.ndim != 2 or x.shape[1] > seq_len:
        wanted = f"(samples, time <= {seq_len})"
        raise ShapeError(f"{layer!r} wants tokens of shape {wanted}, got {tuple(x.shape)}")


SHARD_ROWS = ShardSpec(0)


class VocabParallelEmbedding(Layer):
    """`Embedding` sharded by rows over the tensor axis. Each rank gets the full input, looks up the rows that it
    holds, and uses zeros in place of all other rows. The results are summed over the ranks.

    The forward pass all-reduces the result, and the backward pass communicates nothing. If `sequence` is true, the
    forward pass reduce-scatters the result, and the backward pass all-gathers the gradient of the result.

    Parameters
    ----------
    num_embeddings, embedding_dim, init : as in `Embedding`
    sequence : whether to shard the result along dim 1
    """

    takes = "indices"
    kernel_names = ("embedding_backward",)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, sequence: bool = False, *, init: Init | None = None
    ) -> None:
        self._embedding = Embedding(num_embeddings, embedding_dim, init=init)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence = bool(sequence)
        self.caches = not sequence
        self.init = init

    def specs(self) -> dict[str, ParameterSpec]:
        return {name: replace(spec, cut=SHARD_ROWS) for name, spec in self._embedding.specs().items()}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_valid_indices(self, x, self.num_embeddings)
        if self.sequence:
            require_time_dim(x)
        return _look_up_sharded_rows(env, p["weight"], x, self.num_embeddings, self.sequence), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (*saved, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            _add_sharded_row_gradients(env, g["weight"], x, dy, self.num_embeddings, self.sequence)


class VocabParallelTokenEmbedding(TokenEmbeddingBase):
    """`TokenEmbedding` whose `weight` is sharded by rows over the tensor axis. Every rank holds the full `position`.
    The looked-up rows are summed over the ranks first, and then the rows of `position` are added.

    Parameters
    ----------
    vocab, d_model, seq_len, init, position_init : as in `TokenEmbedding`
    sequence : whether to shard the result along dim 1; each rank then computes only the contribution of its own
        positions to the gradient of `position`
    """

    def __init__(
        self,
        vocab: int,
        d_model: int,
        seq_len: int,
        sequence: bool = False,
        *,
        init: Init | None = None,
        position_init: Init | None = None,
    ) -> None:
        super().__init__(vocab, d_model, seq_len, init=init, position_init=position_init)
        self.sequence = bool(sequence)
        self.caches = not sequence

    def specs(self) -> dict[str, ParameterSpec]:
        specs = super().specs()
        return specs | {"weight": replace(specs["weight"], cut=SHARD_ROWS)}

    def _get_positions(self, env: LayerContext, x: Array) -> slice:
        """Return a slice that selects the sequence positions whose embeddings this rank returns."""
        comm = env.mesh.tensor
        return slice(*shard_bounds(x.shape[1], comm.rank, comm.size)) if self.sequence else slice(x.shape[1])

    def _look_up_rows(self, env: LayerContext, weight: Array, x: Array) -> Array:
        return _look_up_sharded_rows(env, weight, x, self.vocab, self.sequence)

    def _add_row_gradients(self, env: LayerContext, gw: Array, x: Array, dy: Array) -> None:
        _add_sharded_row_gradients(env, gw, x, dy, self.vocab, self.sequence)


class VocabParallelCrossEntropyLoss(Loss):
    """`CrossEntropyLoss` for logits that are sharded along their last dim, the classes: y is `(samples, ..., classes of
    this rank)`.

    Every rank has the full target `(samples, ...)`. The total error covers all classes. The total and the weight (the
    number of targets that are not ignored) are equal on all ranks. The forward pass performs two all-reduces of float64
    arrays with one element per position: first for the maximum of the position's logits, then for the sum of their
    exponentials. The second array has one more element: the sum of the labels' logits over all positions. With label
    smoothing, it also has an element for the sum of all logits. The backward pass communicates nothing.

    Parameters
    ----------
    classes : number of classes, the size of the last dim of the full logits
    ignore_index, label_smoothing : as in `CrossEntropyLoss`
    """

    acts_on = "position"
    kernel_names = CrossEntropyLoss.kernel_names

    def __init__(self, classes: int, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        require_positive(self, classes=classes)
        self._whole = CrossEntropyLoss(ignore_index, label_smoothing)
        self.classes, self.ignore_index = classes, ignore_index
        self.label_smoothing = float(label_smoothing)

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        xp, comm, smooth = env.xp, env.mesh.tensor, self.label_smoothing
        logits, labels = y.reshape(-1, y.shape[-1]), as_indices(target).reshape(-1)
        missing_label, counted = logits.shape[1], labels != self.ignore_index
        here = self._localize_labels(env, labels, missing_label)
        below, _, part = kernels.cross_entropy(xp, logits, here, missing_label)
        part = part.astype(np.float64)
        top = part.copy()
        comm.all_reduce(top, "max", what="largest logits").wait()
        picked = float(xp.sum(xp.where(here < missing_label, part, 0.0))) - below
        means = [float(xp.sum(xp.where(counted, xp.sum(logits, axis=1, dtype=np.float64), 0.0)))] if smooth else []
        sums = xp.concatenate([xp.exp(part - top), xp.asarray([picked, *means])])
        sums = collectives.all_reduce_sum(xp, comm, sums, fresh=True, what="sums of logits")
        lse = xp.log(sums[: labels.size]) + top
        total = float(xp.sum(xp.where(counted, lse, 0.0)))
        wanted = [float(one) for one in sums[labels.size :]]
        loss = (1.0 - smooth) * (total - wanted[0])
        if smooth:
            loss += smooth * (total - wanted[1] / self.classes)
        return loss, float(xp.sum(counted)), (y, labels, lse.astype(accumulation_dtype(y.dtype)))

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        y, labels, lse = saved
        logits = y.reshape(-1, y.shape[-1])
        missing_label, ignored = logits.shape[1], logits.shape[1] + 1
        here = env.xp.where(labels != self.ignore_index, self._localize_labels(env, labels, missing_label), ignored)
        given = seed, ignored, self.label_smoothing, self.classes
        return kernels.cross_entropy_backward(env.xp, logits, here, lse, *given).reshape(y.shape)

    def _localize_labels(self, env: LayerContext, labels: Array, missing_label: int) -> Array:
        """Convert each label to an index into this rank's classes. If another rank holds the class, or if the label is
        ignored, the result is `missing_label`."""
        inside, index = _localize_index(env, labels, self.classes)
        return env.xp.where(inside & (labels != self.ignore_index), index, missing_label)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        self._whole.validate((*shape[:-1], self.classes), target)


def _localize_index(env: LayerContext, index: Array, total: int) -> tuple[Array, Array]:
    """Convert row indices of a table with `total` rows to indices into this rank's shard. Return a mask that is True
    where this rank holds the row, and the local indices. For rows of other ranks, the local index is 0."""
    start, stop = shard_bounds(total, env.mesh.tensor.rank, env.mesh.tensor.size)
    inside = (index >= start) & (index < stop)
    return inside, env.xp.where(inside, index - start, 0)


def _look_up_sharded_rows(env: LayerContext, weight: Array, x: Array, total: int, sequence: bool) -> Array:
    """Look up the rows with indices `x` in a table of `total` rows that is sharded over the ranks; `weight` is this
    rank's shard. If `sequence` is true, the result is sharded along dim 1. Collective."""
    comm = env.mesh.tensor
    if comm.size == 1:
        return weight[x]
    inside, index = _localize_index(env, x, total)
    y = weight[index]
    y[~inside] = 0
    description = make_call_label(env, "embedding")
    if sequence:
        require_known_length(env, y, description)
        return collectives.reduce_scatter_dim(env.xp, comm, y, 1, what=description)
    return collectives.all_reduce_sum(env.xp, comm, y, fresh=True, what=description)


def _add_sharded_row_gradients(env: LayerContext, gw: Array, x: Array, dy: Array, total: int, sequence: bool) -> None:
    """Add the gradient of this rank's shard of the table to `gw`. `dy` is the gradient of the result of
    `_look_up_sharded_rows`. Collective if `sequence` is true."""
    xp, comm = env.xp, env.mesh.tensor
    if sequence:
        dy = collectives.all_gather_dim(xp, comm, dy, 1, x.shape[1], what=make_call_label(env, "embedding gradient"))
    index, rows = x.reshape(-1), dy.reshape(-1, dy.shape[-1])
    if comm.size > 1:
        inside, index = _localize_index(env, index, total)
        # shape-only arrays contain no indices, so the rows of this rank cannot be selected
        if not getattr(xp, "holds_no_data", False):
            own_rows = xp.flatnonzero(inside)
            index, rows = index[own_rows], rows[own_rows]
    kernels.embedding_backward(xp, gw, index, rows)
