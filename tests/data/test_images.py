"""Images in folders by class."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpx.data import ImageFolder
from fsdpx.errors import ConfigError, DataError


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
