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
    """What a page says to be in a file, as in "`name` in `fsdpx/file.py`", and is not."""
    named = re.findall(r"`([\w.]+)`(?: of [^`|;.]*| and [^`|;.]*)? in `(fsdpx/[\w/]+\.py)`", text)
    return [f"{name} in {path}" for name, path in named if name.split(".")[-1] not in (root / path).read_text()]


@needs_page
def test_what_it_names_is_where_it_says() -> None:
    assert strangers(PAGE.read_text(), ROOT) == []


def test_what_is_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "fsdpx").mkdir()
    (tmp_path / "fsdpx" / "a.py").write_text("def here(): ...")
    text = "`A.here` in `fsdpx/a.py`, `gone` of the step in `fsdpx/a.py`; `here` and a method in `fsdpx/a.py`"
    assert strangers(text, tmp_path) == ["gone in fsdpx/a.py"]


@needs_page
def test_every_folder_is_on_it() -> None:
    assert unnamed(PAGE.read_text(), ROOT) == []


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    for name in ("fsdpx/nn/__init__.py", "fsdpx/core/comm/__init__.py", "fsdpx/nn/layer.py", "tests/nn/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    text = (
        "`fsdpx/nn/layer.py`, fsdpx/nn/gone.py, (tests/nn/test_a.py) and tests/nn/test_b.py; "
        "fsdpx/core/comm/, tests/gone/."
    )
    assert missing(text, tmp_path) == ["fsdpx/nn/gone.py", "tests/gone/", "tests/nn/test_b.py"]
    assert missing("docs/fsdpx/nn/gone.py, fsdpx/nn/*.py and https://x.org/tests/y.py", tmp_path) == []
    assert unnamed(text, tmp_path) == []
    assert unnamed("only `nn` and communication", tmp_path) == ["fsdpx/core/comm/", "fsdpx/nn/"]
    assert unnamed("| comm/ | fsdpx/core/comm/mesh.py", tmp_path) == ["fsdpx/nn/"]
