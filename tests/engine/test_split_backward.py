"""Backward in two halves (I, then W later) is the same program in another order: same bits."""

from dataclasses import replace

import numpy as np
import pytest
from models import CASES, make, part

from fsdpx import spawn
from fsdpx.comm import Communicator
from fsdpx.engine.interpreter import Bound
from fsdpx.program import parse


@pytest.mark.parametrize("case", ["mlp", "gpt", "graph"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_same_bits(case: str, strategy: str) -> None:
    """Both microbatches' second halves come after both first halves."""

    def run(comm: Communicator, halves: bool) -> str:
        trainer = make(comm, case, strategy, microbatches=2)
        x, y = CASES[case].batch(np.random.default_rng(0), 6)
        mine = part(comm, 6)
        if halves:
            request = trainer._request("step", 2, trainer.engine.store)
            bound = Bound(trainer.engine, replace(request, order=parse("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1")))
            assert any(a.op == "W" for a in bound.program.actions)
            trainer._programs[request] = bound
        trainer.step(x[mine], y[mine])
        return trainer.fingerprint()

    assert spawn(lambda comm: run(comm, True), 2) == spawn(lambda comm: run(comm, False), 2)
