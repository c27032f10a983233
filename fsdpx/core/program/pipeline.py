"""The model as a program sees it, divided into stages on pipeline ranks, with messages between stages.

Units (groups of layers), pages (flat parameter buffers) and values (activations) are identified by integer IDs. This
module also resolves the words in the table of verbs, such as "full:pages", to slots (named buffers)."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import compress, count, groupby, pairwise
from typing import TypeVar

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.program.verbs import VERBS, Action, Slot

__all__ = [
    "ActionSlots",
    "Edge",
    "Stage",
    "StageUnit",
    "convert_rows_to_stage_units",
    "find_values_without_gradient",
    "get_buffer_slots_of_action",
    "list_slots_of_verb_table_word",
    "make_stages",
]

V = TypeVar("V", bound=Hashable)
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A unit (group of layers), as (pages, values that it reads, values that it computes)."""


@dataclass(frozen=True)
class StageUnit:
    """A unit (group of layers) in a program.

    Attributes
    ----------
    pages : pages (flat parameter buffers) that the unit uses, in the order in which its layers first use them
    takes : input values that this unit frees, because no later unit reads them
    reads : all other input values
    gives : output values that other units read
    """

    pages: tuple[int, ...]
    takes: tuple[int, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        return self.takes + self.reads


@dataclass(frozen=True)
class Edge:
    """A message between pipeline ranks: either a value that one stage sends to a later stage, or the gradient of this
    value, which is sent in the opposite direction.

    Attributes
    ----------
    number : index in `Stage.edges`
    value : ID (an integer) of the value
    source, target : sending and receiving stage
    sender, receiver : pipeline ranks of the sending and the receiving stage
    gradient : whether the gradient of the value is sent
    """

    number: int
    value: int
    source: int
    target: int
    sender: int
    receiver: int
    gradient: bool


@dataclass(frozen=True)
class Stage:
    """The part of the model that one pipeline rank runs. Without a pipeline, this is the full model.

    Units (groups of layers), pages (flat parameter buffers) and values (activations) are identified by integer IDs.

    Attributes
    ----------
    units : units of the full model, in execution order; `takes` and `reads` are meaningful only for the units of this
        rank
    trainable : for each page, whether it is trained
    inputs, outputs : IDs (integers) of the values that enter the model and of those that leave it
    own_stages : this rank's stages as (stage index, units) pairs
    edges : all messages between pipeline ranks
    twins : groups of pages that hold the same (tied) parameter for units of different stages
    partial : pages whose gradients must be summed over tensor-parallel ranks, because each rank computes only a partial
        sum
    needs_join : whether gradients must still be summed over replicas (by the action JOIN) after the reduce-scatter
    rank : index of this pipeline rank
    has_loss : whether this rank computes the loss
    units_with_statistics : units with running statistics
    pages_with_codec_memory : pages whose gradient codec keeps arrays between steps
    constant : values whose gradient is not needed (see `find_values_without_gradient`); may include values inside units
    stored_slots : pairs (slot, substitute) of slots (named buffers), for all ranks. Between programs, the value of
        `slot` is offloaded to slower memory, and `substitute` holds a placeholder for it. For activations, a pair
        stands for all microbatches, so its slots have no microbatch index
    """

    units: tuple[StageUnit, ...]
    trainable: tuple[bool, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    own_stages: tuple[tuple[int, tuple[int, ...]], ...]
    edges: tuple[Edge, ...] = ()
    twins: tuple[tuple[int, ...], ...] = ()
    partial: frozenset[int] = frozenset()
    needs_join: bool = True
    rank: int = 0
    has_loss: bool = True
    units_with_statistics: frozenset[int] = frozenset()
    pages_with_codec_memory: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    stored_slots: tuple[tuple[Slot, Slot], ...] = ()

    @classmethod
    def single_stage_from_units(
        cls,
        units: Iterable[Row],
        trainable: Iterable[bool],
        inputs: Iterable[int],
        outputs: Iterable[int],
        units_with_statistics: Iterable[int] = (),
        pages_with_codec_memory: Iterable[int] = (),
    ) -> Stage:
        """Build the single stage of a model that runs without a pipeline. `units` holds one tuple (pages, values read,
        values computed) for each unit (group of layers), in execution order."""
        rows, trainable, inputs, outputs = list(units), tuple(trainable), tuple(inputs), tuple(outputs)
        here = range(len(rows))
        value_readers, parts = convert_rows_to_stage_units(rows, here, outputs), ((0, tuple(here)),)
        constant = find_values_without_gradient(rows, set(compress(count(), trainable)), inputs)
        known = (value_readers, trainable, inputs, outputs, parts)
        return cls(
            *known,
            units_with_statistics=frozenset(units_with_statistics),
            pages_with_codec_memory=frozenset(pages_with_codec_memory),
            constant=constant,
        )

    @cached_property
    def own_units(self) -> tuple[int, ...]:
        """IDs (integers) of the units (groups of layers) that this rank runs, in execution order."""
        return tuple(sorted(u for _, units in self.own_stages for u in units))

    @cached_property
    def pages(self) -> tuple[int, ...]:
        """IDs (integers) of the pages (flat parameter buffers) that this rank uses, in ascending order."""
        return tuple(sorted({p for u in self.own_units for p in self.units[u].pages}))

    @cached_property
    def trained_pages(self) -> tuple[int, ...]:
        return tuple(p for p in self.pages if self.trainable[p])

    @cached_property
    def page_groups_with_summed_gradients(self) -> dict[int, tuple[int, ...]]:
        """Groups of pages (flat parameter buffers) whose gradients are summed with gradients of other pages or ranks,
        because their parameters are tied or their gradients are partial. The dict maps the first page of each group to
        the group's pages on this rank."""
        groups = {group[0]: tuple(p for p in group if p in self.trained_pages) for group in self.twins}
        alone = self.partial - {p for group in self.twins for p in group}
        groups |= {p: (p,) for p in alone if p in self.trained_pages}
        return {first: groups[first] for first in sorted(groups) if groups[first]}

    @cached_property
    def tied_pages(self) -> frozenset[int]:
        return frozenset(p for pages in self.page_groups_with_summed_gradients.values() for p in pages)

    @property
    def total_slot_kind(self) -> str:
        """Kind of the slot (named buffer) that holds a gradient once it has been summed over all ranks."""
        return "total" if self.needs_join else "part"

    @cached_property
    def units_with_backward(self) -> frozenset[int]:
        """IDs (integers) of the units (groups of layers) that run a backward pass. Such a unit has trainable
        parameters, or an input that depends on trainable parameters."""
        units = enumerate(self.units)
        return frozenset(
            u for u, unit in units if self.is_unit_trainable(u) or not self.constant.issuperset(unit.inputs)
        )

    def is_unit_trainable(self, unit: int) -> bool:
        return any(self.trainable[p] for p in self.units[unit].pages)

    def get_unit_op_for_stage_op(self, op: str, unit: int) -> str | None:
        """Return the operation that a unit (group of layers) runs when its stage runs `op` (F, E, B, I or W), or None
        if it runs nothing.

        Units before the first trainable one have no backward pass. If a unit's inputs are constant or its parameters
        are frozen, one half of its backward pass (I or W) is empty, and the other half runs as B."""
        if op in "FE":
            return op
        if unit not in self.units_with_backward:
            return None
        if op == "B":
            return op
        if self.constant.issuperset(self.units[unit].inputs):
            return "B" if op == "W" else None
        if not self.is_unit_trainable(unit):
            return "B" if op == "I" else None
        return op

    @cached_property
    def used_inputs(self) -> tuple[int, ...]:
        """IDs (integers) of the model inputs that are read on this rank, by a unit (group of layers) or by the loss."""
        return tuple(v for v in self.inputs if v in self._values_read)

    @cached_property
    def _values_read(self) -> frozenset[int]:
        read = {v for u in self.own_units for v in self.units[u].inputs}
        return frozenset(read | (set(self.outputs) if self.has_loss else set()))

    def edge_of(self, action: Action) -> Edge:
        """Return the message that a send or receive action transfers."""
        return self.edges[_require_unit_number(action)]

    def get_message_tag(self, edge: Edge, mb: int, microbatches: int) -> int:
        """Return a message tag that is unique between two ranks within a program, so that messages may be received in
        any order."""
        pair = (edge.sender, edge.receiver)
        before = sum((e.sender, e.receiver) == pair for e in self.edges[: edge.number])
        return before * microbatches + mb

    def can_drop_after_send(self, edge: Edge) -> bool:
        """Return True if this rank can free a value after sending it, because nothing on the rank reads it later."""
        return edge.gradient or edge.value not in self._values_read


def find_values_without_gradient(
    rows: Iterable[tuple[Iterable[Hashable], Iterable[V], Iterable[V]]],
    trained: Container[Hashable],
    data: Iterable[V],
) -> frozenset[V]:
    """Return the values whose gradient is not needed: `data`, and everything that is computed only from these values
    and frozen parameters.

    Parameters
    ----------
    rows : (parameters or pages, values read, values computed) of each unit (group of layers), in execution order
    trained : parameters or pages that are trained
    data : values without a gradient, such as model inputs
    """
    constant_values = set(data)
    for used, read, given in rows:
        if constant_values.issuperset(read) and not any(one in trained for one in used):
            constant_values.update(given)
    return frozenset(constant_values)


def convert_rows_to_stage_units(
    rows: Sequence[Row], here: Iterable[int], outputs: Sequence[int]
) -> tuple[StageUnit, ...]:
    """Convert rows (pages, values read, values computed) to units (groups of layers). Each unit records which of its
    input values no later unit reads.

    The last of the units `here` that reads a value frees the value (`takes`). All other readers leave it in place
    (`reads`). Values in `outputs` are freed by the loss instead."""
    own_units = set(here)
    last = {v: k for k, (_, read, _) in enumerate(rows) if k in own_units for v in read} | dict.fromkeys(
        outputs, len(rows)
    )
    reader_lists = []
    for k, (pages, read, given) in enumerate(rows):
        takes = tuple(v for v in read if k in own_units and last[v] == k)
        reader_lists.append(StageUnit(pages, takes, tuple(v for v in read if v not in takes), given))
    return tuple(reader_lists)


@dataclass(frozen=True)
class ActionSlots:
    """The slots (named buffers) that one action uses, in the order of the table `VERBS`."""

    takes: tuple[Slot, ...]
    reads: tuple[Slot, ...]
    adds: tuple[Slot, ...]
    gives: tuple[Slot, ...]


def get_buffer_slots_of_action(action: Action, stage: Stage, microbatches: int) -> ActionSlots:
    """Return the slots (named buffers) that an action takes, reads, adds to and gives."""
    verb = VERBS[action.op]
    columns = (verb.takes, verb.reads, verb.adds, verb.gives)
    return ActionSlots(
        *(
            tuple(s for w in words for s in list_slots_of_verb_table_word(w, action, stage, microbatches))
            for words in columns
        )
    )


def list_slots_of_verb_table_word(word: str, action: Action, stage: Stage, microbatches: int) -> list[Slot]:
    """Return the slots (named buffers) to which a word in the table `VERBS` refers for the given action. For example,
    "full:pages" refers to all pages (flat parameter buffers) of a unit (group of layers)."""
    kind, _, over = word.partition(":")
    if kind in SPECIAL_WORDS:
        return SPECIAL_WORDS[kind](over, action, stage)
    return [Slot(kind, at, mb) for at, mb in INDEX_RANGES[over](action, stage, microbatches)]


def _resolve_final_gradients(over: str, action: Action, stage: Stage) -> list[Slot]:
    pages = stage.trained_pages if over == "all" else (_require_unit_number(action),)
    return [Slot("tied" if p in stage.tied_pages else stage.total_slot_kind, p) for p in pages]


def _resolve_total_gradients(over: str, action: Action, stage: Stage) -> list[Slot]:
    return [Slot(stage.total_slot_kind, at, mb) for at, mb in INDEX_RANGES[over](action, stage, 1)]


def _resolve_edge_value(over: str, action: Action, stage: Stage) -> list[Slot]:
    edge = stage.edge_of(action)
    last = stage.can_drop_after_send(edge)
    wanted = {"arrives": True, "last": last, "kept": not last}[over]
    return [Slot("dact" if edge.gradient else "act", edge.value, action.mb)] if wanted else []


SPECIAL_WORDS: dict[str, Callable[[str, Action, Stage], list[Slot]]] = {
    "edge": _resolve_edge_value,
    "final": _resolve_final_gradients,
    "whole": _resolve_total_gradients,
}
"""Functions for special words in the table of verbs, such as "edge:last". The text before the colon of such a word is a
key of this dict and not a kind of slot. A function takes the text after the colon, the action and the stage, and
returns the slots (named buffers). Extensions add words."""


def _require_unit_number(action: Action) -> int:
    assert action.unit is not None
    return action.unit


def _pair_with_microbatch(numbers: Iterable[int | None], mb: int | None = None) -> list[tuple[int | None, int | None]]:
    return [(n, mb) for n in numbers]


INDEX_RANGES: dict[str, Callable[[Action, Stage, int], list[tuple[int | None, int | None]]]] = {
    "": lambda a, s, n: [(None, None)],
    "scored": lambda a, s, n: [(None, None)] if s.has_loss else [],
    "mb": lambda a, s, n: [(None, a.mb)],
    "all": lambda a, s, n: [(None, mb) for mb in range(n)] if s.has_loss else [],
    "page": lambda a, s, n: [(a.unit, None)],
    "here": lambda a, s, n: [(a.unit, a.mb)],
    "coded": lambda a, s, n: _pair_with_microbatch({a.unit} & s.pages_with_codec_memory),
    "twins": lambda a, s, n: _pair_with_microbatch(
        s.page_groups_with_summed_gradients.get(_require_unit_number(a), ())
    ),
    "unit": lambda a, s, n: [(a.unit, a.mb)],
    "back": lambda a, s, n: [(a.unit, a.mb)] if a.unit in s.units_with_backward else [],
    "moving": lambda a, s, n: _pair_with_microbatch({a.unit} & s.units_with_statistics),
    "pages": lambda a, s, n: _pair_with_microbatch(s.units[_require_unit_number(a)].pages),
    "trained": lambda a, s, n: _pair_with_microbatch(
        p for p in s.units[_require_unit_number(a)].pages if s.trainable[p]
    ),
    "every": lambda a, s, n: _pair_with_microbatch(s.trained_pages),
    "inputs": lambda a, s, n: _pair_with_microbatch(s.used_inputs, a.mb),
    "outputs": lambda a, s, n: _pair_with_microbatch(s.outputs, a.mb),
    "made": lambda a, s, n: _pair_with_microbatch((v for v in s.outputs if v not in s.constant), a.mb),
    "last": lambda a, s, n: _pair_with_microbatch(s.units[_require_unit_number(a)].takes, a.mb),
    "kept": lambda a, s, n: _pair_with_microbatch(s.units[_require_unit_number(a)].reads, a.mb),
    "out": lambda a, s, n: _pair_with_microbatch(s.units[_require_unit_number(a)].gives, a.mb),
    "found": lambda a, s, n: _pair_with_microbatch(
        (v for v in s.units[_require_unit_number(a)].gives if v not in s.constant), a.mb
    ),
    "in": lambda a, s, n: _pair_with_microbatch(
        (v for v in s.units[_require_unit_number(a)].inputs if v not in s.constant), a.mb
    ),
}
"""Functions that select slots, keyed by the text after the colon in a word of the table `VERBS`, such as "pages" in
"full:pages". Each function takes an action `a`, a stage `s` and the number of microbatches `n`, and returns a pair (at,
mb) for each selected slot. Extensions add entries."""


def make_stages(
    units: Sequence[Row],
    trainable: Sequence[bool],
    inputs: Sequence[int],
    outputs: Sequence[int],
    stages: Sequence[int],
    home: Sequence[int],
    twins: tuple[tuple[int, ...], ...] = (),
    partial: Iterable[int] = (),
    needs_join: bool = True,
    units_with_statistics: Iterable[int] = (),
    pages_with_codec_memory: Iterable[int] = (),
    constant: frozenset[int] | None = None,
    stored_slots: tuple[tuple[Slot, Slot], ...] = (),
) -> tuple[Stage, ...]:
    """Divide a model into stages and return the `Stage` object of each pipeline rank.

    The loss is computed in the last stage, and every rank has the model inputs. Parameters that are not listed below
    are described in `Stage`, as attributes of the same name.

    Parameters
    ----------
    units : (pages, values read, values computed) of each unit, in execution order
    trainable : for each page, whether it is trained
    inputs, outputs : IDs (integers) of the values that enter the model and of those that leave it
    stages : for each unit, the index of its stage; the indices are in ascending order
    home : pipeline rank of each stage
    constant : values whose gradient is not needed; if None, they are derived from the units
    """
    if constant is None:
        constant = find_values_without_gradient(units, set(compress(count(), trainable)), inputs)
    trained, read, given = tuple(trainable), tuple(inputs), tuple(outputs)
    edges = _make_messages_between_ranks(units, inputs, outputs, stages, home)
    partly, moves, keeps = (frozenset(some) for some in (partial, units_with_statistics, pages_with_codec_memory))
    cut = [(stage, tuple(u for u, of in enumerate(stages) if of == stage)) for stage in range(len(home))]
    seen = []
    for rank in range(max(home) + 1):
        parts = tuple(part for part in cut if home[part[0]] == rank)
        here, scores = [u for _, part in parts for u in part], home[-1] == rank
        value_readers = convert_rows_to_stage_units(units, here, outputs if scores else ())
        shared = edges, twins, partly, needs_join, rank, scores, moves, keeps, constant, stored_slots
        seen.append(Stage(value_readers, trained, read, given, parts, *shared))
    return tuple(seen)


def _make_messages_between_ranks(
    units: Sequence[Row], inputs: Sequence[int], outputs: Sequence[int], stages: Sequence[int], home: Sequence[int]
) -> tuple[Edge, ...]:
    """Return all messages between pipeline ranks.

    A value is sent from the stage that computes it to the first stage that reads it, from there to the next stage that
    reads it, and so on. No rank receives it twice. The gradient of the value is sent back along the same stages. Each
    stage adds its own contribution to the gradient that it receives from the later stages, so that contributions are
    added in the same order as in a single process."""
    edges: list[Edge] = []
    if len(set(home)) == 1:  # if all stages are on one rank, there are no messages
        return ()

    def add_edge(value: int, source: int, target: int, gradient: bool) -> None:
        edges.append(Edge(len(edges), value, source, target, home[source], home[target], gradient))

    for value in sorted({v for _, _, given in units for v in given} - set(inputs)):
        chain = _list_stages_computing_or_reading_value(value, units, outputs, stages, len(home) - 1)
        first = [stage for i, stage in enumerate(chain) if home[stage] not in {home[s] for s in chain[:i]}]
        for source, target in pairwise(first):
            add_edge(value, source, target, gradient=False)
        for source, target in pairwise(reversed(chain)):
            if home[source] != home[target]:
                add_edge(value, source, target, gradient=True)
    return tuple(edges)


def _list_stages_computing_or_reading_value(
    value: int, units: Sequence[Row], outputs: Sequence[int], stages: Sequence[int], last: int
) -> list[int]:
    """Return the indices of the stages that compute or read a value, in ascending order. `last` is the index of the
    last stage, which reads the model's outputs."""
    there = [stages[u] for u, (_, read, given) in enumerate(units) if value in read or value in given]
    there += [last] if value in outputs else []
    return [stage for stage, _ in groupby(sorted(there))]
