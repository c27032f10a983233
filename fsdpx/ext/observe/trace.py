"""A trace of training: events of real steps are kept, and written as one file per rank."""

from __future__ import annotations

import platform
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from fsdpx.core.base.config import Trace
from fsdpx.core.base.safe_files import home
from fsdpx.core.base.safe_files import write as write_file
from fsdpx.core.checkpoint.atomic_commit import together
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.program import simulate_programs
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.ext.observe.chrome import TraceHeader, TracePlace, name_of, write
from fsdpx.ext.observe.measure import machine_of, synchronise
from fsdpx.ext.observe.recording import Recording, Turn

__all__ = ["Tracer"]


class Tracer(Observer):
    """Keeps a trace of an engine from now on. Collective: the clocks of all ranks are read, and the folder is made."""

    def __init__(self, engine: Engine, trace: Trace) -> None:
        self.folder, self._state, self._axes = home(trace.folder), engine.state, engine.placement.axes
        self._together(self._make)
        self._begun = synchronise(self._axes.uncounted)
        self._recording = Recording(trace.steps)
        engine.observe(self._recording)
        engine.observe(self)
        if self._axes.world.rank == 0:
            weakref.finalize(self, _tell_if_lost, self._recording, self.folder)

    def write(self) -> None:
        """Write what was kept, each rank its own file. Collective; ConfigError on all ranks if one cannot."""
        turns = list(self._recording.turns)
        header = self._header(turns)
        after = list(self._recording.after)
        self._together(lambda: write(self.folder, header, turns, TracePlace.of(self._axes), after))
        self._recording.written = True

    def _make(self) -> None:
        """A folder that cannot be written is found before training, not after it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = self.folder / name_of(self._axes.world.rank)
        write_file(mine, b"")
        mine.unlink()

    def _together(self, do: Callable[[], object]) -> None:
        try:
            together(self._axes.world, f"trace={str(self.folder)!r}", do)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def _header(self, turns: list[Turn]) -> TraceHeader:
        axes = self._axes
        clock = [self._begun, synchronise(axes.uncounted)]
        place, memory = axes.coordinates._asdict(), self._state.nbytes()
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
        shown = self._shown(turns)
        if shown is not None:
            line = [(one.action, one.ready, one.end) for one in shown.acted]
            everyone = axes.pipe.all_gather_plain((line, shown.program))
            events = simulate_programs([program for _, program in everyone], machine_of([row for row, _ in everyone]))
            zero = shown.acted[0].begin
            header.shown = shown.number
            header.simulated = [(str(e.action), e.start, e.end) for e in events if e.rank == axes.pipe.rank]
            header.alive = [(one.end - zero, one.alive) for one in shown.acted]
        return header

    def _shown(self, turns: list[Turn]) -> Turn | None:
        """The step that stands for all: of those that all ranks have whole, that of the median time. Collective."""
        own = {turn.number: turn.acted[-1].end - turn.acted[0].begin for turn in turns if turn.complete}
        everyone = self._axes.world.all_gather_plain(own)
        common = sorted(set.intersection(*map(set, everyone)), key=lambda number: max(row[number] for row in everyone))
        if not common or self._state.placement.pace.own_speed:
            return None
        return next(turn for turn in turns if turn.number == common[len(common) // 2])


def _tell_if_lost(recording: Recording, folder: Path) -> None:
    """Say that a trace is lost, when its trainer is dropped or the process ends: ranks that end cannot write it, since
    each needs the clocks of the others."""
    if recording.turns and not recording.written:
        print(
            f"fsdpx: the trace of {len(recording.turns)} programs was not written to {folder}: call trainer.close() "
            "or trainer.inspect.save_trace() on all ranks before the script ends",
            file=sys.stderr, flush=True,
        )  # fmt: skip
