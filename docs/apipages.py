"""Pages of the reference that are made when the documentation is built.

`docs/reference/*.md` declare what is documented, by autodoc directives in ```{eval-rst} blocks. Each class and function
gets a page in `docs/reference/api`, and each block becomes a table of links to these pages. Exceptions stay where they
are declared. `describe_commands` makes the options of the command line from its parsers."""

import argparse
import ast
import inspect
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = "reference/api"
BLOCK = re.compile(r"^```\{eval-rst\}\n(?P<body>.*?)^```\n|^## (?P<heading>[^\n]+)\n", re.S | re.M)
DIRECTIVE = re.compile(r"^\.\. auto(?P<kind>\w+):: (?P<name>[\w.]+)(?P<rest>.*\n(?:   .*\n)*)", re.M)


@dataclass(frozen=True)
class Entry:
    """A directive and where it is: kind such as "class", full name, text, page without .md, title of the section."""

    kind: str
    name: str
    text: str
    page: str
    section: str

    @property
    def owner(self) -> str:
        """The name whose page documents this: for methods and properties the class, "" for exceptions."""
        if self.kind == "exception":
            return ""
        return self.name.rpartition(".")[0] if self.kind in ("method", "property") else self.name

    @property
    def shown(self) -> str:
        """The name in tables and titles, as one writes it after `import fsdpx` or `from fsdpx import nn`."""
        first = 2 if self.kind in ("method", "property") else 1
        short = self.name.removeprefix("fsdpx.")
        if re.match(r"(core|ext|launch|plan\.\w+\.|testing\.\w+\.|\w+\.optimizer\.)", short):
            short = ".".join(short.split(".")[-first:])
        return f"{short}()" if self.kind in ("function", "method") else short

    @property
    def label(self) -> str:
        return make_label(self.page, self.section)


def make_label(page: str, section: str) -> str:
    return f"reference-{page}-" + re.sub(r"\W+", "-", section.lower())


def list_entries(page: str, text: str) -> Iterator[Entry]:
    """Yield what a page of the reference declares, in its order."""
    section = text.removeprefix("# ").partition("\n")[0]
    for block in BLOCK.finditer(text):
        section = block["heading"] or section
        for found in DIRECTIVE.finditer(block["body"] or ""):
            yield Entry(found["kind"], found["name"], found[0], page, section)


def read_entries(folder: Path) -> list[Entry]:
    return [entry for path in sorted(folder.glob("*.md")) for entry in list_entries(path.stem, path.read_text())]


def make_pages(entries: list[Entry]) -> dict[str, str]:
    """Return name -> text of each page of a class or function, in reStructuredText."""
    owned: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.kind in ("method", "property")):
        if entry.owner:
            owned.setdefault(entry.owner, []).append(entry)
    return {name: _make_page(some) for name, some in owned.items()}


def _make_page(entries: list[Entry]) -> str:
    own, *members = entries
    title = own.shown
    examples = ", ".join(f":ref:`{one.section} <{one.label}>`" for one in {one.label: one for one in entries}.values())
    lines = [":orphan:", "", title, "=" * len(title), "", f"Examples: {examples}.", "", own.text]
    section = ""
    for one in members:
        if one.section != section:
            section = one.section
            lines += [section, "-" * len(section), ""]
        lines.append(one.text)
    return "\n".join(lines)


def write_pages(folder: Path, pages: dict[str, str]) -> None:
    """Write pages that have changed, so that others are not built again, and remove those of former names."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.rst"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link_pages(page: str, text: str, escape: Any) -> str:
    """Return a page of the reference with a table instead of each block, and a label at each section. escape: makes
    reStructuredText of a line of a docstring."""
    if not list(list_entries(page, text)):
        return text

    def replace(block: re.Match[str]) -> str:
        if block["heading"]:
            return f"({make_label(page, block['heading'])})=\n{block[0]}"
        some = list(list_entries(page, block[0]))
        if not some or not some[0].owner:
            return block[0]
        rows = [f"   * - :py:obj:`{one.shown} <{one.name}>`\n     - {escape(summarize(one.name))}" for one in some]
        return "```{eval-rst}\n.. list-table::\n   :class: api\n   :widths: auto\n\n" + "\n".join(rows) + "\n```\n"

    return f"({make_label(page, text.removeprefix('# ').partition(chr(10))[0])})=\n" + BLOCK.sub(replace, text)


def summarize(name: str) -> str:
    """Return the first sentence of a docstring, or of the text below a variable."""
    found, owner = find(name)
    doc = inspect.getdoc(found) if callable(found) or isinstance(found, property) else ""
    paragraph = " ".join((doc or _read_variable_doc(owner, name)).partition("\n\n")[0].split())
    return re.split(r"(?<!\bal)(?<!\bvs)\.\s", paragraph)[0].rstrip(".:") + "."


def _read_variable_doc(module: Any, name: str) -> str:
    """Return the text below the variable of a module."""
    body = ast.parse(inspect.getsource(module)).body
    for before, after in itertools.pairwise(body):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
            if name.rpartition(".")[2] in [getattr(one, "id", "") for one in targets]:
                return str(after.value.value)
    raise ValueError(f"{name} has no docstring")


def list_links(entries: list[Entry]) -> dict[str, str]:
    """Return text of docstrings -> full name of what it refers to: names with their module, and classes without it."""
    found = {}
    for entry in entries:
        members = re.search(r":members:((?:.*\n?)(?:    .*\n)*)", entry.text)
        names = re.findall(r"\w+", members[1]) if members else []
        found |= {f"{entry.name}.{name}": f"{entry.name}.{name}" for name in names}
    shown = {entry.shown.removesuffix("()"): entry.name for entry in entries}
    classes = [entry.name for entry in entries if entry.kind in ("class", "exception")]
    short = [name.rpartition(".")[2] for name in classes]
    found |= {last: name for last, name in zip(short, classes, strict=True) if short.count(last) == 1}
    found |= {text: name for text, name in shown.items() if "." in text or text[0].isupper()}
    return found | {entry.name: entry.name for entry in entries}


def inherit_docstring(cls: Any, links: dict[str, str]) -> list[str]:
    """Return the docstring of the base class if that of the class begins with its name and it has no page."""
    base = cls.__mro__[1].__name__
    own = inspect.getdoc(cls) or ""
    inherits = own.startswith(f"`{base}`") and base not in links and "Parameters\n" not in own
    return ["", *(inspect.getdoc(cls.__mro__[1]) or "").splitlines(), ""] if inherits else []


def find(name: str) -> tuple[Any, Any]:
    """Return what a dotted name refers to, and the object that has it."""
    parts = name.split(".")
    for last in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:last]))
        except ImportError:
            continue
        for part in parts[last:-1]:
            owner = getattr(owner, part)
        return getattr(owner, parts[-1]), owner
    raise ImportError(name)


# -- the side bar ------------------------------------------------------------------------------------------------------


def make_side_bar(tree: str, group: str, entries: list[Entry], folder: str) -> str:
    """Return the side bar of the pages of classes and functions, from that of pages that are not in it.

    The pages are not in the side bar of all others, which would take most of the time of a build. group: the page that
    declares them. folder: where they are, from the page that shows this."""
    back = "../" if not folder else ""
    names = {entry.name: entry.shown for entry in entries if entry.page == group and entry.owner == entry.name}
    inner = "\n".join(
        f'{_ITEM.format(3)}{folder}{name}.html">{shown.rpartition(".")[2]}</a></li>' for name, shown in names.items()
    )
    index = f'{back}index.html">'
    tree = tree.replace(_ITEM.format(1) + index, _ITEM.format("1 current") + index)
    items = {
        f'{_ITEM.format(2)}{back}{group}.html">': f'{_ITEM.format("2 current")}{back}{group}.html">',
        _CURRENT: _CURRENT,
    }
    for item, marked in items.items():
        before, found, after = tree.partition(item)
        if found and names:
            title, _, rest = after.partition("</a></li>")
            return f"{before}{marked}{title}</a><ul>\n{inner}\n</ul>\n</li>{rest}"
    return tree


_ITEM = '<li class="toctree-l{}"><a class="reference internal" href="'
_CURRENT = '<li class="toctree-l2 current"><a class="current reference internal" href="#">'


# -- the command line --------------------------------------------------------------------------------------------------


def describe_commands() -> str:
    """Return a section for each group of commands, in Markdown: usage, options and example of each command."""
    from fsdpx import __main__ as command_line

    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "86"  # width of usages
    try:
        parsers = _subparsers(command_line.make_parser())
        lines = []
        for group, commands in command_line.GROUPS.items():
            lines += [f"## {group[0].upper()}{group[1:]}", ""]
            for name, command in commands.items():
                lines += [f"### fsdpx {name}", "", *_describe(parsers[name], command.help)]
                lines += ["For example:", "", f"```sh\n{command_line._format_example(command)}\n```", ""]
        return "\n".join(lines)
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _describe(parser: argparse.ArgumentParser, help: str) -> Iterator[str]:
    _load_options(parser)
    below = _subparsers(parser)
    yield from (_sentence(help), "")
    if not below:
        usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("\n       ", "\n")
        yield from ("```text", usage, "```", "")
        shown = [one for one in parser._actions if one.dest != "help" and one.help != argparse.SUPPRESS]
        if shown:
            yield from ("| option | meaning |", "|---|---|", *map(_describe_option, shown), "")
    for name, one in below.items():
        summary = next(a.help for p in parser._actions for a in getattr(p, "_choices_actions", ()) if a.dest == name)
        yield from (f"#### {parser.prog.removeprefix('python -m ')} {name}", "")
        yield from _describe(one, summary or "")


def _load_options(parser: Any) -> None:
    """Add the options of a command, which are added when it is parsed."""
    from fsdpx import __main__ as command_line

    options, parser._options = getattr(parser, "_options", None), None
    if options is not None:
        (command_line._import_command(options) if isinstance(options, str) else options)(parser)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _describe_option(action: argparse.Action) -> str:
    metavar = action.metavar or {int: "N", float: "X"}.get(action.type, action.dest.upper())  # type: ignore[call-overload]
    if action.choices is not None and action.metavar is None:
        metavar = f"{{{','.join(map(str, action.choices))}}}"
    value = "" if action.nargs == 0 else f" {metavar}"
    names = [f"`{one}`" for one in action.option_strings[:-1]]
    names.append(
        f"`{action.option_strings[-1]}{value}`" if action.option_strings else f"`{action.metavar or action.dest}`"
    )
    text = _mark_code((action.help or "") % {**vars(action), "prog": ""})
    text = re.sub(r"\bdocs: ([\w-]+)", r"[\1](../\1.md)", text)
    known = action.default not in (None, False, "", argparse.SUPPRESS, ())
    if known and action.nargs != 0 and "default" not in text:
        text = f"{text} (default: {action.default})".strip()
    return f"| {', '.join(names)} | {text.replace('|', chr(92) + '|')} |"


def _mark_code(text: str) -> str:
    """Return a help text with options and quoted commands as code."""
    parts = re.split(r"(`[^`]+`)", re.sub(r"\"([^\"]+)\"|'(-[^']+)'", lambda m: f"`{m[1] or m[2]}`", text))
    return "".join(
        part if part.startswith("`") else re.sub(r"(?<![\w-])--?[a-zA-Z][\w-]*", r"`\g<0>`", part) for part in parts
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
