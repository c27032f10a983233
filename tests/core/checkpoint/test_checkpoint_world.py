"""Checkpoints under real MPI, at whatever number of ranks the tests are run with."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
from models import make
from savers import contents, steps

from fsdpx import Mesh, Trainer, nn, optim, spawn
from fsdpx.core.checkpoint import format as layout
from fsdpx.core.checkpoint import write
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture
def common(world: Communicator) -> Iterator[Path]:
    """A folder that all ranks see."""
    folder = Path(world.all_gather_object(tempfile.mkdtemp() if world.rank == 0 else "")[0])
    yield folder
    world.barrier().wait()
    if world.rank == 0:
        shutil.rmtree(folder)


AXES = ["ddp", "fsdp", "pipe", "tensor"]


@pytest.mark.parametrize("axis", AXES)
def test_files_loads_and_bits(world: Communicator, common: Path, axis: str) -> None:
    """Each axis is saved in the background over one backend and in the foreground over the other."""
    in_background = (AXES.index(axis) % 2 == 0) == (type(world).__name__ == "NodeCommunicator")
    if axis == "pipe" and world.size > 4:
        pytest.skip("the model has four layers")
    strategy = axis if axis in ("ddp", "fsdp") else "ddp"
    mesh = None if axis == strategy else Mesh(shard=1, **{axis: world.size})
    trainer = make(world, "wide", strategy, mesh=mesh, reproducible_chunks=8, check=True)
    steps(trainer, "wide", 0, 1)
    save(trainer, common / "a", in_background)
    values = trainer.parameters()
    steps(trainer, "wide", 1, 2)
    want = trainer.inspect.compute_fingerprint()
    trainer.load(common / "a")
    steps(trainer, "wide", 1, 2)
    assert trainer.inspect.compute_fingerprint() == want
    trainer.save(common / "b")
    trainer.close()
    if world.rank == 0:
        safetensors.numpy.save_file(values, common / "reference")
        assert (common / "a/model.safetensors").read_bytes() == (common / "reference").read_bytes()
        again = make(spawn(lambda comm: comm, 1)[0], "wide", reproducible_chunks=8)
        again.load(common / "b")
        again.save(common / "c")
        assert contents(common / "c") == contents(common / "b")


def save(trainer: Trainer, path: Path, in_background: bool) -> None:
    trainer.save(path, background=in_background)
    trainer.call_runner.wait_for_background_save()


def test_one_rank_without_room(world: Communicator, common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(world, "wide")
    trainer.save(common / "a")
    before = trainer.inspect.compute_fingerprint()
    steps(trainer, "wide", 0, 1)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    for in_background in (False, True):
        if world.rank == world.size - 1:
            monkeypatch.setattr(write, "write_at", full)
        with pytest.raises(CheckpointError, match=rf"save to {common}/a: .*No space left on device \(ENOSPC\)"):
            save(trainer, common / "a", in_background)
        monkeypatch.setattr(write, "write_at", layout.write_at)
    trainer.load(common / "a")
    assert trainer.inspect.compute_fingerprint() == before
    trainer.close()


def test_odd_paths_and_pipes_are_one_error_on_all_ranks(world: Communicator, common: Path) -> None:
    """Also where the last rank alone has them; nobody waits."""
    trainer = make(world, "wide")
    trainer.save(common / "a")
    before, last = trainer.inspect.compute_fingerprint(), world.rank == world.size - 1
    if world.rank == 0:
        (common / "a/model.safetensors").unlink()
        os.mkfifo(common / "a/model.safetensors")
    world.barrier().wait()
    for path in (common / "a", "/" if last else common / "b", 5 if last else common / "b", "a\0b"):
        for call in (trainer.load, trainer.load_parameters):
            with pytest.raises(CheckpointError) as caught:
                call(path)
            assert len(set(world.all_gather_object(str(caught.value)))) == 1
    with pytest.raises(CheckpointError, match=rf"^save: (rank {world.size - 1}: )?the path 5 is of type int"):
        trainer.save(5 if last else common / "b")  # type: ignore[arg-type]
    assert trainer.inspect.compute_fingerprint() == before
    trainer.close()


def test_weights_that_are_given_as_arrays(world: Communicator) -> None:
    trainer = make(world, "norms", "fsdp")
    values = {f"body.{name}": value + 1 for name, value in trainer.parameters().items()}
    values["body.1.num_batches_tracked"] = np.array(3)
    report = trainer.load_parameters(values, rename={"body.*": "*"})
    assert report.unused == ("body.1.num_batches_tracked",)
    for name, value in trainer.parameters().items():
        np.testing.assert_array_equal(value, values[f"body.{name}"])
    trainer.close()


def resident(peak: bool) -> int:
    """Bytes of this process that are in memory, now or at most since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) << 10


def forget_peak() -> None:
    """Also give back what is free: memory that is used again would not be seen."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        pytest.skip("this system does not count peaks anew")


def most(world: Communicator, body: Callable[[], object]) -> int:
    """The most bytes that a rank has beside what it had before, while all run `body`."""
    world.barrier().wait()
    forget_peak()
    before = resident(peak=False)
    body()
    return max(world.all_gather_object(resident(peak=True) - before))


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_no_rank_takes_more_than_a_few_blocks_beside_its_shard(world: Communicator, common: Path, strategy: str):
    """As the kernel counts. All state is 48 MiB, so that one rank that gathers, or one array too many, is seen."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(), comm=world, strategy=strategy)
    for row, array in trainer.inspect.engine.state.ledger.iterate_saved_rows():
        if row.key.kind == "slot":
            array[...] = 1  # memory nobody has written to is not there yet
    share = (48 << 20) // world.size
    few = 10 << 20
    assert most(world, lambda: trainer.save(common / "a")) < few
    assert most(world, lambda: trainer.load(common / "a")) < few
    assert most(world, lambda: save(trainer, common / "a", True)) < share + few
    assert most(world, lambda: np.ones(3 << 20)) > 2 * few  # such an array would have been seen
    trainer.close()
