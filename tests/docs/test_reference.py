"""The reference shows each name and each option of it in a program that runs (test_docs.py runs it)."""

import ast
import importlib
import inspect
import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fsdpx
from fsdpx import data, nn, optim, testing
from fsdpx.__main__ import COMMANDS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = sorted(path for path in REFERENCE.glob("*.md") if path.name != "index.md")
FENCE = re.compile(r"^```(\{eval-rst\}|python)\n(.*?)^```|^#+ ([^\n]*)$", re.S | re.M)
DIRECTIVE = re.compile(
    r"^\.\. auto(?P<kind>[a-z]+):: (?P<name>[\w.]+)(?P<result>\(\))?\n"
    r"(?:   :members:(?P<members>.*\n(?:    .*\n)*))?",
    re.M,
)
apipages: Any = importlib.import_module("apipages")
INNER = {
    nn: "Container", optim: "ParamGroups LearningRate HyperparameterSpan ShardSegment get_learning_rate",
    data: "Dataset BatchShard", fsdpx: "", testing: "",
}  # fmt: skip
"""Names of `__all__` that the library itself needs from there: parts of a plan, and kinds of arguments."""


@dataclass
class Entry:
    """One directive: what it documents, which members of it, and whether readers make it themselves."""

    kind: str
    name: str
    result: bool
    members: list[str]
    thing: Any = field(repr=False)


@dataclass
class Section:
    """Directives of one block, and the programs that follow it."""

    entries: list[Entry]
    programs: list[ast.Module]

    def called(self, name: str) -> list[ast.Call]:
        return [node for node in self.nodes() if isinstance(node, ast.Call) and _last(node.func) == name]

    def nodes(self) -> list[ast.AST]:
        return [node for program in self.programs for node in ast.walk(program)]

    def named(self) -> set[str]:
        names = {_last(node) for node in self.nodes() if isinstance(node, ast.Name | ast.Attribute)}
        names |= {alias.name for node in self.nodes() if isinstance(node, ast.ImportFrom) for alias in node.names}
        return names | {node.name for node in self.nodes() if isinstance(node, ast.FunctionDef)}


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def public(thing: Any) -> list[str]:
    """What autodoc lists of a class: its own members with a docstring."""
    return [name for name, value in vars(thing).items() if not name.startswith("_") and getattr(value, "__doc__", None)]


@cache
def sections(page: Path) -> list[Section]:
    found: list[Section] = []
    for language, body, heading in FENCE.findall(page.read_text()):
        if heading:
            found.append(Section([], []))
        elif language == "python":
            found[-1].programs.append(ast.parse(body))
        else:
            if found[-1].programs:
                found.append(Section([], []))
            for kind, name, result, members in DIRECTIVE.findall(body):
                thing, _ = apipages.find(name)
                listed = re.split(r"[\s,]+", members.strip()) if members.strip() else public(thing) if members else []
                found[-1].entries.append(Entry(kind, name, bool(result), listed, thing))
    return [section for section in found if section.entries]


def options(function: Any) -> list[inspect.Parameter]:
    """What a function takes by name; of a class what its `__init__` does, or its fields where that says nothing."""
    function = getattr(function, "__func__", function)  # of a classmethod
    if isinstance(function, type):
        if issubclass(function, Enum | BaseException) or not inspect.isfunction(function.__init__):
            return []
        fields = getattr(function, "__dataclass_fields__", {})
        given = list(inspect.signature(function.__init__).parameters.values())
        if fields and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given[1:]):
            return [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY) for one in fields if not one.startswith("_")]
    else:
        given = list(inspect.signature(function).parameters.values()) if callable(function) else []
    return [p for p in given if p.name not in ("self", "cls") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def shown(section: Section, name: str, function: Any) -> set[str]:
    """The options of a function that the programs of a section give, by name or by place."""
    by_place = [p.name for p in options(function) if p.kind is not p.KEYWORD_ONLY]
    found = {keyword.arg for call in section.called("dict") for keyword in call.keywords if keyword.arg}
    for call in [*section.called(name), *(section.called("as_distributed") if name == "distribute" else ())]:
        found |= {keyword.arg for keyword in call.keywords if keyword.arg}
        found |= set(by_place[: len([a for a in call.args if not isinstance(a, ast.Starred)])])
    for node in section.nodes():
        if isinstance(node, ast.FunctionDef) and node.name == name:  # a method that readers define
            found |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return found


def wanting(page: Path) -> list[str]:
    """Names and options of a page without an example in their section."""
    found = []
    for section in sections(page):
        named, given = section.named(), set[str]()
        for entry in section.entries:
            given |= shown(section, entry.name.rpartition(".")[2], entry.thing)
        for entry in section.entries:
            last = entry.name.rpartition(".")[2]
            if entry.kind == "exception":
                if not named & {one.name.rpartition(".")[2] for one in section.entries}:
                    found.append(entry.name)
                continue
            if entry.result:
                if not named & (set(dir(entry.thing)) | set(getattr(entry.thing, "__dataclass_fields__", ())) | {last}):
                    found.append(entry.name)
            elif last not in named and not (last == "distribute" and "as_distributed" in named):
                found.append(entry.name)
            else:
                takes = options(entry.thing)[entry.name == "fsdpx.Trainer.fit" :]  # a function of a trainer
                found += [f"{entry.name}({p.name}=)" for p in takes if p.name not in given]
            alike = {o for m in entry.members for o in shown(section, m, inspect.getattr_static(entry.thing, m))}
            for member in entry.members:
                takes = options(inspect.getattr_static(entry.thing, member))
                if member not in named:
                    found.append(f"{entry.name}.{member}")
                else:  # what several methods take is shown once
                    found += [f"{entry.name}.{member}({p.name}=)" for p in takes if p.name not in alike]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_name_and_each_option_has_an_example(page: Path) -> None:
    assert wanting(page) == []


@pytest.mark.parametrize("module", INNER, ids=lambda module: module.__name__)
def test_public_names_are_in_the_reference(module: Any) -> None:
    known = {id(entry.thing) for page in PAGES for section in sections(page) for entry in section.entries}
    things = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    missing = [name for name, thing in things.items() if id(thing) not in known and not isinstance(thing, ModuleType)]
    assert sorted(missing) == sorted(INNER[module].split())


def test_each_class_and_function_has_a_page_with_its_methods() -> None:
    pages = apipages.make_pages(apipages.read_entries(REFERENCE))
    entries = [entry for page in PAGES for section in sections(page) for entry in section.entries]
    assert len({name.lower() for name in pages}) == len(pages)  # some file systems take both for one
    documented = {entry.name for entry in entries if entry.kind in ("class", "function", "data")}
    assert documented == set(pages)
    members = [entry.name for entry in entries if entry.kind in ("method", "property")]
    assert [name for name in members if f":: {name}\n" not in pages[name.rpartition(".")[0]]] == []


def test_the_pages_of_the_reference_link_what_they_declare() -> None:
    for page in PAGES:
        linked = apipages.link_pages(page.stem, page.read_text(), str)
        for section in sections(page):
            for entry in section.entries:
                written = f".. autoexception:: {entry.name}" if entry.kind == "exception" else f" <{entry.name}>`"
                assert written in linked
    assert apipages.summarize("fsdpx.nn.Linear").endswith((".", ")"))


def test_the_page_of_the_command_line_has_each_command_and_option() -> None:
    text = apipages.describe_commands()
    for name, command in COMMANDS.items():
        assert f"### fsdpx {name}\n\n{command.help[0].upper()}" in text
    parts = "`--max-restarts N`", "`--np`", "#### fsdpx ckpt convert\n", "](../elastic.md)", "`--backend {mpi,gloo}`"
    assert [part for part in parts if part not in text] == []
    assert "% commands\n" in (REFERENCE / "command-line.md").read_text()
