"""Terms of the glossary become links where they first stand on a page.

A term is a word in bold on the page glossary. Words that everyone uses, too, mean the term only where they are in
italics: write *page* where the flat array is meant."""

import re
from collections.abc import Iterable
from typing import Any

from docutils import nodes

EVERYDAY = set(
    "B I W action ahead board call constant cut data dispatch dropped edge feed fetch evict "
    "fragment free full gather generation grain group handle home inner join kept leaf lent level move payload "
    "outer owner page part partial pass persistent program record reduce round segments slot state store tensor tie "
    "twins unit window wire world".split()
)
"""Terms that are everyday words."""
LETTERS = {"B", "I", "W"}
BESIDE = (
    nodes.title, nodes.literal, nodes.literal_block, nodes.reference, nodes.raw, nodes.image, nodes.caption,
    nodes.strong, nodes.math,
)  # fmt: skip
"""Inside of these nothing becomes a link."""


def terms(glossary: str) -> dict[str, str]:
    """Term -> the name of its place on the page, from the page's text."""
    found = re.findall(r"\*\*([^*]+)\*\*", glossary)
    return {term: "term-" + re.sub(r"\W+", "-", term.lower()) for term in found}


def pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Any of these terms as a word, in the singular or the plural."""
    words = [word for name in names for word in forms(name)]
    return re.compile(rf"(?<![\w./-])({'|'.join(sorted(words, key=len, reverse=True))})(?![\w/-])", re.IGNORECASE)


def forms(name: str) -> list[str]:
    """A term in small letters, and its plural."""
    word = name.lower()
    return [word, f"{word[:-2]}es" if word.endswith("is") else f"{word}s"]


def link(page: nodes.document, places: dict[str, str], uri: str) -> list[str]:
    """Make links of the first mention of each term; which these are."""
    names = {form: name for name in places for form in forms(name)}
    plain = pattern(name for name in places if name not in EVERYDAY)
    linked: list[str] = []

    def term(word: str) -> str | None:
        name = names.get(word.lower())
        return None if name in linked or (name in LETTERS and name != word) else name

    def reference(name: str, inside: nodes.Node) -> nodes.reference:
        linked.append(name)
        return nodes.reference("", "", inside, refuri=f"{uri}#{places[name]}", internal=True, classes=["term"])

    for node in list(page.findall(nodes.emphasis)):
        if (name := term(node.astext())) and not _beside(node):
            node.parent.replace(node, reference(name, node.deepcopy()))
    for text in list(page.findall(nodes.Text)):
        if _beside(text) or not isinstance(text.parent, nodes.paragraph | nodes.emphasis):
            continue
        parts: list[nodes.Node] = []
        at, words = 0, text.astext()
        for found in plain.finditer(words):
            if name := term(found[1]):
                parts += [nodes.Text(words[at : found.start()]), reference(name, nodes.Text(found[1]))]
                at = found.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(words[at:])])
    return linked


def _beside(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, BESIDE) or node.tagname.startswith("desc"):
            return True
    return False


def on_page(app: Any, doctree: nodes.document, name: str) -> None:
    """For Sphinx's doctree-resolved."""
    places = terms((app.srcdir / "glossary.md").read_text())
    if name != "glossary":
        link(doctree, places, app.builder.get_relative_uri(name, "glossary"))
        return
    for node in doctree.findall(nodes.strong):
        if (place := places.pop(node.astext(), None)) is not None:
            node["ids"].append(place)
