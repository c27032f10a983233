"""The floors of the house: each imports only what lies below it, and `import fsdpx` loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fsdpx"
GROUND = {"fsdpx.errors", "fsdpx.config", "fsdpx.version", "fsdpx.environment"}
BELOW_STATE = {"array", "comm", "nn", "layout", "program", "optim"}
ALLOWED = {
    "array": set(),
    "comm": {"array"},
    "nn": {"array", "comm"},
    "layout": {"array", "comm", "nn"},
    "program": set(),
    "optim": {"array"},
    "data": {"array"},
    "state": BELOW_STATE | {"engine", "trainer"},
    "engine": BELOW_STATE | {"state", "watch", "trainer"},
    "watch": {"comm"},
    "checkpoint": BELOW_STATE | {"state", "engine"},
    "trainer": BELOW_STATE | {"state", "engine", "watch", "checkpoint"},
    "elastic": BELOW_STATE | {"state", "engine", "watch", "checkpoint", "trainer"},
    "facade": BELOW_STATE | {"state", "engine", "watch", "checkpoint", "trainer", "elastic"},
    "examples": BELOW_STATE | {"data", "trainer", "testing"},
    "testing": {"array", "comm", "nn", "optim"},
}


def imports(file: Path) -> set[str]:
    """Modules of this package that a file imports, at any depth, except for type checking only."""
    found: set[str] = set()
    for node in _runtime_nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("fsdpx")}


def _runtime_nodes(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        nodes += [child, *_runtime_nodes(child)]
    return nodes


@pytest.mark.parametrize("floor", ALLOWED)
def test_a_floor_imports_only_what_is_below(floor: str) -> None:
    wrong = []
    for file in (PACKAGE / floor).rglob("*.py"):
        for name in imports(file):
            below = any(
                name == f"fsdpx.{room}" or name.startswith(f"fsdpx.{room}.") for room in {floor, *ALLOWED[floor]}
            )
            ground = any(name == g or name.startswith(f"{g}.") for g in GROUND) or name.startswith("fsdpx.environment")
            door = name.removeprefix("fsdpx") == "" or name == "fsdpx.environment"
            facade = floor in ("examples", "testing", "nn") and name.count(".") <= 1
            if not (below or ground or door or facade):
                wrong.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_program_needs_the_standard_library_only() -> None:
    for file in (PACKAGE / "program").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                top = module.split(".")[0]
                assert module.startswith("fsdpx.program") or module == "fsdpx.errors" or top in sys.stdlib_module_names


def test_the_ground_imports_nothing() -> None:
    assert imports(PACKAGE / "errors.py") == set()
    assert {i.rsplit(".", 1)[0] for i in imports(PACKAGE / "config.py")} <= {"fsdpx.errors"}


def test_every_folder_is_on_a_floor() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ALLOWED) | {"launch"}


@pytest.mark.parametrize("statement", ["import fsdpx", "from fsdpx import nn, optim, data", "import fsdpx.comm"])
def test_import_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in ('mpi4py', 'numba', 'cupy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_file_reads_the_environment() -> None:
    readers = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if any(word in file.read_text() for word in ("os.environ", "os.getenv"))
    }
    assert {name for name in readers if not name.startswith("launch/")} == {"environment.py"}


def test_public_names_are_all_there() -> None:
    import fsdpx

    for name in fsdpx.__all__:
        assert getattr(fsdpx, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fsdpx.nothing  # noqa: B018
