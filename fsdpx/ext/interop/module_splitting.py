"""Splits a PyTorch module into layers that can be separately gathered, freed and placed on pipeline stages.

In a child process, PyTorch exports the module's `forward` as a graph. The child returns a description of the resulting
layers. The operations of each unit (a submodule) become one layer. Operations that are outside of all units and read no
parameters, such as the computation of masks and positions, are repeated in every layer that needs their results."""

from __future__ import annotations

import io
import operator
import os
import pickle
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.environment import read_environment as environment
from fsdpx.core.base.messages import TIMER_NAME, reporting_if_slow
from fsdpx.core.base.name_hints import parse_patterns, require_pattern_matches
from fsdpx.errors import ConfigError
from fsdpx.ext.interop.aten_kernels import RESHAPES, fuse_gelu_and_norm_into_next_linear
from fsdpx.ext.interop.initial_values import InitialValues
from fsdpx.ext.interop.module import (
    AutogradLayer,
    Run,
    TorchModule,
    is_norm,
    make_initial_values_from_tensors,
    select_output,
)
from fsdpx.ext.interop.tensors import to_tensor
from fsdpx.ext.interop.torch_context import REPLACED_OPERATIONS, may_draw_random_numbers
from fsdpx.nn.container import ChildCall, Container
from fsdpx.nn.gradient_accumulation import Gradients
from fsdpx.nn.layer import LayerContext, ParameterSpec, Params, join_path

__all__ = [
    "EXPORT_TIMEOUT_SECONDS",
    "ModuleLayout",
    "ModuleUnit",
    "Operation",
    "OperationGraph",
    "OperationNumber",
    "SplitModule",
    "UnitFunction",
    "UnitShapes",
    "convert_fx_nodes_to_operation_graph",
    "describe_tensor",
    "dump_layout",
    "find_tied_names",
    "load_layout",
    "run_in_child_or_here",
    "split_module_into_layers",
]  # fmt: skip

INPUT, RESULT, INNER = "placeholder", "output", "get_attr"


class OperationNumber(int):
    """Index of an operation in a graph. As an argument of a later operation, it stands for the result of the operation
    with this index."""


@dataclass(frozen=True)
class Operation:
    """One node of an fx graph. `target` is the function that it calls, or the name of a subgraph."""

    op: str
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperationGraph:
    """An fx graph as plain data. It lists the operations in order, with the inputs first. `inner` maps names to the
    subgraphs that operations call.

    Graphs with the same operations have the same repr."""

    nodes: Sequence[Operation]
    inner: Mapping[str, OperationGraph] = field(default_factory=dict)

    def to_graph_module(self) -> fx.GraphModule:
        """Return the graph as an fx module that PyTorch can run."""
        made, at = fx.Graph(), list[fx.Node]()
        for number, node in enumerate(self.nodes):
            args, kwargs = (_replace_numbers_by_nodes(at, given) for given in (node.args, dict(node.kwargs)))
            target = f"x{number}" if node.op == INPUT else node.target
            at.append(made.create_node(node.op, RESULT if node.op == RESULT else target, args, kwargs))
        fuse_gelu_and_norm_into_next_linear(made)
        return fx.GraphModule({name: graph.to_graph_module() for name, graph in self.inner.items()}, made)


@dataclass(frozen=True)
class TensorValue:
    """Shape and dtype of a tensor in PyTorch's export.

    `sizes` has one entry per dim: the size of the dim if the module fixes it, otherwise a symbol. Equal symbols within
    a module stand for equal sizes. `kind` is the name of the NumPy dtype."""

    sizes: Sequence[int | str]
    kind: str


def describe_tensor(node: fx.Node) -> TensorValue:
    tensor = node.meta["val"]
    sizes = [size if isinstance(size, int) else str(size) for size in tensor.shape]
    return TensorValue(sizes, str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class UnitShapes:
    """Shapes and dtypes of a unit's inputs and output, as `torch.export` reports them."""

    reads: Sequence[TensorValue]
    result: TensorValue

    def find_result_shape_and_dtype(self, given: Sequence[Any]) -> tuple[tuple[int, ...], str] | None:
        """Return (shape, dtype) of the output for the given inputs, or None if only PyTorch can determine them.

        The result is None, for example, if the dtypes or shapes of the inputs do not match the export."""
        known = dict[str, int]()
        for array, value in zip(given, self.reads, strict=True):
            alike = array.dtype.name == value.kind or (array.dtype.kind in "iu" and "int" in value.kind)
            if len(array.shape) != len(value.sizes) or not alike:
                return None
            for have, want in zip(array.shape, value.sizes, strict=True):
                if have != (known.setdefault(want, have) if isinstance(want, str) else want):
                    return None
        if any(isinstance(size, str) and size not in known for size in self.result.sizes):
            return None
        return tuple(known[n] if isinstance(n, str) else n for n in self.result.sizes), self.result.kind


@dataclass(frozen=True)
class ModuleUnit:
    """Description of one layer of a split module.

    Attributes
    ----------
    name : path of the unit in the module
    reads, result : names of the values that the layer reads, and name of the value that it returns
    parameters : (name in the unit, name in the module), in the order of the graph
    constants : names of the module's buffers and constants that the unit reads, in the order of the graph
    graph : the unit's operations as a function of the values that it reads, its parameters and its constants, in this
        order; None for a batch norm
    shapes : shapes of inputs and output
    """

    name: str
    reads: Sequence[str]
    result: str
    parameters: Sequence[tuple[str, str]] = ()
    constants: Sequence[str | torch.Tensor] = ()
    graph: OperationGraph | None = None
    shapes: UnitShapes | None = None


@dataclass(frozen=True)
class ModuleLayout:
    """Description of a module as a sequence of layers.

    Attributes
    ----------
    units : the layers, in the order in which they run
    inputs, result : names of the module's inputs, and name of its result
    borrowed : name in the split module -> names in the original module, for each parameter that a unit reads but
        another unit owns
    """

    units: Sequence[ModuleUnit]
    inputs: Sequence[str]
    result: str
    borrowed: Mapping[str, Sequence[str]]


def convert_fx_nodes_to_operation_graph(
    nodes: Sequence[fx.Node],
    number: Mapping[fx.Node, OperationNumber],
    target_of: Callable[[fx.Node], Any],
    owner: torch.nn.Module,
) -> OperationGraph:
    """Convert nodes of an fx graph to plain data.

    Parameters
    ----------
    nodes : nodes of the graph, in order
    number : node -> position of its operation in the result; several nodes may stand for the same operation
    target_of : function that maps a node to the function to call in place of the node's target; views always become
        reshapes
    owner : module whose attributes are the subgraphs
    """
    inner, made = dict[str, OperationGraph](), list[Operation]()
    for node in nodes:
        target = None if node.op in (INPUT, RESULT) else target_of(node)
        if node.op == INNER:
            target = f"inner{len(inner)}"
            inner[target] = _convert_inner_graph(operator.attrgetter(str(node.target))(owner))
        args, kwargs = (fx.node.map_arg(given, number.__getitem__) for given in (node.args, node.kwargs))
        made.append(Operation(node.op, RESHAPES.get(target, target), args, kwargs))
    return OperationGraph(made, inner)


def _convert_inner_graph(module: Any) -> OperationGraph:
    number = {node: OperationNumber(i) for i, node in enumerate(module.graph.nodes)}
    return convert_fx_nodes_to_operation_graph(list(module.graph.nodes), number, lambda node: node.target, module)


def _replace_numbers_by_nodes(nodes: Sequence[fx.Node], argument: Any) -> Any:
    return fx.node.map_aggregate(argument, lambda value: nodes[value] if isinstance(value, OperationNumber) else value)


class _Pickler(pickle.Pickler):
    """Pickler that stores PyTorch's operations by name, because they cannot be pickled directly."""

    def persistent_id(self, value: Any) -> str | None:
        return str(value) if isinstance(value, torch._ops.OpOverload) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return found


def dump_layout(layout: ModuleLayout) -> bytes:
    """Pickle a layout for `load_layout`. Raises an exception of the pickle module if any part cannot be pickled."""
    into = io.BytesIO()
    _Pickler(into, pickle.HIGHEST_PROTOCOL).dump(layout)
    return into.getvalue()


def load_layout(text: bytes) -> ModuleLayout:
    layout: ModuleLayout = _Unpickler(io.BytesIO(text)).load()
    return layout


EXPORT_TIMEOUT_SECONDS = 600.0
"""Time limit for the child process. If the limit is exceeded, this process exports the module itself."""
HARMLESS_THREADS = {"fsdpx watchdog", TIMER_NAME}
"""Names of threads that hold no locks needed by PyTorch. Forking is safe while these threads run."""
COMPLETE_MARK = b"."  # the last byte that the child sends; without it, the result is incomplete


def run_in_child_or_here(work: Callable[[], ModuleLayout]) -> ModuleLayout:
    """Run `work` in a child process if forking is safe, and return its result.

    If the child returns no result, for example because `work` failed, this process runs `work` itself. An error in
    `work` is then raised in this process.
    """
    return _compute_layout_in_forked_child(work) or work()


def _compute_layout_in_forked_child(work: Callable[[], ModuleLayout]) -> ModuleLayout | None:
    others = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    if not hasattr(os, "fork") or others - HARMLESS_THREADS or torch.cuda.is_initialized():
        # do not fork: a forked child cannot use CUDA, and it would wait forever for locks held by other threads
        return None
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # ignore Python's warning about native threads: they belong to libraries that the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_and_write_result_then_exit(writer, work)
    os.close(writer)
    text = _read_pipe_until_deadline(reader, time.monotonic() + EXPORT_TIMEOUT_SECONDS)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # there is no child to wait for if SIGCHLD is ignored
        os.waitpid(child, 0)
    return load_layout(text[:-1]) if text[-1:] == COMPLETE_MARK else None


def _run_and_write_result_then_exit(writer: int, work: Callable[[], ModuleLayout]) -> Any:
    """Run `work` in the forked child, and write its pickled result to the pipe `writer`.

    The child ends with os._exit, which skips the shutdown of Python and libraries."""
    status = 1
    try:
        torch.set_num_threads(1)  # otherwise, the child would wait forever for threads that exist only in the parent
        with os.fdopen(writer, "wb") as out:
            out.write(dump_layout(work()) + COMPLETE_MARK)
        status = 0
    finally:
        os._exit(status)


def _read_pipe_until_deadline(reader: int, deadline: float) -> bytes:
    parts = list[bytes]()
    with os.fdopen(reader, "rb", buffering=0) as given:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([given], [], [], left)[0]:
                parts.append(given.read(1 << 20) or b"")
                if not parts[-1]:
                    break
    return b"".join(parts)


Units = Callable[[str, torch.nn.Module], bool]
_tracing = threading.Lock()  # torch.export is not thread-safe, and modifies the module while it runs
ROOT = "module."


class UnitFunction(AutogradLayer):
    """A layer that runs the exported operations of one unit of a PyTorch module.

    Parameters
    ----------
    graph : the unit's operations as a function of the inputs, then parameters, then constants
    inputs : number of inputs
    parameters : names in the order of the graph, with their tensors
    constants : buffers and constants, in the order of the graph
    name : name of the unit, for messages
    shapes : shapes and dtypes of the unit's inputs and output; None (default) if unknown
    norms : names of parameters that belong to norms
    """

    given_values: InitialValues

    def __init__(
        self, graph: fx.GraphModule, inputs: int, parameters: Mapping[str, torch.Tensor], constants: Sequence[Any],
        name: str, shapes: UnitShapes | None = None, norms: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._norms = norms
        self.n_inputs, self.name, self._known = inputs, name, shapes
        self._kinds = {n: str(t.dtype).removeprefix("torch.") for n, t in parameters.items()}
        self.given_values = make_initial_values_from_tensors(parameters)
        self.trained = frozenset(n for n, t in parameters.items() if t.requires_grad)
        self._shapes = {n: tuple(t.shape) for n, t in parameters.items()}
        self._graph = graph
        self.constants = {f"constant {i}": constant for i, constant in enumerate(constants)}
        self.draws = may_draw_random_numbers(graph)

    def specs(self) -> dict[str, ParameterSpec]:
        return self.given_values.make_parameter_specs(self._shapes, self.trained, norms=self._norms)

    def __repr__(self) -> str:
        return f"UnitFunction({self.name})"

    def forward_shape_only(self, env: LayerContext, p: Params, x: Any) -> Any:
        """Return a shape-only output without running the operations.

        If possible, the shape is taken from the export. Otherwise, PyTorch computes it, and then imports as many
        modules as the exporter does."""
        found = None
        if self._known is not None and all(p[name].dtype.name == kind for name, kind in self._kinds.items()):
            found = self._known.find_result_shape_and_dtype(x if isinstance(x, tuple) else (x,))
        return super().forward_shape_only(env, p, x) if found is None else env.xp.empty(found[0], dtype=found[1])

    def _make_forward_function(self, env: LayerContext) -> Run:
        def run_graph(given: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
            constants = [c.to(inputs[0].device) for c in self.constants.values()]
            return self._graph(*inputs, *(given[name] for name in self._shapes), *constants)

        return run_graph


class SplitModule(Container):
    """Container of the layers of a split PyTorch module, named by their dotted paths in the module."""

    def _group_arrays_by_child(self, arrays: Params) -> Mapping[str, Params]:
        known: Mapping[str, Any] = arrays.entries if isinstance(arrays, Gradients) else arrays
        parts: dict[str, Params] = {}
        for step in self.steps:
            full = {local: join_path(step.name, local) for local in step.layer.specs()}
            own = {local: known[at] for local, name in full.items() if (at := self.ties.get(name, name)) in known}
            parts[step.name] = Gradients(own) if isinstance(arrays, Gradients) else own
        return parts


def split_module_into_layers(
    module: torch.nn.Module, example: Sequence[Any], units: Units | Sequence[str] | None, output: str | int | None
) -> SplitModule:
    """Split a PyTorch module into layers by exporting it; see `fsdpx.ext.interop.torch.from_torch`."""

    def lay_out_locked() -> ModuleLayout:
        with _tracing:
            return _lay_out_units_of_module(module, example, units, output)

    launcher = environment().launcher
    with reporting_if_slow(
        launcher is None or launcher.rank == 0, f"PyTorch exports {type(module).__name__} to split it into units"
    ):
        return _build_layers(run_in_child_or_here(lay_out_locked), module)


def _lay_out_units_of_module(
    module: torch.nn.Module, example: Sequence[Any], units: Units | Sequence[str] | None, output: str | int | None
) -> ModuleLayout:
    modules = dict(module.named_modules())
    plan = _ExportPlan(_export_module(module, example, output), modules, _make_unit_predicate(units, modules))
    found = [plan.make_unit(segment) for segment in plan.group_operations_by_unit()]
    return ModuleLayout(found, [value.name for value in plan.inputs], plan.result.name, plan.borrowed)


def _build_layers(layout: ModuleLayout, module: torch.nn.Module) -> SplitModule:
    """Build the layers that a layout describes. Units with equal graphs share one fx module."""
    graphs, steps = dict[str, fx.GraphModule](), list[ChildCall]()
    buffers = dict(module.named_buffers())
    for unit in layout.units:
        if unit.graph is None:
            layer: Any = TorchModule(module.get_submodule(unit.name))
        else:
            does = repr(unit.graph)
            if does not in graphs:
                graphs[does] = unit.graph.to_graph_module()
            tensors = {local: module.get_parameter(full) for local, full in unit.parameters}
            norms = [own for own, full in unit.parameters if is_norm(module.get_submodule(full.rpartition(".")[0]))]
            constants = [buffers[held] if isinstance(held, str) else held for held in unit.constants]
            layer = UnitFunction(graphs[does], len(unit.reads), tensors, constants, unit.name, unit.shapes, norms)
        steps.append(ChildCall(unit.name, layer, tuple(unit.reads), (unit.result,)))
    made = {join_path(step.name, local) for step in steps for local in step.layer.specs()}
    ties = {alias: name for alias, name in find_tied_names(module).items() if {alias, name} <= made}
    for alias, names in layout.borrowed.items():
        name = next((name for name in names if name in made), None)
        if name is None:
            raise ConfigError(
                f"{names[0]!r} is of no unit but of a module around several, and what reads it reads others as well or "
                "is inside a unit: choose other units, or put it in a module of its own, such as torch.nn.Embedding"
            )
        ties[alias] = ties.get(name, name)
    return SplitModule(steps, list(layout.inputs), [layout.result], ties)


@dataclass
class _ExportSegment:
    """The part of an exported graph that belongs to the unit `name`. `nodes` are its operations, in order. `results`
    are the unit's operations whose results are read by other units."""

    name: str
    nodes: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)

    @property
    def result(self) -> fx.Node:
        if len(self.results) != 1:
            raise ConfigError(
                f"{self.name!r} gives {len(self.results)} tensors that others read "
                f"({', '.join(node.name for node in self.results)}), and a layer gives one: choose other units"
            )
        return self.results[0]


class _ExportPlan:
    """Assignment of the operations of an exported graph to layers.

    `borrowed` is a dict of name in the split module -> names in the original module. It has an entry for each parameter
    that a unit reads but another unit owns."""

    def __init__(self, program: Any, modules: Mapping[str, torch.nn.Module], unit: Units) -> None:
        self.borrowed: dict[str, list[str]] = {}
        self.modules, self._unit, self._program = modules, unit, program
        signature, placeholders = program.graph_signature, [n for n in program.graph.nodes if n.op == "placeholder"]
        self.inputs = [n for n in placeholders if n.name in signature.user_inputs]
        full = signature.inputs_to_parameters
        self._parameters = {n: _strip_root(full[n.name]) for n in placeholders if n.name in full}
        self._read = {node: [name] for node, name in self._parameters.items()}
        buffers, lifted = signature.inputs_to_buffers, signature.inputs_to_lifted_tensor_constants
        self._constants: dict[fx.Node, str | torch.Tensor] = {}
        for node in placeholders:
            if node.name in buffers:
                self._constants[node] = _strip_root(buffers[node.name])
            elif node.name in lifted:
                self._constants[node] = program.constants[lifted[node.name]]
        self.result: fx.Node = next(n for n in program.graph.nodes if n.op == "output").args[0][-1]
        self._of: dict[fx.Node, _ExportSegment] = {}
        self._segments: dict[str, _ExportSegment] = {}

    def group_operations_by_unit(self) -> list[_ExportSegment]:
        """Group the operations by unit. Return the groups with their results, in order of execution."""
        found = self._segments
        for node in self._program.graph.nodes:
            name = self._find_unit(node) if node.op in ("call_function", "get_attr") else None
            if name is not None and "assert" not in str(node.target):
                self._of[node] = found.setdefault(name, _ExportSegment(name))
                self._of[node].nodes.append(node)
        if self.result not in self._of:  # if the last operations have no parameters, the result is in no unit
            last = self._of[self.result] = found[""] = _ExportSegment("")
            last.nodes.append(self.result)
        for segment in found.values():
            segment.results = [node for node in segment.nodes if self._is_read_outside(node, segment)]
        ordered = [s for s in found.values() if s.results]
        return sorted(ordered, key=lambda s: s.nodes[-1])

    def make_unit(self, segment: _ExportSegment) -> ModuleUnit:
        """Return a `ModuleUnit` that describes the operations of a unit as one layer."""
        own = self.modules.get(segment.name)
        if isinstance(own, _BatchNorm):
            norm = next(node for node in segment.nodes if "batch_norm" in str(node.target))
            return ModuleUnit(segment.name, [norm.args[0].name], segment.result.name)
        needed = self._list_nodes_with_dependencies(segment)
        reads = [node for node in needed if self._is_foreign_input(node, segment)]
        if not reads:
            reads = self.inputs[:1]  # a layer needs at least one input to determine the number of samples
        parameters = [n for n in needed if n in self._parameters]
        constants = [n for n in needed if n in self._constants]
        graph = self._make_unit_operation_graph(segment, needed, [*reads, *parameters, *constants], reads)
        named = [(self._get_parameter_name_within_unit(segment.name, n), self._parameters[n]) for n in parameters]
        held = [self._constants[n] for n in constants]
        names = [node.name for node in reads]
        shapes = UnitShapes([describe_tensor(node) for node in reads], describe_tensor(segment.result))
        return ModuleUnit(segment.name, names, segment.result.name, named, held, graph, shapes)

    def _make_unit_operation_graph(
        self, segment: _ExportSegment, needed: Sequence[fx.Node], given: Sequence[fx.Node], reads: Sequence[fx.Node]
    ) -> OperationGraph:
        """Return the graph of a unit's operations. The nodes in `given` become the inputs of the graph."""
        made = fx.Graph()
        at = {node: made.placeholder(node.name) for node in given}
        for node in needed:
            if node not in at:
                at[node] = _make_size_node(made, node, reads, at) or made.node_copy(node, at.__getitem__)
        made.output(at[segment.result])
        number = {node: OperationNumber(i) for i, node in enumerate(made.nodes)}
        return convert_fx_nodes_to_operation_graph(
            list(made.nodes),
            number,
            partial(_get_replacement_or_same_operation, segment.name),
            self._program.graph_module,
        )

    def _list_nodes_with_dependencies(self, segment: _ExportSegment) -> list[fx.Node]:
        """Return the operations of a unit and all parameter-free operations that they depend on, in order.

        If an operation needs the size of a tensor, the size is read from a tensor that is already an input."""
        needed, waiting = set[fx.Node](), [segment.result]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                if not self._is_foreign_input(node, segment) and not _is_size(node):
                    waiting += node.all_input_nodes
        reads = [node for node in needed if self._is_foreign_input(node, segment)]
        known = [*self.inputs, *(s.result for s in self._segments.values() if s.results)]
        for node in [node for node in needed if _is_size(node) and _find_size_source(node, reads) is None]:
            found = _find_size_source(node, known)
            if found is None:
                raise ConfigError(f"{segment.name!r} needs a size that no tensor between units has: choose other units")
            needed.add(found[0])
            reads.append(found[0])
        return [node for node in self._program.graph.nodes if node in needed]

    def _is_foreign_input(self, node: fx.Node, segment: _ExportSegment) -> bool:
        """Return whether a node comes from outside a unit: from an input of the module, or from the result of another
        unit."""
        return node in self.inputs or (_is_tensor(node) and self._of.get(node, segment) is not segment)

    def _find_unit(self, node: fx.Node) -> str | None:
        """Return the name of the unit that an operation belongs to, or None if it belongs to no unit.

        The unit is the outermost module that contains the operation and that was selected as a unit or has its own
        parameters.
        """
        path = _get_module_path(node)
        names = path.split(".") if path else []
        for i in range(1, len(names) + 1):
            at = ".".join(names[:i])
            if at in self.modules and (self._unit(at, self.modules[at]) or _has_own_parameters(self.modules[at])):
                return at
        return self._name_layer_of_outside_operation(node)

    def _name_layer_of_outside_operation(self, node: fx.Node) -> str | None:
        """Return the layer name for an operation that reads parameters but is outside all units, such as a matmul with
        the weight of an embedding. Return None if the operation gets no layer of its own.

        An operation that reads no parameters gets no layer. Nor does an operation that reads nothing but parameters,
        such as a slice of position embeddings: each unit that reads the result repeats the operation. If the operation
        reads a parameter of the root module, and no layer has that parameter's name yet, the layer is named after the
        parameter. Otherwise, the layer is named after the operation."""
        sources = [source for source in node.all_input_nodes if _is_tensor(source)]
        reads = [name for source in sources for name in self._read.get(source, ())]
        if not reads:
            return None
        if all(source in self._read for source in sources):
            self._read[node] = reads
            return None
        own = next((name for name in reads if "." not in name and name not in self._segments), None)
        if own is not None:
            return own
        taken = node.name in self.modules or node.name in self._parameters.values()
        return f"{node.name}_" if taken else node.name

    def _is_read_outside(self, node: fx.Node, segment: _ExportSegment) -> bool:
        """Return whether another unit or the caller reads a node's result, either directly or through operations
        outside of units."""
        if not _is_tensor(node):
            return False
        if node is self.result:
            return True
        waiting, seen = list(node.users), set[fx.Node]()
        while waiting:
            user = waiting.pop()
            of = self._of.get(user)
            if user in seen or user.op == "output" or not (_is_tensor(user) or user.users) or _is_size(user):
                continue
            seen.add(user)
            if of is not None and of is not segment:
                return True
            if of is None:
                waiting += user.users
        return False

    def _get_parameter_name_within_unit(self, segment: str, node: fx.Node) -> str:
        """Return the name of a parameter within a unit. If the parameter belongs to another unit, also record in
        `borrowed` all names that the parameter has in the module."""
        full = self._parameters[node]
        tensor = self.modules[""].get_parameter(full)
        names = [n for n, p in self.modules[""].named_parameters(remove_duplicate=False) if p is tensor]
        if segment in names:
            # the layer has the same name as its only parameter, so the parameter's name within the layer is empty
            return ""
        inside = next((n for n in (full, *names) if n.startswith(f"{segment}.") or not segment), None)
        if inside is None:
            self.borrowed[join_path(segment, full)] = names
            return full
        return inside[len(segment) + 1 :] if segment else inside


def _export_module(module: torch.nn.Module, example: Sequence[Any], output: str | int | None) -> Any:
    """Export a module with `torch.export`, in training mode and for inputs of any size. Raises ConfigError if the
    export fails."""
    tensors = tuple(a if isinstance(a, torch.Tensor) else to_tensor(np.asarray(a)) for a in example)
    sizes = tuple(dict.fromkeys(range(t.ndim), torch.export.Dim.AUTO) for t in tensors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's exporter warns about its own code
            program = torch.export.export(_SelectOutput(module, output), tensors, dynamic_shapes=(sizes,), strict=False)
            program = program.run_decompositions({})  # decompositions remove in-place operations
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be split: torch.export says {str(error).strip().splitlines()[0]}; without "
            "an example it is one layer"
        ) from error
    signature, modules = program.graph_signature, dict(module.named_modules())
    wrote = list(signature.user_inputs_to_mutate.values())
    for name in map(_strip_root, signature.buffers_to_mutate.values()):
        if not isinstance(modules[name.rpartition(".")[0]], _BatchNorm):
            wrote.append(name)
    if wrote:
        raise ConfigError(
            f"{type(module).__name__}: forward writes into {', '.join(wrote)}: compute new tensors instead"
        )
    return program


class _SelectOutput(torch.nn.Module):
    """A module that wraps another module and returns a single tensor of its output."""

    def __init__(self, module: torch.nn.Module, output: str | int | None) -> None:
        super().__init__()
        self.module, self.output = module, output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return select_output(self.module(*inputs), self.output, type(self.module).__name__)


def _make_unit_predicate(units: Units | Sequence[str] | None, modules: Mapping[str, torch.nn.Module]) -> Units:
    if callable(units):
        return units
    if units is None:
        lists = [name for name, one in modules.items() if isinstance(one, torch.nn.ModuleList)]
        return lambda path, module: path.rpartition(".")[0] in lists
    patterns = parse_patterns("units", units)
    inside = [(type(one).__name__, path) for path, one in modules.items() if path]
    require_pattern_matches("units", patterns, dict.fromkeys(name for names in inside for name in names), "module")
    return lambda path, module: any(_matches_pattern(pattern, path, module) for pattern in patterns)


def _matches_pattern(pattern: str, path: str, module: torch.nn.Module) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(type(module).__name__, pattern)


def find_tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Return a dict of additional name -> first name for the parameters that a module holds under several names."""
    first: dict[int, str] = {}
    return {
        name: first[id(p)]
        for name, p in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }


def _strip_root(name: str) -> str:
    return name.removeprefix(ROOT)


def _get_module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return _strip_root(path) if path.startswith(ROOT) else ""


def _has_own_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _find_size_source(node: fx.Node, reads: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """Find a tensor in `reads` with a dim whose size equals the size that `node` returns. Return (tensor, dim), or None
    if there is no match."""
    wanted = str(node.meta["val"])
    for read in reads:
        for dim, size in enumerate(getattr(read.meta.get("val"), "shape", ())):
            if str(size) == wanted:
                return read, dim
    return None


def _make_size_node(
    graph: fx.Graph, node: fx.Node, reads: Sequence[fx.Node], copies: Mapping[fx.Node, fx.Node]
) -> fx.Node | None:
    found = _find_size_source(node, reads) if _is_size(node) else None
    return None if found is None else graph.call_function(torch.ops.aten.sym_size.int, (copies[found[0]], found[1]))


def _get_replacement_or_same_operation(unit: str, node: fx.Node) -> Any:
    """Return the function to call for an exported operation: its replacement, or the operation itself if there is none.
    Raise ConfigError if the operation is not supported."""
    if node.target not in REPLACED_OPERATIONS and any(word in str(node.target) for word in ("batch_norm", "dropout")):
        raise ConfigError(f"{unit!r}: {node.target} is not known inside a unit; choose smaller units")
    return REPLACED_OPERATIONS.get(node.target, node.target)
