"""The words of the house: a class name has one meaning, names are terms of the field, and prose names who acts."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import NAME, Package

PACKAGE = Package.of(Path(__file__).parents[1] / NAME)

TWICE = {
    "Constant": "first values of a parameter (nn.init), and a learning rate (optim.schedules)",
    "Linear": "a layer, and a learning rate (optim.schedules)",
}
"""Class names that users reach through two namespaces, as in PyTorch."""
HOUSE = {"again", "anew", "crew", "dog", "hand", "nobody", "plainly", "room", "said", "somebody", "soon", "told"}
"""No parts of a name: they say how a sentence goes on, not what a thing is."""
VAGUE = re.compile(r"\b(nobody|somebody|anybody|whoever|anew)\b", re.IGNORECASE)
"""No words of a docstring or a comment: a rank, a caller or an action does it, and the text can name it."""

UNCLEAR = re.compile(
    r"\b(?:that|those) of (?:that|those|these|it|which|them)\b"  # "that of those", "those of it"
    r"|\bof (?:each|all|both|some|any|one|none) of (?:which|those|it)\b"  # "of each of which"
    r"|\bof which (?:it|they)\b|\bthose of them\b|\bof those of\b|\bit = "
    r"|(?:^|[.:] |\n\n)"  # a sentence that begins with
    r"(?:Of (?:the|an?|all|its?|which|those|each|them|what|this|these|one|both|equals)\b"
    r"|Which (?:of|elements|ones)\b|The same,|That of\b|Those (?:of|that)\b)"
    r"|\A(?:Whether (?:it|they)|Its?|They|Theirs?|Both (?:in|on)|As many|What (?:it|they)|Where (?:it|they))\b"
)
"""Sentences of docstrings that only those understand who know the code: pronouns stand where the noun should."""


def classes(package: Package) -> dict[str, list[str]]:
    """Class name -> the files that define it."""
    found = defaultdict(list)
    for file in package.sources:
        for node in package.nodes(file):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file)
    return found


def names(package: Package, file: str) -> Iterator[tuple[int, str]]:
    """Line and name of all that a file defines: classes, functions, arguments, variables and attributes."""
    for node in package.nodes(file):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def parts(name: str) -> set[str]:
    """The words of a name: "_met_again" -> met, again; "SaidSo" -> said, so."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def house_words(package: Package) -> list[str]:
    found = ((file, line, name) for file in package.sources for line, name in names(package, file))
    return sorted({f"{file}:{line} {name}" for file, line, name in found if parts(name) & HOUSE})


def docstrings(package: Package, file: str) -> Iterator[tuple[int, str]]:
    """Line and text of all docstrings, also those of values, with one line for each paragraph."""
    for node in package.nodes(file):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            paragraphs = re.split(r"\n\s*\n", node.value.value)
            yield node.lineno, "\n\n".join(re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)


def unclear(package: Package) -> list[str]:
    return [
        f"{file}:{line} {text[max(0, found.start() - 20) : found.end() + 30]!r}"
        for file in package.sources
        for line, text in docstrings(package, file)
        for found in UNCLEAR.finditer(text)
    ]


def vague(package: Package) -> list[str]:
    found = []
    for file, source in package.sources.items():
        texts = list(docstrings(package, file))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        found += [f"{file}:{line} {word[0]}" for line, text in texts for word in VAGUE.finditer(text)]
    return found


def test_a_class_name_has_one_meaning() -> None:
    several = {name: files for name, files in classes(PACKAGE).items() if len(files) > 1}
    assert several.keys() == TWICE.keys(), several


def test_names_are_terms_of_the_field() -> None:
    assert house_words(PACKAGE) == []


def test_prose_names_who_acts() -> None:
    assert vague(PACKAGE) == []


# -- do the rules above see what they forbid? -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Told: pass", "a.py:1 Told"),
        ("def said_so(): pass", "a.py:1 said_so"),
        ("def f(\n    again, *, x): pass", "a.py:2 again"),
        ("def f(self):\n    self._room = 1", "a.py:2 _room"),
        ("for SOON in (): pass", "a.py:1 SOON"),
        ("with x as (told, y): pass", "a.py:1 told"),
        ("watchdog, against, handle, retold = x.said, 'told', 3, room(again)", None),
    ],
)
def test_house_words_are_found_where_they_are_defined(source: str, found: str | None) -> None:
    assert house_words(Package({"a.py": source})) == ([found] if found else [])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What nobody reads."""', ["a.py:1 nobody"]),
        ("def f():\n    'Whoever waits'\n    x = 1  # is made anew", ["a.py:2 Whoever", "a.py:3 anew"]),
        ("raise ValueError('nobody')", []),
    ],
)
def test_vague_words_are_found_in_prose_alone(source: str, found: list[str]) -> None:
    assert vague(Package({"a.py": source})) == found


def test_classes_of_one_name_are_found() -> None:
    two = Package({"a.py": "class A: pass", "b.py": "def f():\n    class A: pass", "c.py": "class B: pass"})
    assert classes(two) == {"A": ["a.py", "b.py"], "B": ["c.py"]}


def test_docstrings_name_their_subject() -> None:
    assert unclear(PACKAGE) == []


@pytest.mark.parametrize("text", ["Of the tree, those that it has.", "Keeps some.\n\nWhich of it this rank has."])
def test_an_unclear_docstring_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(f'def f():\n    """{text}"""\n')
    assert len(unclear(Package.of(tmp_path))) == 1
