"""A module of PyTorch as it is described by torch.export, in a child process."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fsdpx.interop.replaced import RESHAPES, fuse

__all__ = [
    "PATIENCE", "TIMER", "At", "ModuleLayout", "ModuleUnit", "Operation", "OperationGraph", "Shapes", "apart",
    "described", "dumped", "loaded", "value",
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
TIMER = "fsdpx export"
"""The thread that says that an export takes long."""
QUIET = {"fsdpx watchdog", "fsdpx progress", TIMER}
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
