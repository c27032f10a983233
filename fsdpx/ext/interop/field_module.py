"""Converts a PyTorch module to equivalent fsdpx layers for fields, which may be split over ranks.

The module runs once on tensors without data that have the size of the full field. Each layer and function that the
module calls becomes a step of a container."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.grid import Grid
from fsdpx.ext.interop.field_functions import FieldValue, FunctionCall, convert_function
from fsdpx.ext.interop.field_twins import LISTED, NoTwinError, convert_torch_module_to_layer, find_remedy, has_twin
from fsdpx.ext.interop.initial_values import InitialValues
from fsdpx.ext.interop.module import copy_to_meta_device, make_initial_values_from_tensors
from fsdpx.ext.interop.module_splitting import SplitModule, find_tied_names
from fsdpx.nn.container import ChildCall
from fsdpx.nn.layer import Layer, join_path

__all__ = ["FieldModule", "convert_to_field_layers"]

WRITTEN = "after a write into it or into a part, a view or the data of it; compute a new tensor instead, with torch.cat"


class FieldModule(SplitModule):
    """Container of layers that is equivalent to a PyTorch module. Its parameters and their names are the same as in the
    module.

    Parameters
    ----------
    steps, inputs, outputs : as in `fsdpx.nn.Container`
    ties : names of parameters that the module holds under more than one name
    module : the module, whose parameters are the initial values
    """

    given_values: InitialValues

    def __init__(
        self, steps: Sequence[ChildCall], inputs: Sequence[str], outputs: Sequence[str], ties: dict[str, str],
        module: torch.nn.Module,
    ) -> None:  # fmt: skip
        super().__init__(steps, inputs, outputs, ties)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.given_values = make_initial_values_from_tensors({name: tensors[name] for name in self._specs})
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        self.initial = {n: spec.init for n, spec in self.given_values.make_parameter_specs(shapes, ()).items()}
        for name, spec in self._specs.items():
            self._specs[name] = replace(spec, trainable=spec.trainable and tensors[name].requires_grad)

    def __repr__(self) -> str:
        steps = (f"{step.name} = {step.layer!r}({', '.join(step.sources)})" for step in self.steps)
        return f"FieldModule({'; '.join(steps)})"


def convert_to_field_layers(module: torch.nn.Module, example: Sequence[Any], grid: Grid) -> FieldModule:
    """Convert a PyTorch module to layers that run over a grid; see `fsdpx.ext.interop.torch.from_torch`."""
    trace, outputs = _trace_module(module, _make_inputs(module, example, grid, 2))
    more, more_outputs = _trace_module(module, _make_inputs(module, example, grid, 67))
    if _make_comparison_key((trace.steps, trace.ties, outputs)) != _make_comparison_key(
        (more.steps, more.ties, more_outputs)
    ):
        raise ConfigError(
            f"{type(module).__name__}: forward computes something else with another number of samples, or at random; "
            "a field has no access to the number of samples, so do not compute with x.shape[0]"
        )
    made = {join_path(step.name, local) for step in trace.steps for local in step.layer.specs()}
    ties = {alias: name for alias, name in find_tied_names(module).items() if {alias, name} <= made}
    return FieldModule(trace.steps, trace.inputs, outputs, ties | trace.ties, module)


def _trace_module(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[_FieldTrace, list[str]]:
    """Run a copy of a module on tensors without data. Return the trace and the names of the outputs."""
    # a buffer without dims, such as a counter, keeps its value because `forward` may read it
    tensors = {id(t): t for t in (*module.parameters(), *(b for b in module.buffers() if b.ndim))}
    trace = _FieldTrace(copy.deepcopy(module, {key: copy_to_meta_device(t) for key, t in tensors.items()}), inputs)
    return trace, trace.trace_and_get_output_names()


def _make_comparison_key(value: Any) -> Any:
    """Return a description that can be compared with `==` to check whether two layers, or lists of steps, are
    equivalent."""
    if isinstance(value, dict):
        return [(key, _make_comparison_key(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_make_comparison_key(one) for one in value]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _make_comparison_key(cells), _make_comparison_key(value.__defaults__)
    if isinstance(value, np.ndarray | torch.Tensor):
        return repr(value)
    return (type(value), _make_comparison_key(vars(value))) if isinstance(value, Layer | ChildCall) else value


def _make_inputs(module: torch.nn.Module, example: Sequence[Any], grid: Grid, samples: int) -> list[torch.Tensor]:
    """Return input tensors without data for a module: fields of the size of the grid, and scalars (samples, n).
    `samples`, the number of samples, is at least 2 because a batch norm fails for one sample with one cell."""
    shapes = [tuple(a.shape) for a in example] or [(1, _guess_input_channel_count(module), *grid.shape)]
    fields = sum(len(shape) > 2 for shape in shapes)
    parts = list(grid.input_partitions)
    if fields == 0 or len(parts) not in (1, fields) or min(map(len, shapes)) < 2:
        raise ConfigError(
            f"{type(module).__name__}: example inputs of shapes {shapes} for {len(parts)} grids: give one per input, "
            "as PyTorch takes them: a field (samples, channels, *cells), or scalars (samples, n)"
        )
    each = iter(parts if len(parts) == fields else parts * fields)
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    wide = [(samples, shape[1], *(next(each).shape if len(shape) > 2 else ())) for shape in shapes]
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in wide]


def _guess_input_channel_count(module: torch.nn.Module) -> int:
    """Return the number of input channels of the first layer of a module."""
    for one in module.modules():
        for name in ("in_channels", "num_features", "num_channels", "in_features"):
            if isinstance(count := getattr(one, name, None), int):
                return count
    return 1


class _FieldTrace(TorchFunctionMode):
    """Runs a PyTorch module on tensors without data, and collects equivalent steps (calls of fsdpx layers).

    If no fsdpx layer can compute a result, an error is stored in place of the result, and is raised only if the result
    is used.

    Parameters
    ----------
    module : a copy of the module without data, which may be changed
    inputs : its inputs
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.module, self.steps, self.ties = module, list[ChildCall](), dict[str, str]()
        self._tensors = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        taken = {name for name, _ in module.named_modules()} | set(self._tensors.values())
        found = inspect.signature(module.forward).parameters.items()
        names = [name for name, parameter in found if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        names = names if len(names) >= len(inputs) else [f"x{i}" for i in range(len(inputs))]
        self.inputs = [f"{name}_input" if name in taken else name for name in names[: len(inputs)]]
        self._names, self._used = taken | set(self.inputs), set[str]()
        self._values: dict[int, FieldValue | ConfigError | NoTwinError] = {}
        # values of PyTorch's write counters, which show whether a tensor has changed since its value was recorded
        self._versions = {id(t): t._version for t in (*module.parameters(), *module.buffers())}
        self._read_parameters: list[torch.Tensor] = []
        # values are looked up by tensor id, so tensors are kept alive to prevent the reuse of ids
        self._alive: list[Any] = []
        self._stack: list[tuple[str, torch.nn.Module]] = []
        self._given, self._is_inside_layer, self._function = inputs, False, ""

    def trace_and_get_output_names(self) -> list[str]:
        """Run the module, and return the names of its outputs."""
        for name, tensor in zip(self.inputs, self._given, strict=True):
            self._set_value(tensor, FieldValue(name))
        for path, child in self.module.named_modules():
            child.register_forward_pre_hook(partial(self._on_call, path))
            child.register_forward_hook(self._on_return)
        kind = type(self.module).__name__
        try:
            with self, torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = self.module(*self._given)
        except ConfigError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._given)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"{self._describe_current_module()}: forward fails for the full field, an input of shape {shapes}: "
                f"{reason}; if it takes other inputs, give an example of each: from_torch(module, x, domain=grid); "
                f"otherwise, {find_remedy(self._stack[-1][1])}"
            ) from error
        tensors = (result,) if isinstance(result, torch.Tensor) else result
        if not isinstance(tensors, tuple | list) or not all(isinstance(one, torch.Tensor) for one in tensors):
            raise ConfigError(f"{kind}: forward returns {type(result).__name__}; return a tensor or a tuple of tensors")
        try:
            self._replace_written_by_errors(tensors)
            values = [self.get_value(tensor) for tensor in tensors]
            for tensor in self._read_parameters[:]:
                self.find_parameter(tensor)
        except NoTwinError as error:
            raise ConfigError(f"{kind}: an output {error}") from error
        if any(value.channels_last or value.unit_cells for value in values):
            raise ConfigError(f"{kind}: an output is neither a field with channels in dim 1 nor scalars (samples, n)")
        self._remove_unread_steps([value.name for value in values])
        return [value.name for value in values]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_inside_layer:
            self._replace_written_by_errors(tree_leaves((args, kwargs)))
            if function in (torch.Tensor.data.__get__, torch.Tensor.data.__set__):
                self._versions[id(args[0])] = -1  # PyTorch's counter does not include writes through `.data`
        result = function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        reads_value = any(id(leaf) in self._values for leaf in tree_leaves((args, kwargs)))
        if self._is_inside_layer or not results or not reads_value:
            return result
        call = FunctionCall(function, args, kwargs, result, self)
        self._function = call.name
        values: Sequence[FieldValue | ConfigError]
        try:
            values = convert_function(call)
        except NoTwinError as error:
            values = [self._make_conversion_error(f"{call.name}()", str(error))] * len(results)
        for tensor, value in zip(results, values, strict=True):
            self._set_value(tensor, value)
        return result

    def get_value(self, tensor: torch.Tensor) -> FieldValue:
        value = self._values.get(id(tensor))
        if value is None:
            what = self._tensors.get(id(tensor), "")
            raise NoTwinError(
                f"reads {what!r}, a tensor of a module that is not a layer of torch.nn; {LISTED}" if what else
                "reads a tensor that is not computed from the inputs by known functions; pass it as another input"
            )  # fmt: skip
        if not isinstance(value, FieldValue):
            raise value
        return value

    def find_parameter(self, tensor: Any) -> str:
        name = self._tensors.get(id(tensor), "")
        if name and tensor._version != self._versions[id(tensor)]:
            raise NoTwinError(f"reads {name!r} before or {WRITTEN}")
        if name:
            self._read_parameters.append(tensor)
        return name

    def add_step(self, layer: Layer, *sources: str, name: str | None = None) -> str:
        path, module = self._stack[-1]
        if name is None and path not in self._used and type(module).__module__.startswith("torch.nn.modules."):
            name = path  # a layer of torch.nn without parameters, such as an activation
        step = join_path(path, self._function) if name is None else name
        while step in (self._names if name is None else self._used):
            step += "_"
        if name is not None and step != name:  # a second call of a layer uses the parameters of the first call
            self.ties |= {join_path(step, local): join_path(name, local) for local in layer.specs()}
        self._names.add(step)
        self._used.add(step)
        self.steps.append(ChildCall(step, layer, sources, (step,)))
        return step

    def _set_value(self, tensor: torch.Tensor, value: FieldValue | ConfigError) -> None:
        self._alive.append(tensor)
        self._values[id(tensor)], self._versions[id(tensor)] = value, tensor._version

    def _replace_written_by_errors(self, leaves: Sequence[Any]) -> None:
        """If a tensor has changed since its value was recorded, replace the value with an error that is raised if the
        tensor is read."""
        for leaf in leaves:
            if isinstance(self._values.get(id(leaf)), FieldValue) and leaf._version != self._versions[id(leaf)]:
                self._values[id(leaf)] = NoTwinError(f"reads a tensor {WRITTEN}")

    def _on_call(self, path: str, module: torch.nn.Module, args: Any) -> None:
        self._stack.append((path, module))
        if not self._is_inside_layer:
            self._replace_written_by_errors(args)
        self._is_inside_layer = self._is_inside_layer or has_twin(module)

    def _on_return(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._is_inside_layer and has_twin(module):
            self._is_inside_layer = False
            if id(args[0]) in self._values:
                self._set_value(result, self._convert_layer(module, args[0], result))
        self._stack.pop()

    def _convert_layer(self, module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> FieldValue | ConfigError:
        path, _ = self._stack[-1]
        try:
            value = self.get_value(x)
            if value.unit_cells:
                raise NoTwinError("its input has one value per channel; reshape it to (samples, n), and use Linear")
            layer = convert_torch_module_to_layer(module, x, y, value.channels_last)
            own = dict(module.named_parameters()) | dict(module.named_buffers())
            for tensor in module.parameters():
                self.find_parameter(tensor)
            if missing := [name for name in layer.specs() if name not in own]:
                raise NoTwinError(
                    f"its {missing[0]} is computed from other parameters, as weight_norm does; remove this"
                )
            return FieldValue(self.add_step(layer, value.name, name=path), value.channels_last)
        except NoTwinError as error:
            return self._make_conversion_error("", str(error))

    def _make_conversion_error(self, what: str, why: str) -> ConfigError:
        """Return the error to raise if no layer is equivalent to a PyTorch function or module. `what` is the name of
        the function ("" for a module), and `why` is the reason why there is no such layer."""
        what = what and f" calls {what}, which"
        remedy = find_remedy(self._stack[-1][1])
        return ConfigError(f"{self._describe_current_module()}{what} has no equivalent on a grid: {why}; {remedy}")

    def _describe_current_module(self) -> str:
        path, module = self._stack[-1]
        kind = type(module).__name__
        return f"{path!r} ({kind})" if path else kind

    def _remove_unread_steps(self, outputs: Sequence[str]) -> None:
        """Remove each step that has no parameters and whose result nothing reads."""
        read, kept = set(outputs), list[ChildCall]()
        for step in reversed(self.steps):
            if step.name in read or step.layer.specs():
                read.update(step.sources)
                kept.append(step)
        self.steps = kept[::-1]
