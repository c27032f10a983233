"""Backward in two halves (I, then W later) is the same program in another order: same bits."""

from dataclasses import replace

import numpy as np
import pytest
from bits import Bits, bits
from models import CASES, make, part

from fsdpx import spawn
from fsdpx.comm import Communicator
from fsdpx.program import parse


@pytest.mark.parametrize("case", ["mlp", "gpt", "graph"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_same_bits(case: str, strategy: str) -> None:
    """Both microbatches' second halves come after both first halves."""

    def run(comm: Communicator, halves: bool) -> Bits:
        trainer = make(comm, case, strategy, microbatches=2, group_bytes=0)
        x, y = CASES[case].batch(np.random.default_rng(0), 6)
        mine = part(comm, 6)
        if halves:
            session = trainer._session
            request = session.request("step", 2)
            split = replace(request, order=parse("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1"))
            session._executables[request, frozenset()] = found = trainer.inspect.engine.prepare(split)
            assert any(a.op == "W" for a in found.program.actions)
        trainer.step(x[mine], y[mine])
        return bits(trainer)

    assert spawn(lambda comm: run(comm, True), 2) == spawn(lambda comm: run(comm, False), 2)
