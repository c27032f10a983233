"""Who writes what: on any mesh, every element of every tensor is written once, and every rank reads all that it has."""

from collections import defaultdict
from typing import Any

import pytest
from amount import examples, in_full
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from models import KNOWN

from fsdpx import FakeCommunicator, Mesh, optim
from fsdpx.checkpoint.pieces import Held, held, owned
from fsdpx.errors import ConfigError
from fsdpx.state.state import TrainState


def states(case: str, mesh: Mesh, **options: Any) -> list[TrainState]:
    """Of all ranks, without data."""
    chosen = KNOWN[case]
    options = {"loss": chosen.loss, "optimizer": optim.AdamW(), "mesh": mesh, "device": "shape", **options}
    ranks = range(mesh.size)
    made = [chosen.model().as_distributed(comm=FakeCommunicator(r, mesh.size), **options) for r in ranks]
    return [trainer.inspect.engine.state for trainer in made]


def runs(pieces: list[Held], elements: int) -> dict[str, list[tuple[int, int]]]:
    found = defaultdict(list)
    for piece in pieces:
        for block in piece.blocks(elements):
            assert sum(stop - start for start, stop in block.runs) == block.array.size
            found[piece.name] += block.runs
    return found


MESHES = st.builds(
    Mesh, replica=st.integers(1, 2), shard=st.integers(1, 3), pipe=st.integers(1, 3), tensor=st.integers(1, 3)
)


@in_full
@settings(max_examples=examples(20))
@given(
    mesh=MESHES,
    chunks=st.sampled_from([None, 12]),
    group_bytes=st.sampled_from([0, 600, 1 << 20]),
    elements=st.sampled_from([1, 7, 1000]),
    sequence=st.sampled_from([None, None, "parallel", "ulysses"]),
)
def test_every_element_is_written_once(
    mesh: Mesh, chunks: int | None, group_bytes: int, elements: int, sequence: str | None
) -> None:
    options = {"sequence": sequence} if sequence and mesh.tensor > 1 else {}
    try:
        ranks = states("wide", mesh, chunks=chunks, group_bytes=group_bytes, **options)
    except ConfigError:  # heads that this way of cutting sequences does not divide
        reject()
    total = defaultdict(list)
    for state in ranks:
        for name, some in runs(list(owned(state)), elements).items():
            total[name] += some
    specs = ranks[0].placement.layout.specs
    assert set(total) == {f"{slot}{name}" for slot in ("", "m/", "v/") for name in specs}
    for name, some in total.items():
        at = 0
        for start, stop in sorted(some):
            assert start == at, name
            at = stop
        assert at == specs[name.rpartition("/")[2]].size


@pytest.mark.parametrize("mesh", [Mesh(shard=3), Mesh(shard=2, pipe=2), Mesh(replica=2, shard=1, pipe=2)], ids=str)
def test_running_statistics_are_written_by_one_and_read_by_all(mesh: Mesh) -> None:
    ranks = states("norms", mesh, group_bytes=600)
    for name in ("1.running_mean", "1.running_var"):
        assert sum(piece.name == name for state in ranks for piece in owned(state)) == 1
        assert all(sum(piece.name == name for piece in held(state)) == 1 for state in ranks)


def test_copies_of_a_tied_parameter_are_written_once_and_read_by_both_stages() -> None:
    first, last = states("wide", Mesh(shard=1, pipe=2))
    assert "embed.weight" in {piece.name for piece in owned(first)}
    assert "embed.weight" not in {piece.name for piece in owned(last)}
    assert "embed.weight" in {piece.name for piece in held(last)}
