"""A module cut into layers: PyTorch exports what its `forward` does, in a child process that describes it, and the
operations of each unit become one layer.

Between units stand operations without parameters, such as masks and positions: every layer repeats those it reads."""

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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from fsdpx.core.base.environment import read as environment
from fsdpx.core.base.messages import TIMER, slow
from fsdpx.core.base.name_hints import demand_match, patterns_of
from fsdpx.errors import ConfigError
from fsdpx.ext.interop.aten_kernels import RESHAPES, fuse
from fsdpx.ext.interop.initial_values import Values
from fsdpx.ext.interop.module import Differentiated, Module, Run, chosen, is_norm, values_of
from fsdpx.ext.interop.tensors import tensor_of
from fsdpx.ext.interop.torch_context import REPLACED, draws
from fsdpx.nn.container import ChildCall, Container
from fsdpx.nn.gradient_accumulation import Gradients
from fsdpx.nn.layer import Env, Params, Spec, dotted

__all__ = [
    "PATIENCE", "At", "CutModule", "ModuleLayout", "ModuleUnit", "Operation", "OperationGraph", "Shapes",
    "UnitFunction", "apart", "cut", "described", "dumped", "loaded", "shared", "value",
]  # fmt: skip

INPUT, RESULT, INNER = "placeholder", "output", "get_attr"


class At(int):
    """The number of an earlier operation, in the place of what it gives."""


@dataclass(frozen=True)
class Operation:
    """One node of an fx graph. target: what is called, or the name of an inner graph."""

    op: str
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperationGraph:
    """Operations in order, inputs first. inner: graphs that some of them call, by name. Equal in text if they do the
    same."""

    nodes: Sequence[Operation]
    inner: Mapping[str, OperationGraph] = field(default_factory=dict)

    def module(self) -> fx.GraphModule:
        """As PyTorch runs it."""
        made, at = fx.Graph(), list[fx.Node]()
        for number, node in enumerate(self.nodes):
            args, kwargs = (_with(at, given) for given in (node.args, dict(node.kwargs)))
            target = f"x{number}" if node.op == INPUT else node.target
            at.append(made.create_node(node.op, RESULT if node.op == RESULT else target, args, kwargs))
        fuse(made)
        return fx.GraphModule({name: graph.module() for name, graph in self.inner.items()}, made)


@dataclass(frozen=True)
class TensorValue:
    """What PyTorch's exporter knows of a tensor: sizes that hold for this module alone, as numbers, and others by name,
    the same for all values of a module; the name of its NumPy dtype."""

    sizes: Sequence[int | str]
    kind: str


def value(node: fx.Node) -> TensorValue:
    tensor = node.meta["val"]
    sizes = [size if isinstance(size, int) else str(size) for size in tensor.shape]
    return TensorValue(sizes, str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Shapes:
    """What a unit reads and gives, in the format of the module."""

    reads: Sequence[TensorValue]
    result: TensorValue

    def of(self, given: Sequence[Any]) -> tuple[tuple[int, ...], str] | None:
        """(shape, dtype) of the result for arrays that are given; None if PyTorch has to be asked, which knows more of
        what does not fit and of other formats."""
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
    """One layer to be.

    name : of the unit in the module
    reads, result : names of values between layers
    parameters : (name in the unit, name in the module) in the order of the graph
    constants : names of buffers of the module, or constants, in the order of the graph
    graph : takes what is read, then parameters, then constants; None: a batch norm, which is a layer by itself
    shapes : of what it reads and gives
    """

    name: str
    reads: Sequence[str]
    result: str
    parameters: Sequence[tuple[str, str]] = ()
    constants: Sequence[str | torch.Tensor] = ()
    graph: OperationGraph | None = None
    shapes: Shapes | None = None


@dataclass(frozen=True)
class ModuleLayout:
    """Units in the order in which they run. inputs, result: of the module. borrowed: parameters of other units that a
    unit reads, name there -> names that they have in the module."""

    units: Sequence[ModuleUnit]
    inputs: Sequence[str]
    result: str
    borrowed: Mapping[str, Sequence[str]]


def described(
    nodes: Sequence[fx.Node], number: Mapping[fx.Node, At], target_of: Callable[[fx.Node], Any], owner: torch.nn.Module
) -> OperationGraph:
    """The description of nodes of a graph.

    Parameters
    ----------
    nodes : in order, as numbered
    number : also of nodes that others stand for
    target_of : what is called in the place of a node's own target; a view is made by a reshape in any case
    owner : what inner graphs are attributes of
    """
    inner, made = dict[str, OperationGraph](), list[Operation]()
    for node in nodes:
        target = None if node.op in (INPUT, RESULT) else target_of(node)
        if node.op == INNER:
            target = f"inner{len(inner)}"
            inner[target] = _inner(operator.attrgetter(str(node.target))(owner))
        args, kwargs = (fx.node.map_arg(given, number.__getitem__) for given in (node.args, node.kwargs))
        made.append(Operation(node.op, RESHAPES.get(target, target), args, kwargs))
    return OperationGraph(made, inner)


def _inner(module: Any) -> OperationGraph:
    number = {node: At(i) for i, node in enumerate(module.graph.nodes)}
    return described(list(module.graph.nodes), number, lambda node: node.target, module)


def _with(at: Sequence[fx.Node], given: Any) -> Any:
    return fx.node.map_aggregate(given, lambda value: at[value] if isinstance(value, At) else value)


class _Pickler(pickle.Pickler):
    """Operations of PyTorch by name: they cannot be pickled as they are."""

    def persistent_id(self, value: Any) -> str | None:
        return str(value) if isinstance(value, torch._ops.OpOverload) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return found


def dumped(layout: ModuleLayout) -> bytes:
    """For `loaded`; an exception of pickle if something in it cannot go to another process."""
    into = io.BytesIO()
    _Pickler(into, pickle.HIGHEST_PROTOCOL).dump(layout)
    return into.getvalue()


def loaded(text: bytes) -> ModuleLayout:
    layout: ModuleLayout = _Unpickler(io.BytesIO(text)).load()
    return layout


PATIENCE = 600.0
"""Seconds for the child; after that this process does its work."""
QUIET = {"fsdpx watchdog", TIMER}
"""Threads of this process that hold no lock which PyTorch asks for."""
GIVEN = b"."  # the last byte of a whole result


def apart(work: Callable[[], ModuleLayout]) -> ModuleLayout:
    """work(), done by a child process where that is safe, and here if the child gave no result for whatever reason:
    what went wrong is then raised by the same work in this process."""
    return _by_child(work) or work()


def _by_child(work: Callable[[], ModuleLayout]) -> ModuleLayout | None:
    others = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    if not hasattr(os, "fork") or others - QUIET or torch.cuda.is_initialized():
        return None  # another thread may hold a lock that the child would wait for, and CUDA's state is not inherited
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python's, of threads that are not its own: those of libraries compute, and the child does not ask them to.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _give(writer, work)
    os.close(writer)
    text = _read(reader, time.monotonic() + PATIENCE)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # a program that ignores SIGCHLD has no children to wait for
        os.waitpid(child, 0)
    return loaded(text[:-1]) if text[-1:] == GIVEN else None


def _give(writer: int, work: Callable[[], ModuleLayout]) -> Any:
    """The child's life: it ends here, without what Python and libraries do at the end of a process."""
    status = 1
    try:
        torch.set_num_threads(1)  # the parent's threads are not here, and waiting for them never ends
        with os.fdopen(writer, "wb") as out:
            out.write(dumped(work()) + GIVEN)
        status = 0
    finally:
        os._exit(status)


def _read(reader: int, until: float) -> bytes:
    parts = list[bytes]()
    with os.fdopen(reader, "rb", buffering=0) as given:
        while (left := until - time.monotonic()) > 0:
            if select.select([given], [], [], left)[0]:
                parts.append(given.read(1 << 20) or b"")
                if not parts[-1]:
                    break
    return b"".join(parts)


Units = Callable[[str, torch.nn.Module], bool]
_tracing = threading.Lock()  # PyTorch exports in one thread at a time, and changes the module while it does
ROOT = "module."


class UnitFunction(Differentiated):
    """The operations of one unit of a module.

    Parameters
    ----------
    graph : its operations, which take the inputs, then parameters, then constants
    parameters : names in the order of the graph, and their tensors
    constants : buffers and constants, in the order of the graph
    name : of the unit, for messages
    shapes : of what it reads and gives in the format of its parameters, if that is known
    norms : names of parameters of norms
    """

    given_values: Values

    def __init__(
        self, graph: fx.GraphModule, inputs: int, parameters: Mapping[str, torch.Tensor], constants: Sequence[Any],
        name: str, shapes: Shapes | None = None, norms: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._norms = norms
        self.n_inputs, self.name, self._known = inputs, name, shapes
        self._kinds = {n: str(t.dtype).removeprefix("torch.") for n, t in parameters.items()}
        self.given_values = values_of(parameters)
        self.trained = frozenset(n for n, t in parameters.items() if t.requires_grad)
        self._shapes = {n: tuple(t.shape) for n, t in parameters.items()}
        self._graph = graph
        self.constants = {f"constant {i}": constant for i, constant in enumerate(constants)}
        self.draws = draws(graph)

    def specs(self) -> dict[str, Spec]:
        return self.given_values.specs(self._shapes, self.trained, norms=self._norms)

    def __repr__(self) -> str:
        return f"Part({self.name})"

    def result(self, env: Env, p: Params, x: Any) -> Any:
        """Without PyTorch where its exporter has told: following shapes, it imports as much as the exporter does."""
        found = None
        if self._known is not None and all(p[name].dtype.name == kind for name, kind in self._kinds.items()):
            found = self._known.of(x if isinstance(x, tuple) else (x,))
        return super().result(env, p, x) if found is None else env.xp.empty(found[0], dtype=found[1])

    def _run(self, env: Env) -> Run:
        def run(given: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
            constants = [c.to(inputs[0].device) for c in self.constants.values()]
            return self._graph(*inputs, *(given[name] for name in self._shapes), *constants)

        return run


class CutModule(Container):
    """Layers under the dotted names that they have in the module that they were cut from."""

    def _parts(self, arrays: Params) -> Mapping[str, Params]:
        known: Mapping[str, Any] = arrays.entries if isinstance(arrays, Gradients) else arrays
        parts: dict[str, Params] = {}
        for step in self.steps:
            full = {local: dotted(step.name, local) for local in step.layer.specs()}
            own = {local: known[at] for local, name in full.items() if (at := self.ties.get(name, name)) in known}
            parts[step.name] = Gradients(own) if isinstance(arrays, Gradients) else own
        return parts


def cut(
    module: torch.nn.Module, example: Sequence[Any], units: Units | Sequence[str] | None, output: str | int | None
) -> CutModule:
    """See `fsdpx.ext.interop.torch.from_torch`."""

    def work() -> ModuleLayout:
        with _tracing:
            return _layout(module, example, units, output)

    launcher = environment().launcher
    with slow(launcher is None or launcher.rank == 0, f"PyTorch exports {type(module).__name__}, to cut it into units"):
        return _made(apart(work), module)


def _layout(
    module: torch.nn.Module, example: Sequence[Any], units: Units | Sequence[str] | None, output: str | int | None
) -> ModuleLayout:
    modules = dict(module.named_modules())
    plan = _Plan(_exported(module, example, output), modules, _chooser(units, modules))
    found = [plan.unit(segment) for segment in plan.segments()]
    return ModuleLayout(found, [value.name for value in plan.inputs], plan.result.name, plan.borrowed)


def _made(layout: ModuleLayout, module: torch.nn.Module) -> CutModule:
    """The layers of a layout. Units that do the same share what they do."""
    graphs, steps = dict[str, fx.GraphModule](), list[ChildCall]()
    buffers = dict(module.named_buffers())
    for unit in layout.units:
        if unit.graph is None:
            layer: Any = Module(module.get_submodule(unit.name))
        else:
            does = repr(unit.graph)
            if does not in graphs:
                graphs[does] = unit.graph.module()
            tensors = {local: module.get_parameter(full) for local, full in unit.parameters}
            norms = [own for own, full in unit.parameters if is_norm(module.get_submodule(full.rpartition(".")[0]))]
            constants = [buffers[held] if isinstance(held, str) else held for held in unit.constants]
            layer = UnitFunction(graphs[does], len(unit.reads), tensors, constants, unit.name, unit.shapes, norms)
        steps.append(ChildCall(unit.name, layer, tuple(unit.reads), (unit.result,)))
    made = {dotted(step.name, local) for step in steps for local in step.layer.specs()}
    ties = {alias: name for alias, name in shared(module).items() if {alias, name} <= made}
    for alias, names in layout.borrowed.items():
        name = next((name for name in names if name in made), None)
        if name is None:
            raise ConfigError(
                f"{names[0]!r} is of no unit but of a module around several, and what reads it reads others as well or "
                "is inside a unit: choose other units, or put it in a module of its own, such as torch.nn.Embedding"
            )
        ties[alias] = ties.get(name, name)
    return CutModule(steps, list(layout.inputs), [layout.result], ties)


@dataclass
class _Segment:
    """One layer to be: the operations of unit `name` in order, and the tensor that others read."""

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


class _Plan:
    """Which operations become which layers.

    borrowed: parameters of other units that a unit reads, name there -> names that they have in the module."""

    def __init__(self, program: Any, modules: Mapping[str, torch.nn.Module], unit: Units) -> None:
        self.borrowed: dict[str, list[str]] = {}
        self.modules, self._unit, self._program = modules, unit, program
        signature, placeholders = program.graph_signature, [n for n in program.graph.nodes if n.op == "placeholder"]
        self.inputs = [n for n in placeholders if n.name in signature.user_inputs]
        full = signature.inputs_to_parameters
        self._parameters = {n: _stripped(full[n.name]) for n in placeholders if n.name in full}
        self._read = {node: [name] for node, name in self._parameters.items()}
        buffers, lifted = signature.inputs_to_buffers, signature.inputs_to_lifted_tensor_constants
        self._constants: dict[fx.Node, str | torch.Tensor] = {}
        for node in placeholders:
            if node.name in buffers:
                self._constants[node] = _stripped(buffers[node.name])
            elif node.name in lifted:
                self._constants[node] = program.constants[lifted[node.name]]
        self.result: fx.Node = next(n for n in program.graph.nodes if n.op == "output").args[0][-1]
        self._of: dict[fx.Node, _Segment] = {}
        self._segments: dict[str, _Segment] = {}

    def segments(self) -> list[_Segment]:
        """In the order in which they run, with what each gives."""
        found = self._segments
        for node in self._program.graph.nodes:
            name = self._key(node) if node.op in ("call_function", "get_attr") else None
            if name is not None and "assert" not in str(node.target):
                self._of[node] = found.setdefault(name, _Segment(name))
                self._of[node].nodes.append(node)
        if self.result not in self._of:  # the last operations have no parameters
            last = self._of[self.result] = found[""] = _Segment("")
            last.nodes.append(self.result)
        for segment in found.values():
            segment.results = [node for node in segment.nodes if self._is_read(node, segment)]
        ordered = [s for s in found.values() if s.results]
        return sorted(ordered, key=lambda s: s.nodes[-1])

    def unit(self, segment: _Segment) -> ModuleUnit:
        """The layer that a segment is."""
        own = self.modules.get(segment.name)
        if isinstance(own, _BatchNorm):
            norm = next(node for node in segment.nodes if "batch_norm" in str(node.target))
            return ModuleUnit(segment.name, [norm.args[0].name], segment.result.name)
        needed = self._needed(segment)
        reads = [node for node in needed if self._comes_from_elsewhere(node, segment)]
        if not reads:
            reads = self.inputs[:1]  # a layer has an input, which tells how many samples there are
        parameters = [n for n in needed if n in self._parameters]
        constants = [n for n in needed if n in self._constants]
        graph = self._graph(segment, needed, [*reads, *parameters, *constants], reads)
        named = [(self._local(segment.name, n), self._parameters[n]) for n in parameters]
        held = [self._constants[n] for n in constants]
        names, shapes = [node.name for node in reads], Shapes([value(node) for node in reads], value(segment.result))
        return ModuleUnit(segment.name, names, segment.result.name, named, held, graph, shapes)

    def _graph(
        self, segment: _Segment, needed: Sequence[fx.Node], given: Sequence[fx.Node], reads: Sequence[fx.Node]
    ) -> OperationGraph:
        """What the operations of a segment do with what they are given."""
        made = fx.Graph()
        at = {node: made.placeholder(node.name) for node in given}
        for node in needed:
            if node not in at:
                at[node] = _size_from(made, node, reads, at) or made.node_copy(node, at.__getitem__)
        made.output(at[segment.result])
        number = {node: At(i) for i, node in enumerate(made.nodes)}
        return described(list(made.nodes), number, partial(_target, segment.name), self._program.graph_module)

    def _needed(self, segment: _Segment) -> list[fx.Node]:
        """The operations of a segment and what they read, operations without parameters before it included, in order;
        sizes are taken from tensors that are there anyway."""
        needed, waiting = set[fx.Node](), [segment.result]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                if not self._comes_from_elsewhere(node, segment) and not _is_size(node):
                    waiting += node.all_input_nodes
        reads = [node for node in needed if self._comes_from_elsewhere(node, segment)]
        known = [*self.inputs, *(s.result for s in self._segments.values() if s.results)]
        for node in [node for node in needed if _is_size(node) and _finds(node, reads) is None]:
            found = _finds(node, known)
            if found is None:
                raise ConfigError(f"{segment.name!r} needs a size that no tensor between units has: choose other units")
            needed.add(found[0])
            reads.append(found[0])
        return [node for node in self._program.graph.nodes if node in needed]

    def _comes_from_elsewhere(self, node: fx.Node, segment: _Segment) -> bool:
        """Whether a node is an input of the module, or a tensor that another segment gives."""
        return node in self.inputs or (_is_tensor(node) and self._of.get(node, segment) is not segment)

    def _key(self, node: fx.Node) -> str | None:
        """The unit of an operation: the outermost module around it that is one, or that has parameters itself."""
        path = _path(node)
        names = path.split(".") if path else []
        for i in range(1, len(names) + 1):
            at = ".".join(names[:i])
            if at in self.modules and (self._unit(at, self.modules[at]) or _owns(self.modules[at])):
                return at
        return self._outside(node)

    def _outside(self, node: fx.Node) -> str | None:
        """The layer of an operation outside of units that reads parameters, such as a product with the table of an
        embedding; operations on parameters alone, such as a part of a table of positions, are repeated by who reads
        them. The first to read a parameter of the whole module has its name."""
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

    def _is_read(self, node: fx.Node, segment: _Segment) -> bool:
        """Whether another segment, or the caller, reads it: also through operations that belong to none."""
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

    def _local(self, segment: str, node: fx.Node) -> str:
        """The name of a parameter in its unit: one that is shared has several names."""
        full = self._parameters[node]
        tensor = self.modules[""].get_parameter(full)
        names = [n for n, p in self.modules[""].named_parameters(remove_duplicate=False) if p is tensor]
        if segment in names:
            return ""  # the layer has the name of its parameter
        inside = next((n for n in (full, *names) if n.startswith(f"{segment}.") or not segment), None)
        if inside is None:
            self.borrowed[dotted(segment, full)] = names
            return full
        return inside[len(segment) + 1 :] if segment else inside


def _exported(module: torch.nn.Module, example: Sequence[Any], output: str | int | None) -> Any:
    """What PyTorch exports of the module in training, for any sizes of the inputs."""
    tensors = tuple(a if isinstance(a, torch.Tensor) else tensor_of(np.asarray(a)) for a in example)
    sizes = tuple(dict.fromkeys(range(t.ndim), torch.export.Dim.AUTO) for t in tensors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of what it does itself
            program = torch.export.export(_Chosen(module, output), tensors, dynamic_shapes=(sizes,), strict=False)
            program = program.run_decompositions({})  # in-place operations as those that give new tensors
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be cut: torch.export says {str(error).strip().splitlines()[0]}; without "
            "an example it is one layer"
        ) from error
    signature, modules = program.graph_signature, dict(module.named_modules())
    wrote = list(signature.user_inputs_to_mutate.values())
    for name in map(_stripped, signature.buffers_to_mutate.values()):
        if not isinstance(modules[name.rpartition(".")[0]], _BatchNorm):
            wrote.append(name)
    if wrote:
        raise ConfigError(
            f"{type(module).__name__}: forward writes into {', '.join(wrote)}: compute new tensors instead"
        )
    return program


class _Chosen(torch.nn.Module):
    """A module whose result is one tensor."""

    def __init__(self, module: torch.nn.Module, output: str | int | None) -> None:
        super().__init__()
        self.module, self.output = module, output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return chosen(self.module(*inputs), self.output, type(self.module).__name__)


def _chooser(units: Units | Sequence[str] | None, modules: Mapping[str, torch.nn.Module]) -> Units:
    if callable(units):
        return units
    if units is None:
        lists = [name for name, one in modules.items() if isinstance(one, torch.nn.ModuleList)]
        return lambda path, module: path.rpartition(".")[0] in lists
    patterns = patterns_of("units", units)
    inside = [(type(one).__name__, path) for path, one in modules.items() if path]
    demand_match("units", patterns, dict.fromkeys(name for names in inside for name in names), "module")
    return lambda path, module: any(_fits(pattern, path, module) for pattern in patterns)


def _fits(pattern: str, path: str, module: torch.nn.Module) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(type(module).__name__, pattern)


def shared(module: torch.nn.Module) -> dict[str, str]:
    """Other name -> first name of parameters that have several."""
    first: dict[int, str] = {}
    return {
        name: first[id(p)]
        for name, p in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }


def _stripped(name: str) -> str:
    return name.removeprefix(ROOT)


def _path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return _stripped(path) if path.startswith(ROOT) else ""


def _owns(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _finds(node: fx.Node, reads: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """A tensor among `reads`, and its dim, of the size that `node` gives."""
    wanted = str(node.meta["val"])
    for read in reads:
        for dim, size in enumerate(getattr(read.meta.get("val"), "shape", ())):
            if str(size) == wanted:
                return read, dim
    return None


def _size_from(
    graph: fx.Graph, node: fx.Node, reads: Sequence[fx.Node], at: Mapping[fx.Node, fx.Node]
) -> fx.Node | None:
    found = _finds(node, reads) if _is_size(node) else None
    return None if found is None else graph.call_function(torch.ops.aten.sym_size.int, (at[found[0]], found[1]))


def _target(unit: str, node: fx.Node) -> Any:
    """What runs in the place of an operation of a unit."""
    if node.target not in REPLACED and any(word in str(node.target) for word in ("batch_norm", "dropout")):
        raise ConfigError(f"{unit!r}: {node.target} is not known inside a unit; choose smaller units")
    return REPLACED.get(node.target, node.target)
