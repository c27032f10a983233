"""The files: the bits of the reference library at any number of ranks, loaded at any other; which rank writes what."""

import json
import threading
import tracemalloc
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from amount import examples, few
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from models import make
from savers import ALL, CUT, MESHES, build, contents, everywhere, steps

from fsdpx import FakeCommunicator, Mesh, nn, optim, spawn
from fsdpx.core.checkpoint import write
from fsdpx.core.checkpoint.local_shards import iterate_shards_to_write
from fsdpx.core.checkpoint.write import Worker
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.testing import assert_close


def saved(comm: Communicator, name: str, path: Path, case: str = "wide", **options: Any) -> dict[str, np.ndarray]:
    trainer = build(comm, name, case, reproducible_chunks=None if case == "norms" else 8)
    steps(trainer, case, 0, 1)
    trainer.save(path, **options)
    return trainer.parameters()


@pytest.mark.parametrize(("name", "case"), few([*((n, "wide") for n in CUT), *((n, "norms") for n in MESHES)], 5))
def test_the_weights_are_the_file_that_safetensors_writes(name, case, tmp_path, monkeypatch):
    """norms: running statistics. wide: tied, and cut in ways that do not divide; test_every_mesh_has_one_file has the
    meshes without a tensor axis. Threads take part in the smallest."""
    write_in_threads(monkeypatch)
    values = everywhere(name, saved, name, tmp_path / "a", case)
    safetensors.numpy.save_file(values[0], tmp_path / "reference")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "reference").read_bytes()
    assert sorted(contents(tmp_path / "a")) == ["manifest.json", "model.safetensors", "state.safetensors"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a")] == ["a"]


def write_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "INLINE_WRITE_BYTES", 0)
    monkeypatch.setattr(write, "FLUSH_BYTES", 1000)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkpoint of one rank after a step, and how it goes on from there."""
    path = tmp_path_factory.mktemp("reference") / "a"

    def run(comm: Communicator) -> str:
        trainer = build(comm, "one", reproducible_chunks=8)
        steps(trainer, "wide", 0, 1)
        trainer.save(path)
        values = trainer.parameters()
        safetensors.numpy.save_file(values, path.parent / "weights")
        steps(trainer, "wide", 1, 2)
        return trainer.inspect.compute_fingerprint()

    (digest,) = everywhere("one", run)
    assert (path / "model.safetensors").read_bytes() == (path.parent / "weights").read_bytes()
    return path, digest


PLACES = MESHES | {
    "ddp 3": (3, None, "ddp"),
    "zero1 5": (5, None, "zero1"),
    "zero2 3": (3, None, "zero2"),
    "hybrid 8": (8, None, "hybrid"),
    "solid": (8, Mesh(replica=2, shard=2, pipe=2), "fsdp"),
    "deep": (8, Mesh(shard=2, pipe=4), "zero1"),
}


@pytest.mark.parametrize("name", few(PLACES, 6))
def test_every_mesh_has_one_file(name, reference, tmp_path, monkeypatch):
    """All write the same files, to the last byte, and all go on from them to the same bits, and save what they have
    loaded as it was: so does each from what any other has written."""
    ranks, mesh, strategy = PLACES[name]
    write_in_threads(monkeypatch)

    def run(comm: Communicator) -> str:
        trainer = make(comm, "wide", strategy, mesh=mesh, reproducible_chunks=8, group_bytes=600)
        steps(trainer, "wide", 0, 1)
        trainer.save(tmp_path / "a")
        trainer.close()
        trainer = make(comm, "wide", strategy, mesh=mesh, reproducible_chunks=8, group_bytes=5000, seed=9)
        trainer.load(reference[0])
        assert trainer.global_step == 1
        trainer.save(tmp_path / "b")
        steps(trainer, "wide", 1, 2)
        return trainer.inspect.compute_fingerprint()

    assert set(spawn(run, ranks)) == {reference[1]}
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(reference[0])


@pytest.mark.parametrize("source", few(["3D", "one"], 2))
def test_a_tensor_axis_loads_and_is_loaded(source: str, reference: tuple[Path, str], tmp_path: Path) -> None:
    """This covers the optimizer too: saving again gives identical files."""
    path = reference[0]
    if source == "3D":
        path = tmp_path / "a"
        everywhere(source, saved, source, path)

    def again(comm: Communicator, name: str) -> int:
        trainer = build(comm, name, seed=9, group_bytes=5000)
        trainer.load(path)
        trainer.save(tmp_path / name)
        return trainer.global_step

    for name in CUT if source == "one" else ["one", "fsdp 5", "pipe 4", "tensor 3 shard 2"]:
        assert everywhere(name, again, name) == [1] * ALL[name][0]
        assert contents(tmp_path / name) == contents(path)


@pytest.mark.parametrize(("optimizer", "slots"), [(optim.SGD(lr=0.1), []), (optim.Lion(lr=0.1), ["m"])])
def test_optimizers_have_what_they_have(optimizer: Any, slots: list[str], tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm, "mlp", optimizer=optimizer, frozen=["0.*"])
        trainer.save(tmp_path / "a")
        trainer.load(tmp_path / "a")

    spawn(run, 2)
    names = safetensors.numpy.load_file(tmp_path / "a/state.safetensors")
    assert sorted(names) == sorted(f"{s}/{n}" for s in slots for n in ("2.weight", "2.bias", "4.weight", "4.bias"))


FORMATS = {"bf16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def test_weights_in_another_format(tmp_path: Path) -> None:
    def save(comm: Communicator) -> Any:
        trainer = build(comm, "3D")
        for name in FORMATS:
            trainer.save(tmp_path / name, dtype=name)
        return trainer.parameters()

    values, files = everywhere("3D", save)[0], {}
    for name, dtype in FORMATS.items():
        found = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert {value.dtype for value in found.values()} == {np.dtype(dtype)}, name
        files[name] = {n: found[n].astype(np.float64) for n in values}
        assert_close(files[name], values, 2.0**-8)

    def load(comm: Communicator) -> None:
        trainer = build(comm, "fsdp 3", seed=9)
        for name, rounded in files.items():
            with pytest.raises(CheckpointError, match=r"is \w+ there and float64 in the trainer: say convert=True"):
                trainer.load(tmp_path / name)
            trainer.load(tmp_path / name, convert=True)
            assert_close(trainer.parameters(), rounded)

    everywhere("fsdp 3", load)


def test_precisions_change_by_convert_alone(tmp_path: Path) -> None:
    spawn(lambda comm: make(comm, "mlp", precision="float32").save(tmp_path / "a"), 2)

    def load(comm: Communicator, precision: str, convert: bool) -> str:
        trainer = make(comm, "mlp", precision=precision, seed=8)
        trainer.load(tmp_path / "a", convert=convert)
        return trainer.inspect.compute_fingerprint()

    same = {*spawn(load, 3, "float32", False), *spawn(load, 2, "bf16", False), *spawn(load, 2, "fp16", False)}
    assert len(same) == 1
    with pytest.raises(CheckpointError, match=r"0\.weight is float32 there and float64 in the trainer"):
        spawn(load, 2, "float64", False)
    spawn(load, 2, "float64", True)


def weights_of(comm: Communicator, name: str, path: Path, case: str = "wide") -> dict[str, np.ndarray]:
    """The parameters of another trainer that loads them."""
    trainer = build(comm, name, case, seed=9)
    trainer.load_parameters(path)
    return trainer.parameters()


def test_several_files_and_their_index(tmp_path: Path) -> None:
    values = everywhere("3D", lambda comm: saved(comm, "3D", tmp_path / "a", shard_bytes=10_000))[0]
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    for file in files:
        found = safetensors.numpy.load_file(tmp_path / "a" / file)
        assert len(found) == 1 or sum(value.nbytes for value in found.values()) <= 10_000
        assert {n for n, f in index["weight_map"].items() if f == file} == set(found)
        assert all((values[n] == found[n]).all() for n in found)
    assert_close(everywhere("fsdp 3", weights_of, "fsdp 3", tmp_path / "a")[0], values)
    (tmp_path / "a/manifest.json").unlink()
    (tmp_path / "a/state.safetensors").unlink()
    assert_close(everywhere("fsdp 3", weights_of, "fsdp 3", tmp_path / "a")[0], values)


@pytest.mark.parametrize("name", few(["fsdp 3", "one", "3D"], 3))
def test_weights_of_anybody_are_loaded(name: str, reference: tuple[Path, str], tmp_path: Path) -> None:
    """A tied parameter under either name, or both."""
    values = safetensors.numpy.load_file(reference[0].parent / "weights")
    variants = {tmp_path / f"{k}.safetensors": {n: v + k for n, v in values.items()} for k in range(3)}
    tied = ["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]
    for names, (path, wanted) in zip(tied, variants.items(), strict=True):
        rest = {n: v for n, v in wanted.items() if n != "embed.weight"}
        safetensors.numpy.save_file(rest | dict.fromkeys(names, wanted["embed.weight"]), path, {"format": "pt"})

    def load(comm: Communicator) -> None:
        trainer = build(comm, name, seed=9)
        for path, wanted in variants.items():
            trainer.load_parameters(path)
            found = trainer.parameters()
            assert found.keys() == wanted.keys(), path
            assert_close(found, {n: wanted[n] for n in found})

    everywhere(name, load)


def test_running_statistics_are_those_of_their_stage(tmp_path: Path) -> None:
    """One on each of two, in the file and in what the trainer gathers."""
    x = np.random.default_rng(0).standard_normal((4, 3)) + 1.0

    def run(comm: Communicator) -> dict[str, np.ndarray]:
        model = nn.Sequential(nn.BatchNorm(3), nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm(3))
        options: dict[str, Any] = {"mesh": Mesh(pipe=comm.size), "precision": "float64", "tune": False, "comm": comm}
        trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), microbatches=1, **options)
        trainer.step(x, x)
        trainer.save(tmp_path / str(comm.size))
        return trainer.parameters()

    (wanted,) = spawn(run, 1)
    assert {name for name in wanted if "running_mean" in name} == {"0.running_mean", "3.running_mean"}
    for gathered in spawn(run, 2):
        assert_close(gathered, wanted)
    written = safetensors.numpy.load_file(tmp_path / "2/model.safetensors")
    assert_close({name: written[name] for name in wanted}, wanted)


def test_running_statistics_may_be_missing(tmp_path: Path) -> None:
    values = everywhere("fsdp 3", saved, "fsdp 3", tmp_path / "a", "norms")[0]
    some = {name: value for name, value in values.items() if "running" not in name}
    safetensors.numpy.save_file(some, tmp_path / "some.safetensors")
    found = everywhere("ddp 2", weights_of, "ddp 2", tmp_path / "some.safetensors", "norms")[0]
    assert all((found[name] == values[name]).all() for name in some)
    assert (found["1.running_mean"] == 0).all()


def test_saving_and_loading_take_a_few_blocks_of_memory(tmp_path: Path) -> None:
    """80 MB of arrays; a tensor axis cuts columns, so that runs are short."""

    plan = {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel}
    options = {"precision": "float64", "mesh": Mesh(shard=1, tensor=2), "tensor_plan": plan}

    def run(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(640, 2560), nn.GELU(), nn.Linear(2560, 640))
        trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(), comm=comm, **options)
        comm.barrier().wait()
        if comm.rank == 0:
            tracemalloc.start()
        comm.barrier().wait()
        before = tracemalloc.get_traced_memory()[0]
        trainer.save(tmp_path / "a", dtype="float32")
        comm.barrier().wait()
        trainer.load(tmp_path / "a", convert=True)
        comm.barrier().wait()
        assert tracemalloc.get_traced_memory()[1] - before < 2 * 24 << 20  # of both thread ranks
        trainer.close()

    try:
        spawn(run, 2)
    finally:
        tracemalloc.stop()


ANY_MESH = st.builds(
    Mesh, replica=st.integers(1, 2), shard=st.integers(1, 3), pipe=st.integers(1, 2), tensor=st.integers(1, 3)
)


@settings(max_examples=examples(20), phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking takes minutes
@given(
    mesh=ANY_MESH,
    reproducible_chunks=st.sampled_from([None, 12]),
    group_bytes=st.sampled_from([0, 600, 1 << 20]),
    elements=st.sampled_from([1, 7, 1000]),
    sequence=st.sampled_from([None, None, "parallel", "ulysses"]),
)
def test_every_element_is_written_once(mesh, reproducible_chunks, group_bytes, elements, sequence):
    options = {"reproducible_chunks": reproducible_chunks, "group_bytes": group_bytes, "mesh": mesh, "device": "shape"}
    options |= {"sequence": sequence} if sequence and mesh.tensor > 1 else {}
    try:
        trainers = [make(FakeCommunicator(rank, mesh.size), "wide", **options) for rank in range(mesh.size)]
        ranks = [trainer.inspect.engine.state for trainer in trainers]
    except ConfigError:  # heads that this way of cutting sequences does not divide
        reject()
    written = defaultdict(list)
    for piece in chain.from_iterable(map(iterate_shards_to_write, ranks)):
        for block in piece.iterate_blocks(elements):
            assert sum(stop - start for start, stop in block.runs) == block.array.size
            written[piece.name] += block.runs
    specs = ranks[0].placement.layout.specs
    assert set(written) == {f"{slot}{name}" for slot in ("", "m/", "v/") for name in specs}
    for name, runs in written.items():
        starts, stops = zip(*sorted(runs), strict=True)
        assert (0, *stops) == (*starts, specs[name.rpartition("/")[2]].size), name


def test_tasks_run_beside_their_owner_in_order() -> None:
    done: list[int] = []
    go = threading.Event()
    with Worker("test") as hand:
        assert hand.is_free
        hand.begin_task(go.wait)
        assert not hand.is_free
        go.set()
        for n in range(3):
            hand.begin_task(lambda n=n: done.append(n))
        hand.wait_for_task_end()
        assert hand.is_free
        assert done == [0, 1, 2]
        hand.wait_for_task_end()  # nothing to wait for
        hand.begin_task(lambda: done.append(3))
    assert done == [0, 1, 2, 3], "leaving waits for the task"


@pytest.mark.parametrize("by", ["begin", "end"])
def test_errors_come_out_once_at_the_next_call(by: str) -> None:
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    with Worker("test") as hand:
        hand.begin_task(fail)
        with pytest.raises(OSError, match="No space left on device"):
            hand.begin_task(fail) if by == "begin" else hand.wait_for_task_end()
        assert hand.is_free
        hand.wait_for_task_end()
