"""Code on a page fits its width."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md"]
PAGES += [page for at in ("", "tutorial", "reference") for page in sorted((ROOT / "docs" / at).glob("*.md"))]
WIDTH = 88
FENCE = re.compile(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1`*\s*$", re.S | re.M)
INCLUDED = re.compile(r"^```\{literalinclude\} (\S+)\n(.*?)^```", re.S | re.M)
WIDE = {
    "docs/benchmarks.md": "tables that `make bench` writes, and some of them on other machines",
    "docs/launching.md": "tables and one long error, as commands print them",
    "docs/parallelism.md": "tables with a column for each axis",
    "docs/schedules.md": "a line of a schedule is a rank, and must not be broken",
    "docs/planning.md": "a table that a command prints: memory by kind",
}
"""Pages whose `text` blocks may be wider -> why. Tables that `make bench` writes may be wide on every page."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def wide(page: Path) -> list[str]:
    """Lines of code above the width, with their number in the page."""
    text = page.read_text()
    found = []
    for block in FENCE.finditer(text):
        first = text[: block.start(3)].count("\n") + 1
        measured = text[: block.start()].endswith(" -->\n")  # the mark of a table that `make bench` writes
        if not (block[2] == "text" and (name(page) in WIDE or measured)):
            found += [f"{first + i}: {line}" for i, line in enumerate(block[3].splitlines()) if len(line) > WIDTH]
    return found


def included(page: Path) -> list[str]:
    """Lines above the width of the programs that a page includes, whole or one function or class of them."""
    found = []
    for name, options in INCLUDED.findall(page.read_text()):
        source = (page.parent / name).read_text()
        only = re.findall(r"^:pyobject: (\w+)$", options, re.M)
        parts = [node for node in ast.parse(source).body if getattr(node, "name", None) in only]
        assert len(parts) == len(only), (name, only)
        spans = [(node.lineno, node.end_lineno or 0) for node in parts] or [(1, source.count("\n"))]
        lines = enumerate(source.splitlines(), start=1)
        found += [f"{name}:{n}" for n, line in lines if len(line) > WIDTH and any(a <= n <= b for a, b in spans)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_fits_the_page(page: Path) -> None:
    assert wide(page) + included(page) == []


def test_pages_that_may_be_wide_are() -> None:
    for page, why in WIDE.items():
        blocks = [block[3] for block in FENCE.finditer((ROOT / page).read_text()) if block[2] == "text"]
        assert any(len(line) > WIDTH for block in blocks for line in block.splitlines()), (page, why)
