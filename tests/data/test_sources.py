"""Where samples come from: arrays, memory maps, folders of images, data by its name."""

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx.checkpoint.read import weights
from fsdpx.data import DataLoader, ImageFolder, SupervisedDataset, TextDataset, TokenDataset
from fsdpx.errors import ConfigError, DataError, FsdpxError
from fsdpx.facade.builder import ModelBuilder
from fsdpx.launch.options import read_hosts
from fsdpx.observe import chrome
from fsdpx.program.schedules import schedule


@pytest.mark.parametrize("kind", ["npy", "uint16", "uint32"])
def test_tokens_stay_on_disk(tmp_path, kind):
    tokens = np.arange(23)
    if kind == "npy":
        path = tmp_path / "a.npy"
        np.save(path, tokens)
        data = TokenDataset(path, 5)
    else:
        path = tmp_path / "a.bin"
        tokens.astype(kind).tofile(path)
        data = TokenDataset(path, 5, dtype=kind)
    assert isinstance(data.tokens, np.memmap)
    assert len(data) == 4
    x, y = data.take(np.array([3, 0]))
    assert (x.dtype, x.tolist(), y[0].tolist()) == (
        np.int32,
        [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]],
        [16, 17, 18, 19, 20],
    )
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
    found = [[y for part in ranks for y in part[step][1]] for step in range(3)]
    assert found == [[0, 1, 2], [3, 4, 5], [6]]
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
def test_a_header_that_no_array_has_is_refused_by_the_file(tmp_path: Path, shape: str, why: str) -> None:
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    file = tmp_path / "t.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(400))
    with pytest.raises(DataError, match=re.escape(f"TokenDataset: {file}: ") + ".*" + re.escape(why)):
        TokenDataset(file, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes "cat" (2 images, one in a folder of its own) and "dog" (1), and what is to be left out."""
    image = pytest.importorskip("PIL.Image")
    for name, side in {
        "dog/a.png": 8,
        "cat/b.png": 8,
        "cat/more/c.PNG": 8,
        ".hidden/d.png": 8,
        "cat/.e.png": 8,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.arange(side * side * 3, dtype=np.uint8).reshape(side, side, 3)
        image.fromarray(pixels).save(file, format="PNG")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_folders_are_classes_in_sorted_order(folder: Path) -> None:
    dataset = ImageFolder(folder)
    assert dataset.classes == ("cat", "dog")
    assert [f.relative_to(folder).as_posix() for f in dataset.files] == ["cat/b.png", "cat/more/c.PNG", "dog/a.png"]
    x, y = dataset.take(np.array([2, 0]))
    assert (x.shape, x.dtype, y.tolist()) == ((2, 3, 8, 8), np.float32, [1, 0])
    want = np.arange(192, dtype=np.float32).reshape(8, 8, 3).transpose(2, 0, 1) / np.float32(255)
    np.testing.assert_array_equal(x[0], want)
    np.testing.assert_array_equal(dataset[2][0], want)
    assert dataset.take(np.array([], np.int64))[0].shape == (0, 3, 8, 8)
    assert ImageFolder(folder, mode="L")[0][0].shape == (1, 8, 8)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_by_its_range(tmp_path: Path, form: str) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    pixels = np.array([[0, 255], [32768, 65535]], np.uint16)
    image.fromarray(pixels).save(tmp_path / "a" / f"x.{form.lower()}", format=form)
    x, _ = ImageFolder(tmp_path, mode="L")[0]
    np.testing.assert_array_equal(x[0], pixels.astype(np.float32) / np.float32(65535))
    np.testing.assert_array_equal(ImageFolder(tmp_path)[0][0], np.repeat(x, 3, axis=0))
    np.testing.assert_allclose(ImageFolder(tmp_path, 1, mode="L")[0][0], x.mean(), rtol=1e-5)


@pytest.mark.parametrize(("kind", "words"), [("int32", "whole numbers of 32 bits"), ("float32", "floats")])
def test_pixels_without_a_scale_are_refused_by_the_file(tmp_path: Path, kind: str, words: str) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.fromarray(np.ones((2, 2), kind)).save(tmp_path / "a" / "x.tiff")
    with pytest.raises(DataError, match=rf"a/x\.tiff has {words} as pixels, of which no scale is known"):
        ImageFolder(tmp_path)[0]


@pytest.mark.parametrize("size", [4, (4, 12), (16, 5)])
def test_size_scales_and_cuts(folder: Path, size: Any) -> None:
    both = (size, size) if isinstance(size, int) else size
    x, _ = ImageFolder(folder, size)[0]
    assert x.shape == (3, *both)
    assert 0 <= x.min() < x.max() <= 1


def test_an_image_of_one_colour_keeps_it(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "grey").mkdir()
    image.new("RGB", (7, 13), (51, 102, 153)).save(tmp_path / "grey" / "a.bmp")
    x, _ = ImageFolder(tmp_path, 5)[0]
    np.testing.assert_allclose(x, np.broadcast_to(np.array([0.2, 0.4, 0.6])[:, None, None], (3, 5, 5)), atol=1e-6)


def test_what_cannot_be_read_is_named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    image = pytest.importorskip("PIL.Image")
    (folder / "dog" / "broken.png").write_bytes(b"no image at all")
    dataset = ImageFolder(folder, 8)
    with pytest.raises(DataError, match=r"dog/broken.png cannot be read as an image: cannot identify"):
        dataset[3]
    image.new("RGB", (9, 8)).save(folder / "dog" / "broken.png")
    with pytest.raises(DataError, match=r"dog/broken.png is 8 x 9 pixels, .*cat/b.png 8 x 8: pass ImageFolder\(size="):
        ImageFolder(folder).take(np.array([0, 3]))
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(DataError, match="has no folders: there must be one for each class"):
        ImageFolder(empty)
    (empty / "cat").mkdir()
    with pytest.raises(DataError, match="no images below"):
        ImageFolder(empty)
    with pytest.raises(DataError, match="is no folder"):
        ImageFolder(empty / "nothing")
    with pytest.raises(ConfigError, match=r"ImageFolder\(size=0\)"):
        ImageFolder(folder, 0)


def test_without_pillow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"pip install 'fsdpx\[images\]'"):
        ImageFolder(tmp_path)


def test_a_program_is_no_image_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would have Ghostscript run PostScript, which others may have written."""
    plugin = pytest.importorskip("PIL.EpsImagePlugin")
    monkeypatch.setattr(plugin, "Ghostscript", lambda *_, **__: pytest.fail("it was run"))
    (tmp_path / "a").mkdir()
    for name in ("x.png", "x.eps"):
        (tmp_path / "a" / name).write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
        with pytest.raises(DataError, match=f"{name} cannot be read as an image: cannot identify image file"):
            ImageFolder(tmp_path, suffixes=(name[1:],))[0]


def test_an_image_of_too_many_pixels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("L", (9, 9)).save(tmp_path / "a" / "x.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(DataError, match=r"x.png cannot be read as an image: .* decompression bomb"):
        ImageFolder(tmp_path)[0]


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
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
