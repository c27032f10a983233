"""Where samples come from: arrays, memory maps, folders of images, data by its name."""

import os
import re

import numpy as np
import pytest

import fsdpx
from fsdpx.core.checkpoint.read import open_weights
from fsdpx.core.program.schedules import make_schedule
from fsdpx.data import DataLoader, SupervisedDataset, TextDataset, TokenDataset
from fsdpx.errors import ConfigError, DataError, FsdpxError
from fsdpx.ext.observe import chrome
from fsdpx.launch.builder import ModelBuilder
from fsdpx.launch.options import read_hostfile


@pytest.mark.parametrize("kind", ["npy", "uint16", "uint32"])
def test_tokens_stay_on_disk(tmp_path, kind):
    if kind == "npy":
        np.save(tmp_path / "a.npy", np.arange(23))
        data = TokenDataset(tmp_path / "a.npy", 5)
    else:
        np.arange(23, dtype=kind).tofile(tmp_path / "a.bin")
        data = TokenDataset(tmp_path / "a.bin", 5, dtype=kind)
    assert isinstance(data.tokens, np.memmap)
    assert len(data) == 4
    x, y = data.take(np.array([3, 0]))
    assert x.dtype == np.int32
    assert x.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert y[0].tolist() == [16, 17, 18, 19, 20]
    assert data[-1][0].tolist() == x[0].tolist()
    assert data.take(np.array([], int))[0].shape == (0, 5)
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize(("kind", "value"), [("uint32", 2**31), ("int64", -(2**31) - 1), ("uint64", 2**63)])
def test_a_token_of_more_than_32_bits_is_named(tmp_path, kind, value):
    np.save(tmp_path / "a.npy", np.array([0, 1, 2, 3, 2**31 - 1, value, 6], kind))
    data = TokenDataset(tmp_path / "a.npy", 3)
    assert data[0][0].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=rf"a\.npy: token 5 is {value}: it does not fit into 32 bits"):
        data[1]


def test_tokens_that_cannot_be(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 9)))
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "b")
    (tmp_path / "c.npy").write_bytes(b"no")
    for name, said in (
        ("a.npy", "has float64[2, 9]: token numbers in one row"),
        ("b", "seq_len 4 needs at least 5 tokens, "),
        ("c.npy", "c.npy: "),
        ("d", "No such file"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            TokenDataset(tmp_path / name, 4)
    with pytest.raises(ConfigError, match=r"seq_len=0\): a whole number"):
        TokenDataset(tmp_path / "b", 0)


class Theirs:
    """As a dataset of Hugging Face: `take` is of the first n samples, and several are read at once."""

    def __len__(self):
        return 7

    def __getitem__(self, i):
        return {"x": np.full(2, float(i)), "y": i}

    def __getitems__(self, numbers):
        return [self[i] for i in numbers]

    def take(self, n):
        raise AssertionError


@pytest.mark.parametrize("size", [1, 3])
def test_a_dataset_of_another_library_goes_in_as_it_is(size):
    def read(comm):
        with DataLoader(Theirs(), 3, comm=comm, transform=lambda batch: (batch["x"], batch["y"])) as loader:
            return [(x[:, 0].tolist(), y.tolist()) for x, y in loader]

    ranks = fsdpx.spawn(read, size)
    assert [[y for part in ranks for y in part[step][1]] for step in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(x == y for part in ranks for x, y in part)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("(-100,)", "it has the shape (-100,), which no array has"),
        ("(1000000000000000000000000,)", "which no array has"),
        ("(True,)", "which no array has"),
        ("(2305843009213693952,)", "it is too short for int32[2305843009213693952]"),
        ("(4611686018427387904, 4)", "it is too short for"),
        ("(" + "-" * 9000 + "1,)", "its header cannot be read"),
    ],
)
def test_a_header_that_no_array_has_is_refused_by_the_file(tmp_path, shape, why):
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    file = tmp_path / "t.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(400))
    with pytest.raises(DataError, match=re.escape(f"TokenDataset: {file}: ") + ".*" + re.escape(why)):
        TokenDataset(file, 8)


READERS = {
    "text": ("a.txt", lambda path: TextDataset(path, 4)),
    "tokens": ("a.bin", lambda path: TokenDataset(path, 4)),
    "tokens.npy": ("a.npy", lambda path: TokenDataset(path, 4)),
    "conversations": ("a.jsonl", lambda path: SupervisedDataset(path, str.encode, 4, end=0)),
    "run file": ("a.toml", ModelBuilder.from_file),
    "schedule": ("a.schedule", lambda path: make_schedule(path, 2, 4)),
    "hostfile": ("hosts", read_hostfile),
    "trace": ("rank-00000.json.gz", lambda path: chrome.read_traces(path.parent)),
    "weights": ("a.safetensors", open_weights),
    "index": ("a.index.json", open_weights),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_name(tmp_path, reader, kind):
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
