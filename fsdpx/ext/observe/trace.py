"""Tracing of training: writes the timeline of the last steps to one file per rank."""

from __future__ import annotations

import platform
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from fsdpx.core.base.config import TraceConfig
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.base.safe_files import write_file as write_file
from fsdpx.core.checkpoint.atomic_commit import run_on_all_ranks
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.program import simulate_programs
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.ext.observe.chrome import TraceGroups, TraceHeader, get_trace_file_name, write_trace
from fsdpx.ext.observe.measure import make_action_times, measure_clock_offset
from fsdpx.ext.observe.recording import ProgramRecord, TimelineRecorder

__all__ = ["TraceWriter"]


class TraceWriter(Observer):
    """Records the timeline of an engine and writes it to trace files. The constructor is collective: it creates the
    folder and compares the clocks of all ranks."""

    def __init__(self, engine: Engine, trace: TraceConfig) -> None:
        self.folder, self._state, self._axes = expanduser(trace.folder), engine.state, engine.placement.axes
        self._run_on_all_ranks(self._make_and_test_writable_folder)
        self._begun = measure_clock_offset(self._axes.uncounted_world)
        self._recording = TimelineRecorder(trace.steps)
        engine.add_observer(self._recording)
        engine.add_observer(self)
        if self._axes.world.rank == 0:
            weakref.finalize(self, _warn_if_trace_is_never_written, self._recording, self.folder)

    def write_files(self) -> None:
        """Write the recorded steps of each rank to its own trace file. Raises ConfigError on all ranks if any rank
        cannot write its file. Collective."""
        records = list(self._recording.records)
        header = self._all_gather_times_and_make_header(records)
        after = list(self._recording.after)
        self._run_on_all_ranks(
            lambda: write_trace(self.folder, header, records, TraceGroups.from_axes(self._axes), after)
        )
        self._recording.written = True

    def _make_and_test_writable_folder(self) -> None:
        """Make the trace folder and test that it is writable, so that errors appear before training rather than after
        it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = self.folder / get_trace_file_name(self._axes.world.rank)
        write_file(mine, b"")
        mine.unlink()

    def _run_on_all_ranks(self, do: Callable[[], object]) -> None:
        try:
            run_on_all_ranks(self._axes.world, f"trace={str(self.folder)!r}", do)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def _all_gather_times_and_make_header(self, records: list[ProgramRecord]) -> TraceHeader:
        axes = self._axes
        clock = [self._begun, measure_clock_offset(axes.uncounted_world)]
        place, memory = axes.coordinates._asdict(), self._state.count_bytes_by_kind()
        header = TraceHeader(
            axes.world.rank,
            axes.world.size,
            str(axes.mesh),
            place,
            platform.node(),
            self._begun.at,
            clock,
            memory=memory,
        )
        shown = self._agree_on_representative_step(records)
        if shown is not None:
            line = [(one.action, one.ready, one.end) for one in shown.actions]
            everyone = axes.pipe.all_gather_value((line, shown.program))
            events = simulate_programs(
                [program for _, program in everyone], make_action_times([row for row, _ in everyone])
            )
            zero = shown.actions[0].begin
            header.shown = shown.number
            header.simulated = [(str(e.action), e.start, e.end) for e in events if e.rank == axes.pipe.rank]
            header.alive = [(one.end - zero, one.alive) for one in shown.actions]
        return header

    def _agree_on_representative_step(self, records: list[ProgramRecord]) -> ProgramRecord | None:
        """Return the step of median duration, whose timeline represents all other steps in reports. Collective.

        Only steps that all ranks have recorded completely are considered. Returns None if there is no such step, or if
        ranks train asynchronously."""
        own = {one.number: one.actions[-1].end - one.actions[0].begin for one in records if one.is_complete}
        everyone = self._axes.world.all_gather_value(own)
        common = sorted(set.intersection(*map(set, everyone)), key=lambda number: max(row[number] for row in everyone))
        if not common or self._state.placement.sync_policy.own_speed:
            return None
        return next(record for record in records if record.number == common[len(common) // 2])


def _warn_if_trace_is_never_written(recording: TimelineRecorder, folder: Path) -> None:
    """Print a warning if the trainer is garbage-collected or the process ends before the recorded steps are written.

    At that point it is too late to write them, because a trace file needs the clocks of all ranks."""
    if recording.records and not recording.written:
        print(
            f"fsdpx: the trace of {len(recording.records)} programs was not written to {folder}: call trainer.close() "
            "or trainer.inspect.save_trace() on all ranks before the script ends",
            file=sys.stderr, flush=True,
        )  # fmt: skip
