"""`TorchModule`: a `torch.nn.Module` as one layer.

Parameters are views of fsdpx's flat buffers, gradients come from autograd, and the engine owns the tensors saved for
backward."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, page_hint
from fsdpx.ext.interop.initial_values import InitialValues
from fsdpx.ext.interop.tensors import to_array, to_tensor
from fsdpx.ext.interop.torch_context import GlobalNorm, drawing_torch_numbers_from_context
from fsdpx.nn.gradient_accumulation import get_gradient_and_whether_to_add, has_integer_dtype
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, ShardedLayer
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext

__all__ = [
    "AutogradLayer",
    "InputAndParameterGradients",
    "RecordedForward",
    "Run",
    "TorchModule",
    "copy_to_meta_device",
    "is_norm",
    "make_initial_values_from_tensors",
    "select_output",
]


def make_initial_values_from_tensors(tensors: Mapping[str, torch.Tensor]) -> InitialValues:
    """Return the current values of a module's tensors as initial values. The result holds only weak references to the
    tensors."""
    missing = "is on PyTorch's device 'meta', without values: make the module on the CPU"
    here = {name: t for name, t in tensors.items() if not t.is_meta}
    remakers = {name: functools.partial(_read_if_alive, weakref.ref(t)) for name, t in here.items()}
    arrays = {name: to_array(np, t) for name, t in here.items()}
    return InitialValues(arrays, {name: missing for name, t in tensors.items() if t.is_meta}, remakers)


def _read_if_alive(owner: weakref.ref[torch.Tensor]) -> np.ndarray | None:
    tensor = owner()
    return None if tensor is None else to_array(np, tensor)


class AutogradLayer(Layer):
    """Base class for layers that PyTorch's autograd differentiates. Subclasses implement `_make_forward_function`."""

    kernel_names = None
    takes = "given"
    trained: frozenset[str]
    """Names of the parameters that have gradients."""
    device = "meta"
    """PyTorch device of dry runs: "meta", or, for modules that need values, "cpu" with arrays of zeros."""
    draws = True
    """Whether the layer's operations may draw random numbers. If False, operations are not intercepted, because
    interception would import PyTorch's compiler."""

    constants: Mapping[str, torch.Tensor]
    """Buffers and constants by name. They keep their dtypes."""

    @abstractmethod
    def _make_forward_function(self, env: LayerContext) -> Run:
        """Return a function of (parameters and buffers by name, inputs) that computes the layer's output in PyTorch."""

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        read = x if isinstance(x, tuple) else (x,)
        if read[0].shape[0] == 0 and not self.collective:  # some PyTorch operations reject 0 samples, so compute with 1
            one = tuple(env.xp.zeros((1, *a.shape[1:]), dtype=a.dtype) for a in read)
            return self._record_forward(env, one, p, frozenset()).output[:0], (None, *read)
        found = self._record_forward(env, read, p, self.trained & p.keys())
        if found.wrote:
            raise ConfigError(f"{self!r}: forward writes into {', '.join(found.wrote)}: compute new tensors instead")
        return found.output, (found, *found.kept)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        dx, gradients = self._run_backward(env, p, saved, dy, True, sorted(self.trained & p.keys()))
        return (dx[0] if len(dx) == 1 else tuple(dx)), gradients

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for name, gradient in kept.items():
            if (into := get_gradient_and_whether_to_add(g, name)) is not None:
                out, add = into
                if add:
                    out += gradient
                else:
                    out[...] = gradient

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Any:
        dx, gradients = self._run_backward(env, p, saved, dy, True, list(g))
        self.backward_params(env, g, gradients)
        return dx[0] if len(dx) == 1 else tuple(dx)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, self._run_backward(env, p, saved, dy, False, list(g))[1])

    def _record_forward(
        self, env: LayerContext, read: tuple[Array, ...], p: Params, trained: frozenset[str]
    ) -> RecordedForward:
        run, bare = self._make_forward_function(env), getattr(env.xp, "holds_no_data", False)
        with (
            drawing_torch_numbers_from_context(env, read[0].shape[0], self.draws),
            self._explaining_dtype_errors(read, p),
        ):
            if self.device == "cpu" or not bare:
                return RecordedForward(env.xp, run, read, p, trained, "cpu")
            try:
                return RecordedForward(env.xp, run, read, p, trained)
            # meta tensors fail if the module reads tensor values or creates tensors on the CPU, so retry on the CPU
            except (RuntimeError, NotImplementedError):
                self.device = "cpu"
                return RecordedForward(env.xp, run, read, p, trained, "cpu")

    @contextmanager
    def _explaining_dtype_errors(self, read: tuple[Array, ...], p: Params) -> Iterator[None]:
        """Context manager that turns a PyTorch dtype error into a ConfigError if any buffers differ in dtype from the
        inputs and parameters. The ConfigError names these buffers."""
        try:
            yield
        except RuntimeError as error:
            kinds = {str(a.dtype) for a in (*p.values(), *read) if not has_integer_dtype(a)}
            odd = [f"{n} is {t.dtype}" for n, t in self.constants.items() if t.is_floating_point()]
            odd = [text for text in odd if text.rpartition(".")[2] not in kinds]
            if not odd or "dtype" not in str(error):
                raise
            raise ConfigError(
                f"{self!r}: {', '.join(odd)}, a buffer that is not saved and so keeps its format, and all else is "
                f"{', '.join(sorted(kinds))}: convert it in the module, or choose the same precision=. PyTorch says: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _run_backward(
        self, env: LayerContext, p: Params, saved: Any, dy: Array, inputs: bool, trained: Sequence[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        recorded, *kept = saved
        if recorded is None:
            return [None if has_integer_dtype(a) else env.xp.zeros_like(a) for a in kept], dict.fromkeys(trained, 0.0)
        found = recorded.backward(p, kept, dy, inputs, trained)
        dx = [None if d is None else to_array(env.xp, d) for d in found.inputs]
        return dx, {name: to_array(env.xp, d) for name, d in found.parameters.items()}


class TorchModule(AutogradLayer):
    """A layer that runs any `torch.nn.Module`. All of its parameters are gathered and freed together.

    Parameters keep PyTorch's names and start with the module's values. Buffers that PyTorch saves become untrained
    parameters. Batch norms use the global batch, and dropout uses fsdpx's random numbers, so results do not depend on
    the layout of the ranks. `forward` may contain anything that autograd can differentiate, but must not write to
    inputs, parameters or buffers. Submodules in evaluation mode (`eval()`) stay in this mode during training, as in
    PyTorch.

    Parameters
    ----------
    module : module to copy, including its modes; later changes to it have no effect
    inputs : names of the arguments of `forward` that are the layer's inputs; if None (default), all arguments without a
        default
    output : selects the layer's output if `forward` does not return a single tensor: a key, an attribute or an index;
        if None (default), "logits" if the result has this attribute
    """

    given_values: InitialValues
    split_hint = ""
    """Text for a warning that tells the user how to split the module. The text is "" if the module has fewer than two
    submodules with parameters, or if `inputs` or `output` was given."""

    def __init__(
        self, module: torch.nn.Module, inputs: Sequence[str] | None = None, output: str | int | None = None
    ) -> None:
        self.inputs = inputs if inputs is None else (inputs,) if isinstance(inputs, str) else tuple(inputs)
        self.output = output
        self.n_inputs = _count_required_arguments(module) if self.inputs is None else len(self.inputs)
        self._bare = _BareModule(module)
        self.given_values = self._bare.values
        self.trained, self.constants = self._bare.trained, self._bare.constants
        self.collective = self._bare.norms
        self.aliases = dict.fromkeys(self._bare.counts)  # type: ignore[misc]
        owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
        if len(owners) > 1 and inputs is None and output is None:
            how = "to split it, pass fsdpx.ext.interop.torch.from_torch(net, example_inputs)"
            self.split_hint = f"fsdpx: {self!r} is one unit, which each rank gathers whole; {how}"

    def specs(self) -> dict[str, ParameterSpec]:
        return self.given_values.make_parameter_specs(
            self._bare.shapes, self.trained, self._bare.state, self._bare.of_norms
        )

    def __repr__(self) -> str:
        return f"TorchModule({self._bare.kind})"

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        if not isinstance(kind := request.get_common_input_sharding(self), FieldPartition):
            return super().shard_over_ranks(request)
        raise ConfigError(
            f"{request.path!r} {self!r} reads {kind}, and PyTorch modules see full samples: convert the module by "
            f"fsdpx.ext.interop.torch.from_torch(module, domain=grid), or make it of layers that {page_hint('fields')} "
            "lists"
        )

    def _make_forward_function(self, env: LayerContext) -> Run:
        module, constants = self._bare.get_thread_copy_and_constants(env)

        def run_module(given: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
            given |= {name: b.to(inputs[0].device) for name, b in constants.items()}
            if self.inputs is None:
                y = functional_call(module, given, tuple(inputs))
            else:
                y = functional_call(module, given, (), dict(zip(self.inputs, inputs, strict=True)))
            if wrote := [name for name, buffer in constants.items() if buffer._version]:
                raise ConfigError(f"{self!r}: forward writes into {', '.join(wrote)}: compute new tensors instead")
            return select_output(y, self.output, repr(self))

        return run_module


def select_output(result: Any, output: str | int | None, caller: str) -> torch.Tensor:
    """Return the tensor that `output` selects from the result of a module's `forward`. Raise ConfigError if there is
    none.

    `caller` is the name of the module, for error messages."""
    if output is None and hasattr(result, "logits"):
        output = "logits"
    if isinstance(output, str):
        names = _list_output_keys(result)
        if output not in names:
            there = f"there are {', '.join(map(str, names))}" if names else f"it gives {type(result).__name__}"
            raise ConfigError(f"{caller}: forward returns no {output!r}; {there}")
        result = result[output] if isinstance(result, Mapping) else getattr(result, output)
    elif output is not None:
        result = result[output]
    if not isinstance(result, torch.Tensor):
        raise ConfigError(
            f"{caller}: forward returns {type(result).__name__}, but a layer gives one tensor: choose it with output="
        )
    return result


def _list_output_keys(result: Any) -> list[Any]:
    """Return the possible values of `output` that select a part of the result of a module's `forward`."""
    if isinstance(result, Mapping):
        return list(result)
    if type(result) in (tuple, list):
        return list(range(len(result)))
    return [] if isinstance(result, torch.Tensor) else [name for name in dir(result) if not name.startswith("_")]


class _BareModule:
    """Holds a copy of a module without the data of its parameters. Each thread that runs the module gets its own copy
    of this copy.

    Attributes
    ----------
    shapes : shapes of parameters and saved buffers, by name
    state : names of running statistics
    of_norms : names of the scales and shifts of normalization layers
    counts : names of integer buffers, which fsdpx treats as constants
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.kind = f"{type(module).__name__}, {sum(p.numel() for p in module.parameters()):,} parameters"
        held = _collect_parameters_and_buffers(module)
        self.trained = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        self.counts = [name for name, t in held.items() if not t.is_floating_point()]
        floats = {name: t for name, t in held.items() if t.is_floating_point()}
        self.values = make_initial_values_from_tensors(floats)
        self.shapes = {name: tuple(t.shape) for name, t in floats.items()}
        self._module = copy.deepcopy(module, {id(t): copy_to_meta_device(t) for t in floats.values()})
        self.of_norms = [name for name in floats if is_norm(module.get_submodule(name.rpartition(".")[0]))]
        self._modes = {name: child.training for name, child in module.named_modules()}
        norms = [(n, m) for n, m in self._module.named_modules() if isinstance(m, _BatchNorm)]
        self.norms = bool(norms)
        self.state = frozenset(f"{n}.{s}".lstrip(".") for n, _ in norms for s in ("running_mean", "running_var"))
        for name, norm in norms:
            self._module = _replace_submodule(self._module, name, GlobalNorm(norm, name))
        if getattr(self._module, "inplace", False):
            self._module.inplace = False  # an in-place module would overwrite its input, which another layer owns
        self.constants = {n: b.clone() for n, b in self._module.named_buffers() if n not in floats}
        self._threads = threading.local()

    def get_thread_copy_and_constants(self, env: LayerContext) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """Return this thread's copy of the module, and the constants by name.

        In training, each submodule is in the mode (train or eval) that it had when the module was copied."""
        if not hasattr(self._threads, "module"):
            self._threads.module, self._threads.mode = copy.deepcopy(self._module), None
        module: torch.nn.Module = self._threads.module
        if self._threads.mode is not env.training:
            module.train(env.training)
            for name, mode in self._modes.items() if env.training else ():
                module.get_submodule(name).training = mode
            self._threads.mode = env.training
        return module, self.constants


def is_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is a normalization layer.

    Norms are recognized by their class names so that norms from other libraries, such as LlamaRMSNorm, are also
    found."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def _collect_parameters_and_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module and the buffers that it saves, by name. Raises ConfigError for a parameter that
    is not a floating-point tensor on the CPU."""
    saved = module.state_dict(keep_vars=True)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, p in module.named_parameters():
        if not p.is_floating_point() or p.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"{type(module).__name__}: {name!r} is {p.dtype} on {p.device}; parameters must be floats on the CPU, "
                "from where fsdpx takes them"
            )
    return {name: tensor for name, tensor in own.items() if name in saved}


def copy_to_meta_device(tensor: torch.Tensor) -> torch.Tensor:
    bare = torch.empty_like(tensor, device="meta", requires_grad=False)
    return torch.nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else bare


def _replace_submodule(module: torch.nn.Module, path: str, new: torch.nn.Module) -> torch.nn.Module:
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)
    return module


def _count_required_arguments(module: torch.nn.Module) -> int:
    """Return the number of arguments that `forward` requires, or 1 if all have defaults. Raises ConfigError if it
    takes no arguments."""
    arguments = inspect.signature(module.forward).parameters.values()
    by_place = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD, a.VAR_POSITIONAL)]
    if not by_place:
        raise ConfigError(f"{type(module).__name__}: forward has no positional argument; pass inputs=('x',)")
    return max(sum(a.default is a.empty and a.kind != a.VAR_POSITIONAL for a in by_place), 1)


Arrays = Mapping[str, Any]
Run = Callable[[dict[str, torch.Tensor], list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class InputAndParameterGradients:
    """The gradients that the backward pass of a layer computes.

    `inputs` has one gradient per input, which is None for integer inputs. `parameters` maps the names of the parameters
    that affect the output to their gradients."""

    inputs: list[torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _SavedTensorSource:
    """Where to find a tensor that autograd saved: the parameter `name`, or the array with index `number` among the kept
    arrays."""

    name: str | None
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    kind: torch.dtype


class RecordedForward:
    """A forward pass recorded by autograd. The caller holds the arrays that autograd saved, and passes them to
    `backward`.

    The saved arrays are in `kept`. Parameters are left out because they are gathered again for the backward pass,
    possibly at other addresses.

    Parameters
    ----------
    xp : namespace of all arrays
    run : function of (parameters and buffers by name, inputs) that returns the result
    inputs : input arrays; floating-point inputs get a gradient
    given : parameters and buffers by name
    trained : names of the parameters that get a gradient
    device : PyTorch device of shape-only arrays; default "meta"
    """

    def __init__(
        self, xp: Any, run: Run, inputs: Sequence[Any], given: Arrays, trained: frozenset[str], device: str = "meta"
    ) -> None:
        self._device, self._bare = device, getattr(xp, "holds_no_data", False)
        self.kept: tuple[Any, ...] = ()
        self._tensors = {name: to_tensor(a, device).requires_grad_(name in trained) for name, a in given.items()}
        self._owners = {_get_storage_id(tensor): name for name, tensor in self._tensors.items()}
        self._leaves = {name: tensor for name, tensor in self._tensors.items() if name in trained}
        self._held: list[torch.Tensor] = []
        self._dy: list[torch.Tensor] = []
        read = [_Inlet.apply(torch.empty(0, requires_grad=True), [to_tensor(a, device)]) for a in inputs]
        self._inlets = [get_gradient_edge(t) if t.requires_grad else None for t in read]
        with torch.enable_grad(), saved_tensors_hooks(self._pack_tensor, self._unpack_tensor):
            y = run(self._tensors, read)
            end = _Outlet.apply(y, self._dy) if y.requires_grad else None
        self.wrote = [name for name, tensor in self._tensors.items() if tensor._version]
        self.wrote += [f"input {i}" for i, tensor in enumerate(read) if tensor._version]
        self._outlet: GradientEdge | None = None if end is None else get_gradient_edge(end)
        self.output = to_array(xp, y)
        self.kept = _as_arrays(xp, self._held, list(zip(read, inputs, strict=True)))
        self._held, self._tensors = [], {}

    def backward(
        self, given: Arrays, kept: Sequence[Any], dy: Any, inputs: bool, trained: Sequence[str]
    ) -> InputAndParameterGradients:
        """Return the gradients, given the gradient `dy` of the output. This method frees the graph, so it can be called
        only once.

        `given` holds the current parameters and buffers by name, and `kept` holds the arrays saved by forward. `inputs`
        states whether to compute gradients of inputs, and `trained` names the parameters whose gradients are needed."""
        edges = [edge for edge in self._inlets if inputs and edge is not None]
        leaves = [self._leaves[name] for name in trained]
        if self._outlet is None or not edges + leaves:
            return InputAndParameterGradients([None] * len(self._inlets), {})
        self._tensors = {name: to_tensor(a, self._device) for name, a in given.items()}
        self._held = [] if self._bare else [to_tensor(a) for a in kept]
        self._dy.append(to_tensor(dy, self._device))
        found = torch.autograd.grad([self._outlet], [*edges, *leaves], allow_unused=True)
        self._held, self._tensors, self._outlet = [], {}, None
        at_inputs = iter(found[: len(edges)])
        dx = [next(at_inputs) if inputs and edge is not None else None for edge in self._inlets]
        pairs = zip(trained, found[len(edges) :], strict=True)
        return InputAndParameterGradients(dx, {name: gradient for name, gradient in pairs if gradient is not None})

    def _pack_tensor(self, tensor: torch.Tensor) -> _SavedTensorSource:
        tensor = tensor.detach()
        name = self._owners.get(_get_storage_id(tensor))
        if name is not None and self._tensors[name].dtype != tensor.dtype:
            name = None
        if name is None:
            self._held.append(tensor)
        return _SavedTensorSource(
            name, len(self._held) - 1, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
        )

    def _unpack_tensor(self, source: _SavedTensorSource) -> torch.Tensor:
        if source.name is not None:
            return self._tensors[source.name].detach().as_strided(source.size, source.stride, source.offset)
        if self._bare:
            return torch.zeros(source.size, dtype=source.kind, device=self._device)
        return self._held[source.number]


class _Inlet(torch.autograd.Function):
    """Autograd function that begins a graph at an input without keeping the input alive.

    If the input were a leaf of the graph, the graph would keep the input alive until the graph itself is freed."""

    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, x: list[torch.Tensor]) -> torch.Tensor:
        """Return the input, the only element of the list `x`. The list hides the input from autograd, so the result
        does not count as a view of an input."""
        if not x[0].is_floating_point():
            ctx.mark_non_differentiable(x[0])
        return x[0]

    @staticmethod
    def backward(ctx: Any, *dx: Any) -> tuple[None, None]:
        return None, None


class _Outlet(torch.autograd.Function):
    """Autograd function that ends a graph with a scalar whose gradient is never needed.

    If the graph ended with anything else, a shape check in `autograd.grad` would import a computer algebra system."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, dy: list[torch.Tensor]) -> torch.Tensor:
        """Return a scalar in place of `y`. The caller puts the gradient of `y` into the list `dy` before backward
        begins."""
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *one: Any) -> tuple[torch.Tensor, None]:
        return ctx.dy.pop(), None


def _get_storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _as_arrays(xp: Any, held: Sequence[torch.Tensor], inputs: Sequence[tuple[torch.Tensor, Any]]) -> tuple[Any, ...]:
    """Return tensors as arrays. In a dry run, tensors that share memory become one array so that their memory is
    counted only once."""
    if not getattr(xp, "holds_no_data", False):
        return tuple(to_array(xp, tensor) for tensor in held)
    known = {_get_storage_id(tensor): array for tensor, array in inputs}
    for tensor in held:
        if _get_storage_id(tensor) not in known:
            known[_get_storage_id(tensor)] = xp.empty((tensor.untyped_storage().nbytes(),), dtype="uint8")
    return tuple(known[_get_storage_id(tensor)] for tensor in held)
