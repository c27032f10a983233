"""`fsdpx.latest_checkpoint`: which checkpoint of a folder a loop goes on from."""

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from models import make
from savers import refused

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.trainer import latest
from fsdpx.errors import DesyncError


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, to be copied."""
    path = tmp_path_factory.mktemp("one") / "checkpoint"
    spawn(lambda comm: make(comm, "mlp").save(path), 1)
    return path


def fill(folder: Path, one: Path, *names: str) -> None:
    """Copies of a checkpoint by these names, written one after the other."""
    for second, name in enumerate(names, 1):
        shutil.copytree(one, folder / name)
        os.utime(folder / name / "manifest.json", (second, second))


def test_there_is_none_at_a_first_start(tmp_path: Path) -> None:
    assert fsdpx.latest_checkpoint(tmp_path / "nowhere") is None
    assert fsdpx.latest_checkpoint(str(tmp_path)) is None
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-notes.txt").touch()
    assert fsdpx.latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "names",  # from the oldest to the newest
    [
        ["step-9", "step-20", "step-100", "step-1000"],
        ["epoch_3_step_20", "epoch_4_step_5", "epoch_10_step_1"],
        ["last", "step-1", "step-02"],
        ["zebra", "ape"],
        ["2026-11-27", "2027-01-02"],
    ],
)
def test_numbers_count_as_numbers_and_then_the_time(names: list[str], one: Path, tmp_path: Path) -> None:
    written = names if not any(map(str.isdigit, "".join(names))) else random.Random(0).sample(names, len(names))
    fill(tmp_path, one, *written)
    while names:
        assert fsdpx.latest_checkpoint(tmp_path) == tmp_path / names[-1]
        shutil.rmtree(tmp_path / names.pop())


def test_what_saves_leave_is_no_checkpoint(one: Path, tmp_path: Path) -> None:
    """But for the previous one, where there is no other."""
    fill(tmp_path, one, "step-1", ".fsdpx-partial-0123abcd-step-9", ".fsdpx-removed-step-7", ".fsdpx-previous-step-1")
    assert fsdpx.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    shutil.rmtree(tmp_path / "step-1")
    assert fsdpx.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    spawn(lambda comm: make(comm, "mlp").load(tmp_path / "step-1"), 1)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "state.safetensors"])
@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_damaged_one_is_passed_over(harm: Any, file: str, one: Path, tmp_path: Path) -> None:
    fill(tmp_path, one, "step-1", "step-2")
    harm(tmp_path / "step-2" / file)
    if (harm, file) == (Path.unlink, "manifest.json"):  # it is none
        assert fsdpx.latest_checkpoint(tmp_path) == tmp_path / "step-1"
        return
    with pytest.warns(RuntimeWarning, match=f"a damaged checkpoint is skipped: .*step-2/{file}"):
        assert fsdpx.latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        with make(comm, "mlp", average=fsdpx.EMA(0.9)) as trainer:
            trainer.save(tmp_path / "step-1")
            trainer.save(tmp_path / "average-2", weights="average")

    spawn(body, 2)
    assert fsdpx.latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_all_ranks_get_what_rank_0_finds(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others look at a moment when a save has just been committed."""
    fill(tmp_path, one, "step-1", "step-2")
    newest = Mock(return_value=tmp_path / "step-2")
    monkeypatch.setattr(latest, "find_newest_checkpoint", newest)
    assert spawn(lambda comm: fsdpx.latest_checkpoint(tmp_path, comm), 3) == [tmp_path / "step-2"] * 3
    assert spawn(lambda comm: fsdpx.latest_checkpoint(tmp_path), 3) == [tmp_path / "step-2"] * 3
    assert newest.call_args_list == [call(tmp_path)] * 2


def test_wrong_folders_are_named_on_all_ranks(one: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, text in (
        (lambda rank: one, "is a checkpoint itself: give the folder that contains it$"),
        (lambda rank: tmp_path / "file", r"Not a directory \(ENOTDIR\)"),
        (lambda rank: tmp_path / f"{rank}", "ranks differ in path"),
        (lambda rank: 3, r"give a str or a pathlib\.Path"),
    ):
        assert re.search(text, refused(2, lambda comm, folder=folder: fsdpx.latest_checkpoint(folder(comm.rank))))


def test_a_rank_that_calls_something_else_is_named(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        trainer = make(comm, "mlp")
        with pytest.raises(DesyncError, match=r"save.*latest|latest.*save"):
            fsdpx.latest_checkpoint(tmp_path) if comm.rank else trainer.save(tmp_path / "a")

    spawn(body, 2)
