"""What the sources of a package say without being run: imports of every kind, fields, lengths, the environment."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

NAME = "fsdpx"
LOADERS = ("import_module", "__import__")


@dataclass(frozen=True)
class Package:
    """Sources by their path inside the package, "nn/layer.py"."""

    sources: Mapping[str, str]
    walked: dict[str, list[ast.AST]] = field(default_factory=dict)
    found: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Package":
        return cls({path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))})

    def nodes(self, file: str) -> list[ast.AST]:
        if file not in self.walked:
            self.walked[file] = list(ast.walk(ast.parse(self.sources[file], file)))
        return self.walked[file]

    @cached_property
    def modules(self) -> dict[str, str]:
        """Dotted name -> file."""
        return {_dotted(file): file for file in self.sources}

    @cached_property
    def door(self) -> dict[str, str]:
        """Names that `__init__.py` fetches from elsewhere -> the module that has them."""
        found: dict[str, str] = {}
        if "__init__.py" not in self.sources:
            return found
        for node in self.nodes("__init__.py"):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{NAME}."):
                found |= {alias.asname or alias.name: node.module for alias in node.names}
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if _text(key) in self.modules and isinstance(value, ast.Tuple):
                        found |= {str(_text(name)): str(_text(key)) for name in value.elts}
        return found

    def imports(self, file: str) -> set[str]:
        """Modules of the package that a file imports: lazily, for type checking, by name and through the door too."""
        if file not in self.found:
            self.found[file] = self._imports(file)
        return self.found[file]

    def _imports(self, file: str) -> set[str]:
        nodes, found = self.nodes(file), set[str]()
        known: dict[str, str] = {}  # local name -> the module it stands for
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == NAME:
                        known[alias.asname or NAME] = alias.name if alias.asname else NAME
                        found |= {self.module(alias.name)} - {NAME}
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, file)
                if base.split(".")[0] == NAME:
                    for alias in node.names:
                        target = self.module(f"{base}.{alias.name}")
                        found.add(target)
                        if target == f"{base}.{alias.name}":
                            known[alias.asname or alias.name] = target
        return found | set(self._used(nodes, known)) | set(self._loaded(nodes))

    def module(self, dotted: str) -> str:
        """The module that holds what `dotted` names; a name of the door belongs to the module it is fetched from."""
        parts = dotted.split(".")
        for length in range(len(parts), 1, -1):
            if ".".join(parts[:length]) in self.modules:
                return ".".join(parts[:length])
        if len(parts) > 1 and parts[1] in self.door:
            return self.door[parts[1]]
        return NAME

    def _used(self, nodes: list[ast.AST], known: Mapping[str, str]) -> Iterator[str]:
        """What attributes of imported modules lead to; the door itself where a name of it cannot be read."""
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if id(node) in inner:
                continue
            chain, base = list[str](), node
            while isinstance(base, ast.Attribute):
                chain.insert(0, base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in known and isinstance(base.ctx, ast.Load):
                yield self.module(".".join([known[base.id], *chain]))

    def _loaded(self, nodes: list[ast.AST]) -> Iterator[str]:
        """What is imported by its name as text: where it is no constant, all modules that the file has as text."""
        calls = [n for n in nodes if isinstance(n, ast.Call) and _called(n) in LOADERS]
        for call in calls:
            text = _text(call.args[0]) if call.args else None
            if text is not None:
                if text.split(".")[0] == NAME:
                    yield self.module(text)
                continue
            texts = [_text(n) for n in nodes]
            named = [text for text in texts if text in self.modules]
            yield from named or [NAME]  # it could be anything

    def circles(self) -> list[list[str]]:
        """Of each set of files that import, over others, each other: the shortest way from one back to itself."""
        arrows = {file: {self.modules.get(m, "__init__.py") for m in self.imports(file)} for file in self.sources}
        ahead = {file: _reached(arrows, file) for file in arrows}
        left = {file for file in arrows if file in ahead[file]}
        found = []
        while left:
            first = min(left)
            circle = {other for other in ahead[first] if first in ahead[other]}
            found.append(min((_way_home(arrows, file) for file in sorted(circle)), key=len))
            left -= circle
        return found

    def foreign(self, file: str) -> set[str]:
        """Top-level names of what a file imports from elsewhere."""
        found = set()
        for node in self.nodes(file):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(_absolute(node, file).split(".")[0])
        return found - {NAME}

    def lines(self) -> dict[str, int]:
        """By folder; the files beside the folders together under ""."""
        found: dict[str, int] = {}
        for file, source in self.sources.items():
            folder = file.split("/")[0] if "/" in file else ""
            found[folder] = found.get(folder, 0) + len(source.splitlines())
        return found

    def fields(self) -> dict[str, set[str]]:
        """Of each class: names annotated in its body and names given to the object in its methods."""
        found = {}
        for file in self.sources:
            for node in self.nodes(file):
                if isinstance(node, ast.ClassDef):
                    found[f"{file}:{node.lineno} {node.name}"] = _fields(node)
        return found

    def lengths(self) -> dict[str, int]:
        """Of each function: its lines without its docstring and without decorators."""
        found = {}
        for file in self.sources:
            for node in self.nodes(file):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    first = node.body[0]
                    said = ast.get_docstring(node, clean=False) is not None
                    spoken = (first.end_lineno or 0) - first.lineno + 1 if said else 0
                    found[f"{file}:{node.lineno} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1 - spoken
        return found

    def environment(self, file: str) -> list[str]:
        """Where a file reads variables of the environment; "whole" where it hands on all of them at once."""
        nodes = self.nodes(file)
        systems = {alias.asname or "os" for n in nodes if isinstance(n, ast.Import) for alias in n.names
                   if alias.name.split(".")[0] == "os"}  # fmt: skip
        found = []
        spread = {id(value) for n in nodes for value in _spread(n)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [f"{file}:{node.lineno} {a.name}" for a in node.names if a.name in READERS]
            elif isinstance(node, ast.Attribute) and node.attr in READERS and getattr(node.value, "id", "") in systems:
                what = "whole" if id(node) in spread else node.attr
                found.append(f"{file}:{node.lineno} {what}")
        return found

    def opened(self, file: str) -> dict[str, str]:
        """Where a file opens files by itself, "observe/page.py page open": the line of the first. What is read from a
        file that `files.open_file` has opened, `with open_file(path) as name: np.load(name)`, is none of these."""
        nodes, found = self.nodes(file), dict[str, str]()
        items = [item for n in nodes if isinstance(n, ast.With) for item in n.items]
        safe = set[str]()
        for item in items:
            call = item.context_expr
            if isinstance(call, ast.Call) and (_called(call) == "open_file" or _takes(call, safe)):
                safe.add(getattr(item.optional_vars, "id", ""))
        inside: dict[int, str] = {}
        for node in nodes:  # from the outside in
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside |= {id(inner): node.name for inner in ast.walk(node)}
        for node in nodes:
            if isinstance(node, ast.Call) and _opens(node) and not _takes(node, safe):
                where = f"{file} {inside.get(id(node), 'module')} {_called(node)}"
                found.setdefault(where, f"{where}, line {node.lineno}")
        return found


OPENERS = (
    "read_text", "read_bytes", "write_text", "write_bytes", "touch", "memmap", "fromfile", "tofile", "loadtxt",
    "genfromtxt", "open_memmap", "FileHandler", "mkfifo", "mkstemp", "NamedTemporaryFile",
)  # fmt: skip
"""Functions that open a file, by whatever they are called of."""
LOADED = ("np", "numpy", "json", "pickle", "tomllib")
OPENED = ("os", "io", "gzip", "bz2", "lzma", "tarfile", "zipfile", "codecs")


def _takes(node: ast.Call, names: set[str]) -> bool:
    """Whether one of the names is an argument of the call."""
    return any(getattr(one, "id", None) in names for one in [*node.args, *(word.value for word in node.keywords)])


def _opens(node: ast.Call) -> bool:
    """Whether a call opens a file. `open` of an object is taken for a path's if it has a mode or nothing in it."""
    name, function = _called(node), node.func
    if not isinstance(function, ast.Attribute):
        return name == "open" or name in OPENERS
    of = getattr(function.value, "id", "")
    if name == "open":
        path = not node.args or _text(node.args[0]) is not None
        return path or of in OPENED or getattr(function.value, "attr", "") == "_image"
    return name in OPENERS or (name == "load" and of in LOADED) or (name == "save" and of in LOADED[:2])


READERS = ("environ", "environb", "getenv", "getenvb")


def _spread(node: ast.AST) -> list[ast.expr]:
    """The parts of a dict display that are taken over whole, `{**this}`, and what is copied, `dict(this)`."""
    if isinstance(node, ast.Dict):
        return [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
        return [*node.args, *(word.value for word in node.keywords if word.arg is None)]
    return []


def _dotted(file: str) -> str:
    parts = [NAME, *file.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _absolute(node: ast.ImportFrom, file: str) -> str:
    """The module of a `from` import, relative ones worked out."""
    if node.level == 0:
        return node.module or ""
    here = [NAME, *file.split("/")[:-1]]
    return ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _reached(arrows: Mapping[str, set[str]], start: str) -> set[str]:
    """Files at the ends of ways of one arrow or more."""
    found, ahead = set[str](), [start]
    while ahead:
        for file in arrows.get(ahead.pop(), ()):
            if file not in found:
                found.add(file)
                ahead.append(file)
    return found


def _way_home(arrows: Mapping[str, set[str]], start: str) -> list[str]:
    """The shortest way from a file to itself, which there must be."""
    ways = [[start]]
    for way in ways:
        for file in sorted(arrows[way[-1]]):
            if file == start:
                return way
            if all(file not in other for other in ways):
                ways.append([*way, file])
    raise AssertionError(f"{start} is in no circle")


def _fields(node: ast.ClassDef) -> set[str]:
    found = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(getattr(d, "id", "") == "staticmethod" for d in method.decorator_list):
            continue
        arguments = [*method.args.posonlyargs, *method.args.args]
        own = arguments[0].arg if arguments else ""
        for n in ast.walk(method):
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and getattr(n.value, "id", "") == own:
                found.add(n.attr)
            elif isinstance(n, ast.Call) and _called(n) in ("__setattr__", "setattr") and len(n.args) == 3:
                name = _text(n.args[1])
                found |= {name} if name and getattr(n.args[0], "id", "") == own else set()
    return found
