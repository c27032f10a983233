"""Backward in two halves (I, then W later) is the same program in another order: same bits."""

import numpy as np
import pytest
from models import CASES, make, part

from fsdpx import spawn
from fsdpx.comm import Communicator
from fsdpx.engine.interpreter import Bound
from fsdpx.program import Action, Program, check


def split(program: Program) -> Program:
    """Every B as I, all W of a microbatch after its last I; reduces follow the W's."""
    actions: list[Action] = []
    late: list[Action] = []
    for a in program.actions:
        if a.op == "B":
            actions.append(Action("I", a.unit, a.mb))
            late.append(Action("W", a.unit, a.mb))
        elif a.op in ("REDUCE", "SETTLE", "JOIN"):
            late.append(a)
        elif a.op in ("MEAN", "LOAD", "NORM"):
            actions += [*late, a]
            late = []
        else:
            actions.append(a)
    return Program(
        program.kind, tuple(actions), program.stage, program.microbatches, program.begins, program.ends, program.results
    )


@pytest.mark.parametrize("case", ["mlp", "gpt", "graph"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_same_bits(case: str, strategy: str) -> None:
    def run(comm: Communicator, halves: bool) -> str:
        trainer = make(comm, case, strategy, microbatches=2)
        x, y = CASES[case].batch(np.random.default_rng(0), 6)
        mine = part(comm, 6)
        if halves:
            program = split(trainer.program)
            check(program)
            assert any(a.op == "W" for a in program.actions)
            trainer._programs[trainer._request("step", 2, trainer.engine.store)] = Bound(trainer.engine, program)
        trainer.step(x[mine], y[mine])
        return trainer.fingerprint()

    assert spawn(lambda comm: run(comm, True), 2) == spawn(lambda comm: run(comm, False), 2)
