"""Recording of every tensor that is written in the first steps of a run, so that `fsdpx diff` can compare two runs.

Each value is stored with the position of its elements in the full tensor, so that runs on different numbers of ranks
can be compared. The recorder is an observer of the engine; steps that are not recorded have no overhead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.base import safe_files
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.checkpoint.local_shards import LocalShard
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.operations import describe_action_target
from fsdpx.core.engine.run import GradientScale, LossMean
from fsdpx.core.program import PROGRAM_KINDS, VERBS, Action, Program, Slot
from fsdpx.core.state.flat_parameters import ElementRange
from fsdpx.core.state.gradients import has_same_address
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import ParameterSpec

__all__ = ["RankRecord", "ValueRecorder", "WrittenTensor", "read_records"]

KIND_NAMES = {
    "shard": "parameter", "full": "gathered parameter", "slots": "state of the optimizer",
    "grad": "gradient of this rank's samples", "sum": "gradient summed over shards",
    "part": "gradient summed so far", "total": "gradient summed over all ranks", "tied": "gradient of all its uses",
    "outer": "outer parameter", "delta": "change of a round", "next": "outer parameter",
    "act": "activation", "dact": "gradient of the activation", "mean": "loss", "scale": "scale of the update",
}  # fmt: skip
"""Kind of slot (named place for a value) that is recorded -> its name for users."""
FULL_KINDS = frozenset({"shard", "full", "slots", "total", "tied", "act", "dact", "mean", "scale"})
"""Kinds of slots (named places for values) whose values do not depend on how the batch is split over ranks. Slots of
other kinds are compared only between runs with the same split."""
WAITING_KINDS = ("shard", "replica")
"""Lanes (mesh axes) on which the recorder waits for each transfer as soon as the transfer has started. This cannot
deadlock, because all ranks of such a lane run the same actions in the same order."""


class WrittenTensor(NamedTuple):
    """The elements of one tensor that an action wrote on one rank.

    Parameters
    ----------
    at : position of the action in the program of its rank
    action, about : the action as text, such as "REDUCE3", and its unit or page (flat parameter buffer) as text
    kind : kind of value, a key of `KIND_NAMES`
    tensor : name of the tensor
    is_split_independent : whether the values are the same, up to rounding, for any split of the batch over ranks
    shape : shape of the full tensor; for activations, the shape for the global batch
    runs : ranges [start, stop) of elements of the full tensor, in C order
    values : the elements of all ranges, concatenated
    """

    at: int
    action: str
    about: str
    kind: str
    tensor: str
    is_split_independent: bool
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    values: np.ndarray


@dataclass
class RankRecord:
    """The tensors that one rank wrote in the recorded steps.

    Attributes
    ----------
    rank, ranks : this rank, and the number of ranks
    cut : the mesh, and how the batch is split, as text
    programs : the program (list of actions) of each recorded step, as text
    steps : the tensors written in each recorded step
    """

    rank: int
    ranks: int
    cut: str
    programs: list[str] = field(default_factory=list)
    steps: list[list[WrittenTensor]] = field(default_factory=list)

    def write_last_step(self, folder: Path) -> None:
        """Write the last recorded step to a file of its own: one line of JSON, then the bytes of all values."""
        rows = self.steps[-1]
        index = [[*row[:-1], str(row.values.dtype), row.values.size] for row in rows]
        head = {"rank": self.rank, "ranks": self.ranks, "cut": self.cut, "program": self.programs[-1], "written": index}
        body = b"".join(row.values.tobytes() for row in rows)
        name = f"values-{self.rank:05}-{len(self.steps) - 1:05}"
        safe_files.write_file(folder / name, json.dumps(head).encode() + b"\n" + body)


class ValueRecorder(Observer):
    """Records the tensors that the next `steps` training programs write, and saves them to `folder` if one is given.

    Either all ranks of a trainer or none must have a `ValueRecorder`."""

    def __init__(self, engine: Engine, steps: int, folder: Path | None = None) -> None:
        self.engine, self.most, self.folder = engine, steps, folder
        axes = engine.placement.axes
        self.kept = RankRecord(axes.world.rank, axes.world.size, f"{axes.mesh}, {engine.placement.accumulation}")
        self._values = _SlotTensors(engine)
        self._program: Program | None = None
        self._at = 0
        self._later: dict[Slot, tuple[int, Action]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for before in folder.glob(f"values-{self.kept.rank:05}-*"):
                before.unlink()
        engine.add_observer(self)

    def on_action_done(self, action: Action) -> None:
        program = self.engine.last_program
        assert program is not None
        if program is not self._program or self._at == len(program.actions) or action != program.actions[self._at]:
            self._begin_program(program)
        if self._program is None:
            return
        store, slots, lane = self.engine.state.store, program.slots[self._at], VERBS[action.op].lane
        for slot in (*slots.gives, *slots.adds):
            value = store.get(slot)
            if isinstance(value, TimedTransfer):
                if lane not in WAITING_KINDS:
                    self._later[slot] = self._at, action
                    continue
                value = store[slot] = value.wait()
            self._record_computed_value(self._at, action, slot, value)
        for slot in [slot for slot in self._later if not isinstance(store.get(slot), TimedTransfer)]:
            at, before = self._later.pop(slot)
            self._record_computed_value(at, before, slot, store.get(slot))
        self._at += 1
        if self._at == len(program.actions) and self.folder is not None:
            self.kept.write_last_step(self.folder)

    def _begin_program(self, program: Program) -> None:
        """Start recording a program at its first action. If the previous program was interrupted, discard its values
        that were still being transferred."""
        trains = program.kind not in ("evaluate", "predict") and len(self.kept.steps) < self.most
        self._program, self._at = program if trains else None, 0
        self._later.clear()
        if trains:
            self.kept.steps.append([])
            self.kept.programs.append(f"{program.kind}: {program}")

    def _record_computed_value(self, at: int, action: Action, slot: Slot, value: Any) -> None:
        assert self._program is not None
        kind, place = slot.kind, self.engine.placement
        if kind not in KIND_NAMES or value is None:
            return
        if not self._program.stage.needs_join and self._is_complete_gradient(at, slot, value):
            kind = "total"
        whole = kind in FULL_KINDS and place.sync_policy.is_synchronous
        words = describe_action_target(place, action, self._program.kind)
        for tensor, shape, runs, array, known in self._values.iterate_elements_with_full_positions(slot, value, action):
            values = np.array(to_host(array)).reshape(-1)
            # float32 can represent every 16-bit float, so the recorded values are exact
            values = values.astype(np.float32) if values.dtype.itemsize < 4 else values
            row = WrittenTensor(at, str(action), words, kind, tensor, whole and known, shape, runs, values)
            self.kept.steps[-1].append(row)

    def _is_complete_gradient(self, at: int, slot: Slot, value: Any) -> bool:
        """Return whether a value is the final gradient of a page (flat parameter buffer). The program must have no
        replica axis.

        A value is the final gradient if it is the accumulated gradient after the page's last SETTLE (the wait for a
        reduction), or if it is the result of the page's only REDUCE and shares the memory of the accumulated
        gradient."""
        assert self._program is not None
        program = self._program
        later = [a.op for a in program.actions[at:] if a.unit == slot.at]
        if slot.kind == "part":
            return PROGRAM_KINDS[program.kind].updates and later.count("SETTLE") == (later[0] == "SETTLE")
        reduces = [a for a in program.actions if a.op == "REDUCE" and a.unit == slot.at]
        part = self.engine.state.store.get(Slot("part", slot.at))
        return slot.kind == "sum" and len(reduces) == 1 and program.kind == "step" and has_same_address(value, part)


Part = tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], Any, bool]
"""(tensor, shape, runs, values) as in `WrittenTensor`, followed by whether the position in the full tensor is known."""


class _SlotTensors:
    """Extracts the tensor elements from each value that an action writes, and finds their positions in the full
    tensors."""

    def __init__(self, engine: Engine) -> None:
        self.engine, layout = engine, engine.placement.layout
        outputs = {v: node.path for unit in layout.units for node in unit.nodes for v in node.outputs}
        self.names = {**{v: f"input {name}" for v, name in enumerate(layout.inputs)}, **outputs}

    def iterate_elements_with_full_positions(self, slot: Slot, value: Any, action: Action) -> Iterator[Part]:
        """Yield the elements of each tensor in the value of a slot (a named place for one value), with their positions
        in the full tensor."""
        place = self.engine.placement
        if slot.kind in ("mean", "scale"):
            yield from self._iterate_numbers(value)
        elif slot.kind in ("act", "dact"):
            yield from self._iterate_activation_with_sample_positions(slot, value)
        elif slot.kind == "full" and isinstance(value, dict):
            for f in place.layout.pages[slot.at or 0].fields:
                if hasattr(value.get(f.name), "reshape"):
                    yield from self._iterate_shard_blocks_of_parameter(f.source, f.source, 0, value[f.name].reshape(-1))
        elif slot.kind == "grad":
            if (flat := value.get_microbatch_buffer(action.mb or 0)) is not None:
                yield from self._iterate_parameters_in_span(
                    slot, flat, ElementRange(0, place.layout.pages[slot.at or 0].size)
                )
        elif slot.kind == "slots":
            for name, flat in value.items() if isinstance(value, dict) else ():
                yield from self._iterate_parameters_in_span(
                    slot, flat, place.pages[slot.at or 0].own_range, f" ({name})"
                )
        else:
            yield from self._iterate_parameters_in_span(slot, value, place.pages[slot.at or 0].own_range)

    def _iterate_numbers(self, value: Any) -> Iterator[Part]:
        if isinstance(value, LossMean):
            yield "mean of the global batch", (), ((0, 1),), np.float64(value.value), True
        if isinstance(value, GradientScale):
            yield "factor of all gradients", (), ((0, 1),), np.float64(value.factor), True

    def _iterate_activation_with_sample_positions(self, slot: Slot, value: Any) -> Iterator[Part]:
        """Yield an activation, with the positions of this rank's samples in the global batch."""
        place, batch = self.engine.placement, self.engine.batch
        own = batch[slot.mb or 0] if slot.mb is not None and slot.mb < len(batch) else None
        if own is None or not hasattr(value, "shape") or not value.size:
            return
        each, rows = value.size // value.shape[0], own.inputs[0].shape[0]
        known = place.axes.tensor.size == 1 and value.shape[0] == rows
        first = own.row * each if known else 0
        name = self.names.get(slot.at or 0, f"value {slot.at}")
        yield name, tuple(value.shape), ((first, first + value.size),), value, known

    def _iterate_parameters_in_span(self, slot: Slot, flat: Any, span: ElementRange, more: str = "") -> Iterator[Part]:
        """If `flat` holds the elements of a page (flat parameter buffer) in the range `span`, yield these elements
        parameter by parameter. If it holds other values, such as partial sums, yield nothing. `more` is appended to the
        names of the tensors."""
        page = self.engine.placement.layout.pages[slot.at or 0]
        if getattr(flat, "ndim", 0) == 1 and flat.size >= span.size:
            for f, start, part in page.iterate_fields_in_range(flat, span):
                yield from self._iterate_shard_blocks_of_parameter(f.source, f.source + more, start, part)

    def _iterate_shard_blocks_of_parameter(self, source: str, tensor: str, start: int, part: Any) -> Iterator[Part]:
        layout = self.engine.placement.layout
        spec: ParameterSpec = layout.specs[source]
        held = LocalShard(tensor, part, start, spec, layout.spread.rank, layout.spread.width)
        for block in held.iterate_blocks(max(int(part.size), 1)):
            yield tensor, spec.shape, block.runs, block.array, True


def read_records(folder: Path) -> list[RankRecord]:
    """Read the records of all ranks in a folder, in rank order. Raises ConfigError if the record of any rank is
    missing."""
    found: dict[int, RankRecord] = {}
    for path in sorted(folder.glob("values-*")):
        try:
            with safe_files.open_file(path, ours=False) as file:
                data = file.read()
            line = data.index(b"\n")
            head, at = safe_files.parse_json(data[:line]), line + 1
            record = found.setdefault(head["rank"], RankRecord(head["rank"], head["ranks"], head["cut"]))
            rows = []
            for position, action, words, kind, tensor, whole, shape, runs, dtype, count in head["written"]:
                values = np.frombuffer(data, np.dtype(dtype), count, at)
                at += values.nbytes
                places = tuple((int(first), int(last)) for first, last in runs)
                rows.append(WrittenTensor(position, action, words, kind, tensor, whole, tuple(shape), places, values))
            record.programs.append(head["program"])
            record.steps.append(rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: no record of values can be read there: {error!r}") from error
    if not found or set(found) != set(range(len(found))) or next(iter(found.values())).ranks != len(found):
        few = f"there are values of ranks {sorted(found)}, not of all; set FSDPX_RECORD for all"
        none = "nothing was recorded: no trainer made a step with FSDPX_RECORD set"
        raise ConfigError(f"{folder}: {few if found else none}")
    return [found[rank] for rank in sorted(found)]
