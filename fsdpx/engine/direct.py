"""The layers of a model one after the other: what is left of a program that looks at few samples on one rank.

Such a call comes from inside a solver, thousands of times. Its program loads the input and evaluates units whose
parameters lie in the store; the same layers run here on the same arrays, without slots and records between them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from fsdpx.array import blas
from fsdpx.array.parallel import flushed
from fsdpx.engine import computing
from fsdpx.engine.engine import Engine
from fsdpx.engine.executable import Executable
from fsdpx.engine.run import number_of

__all__ = ["Direct"]

SMALL = 1 << 16
"""Bytes of a batch up to which it is worth it: here all values between layers stay until the end."""


class Direct:
    """engine: has just run `executable` on the array `x`, which it took as it is. A call with an array of that shape
    and dtype gives the outputs in order, or None where something has changed: then the program must run."""

    @classmethod
    def after(cls, engine: Engine, executable: Executable, x: Any) -> Direct | None:
        """None where the program does more, or what it does is recorded."""
        place, ops = engine.placement, {planned.action.op for planned in executable.steps}
        plain = type(x) is np.ndarray and x.nbytes <= SMALL and len(executable.program.stage.used) == 1
        if not plain or ops != {"LOAD", "E"} or place.axes.world.size > 1 or place.options.check_finite:
            return None
        return None if engine.state.scaler.dynamic else cls(engine, executable, x)

    def __init__(self, engine: Engine, executable: Executable, x: Any) -> None:
        place, state = engine.placement, engine.state
        self.engine, self.program = engine, executable.program
        self.shape, self.dtype = x.shape, x.dtype
        (self.input,), self.outputs = self.program.stage.used, self.program.stage.outputs
        self.valid = state.seed, state.arena.generation
        self.store: list[tuple[Any, Any]] = []  # slots that are read, and what must lie there
        self.units: list[tuple[Any, ...]] = []
        for planned in executable.steps:
            if planned.action.op == "E":
                u = number_of(planned.action)
                known = place.stage.units[u]
                pages = len(known.pages)
                slots = (*planned.reads[:pages], *planned.reads[pages + len(known.reads) :])
                held = [state.store[slot] for slot in slots]
                self.store += zip(slots, held, strict=True)
                self.units.append((place.layout.units[u], *engine.layers(u, held, (x,)), planned.words))

    def __call__(self, x: Any) -> tuple[Any, ...] | None:
        engine = self.engine
        state = engine.state
        if type(x) is not np.ndarray or x.shape != self.shape or x.dtype is not self.dtype:
            return None
        if self.valid != (state.seed, state.arena.generation) or engine.observed:
            return None
        for slot, held in self.store:
            if state.store.get(slot) is not held:
                return None
        if blas.threads() != engine.placement.product_threads:
            blas.threads(engine.placement.product_threads)
        state.moment.step, state.moment.row = state.steps, 0
        engine.ran = self.program
        begin, values = perf_counter(), {self.input: x}
        with flushed():
            for unit, envs, params, words in self.units:
                try:
                    computing.unit_forward(unit, envs, params, values, False)
                except Exception as error:
                    engine.failed(error, words)
                    raise
        engine.clock.ran("E", begin, begin, perf_counter())
        return tuple([values[v] for v in self.outputs])
