"""What a user names as a file is a regular file: a pipe never hangs, and a device never fills the memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpx.checkpoint.read import weights
from fsdpx.data import ImageFolder, SupervisedDataset, TextDataset, TokenDataset
from fsdpx.errors import FsdpxError
from fsdpx.facade.builder import ModelBuilder
from fsdpx.launch.hosts import read_hosts
from fsdpx.observe import chrome
from fsdpx.program.schedules import schedule

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")


def image(path: Path) -> None:
    pytest.importorskip("PIL")
    ImageFolder(path.parents[1])[0]


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "text": ("a.txt", lambda path: TextDataset(path, 4)),
    "tokens": ("a.bin", lambda path: TokenDataset(path, 4)),
    "tokens.npy": ("a.npy", lambda path: TokenDataset(path, 4)),
    "conversations": ("a.jsonl", lambda path: SupervisedDataset(path, str.encode, 4, end=0)),
    "image": ("a.png", image),
    "run file": ("a.toml", ModelBuilder.read),
    "schedule": ("a.schedule", lambda path: schedule(path, 2, 4)),
    "hostfile": ("hosts", read_hosts),
    "trace": ("rank-00000.json.gz", lambda path: chrome.read(path.parent)),
    "weights": ("a.safetensors", weights),
    "index": ("a.index.json", weights),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    path = tmp_path / "class" / name
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif reader in ("text", "image", "weights", "index"):
        pytest.skip("a folder is read for the files in it")
    else:
        path.mkdir()
    with pytest.raises(FsdpxError) as caught:
        read(path)
    assert name in str(caught.value) or (kind == "device" and "/dev/zero" in str(caught.value))
    assert "a folder, a pipe or a device where a file should be" in str(caught.value)
