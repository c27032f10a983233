"""Explains the memory peak of a step: which action it occurs in, what a rank holds for which layers at that moment, and
which options would lower the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np

from fsdpx.core.array.arena import BufferLifetime
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.messages import format_bytes, format_table, wrap_lines
from fsdpx.core.comm.mesh import AXES, Mesh
from fsdpx.core.engine.activations import HeapRecorder
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.operations import describe_action_target
from fsdpx.core.engine.temporary_memory_plan import find_buffer_lifetimes
from fsdpx.core.program import SCHEDULES, SLOTS, Slot
from fsdpx.core.state.ledger import LEDGER_KINDS
from fsdpx.core.state.sample_layout import Domain
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.trainer.out_of_memory import FITTING_SHARE, iterate_cheaper_options
from fsdpx.errors import FsdpxError
from fsdpx.ext.offload.choice import OffloadConfig

__all__ = [
    "ACTIVATION_BYTES_PER_GAP_BYTE", "Holding", "MemoryPeak", "OptionChange", "find_memory_peak",
    "format_mesh_arguments", "format_option_as_python", "format_option_changes", "format_options",
    "list_memory_lowering_changes",
]  # fmt: skip

ROW_MEANINGS = {
    "master": "that the optimizer updates", "full": "that layers compute with", "grad": "as backward adds them up",
    "part": "summed over ranks", "slot": "of each parameter", "memory": "of codecs", "trace": "of codecs",
    "statistic": "running statistics",
}  # fmt: skip
"""Text that is shown for each kind of row in the ledger (list) of persistent memory. A kind without a text here is
shown by its name.
"""
SLAB_MEANINGS = {"full": "gathered parameters", "grad": "gradients of whole pages"}
"""Texts shown for kinds of temporary buffers. All temporary buffers lie in a single memory block, the slab. The keys
are kinds of slots (named buffers of a program)."""
ACTIVATION_MEANINGS = {
    "saved": "kept for backward", "held": "kept to compute it once more", "kept": "kept for gradients of parameters",
    "dact": "gradients of values", "act": "values between units",
}  # fmt: skip
"""Texts shown for activations. The keys are kinds of slots (named buffers of a program). An array that is in slots of
several kinds is counted only once, for the kind that comes first in this dict."""
UNIT_SLOT_KINDS = ("saved", "held", "kept")
"""Kinds of slots (named buffers of a program) that are identified by the index of a unit (layers whose parameters are
gathered together). Slots of other kinds are identified by the index of a value."""
BATCH = "the batch"
ACTIVATION_BYTES_PER_GAP_BYTE = 16
"""At the memory peak, gaps in the heap are assumed to take one byte per this many bytes of activations. There are gaps
because heap memory is never returned to the system (see core/array/arena.py), and because activations are not moved.
For transformers on 1 to 4 ranks, the measured size of the gaps was 1/20 to 1/7 of the size of the activations."""
MAX_UNITS_SHOWN, MAX_UNITS_WIDTH = 4, 76
"""Maximum number of units in a table row, and their maximum width in characters."""


class Holding(NamedTuple):
    """Memory of one kind that a rank holds for one purpose.

    Attributes
    ----------
    kind : kind of memory, such as "parameters" or "activations"
    what : purpose of the memory, such as "kept for backward"
    nbytes : size of the memory in bytes
    units : for each FSDP unit (layers whose parameters are gathered together) that uses some of this memory, its name
        and the number of bytes
    """

    kind: str
    what: str
    nbytes: int
    units: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class MemoryPeak:
    """The moment of a step at which a rank holds the most memory, and what the rank holds at that moment.

    Parameters
    ----------
    action : the action of the program, such as "B8.0", the backward pass of unit 8 on microbatch 0
    about : the unit or value that the action works on, such as "unit 'blocks.7..head'"
    number, actions : position of the action in the program, counted from 1, and total number of actions
    holdings : everything that the rank holds at that moment
    """

    action: str
    about: str
    number: int
    actions: int
    holdings: tuple[Holding, ...]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held at the peak, by kind of memory."""
        found: dict[str, int] = {}
        for one in self.holdings:
            found[one.kind] = found.get(one.kind, 0) + one.nbytes
        return found

    @property
    def nbytes(self) -> int:
        """Total bytes held at the peak."""
        return sum(one.nbytes for one in self.holdings)

    def with_larger_batch(self, nbytes: int) -> MemoryPeak:
        """Return what the peak would be if the arrays of the batch were `nbytes` bytes larger."""
        found = [one._replace(nbytes=one.nbytes + nbytes * (one.what == BATCH)) for one in self.holdings]
        return replace(self, holdings=tuple(found))

    def __str__(self) -> str:
        head = f"the peak, {format_bytes(self.nbytes)}, is in {self.action} ({self.about}), "
        kinds = list(self.memory)
        rows = [("held then", "bytes", "by unit")]
        rows += [
            (f"{one.kind}: {one.what}", format_bytes(one.nbytes), _format_units(one.units))
            for one in sorted(self.holdings, key=lambda one: (kinds.index(one.kind), -one.nbytes))
        ]
        return f"{wrap_lines(f'{head}action {self.number} of {self.actions}')}\n{format_table(rows, text=True)}"

    def to_json(self) -> dict[str, Any]:
        """Return the peak as a dict that can be written as JSON."""
        held = [one._asdict() | {"units": dict(one.units)} for one in self.holdings]
        return {
            "bytes": self.nbytes, "action": self.action, "about": self.about, "number": self.number,
            "actions": self.actions, "kinds": self.memory, "held": held,
        }  # fmt: skip


def _format_units(units: Iterable[tuple[str, int]]) -> str:
    """Return the names and sizes of units as text, the largest first. Consecutive units of equal size are merged."""
    parts = []
    for nbytes, group in groupby(units, key=lambda unit: unit[1]):
        names = [name for name, _ in group]
        many = names[0] if len(names) == 1 else f"{len(names)} units, {names[0]} to {names[-1]},"
        parts.append((nbytes * len(names), f"{many} {format_bytes(nbytes)}" + " each" * (len(names) > 1)))
    most = [words for _, words in sorted(parts, key=lambda part: -part[0])]
    shown = next((n for n in range(MAX_UNITS_SHOWN, 0, -1) if len(", ".join(most[:n])) <= MAX_UNITS_WIDTH), 1)
    return ", ".join(most[:shown]) + ", ..." * (len(most) > shown)


def find_memory_peak(engine: Engine, watch: HeapRecorder) -> MemoryPeak:
    """Find the moment when the rank held the most memory during a shape-only step, and return what it held at that
    moment."""
    program, state = watch.program, engine.state
    assert program is not None
    action = program.actions[watch.action_at_peak]
    alive = [life for life in find_buffer_lifetimes(state, program) if life.start <= watch.action_at_peak <= life.stop]
    found = [
        *_iterate_persistent_memory_at_peak(state, watch.peak_heap_bytes - watch.peak_activation_bytes),
        *_iterate_buffers_at_peak(state, alive),
        *_iterate_activations_at_peak(state, watch),
    ]
    target, number = describe_action_target(engine.placement, action, program.kind), watch.action_at_peak + 1
    holdings = tuple(one for one in found if one.nbytes)
    return MemoryPeak(str(action), target, number, len(program.actions), holdings)


def _iterate_activations_at_peak(state: TrainState, watch: HeapRecorder) -> Iterator[Holding]:
    """Yield the activations that are alive at the peak, grouped by purpose, with the units that produced them."""
    units = state.placement.layout.units
    makers = {value: unit.index for unit in units for value in unit.outputs}
    known, batch = set(watch.batch), sum(watch.batch.values())
    found = [Holding("activations", BATCH, batch)]
    for kind, what in ACTIVATION_MEANINGS.items():
        owners = Counter[int]()
        for slot, held in watch.slots_at_peak.items():
            if slot.kind == kind:
                nbytes = sum(n for root, n in held.items() if root not in known)
                assert slot.at is not None
                owners[slot.at if kind in UNIT_SLOT_KINDS else makers.get(slot.at, 0)] += nbytes
                known |= held.keys()
        of_units = tuple((units[n].name, owners[n]) for n in sorted(owners) if owners[n])
        found.append(Holding("activations", what, sum(owners.values()), of_units))
    yield from found
    yield Holding(
        "activations", "what the action computes", watch.peak_activation_bytes - sum(one.nbytes for one in found)
    )


def _iterate_persistent_memory_at_peak(state: TrainState, parts: int) -> Iterator[Holding]:
    """Yield the memory that is kept from step to step, such as parameters and optimizer state, and also the gradients
    summed so far in the step. These sums take `parts` bytes at the peak."""
    found = Counter[tuple[str, str]]()
    for row in state.ledger:
        kind = LEDGER_KINDS[row.key.kind].memory
        if row.is_kept and not row.is_freed_by_update and row.inside is None and row.level != "map":
            what = f"{ROW_MEANINGS.get(row.key.kind, row.key.kind)}, {np.dtype(row.dtype).name}"
            found[kind, what] += row.nbytes // row.sharers
    found["gradients", f"{ROW_MEANINGS['part']} so far"] += parts
    yield from (Holding(kind, what, nbytes) for (kind, what), nbytes in found.items())


def _iterate_buffers_at_peak(state: TrainState, alive: Iterable[BufferLifetime]) -> Iterator[Holding]:
    """Yield the temporary buffers that are in use at the peak, grouped by purpose, and the unused part of the memory
    block (slab) that holds them."""
    units = state.placement.layout.units
    owners = {page: unit.name for unit in reversed(units) for page in unit.pages}
    found: dict[str, list[tuple[str, int]]] = {}
    for life in alive:
        slot = cast(Slot, life.name)
        assert slot.at is not None
        memory = SLOTS[slot.kind].memory
        name = units[slot.at].name if memory == "activations" else owners[slot.at]
        usual = "buffers of collectives" if memory == "scratch" else f"{memory} from disk"
        found.setdefault(SLAB_MEANINGS.get(slot.kind, usual), []).append((name, life.nbytes))
    held = [Holding("working set", what, sum(n for _, n in units), tuple(units)) for what, units in found.items()]
    yield from held
    yield Holding("working set", "free then", state.arena.slab_nbytes - sum(one.nbytes for one in held))


def format_mesh_arguments(mesh: Mesh) -> str:
    """Return the mesh widths that differ from the defaults as Python keyword arguments, such as "pipe=2, tensor=2"."""
    default = Mesh()
    return ", ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) != getattr(default, axis))


def format_option_as_python(value: Any) -> str:
    """Return the value of an option of `distribute` as a Python expression."""
    if isinstance(value, Domain):
        return type(value).__name__.lower()
    if isinstance(value, OffloadConfig):
        return f"fsdpx.OffloadConfig({value.folder!r}, {value.what if len(value.what) > 1 else value.what[0]!r})"
    return f"fsdpx.Mesh({format_mesh_arguments(value)})" if isinstance(value, Mesh) else repr(value)


def format_options(options: Mapping[str, Any]) -> str:
    """Return options of `distribute` as Python keyword arguments."""
    return ", ".join(f"{name}={format_option_as_python(value)}" for name, value in options.items())


class OptionChange(NamedTuple):
    """A change of options that lowers the memory peak.

    Attributes
    ----------
    options : the options of `distribute` that change, with their new values
    nbytes : the new peak in bytes
    seconds : the new step time; None if it is not known
    """

    options: dict[str, Any]
    nbytes: int
    seconds: float | None = None

    @property
    def python_text(self) -> str:
        """The changed options as Python keyword arguments."""
        return format_options(self.options)

    def to_json(self) -> dict[str, Any]:
        """Return the change as a dict that can be written as JSON."""
        return self._asdict() | {
            "options": {name: format_option_as_python(value) for name, value in self.options.items()}
        }


PeakAndSeconds = tuple[int, float | None]
"""(Bytes of the peak, step time in seconds or None if it is not known)."""


def list_memory_lowering_changes(
    current: Mapping[str, Any], rows: int, predict_peak: Callable[[dict[str, Any]], PeakAndSeconds]
) -> list[OptionChange]:
    """Try changing one option at a time, and return the changes that lower the memory peak, sorted by the new peak.

    `current` contains the options to start from, and `rows` is the number of samples per rank. `predict_peak` takes
    the changed options and returns the memory peak in bytes and the step time."""
    least, found = predict_peak({})[0], []
    for options in _iterate_option_changes(current, rows):
        try:
            one = OptionChange(options, *predict_peak(options))
        except FsdpxError:  # this change is not possible with this model and number of ranks
            continue
        if one.nbytes < FITTING_SHARE * least:
            found.append(one)
    return sorted(found, key=lambda one: one.nbytes)


def _iterate_option_changes(current: Mapping[str, Any], rows: int) -> Iterator[dict[str, Any]]:
    """Yield changes of the options `current` that may lower the peak. `rows` is the number of samples per rank. Each
    change is a dict of one option, or of several options that make sense only together."""
    mesh, names = current.get("mesh"), set[str]()
    for name, value in iterate_cheaper_options(current, rows):
        # try only the next larger number of microbatches, which is twice the current one
        if name != "microbatches" or name not in names:
            cut = {} if mesh is None or name != "strategy" else {"mesh": replace(mesh, replica=1, shard=None)}
            yield {name: value, **cut}
        names.add(name)
    if current.get("recompute") is None:
        yield {"recompute": "attention"}
    chosen = current.get("schedule")
    if isinstance(chosen, str) and chosen in SCHEDULES and not SCHEDULES[chosen].frugal:
        yield {"schedule": "1f1b"}
    yield from ({name: 0} for name in ("group_bytes", "prefetch") if current.get(name) != 0)
    if current.get("offload") is None:
        yield from ({"offload": OffloadConfig("/local/disk", what)} for what in ("optimizer", "activations"))


def format_option_changes(changes: Sequence[OptionChange], seconds: float | None = None) -> str:
    """Return a table of the changes. New step times are compared to `seconds`, the current step time. If `seconds` is
    None, the column of times is left out."""
    if not changes:
        return "no other single choice lowers it by more than 1 %"
    rows = [("lowered to", *(["step"] if seconds is not None else []), "by this alone")]
    for one in changes:
        step = "not known" if seconds is None or one.seconds is None else f"{one.seconds / seconds - 1:+.1%}"
        rows.append((format_bytes(one.nbytes), *([step] if seconds is not None else []), one.python_text))
    return format_table(rows, text=True)
