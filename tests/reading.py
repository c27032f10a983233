"""What the sources of a package say without being run: fields, lengths, what they open, the environment."""

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

NAME = "fsdpx"


def folder_of(file: str) -> str:
    """The part of the core or the extension that a file belongs to, "core/comm" or "data"; "" if it is in none."""
    first, *more = file.split("/")[:-1] or [""]
    return "/".join([first, *more[:1]]) if first in ("core", "ext") else first


def count_code_lines(source: str) -> int:
    """Return how many lines of a module hold code: no empty ones, comments or docstrings."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in texts for number, line in lines)


@dataclass(frozen=True)
class Package:
    """Sources by their path inside the package, "nn/layer.py"."""

    sources: Mapping[str, str]
    walked: dict[str, list[ast.AST]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Package":
        return cls({path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))})

    def nodes(self, file: str) -> list[ast.AST]:
        if file not in self.walked:
            self.walked[file] = list(ast.walk(ast.parse(self.sources[file], file)))
        return self.walked[file]

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
        """By folder of the core or extension; the files beside the folders together under ""."""
        found = Counter[str]()
        for file, source in self.sources.items():
            found[folder_of(file)] += len(source.splitlines())
        return found

    def fields(self) -> dict[str, set[str]]:
        """Of each class: names annotated in its body and names given to the object in its methods."""
        classes = [(file, n) for file in self.sources for n in self.nodes(file) if isinstance(n, ast.ClassDef)]
        return {f"{file}:{node.lineno} {node.name}": _fields(node) for file, node in classes}

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
        """Where a file opens files by itself, "ext/observe/html_page.py page open": the line of the first. What is read
        from a file that `files.open_file` has opened, `with open_file(path) as name: np.load(name)`, is none of
        these."""
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


def used_at_import(source: str, homes: Mapping[str, str]) -> set[str]:
    """The modules of fsdpx that a file imports when it is imported itself; what stands in functions is run later.

    homes: the module of each lazy name, "nn.Conv2d"."""
    found = set[str]()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {homes.get(f"{module.split('.')[-1]}.{one.name}", f"{module}.{one.name}") for one in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(homes.get(f"{node.value.id}.{node.attr}", ""))
        inside = (node.body,) if isinstance(node, ast.Lambda) else getattr(node, "body", ())
        later = inside if isinstance(node, ast.FunctionDef | ast.Lambda) else ()
        todo += [child for child in ast.iter_child_nodes(node) if child not in later]
    return {name for name in found if name.startswith(NAME)}


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
        return path or of in OPENED or getattr(function.value, "attr", "") == "_embed_image"
    return name in OPENERS or (name == "load" and of in LOADED) or (name == "save" and of in LOADED[:2])


READERS = ("environ", "environb", "getenv", "getenvb")


def _spread(node: ast.AST) -> list[ast.expr]:
    """The parts of a dict display that are taken over whole, `{**this}`, and what is copied, `dict(this)`."""
    if isinstance(node, ast.Dict):
        return [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
        return [*node.args, *(word.value for word in node.keywords if word.arg is None)]
    return []


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
