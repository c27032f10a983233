"""The page about the architecture names what there is: its paths exist, and every folder of the package is on it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
needs_page = pytest.mark.skipif(not PAGE.exists(), reason="there is no docs/architecture.md")


def paths(text: str) -> list[str]:
    """What a page names in the package and in the tests: files, and folders that end in a slash."""
    found = re.findall(r"(?<![\w/.-])(?:fsdpx|tests)/(?:[\w.*-]+/)*(?:[\w*-]+\.\w+)?", text)
    return sorted({path for path in found if path not in ("fsdpx/", "tests/")})


def missing(text: str, root: Path) -> list[str]:
    return [path for path in paths(text) if not any(root.glob(path))]


def unnamed(text: str, root: Path) -> list[str]:
    """Folders of the package that have no path on the page."""
    parts = [file.parent for pattern in ("*", "core/*", "ext/*") for file in root.glob(f"fsdpx/{pattern}/__init__.py")]
    folders = sorted(f"{part.relative_to(root).as_posix()}/" for part in parts)
    return [name for name in folders if name not in text]


@needs_page
def test_its_paths_exist() -> None:
    text = PAGE.read_text()
    assert paths(text), "the page names no path at all"
    assert missing(text, ROOT) == []


def strangers(text: str, root: Path) -> list[str]:
    """What a page says to be in a file, as in "`name` in `fsdpx/file.py`", and is not defined there."""
    named = re.findall(r"`([\w.]+)`(?: of [^`|;.]*| and [^`|;.]*)? in `(fsdpx/[\w/]+\.py)`", text)
    defined = r"(?m)\b(?:def|class) {0}\b|^\s*(?:self\.)?{0}(?:, \w+)* *[:=]"
    return [
        f"{name} in {path}"
        for name, path in named
        if not re.search(defined.format(re.escape(name.split(".")[-1])), (root / path).read_text())
    ]


@needs_page
def test_what_it_names_is_where_it_says() -> None:
    assert strangers(PAGE.read_text(), ROOT) == []


@needs_page
def test_every_folder_is_on_it() -> None:
    assert unnamed(PAGE.read_text(), ROOT) == []
