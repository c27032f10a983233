"""Terms of the glossary are links where they first stand on a page."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from amount import in_full

DOCS = Path(__file__).parents[2] / "docs"
core = pytest.importorskip("docutils.core")


TERMS: Any = pytest.importorskip("terms")
PLACES = TERMS.terms((DOCS / "glossary.md").read_text())


def linked(text: str) -> list[tuple[str, str]]:
    """What became a link, and where it leads."""
    page = core.publish_doctree(text)
    TERMS.link(page, PLACES, "glossary.html")
    nodes = page.findall(TERMS.nodes.reference)
    return [(node.astext(), node["refuri"].partition("#")[2]) for node in nodes if "term" in node["classes"]]


def test_the_first_mention_is_a_link_and_no_other() -> None:
    head, first = "Shards and axes\n===============", "A shard on two axes, a **replica**, ``chunk``; shards again."
    assert linked(f"{head}\n\n{first}\n\nDry runs of a chunk.") == [
        ("shard", "term-shard"), ("axes", "term-axis"), ("Dry runs", "term-dry-run"), ("chunk", "term-chunk")
    ]  # fmt: skip


def test_words_of_every_day_are_links_in_italics() -> None:
    assert linked("This page is read. A *page* is gathered, and *pages* again; *B* and *b*, *yes*.") == [
        ("page", "term-page"), ("B", "term-b")
    ]  # fmt: skip


def test_words_inside_of_others_and_of_names_are_none() -> None:
    assert linked("resharding, shard_bytes, multi-stage, fsdpx.nn.layer, a/host, layered") == []


def test_the_words_of_every_day_are_terms() -> None:
    assert sorted(set(PLACES) & TERMS.EVERYDAY) == sorted(TERMS.EVERYDAY)


@in_full
def test_the_built_pages_have_them() -> None:
    """In the folder of `make docs`: where that has been, only what has changed since is built again."""
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed)
    html = DOCS / "_build" / "html"
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(html)], check=True)
    places = set(re.findall(r'<strong id="(term-[\w-]+)"', (html / "glossary.html").read_text()))
    assert places == set(PLACES.values())
    counted = 0
    for source in DOCS.rglob("*.md"):
        page = (html / source.relative_to(DOCS)).with_suffix(".html").read_text()
        links = re.findall(r'class="term[^>]*href="[^"#]*glossary.html#(term-[\w-]+)"', page)
        assert len(links) == len(set(links)), source
        assert set(links) <= places, source
        counted += len(links)
    assert counted > 300
