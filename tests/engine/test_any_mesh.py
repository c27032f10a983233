"""Random meshes, schedules, placements and cuts: each trains to parity with one process or is refused by name."""

from typing import Any

import numpy as np
from amount import in_full
from hypothesis import given
from hypothesis import strategies as st
from meshes import reference, train

import fsdpx
from fsdpx import Mesh
from fsdpx.errors import FsdpxError
from fsdpx.testing import demand_close

SEQUENCES = (None, None, "parallel", "ulysses", "ring")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hybrid")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Any choice of axes on at most 8 ranks, whether it fits the model or not."""
    pipe = draw(st.integers(1, 5))
    tensor = draw(st.integers(1, max(8 // pipe, 1)).filter(lambda n: n <= 4))
    data = draw(st.integers(1, max(8 // (pipe * tensor), 1)))
    strategy = draw(st.sampled_from(STRATEGIES))
    widths = {"replica": data, "shard": 1} if strategy == "ddp" else {"replica": 1, "shard": data}
    if strategy == "hybrid":
        widths = {"replica": draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0])), "shard": None}
    case = draw(st.sampled_from(["wide", "gpt", "deep", "mlp", "graph", "untied"]))
    found = {
        "case": case,
        "mesh": Mesh(pipe=pipe, tensor=tensor, **widths).resolve(pipe * tensor * data),
        "strategy": strategy,
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "microbatches": draw(st.integers(1, 6)),
        "group_bytes": draw(st.sampled_from([0, 600, 1 << 20])),
        "recompute": draw(st.sampled_from([None, None, "all", 2, "attention", "8KiB"])),
        "ahead": draw(st.integers(0, 2)),
    }
    if tensor > 1:
        found["sequence"] = draw(st.sampled_from(SEQUENCES))
    return found


@in_full
def test_any_mesh_trains_to_parity_or_is_refused() -> None:
    """It would say nothing if nearly all were refused."""
    found: list[bool] = []

    @given(configurations(), st.integers(0, 9))
    def one(choice: dict[str, Any], delays: int) -> None:
        found.append(attempt(dict(choice), delays))

    one()
    assert sum(found) > len(found) / 3


def attempt(choice: dict[str, Any], delays: int = 0) -> bool:
    """Whether it trained; all ranks are refused with the same words."""
    case, mesh, strategy = choice.pop("case"), choice.pop("mesh"), choice.pop("strategy")
    losses, want, _ = reference(case)

    def run(comm: Any) -> Any:
        try:
            return train(comm, case, mesh, strategy, **choice)[:2]
        except FsdpxError as error:
            return f"{type(error).__name__}: {error}"

    found = fsdpx.spawn(run, mesh.size, delays=delays or None)
    if isinstance(found[0], str):
        assert all(isinstance(one, str) for one in found), found
        assert len(found[0]) > 30
        return False
    for got_losses, got in found:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
        demand_close(got, want, 1e-12)  # (case, mesh, strategy, choice)
    return True
