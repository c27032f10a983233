"""docs/terms.py makes links of terms where they first stand on a page."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
core = pytest.importorskip("docutils.core")


TERMS = pytest.importorskip("terms")
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
