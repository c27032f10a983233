"""~ is the home folder of the user, wherever a path is given."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import fsdpx
from fsdpx import models, nn, spawn
from fsdpx.__main__ import make_parser
from fsdpx.ext.observe.plots import require_writable_picture
from fsdpx.plan.machine import SHIPPED_FOLDER, Machine


def from_state_dict(home: Path) -> Any:
    names = {"enc1conv1": (4, 1, 3, 3), "enc1conv2": (4, 4, 3, 3)}
    safetensors.numpy.save_file({f"x.{n}.weight": np.zeros(s, np.float32) for n, s in names.items()}, home / "u.st")
    with pytest.raises(fsdpx.errors.FsdpxError) as error:  # it was read, and is no model that is known
        models.from_state_dict("~/u.st")
    assert "there is no such file" not in str(error.value)


def machine(home: Path) -> Any:
    shutil.copy(next(SHIPPED_FOLDER.glob("*.toml")), home / "mine.toml")
    assert Machine.load("~/mine.toml").name


def run_folder(home: Path) -> Any:
    fsdpx.RunFolder(Path("~/runs/one")).write_config({}, 1)
    assert (home / "runs/one/config.json").is_file()


def checkpoints(home: Path) -> Any:
    spawn(lambda comm: nn.Linear(2, 2).as_distributed(loss=nn.MSELoss(), comm=comm).save("~/runs/step-1"), 1)
    assert fsdpx.latest_checkpoint("~/runs") == home / "runs/step-1"


def launch_config(home: Path) -> Any:
    config = fsdpx.LaunchConfig(ranks=1, folder="~/job", logs="~/logs", hostfile=None)
    assert (config.folder, config.logs) == (home / "job", home / "logs")


def options(home: Path) -> Any:
    assert make_parser().parse_args(["ckpt", "inspect", "~/runs"]).path == home / "runs"


def picture(home: Path) -> Any:
    pytest.importorskip("matplotlib")
    (home / "pictures").mkdir()
    require_writable_picture("--png", "~/pictures/a.png")


@pytest.mark.parametrize("use", [from_state_dict, machine, run_folder, checkpoints, launch_config, options, picture])
def test_the_home_folder_is_that_of_the_user(use, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    use(tmp_path)
