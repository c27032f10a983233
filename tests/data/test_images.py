"""Images in folders by class, and augmentations that know the sample and the epoch but no rank."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpx import spawn
from fsdpx.data import ArrayDataset, DataLoader, Draw, ImageFolder, RandomCrop, RandomFlip
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


def pictures(n: int = 23) -> ArrayDataset:
    return ArrayDataset(np.random.default_rng(0).normal(size=(n, 2, 5, 6)), np.arange(n))


def by_sample(size: int, epochs: int = 2, after: int = 0) -> dict[tuple[int, int], bytes]:
    """(epoch, sample) -> the augmented sample, over all ranks. after: batches before a resume."""

    def run(comm: Any) -> dict[tuple[int, int], bytes]:
        loader = DataLoader(pictures(), 6, shuffle=True, seed=3, augment=[RandomFlip(), RandomCrop(2)])
        if after:
            first = iter(loader)
            for _ in range(after):
                next(first)
            state = loader.state_dict()
            loader = DataLoader(pictures(), 6, shuffle=True, seed=3, augment=[RandomFlip(), RandomCrop(2)])
            loader.load_state_dict(state)
        found = {}
        for epoch in range(epochs):
            for x, y in loader:
                found |= {(epoch, int(i)): image.tobytes() for image, i in zip(x, y, strict=True)}
        return found

    return {key: value for part in spawn(run, size) for key, value in part.items()}


def test_augmentation_does_not_see_ranks_or_resumes() -> None:
    alone = by_sample(1)
    assert len(alone) == 46
    for size in (2, 3, 5):
        assert by_sample(size) == alone
    resumed = by_sample(2, after=2)
    assert resumed.items() <= alone.items()
    assert len(resumed) == 46 - 12


def test_augmentation_changes_with_the_epoch_and_the_sample() -> None:
    found = by_sample(1)
    assert sum(found[0, i] != found[1, i] for i in range(23)) > 15
    draw = Draw(0, 0, "0", np.arange(1000))
    assert len(set(draw.uniform(1)[:, 0].tolist())) == 1000
    assert (Draw(0, 0, "1", np.arange(3)).uniform(1) != draw.uniform(1)[:3]).all()


def test_flips_and_crops_are_what_they_say() -> None:
    x, draw = np.random.default_rng(1).normal(size=(400, 1, 4, 4)), Draw(0, 1, "0", np.arange(400))
    before = x.copy()
    flipped, label = RandomFlip(0.25)((x, "y"), draw)
    np.testing.assert_array_equal(x, before)
    mirrored = [np.array_equal(a, b[..., ::-1]) for a, b in zip(flipped, x, strict=True)]
    assert label == "y"
    assert all(m or np.array_equal(a, b) for m, a, b in zip(mirrored, flipped, x, strict=True))
    assert 0.2 < np.mean(mirrored) < 0.3

    moved, _ = RandomCrop(1)((x, 0), draw)
    padded, seen = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), np.zeros((3, 3), int)
    for one, whole in zip(moved, padded, strict=True):
        seen += [[np.array_equal(one, whole[:, t : t + 4, s : s + 4]) for s in range(3)] for t in range(3)]
    assert seen.sum() == 400
    assert seen.min() > 25
    assert RandomCrop(1)(x[:0], Draw(0, 0, "0", np.arange(0))).shape == (0, 1, 4, 4)


def test_bad_augmentations() -> None:
    with pytest.raises(ConfigError, match=r"RandomFlip\(p=2\): a number between 0 and 1"):
        RandomFlip(2)
    with pytest.raises(ConfigError, match=r"RandomCrop\(padding=0\): a whole number of pixels, 1 or more"):
        RandomCrop(0)
    loader = DataLoader(ArrayDataset(np.ones((3, 2))), 3, augment=RandomFlip(), prefetch=0)
    with pytest.raises(
        DataError, match=r"wants images \(samples, channels, height, width\) first in a batch, got \(3, 2\)"
    ):
        next(iter(loader))
