"""The layer interface: the base class `Layer`, the specification of parameters, and the context of forward and backward
calls."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Protocol

from fsdpx.core.array.random import Random
from fsdpx.core.base.arguments import wrap_constructor_with_argument_check
from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.cache import KeyValueCache
from fsdpx.nn.distribution import as_distributed
from fsdpx.nn.gradient_accumulation import Gradients, has_integer_dtype
from fsdpx.nn.init import Init, zeros
from fsdpx.nn.shard_specs import (
    FieldPartition,
    Kind,
    ShardedBatch,
    ShardedFeatures,
    ShardedSequence,
    ShardingContext,
    ShardSpec,
    shard_bounds,
)

__all__ = [
    "Array", "AxisRanks", "Layer", "LayerAxes", "LayerContext", "ParameterSpec", "Parameters", "Params", "Pending",
    "ShardedLayer", "collect_specs", "find_sequence_length", "format_constructor", "group_arrays_by_child",
    "iterate_layers", "join_path", "list_kernels", "require_finite_arguments", "require_fraction", "require_last_dim",
    "require_positive", "require_result_is_pair", "require_time_dim", "store_init_args",
]  # fmt: skip


def require_positive(owner: object, **values: Any) -> None:
    """Raise ConfigError unless each keyword argument is an integer of at least 1. The message contains the keywords,
    which are names of constructor arguments of `owner`."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ConfigError(f"{type(owner).__name__}: {name} must be a whole number >= 1, got {value!r}")


def require_fraction(owner: object, **values: Any) -> None:
    """Raise ConfigError unless each keyword argument is a number from 0 to 1. The message contains the keywords, which
    are names of constructor arguments of `owner`."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise ConfigError(f"{type(owner).__name__}: {name} must be between 0 and 1, got {value!r}")


def require_finite_arguments(owner: object, **values: float) -> None:
    """Raise ConfigError unless each keyword argument is a finite number. The message contains the keywords, which are
    names of constructor arguments of `owner`."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ConfigError(f"{type(owner).__name__}: {name} must be a finite number, got {value!r}")


def require_last_dim(layer: object, x: Any, size: int) -> None:
    """Raise ShapeError unless `x` has the shape (samples, ..., size)."""
    if x.ndim < 2 or x.shape[-1] != size:
        raise ShapeError(f"{layer!r} wants an input of shape (samples, ..., {size}), got {tuple(x.shape)}")


def require_time_dim(x: Any) -> None:
    """Raise ShapeError if `x` has no time dim: integer arrays must be (samples, time, ...), and activations must be
    (samples, time, ..., features)."""
    least, wanted = (2, "(samples, time, ...)") if has_integer_dtype(x) else (3, "(samples, time, ..., features)")
    if x.ndim < least:
        kind = "whole numbers" if has_integer_dtype(x) else "floats"
        raise ShapeError(
            f"sequence=... cuts dim 1, the time; the input has shape {tuple(x.shape)}, but {kind} with a time "
            f"have {least} dims or more, {wanted}: leave sequence=None"
        )


NO_TIES: dict[str, str] = {}
Array = Any
"""An array of the module `LayerContext.xp`."""
Params = Mapping[str, Array]
"""Parameters, or gradients of parameters, by name."""


class Pending(Protocol):
    """Handle of a transfer in progress. It keeps the transfer's buffers alive until `wait` returns."""

    def wait(self) -> None: ...


class AxisRanks(Protocol):
    """Protocol for the ranks along one mesh axis, with the collectives that layers use. It is a subset of the
    communicator interface."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, buf: Array, op: Any = ..., /, *, what: str = "") -> Pending: ...

    def all_gather(
        self, send: Array, recv: Array, counts: Sequence[int] | None = None, /, *, what: str = ""
    ) -> Pending: ...

    def reduce_scatter(
        self, send: Array, recv: Array, *, counts: Sequence[int] | None = None, what: str = ""
    ) -> Pending: ...

    def all_to_all(
        self, send: Array, recv: Array, sent: Sequence[int], received: Sequence[int], /, *, what: str = ""
    ) -> Pending: ...

    def send(self, buf: Array, dest: int, tag: int, /, *, what: str = "") -> Pending: ...

    def recv(self, buf: Array, source: int, tag: int, /, *, what: str = "") -> Pending: ...


class LayerAxes(Protocol):
    """The mesh axes over which layers communicate.

    Attributes
    ----------
    tensor : ranks that layers are sharded over
    data : ranks that the samples of a batch are split over
    parts : all ranks that a field is partitioned over (domain decomposition)
    domain : for each dim of a field, the ranks along that dim
    counters : counters of the current step, updated by layers
    """

    @property
    def tensor(self) -> AxisRanks: ...

    @property
    def data(self) -> AxisRanks: ...

    @property
    def parts(self) -> AxisRanks: ...

    @property
    def domain(self) -> Sequence[AxisRanks]: ...

    @property
    def counters(self) -> Any: ...


class GivenValues(Protocol):
    """Protocol for initial values that another library provides for the parameters of a layer. The object keeps the
    values until all ranks have taken their shards."""

    def broadcast_from_rank0(self, comm: Any) -> None:
        """Replace the values on every rank with the values from rank 0. Collective."""

    def release_reproducible_values(self) -> None:
        """Free the values that can be obtained again later, for example from the original PyTorch module. This method
        is called after all ranks have taken their shards."""


@dataclass(frozen=True)
class ParameterSpec:
    """Shape, initializer and sharding of one parameter of a layer.

    Parameters
    ----------
    shape : shape of the full parameter, as in PyTorch; initial values, checkpoints and comparisons of parameters use
        this shape, regardless of the sharding
    init : initializer, see `fsdpx.nn.init`
    trainable : whether the parameter has a gradient and is updated
    state : whether `forward` updates the parameter in training, for example a running statistic; if so, the parameter
        is never trainable
    cut : sharding over the tensor axis; if None, every rank holds the full parameter
    norm : whether the parameter scales or shifts the output of a norm; `optim.no_decay` exempts such parameters from
        weight decay
    """

    shape: tuple[int, ...]
    init: Init = zeros
    trainable: bool = True
    state: bool = False
    cut: ShardSpec | None = None
    norm: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.shape, int):
            raise ConfigError(f"ParameterSpec({self.shape}): the shape must be a tuple: ({self.shape},)")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "trainable", self.trainable and not self.state)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, rank: int, width: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard of the parameter.

        Parameters
        ----------
        rank, width : rank on the tensor axis, and size of the axis

        Returns
        -------
        tuple of int
            the shape of the shard; the full shape if `cut` is None
        """
        return self.cut.local_shape(self.shape, rank, width) if self.cut else self.shape


@dataclass(frozen=True)
class LayerContext:
    """Everything that a layer call needs besides parameters and inputs: the array namespace, mesh, random numbers and
    modes. Immutable.

    Parameters
    ----------
    xp : the array namespace: numpy, cupy or `fsdpx.core.array.shapes`
    mesh : the axes of the connected mesh, for layers that communicate
    random : counter-based random numbers, which depend on the layer, the step and the rows of the global batch
    training : whether dropout is active and running statistics are updated
    recompute : names of the activations that layers do not save, but recompute in the backward pass ("attention")
    recomputing : whether this forward pass only recomputes activations for the backward pass; if so, layers must not
        update their state, because the first forward pass has already done so
    time : full length of the sequences that are sharded along dim 1 over the tensor axis; if None, the shards of all
        ranks have equal lengths
    cache : keys and values of the tokens that precede the input; if None, the input contains full texts. A forward pass
        with a cache is not followed by a backward pass, so containers save nothing
    constants : dict of arrays that layers need repeatedly, such as tables of cosines. The key of an array must contain
        everything that the array depends on. All layers of a trainer share this dict, which lives as long as the
        trainer
    dtype : the dtype in which the model computes; layers whose inputs are "exact" need it (see `Layer.takes`). If None,
        the model computes in the dtype of the inputs
    ignores_memory_order : whether results must be equal bit for bit for any memory order of the input arrays. The
        trainer sets this to True in pipelines, where arrays received from other stages are always C-contiguous, and
        with `reproducible_chunks`. Layers then get C-contiguous arrays, except layers with the kernel "channels_last",
        which must give the same bits for any order
    """

    xp: Any
    mesh: LayerAxes
    random: Random
    training: bool = True
    recompute: frozenset[str] = frozenset()
    recomputing: bool = False
    time: int | None = None
    cache: KeyValueCache | None = None
    constants: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    dtype: Any = None
    ignores_memory_order: bool = False
    _below: dict[str, LayerContext] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # cached contexts of the child layers, by name

    def child(self, name: str) -> LayerContext:
        """Return a child layer's context. It differs from this context only in its random numbers.

        Parameters
        ----------
        name : name of the child layer

        Returns
        -------
        LayerContext
            the child's context, which is cached by name
        """
        child = self._below.get(name)
        if child is None:
            child = self._below[name] = replace(self, random=self.random.child(name))
        return child

    def sequence_offset(self, part: int) -> tuple[int, int]:
        """Return the start of this rank's shard of a sequence that is sharded over the tensor axis, and the length of
        the full sequence.

        Parameters
        ----------
        part : number of positions that this rank holds

        Returns
        -------
        (start, total)
            first position of this rank, and length of the full sequence; (0, part) if the sequence is not sharded
        """
        comm = self.mesh.tensor
        if part == self.time or comm.size == 1:
            return 0, part
        total = part * comm.size if self.time is None else self.time
        start, stop = shard_bounds(total, comm.rank, comm.size)
        assert stop - start == part, f"{part} positions, not those of [{start}, {stop})"
        return start, total


@dataclass(frozen=True)
class ShardedLayer:
    """The result of `Layer.shard_over_ranks`: the layer that each rank of the tensor axis runs instead of the full
    layer.

    Parameters
    ----------
    layer : the layer to run. It has the same parameters as the full layer, with the same names and full shapes;
        `ParameterSpec.cut` defines each rank's shard
    kind : sharding of the layer's result
    partial : names of parameters that are not sharded but have only a partial gradient on each rank; the partial
        gradients are summed over the ranks
    kinds : for a layer whose results are sharded differently, the sharding of each result. The default () means that
        all results are sharded as `kind` says
    """

    layer: Layer
    kind: Kind
    partial: Iterable[str] = ()
    kinds: tuple[Kind, ...] = ()


def require_result_is_pair(found: Any, method: str = "backward_input", wanted: str = "(dx, kept)") -> tuple[Any, Any]:
    """Return `found`, the value that the layer method named `method` returned. Raise ShapeError unless `found` is a
    tuple of two elements. The error message contains `wanted`, a description of the expected tuple."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ShapeError(f"{method} gives {'an array' if hasattr(found, 'dtype') else found}, not {wanted}")
    return found


class Layer(ABC):
    """Base class for layers. A layer is a computation and its configuration. It holds no arrays, so one layer can be
    used in several places of a model.

    A subclass defines `specs`, `forward`, `backward_input` and, if it has parameters, `backward_params`;
    `fsdpx.testing.LayerContract` tests the subclass. Methods that run on arrays take these arguments:

    Parameters
    ----------
    env : array namespace, mesh, random numbers and training mode, see `LayerContext`
    p : parameters by name, for the names in `specs()`; the arrays are views of flat buffers
    g : gradients by name, only for trainable parameters; a layer *adds* to these arrays
    x : the input, or a tuple of inputs if `n_inputs` is not 1; dim 0 is the sample dim and may have size 0
    dy : the gradient of the result, with the same shape as the result. If `n_outputs` is not 1, a tuple of gradients,
        with None for a result that the loss does not depend on

    A method must not change `x`, `p` or `dy`, but may return a view of them. Constructors raise ConfigError for
    invalid arguments, and `forward` raises ShapeError or DataError for invalid inputs.
    """

    n_inputs: int | None = 1
    """Number of input arrays of `forward`, or None for any number. They are passed as a tuple unless there is exactly
    one."""
    n_outputs: int = 1
    """Number of arrays that `forward` returns. They are returned as a tuple unless there is exactly one."""
    cheap: bool = False
    """Whether `forward` is about as fast as reading and writing the layer's arrays once. If so, a container does not
    save the result for the backward pass. It saves only the values from which `recompute` computes the result again."""
    collective: bool = False
    """Whether the layer calls collectives over `env.mesh.data`. If so, all ranks of this axis must run the layer the
    same number of times."""
    takes_ghosts: bool = False
    """Whether the layer gets its shard of a field together with the ghost cells. Such a layer reads the ghost cells, or
    passes them on to the next layer, as all elementwise layers do. Other layers get the shard without ghost cells."""

    acts_on: str = "sample"
    """The smallest piece of the input that can be computed separately: "sample" (dim 0), "position" (dims 0 and 1) or
    "element". Layers that act on positions can run on a shard of a sequence; layers that act on elements can also run
    on a shard of the features."""

    fields: bool = False
    """Whether each rank may run the layer unchanged on its shard of a field (samples, channels, *cells)."""

    looks_up: bool = False
    """Whether the layer only looks up rows of its weights, as an embedding does. Pipelines assume that lookup layers
    take no time."""

    caches: bool | None = None
    """Whether the layer can process a text piece by piece with `env.cache`. If None, other attributes decide: for a
    container, `caches` must be true for all children; for any other layer, `acts_on` must be "position" or
    "element"."""

    takes: str | tuple[str, ...] = "numbers"
    """The dtype in which the layer gets an integer or boolean input of the model, as one of five words. "numbers" means
    the dtype in which the model computes. "exact" means float32 if the model computes in 16 bits, else the dtype of the
    model; float inputs are cast in the same way. "indices" means int32 or int64. "given" means that the input is not
    cast. "passed" means the dtype in which later layers read the result of this layer. The value is one word for all
    inputs, or a tuple with one word per input."""

    kernel_names: tuple[str, ...] | None = ()
    """Names of the kernels (`fsdpx.core.array.kernels`) that the layer itself runs, without its children. They are
    compiled before the first step. None means that another library computes the layer, such as PyTorch for a PyTorch
    module."""

    plan: Mapping[str, Any] = {}
    """The layer's built-in tensor plan: a dict that says how each child is sharded, keyed by the child's name ("" for
    the layer itself). The values, called marks, are `ColumnParallel`, `RowParallel`, `VocabParallel`, or `LayerDefault`
    for a layer that implements its sharding in `shard_over_ranks`."""

    routes: bool = False
    """Whether the layer routes tokens to experts, and counts the (token, expert) choices in `env.mesh.counters`."""

    given_values: GivenValues | None = None
    """Initial parameter values from another library. The values may differ between ranks."""

    aliases: ClassVar[Mapping[str, str | None]] = {}
    """For a layer with a counterpart in another library: maps parameter names that differ there to the names in
    `specs`, or to None if the parameter is not needed."""

    def __init_subclass__(cls) -> None:
        wrap_constructor_with_argument_check(cls)

    def specs(self) -> dict[str, ParameterSpec]:
        """Return the `ParameterSpec` of every parameter by name. Parameters of child layers have dotted names, such as
        "head.weight"."""
        return {}

    def children(self) -> dict[str, Layer]:
        """Return the child layers by name; {} for a layer that is not a container."""
        return {}

    def get_declared_input_names(self) -> tuple[str, ...]:
        """Return the names of the `n_inputs` inputs, for a layer that is trained as a whole model. Callers may pass a
        dict with these names as keys. By default, return (): a single input is then named "x", and several inputs are
        named "x0", "x1", ..."""
        return ()

    def get_declared_output_names(self) -> tuple[str, ...]:
        """Return the names of the `n_outputs` results, for a layer with several results. In an `nn.Graph`, other layers
        read a result as "name.result", where "name" is the name of this layer. By default, the names are "0", "1",
        ..."""
        return tuple(map(str, range(self.n_outputs)))

    def recompute(self, env: LayerContext, p: Params, saved: Any) -> Array:
        """Recompute the result of `forward` from its saved values. Layers with `cheap = True` must define this method.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        p : parameters by name
        saved : the second result of `forward`

        Returns
        -------
        array
            the first result of `forward`
        """
        raise ConfigError(f"{self!r} is cheap but does not define recompute")

    @abstractmethod
    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        """Compute the layer's result, and return it together with the values that the backward pass needs.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        p : parameters by name
        x : the input, or a tuple of inputs if `n_inputs` is not 1

        Returns
        -------
        (y, saved)
            y is the result, or a tuple of `n_outputs` results; saved is a tuple of references to arrays, not copies

        Raises
        ------
        ShapeError, DataError
            if the layer cannot process the input
        """

    def forward_shape_only(self, env: LayerContext, p: Params, x: Any) -> Any:
        """Return the result of `forward` as an array without data, which has only a shape and a dtype. Override this
        method if the shape is known without running `forward`.

        Parameters
        ----------
        env : context whose array namespace is `fsdpx.core.array.shapes`
        p : shape-only parameters by name
        x : the shape-only input, or a tuple of inputs

        Returns
        -------
        array
            the first result of `forward`, as a shape-only array

        Raises
        ------
        ShapeError
            if `forward` does not return a pair
        """
        return require_result_is_pair(self.forward(env, p, x), "forward", "(result, saved)")[0]

    @abstractmethod
    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Any) -> tuple[Any, Any]:
        """Compute the gradient of the input, and return it together with the values that `backward_params` needs.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        p : parameters by name
        saved : second result of `forward`
        dy : gradient of the result, with the same shape as the result; must not be changed

        Returns
        -------
        (dx, kept)
            dx is the gradient of the input, or a tuple with one gradient per input (None for an integer input); kept is
            passed to `backward_params`
        """

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        """Add the gradients of the parameters to `g`.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        g : gradients by name, updated in place; it has no entries for frozen parameters
        kept : second result of `backward_input`
        """
        if g:
            raise ConfigError(f"{self!r} has parameters ({', '.join(g)}) but does not define backward_params")

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> Any:
        """Run `backward_input`, then `backward_params`. Override this method if computing the gradients of input and
        parameters together is faster.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        p : parameters by name
        g : gradients by name, updated in place; it has no entries for frozen parameters
        saved : second result of `forward`
        dy : gradient of the result, with the same shape as the result; must not be changed

        Returns
        -------
        array
            dx, the gradient of the input, or a tuple of gradients for several inputs
        """
        dx, kept = require_result_is_pair(self.backward_input(env, p, saved, dy))
        if g:
            self.backward_params(env, g, kept)
        return dx

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> None:
        """Compute only the gradients of the parameters. This method is called if the gradient of the input is not
        needed, because the input depends only on data and frozen parameters.

        Override this method if computing the gradient of the input is expensive.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        p : parameters by name
        g : gradients by name, updated in place; it has no entries for frozen parameters
        saved : second result of `forward`
        dy : gradient of the result, with the same shape as the result; must not be changed
        """
        self.backward(env, p, g, saved, dy)

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        """Given the sharding of the inputs, return the layer that each rank of a tensor axis runs instead of this one.

        By default, the returned layer is the layer itself, which each rank runs on its shard of the inputs. The inputs
        may be replicated, sharded by samples, or sharded in a way that `acts_on` allows. Override this method for a
        layer that supports additional shardings, and call the base method for all other requests.

        Parameters
        ----------
        request : sharding of the inputs, and the tensor plan's mark for this layer, such as `ColumnParallel`

        Returns
        -------
        ShardedLayer
            the layer, the sharding of its result, and the names of the parameters that have only a partial gradient on
            each rank

        Raises
        ------
        ConfigError
            if the layer does not support the mark, or the sharding of the inputs
        """
        request.require_no_tensor_plan_mark(self)
        kind, location = request.get_common_input_sharding(self), f"{request.path!r} {self!r}"
        if isinstance(kind, ShardedBatch) and (self.collective or any(spec.state for spec in self.specs().values())):
            raise ConfigError(
                f"{location} takes statistics over samples, which sequence='samples' cuts: use LayerNorm or RMSNorm"
            )
        if isinstance(kind, ShardedSequence) and self.acts_on not in ("element", "position"):
            self._refuse_shard(location, kind, f"it cannot be used with sequence={request.sequence!r}")
        if isinstance(kind, FieldPartition) and not kind.can_run_unchanged(self):
            raise ConfigError(f"{location} reads {kind}, but {kind.explain_unsupported_layer(self)}")
        if isinstance(kind, ShardedFeatures):
            if self.acts_on != "element":
                self._refuse_shard(
                    location, kind, "close them with a RowParallel before it, or use ColumnParallel(gather_output=True)"
                )
            if names := ", ".join(join_path(request.path, name) for name in self.specs()):
                raise ConfigError(
                    f"{location} reads {kind}, but has parameters ({names}), which every rank holds whole and of whose "
                    "gradient it would get a part only: close them before it, with a RowParallel or "
                    "ColumnParallel(gather_output=True)"
                )
        return ShardedLayer(self, kind, self.specs() if isinstance(kind, ShardedSequence | ShardedBatch) else ())

    def _refuse_shard(self, location: str, kind: Kind, remedy: str) -> None:
        reason = f"but acts on each {self.acts_on} as a whole (Layer.acts_on)"
        raise ConfigError(f"{location} reads {kind}, {reason}: {remedy}")

    def needs_all_positions(self) -> bool:
        """Return whether a layer with `acts_on = "position"` needs all positions of a sample, for example to compute a
        mean, or needs the order of the positions. If so, the layer cannot run on the nodes of an unstructured mesh,
        because these are split over ranks, and their order depends on the partition."""
        return False

    def needs_full_input(self, input_index: int, mark: Any) -> bool:
        """Return whether each rank needs the full sequence of an input, instead of only its shard of the sequence.

        Parameters
        ----------
        input_index : index of the input
        mark : the tensor plan's mark for the layer, or None if the layer has no mark

        Returns
        -------
        bool
            False by default
        """
        return False

    def __call__(self, *x: Any) -> Any:
        """Record a call of the layer on symbolic values inside `Composite.compose`, and return the symbolic result. To
        run layers on arrays, use a trainer."""
        tracing = next((value.tracing for value in x if hasattr(value, "tracing")), None)
        if tracing is None:
            raise ConfigError(
                f"{self!r} is called on {', '.join(type(value).__name__ for value in x) or 'nothing'}: layers are "
                "called on values in nn.Composite.compose; for arrays use trainer.predict, or forward(env, p, x)"
            )
        return tracing.record_layer_call(self, x)

    as_distributed = as_distributed

    def __repr__(self) -> str:
        return format_constructor(self)


def find_sequence_length(inputs: Iterable[Array]) -> int | None:
    """Return the size of dim 1 if it is equal in all inputs of a model, else None. The result is used as
    `LayerContext.time`."""
    lengths = {x.shape[1] if len(x.shape) > 1 else None for x in inputs}
    return lengths.pop() if len(lengths) == 1 else None


def list_kernels(layer: Layer) -> tuple[str, ...]:
    """Return the names of the compiled kernels that a layer and the layers inside it run, without duplicates, in a
    fixed order."""
    names: dict[str, None] = {}
    seen: set[int] = set()

    def visit_layer(one: Layer) -> None:
        if id(one) not in seen:
            seen.add(id(one))
            names.update(dict.fromkeys(one.kernel_names or ()))
            for child in one.children().values():
                visit_layer(child)

    visit_layer(layer)
    return tuple(names)


def join_path(path: str, name: str) -> str:
    """Return the dotted path "path.name", or just `name` if `path` is empty (the root)."""
    return f"{path}.{name}" if path and name else path or name


def iterate_layers(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield (dotted path, layer) for the layer itself, and for all layers inside it."""
    yield path, layer
    for name, child in layer.children().items():
        yield from iterate_layers(child, join_path(path, name))


def collect_specs(children: Iterable[tuple[str, Layer]]) -> dict[str, ParameterSpec]:
    """Return the parameter specs of all child layers. Each name is prefixed with the name of the child, as in
    "head.weight"."""
    return {join_path(name, leaf): spec for name, layer in children for leaf, spec in layer.specs().items()}


class Parameters(dict[str, Array]):
    """Parameter arrays by name. No names are added or removed, so the arrays can be grouped by child layer once, and
    the groups can be cached."""

    _branches: tuple[Mapping[str, str], Mapping[str, Params]] | None = None

    def group_arrays_by_child(self, ties: Mapping[str, str]) -> Mapping[str, Params]:
        if self._branches is None or self._branches[0] is not ties:
            grouped = group_arrays_by_child(dict(self), ties)
            self._branches = ties, {head: Parameters(arrays) for head, arrays in grouped.items()}
        return self._branches[1]


def group_arrays_by_child(arrays: Params, ties: Mapping[str, str] = NO_TIES) -> Mapping[str, Params]:
    """Group arrays by child layer, the first part of their dotted names: `{"attn.qkv.weight": a}` becomes `{"attn":
    {"qkv.weight": a}}`.

    `ties` maps the aliases of tied parameters to their canonical names; each array is also returned under its
    aliases."""
    if isinstance(arrays, Gradients | Parameters):
        return arrays.group_arrays_by_child(ties)
    aliases = {alias: arrays[name] for alias, name in ties.items() if name in arrays}
    grouped: dict[str, dict[str, Array]] = {}
    for name, array in (*arrays.items(), *aliases.items()):
        head, _, rest = name.partition(".")
        grouped.setdefault(head, {})[rest] = array
    return grouped


def format_constructor(thing: Any) -> str:
    """Return a repr of the object `thing`, such as `Linear(64, 128, bias=False)`. The value of each constructor
    argument is read from the attribute of the same name; default values are not shown.

    If an argument has no attribute of the same name, its value is unknown. The repr then lists the child layers too,
    because they may depend on the argument."""
    words, inside = [], {}
    kind: Any = type(thing)
    for name, argument in _list_init_parameters(kind).items():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD) or not hasattr(thing, name):
            inside = thing.children() if isinstance(thing, Layer) else {}
            continue
        value = getattr(thing, name)
        if argument.default is argument.empty:
            words.append(repr(value))
        elif value != argument.default:
            words.append(f"{name}={value!r}")
    words += [f"{name}={child!r}" for name, child in inside.items() if name not in _list_init_parameters(kind)]
    return f"{type(thing).__name__}({', '.join(words)})"


def store_init_args(thing: Any, given: Mapping[str, Any]) -> None:
    """Store the constructor arguments of `thing` as attributes of the same names, for `format_constructor`. `given` is
    the result of `locals()` in the constructor."""
    kind: Any = type(thing)
    vars(thing).update({name: given[name] for name in _list_init_parameters(kind)})


@functools.cache
def _list_init_parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    init: Any = kind.__init__
    # do not pass `object.__init__` to `inspect`, which would parse its signature from text, and that is slow
    if init is object.__init__:
        init = lambda self, /, *args, **kwargs: None  # noqa: E731
    _, *arguments = inspect.signature(init).parameters.items()  # the first parameter is self
    return dict(arguments)
