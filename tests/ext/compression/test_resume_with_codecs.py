"""What codecs owe is saved, and goes on at other meshes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few, pairs
from savers import build, everywhere, steps

import fsdpx
from fsdpx import Trainer
from fsdpx.core.checkpoint.local_shards import CodecMemoryName, iterate_codec_memory_to_write
from fsdpx.core.comm import Communicator

OPTIONS: dict[str, Any] = {"precision": "float32", "compression": "int8"}


def owed(trainer: Trainer) -> dict[str, np.ndarray]:
    """Parameter -> what codecs of all ranks owe to it, in float64."""
    layout, mine = trainer.inspect.placement.layout, dict[str, np.ndarray]()
    for piece in iterate_codec_memory_to_write(trainer.inspect.engine.state):
        name = CodecMemoryName.parse(piece.name)
        assert name is not None
        if name.memory == "error":
            whole = mine.setdefault(layout.canonical_name(name.tensor), np.zeros(piece.spec.size))
            for block in piece.iterate_blocks(1 << 30):
                index = np.concatenate([np.arange(*run) for run in block.runs])
                whole[index] += block.array
    total: dict[str, np.ndarray] = {}
    for one in trainer.call_runner.world.all_gather_object(mine):
        for parameter, array in one.items():
            total[parameter] = total.get(parameter, 0.0) + array
    return total


def run_with_codec(comm: Communicator, mesh: str, path: Path, codec: Any) -> tuple[str, Any]:
    """A second step after a first one that is saved, or loaded if it has been saved."""
    trainer = build(comm, mesh, **(OPTIONS | {"compression": codec}))
    if path.exists():
        trainer.load(path)
    else:
        steps(trainer, "wide", 0, 1)
        trainer.save(path, background=True)
    steps(trainer, "wide", 1, 2)
    end = trainer.inspect.compute_fingerprint(), {name: array.tobytes() for name, array in owed(trainer).items()}
    trainer.close()
    return end


STOPS = pairs(["hybrid 4", "zero1 2", "fsdp 3", "pipe 4", "tensor 3 shard 2"], ["int8", fsdpx.Int8(unbiased=True)])


@pytest.mark.parametrize(("mesh", "codec"), few(STOPS, len(STOPS)))
def test_a_run_that_stops_goes_on_with_the_same_bits(mesh: str, codec: Any, tmp_path: Path) -> None:
    whole = everywhere(mesh, run_with_codec, mesh, tmp_path / "a", codec)
    assert everywhere(mesh, run_with_codec, mesh, tmp_path / "a", codec) == whole
    assert len({digest for digest, _ in whole}) == 1


MOVES = [
    ("hybrid 4", "fsdp 3"), ("fsdp 3", "ddp 2"), ("ddp 2", "fsdp 5"), ("fsdp 5", "one"),
    ("pipe 4", "hybrid 4"), ("tensor 3 shard 2", "zero1 2"), ("zero1 2", "3D"),
]  # fmt: skip
"""From where to where."""


@pytest.mark.parametrize(("first", "second"), few(MOVES, 2))
def test_on_other_ranks_all_that_is_owed_stays(first: str, second: str, tmp_path: Path) -> None:
    def begin(comm: Communicator) -> Any:
        trainer = build(comm, first, **OPTIONS)
        steps(trainer, "wide", 0, 1)
        trainer.save(tmp_path / "a")
        return owed(trainer)

    def go_on(comm: Communicator) -> Any:
        trainer = build(comm, second, **OPTIONS)
        trainer.load(tmp_path / "a")
        found = owed(trainer)
        if comm.size == 1:
            steps(trainer, "wide", 1, 2)
        return found, owed(trainer)

    before = everywhere(first, begin)[0]
    after, later = everywhere(second, go_on)[0]
    assert before.keys() == after.keys()
    assert max(np.abs(array).max() for array in before.values()) > 1e-4
    for name, array in before.items():  # sums of up to 5 float32 numbers each, in another order
        np.testing.assert_allclose(after[name], array, rtol=0, atol=5 * np.finfo(np.float32).eps * np.abs(array).max())
        if second == "one":  # alone, it is paid back with the next gradient
            assert not later[name].any()


def test_codecs_may_change_between_two_runs(tmp_path: Path) -> None:
    """A file without what a codec keeps begins at zero; what no codec asks for is left."""

    def body(comm: Communicator) -> Any:
        found = []
        for codec in ("plain", "int8", "plain"):
            trainer = build(comm, "zero1 2", **(OPTIONS | {"compression": codec}))
            if found:
                trainer.load(tmp_path / "a")
            found.append((trainer.inspect.compute_fingerprint(), owed(trainer)))
            steps(trainer, "wide", 0, 1)
            trainer.save(tmp_path / "a")
        return found[1][1], found[2][1]

    begins, left = everywhere("zero1 2", body)[0]
    assert begins
    assert not any(array.any() for array in begins.values())
    assert left == {}
