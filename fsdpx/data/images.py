"""Images in folders, one folder per class, read by Pillow."""

import importlib
import os
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fsdpx.errors import ConfigError, DataError
from fsdpx.files import open_file

__all__ = ["ImageFolder"]

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
PROGRAMS = {"EPS"}
"""Formats that are programs, which Pillow has another program run, whatever the name of the file."""


class ImageFolder:
    """Images below `root/<class>/`: sample i is `x (channels, height, width)`, float32 from 0 to 1, and the number of
    its class, int64, in the sorted order of the folders' names. Needs Pillow: `pip install 'fsdpx[images]'`.

    Images of other sizes than `size` are scaled until they just cover it (bilinear, as in torchvision's `Resize`), and
    what is too much is cut off evenly on both sides. Grey of 16 bits is divided by 65535. DataError for pixels of which
    no scale is known (whole numbers of 32 bits, floats), for a folder without classes or images, and for a file that is
    no image, with its name.

    Parameters
    ----------
    root : a folder of folders; images may lie deeper. Hidden names are left out
    size : height and width of the samples, one number for both or a pair; None: as they are, all of one size
    mode : "RGB" (3 channels) or "L" (grey, 1 channel)
    suffixes : of the files that are read, in small letters
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: int | tuple[int, int] | None = None,
        *,
        mode: Literal["RGB", "L"] = "RGB",
        suffixes: Sequence[str] = SUFFIXES,
    ) -> None:
        if mode not in ("RGB", "L"):
            raise ConfigError(f"ImageFolder(mode={mode!r}): choose one of RGB, L")
        self.root, self.mode, self.size = Path(root), mode, None if size is None else _pair(size)
        self._image: Any = _pillow()
        known = self._image.registered_extensions()
        self._formats = sorted({known[end] for end in (*SUFFIXES, *suffixes) if end in known} - PROGRAMS)
        if not self.root.is_dir():
            raise DataError(f"ImageFolder: {self.root} is no folder (looked from {Path.cwd()})")
        folders = sorted(f for f in self.root.iterdir() if f.is_dir() and not f.name.startswith("."))
        if not folders:
            raise DataError(f"ImageFolder: {self.root} has no folders: there must be one for each class")
        self.classes = tuple(folder.name for folder in folders)
        found = [(file, n) for n, folder in enumerate(folders) for file in _images(folder, tuple(suffixes))]
        if not found:
            raise DataError(f"ImageFolder: no images below {self.root}: no file of {', '.join(suffixes)}")
        self.files = tuple(file for file, _ in found)
        self.targets = np.array([n for _, n in found], np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._read(self.files[i]), self.targets[i]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images at `indices` `(k,)`, `(k, channels, height, width)`, and their classes; k may be 0."""
        images = [self._read(self.files[int(i)]) for i in indices]
        first = images[0] if images else self._read(self.files[0])
        for i, image in zip(indices, images, strict=True):
            if image.shape != first.shape:
                raise DataError(
                    f"ImageFolder: {self.files[int(i)]} is {_size(image)} pixels, {self.files[int(indices[0])]} "
                    f"{_size(first)}: pass ImageFolder(size=...)"
                )
        stacked = np.stack(images) if images else np.empty((0, *first.shape), first.dtype)
        return stacked, self.targets[indices]

    def _read(self, file: Path) -> np.ndarray:
        try:
            with open_file(file, ours=False) as raw, self._image.open(raw, formats=self._formats) as opened:
                kind = opened.mode
                image = self._grey(opened) if kind.startswith("I;16") else opened.convert(self.mode)
        except (OSError, SyntaxError, ValueError, self._image.DecompressionBombError) as error:
            raise DataError(f"ImageFolder: {file} cannot be read as an image: {error}") from error
        if kind in ("I", "F"):
            words = "whole numbers of 32 bits" if kind == "I" else "floats"
            raise DataError(f"ImageFolder: {file} has {words} as pixels, of which no scale is known: save 8 or 16 bits")
        if self.size is not None and image.size != self.size[::-1]:
            image = self._fitted(image, *self.size)
        pixels = np.asarray(image).reshape(image.size[1], image.size[0], -1).transpose(2, 0, 1)
        if image.mode == "F" and self.mode == "RGB":
            pixels = np.repeat(pixels, 3, axis=0)
        return np.ascontiguousarray(pixels).astype(np.float32) / np.float32(65535 if image.mode == "F" else 255)

    def _grey(self, opened: Any) -> Any:
        """An image of 16 bits as floats, which Pillow scales; it would cut them off at 255."""
        return self._image.fromarray(np.asarray(opened).astype(np.float32))

    def _fitted(self, image: Any, height: int, width: int) -> Any:
        scale = max(height / image.size[1], width / image.size[0])
        w, h = max(round(image.size[0] * scale), width), max(round(image.size[1] * scale), height)
        left, top = (w - width) // 2, (h - height) // 2
        resized = image.resize((w, h), self._image.Resampling.BILINEAR)
        return resized.crop((left, top, left + width, top + height))

    def __repr__(self) -> str:
        return f"ImageFolder({len(self)} images of {len(self.classes)} classes, size={self.size}, {self.mode})"


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("ImageFolder reads images with Pillow: pip install 'fsdpx[images]'") from error


def _pair(size: Any) -> tuple[int, int]:
    both = (size, size) if hasattr(size, "__index__") else size
    if not isinstance(both, tuple | list) or len(both) != 2 or not all(_positive(side) for side in both):
        raise ConfigError(f"ImageFolder(size={size!r}): one whole number of pixels or two, 1 or more, are needed")
    return index(both[0]), index(both[1])


def _positive(side: Any) -> bool:
    return hasattr(side, "__index__") and not isinstance(side, bool) and index(side) >= 1


def _images(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for path, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        found += [Path(path, f) for f in files if f.lower().endswith(suffixes) and not f.startswith(".")]
    return sorted(found, key=lambda f: f.relative_to(folder).as_posix())


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]} x {image.shape[2]}"
