"""The tables of the pages with figures, written from the JSON files in bench/results between marks.

    python bench/page.py

A mark `<!-- name: table -->` is followed by that table of NAME.json, up to `<!-- end -->`. `<!-- name: table of word
-->` shows only the rows that contain this word. `command` and `machine` come from the file itself.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from records import RESULTS, load

__all__ = ["PAGE", "PAGES", "render"]

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
PAGES = (PAGE, DOCS / "checkpoints.md", DOCS / "pytorch.md")
MARK = re.compile(r"(<!-- (\w+): ([\w ,.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str, folder: Path = RESULTS) -> str:
    """`text` with every marked table as the results have it; one without results says how to get them."""
    return MARK.sub(lambda found: f"{found[1]}{_content(found[2], found[3], folder)}{found[4]}", text)


def _content(name: str, title: str, folder: Path) -> str:
    found = load(name, folder)
    text = _text(name, title, found) if found else f"not measured yet: python bench/{name}.py"
    return f"```text\n{text}\n```\n" if text else ""


def _text(name: str, title: str, found: dict[str, Any]) -> str:
    if title in ("command", "machine"):
        return str(found[title])
    title, _, word = title.partition(" of ")
    head, *rows = dict(importlib.import_module(name).tables(found)).get(title, "").splitlines() or [""]
    return "\n".join([head, *(row for row in rows if not word or word in row.split())])


def main() -> int:
    for page in PAGES:
        page.write_text(render(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
