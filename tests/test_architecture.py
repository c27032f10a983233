"""The page about the architecture names what there is: its paths exist, and every folder of the package is on it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="there is no docs/architecture.md")


def test_its_paths_exist() -> None:
    """Those of files, and of folders, which end in a slash, in the package and in the tests."""
    paths = {*re.findall(r"(?<![\w/.-])(?:fsdpx|tests)/(?:[\w.*-]+/)*(?:[\w*-]+\.\w+)?", PAGE.read_text())}
    paths -= {"fsdpx/", "tests/"}
    assert paths, "the page names no path at all"
    assert [path for path in sorted(paths) if not any(ROOT.glob(path))] == []


def test_what_it_names_is_where_it_says() -> None:
    """As in "`name` in `fsdpx/file.py`", which defines it."""
    named = re.findall(r"`([\w.]+)`(?: of [^`|;.]*| and [^`|;.]*)? in `(fsdpx/[\w/]+\.py)`", PAGE.read_text())
    defined = r"(?m)\b(?:def|class) {0}\b|^\s*(?:self\.)?{0}(?:, \w+)* *[:=]"
    strangers = [
        f"{name} in {path}"
        for name, path in named
        if not re.search(defined.format(re.escape(name.split(".")[-1])), (ROOT / path).read_text())
    ]
    assert strangers == []


def test_every_folder_is_on_it() -> None:
    parts = [file.parent for pattern in ("*", "core/*", "ext/*") for file in ROOT.glob(f"fsdpx/{pattern}/__init__.py")]
    folders = sorted(f"{part.relative_to(ROOT).as_posix()}/" for part in parts)
    assert [name for name in folders if name not in PAGE.read_text()] == []
