"""What codecs keep is train state: the same bits on the same ranks, the same sum on any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few, in_full, pairs
from savers import ALL, build, everywhere, steps

import fsdpx
from fsdpx import Trainer
from fsdpx.checkpoint.pieces import Name, written
from fsdpx.comm import Communicator

OPTIONS: dict[str, Any] = {"precision": "float32", "codec": "int8"}


def owed(trainer: Trainer) -> dict[str, np.ndarray]:
    """Parameter -> what codecs of all ranks owe to it, in float64."""
    layout, mine = trainer.inspect.placement.layout, dict[str, np.ndarray]()
    for piece in written(trainer.inspect.engine.state):
        name = Name.parse(piece.name)
        assert name is not None
        if name.memory == "error":
            whole = mine.setdefault(layout.canonical(name.of), np.zeros(piece.spec.size))
            for block in piece.blocks(1 << 30):
                index = np.concatenate([np.arange(*run) for run in block.runs])
                whole[index] += block.array
    total: dict[str, np.ndarray] = {}
    for one in trainer.host.world.all_gather_object(mine):
        for parameter, array in one.items():
            total[parameter] = total.get(parameter, 0.0) + array
    return total


def run(comm: Communicator, mesh: str, first: int, last: int, path: Path, codec: Any) -> tuple[str, Any]:
    trainer = build(comm, mesh, **(OPTIONS | {"codec": codec}))
    if first:
        trainer.load(path)
    steps(trainer, "wide", first, last)
    trainer.save(path, background=last % 2 == 1)
    end = trainer.inspect.fingerprint(), {name: array.tobytes() for name, array in owed(trainer).items()}
    trainer.close()
    return end


STOPS = pairs(["hybrid 4", "zero1 2", "fsdp 3", "pipe 4", "tensor 3 shard 2"], ["int8", fsdpx.Int8(unbiased=True)])


@in_full
@pytest.mark.parametrize(("mesh", "codec"), few(STOPS, len(STOPS)))
def test_a_run_that_stops_goes_on_with_the_same_bits(mesh: str, codec: Any, tmp_path: Path) -> None:
    whole = everywhere(mesh, run, mesh, 0, 6, tmp_path / "whole", codec)
    everywhere(mesh, run, mesh, 0, 3, tmp_path / "a", codec)
    assert everywhere(mesh, run, mesh, 3, 6, tmp_path / "a", codec) == whole
    assert len({digest for digest, _ in whole}) == 1


MOVES = [
    ("hybrid 4", "fsdp 3"), ("fsdp 3", "ddp 2"), ("ddp 2", "fsdp 5"), ("fsdp 5", "one"), ("pipe 4", "hybrid 4"),
    ("tensor 3 shard 2", "zero1 2"), ("zero1 2", "3D"),
]  # fmt: skip


@in_full
@pytest.mark.parametrize(("first", "second"), few(MOVES, 3))
def test_on_other_ranks_all_that_is_owed_stays(first: str, second: str, tmp_path: Path) -> None:
    def begin(comm: Communicator) -> Any:
        trainer = build(comm, first, **OPTIONS)
        steps(trainer, "wide", 0, 2)
        trainer.save(tmp_path / "a")
        return owed(trainer)

    def go_on(comm: Communicator) -> Any:
        trainer = build(comm, second, **OPTIONS)
        trainer.load(tmp_path / "a")
        found = owed(trainer)
        steps(trainer, "wide", 2, 3)
        return found, owed(trainer)

    before = everywhere(first, begin)[0]
    after, later = everywhere(second, go_on)[0]
    assert before.keys() == after.keys()
    assert max(np.abs(array).max() for array in before.values()) > 1e-4
    for name, array in before.items():  # sums of up to 5 float32 numbers each, in another order
        np.testing.assert_allclose(after[name], array, rtol=0, atol=5 * np.finfo(np.float32).eps * np.abs(array).max())
        if ALL[second][0] == 1:  # alone, it is paid back with the next gradient
            assert not later[name].any()


@in_full
def test_codecs_may_change_between_two_runs(tmp_path: Path) -> None:
    """A file without what a codec keeps begins at zero; what no codec asks for is left."""

    def body(comm: Communicator) -> Any:
        found = []
        for codec in ("plain", "int8", "plain"):
            trainer = build(comm, "zero1 2", **(OPTIONS | {"codec": codec}))
            if found:
                trainer.load(tmp_path / "a")
            found.append((trainer.inspect.fingerprint(), owed(trainer)))
            steps(trainer, "wide", 0, 1)
            trainer.save(tmp_path / "a")
        return found[1][1], found[2][1]

    begins, left = everywhere("zero1 2", body)[0]
    assert begins
    assert not any(array.any() for array in begins.values())
    assert left == {}


@in_full
@pytest.mark.parametrize("codec", few(["int8", fsdpx.TopK(0.1, momentum=0.9, warmup=3, block=1024)], 2))
def test_with_chunks_training_goes_on_elsewhere_with_the_same_bits(codec: Any, tmp_path: Path) -> None:
    """Each chunk's memory goes to the rank that computes it now."""

    def body(comm: Communicator, mesh: str, first: int, last: int) -> str:
        trainer = build(comm, mesh, precision="float32", codec=codec, chunks=4)
        if first:
            trainer.load(tmp_path / "a")
        steps(trainer, "wide", first, last)
        trainer.save(tmp_path / "a")
        return trainer.inspect.fingerprint()

    whole = everywhere("one", body, "one", 0, 6)
    for mesh, first, last in (("zero1 2", 0, 2), ("fsdp 3", 2, 4), ("zero2 4", 4, 6)):
        found = everywhere(mesh, body, mesh, first, last)
    assert set(found) == set(whole)


@in_full
def test_what_chunks_owe_stays_when_there_are_none(tmp_path: Path) -> None:
    def begin(comm: Communicator, mesh: str, chunks: int | None) -> Any:
        trainer = build(comm, mesh, chunks=chunks, **OPTIONS)
        if chunks != 4:
            trainer.load(tmp_path / "a")
            return owed(trainer)
        steps(trainer, "wide", 0, 2)
        trainer.save(tmp_path / "a")
        return owed(trainer)

    before = everywhere("fsdp 3", begin, "fsdp 3", 4)[0]
    for mesh, chunks in (("ddp 2", None), ("zero1 2", 2)):
        after = everywhere(mesh, begin, mesh, chunks)[0]
        for name, array in before.items():
            np.testing.assert_allclose(after[name], array, rtol=0, atol=1e-7 * np.abs(array).max())
