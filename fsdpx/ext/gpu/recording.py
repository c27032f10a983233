"""Data structures for recording a program (the actions of a training step) as CUDA graphs: the parts of units (groups
of layers), the calls that run these parts, and the graphs that replace these calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.program import Program
from fsdpx.core.state.units import Unit
from fsdpx.ext.gpu.capture import Capture, GraphMemory
from fsdpx.ext.gpu.cupy_devices import is_on_gpu
from fsdpx.nn.gradient_accumulation import Gradients

__all__ = ["Kept", "PartKey", "RecordedCall", "Recording", "UnitCall", "UnitPart"]

Arrays = dict[int, Any]
PartKey = tuple[int, int]
"""Index of a unit (group of layers), and index of a part within the unit."""


class Kept(list[Any]):
    """Placeholder that a replayed forward pass returns instead of the values saved for the backward pass. The values
    themselves are in the memory of the CUDA graph.

    Attributes
    ----------
    source : the call that computed the values
    """

    def __init__(self, source: RecordedCall) -> None:
        super().__init__()
        self.source = source


@dataclass
class UnitCall:
    """One call of a function that runs the layers of a unit (group of layers), such as its forward pass.

    Attributes
    ----------
    function : the function to call; its only argument is `saved`
    unit : the unit whose layers run
    params, grads : parameters and gradients of each node of the unit
    values : ID of an activation -> array. Before the call, this holds the inputs; after the call, it also holds the
        outputs
    saved : values that an earlier call saved for this one, or None
    """

    function: Callable[[Any], Any]
    unit: Unit
    values: Arrays
    params: Sequence[Any] = ()
    grads: Sequence[Gradients] = ()
    saved: list[Any] | None = None

    @cached_property
    def flags(self) -> list[bytearray]:
        """The flags of all gradient buffers that the call uses. A flag states whether a gradient is blank, that is, not
        yet written."""
        entries = [entry for node in self.grads for entry in node.entries.values()]
        return list({id(entry.flags): entry.flags for entry in entries}.values())

    def copy_flags(self) -> list[bytes]:
        return [bytes(flags) for flags in self.flags]

    def restore_flags(self, contents: Sequence[bytes]) -> None:
        for flags, content in zip(self.flags, contents, strict=True):
            flags[:] = content

    def list_arrays(self) -> list[Any]:
        """Return the arrays of the parameters and gradients."""
        arrays = [array for node in self.params for array in node.values()]
        return arrays + [entry.array for node in self.grads for entry in node.entries.values()]


@dataclass
class RecordedCall:
    """A call of a unit's function that was recorded as a CUDA graph. A unit is a group of layers.

    Attributes
    ----------
    unit, params, grads : as in `UnitCall`
    addresses : addresses of the parameters and gradients
    inputs, outputs : ID of an activation -> array in the memory of the graphs
    blank, written : contents of `UnitCall.flags` before and after the call
    source : the recorded call that saved the values in `UnitCall.saved`, or None
    keeps : whether the call saves values for another call
    """

    capture: Capture
    unit: Unit
    params: Sequence[Any]
    grads: Sequence[Gradients]
    addresses: list[int]
    inputs: Arrays
    outputs: Arrays
    blank: list[bytes]
    written: list[bytes]
    source: RecordedCall | None
    keeps: bool

    def find_mismatch(self, call: UnitCall) -> str:
        """Return the reason why the graph cannot compute a call, or "" if it can."""
        if self.unit is not call.unit:
            return "an observer has replaced its layers"
        if self.source is not None and getattr(call.saved, "source", None) is not self.source:
            return "its forward pass was not replayed"
        is_same = _are_same(self.params, call.params) and _are_same(self.grads, call.grads)
        if not is_same and self.addresses != [array.data.ptr for array in call.list_arrays()]:
            return "its parameters or gradients have moved"
        if call.copy_flags() != self.blank:
            return "its gradients are added to others"
        if self.inputs.keys() != call.values.keys() or not all(
            _is_alike(array, call.values[number]) for number, array in self.inputs.items()
        ):
            return "its inputs have other shapes"
        return ""


class UnitPart(NamedTuple):
    """Consecutive nodes of a unit (group of layers) that are recorded together in one graph.

    Attributes
    ----------
    number : index of the part in the unit
    unit : a new unit that consists of only these nodes
    nodes : positions of these nodes within the whole unit
    """

    number: int
    unit: Unit
    nodes: slice

    @property
    def input_activation_numbers(self) -> set[int]:
        """IDs of the activations that the part reads but does not compute."""
        made: set[int] = set()
        needed: set[int] = set()
        for node in self.unit.nodes:
            needed |= {*node.inputs} - made
            made.update(node.outputs)
        return needed

    @property
    def activations(self) -> set[int]:
        """IDs of all activations that the part reads or computes."""
        return {v for node in self.unit.nodes for v in (*node.inputs, *node.outputs)}


def _split_unit(unit: Unit, lengths: Iterable[int]) -> list[UnitPart]:
    parts, first = [], 0
    for number, n in enumerate(lengths):
        nodes = slice(first, first + n)
        parts.append(UnitPart(number, replace(unit, nodes=unit.nodes[nodes], trains=unit.trains[nodes]), nodes))
        first += n
    return parts


@dataclass
class Recording:
    """The CUDA graphs of one program (list of actions of a training step) for batches of given shapes.

    If a unit (group of layers) cannot be recorded as a whole, it is recorded again node by node, to find the layers
    that prevent this. Adjacent nodes that can be recorded are then joined into one part.

    Attributes
    ----------
    program : the program, which is kept so that its id stays unique
    runs : number of complete runs so far
    seen : number of compute actions executed so far in the current run
    calls : (name of an action, index of a part) -> the recorded call of this part
    refusals : parts that cannot be recorded as graphs
    kept : id of a list of saved values -> (the list, the call that saved it); filled only during the recording run
    parts : index of a split unit -> its parts
    splitting : indices of units that still have to be split
    """

    program: Program
    memory: GraphMemory
    runs: int = 0
    seen: int = 0
    calls: dict[tuple[str, int], RecordedCall] = field(default_factory=dict)
    refusals: set[PartKey] = field(default_factory=set)
    kept: dict[int, tuple[list[Any], RecordedCall]] = field(default_factory=dict)
    parts: dict[int, list[UnitPart]] = field(default_factory=dict)
    splitting: set[int] = field(default_factory=set)

    def forget_graphs(self, runs: int) -> None:
        """Forget all graphs, and continue as if `runs` runs had been completed."""
        self.calls.clear()
        self.runs, self.memory = runs, GraphMemory()

    def split_unrecordable_units(self, units: Sequence[Unit]) -> bool:
        """Split each unit that could not be recorded as a whole into parts of one node each. For a unit that was
        already split, the last recording has shown which nodes can be recorded. In such a unit, join adjacent nodes
        that can be recorded into one part, and join adjacent nodes that cannot be recorded into another part. Return
        whether the parts of any unit have changed."""
        changed = bool(self.splitting)
        for index in self.parts:
            changed |= self._join_adjacent_parts_of_unit(units[index])
        for index in self.splitting:
            self.refusals.discard((index, 0))
            self.parts[index] = _split_unit(units[index], [1] * len(units[index].nodes))
        self.splitting.clear()
        return changed

    def _join_adjacent_parts_of_unit(self, unit: Unit) -> bool:
        """Join adjacent parts that can be recorded, and join adjacent parts that cannot. Return whether any parts were
        joined."""
        runs = groupby(self.parts[unit.index], lambda part: (unit.index, part.number) in self.refusals)
        found = [(refused, sum(len(part.unit.nodes) for part in parts)) for refused, parts in runs]
        if len(found) == len(self.parts[unit.index]):
            return False
        self.refusals = {key for key in self.refusals if key[0] != unit.index}
        self.refusals |= {(unit.index, n) for n, (refused, _) in enumerate(found) if refused}
        self.parts[unit.index] = _split_unit(unit, [length for _, length in found])
        return True


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _is_alike(one: Any, other: Any) -> bool:
    return is_on_gpu(other) and (one.shape, one.dtype) == (other.shape, other.dtype)
