"""Loss functions. Each returns a total and a weight, and both are summed over samples, microbatches and ranks. The mean
loss is total / weight."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.base.arguments import wrap_constructor_with_argument_check
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.gradient_accumulation import accumulation_dtype, as_indices
from fsdpx.nn.layer import Array, Layer, LayerContext, format_constructor, require_fraction
from fsdpx.nn.shard_specs import FieldPartition

__all__ = [
    "BCEWithLogitsLoss", "CellWeights", "CrossEntropyLoss", "Loss", "LossSum", "MSELoss", "TensorParallelModel",
    "WeightedElementwiseLoss", "WrappedLoss", "backward_pieces", "compute_difference_target_and_weights",
    "match_memory_order", "require_one_output", "require_target_shape", "sum_weighted_loss_terms_over_batch",
]  # fmt: skip


class Loss(ABC):
    """Base class for losses, which compare the output `y` of a model with a target. The mean loss is total / weight,
    where total is a sum of errors in float64, and weight is the number of terms in this sum.

    The division happens only once, for the whole global batch. So a rank or microbatch may have weight 0, because it
    has no samples, or because all its samples are ignored. A subclass defines `forward`, `backward` and `validate`.

    Losses can be multiplied by numbers and added: the value of `0.5 * nn.MSELoss() + nn.L1Loss()` is 0.5 times the mean
    squared error plus the mean absolute error. If the weight of a term varies from sample to sample, as with
    `ignore_index` or `skipna`, the term is averaged within each sample first, and then over the samples.

    Parameters
    ----------
    env : array namespace and mesh, see `LayerContext`
    y : the model's output; dim 0 is the sample dim and may have size 0
    target : the values that y is compared with; dim 0 is the sample dim
    """

    kernel_names: tuple[str, ...] = ()
    """Names of the kernels that the loss runs; they are compiled before the first step."""
    partial: bool = False
    """Whether the total and the weight cover only this tensor rank's shard, so that they must be summed over the tensor
    axis."""
    acts_on: str = "sample"
    """The smallest part of the output that can be compared with the target separately: "sample" (dim 0) or "position"
    (dims 0 and 1). A loss that acts on positions works with sharded sequences, because the totals and weights of shards
    along dim 1 can be added."""
    counts: str = "unknown"
    """What the weight counts: "elements", the number of elements of y; "samples", a number that is proportional to the
    number of samples; "unknown", anything else, such as the number of labels that are not ignored."""
    skipna: bool = False
    """Whether elements whose target is NaN are ignored. If so, NaN in a target is not an error."""
    __array_ufunc__ = None  # with this, `numpy.float64(2) * loss` calls `Loss.__rmul__` instead of a NumPy function

    def __init_subclass__(cls) -> None:
        wrap_constructor_with_argument_check(cls)

    @abstractmethod
    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        """Return the sum of the errors, the weight, and the values that `backward` needs.

        Parameters
        ----------
        env : array namespace and mesh
        y : the model's output
        target : the values that y is compared with

        Returns
        -------
        (total, weight, saved)
            total and weight are sums over this rank's samples, computed in float64 and returned as floats; the mean
            loss is total / weight over the global batch
        """

    @abstractmethod
    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        """Return the gradient of the loss with respect to the output.

        Parameters
        ----------
        env : array namespace and mesh
        saved : third result of `forward`
        seed : number that the gradient is multiplied by; with 1 / (weight of the global batch), the result is the
            gradient of the mean loss

        Returns
        -------
        array
            seed * d total / d y, in the shape and dtype of y
        """

    @abstractmethod
    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise DataError if the target cannot be compared with an output of the given shape.

        Parameters
        ----------
        shape : shape of the model's output on this rank
        target : the values that the output is compared with

        Raises
        ------
        DataError
            if the shape, dtype or values of `target` do not fit
        """

    def forward_and_backward(
        self, env: LayerContext, y: Array, target: Array, seed: float
    ) -> tuple[float, float, Array]:
        """Run `forward`, then `backward`. Override this method if computing the loss together with its gradient is
        faster.

        Parameters
        ----------
        env, y, target : as for `forward`
        seed : as for `backward`

        Returns
        -------
        (total, weight, gradient)
            the first two results of `forward`, and the result of `backward`
        """
        total, weight, saved = self.forward(env, y, match_memory_order(self, target, y))
        return total, weight, self.backward(env, saved, seed)

    @property
    def reads_any_memory_order(self) -> bool:
        """Whether the loss is as fast for a target in another memory order than y. If not, the trainer copies such
        targets of fields to the memory order of y. Default False."""
        return False

    def bind_partition(self, parts: FieldPartition) -> "Loss":
        """Return the loss to use if each rank holds one shard of the output field (domain decomposition). By default,
        return the loss itself.

        Parameters
        ----------
        parts : the partition of the model's output

        Returns
        -------
        Loss
            a loss that compares this rank's shards of the output and the target
        """
        return self

    def _list_terms(self) -> Sequence[tuple[float, "Loss"]]:
        """Return (factor, loss) pairs: the terms that this loss contributes to a sum of losses."""
        return [(1.0, self)]

    def __add__(self, other: "Loss") -> "LossSum":
        return LossSum([(1.0, self), (1.0, other)]) if isinstance(other, Loss) else NotImplemented

    def __radd__(self, other: float) -> "Loss":
        """Return the loss itself if `other` is 0, the value with which `sum` begins."""
        return self if isinstance(other, Real) and other == 0 else NotImplemented

    def __mul__(self, factor: float) -> "Loss":
        return LossSum([(float(factor), self)]) if isinstance(factor, Real) else NotImplemented

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return format_constructor(self)


class CrossEntropyLoss(Loss):
    """Cross-entropy of logits and class labels, as in PyTorch: `-log(softmax(y)[target])` for y
    `(samples, ..., classes)` and integer targets `(samples, ...)`.

    The weight is the number of targets that are not ignored.

    Parameters
    ----------
    ignore_index : targets with this value are excluded from the total and the weight
    label_smoothing : the amount e of label smoothing: y is compared with the distribution
        `(1 - e) * onehot(target) + e / classes` (Szegedy et al. 2015)
    """

    acts_on = "position"
    kernel_names = ("cross_entropy", "cross_entropy_backward")

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        require_fraction(self, label_smoothing=label_smoothing)
        if not hasattr(ignore_index, "__index__"):
            raise ConfigError(f"CrossEntropyLoss: ignore_index must be a whole number, got {ignore_index!r}")
        self.ignore_index = int(ignore_index)
        self.label_smoothing = float(label_smoothing)

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        logits, labels = y.reshape(-1, y.shape[-1]), as_indices(target).reshape(-1)
        total, weight, lse = kernels.cross_entropy(env.xp, logits, labels, self.ignore_index, self.label_smoothing)
        return total, weight, (y, labels, lse)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        y, labels, lse = saved
        logits = y.reshape(-1, y.shape[-1])
        dy = kernels.cross_entropy_backward(env.xp, logits, labels, lse, seed, self.ignore_index, self.label_smoothing)
        return dy.reshape(y.shape)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        require_target_shape(self, tuple(shape)[:-1], target, f"labels for an output of shape {tuple(shape)}")
        if np.dtype(target.dtype).kind not in "iu":
            raise DataError(f"{self!r}: labels must be whole numbers, got {target.dtype}")
        xp, classes = namespace_of(target), shape[-1]
        wrong = ((target < 0) | (target >= classes)) & (target != self.ignore_index)
        if bool(xp.any(wrong)):
            position = tuple(int(i[0]) for i in xp.nonzero(wrong))
            raise DataError(
                f"{self!r}: label {int(target[position])} at position {position} is out of range: "
                f"it must be from 0 to {classes - 1}, or ignore_index {self.ignore_index}"
            )


class _Elementwise(Loss):
    """Base class for losses that sum one error per element: y and target have equal shapes, and the weight is the
    number of elements."""

    acts_on = "position"
    counts = "elements"

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        require_target_shape(self, tuple(shape), target, "a target of the output's shape")


class CellWeights:
    """Weights of the cells of a field, or of the nodes of an unstructured mesh. The array covers only this rank's
    shard.

    Parameters
    ----------
    owner : name of the loss, for error messages
    weights : array (*cells) or (channels, *cells) of numbers >= 0, or bools
    """

    has_cells = True

    def __init__(self, owner: str, weights: Any) -> None:
        self.owner = owner
        try:
            # copy the weights, because cached sums would be wrong if the caller changed the array
            self.array = np.array(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{owner}: weights must be numbers >= 0, or bools: {error}") from error
        if not (np.isfinite(self.array) & (self.array >= 0)).all():
            raise ConfigError(f"{owner}: weights must be numbers >= 0, or bools")

    def __repr__(self) -> str:
        """Return a placeholder without this rank's values. Ranks compare the repr of the loss, so the repr must be
        equal on all ranks."""
        return "<an array>"

    @cached_property
    def of_nodes(self) -> "CellWeights":
        """Return the weights for an output with features in dim 1 and nodes in the last dim. Weights (nodes, features)
        or (nodes, 1) are transposed, and weights (nodes,) are unchanged."""
        found = CellWeights(self.owner, self.array.T)
        found.has_cells = False
        return found

    def reshape_to_broadcast(self, env: LayerContext, y: Array) -> Array:
        """Return the weights as an array that can be broadcast to the shape of y (samples, channels, *cells). The array
        is cached."""
        key = "weights of cells", id(self), np.dtype(y.dtype).str
        if key not in env.constants:
            shape = (1,) * (y.ndim - self.array.ndim) + self.array.shape
            env.constants[key] = env.xp.asarray(self.array.astype(accumulation_dtype(y.dtype)).reshape(shape))
        return env.constants[key]

    def require_broadcastable(
        self, owner: object, shape: tuple[int, ...], name: str = "weights", error: type[ValueError] = DataError
    ) -> None:
        """Raise `error` unless the weights can be broadcast to an array of `shape` (samples, channels, *cells). The
        message refers to the argument as `name`."""
        if self.array.shape in (shape[2:], shape[1:], (1, *shape[2:])):
            return
        if self.has_cells:
            raise error(
                f"{owner!r}: {name} of shape {self.array.shape} do not fit: this rank's part of the field is "
                f"(channels, *cells) = {shape[1:]}; give one for each cell, {shape[2:]}, or for each channel of it"
            )
        features, nodes = shape[1:]
        raise error(
            f"{owner!r}: {name} of shape {self.array.shape[::-1]} do not fit: this rank owns {nodes} nodes, of "
            f"{features} features here; give one for each node, ({nodes},), or for each of its features, "
            f"({nodes}, {features})"
        )


def compute_difference_target_and_weights(
    env: LayerContext, y: Array, target: Array, weights: CellWeights | None, skipna: bool
) -> tuple[Array, Array, Array | None]:
    """Return three arrays: y - target, the target, and the weights of the elements. The weights can be broadcast to y;
    None means that all weights are 1.

    Where the weight is 0, the first two results are set to 0, even if they were NaN. If `skipna` is true, elements
    whose target is NaN get weight 0."""
    xp = env.xp
    y, target = (a.astype(accumulation_dtype(y.dtype), copy=False) for a in (y, target))
    w = None if weights is None else weights.reshape_to_broadcast(env, y)
    if skipna:
        w = xp.where(xp.isnan(target), 0.0, 1.0 if w is None else w).astype(y.dtype)
    apart = y - target
    if w is not None:
        apart, target = xp.where(w > 0, apart, 0.0), xp.where(w > 0, target, 0.0)
    return apart, target, w


class WeightedElementwiseLoss(_Elementwise):
    """Base class for losses that sum a function of y - target over all elements, with optional weights. Subclasses
    define `compute_errors` and `compute_slopes`."""

    weights: CellWeights | None = None

    def __init__(self, weights: Any = None, skipna: bool = False) -> None:
        self.weights = None if weights is None else CellWeights(type(self).__name__, weights)
        self.skipna = bool(skipna)
        self.acts_on = "position" if weights is None else "sample"
        self.counts = "unknown" if skipna else "elements" if weights is None else "samples"

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        apart, _, w = compute_difference_target_and_weights(env, y, target, self.weights, self.skipna)
        errors = self.compute_errors(env.xp, apart)
        total = float((errors if w is None else w * errors).sum(dtype=np.float64))
        weight = float(y.size) if w is None else float(env.xp.broadcast_to(w, y.shape).sum(dtype=np.float64))
        return total, weight, (apart, w, y.dtype)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        apart, w, dtype = saved
        slopes = self.compute_slopes(env.xp, apart) * seed
        return (slopes if w is None else w * slopes).astype(dtype, copy=False)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        super().validate(shape, target)
        if self.weights is not None:
            self.weights.require_broadcastable(self, tuple(shape))

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        """Return the error of each element. `apart` is y - target."""
        raise NotImplementedError

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        """Return the derivative of each element's error with respect to y. `apart` is y - target."""
        raise NotImplementedError


class MSELoss(WeightedElementwiseLoss):
    """Squared error: the sum of `(y - target)^2` for y and target of equal shape. The weight, by which the sum is
    divided to get the mean, is the number of elements or, if the option `weights` is given, the sum of the elements'
    weights.

    Parameters
    ----------
    weights, skipna : as in `RelativeL2`
    """

    kernel_names = ("squared_error", "squared_error_backward", "squared_error_gradient_and_sum")

    @property
    def reads_any_memory_order(self) -> bool:
        return self.weights is None and not self.skipna

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        target = target.astype(y.dtype, copy=False)
        if self.weights is None and not self.skipna:
            return kernels.squared_error(env.xp, y, target), float(y.size), (y, target)
        return super().forward(env, y, target)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        if len(saved) == 2:
            return kernels.squared_error_backward(env.xp, *saved, 2.0 * seed)
        return super().backward(env, saved, seed)

    def forward_and_backward(
        self, env: LayerContext, y: Array, target: Array, seed: float
    ) -> tuple[float, float, Array]:
        if env.xp is not np or type(self) is not MSELoss or self.weights is not None or self.skipna:
            return super().forward_and_backward(env, y, target, seed)
        target = target.astype(y.dtype, copy=False)
        gradient, total = kernels.squared_error_gradient_and_sum(env.xp, y, target, 2.0 * seed)
        return total, float(y.size), gradient

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        return apart * apart

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return apart * 2.0


class BCEWithLogitsLoss(_Elementwise):
    """Binary cross-entropy of sigmoid(y) and targets. The targets are numbers from 0 to 1, or bools. The weight of the
    loss is the number of elements.

    The error of an element is computed without overflow, as `max(y, 0) - y * target + log(1 + exp(-|y|))`."""

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        super().validate(shape, target)
        if np.dtype(target.dtype).kind == "b":
            return
        xp = namespace_of(target)
        wrong = ~((target >= 0) & (target <= 1))
        if bool(xp.any(wrong)):
            position = tuple(int(i[0]) for i in xp.nonzero(wrong))
            raise DataError(f"{self!r}: target {target[position]} at position {position} is not from 0 to 1")

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        target = target.astype(y.dtype, copy=False)
        return kernels.binary_entropy(env.xp, y, target), float(y.size), (y, target)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        return kernels.binary_entropy_backward(env.xp, *saved, seed)


class LossSum(Loss):
    """Weighted sum of losses, as created by the operators `+` and `*`: `0.5 * nn.MSELoss() + nn.L1Loss()`.

    The mean loss is the sum of the mean losses of all terms, each multiplied by its factor. If the weight of a term is
    not proportional to the number of samples, the term is averaged within each sample first, and then over the samples.
    Without the average within each sample, the sum would depend on how a batch is split over ranks and microbatches.

    Parameters
    ----------
    terms : (factor, loss) pairs; each factor is a finite number
    """

    def __init__(self, terms: Sequence[tuple[float, Loss]]) -> None:
        found: list[tuple[float, Loss]] = []
        for factor, loss in terms:
            if not np.isfinite(factor):
                raise ConfigError(f"a factor of a sum of losses must be finite, got {factor!r} for {loss!r}")
            found += [(float(factor) * f, one) for f, one in loss._list_terms()]
        self.terms: tuple[tuple[float, Loss], ...] = tuple(found)
        self._factors = [factor for factor, _ in found]
        self.kernel_names = tuple(dict.fromkeys(name for _, loss in found for name in loss.kernel_names))
        self._shares_weight = all(loss.counts == "elements" for _, loss in found)
        self.acts_on = "position" if self._shares_weight else "sample"
        self.counts = "elements" if self._shares_weight else "samples"
        self.skipna = any(loss.skipna for _, loss in found)

    def _list_terms(self) -> Sequence[tuple[float, Loss]]:
        return self.terms

    def __repr__(self) -> str:
        return " + ".join(repr(loss) if factor == 1 else f"{factor!r} * {loss!r}" for factor, loss in self.terms)

    def bind_partition(self, parts: FieldPartition) -> Loss:
        return LossSum([(factor, loss.bind_partition(parts)) for factor, loss in self.terms])

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        for _, loss in self.terms:
            loss.validate(shape, target)

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        if self._shares_weight:
            each = [loss.forward(env, y, target) for _, loss in self.terms]
            pairs = list(zip(self._factors, each, strict=True))
            total = sum(factor * float(error) for factor, (error, *_) in pairs)
            return total, each[0][1], [[(factor, saved)] for factor, (*_, saved) in pairs]
        by_sample = [loss.counts == "unknown" for _, loss in self.terms]
        return sum_weighted_loss_terms_over_batch(env, self.terms, [(y, target)] * len(by_sample), by_sample)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        dy: Any = None
        for (_, loss), pieces in zip(self.terms, saved, strict=True):
            one = backward_pieces(env, loss, pieces, seed)
            dy = one if dy is None else _map_arrays(lambda a, b: a + b, dy, one)
        return dy


Pieces = list[tuple[float, Any]]
"""A list that describes the calls of one loss, each on a different slice of the samples. For each call, it contains a
pair: the factor by which the loss of this slice is multiplied, and the values that `forward` saved."""


def sum_weighted_loss_terms_over_batch(
    env: LayerContext, terms: Sequence[tuple[float, Loss]], pairs: Sequence[tuple[Any, Any]], by_sample: Sequence[bool]
) -> tuple[float, float, list[Pieces]]:
    """Compute the weighted sum of several losses for a batch. Return (total, number of samples, pieces): the loss is
    total / number of samples, and `pieces` contains one `Pieces` list for each loss, which `backward_pieces` needs. A
    sample is not counted if its weight is 0 in all losses.

    If several ranks hold shards of the same samples, the call is collective over these ranks.

    Parameters
    ----------
    env : array namespace and mesh
    terms : (factor, loss) pairs
    pairs : output and target for each loss
    by_sample : for each loss, whether to compute it separately for each sample. This is necessary if the weight of the
        loss is not proportional to the number of samples
    """
    n = (pairs[0][0][0] if isinstance(pairs[0][0], tuple) else pairs[0][0]).shape[0]
    pieces = [
        (term, rows, terms[term][1].forward(env, *(_map_arrays(lambda a, r=rows: a[r], one) for one in pairs[term])))
        for term, apart in enumerate(by_sample)
        for rows in ([slice(i, i + 1) for i in range(n)] if apart and n else [slice(0, n)])
    ]
    weights: Any = np.array([float(found[1]) for *_, found in pieces])
    if env.mesh.parts.size > 1:
        weights = env.xp.asarray(weights)
        env.mesh.parts.all_reduce(weights, "sum", what="weights of losses").wait()
    total, counted = 0.0, np.zeros(n, np.bool_)
    kept: list[Pieces] = [[] for _ in terms]
    for (term, rows, found), weight in zip(pieces, map(float, weights), strict=True):
        share = terms[term][0] * (rows.stop - rows.start) / weight if weight > 0 else 0.0
        counted[rows] |= weight > 0
        total += share * float(found[0])
        kept[term].append((share, found[2]))
    return total, float(counted.sum()) / env.mesh.parts.size, kept


def backward_pieces(env: LayerContext, loss: Loss, pieces: Pieces, seed: float) -> Any:
    """Return the gradient of a loss with respect to the model's output. `pieces` is the list that
    `sum_weighted_loss_terms_over_batch` returned for this loss."""
    found = [loss.backward(env, kept, seed * share) for share, kept in pieces]
    return found[0] if len(found) == 1 else _map_arrays(lambda *a: env.xp.concatenate(a), *found)


def _map_arrays(function: Callable[..., Any], *values: Any) -> Any:
    """Apply `function` to arrays, or to the corresponding elements of tuples (for a model with several outputs)."""
    if isinstance(values[0], tuple):
        return tuple(function(*arrays) for arrays in zip(*values, strict=True))
    return function(*values)


def match_memory_order(loss: Any, target: Any, y: Any) -> Any:
    """If `target` has its channels first in memory, and `y` is a field of the same shape with its channels last in
    memory, return a copy of `target` with channels last. The loss and its gradient then read both arrays in the same
    order. Otherwise, or if the loss `reads_any_memory_order`, return `target` itself. Tuples of fields are matched one
    by one."""
    if getattr(loss, "reads_any_memory_order", False):
        return target
    if isinstance(y, tuple) and isinstance(target, tuple) and len(y) == len(target):
        return tuple(match_memory_order(loss, *pair) for pair in zip(target, y, strict=True))
    fields = isinstance(y, np.ndarray) and isinstance(target, np.ndarray) and y.ndim > 2 and y.shape == target.shape
    if not fields or y.strides[1] != y.itemsize or target.strides[1] == target.itemsize or y.shape[1] == 1:
        return target
    return kernels.channels_last(np, target) if target.dtype.char in "fd" else target


def require_one_output(loss: Loss, shape: tuple[Any, ...], target: Any) -> None:
    """Raise DataError if `shape` or `target` describes several outputs."""
    if isinstance(target, tuple) or any(isinstance(n, tuple) for n in shape):
        raise DataError(
            f"{loss!r} compares one output with one target: for a model with several outputs, give "
            "nn.MultiOutputLoss(...) with a loss for each output, and a tuple of targets"
        )


def require_target_shape(loss: Loss, wanted: tuple[int, ...], target: Array, what: str) -> None:
    require_one_output(loss, wanted, target)
    if tuple(target.shape) != wanted:
        raise DataError(f"{loss!r} wants {what}: {wanted}, got {tuple(target.shape)}")


class WrappedLoss(Loss):
    """Base class for losses that wrap another loss, `loss`, for example to convert arrays to another layout."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        for name in ("kernel_names", "counts", "skipna"):  # a loss not derived from `Loss` may lack these attributes
            setattr(self, name, getattr(loss, name, getattr(Loss, name)))
        self.partial = self.partial or getattr(loss, "partial", False)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        return self.loss.backward(env, saved, seed)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        self.loss.validate(shape, target)


@dataclass(frozen=True)
class TensorParallelModel:
    """The result of `parallelize`: a sharded model and a loss, which all ranks of the tensor axis run together on the
    same batch.

    Parameters
    ----------
    model, loss : the model with sharded layers, and a loss that takes this rank's shard of the output
    output_dim : the dim along which the model's output is sharded: -1 for classes, 1 for the sequence, 0 for samples,
        or None if the output is not sharded
    partial : names of the parameters that have only a partial gradient on each rank; the partial gradients must be
        summed over the axis once per step
    """

    model: Layer
    loss: Loss
    output_dim: int | None
    partial: frozenset[str]
