"""How far a reader follows a step: the files whose functions a steady step, one GATHER and `distribute` call."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.comm import Communicator

T = TypeVar("T")
ROOT = Path(fsdpx.__file__).parent
STEP, GATHER, DISTRIBUTE = 56, 12, 79
"""Upper bounds, which only fall."""


class Walk:
    """The files of fsdpx of which something is called; those within one action of each verb, too."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.verbs: dict[str, set[str]] = {}
        self._within: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        name = str(path.relative_to(ROOT))
        operation = name == "engine/operations.py" and frame.f_code.co_name == "gather"
        if event == "call":
            self._within += ["GATHER"] * operation
            self.files.add(name)
            for verb in self._within:
                self.verbs.setdefault(verb, set()).add(name)
        elif event == "return" and operation:
            self._within.pop()

    def of(self, do: Callable[[], T]) -> T:
        sys.setprofile(self)
        try:
            return do()
        finally:
            sys.setprofile(None)


def walked(comm: Communicator) -> tuple[Walk, Walk]:
    """A steady step, and `distribute` where kernels are compiled already."""
    model = nn.Chain(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    options: dict[str, Any] = {"loss": nn.CrossEntropy(), "optimizer": optim.AdamW(lr=1e-3), "group_bytes": 0}

    def made() -> fsdpx.Trainer:
        return fsdpx.distribute(model, comm=comm, **options)

    made()
    made_again, step = Walk(), Walk()
    trainer = made_again.of(made)
    x, y = np.ones((4, 64), np.float32), np.zeros(4, np.int64)
    for _ in range(3):
        trainer.step(x, y)
    step.of(lambda: trainer.step(x, y))
    return step, made_again


def test_a_step_and_distribute_are_short_walks() -> None:
    step, made = spawn(walked, 2)[0]
    assert len(step.files) <= STEP, sorted(step.files)
    assert 0 < len(step.verbs["GATHER"]) <= GATHER, sorted(step.verbs["GATHER"])
    assert len(made.files) <= DISTRIBUTE, sorted(made.files)
