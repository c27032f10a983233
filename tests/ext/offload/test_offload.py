"""State on disk: the same bits as in memory, few pages of it in memory at a time, and folders that cannot be used."""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from unittest.mock import Mock

import numpy as np
import pytest
from amount import few
from bits import bits
from commands import shown
from models import STRATEGIES
from threads import on_ranks

import fsdpx
from fsdpx import EMA, Mesh, OffloadConfig, nn, optim, spawn
from fsdpx.core.comm.init import open_world
from fsdpx.errors import ConfigError, OffloadError
from fsdpx.ext.offload import disk
from fsdpx.ext.offload.disk import extract_large_arrays

BOTH = ("optimizer", "parameters")
ALL = (*BOTH, "activations", "gradients")


@pytest.fixture(autouse=True)
def _small_activations(monkeypatch):
    """Those of these models are worth it, too."""
    monkeypatch.setattr(disk, "MIN_SPILLED_BYTES", 1)


def network():
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm(24), nn.ReLU(), nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 3))


OPTIONS = {"loss": nn.MSELoss(), "optimizer": optim.AdamW(lr=1e-2), "group_bytes": 0, "tune": False}


def make(comm, folder, what="optimizer", **options):
    offload = None if folder is None else OffloadConfig(folder, what)
    return network().as_distributed(comm=comm, offload=offload, **(OPTIONS | options))


def part(trainer, seed):
    rng, size = np.random.default_rng(seed), trainer.data_group.size
    x, y = rng.standard_normal((12, 6), np.float32), rng.standard_normal((12, 3), np.float32)
    mine = slice(12 * trainer.data_group.rank // size, 12 * (trainer.data_group.rank + 1) // size)
    return x[mine], y[mine]


def trained(comm, folder, what="optimizer", steps=2, **options):
    """Fingerprint and losses of a few steps of every kind."""
    with make(comm, folder, what, **options) as trainer:
        seen = [trainer.step(*part(trainer, seed)) for seed in range(steps)]
        seen.append(trainer.accumulate(*part(trainer, 7)))
        trainer.update()
        seen.append(trainer.evaluate(*part(trainer, 8)))
        if "average" in options:
            seen.append(trainer.evaluate(*part(trainer, 8), weights="average"))
        return bits(trainer), seen


def report_of_a_step(comm, folder, what="optimizer"):
    with make(comm, folder, what) as trainer:
        trainer.step(*part(trainer, 0))
        return trainer.report()


CASES = [
    *((size, ALL, {"strategy": strategy}) for size in (1, 3) for strategy in STRATEGIES),
    *((2, what, {"strategy": "fsdp"}) for what in ALL),
    (4, BOTH, {"strategy": "hybrid", "average": EMA(0.5), "clip_norm": 0.1}),
    (2, ALL, {"mesh": Mesh(pipe=2), "microbatches": 3, "schedule": "zb-h1"}),
    (2, ALL, {"strategy": "fsdp", "prefetch": 0, "precision": "bf16", "recompute": "all"}),
    (3, "optimizer", {"strategy": "zero2", "optimizer": optim.LAMB(lr=1e-2)}),
    (4, "gradients", {"strategy": "hybrid", "microbatches": 2, "clip_norm": 0.1}),
    (2, ALL, {"strategy": "fsdp", "prefetch": 3, "microbatches": 2, "optimizer": optim.Muon()}),
]


@pytest.mark.parametrize(("size", "what", "options"), few(CASES, 4), ids=str)
def test_the_same_bits_as_in_memory(size, what, options, tmp_path):
    there = spawn(lambda comm: trained(comm, tmp_path, what, **options), size)
    assert there == spawn(lambda comm: trained(comm, None, **options), size)


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_the_same_bits_as_in_memory_on_ranks_of_mpi(backend):
    with open_world(backend) as comm, tempfile.TemporaryDirectory() as own:
        there = trained(comm, comm.all_gather_object(own)[0], ALL, clip_norm=1.0)
        assert there == trained(comm, None, clip_norm=1.0)
        comm.barrier().wait()


def test_one_hash_at_any_number_of_ranks(tmp_path):
    def run(comm, offload):
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
        with model.as_distributed(comm=comm, offload=offload, reproducible_chunks=6, **OPTIONS) as trainer:
            trainer.step(*part(trainer, 0))
            return bits(trainer)

    seen = [spawn(run, size, OffloadConfig(tmp_path, ALL)) for size in (1, 2, 3)]
    assert {one for ranks in seen for one in ranks} == {spawn(run, 2, None)[0]}


@pytest.mark.parametrize("what", ["optimizer", BOTH], ids=str)
def test_checkpoints_go_there_and_back(what, tmp_path):
    """Saved from disk on 3 ranks, taken into memory on 2, saved there and taken to disk on 1: the same training."""

    def go_on(comm, folder, load, save):
        with make(comm, folder, what) as trainer:
            if load is not None:
                trainer.load(load)
            loss = trainer.step(*part(trainer, 0))
            if save is not None:
                trainer.save(save)
            return loss, bits(trainer)

    def chain(folder, place):
        place.mkdir()
        first = spawn(go_on, 3, folder, None, place / "a")
        second = spawn(go_on, 2, None, place / "a", place / "b")
        return [first[0], second[0], *spawn(go_on, 1, folder, place / "b", None)]

    assert chain(tmp_path, tmp_path / "with") == chain(None, tmp_path / "without")


def test_the_report_says_what_lies_where(tmp_path):
    """Bytes read and written are those predicted, memory that of the dry run, which needs no folder."""
    batch, what = (((6, 6), "float32"), ((6, 3), "float32")), (*BOTH, "gradients")
    real = spawn(report_of_a_step, 2, tmp_path, what)[0]
    dry, alone = (
        fsdpx.dry_run(network(), *batch, ranks=ranks, offload=OffloadConfig("/nowhere", what), **OPTIONS).report
        for ranks in (2, 1)
    )
    counted = {key: traffic for key, traffic in real.traffic.items() if key[0] == "disk"}
    assert set(counted) == {("disk", "read"), ("disk", "write")}
    assert counted == {key: real.predicted[key] for key in counted}
    assert (real.memory, real.disk) == (dry.memory, dry.disk)
    own = real.parameters // 2 * 4
    assert real.disk == {"parameters": own, "optimizer": 2 * own, "gradients": own}
    assert set(real.memory) == {"state", "working set"}
    # on one rank no part is cut off: the gradients themselves are on disk
    full = 4 * real.parameters
    assert alone.disk == {"parameters": full, "optimizer": 2 * full, "gradients": full}
    lines = [" ".join(line.split()) for line in str(real).splitlines()]
    assert f"on disk: optimizer {2 * own / 1024:.2f} KiB" in lines


def test_the_report_says_how_long_the_disk_was_at_work(tmp_path):
    report = spawn(report_of_a_step, 1, tmp_path)[0]
    assert 0 < report.disk_seconds < report.seconds
    assert str(report).endswith(f"disk: {report.disk_seconds:.3f} s busy")


def test_memory_is_that_of_a_few_pages(tmp_path):
    """Of 12 pages of optimizer state three are in memory at a time: needed, fetched and on its way back."""

    def run(comm, offload):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
        with model.as_distributed(comm=comm, offload=offload, **OPTIONS) as trainer:
            trainer.step(np.ones((2, 64), np.float32), np.ones((2, 64), np.float32))
            return sum(trainer.report().memory.values())

    page = 64 * 64 * 4
    saved = spawn(run, 1, None)[0] - spawn(run, 1, OffloadConfig(tmp_path))[0]
    assert saved == 12 * 2 * page - 3 * (2 * page + disk.ALIGN_BYTES)


def test_show_counts_it_without_a_folder():
    rows = [line.split() for line in shown("show mlp --ranks 2 --offload optimizer,parameters").splitlines()]
    optimizer, parameters = (float(row[3]) for what in BOTH for row in rows if row[:3] == ["on", "disk:", what])
    assert optimizer == pytest.approx(2 * parameters, rel=0.01)
    assert ["read,", "disk"] in [row[:2] for row in rows]


def test_without_direct_io(tmp_path, monkeypatch):
    """Where a file system has none the page cache is used, with the same bits; who insists on it is told."""

    def control(file, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(file, command, flags)

    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", control)
    with pytest.raises(OffloadError, match=r"its file system has no direct I/O \(Invalid argument\)"):
        disk.DiskFile(tmp_path, disk.ALIGN_BYTES, True)
    file = disk.DiskFile(tmp_path, disk.ALIGN_BYTES, None)
    assert not file.direct
    file.close()
    assert spawn(trained, 1, tmp_path, ALL) == spawn(trained, 1, None)


@on_ranks(1)
def test_activations_leave_memory(comm, tmp_path):
    """Their peak is that of a few units, in a dry run; the bytes are those predicted; in memory they are not kept."""
    batch = ((64, 32), "float32"), ((64, 32), "float32")
    options = OPTIONS | {"optimizer": optim.SGD(lr=0.1)}
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.Tanh())))
    with model.as_distributed(comm=comm, offload=OffloadConfig(tmp_path, "activations"), **options) as trainer:
        trainer.step(np.ones((64, 32), np.float32), np.ones((64, 32), np.float32))
        report = trainer.report()
    dry, without = (
        fsdpx.dry_run(model, *batch, ranks=1, offload=offload, **options)
        for offload in (OffloadConfig("/nowhere", "activations"), None)
    )
    assert dry.activations < without.activations / 3
    counted, predicted, dry_predicted = (
        {key: count for key, count in traffic.items() if key[0] == "disk"}
        for traffic in (report.traffic, report.predicted, dry.report.predicted)
    )
    assert counted
    assert counted == predicted == dry_predicted


Pair = namedtuple("Pair", ["first", "second"])  # a layer may keep one


def test_arrays_come_back_as_they_were():
    """Views of one memory are views of one again, strides and all; what should stay, or is no array, stays."""
    whole, apart = np.arange(24.0).reshape(4, 6), np.arange(6)[::-1]
    staying, odd = np.ones(3), object()
    value = {"a": [whole[1:].T, Pair(whole, apart)], "b": staying, "c": odd, "d": np.arange(100)[:3], "e": None}
    made = extract_large_arrays(value, lambda root: root is staying)
    assert [root.nbytes for root in made.roots] == made.sizes == [whole.nbytes, apart.nbytes]
    found = made.rebuild_value_from_memory([np.frombuffer(root.tobytes(), np.uint8).copy() for root in made.roots])
    view, pair = found["a"]
    assert np.shares_memory(view, pair.first)
    for new, old in ((view, whole[1:].T), (pair.first, whole), (pair.second, apart), (found["d"], np.arange(3))):
        assert np.array_equal(new, old)
        assert new.strides == old.strides
    assert found["b"] is staying
    assert (found["c"], found["e"]) == (odd, None)


# -- folders that cannot be used ---------------------------------------------------------------------------------------


def refused(size, folder, what="optimizer"):
    """What every rank is told."""

    def run(comm):
        with pytest.raises(OffloadError) as caught:
            make(comm, folder, what)
        return str(caught.value)

    return spawn(run, size)


def test_a_missing_folder_is_named_on_all_ranks(tmp_path):
    folder = tmp_path / "gone"
    assert refused(3, folder) == [f"offload: rank 0: {folder} does not exist: make it, or name another folder"] * 3
    file = tmp_path / "file"
    file.touch()
    assert refused(1, file) == [f"offload: {file} is no folder: name another folder"]


def test_a_full_disk_is_found_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    (told,) = set(refused(2, tmp_path))
    assert re.fullmatch(rf"offload: rank 0: {tmp_path} has no room for .* bytes: No space left on device", told)


def test_two_jobs_in_one_folder_are_refused(tmp_path):
    """While another process has it; once that is dead, its traces are none."""
    other = (
        "import sys\nfrom pathlib import Path\nfrom fsdpx.ext.offload.disk import lock_folder\n"
        "lock_folder(Path(sys.argv[1]), 'process 7 on elsewhere, 123')\nprint('has it', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", other, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "has it\n"
        who = "in use by process 7 on elsewhere: each job, and each trainer, needs a folder of its own"
        assert refused(2, tmp_path) == [f"offload: rank 0: {tmp_path} is {who}"] * 2
        process.kill()
    spawn(lambda comm: make(comm, tmp_path).close(), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["fsdpx.lock"]


@on_ranks(1)
def test_a_broken_disk_is_named_with_the_action(comm, tmp_path, monkeypatch):
    trainer = make(comm, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
        words = f"{tmp_path}: offloaded state cannot be read: Input/output error"
        with pytest.raises(OffloadError, match=words) as caught:
            trainer.step(*part(trainer, 0))
    assert caught.value.__notes__ == ["on rank 0, in action UPDATE3 (page '5.weight..5.bias')"]
    trainer.close()


def test_a_step_follows_one_that_failed(tmp_path):
    """What was here of the broken step is let go of; what is stored is whole."""

    def stop(action):
        if action.op == "B":
            raise ValueError("stopped")

    def run(comm, folder):
        with make(comm, folder, ALL, strategy="fsdp") as trainer:
            trainer.step(*part(trainer, 0))
            engine = trainer.inspect.engine
            between, stopping = set(engine.state.store), engine.add_observer(stop)
            with pytest.raises(ValueError, match="stopped"):
                trainer.step(*part(trainer, 1))
            engine.remove_observers(stopping)
            assert set(engine.state.store) == between
            return trainer.step(*part(trainer, 1)), bits(trainer)

    assert spawn(run, 2, tmp_path) == spawn(run, 2, None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "optimizer"},
         "offload='optimizer': say where, fsdpx.OffloadConfig('/local/disk', what='optimizer')"),
        ({"optimizer": optim.SGD(lr=1.0), "offload": OffloadConfig("x")}, "SGD keeps no state; leave it out"),
        ({"elastic": True, "offload": OffloadConfig("x")}, "offload: elastic ranks keep copies of each other's state"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        nn.Linear(2, 2).as_distributed(**(OPTIONS | options))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"folder": ""}, "folder=''): the path of an existing folder is needed"),
        ({"what": "everything"}, "what='everything'): choose from optimizer, parameters, activations, gradients"),
        ({"what": ()}, "what=()): choose from"),
        ({"direct": "yes"}, "direct='yes'): choose True, False or None"),
    ],
)
def test_options_are_checked(given, text):
    with pytest.raises(ConfigError, match=re.escape(f"OffloadConfig({text}")):
        OffloadConfig(**{"folder": "x", **given})


# -- a limit on the memory of the process ------------------------------------------------------------------------------

LIMITED = """
import gc, hashlib, resource, sys
from pathlib import Path
import numpy as np
from fsdpx import OffloadConfig, nn, optim

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
model = nn.Sequential(*(nn.Linear(720, 720, bias=False) for _ in range(16)))
batch = np.random.default_rng(0).standard_normal((4, 720), np.float32)
options = dict(loss=nn.MSELoss(), optimizer=optim.AdamW(), tune=False, backend="local")
nn.Linear(720, 720, bias=False).as_distributed(**options).step(batch, batch)  # what every process takes, BLAS too

def train(offload, limited):
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + limit if limited else -1, -1))
    with model.as_distributed(**options, offload=offload) as trainer:
        for _ in range(2):
            trainer.step(batch, batch)
        trainer.save(folder / "saved")
    with (folder / "saved" / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

print(train(OffloadConfig(folder, ["optimizer", "gradients"]), True))
try:
    print(train(None, True))
except MemoryError:
    print("MemoryError")
print(train(None, False))
"""
MODEL = 16 * 720 * 720 * 4
"""Bytes of its parameters: gradients take as many, and the optimizer's state twice that."""


@pytest.mark.jobs
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on private memory is Linux's")
def test_states_larger_than_the_memory_of_the_process(tmp_path):
    """The system lets the process have 2.5 times the model beside what every process takes: too little for the four
    of a step in memory; with the gradients and the optimizer's two on disk two are enough. The bits are those without a
    limit."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(5 * MODEL // 2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = [line for line in done.stderr.splitlines() if "compiling kernels took" not in line]
    assert (done.returncode, told) == (0, [])
    limited, failed, free = done.stdout.split()
    assert failed == "MemoryError"
    assert len(free) == 64
    assert limited == free
