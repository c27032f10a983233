"""How long the sentences of a page are: for its end note, and for the test that keeps them short."""

import re

__all__ = ["FENCE", "note", "sentences"]

FENCE = re.compile(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1`*\s*$", re.S | re.M)
WORD = re.compile(r"[\w'./-]+")
END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"(X])|(?<=[.!?])\s+")


def sentences(text: str) -> list[tuple[int, str]]:
    """Words and beginning of each sentence outside of code, tables and headings; a span of code is one word."""
    found = []
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("", text)):
        if paragraph.lstrip().startswith(("|", "<", "#")):
            continue
        for item in re.split(r"^\s*(?:[-*]|\d+\.)\s+", paragraph, flags=re.M):
            plain = re.sub(r"`[^`]*`", "X", re.sub(r"^#.*$", "", item, flags=re.M))
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
            found += [(len(WORD.findall(one)), one[:60]) for one in END.split(" ".join(plain.split())) if one]
    return [(words, begin) for words, begin in found if words]


def note(text: str) -> str:
    """The end note of a page; nothing where it has no sentence."""
    counts = [words for words, _ in sentences(text)]
    if not counts:
        return ""
    return f"Sentences of this page: {sum(counts) / len(counts):.0f} words in the mean, {max(counts)} at most."
