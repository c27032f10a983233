"""What goes wrong while saving or loading is said alike on all ranks, and the old checkpoint stays."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
from models import make
from present import needs
from savers import build, refused, steps
from threads import on_ranks

import fsdpx
from fsdpx import data, nn, optim, spawn
from fsdpx.core.base import environment
from fsdpx.core.checkpoint import atomic_commit, write
from fsdpx.core.checkpoint import format as layout
from fsdpx.core.checkpoint import save as saving
from fsdpx.core.checkpoint.load import RENAME_HINT
from fsdpx.core.checkpoint.write import Manifest
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError, ConfigError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL_AFTER = [(0, False, 0), (1, True, write.INLINE_WRITE_BYTES), (5, True, 0), (17, False, write.INLINE_WRITE_BYTES)]
"""After so many writes, in the background or not, and what is longer than `short` is written by a thread."""


def saved(comm: Communicator, path: Path, **options: Any) -> str:
    trainer = make(comm, "wide")
    trainer.save(path, **options)
    return trainer.inspect.compute_fingerprint()


def loaded(path: Path, ranks: int = 1) -> str:
    def body(comm: Communicator) -> str:
        trainer = make(comm, "wide", seed=8)
        trainer.load(path)
        return trainer.inspect.compute_fingerprint()

    return spawn(body, ranks)[0]


@pytest.fixture
def old(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A checkpoint, and a check that it is still there, alone, and loads."""
    path = tmp_path / "a"
    digest = spawn(saved, 2, path)[0]
    yield path, digest
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("a")] == ["a"]
    assert loaded(path, 3) == digest


def trained(comm: Communicator, path: Path, **options: Any) -> None:
    trainer = make(comm, "wide")
    steps(trainer, "wide", 0, 1)
    trainer.save(path, **options)
    trainer.call_runner.wait_for_background_save()


@pytest.mark.parametrize(("after", "in_background", "short"), FULL_AFTER)
def test_a_full_disk(old: Any, after: int, in_background: bool, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank meets it."""
    path, _ = old
    monkeypatch.setattr(write, "INLINE_WRITE_BYTES", short)
    writes = count()  # atomic, as `next` of it is no Python code

    def full(fd: int, data: Any, offset: int) -> None:
        if next(writes) >= after:
            raise FULL
        layout.write_at(fd, data, offset)

    monkeypatch.setattr(write, "write_at", full)
    text = refused(3, lambda comm: trained(comm, path, background=in_background))
    assert text.startswith(f"save to {path}: rank ")
    assert text.endswith("No space left on device (ENOSPC)")


@pytest.mark.parametrize(("module", "later"), [(write, 0), (write, write.FLUSH_BYTES), (atomic_commit, 0)])
def test_a_full_disk_at_the_end(old: Any, module: Any, later: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems say so only when asked to keep it; or there is room for all but the header."""
    monkeypatch.setattr(write, "FLUSH_BYTES", later)
    monkeypatch.setattr(module, "sync_file", Mock(side_effect=FULL))
    assert refused(2, trained, old[0]).endswith("No space left on device (ENOSPC)")


def test_a_full_disk_in_the_background_of_one_rank(old: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_write_checksum_file", Mock(side_effect=FULL))
    text = refused(3, lambda comm: trained(comm, old[0], background=True))
    assert text == f"save to {old[0]}: rank 1: No space left on device (ENOSPC)"


def test_errors_in_the_background_surface_at_the_next_save(old: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        trainer = make(comm, "wide")
        trainer.save(old[0], background=True)
        steps(trainer, "wide", 0, 1)
        trainer.save(old[0])

    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "model.safetensors")
    monkeypatch.setattr(atomic_commit.SaveTarget, "commit", Mock(side_effect=denied))
    assert refused(2, body) == f"save to {old[0]}: rank 0: Permission denied (EACCES): model.safetensors"


def test_a_host_with_a_disk_of_its_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(folder: Path, *args: Any) -> Any:
        there = folder / "not" if threading.current_thread().name == "rank 1" else folder
        return write.write_tensor_shards(there, *args)

    monkeypatch.setattr(saving, "write_tensor_shards", elsewhere)
    with pytest.raises(CheckpointError, match=r"a: rank 1: .* does not see .*: all hosts must share the disk of"):
        spawn(saved, 2, tmp_path / "a")


def test_training_does_not_wait_for_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written are the values of the call, though the steps after it come first."""
    trained_on = threading.Event()

    def late(*args: Any) -> Any:
        assert trained_on.wait(60)
        return write.write_tensor_shards(*args)

    monkeypatch.setattr(saving, "write_tensor_shards", late)

    def body(comm: Communicator) -> list[str]:
        trainer = make(comm, "wide")
        trainer.save(tmp_path / "a", background=True)
        digests = [trainer.inspect.compute_fingerprint()]
        steps(trainer, "wide", 0, 2)
        digests.append(trainer.inspect.compute_fingerprint())
        trained_on.set()
        trainer.call_runner.wait_for_background_save()
        return digests

    before, after = spawn(body, 2)[0]
    assert loaded(tmp_path / "a") == before != after


@on_ranks(3)
def test_the_background_commits_without_another_call(comm: Communicator, tmp_path: Path) -> None:
    trainer = make(comm, "wide")
    trainer.save(tmp_path / "a", background=True)
    if comm.rank == 0:
        saving = trainer.call_runner.background_save
        assert saving._wrote.wait(20)  # type: ignore[union-attr]
        assert saving._running.acquire(timeout=20)  # type: ignore[union-attr]
        assert (tmp_path / "a/manifest.json").exists()


@needs("offload")
def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home/disk").mkdir(parents=True)
    monkeypatch.setenv("FSDPX_CACHE", str(environment.read_environment().cache))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home/text.txt").write_text("a text to read" * 20)

    def body(comm: Communicator) -> str:
        given = {"optimizer": optim.AdamW(lr=0.1), "trace": "~/trace", "offload": fsdpx.OffloadConfig("~/disk")}
        trainer = nn.Linear(4, 4).as_distributed(loss=nn.MSELoss(), comm=comm, **given)
        loader = data.DataLoader(data.ArrayDataset(np.ones((4, 4)), np.ones((4, 4))), 4, comm=comm)
        trainer.fit(loader, log="~/log", checkpoints="~/runs", progress=False)
        trainer.load("~/runs/step-1")
        trainer.close()
        return fsdpx.CheckpointConfig("~/runs").find_latest().name  # type: ignore[union-attr]

    assert spawn(body, 1) == ["step-1"]
    assert len(data.TextDataset("~/text.txt", 8)) > 0
    found = {path.name for path in (tmp_path / "home").iterdir()}
    assert found == {"disk", "text.txt", "trace", "log", "runs"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    "place",
    [
        (atomic_commit.safe_files, "write_lock_text"),
        (atomic_commit, "_require_no_foreign_files"),
        (saving, "to_host"),
        (saving.threading.Thread, "start"),
    ],
)
def test_ctrl_c_in_a_save_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    def body(comm: Communicator) -> None:
        trainer = make(comm, "wide")
        with monkeypatch.context() as broken:
            broken.setattr(*place, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                trainer.save(tmp_path / "a", background=True)
        assert not list(tmp_path.glob(f"*{atomic_commit.PARTIAL}*"))
        trainer.save(tmp_path / "a")  # this process may go on, as in a notebook

    spawn(body, 1)
    assert (tmp_path / "a/manifest.json").exists()


def test_ctrl_c_in_the_wait_for_a_save_lets_its_thread_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    finish = saving.PreparedSave.commit_and_prune

    def later(self: saving.PreparedSave, sums: np.ndarray) -> None:
        assert go_on.wait(20)
        finish(self, sums)

    def interrupt(self: saving.BackgroundSave) -> None:
        threading.Timer(0.05, go_on.set).start()
        raise KeyboardInterrupt

    def body(comm: Communicator) -> None:
        trainer = make(comm, "wide")
        monkeypatch.setattr(saving.PreparedSave, "commit_and_prune", later)
        monkeypatch.setattr(saving.BackgroundSave, "_wait_until_committed", interrupt)
        trainer.save(tmp_path / "a", background=True)
        with pytest.raises(KeyboardInterrupt):
            trainer.call_runner.wait_for_background_save()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
        assert loaded(tmp_path / "a") == trainer.inspect.compute_fingerprint()

    spawn(body, 1)


def test_no_permission_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refused(2, saved, tmp_path / "file/a")
    assert text.startswith(f"save to {tmp_path}/file/a: rank 0: ")
    assert str(tmp_path / "file") in text.split("rank 0: ")[1]
    assert "is a file: a checkpoint is a folder" in refused(2, saved, tmp_path / "file")


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder in which a test that runs as root has no more rights than others."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX")
@pytest.mark.parametrize("in_background", [False, True])
def test_a_folder_without_permission(nobody: Path, in_background: bool) -> None:
    path = nobody / "a"
    digest = spawn(saved, 2, path)[0]
    nobody.chmod(0o555)
    text = refused(3, lambda comm: trained(comm, path, background=in_background))
    assert text == f"save to {path}: rank 0: Permission denied (EACCES): {nobody}/.fsdpx-lock-a"
    assert os.listdir(nobody) == ["a"]
    assert loaded(path) == digest
    (path / "model.safetensors").chmod(0)
    assert refused(3, broken, path).endswith(f"rank 0: Permission denied (EACCES): {path}/model.safetensors")
    (path / "model.safetensors").chmod(0o644)
    assert loaded(path) == digest


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("!")
    text = refused(2, saved, tmp_path / "home")
    assert f"{tmp_path}/home is no checkpoint, but has files in it (thesis.tex): choose another place" in text
    spawn(saved, 1, tmp_path / "a")
    (tmp_path / "a/config.json").write_text("!")
    text = refused(2, saved, tmp_path / "a")
    assert "holds other files than the checkpoint, which would be lost (config.json)" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "home"]
    (tmp_path / "empty").mkdir()
    spawn(saved, 2, tmp_path / "empty")
    assert loaded(tmp_path / "empty")


class Strange:
    def state_dict(self) -> dict[str, Any]:
        return {"order": np.arange(3)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 2}, "keep: .*/a has no number at its end; save to folder/step-"),
        ({"keep": 0}, "keep=0: a whole number, 1 or more"),
        ({"shard_bytes": 1.5}, "shard_bytes=1.5: a whole number"),
        ({"dtype": "int8"}, "dtype='int8': choose float64, float32, float16 or bf16"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"loader": [1]}, "the loader is a list without state_dict"),
        ({"loader": Strange()}, "the state_dict of the loader is not made of numbers and texts: .*ndarray"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str, tmp_path: Path) -> None:
    assert re.search(message, refused(2, lambda comm: saved(comm, tmp_path / "a", **options)))
    assert list(tmp_path.iterdir()) == []


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced, it would leave the process in a folder that is gone."""
    monkeypatch.chdir(tmp_path)
    assert refused(2, saved, ".").endswith("is the current folder, which cannot be replaced: name a folder in it")
    assert list(tmp_path.iterdir()) == []
    spawn(saved, 2, "a/.")
    assert loaded(tmp_path / "a/")


def linked(folder: Path, *names: str) -> Path:
    """A checkpoint step-100, and links to it, each to the one before."""
    spawn(saved, 2, folder / "step-100")
    for name, target in zip(names, ("step-100", *names), strict=False):
        (folder / name).symlink_to(target)
    return folder / names[-1]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_link_is_followed_to_its_end(in_background: bool, tmp_path: Path) -> None:
    """The folder is replaced as a whole, the links stay as they are."""
    path = linked(tmp_path, "latest", "newest")
    spawn(lambda comm: trained(comm, path, background=in_background), 2)
    spawn(saved, 2, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "newest", "other", "step-100"]
    assert [os.readlink(tmp_path / name) for name in ("latest", "newest")] == ["step-100", "latest"]
    assert loaded(path) == loaded(tmp_path / "step-100") != loaded(tmp_path / "other")


@pytest.mark.parametrize(
    ("moved", "code", "words"),
    [
        (atomic_commit.PARTIAL, errno.EBUSY, "this folder cannot be renamed, so no checkpoint can take its place"),
        ("step-100", errno.EBUSY, "this folder cannot be renamed, so no checkpoint can take its place"),
        (atomic_commit.PARTIAL, errno.EIO, "(EIO)"),
    ],
    ids=["last rename, busy", "first rename, busy", "last rename, of the disk"],
)
def test_what_a_link_names_outlives_a_failed_save(moved, code, words, tmp_path, monkeypatch):
    """The first rename is taken back where the last one fails."""
    path, rename = linked(tmp_path, "latest"), os.rename
    digest = loaded(path)

    def failing(source: Any, target: Any) -> None:
        if moved in Path(source).name and atomic_commit.PREVIOUS not in Path(source).name:
            raise OSError(code, os.strerror(code), str(source))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        assert words in refused(2, trained, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-100"]
    assert loaded(path) == loaded(tmp_path / "step-100") == digest


def test_links_without_an_end(tmp_path: Path) -> None:
    """One that dangles names a folder that is not there yet; a circle is refused."""
    (tmp_path / "latest").symlink_to("runs/step-1")
    digest = spawn(saved, 2, tmp_path / "latest")[0]
    assert (tmp_path / "latest").is_symlink()
    assert loaded(tmp_path / "runs/step-1") == loaded(tmp_path / "latest") == digest
    (tmp_path / "runs/step-1").rename(tmp_path / "runs/.fsdpx-previous-step-1")  # killed between two renames
    assert loaded(tmp_path / "latest") == digest
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert refused(2, saved, tmp_path / "a").endswith("is a circular link: choose another path")


def test_links_in_the_place_of_parts_lose_themselves_alone(tmp_path: Path) -> None:
    digest = spawn(saved, 2, tmp_path / "precious")[0]
    for name in [*leavings("a")[:-1], *leavings("step-1")[-1:]]:
        if "lock" not in name:
            (tmp_path / name).symlink_to("precious")
    for _ in range(2):
        spawn(saved, 2, tmp_path / "a")
    spawn(keeping, 2, tmp_path, [2], 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "precious", "step-2"]
    assert loaded(tmp_path / "precious") == digest


def test_two_names_of_one_place_have_one_lock(tmp_path: Path) -> None:
    path = linked(tmp_path, "latest")
    (tmp_path / "by-another-name").symlink_to(tmp_path, target_is_directory=True)
    lock = atomic_commit._lock_checkpoint(tmp_path / "step-100")
    try:
        for name in (path, tmp_path / "by-another-name/latest"):
            assert "step-100: another job is saving there" in refused(2, trained, name)
    finally:
        atomic_commit.make_sibling_path(tmp_path / "step-100", atomic_commit.LOCK).unlink()
        os.close(lock or 0)
    assert loaded(path)


def keeping(comm: Communicator, folder: Path, numbers: list[int], keep: int) -> None:
    trainer = make(comm, "wide")
    for number in numbers:
        trainer.save(folder / f"step-{number}", keep=keep)


def test_keep_spares_links_and_what_they_point_at(tmp_path: Path) -> None:
    spawn(saved, 2, tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-1").symlink_to(tmp_path / "elsewhere")
    spawn(keeping, 2, tmp_path / "run", [2], 2)
    (tmp_path / "run/best").symlink_to("step-2")
    spawn(keeping, 2, tmp_path / "run", [3, 4, 5], 2)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["best", "step-1", "step-2", "step-4", "step-5"]
    assert loaded(tmp_path / "elsewhere") == loaded(tmp_path / "run/best")


def test_keep_leaves_larger_numbers_alone(tmp_path: Path) -> None:
    """They are of another run; the run's own newest must not go first."""
    spawn(saved, 1, tmp_path / "step-2000")
    spawn(keeping, 1, tmp_path, [10, 20, 30], 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-20", "step-2000", "step-30"]


def test_ranks_that_want_different_things(tmp_path: Path) -> None:
    text = refused(3, lambda comm: saved(comm, tmp_path / f"{comm.rank}"))
    assert text == f"save: ranks differ in path: rank 0 has {tmp_path}/0, rank 1 has {tmp_path}/1"
    text = refused(2, lambda comm: saved(comm, tmp_path / "a", dtype="bf16" if comm.rank else None))
    assert "ranks differ in options: rank 0 has SaveChoices(dtype=None" in text


def test_two_jobs_do_not_save_to_one_place(old: Any) -> None:
    code = (
        "import sys; from pathlib import Path; from fsdpx.core.checkpoint.atomic_commit import _lock_checkpoint\n"
        "_lock_checkpoint(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(old[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == b"locked\n"
            text = refused(2, trained, old[0])
        finally:
            job.kill()  # its lock goes with it
    assert f"{old[0]}: another job is saving there: " in text
    assert json.loads(text[text.index("{") :])["process"] == job.pid
    spawn(saved, 2, old[0])


def leavings(name: str) -> list[str]:
    """What saves leave, each kind after the other."""
    kinds = atomic_commit.PARTIAL + "0123abcd", atomic_commit.LOCK, atomic_commit.PREVIOUS, atomic_commit.REMOVED
    return [atomic_commit.make_sibling_path(Path(name), kind).name for kind in kinds]


@pytest.mark.parametrize("moment", ["partial", "previous", "both"])
def test_what_a_killed_job_leaves_is_found_and_cleaned(moment: str, tmp_path: Path) -> None:
    path, (partial, lock, previous, _) = tmp_path / "a", [tmp_path / name for name in leavings("a")]
    digest = spawn(saved, 2, path)[0]
    if moment != "previous":
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(bytes(100))
    if moment != "partial":
        path.rename(previous)
    lock.write_text('{"host": "a", "process": 1, "since": "then"}')
    assert fsdpx.latest_checkpoint(tmp_path) == path
    assert loaded(path) == digest
    spawn(trained, 2, path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert loaded(path) != digest


@pytest.mark.parametrize("name", [*leavings("run"), ".fsdpx-anything", ".Fsdpx-Lock-run", *leavings("step-7")])
def test_names_of_leavings_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(name)
    for path in (tmp_path / name, tmp_path / "link"):
        assert refused(2, saved, path).endswith("next to a checkpoint, and removes them: choose another name")
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_a_save_removes_what_is_its_own_alone(tmp_path: Path) -> None:
    """What looks like it, and what saves to other names have left or are about to, stays."""
    others = [left for name in ("b-a", "0123abcd-a", "a-1", "aa") for left in leavings(name)]
    kept = [*others, "a.partial-1", "a.partial-0123"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "a.lock").write_text("of another program")
    for _ in range(2):
        spawn(saved, 2, tmp_path / "a")
    spawn(lambda comm: saved(comm, tmp_path / "b-2", keep=1), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "a", "a.lock", "b-2"])


def test_keep_removes_the_oldest_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "step-none").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/notes.txt").write_text("no checkpoint")
    spawn(keeping, 2, tmp_path, [2, 9, 10, 11], 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-10", "step-11", "step-9", "step-none"]
    spawn(keeping, 1, tmp_path, [12], 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-12", "step-none"]


def damage(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def broken(comm: Communicator, path: Path, call: str = "load") -> None:
    """Load; if that is refused, nothing has changed."""
    trainer = build(comm, "fsdp 3", seed=8)
    steps(trainer, "wide", 0, 1)
    before = trainer.inspect.compute_fingerprint(), trainer.global_step
    try:
        getattr(trainer, call)(path)
    finally:
        assert (trainer.inspect.compute_fingerprint(), trainer.global_step) == before


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    spawn(saved, 2, tmp_path / "good")
    path = tmp_path / "bad" / "a"
    shutil.copytree(tmp_path / "good", path)
    model = path / "model.safetensors"
    size, start = model.stat().st_size, int.from_bytes(model.read_bytes()[:8], "little") + 8

    def in_words(text: str) -> None:
        found = refused(3, broken, path)
        assert text in found, found
        shutil.copytree(tmp_path / "good", path, dirs_exist_ok=True)

    damage(model, start)
    in_words(f"{path}: damaged: the digest of blocks.0.attn")
    damage(model, size - 1, 128)
    in_words("damaged: the digest of norm.weight")
    damage(path / "state.safetensors", (path / "state.safetensors").stat().st_size - 1)
    in_words("damaged: the digest of v/norm.weight")
    damage(model, start - 1, 32 ^ 10)  # a space of the header
    in_words("model.safetensors: damaged: the digest of the header does not fit")
    damage(path / "manifest.json", 60)
    in_words("manifest.json: damaged")
    os.truncate(model, size - 3)
    in_words(f"model.safetensors: truncated: {size - 3} bytes, its tensors need {size}")
    os.truncate(model, 0)
    in_words("truncated: 0 bytes are no safetensors file")
    model.unlink()
    in_words("model.safetensors: the file is missing")
    (path / "manifest.json").unlink()
    assert "is no checkpoint: it has no manifest.json" in refused(2, broken, path)
    other = path.parent / "b"
    assert f"{other}: there is no checkpoint; in {path.parent} there is a" in refused(2, broken, other)


def test_a_checkpoint_that_is_not_there_names_the_newest_one(tmp_path: Path) -> None:
    def load(comm: Communicator, path: Path) -> None:
        make(comm, "wide").load(path)

    for step in (9, 10):
        spawn(saved, 1, tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()  # another program's, or one that is not whole
    newest = f"; the newest in {tmp_path} is step-10"
    for path in (tmp_path / "step-12", tmp_path / "last", tmp_path / "nowhere" / "step-9"):
        assert refused(2, load, path) == f"load {path}: rank 0: {path}: there is no checkpoint{newest}"
    assert refused(2, load, tmp_path).endswith(f"{tmp_path} is no checkpoint: it has no manifest.json{newest}")


def test_checkpoints_of_something_else_are_refused(tmp_path: Path) -> None:
    spawn(saved, 1, tmp_path / "a")
    values, weights = safetensors.numpy.load_file(tmp_path / "a/model.safetensors"), tmp_path / "w.safetensors"

    def in_words(changed: dict[str, Any], message: str) -> None:
        safetensors.numpy.save_file(changed, weights)
        assert refused(2, broken, weights, "load_parameters") == f"load_parameters {weights}: {message}"

    norm = values.pop("norm.weight")
    in_words(values, f"missing: norm.weight ({RENAME_HINT})")
    in_words(values | {"norm.weight": norm, "extra": np.ones(3)}, f"not in the model: extra ({RENAME_HINT})")
    in_words(values | {"extra": np.ones(3)}, f"missing: norm.weight; not in the model: extra ({RENAME_HINT})")
    for wrong, message in (
        (np.ones(21), "of the wrong shape: norm.weight is (21,) instead of (20,)"),
        (np.ones(20, np.int64), "norm.weight has the format I64: weights are F64, F32, F16, BF16"),
        (np.ones(20, "f4"), "norm.weight is float32 there and float64 in the trainer: say convert=True to round or "
                            "widen it"),
    ):  # fmt: skip
        in_words(values | {"norm.weight": wrong}, message)
    in_words({}, "missing: blocks.0.attn.out.bias, blocks.0.attn.out.weight, blocks.0.attn.qkv.bias, "
         f"blocks.0.attn.qkv.weight, blocks.0.mlp.down.bias and 23 more ({RENAME_HINT})")  # fmt: skip
    text = refused(2, lambda comm: make(comm, "wide", optimizer=optim.SGD(lr=1, momentum=0.9)).load(tmp_path / "a"))
    assert "AdamW with slots m, v in the checkpoint, SGD with slots momentum here; load_parameters takes" in text
    text = refused(2, lambda comm: make(comm, "wide", frozen=["norm.*"]).load(tmp_path / "a"))
    assert "not in the model: m/norm.bias, m/norm.weight, v/norm.bias, v/norm.weight" in text
    assert "missing: " in refused(2, lambda comm: make(comm, "mlp").load(tmp_path / "a"))


def test_an_index_must_tell_the_truth(tmp_path: Path) -> None:
    index = tmp_path / "a/model.safetensors.index.json"

    def in_words(table: Any, message: str) -> None:
        index.write_text(json.dumps(table))
        text = refused(1, lambda comm: make(comm, "wide").load_parameters(tmp_path / "a"))
        assert message in text, text

    spawn(saved, 1, tmp_path / "a")
    spawn(lambda comm: saved(comm, tmp_path / "a", shard_bytes=20_000), 1)
    for name in ("manifest.json", "state.safetensors"):
        (tmp_path / "a" / name).unlink()
    names = json.loads(index.read_text())["weight_map"]
    files = sorted(set(names.values()))
    in_words({}, "this is no index of safetensors files: 'weight_map'")
    in_words({"weight_map": names | {"more": files[0]}}, "tensor 'more' is in the index or in a file, but not in both")
    in_words({"weight_map": names | {"more": "../x"}}, "'../x' is no name of a file in the same folder")
    in_words({"weight_map": names | {"more": "nothing"}}, "nothing: the file is missing")
    swapped = dict(zip(files, [files[1], files[0], *files[2:]], strict=True))
    wrong = {name: swapped[file] for name, file in names.items()}
    in_words({"weight_map": wrong}, f"is in {files[0]}, the index says {files[1]}")


@on_ranks(2)
def test_a_closed_trainer_saves_nothing(comm: Communicator, tmp_path: Path) -> None:
    trainer = make(comm, "mlp")
    trainer.close()
    for call in (trainer.save, trainer.load, trainer.load_parameters):
        with pytest.raises(ConfigError, match="this trainer is closed"):
            call(tmp_path / "a")


def test_manifests_are_read_to_the_last_byte() -> None:
    good = Manifest({}).to_json()
    assert Manifest.parse(good, "m") == Manifest({})
    for bad in (b"", b"{}", b"[]", good + b" ", good.replace(b"1", b"2"), b"\xff", b"{" * 100_000):
        with pytest.raises(CheckpointError, match=r"^m: "):
            Manifest.parse(bad, "m")


def test_ranks_that_work_in_different_folders_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means another folder in each of them."""
    monkeypatch.chdir(tmp_path)
    spawn(saved, 2, Path("a"))
    real = os.getcwd()
    there = {"rank 1": f"{real}/sub"}
    monkeypatch.setattr(atomic_commit.os, "getcwd", lambda: there.get(threading.current_thread().name, real))
    words = f"ranks differ in working folder: rank 0 has {real}, rank 1 has {real}/sub"
    for call in ("save", "load", "load_parameters"):
        with pytest.raises(CheckpointError, match=re.escape(f"{call}: {words}")):
            spawn(lambda comm, call=call: getattr(make(comm, "wide"), call)("a"), 2)
    spawn(saved, 2, tmp_path / "b")


def test_a_relative_path_that_is_not_there_is_looked_for_by_its_whole_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(f"in {tmp_path} there is nothing")) as caught:
        spawn(lambda comm: make(comm, "wide").load("a"), 2)
    assert caught.value.__cause__ is None or "there is no checkpoint" not in str(caught.value.__cause__)
