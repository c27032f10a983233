"""What errors, help and pages tell a reader to do works: installs that some index serves, pages that there are."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import fsdpx
from fsdpx.errors import ConfigError, install_hint, page_hint
from fsdpx.ext.observe.plots import require_writable_picture

ROOT = Path(fsdpx.__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="there is no folder docs beside fsdpx")


def texts():
    """Each text of files of the library that name pages, pip or extras, and where it stands."""
    for path in sorted((ROOT / "fsdpx").rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if re.search(r"docs/|pip |fsdpx\[", source) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def read_extras() -> set[str]:
    """Not as the file is imported: an installed fsdpx has no pyproject.toml beside it."""
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_the_library_names_no_file_that_a_wheel_lacks_and_no_package_that_no_index_has() -> None:
    stray = re.compile(r"\bdocs/[\w-]+\.md|fsdpx\[\w+\]|pip install '?\"?fsdpx\b")
    assert [f"{where}: {found[0]}" for where, text in texts() if (found := stray.search(text))] == []


def test_hints_name_extras_and_pages_that_there_are() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "fsdpx").rglob("*.py"))
    calls = re.findall(r"install_hint\(([^)*:]*)\)", source)
    asked = [name for call in calls for name in re.findall(r"['\"](\w+)", call)]
    assert len(asked) > 10
    assert set(asked) - read_extras() == set()
    named = re.findall(r"page_hint\(['\"]([\w-]+)", source) + re.findall(r"\bdocs: ([\w-]+)", source)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "docs" / f"{name}.md").exists()] == []
    assert install_hint("plot") == "pip install '.[plot]' in the folder of fsdpx's sources"
    assert page_hint("fields") == "the page fields of the documentation"


def test_install_lines_of_pages_are_of_the_folder_of_fsdpx() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorial").glob("*.md")]:
        text = page.read_text()
        assert re.findall(r"pip install [\"']?fsdpx\b.*", text) == [], page
        asked = [name for line in re.findall(r"pip install [^\n`]*\.\[([\w,]+)\]", text) for name in line.split(",")]
        assert set(asked) - read_extras() == set(), page


def test_a_picture_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    require_writable_picture("--png", tmp_path / "step.png")
    with pytest.raises(ConfigError, match=r"^--png .*step\.xyz: xyz is no format of pictures; use .*png"):
        require_writable_picture("--png", tmp_path / "step.xyz")
    with pytest.raises(ConfigError, match=r"^--png .*: there is no folder .*none; make it first"):
        require_writable_picture("--png", tmp_path / "none" / "step.png")
